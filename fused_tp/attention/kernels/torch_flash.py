"""Attention with torch's flash kernels, tile by tile, for plain scores. `ReferenceKernel` computes masked tiles.

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

from fused_tp.attention.kernels.base import AttentionKernel, BackwardTensors, GradientSums, KernelRequest
from fused_tp.attention.kernels.reference import REFERENCE_KERNEL, ReferenceTile, TileMask
from fused_tp.attention.ring_plan import Step
from fused_tp.attention.softmax import SoftmaxState
from fused_tp.attention.spec import ScoreParameters
from fused_tp.core.availability import AVAILABLE, Availability, unavailable

_CUDA_MAX_HEAD_DIM = 256
# Runs of fewer rows are not computed by separate kernel calls: neighboring short runs form one MASKED tile.
_MIN_TILE_ROWS = 64
# Maximum rows per band if both ends of the interval advance: a kernel that does not skip masked blocks wastes half of
# the work of the two triangles, which grows with the square of this number.
_MAX_BAND_ROWS = 2048


_cached_tiles: WeakKeyDictionary[Step, tuple[ReferenceTile, ...]] = WeakKeyDictionary()


def step_tiles(step: Step) -> tuple[ReferenceTile, ...]:
    """Return disjoint tiles that together cover all visible keys of a step; cached."""
    tiles = _cached_tiles.get(step)
    if tiles is None:
        tiles = _cached_tiles[step] = tuple(_make_tiles(step))
    return tiles


def _make_tiles(step: Step) -> Iterator[ReferenceTile]:
    if step.is_full:
        yield ReferenceTile(TileMask.FULL, 0, step.num_rows, 0, step.num_keys)
        return
    first_uncovered_row = 0  # first row that no tile covers yet: neighboring short runs form one MASKED tile
    for start, stop in _regular_runs(step):
        if stop - start < _MIN_TILE_ROWS:
            continue
        yield from _masked_tile(step, first_uncovered_row, start)
        yield from _band_tiles(step, start, stop)
        first_uncovered_row = stop
    yield from _masked_tile(step, first_uncovered_row, step.num_rows)


def _regular_runs(step: Step) -> Iterator[tuple[int, int]]:
    """Yield maximal runs [start, stop) of rows in which both interval ends advance by a constant 0 or 1 per row."""
    advances = np.stack([np.diff(step.starts), np.diff(step.stops)])
    is_regular = ((advances == 0) | (advances == 1)).all(0)
    # advances[:, i] is the difference of rows i and i + 1. After an irregular difference i, a run begins at row i + 1.
    # If differences i and i + 1 are unequal but i is regular, row i + 1 still belongs to the run before; the next run
    # begins at row i + 2.
    is_changed = (advances[:, 1:] != advances[:, :-1]).any(0) & is_regular[:-1]
    begins = np.union1d(np.flatnonzero(~is_regular) + 1, np.flatnonzero(is_changed) + 2)
    bounds = [0, *map(int, begins), step.num_rows]
    yield from itertools.pairwise(bounds)


def _band_tiles(step: Step, start: int, stop: int) -> Iterator[ReferenceTile]:
    starts, stops = step.starts, step.stops
    width = int((stops[start:stop] - starts[start:stop]).min())
    start_advances = bool(starts[stop - 1] > starts[start])
    if width <= 0 or (start_advances and width < _MIN_TILE_ROWS):
        yield from _masked_tile(step, start, stop)
        return
    band_rows = min(width, _MAX_BAND_ROWS) if start_advances else stop - start
    for row in range(start, stop, band_rows):
        yield from _trapezoid_tiles(step, row, min(row + band_rows, stop))


def _trapezoid_tiles(step: Step, start: int, stop: int) -> Iterator[ReferenceTile]:
    full_start, full_stop = int(step.starts[stop - 1]), int(step.stops[start])
    if step.starts[start] < full_start:
        yield ReferenceTile(TileMask.UPPER, start, stop - 1, int(step.starts[start]), full_start)
    if step.stops[stop - 1] > full_stop:
        full_stop -= 1
        yield ReferenceTile(TileMask.LOWER, start, stop, full_stop, int(step.stops[stop - 1]))
    if full_stop > full_start:
        yield ReferenceTile(TileMask.FULL, start, stop, full_start, full_stop)


def _masked_tile(step: Step, start: int, stop: int) -> Iterator[ReferenceTile]:
    seeing_rows = np.flatnonzero(step.stops[start:stop] > step.starts[start:stop])
    if len(seeing_rows):
        first_row, last_row = start + int(seeing_rows[0]), start + int(seeing_rows[-1])
        yield ReferenceTile(
            TileMask.MASKED, first_row, last_row + 1, int(step.starts[first_row]), int(step.stops[last_row])
        )


def plain_scores_availability(request: KernelRequest) -> Availability:
    """Available if torch's flash kernels support the scores of `request`, and the gradient of its log-sum-exp."""
    if not request.has_plain_scores:
        return unavailable("torch's kernels do not support softcap, ALiBi, or dropout that depends on positions")
    if not request.has_positive_scale:
        return unavailable("torch's kernels mask scores before scaling them, so scale must be above 0")
    return (
        unavailable("torch's kernels do not support a gradient of the log-sum-exp")
        if request.has_grad_lse
        else AVAILABLE
    )


