"""Steps by torch's own flash kernels, piece by piece: plain scores, and `Blocks` for pieces of no regular shape.

These kernels round the output of every piece to the dtype of q, and gradients too: one rounding of each term of a sum,
which is more than kernels that keep fp32 from piece to piece.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fused_tp.attention.kernels.reference import BLOCKS
from fused_tp.attention.kernels.tiles import Piece, Shape, pieces
from fused_tp.attention.plan import Step
from fused_tp.attention.scores import Scores
from fused_tp.attention.softmax import SoftmaxState

CUDA_MAX_HEAD_DIM = 256


class TorchFlash(ABC):
    """What torch's flash kernels have in common: [B, H, S, D], one head_dim for q, k and v (zeros that are appended
    change no score and give columns that are cut off again), and a causal mask that starts at the first key."""

    name: str
    multiple = 1  # of which a head_dim must be

    def forward(
        self,
        step: Step,
        scores: Scores,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: SoftmaxState,
        *,
        fresh: bool = False,
    ) -> None:
        if fresh:
            state.clear()
        for piece in pieces(step):
            rows, keys = _slices(piece)
            part = state.rows(piece.q_start, piece.q_stop)
            if piece.shape is Shape.MASKED:
                BLOCKS.forward(_part(step, piece), scores, q[:, rows], k[:, keys], v[:, keys], part)
                continue
            turn = _turner(piece)
            queries, keys_, values = (self._ready(turn(x), q, v) for x in (q[:, rows], k[:, keys], v[:, keys]))
            out, lse = self._forward(queries, keys_, values, piece.shape is not Shape.FULL, scores.scale)
            out, lse = turn(out[..., : v.shape[-1]].transpose(1, 2)), turn(lse.transpose(1, 2)).transpose(1, 2)
            part.add(out, lse)

    def alone(
        self, step: Step, scores: Scores, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        shapes = {piece.shape for piece in pieces(step)}
        if sinks is not None or len(pieces(step)) > 1 or not shapes <= {Shape.FULL, Shape.LOWER}:
            return None
        queries, keys, values = (self._ready(x, q, v) for x in (q, k, v))
        out, lse = self._forward(queries, keys, values, Shape.LOWER in shapes, scores.scale)
        return out[..., : v.shape[-1]].transpose(1, 2).contiguous(), lse.contiguous()

    def backward(
        self,
        step: Step,
        scores: Scores,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        sums: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        d_slopes: Tensor | None,
        out: Tensor,
    ) -> None:
        """The kernels make `sums` themselves, from grad_out and out: so lse must have had no gradient."""
        for piece in pieces(step):
            rows, keys = _slices(piece)
            if piece.shape is Shape.MASKED:
                BLOCKS.backward(
                    _part(step, piece),
                    scores,
                    grad_out[:, rows],
                    q[:, rows],
                    k[:, keys],
                    v[:, keys],
                    lse[..., rows],
                    sums[..., rows],
                    dq[:, rows],
                    dk[:, keys],
                    dv[:, keys],
                    None,
                    out[:, rows],
                )
                continue
            turn = _turner(piece)
            given = [x[:, rows] for x in (grad_out, q)] + [x[:, keys] for x in (k, v)] + [out[:, rows]]
            arguments: list[Any] = [self._ready(turn(x), q, v) for x in given]
            arguments.append(turn(lse[..., rows].transpose(1, 2)).transpose(1, 2))
            arguments += [piece.shape is not Shape.FULL, scores.scale]
            grads = self._backward(*arguments)
            for total, term in zip((dq[:, rows], dk[:, keys], dv[:, keys]), grads, strict=True):
                total += turn(term[..., : total.shape[-1]].transpose(1, 2))

    def _ready(self, x: Tensor, q: Tensor, v: Tensor) -> Tensor:
        """[B, S, H, D] as [B, H, S, the head_dim of the kernel]."""
        width = -(-max(q.shape[-1], v.shape[-1]) // self.multiple) * self.multiple
        x = x.transpose(1, 2)
        return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))

    @abstractmethod
    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """(out, lse [B, H, S])."""

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
        """(dq, dk, dv)."""


def _slices(piece: Piece) -> tuple[slice, slice]:
    return slice(piece.q_start, piece.q_stop), slice(piece.k_start, piece.k_stop)


def _part(step: Step, piece: Piece) -> Step:
    return step.part(piece.q_start, piece.q_stop, piece.k_start, piece.k_stop)


def _turner(piece: Piece) -> Callable[[Tensor], Tensor]:
    """Reverses the order of tokens, dim 1, where that makes a lower triangle of the piece."""
    return (lambda x: x.flip(1)) if piece.shape is Shape.UPPER else (lambda x: x)


class TorchCpuFlash(TorchFlash):
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


class TorchCudaFlash(TorchFlash):
    """The FlashAttention-2 that comes with torch: float16 and bfloat16, head_dim up to CUDA_MAX_HEAD_DIM."""

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
        with _deterministic():  # it would add to dq in the order of arrival
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


@contextmanager
def _deterministic() -> Iterator[None]:
    """torch's choice of deterministic kernels, for what is launched inside."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


TORCH_CPU = TorchCpuFlash()
TORCH_CUDA = TorchCudaFlash()
