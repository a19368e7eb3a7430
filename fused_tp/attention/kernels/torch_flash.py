"""Steps by torch's own flash kernels, tile by tile: plain scores, and `Reference` for tiles of irregular shape.

These kernels round the output of every tile to the dtype of q, and gradients too: one rounding of each term of a sum,
which is more than kernels that keep fp32 from tile to tile.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import pad

from fused_tp.attention.kernels.base import AttentionKernel, KernelQuery, Saved, Sums
from fused_tp.attention.kernels.reference import REFERENCE
from fused_tp.attention.kernels.tiles import Shape, Tile, tiles
from fused_tp.attention.plan import Step
from fused_tp.attention.softmax import SoftmaxState
from fused_tp.attention.spec import Scores
from fused_tp.runtime.availability import AVAILABLE, Availability, unavailable

_CUDA_MAX_HEAD_DIM = 256


def plain_enough(query: KernelQuery) -> Availability:
    """Whether torch's flash kernels have such scores."""
    if not query.plain:
        return unavailable("torch's kernels know no softcap, ALiBi and dropout by position")
    if not query.positive_scale:
        return unavailable("torch's kernels mask scores before they scale them, which takes a scale above 0")
    return unavailable("torch's kernels take no gradient of the log-sum-exp") if query.grad_lse else AVAILABLE


class TorchFlash(AttentionKernel):
    """What torch's flash kernels have in common: [B, H, S, D], one head_dim for q, k and v (zeros that are appended
    change no score and give columns that are cut off again), and a causal mask that starts at the first key."""

    multiple = 1  # of which a head_dim must be

    def forward(
        self, step: Step, scores: Scores, q: Tensor, k: Tensor, v: Tensor, state: SoftmaxState, *, fresh: bool = False
    ) -> None:
        if fresh:
            state.clear()
        for tile in tiles(step):
            rows, keys = tile.rows, tile.keys
            part = state.rows(tile.q_start, tile.q_stop)
            if tile.shape is Shape.MASKED:
                REFERENCE.forward(_part(step, tile), scores, q[:, rows], k[:, keys], v[:, keys], part)
                continue
            turn = _turner(tile)
            queries, keys_, values = (self._ready(turn(x), q, v) for x in (q[:, rows], k[:, keys], v[:, keys]))
            out, lse = self._forward(queries, keys_, values, tile.shape is not Shape.FULL, scores.scale)
            out, lse = turn(out[..., : v.shape[-1]].transpose(1, 2)), turn(lse.transpose(1, 2)).transpose(1, 2)
            part.add(out, lse)

    def forward_once(self, step: Step, scores: Scores, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        shapes = [tile.shape for tile in tiles(step)]
        if scores.sinks is not None or len(shapes) > 1 or not {*shapes} <= {Shape.FULL, Shape.LOWER}:
            return None
        queries, keys, values = (self._ready(x, q, v) for x in (q, k, v))
        out, lse = self._forward(queries, keys, values, Shape.LOWER in shapes, scores.scale)
        return out[..., : v.shape[-1]].transpose(1, 2).contiguous(), lse.contiguous()

    def backward(self, step: Step, scores: Scores, saved: Saved, sums: Sums) -> None:
        """The kernels make `row_sums` themselves, from grad_out and out: so lse must have had no gradient."""
        sums = sums._replace(d_slopes=None)
        for tile in tiles(step):
            part, totals = saved.part(tile.rows, tile.keys), sums.part(tile.rows, tile.keys)
            if tile.shape is Shape.MASKED:
                REFERENCE.backward(_part(step, tile), scores, part, totals)
                continue
            turn = _turner(tile)
            grad_out, q, k, v, out = (
                self._ready(turn(x), saved.q, saved.v) for x in (part.grad_out, part.q, part.k, part.v, part.out)
            )
            lse = turn(part.lse.transpose(1, 2)).transpose(1, 2)
            grads = self._backward(grad_out, q, k, v, out, lse, tile.shape is not Shape.FULL, scores.scale)
            for total, term in zip(totals[:3], grads, strict=True):
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
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv)."""


def _part(step: Step, tile: Tile) -> Step:
    return step.part(tile.q_start, tile.q_stop, tile.k_start, tile.k_stop)


def _turner(tile: Tile) -> Callable[[Tensor], Tensor]:
    """Reverses the order of tokens, dim 1, where that makes a lower triangle of the tile."""
    return (lambda x: x.flip(1)) if tile.shape is Shape.UPPER else (lambda x: x)


class TorchCpuFlash(TorchFlash):
    """torch's flash attention for CPUs: float16, bfloat16, float32, float64, and GQA without repeated keys."""

    name = "torch-cpu"
    reason = "torch's flash attention serves plain scores"
    devices = ("cpu",)

    def available(self, query: KernelQuery) -> Availability:
        return unavailable("it takes CPU tensors") if query.device.type != "cpu" else plain_enough(query)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out, lse

    def _backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, causal, scale=scale
        )
        return dq, dk, dv


class TorchCudaFlash(TorchFlash):
    """The FlashAttention-2 that comes with torch: float16 and bfloat16, head_dim up to 256."""

    name = "torch-cuda"
    reason = "torch's FlashAttention serves plain scores"
    devices = ("cuda",)
    multiple = 8

    def available(self, query: KernelQuery) -> Availability:
        if query.device.type != "cuda":
            return unavailable("it takes CUDA tensors")
        if query.dtype not in (torch.float16, torch.bfloat16):
            kind = str(query.dtype).removeprefix("torch.")
            return unavailable(f"torch's attention on GPUs takes float16 and bfloat16, not {kind}")
        if max(query.head_dim, query.v_head_dim) > _CUDA_MAX_HEAD_DIM:
            return unavailable(f"torch's attention on GPUs takes a head_dim of at most {_CUDA_MAX_HEAD_DIM}")
        return plain_enough(query)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse

    def _backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
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