class TorchFlash(AttentionKernel):
    """Base of torch's flash kernels.

    The kernels read [B, H, S, D], and their causal mask is aligned to the first key. q, k and v must have the same
    head_dim: smaller ones are padded with zeros, which does not change scores, and the extra columns are dropped.
    """

    head_dim_multiple = 1  # the kernels require a head_dim that is a multiple of this

    def forward(
        self,
        step: Step,
        score_parameters: ScoreParameters,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: SoftmaxState,
        *,
        is_uninitialized: bool = False,
    ) -> None:
        if is_uninitialized:
            state.clear()
        for tile in step_tiles(step):
            rows, keys = tile.rows, tile.keys
            tile_state = state.rows(tile.q_start, tile.q_stop)
            if tile.mask is TileMask.MASKED:
                REFERENCE_KERNEL.forward(
                    _tile_step(step, tile), score_parameters, q[:, rows], k[:, keys], v[:, keys], tile_state
                )
                continue
            reverse = _token_reversal(tile)
            queries, kernel_keys, values = (
                self._to_kernel_layout(reverse(x), q, v) for x in (q[:, rows], k[:, keys], v[:, keys])
            )
            out, lse = self._run_forward(
                queries, kernel_keys, values, tile.mask is not TileMask.FULL, score_parameters.scale
            )
            out, lse = reverse(out[..., : v.shape[-1]].transpose(1, 2)), reverse(lse.transpose(1, 2)).transpose(1, 2)
            tile_state.add(out, lse)

    def forward_single_step(
        self, step: Step, score_parameters: ScoreParameters, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        masks = [tile.mask for tile in step_tiles(step)]
        if score_parameters.sinks is not None or len(masks) > 1 or not {*masks} <= {TileMask.FULL, TileMask.LOWER}:
            return None
        queries, keys, values = (self._to_kernel_layout(x, q, v) for x in (q, k, v))
        out, lse = self._run_forward(queries, keys, values, TileMask.LOWER in masks, score_parameters.scale)
        return out[..., : v.shape[-1]].transpose(1, 2).contiguous(), lse.contiguous()

    def backward(
        self, step: Step, score_parameters: ScoreParameters, inputs: BackwardTensors, sums: GradientSums
    ) -> None:
        """Add the gradients of this step to `sums`.

        The kernels do not read `delta`: they compute it from grad_out and out, so lse must not have a gradient.
        """
        sums = sums._replace(d_slopes=None)
        for tile in step_tiles(step):
            tile_inputs, tile_sums = inputs.select(tile.rows, tile.keys), sums.select(tile.rows, tile.keys)
            if tile.mask is TileMask.MASKED:
                REFERENCE_KERNEL.backward(_tile_step(step, tile), score_parameters, tile_inputs, tile_sums)
                continue
            reverse = _token_reversal(tile)
            grad_out, q, k, v, out = (
                self._to_kernel_layout(reverse(x), inputs.q, inputs.v)
                for x in (tile_inputs.grad_out, tile_inputs.q, tile_inputs.k, tile_inputs.v, tile_inputs.out)
            )
            lse = reverse(tile_inputs.lse.transpose(1, 2)).transpose(1, 2)
            grads = self._run_backward(
                grad_out, q, k, v, out, lse, tile.mask is not TileMask.FULL, score_parameters.scale
            )
            for total, term in zip(tile_sums[:3], grads, strict=True):
                total += reverse(term[..., : total.shape[-1]].transpose(1, 2))

    def _to_kernel_layout(self, x: Tensor, q: Tensor, v: Tensor) -> Tensor:
        """Convert `x` [B, S, H, D] to [B, H, S, head_dim of the kernel]."""
        width = -(-max(q.shape[-1], v.shape[-1]) // self.head_dim_multiple) * self.head_dim_multiple
        x = x.transpose(1, 2)
        return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))

    @abstractmethod
    def _run_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Return (out, lse [B, H, S])."""

    @abstractmethod
    def _run_backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv)."""


