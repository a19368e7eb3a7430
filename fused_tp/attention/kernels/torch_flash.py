"""Attention with torch's flash kernels, tile by tile, for plain scores. `Reference` computes tiles of irregular shape.

The kernels round the output and the gradients of every tile to the dtype of q, so each term of a sum is rounded once.
Kernels that accumulate in fp32 from tile to tile round less.

The kernels support rectangles and lower triangles. Each query sees an interval of keys. If both ends of the interval
advance by a constant 0 or 1 per row, n rows consist of

    upper triangle of n - 1, rectangle, lower triangle of n          (sliding window: both ends advance)
    rectangle, lower triangle of n                                   (causal mask: the stop advances)

An upper triangle is computed as a lower triangle, with queries and keys in reverse order.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from fused_tp.attention.kernels.base import AttentionKernel, KernelQuery, StepRows, Sums
from fused_tp.attention.kernels.reference import REFERENCE, ReferenceTile, Shape
from fused_tp.attention.ring_plan import Step
from fused_tp.attention.softmax import SoftmaxState
from fused_tp.attention.spec import Scores
from fused_tp.core.availability import AVAILABLE, Availability, unavailable

_CUDA_MAX_HEAD_DIM = 256
# Runs of fewer rows are not computed by separate kernel calls: neighboring short runs form one MASKED tile.
_FEWEST_ROWS = 64
# Maximum rows per band if both ends of the interval advance: a kernel that does not skip masked blocks wastes half of
# the work of the two triangles, which grows with the square of this number.
_MOST_ROWS = 2048


_tiles_of_step: WeakKeyDictionary[Step, tuple[ReferenceTile, ...]] = WeakKeyDictionary()


def tiles(step: Step) -> tuple[ReferenceTile, ...]:
    """Disjoint tiles that together cover all seen keys of a step; cached."""
    found = _tiles_of_step.get(step)
    if found is None:
        found = _tiles_of_step[step] = tuple(_tiles(step))
    return found


def _tiles(step: Step) -> Iterator[ReferenceTile]:
    if step.is_full:
        yield ReferenceTile(Shape.FULL, 0, step.rows, 0, step.keys)
        return
    waiting = 0  # first row that no tile covers yet: short runs wait here, to form one MASKED tile
    for start, stop in _runs(step):
        if stop - start < _FEWEST_ROWS:
            continue
        yield from _masked(step, waiting, start)
        yield from _band(step, start, stop)
        waiting = stop
    yield from _masked(step, waiting, step.rows)


def _runs(step: Step) -> Iterator[tuple[int, int]]:
    """Yield maximal runs [start, stop) of rows in which both interval ends advance by a constant 0 or 1 per row."""
    slopes = np.stack([np.diff(step.starts), np.diff(step.stops)])
    regular = ((slopes == 0) | (slopes == 1)).all(0)
    # slopes[:, i] is the difference of rows i and i + 1. After an irregular difference i a run begins at row i + 1. If
    # differences i and i + 1 are unequal but i is regular, row i + 1 still belongs to the run before; the next run
    # begins at row i + 2.
    changed = (slopes[:, 1:] != slopes[:, :-1]).any(0) & regular[:-1]
    begins = np.union1d(np.flatnonzero(~regular) + 1, np.flatnonzero(changed) + 2)
    bounds = [0, *map(int, begins), step.rows]
    yield from itertools.pairwise(bounds)


def _band(step: Step, start: int, stop: int) -> Iterator[ReferenceTile]:
    starts, stops = step.starts, step.stops
    width = int((stops[start:stop] - starts[start:stop]).min())
    rising = bool(starts[stop - 1] > starts[start])
    if width <= 0 or (rising and width < _FEWEST_ROWS):
        yield from _masked(step, start, stop)
        return
    rows = min(width, _MOST_ROWS) if rising else stop - start
    for first in range(start, stop, rows):
        yield from _trapezoid(step, first, min(first + rows, stop))


def _trapezoid(step: Step, start: int, stop: int) -> Iterator[ReferenceTile]:
    low, lowest_end = int(step.starts[stop - 1]), int(step.stops[start])
    if step.starts[start] < low:
        yield ReferenceTile(Shape.UPPER, start, stop - 1, int(step.starts[start]), low)
    if step.stops[stop - 1] > lowest_end:
        lowest_end -= 1
        yield ReferenceTile(Shape.LOWER, start, stop, lowest_end, int(step.stops[stop - 1]))
    if lowest_end > low:
        yield ReferenceTile(Shape.FULL, start, stop, low, lowest_end)


def _masked(step: Step, start: int, stop: int) -> Iterator[ReferenceTile]:
    seeing = np.flatnonzero(step.stops[start:stop] > step.starts[start:stop])
    if len(seeing):
        first, last = start + int(seeing[0]), start + int(seeing[-1])
        yield ReferenceTile(Shape.MASKED, first, last + 1, int(step.starts[first]), int(step.stops[last]))


def plain_enough(query: KernelQuery) -> Availability:
    """Available if torch's flash kernels support such scores."""
    if not query.plain:
        return unavailable("torch's kernels do not support softcap, ALiBi and dropout by position")
    if not query.positive_scale:
        return unavailable("torch's kernels mask scores before scaling them, so scale must be above 0")
    return unavailable("torch's kernels do not support a gradient of the log-sum-exp") if query.grad_lse else AVAILABLE


