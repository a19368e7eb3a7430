"""Who computes one step of ring attention: a seam between the ring and the kernels.

A provider takes heads-first views q [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] of any strides (last dim 1),
Sq, Sk >= 1, H a multiple of Hkv: query head h reads key head h // (H / Hkv), and K/V are never repeated in memory. It
returns the softmax over these keys alone, and its log-sum-exp; the ring merges steps. `causal` comes with Sq = Sk only.

The backward gets the output and log-sum-exp over *all* keys, so that exp(scores - lse) are the final probabilities and
sum(grad_out * out) the final row sums: then what it returns are exact terms of the sums over steps (Dao et al.,
FlashAttention, arXiv:2205.14135, section 3.1; Liu et al., Ring Attention, arXiv:2310.01889).

`out` may come in fp32 from kernels that can write it; torch's kernels round it to the input dtype. That is one rounding
of each term of a convex combination, so it does not grow with the number of steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from fused_tp.transport.base import accumulate_dtype

_CUDA_FLASH_MAX_HEAD_DIM = 256
_MATH_ROWS = 1024  # queries that the math provider takes at once: bounds its memory to Sk * 1024 scores per head


class AttentionProvider(Protocol):
    """Computes one step; see the module."""

    name: str

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """(out [B, H, Sq, Dv], lse [B, H, Sq] in fp32, or fp64 for fp64), in memory of their own."""
        ...

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This step's terms of dq, dk, dv, in the shapes of q, k, v."""
        ...


def choose_provider(
    device_type: str, dtype: torch.dtype, head_dim: int, v_head_dim: int
) -> tuple[AttentionProvider, str]:
    """The fastest provider for such tensors, and why it is that one."""
    if device_type == "cpu":
        return TORCH_CPU, "torch's flash attention for CPUs takes every dtype and head_dim"
    if device_type != "cuda":
        return MATH, f"there is flash attention for cpu and cuda only, not for {device_type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return MATH, f"FlashAttention takes float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if max(head_dim, v_head_dim) > _CUDA_FLASH_MAX_HEAD_DIM:
        return MATH, f"FlashAttention takes a head_dim of at most {_CUDA_FLASH_MAX_HEAD_DIM}"
    return TORCH_CUDA, f"FlashAttention takes float16 and bfloat16 with a head_dim up to {_CUDA_FLASH_MAX_HEAD_DIM}"


def provider_for(q: Tensor, v: Tensor) -> AttentionProvider:
    """The fastest provider for such tensors (any layout whose last dim is head_dim)."""
    return choose_provider(q.device.type, q.dtype, q.shape[-1], v.shape[-1])[0]


class _OneHeadDim(ABC):
    """What torch's flash kernels have in common: one head_dim for q, k and v. Zeros that are appended change no score
    and give columns of the result that are cut off again."""

    name: str
    multiple = 1

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        width = self._width(q, v)
        out, lse = self._forward(_pad(q, width), _pad(k, width), _pad(v, width), causal, scale)
        return out[..., : v.shape[-1]], lse

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        width = self._width(q, v)
        grad_out, out = _pad(grad_out, width), _pad(out, width)
        padded_q, padded_k, padded_v = _pad(q, width), _pad(k, width), _pad(v, width)
        dq, dk, dv = self._backward(grad_out, padded_q, padded_k, padded_v, out, lse, causal, scale)
        return dq[..., : q.shape[-1]], dk[..., : q.shape[-1]], dv[..., : v.shape[-1]]

    def _width(self, q: Tensor, v: Tensor) -> int:
        return -(-max(q.shape[-1], v.shape[-1]) // self.multiple) * self.multiple

    @abstractmethod
    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """`forward` for one head_dim, a multiple of `multiple`."""

    @abstractmethod
    def _backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`backward` for one head_dim, a multiple of `multiple`."""


def _pad(t: Tensor, width: int) -> Tensor:
    return t if t.shape[-1] == width else pad(t, (0, width - t.shape[-1]))


class TorchCpuFlash(_OneHeadDim):
    """torch's flash attention for CPUs: float16, bfloat16, float32, float64, and GQA without repeated keys."""

    name = "torch-cpu"

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out, lse

    def _backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, causal, scale=scale
        )
        return dq, dk, dv


class TorchCudaFlash(_OneHeadDim):
    """The FlashAttention-2 that comes with torch: float16 and bfloat16, head_dim up to 256."""

    name = "torch-cuda"
    multiple = 8

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse

    def _backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Without dropout no random numbers are drawn, so the state that the forward returned need not be kept.
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)
        offset = torch.empty((), dtype=torch.uint64, device=q.device)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad_out,
            q,
            k,
            v,
            out,
            lse.contiguous(),
            None,  # cumulative lengths of packed sequences: there are none
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            causal,
            seed,
            offset,
            scale=scale,
        )
        return dq, dk, dv


class Math:
    """Plain matmuls in fp32 (fp64 for fp64), a block of queries at a time: every device and dtype, and slow."""

    name = "math"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        dtype = accumulate_dtype(q.dtype)
        k, v = k.to(dtype).unsqueeze(2), v.to(dtype).unsqueeze(2)
        outs, lses = [], []
        for start in range(0, q.shape[2], _MATH_ROWS):
            scores = _scores(_grouped(q, k, start), k, start, causal, scale)
            lse = scores.logsumexp(-1)
            outs.append(torch.exp(scores - lse.unsqueeze(-1)) @ v)
            lses.append(lse)
        return torch.cat(outs, 3).flatten(1, 2), torch.cat(lses, 3).flatten(1, 2)

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = accumulate_dtype(q.dtype)
        k, v = k.to(dtype).unsqueeze(2), v.to(dtype).unsqueeze(2)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        dqs = []
        for start in range(0, q.shape[2], _MATH_ROWS):
            q_block, g_block, o_block = (_grouped(t, k, start) for t in (q, grad_out, out))
            lse_block = lse.unflatten(1, (k.shape[1], -1))[:, :, :, start : start + _MATH_ROWS]
            p = torch.exp(_scores(q_block, k, start, causal, scale) - lse_block.unsqueeze(-1))
            delta = (g_block * o_block).sum(-1, keepdim=True)
            ds = p * (g_block @ v.mT - delta) * scale
            dqs.append(ds @ k)
            dk += (ds.mT @ q_block).sum(2, keepdim=True)
            dv += (p.mT @ g_block).sum(2, keepdim=True)
        return torch.cat(dqs, 3).flatten(1, 2), dk.squeeze(2), dv.squeeze(2)


def _grouped(t: Tensor, k: Tensor, start: int) -> Tensor:
    """Rows [start, start + _MATH_ROWS) of `t` as [B, Hkv, heads per key head, rows, D] in the dtype of `k`."""
    return t[:, :, start : start + _MATH_ROWS].to(k.dtype).unflatten(1, (k.shape[1], -1))


def _scores(q: Tensor, k: Tensor, start: int, causal: bool, scale: float) -> Tensor:
    scores = q @ k.mT * scale
    if causal:
        rows = torch.arange(start, start + q.shape[-2], device=q.device)
        columns = torch.arange(k.shape[-2], device=q.device)
        scores = scores.masked_fill(columns > rows[:, None], -torch.inf)
    return scores


TORCH_CPU = TorchCpuFlash()
TORCH_CUDA = TorchCudaFlash()
MATH = Math()