def _tile_step(step: Step, tile: ReferenceTile) -> Step:
    return step.sub_step(tile.q_start, tile.q_stop, tile.k_start, tile.k_stop)


def _token_reversal(tile: ReferenceTile) -> Callable[[Tensor], Tensor]:
    """Return a function that reverses the tokens (dim 1) if `tile` is an upper triangle; otherwise the identity."""
    return (lambda x: x.flip(1)) if tile.mask is TileMask.UPPER else (lambda x: x)


class TorchCpuFlash(TorchFlash):
    """torch's flash attention for CPUs: float16, bfloat16, float32, float64, and GQA without repeated key heads."""

    name = "torch-cpu"
    reason = "torch's flash attention supports plain scores"
    devices = ("cpu",)

    def available(self, request: KernelRequest) -> Availability:
        return (
            unavailable("it supports CPU tensors only")
            if request.device.type != "cpu"
            else plain_scores_availability(request)
        )

    def _run_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out, lse

    def _run_backward(
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
    head_dim_multiple = 8

    def available(self, request: KernelRequest) -> Availability:
        if request.device.type != "cuda":
            return unavailable("it supports CUDA tensors only")
        if request.dtype not in (torch.float16, torch.bfloat16):
            dtype_name = str(request.dtype).removeprefix("torch.")
            return unavailable(f"torch's attention on GPUs supports float16 and bfloat16, got {dtype_name}")
        if max(request.head_dim, request.v_head_dim) > _CUDA_MAX_HEAD_DIM:
            return unavailable(f"torch's attention on GPUs supports a head_dim of at most {_CUDA_MAX_HEAD_DIM}")
        return plain_scores_availability(request)

    def _run_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse

    def _run_backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Without dropout the kernel draws no random numbers, so the RNG state of the forward is not needed.
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)
        offset = torch.empty((), dtype=torch.uint64, device=q.device)
        with _deterministic_mode():  # otherwise the kernel sums dq with atomics, in an order that differs between runs
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                grad_out,
                q,
                k,
                v,
                out,
                lse.contiguous(),
                None,  # no cumulative lengths: the sequences are not packed
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
def _deterministic_mode() -> Iterator[None]:
    """Context manager in which torch launches deterministic kernels."""
    previous_mode = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(previous_mode[0], warn_only=previous_mode[1])


TORCH_CPU_KERNEL = TorchCpuFlash()
TORCH_CUDA_KERNEL = TorchCudaFlash()