class TorchFlash(AttentionKernel):
    """Base of torch's flash kernels.

    The kernels read [B, H, S, D], and their causal mask is aligned to the first key. q, k and v must have the same
    head_dim: smaller ones are padded with zeros, which does not change scores, and the extra columns are dropped.
    """

    multiple = 1  # the kernels require a head_dim that is a multiple of this

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

    def backward(self, step: Step, scores: Scores, saved: StepRows, sums: Sums) -> None:
        """Add the gradients of this step to `sums`.

        The kernels do not read `row_sums`: they compute it from grad_out and out, so lse must not have a gradient.
        """
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
        """Convert `x` [B, S, H, D] to [B, H, S, head_dim of the kernel]."""
        width = -(-max(q.shape[-1], v.shape[-1]) // self.multiple) * self.multiple
        x = x.transpose(1, 2)
        return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))

    @abstractmethod
    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Return (out, lse [B, H, S])."""

    @abstractmethod
    def _backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv)."""


def _part(step: Step, tile: ReferenceTile) -> Step:
    return step.part(tile.q_start, tile.q_stop, tile.k_start, tile.k_stop)


def _turner(tile: ReferenceTile) -> Callable[[Tensor], Tensor]:
    """Return a function that reverses the tokens (dim 1) if `tile` is an upper triangle; otherwise the identity."""
    return (lambda x: x.flip(1)) if tile.shape is Shape.UPPER else (lambda x: x)


class TorchCpuFlash(TorchFlash):
    """torch's flash attention for CPUs: float16, bfloat16, float32, float64, and GQA without repeated key heads."""

    name = "torch-cpu"
    reason = "torch's flash attention supports plain scores"
    devices = ("cpu",)

    def available(self, query: KernelQuery) -> Availability:
        return unavailable("it supports CPU tensors only") if query.device.type != "cpu" else plain_enough(query)

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
    """torch's FlashAttention-2: float16 and bfloat16, head_dim up to 256."""

    name = "torch-cuda"
    reason = "torch's FlashAttention supports plain scores"
    devices = ("cuda",)
    multiple = 8

    def available(self, query: KernelQuery) -> Availability:
        if query.device.type != "cuda":
            return unavailable("it supports CUDA tensors only")
        if query.dtype not in (torch.float16, torch.bfloat16):
            kind = str(query.dtype).removeprefix("torch.")
            return unavailable(f"torch's attention on GPUs supports float16 and bfloat16, got {kind}")
        if max(query.head_dim, query.v_head_dim) > _CUDA_MAX_HEAD_DIM:
            return unavailable(f"torch's attention on GPUs supports a head_dim of at most {_CUDA_MAX_HEAD_DIM}")
        return plain_enough(query)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse

    def _backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Without dropout the kernel draws no random numbers, so the RNG state of the forward is not needed.
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)
        offset = torch.empty((), dtype=torch.uint64, device=q.device)
        with _deterministic():  # otherwise the kernel sums dq with atomics, in an order that differs between runs
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                grad_out,
                q,
                k,
                v,
                out,
                lse.contiguous(),
                None,  # cumulative lengths of packed sequences: not packed
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
    """Context manager in which torch launches deterministic kernels."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


TORCH_CPU = TorchCpuFlash()
TORCH_CUDA = TorchCudaFlash()
