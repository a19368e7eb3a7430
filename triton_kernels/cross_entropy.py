"""Cross entropy of rows of a rank's shard of the logits: their statistics, and their gradients in place.

    logit = softcap * tanh(scale * x / softcap), or scale * x without softcap
    statistics of a row: m = max logit, sum exp(logit - m), logit[target] or 0, sum of logits
    dx = (exp(logit - lse) * d_exp - d_smoothing + [column is the target] * d_target) * d logit / d x

Each kernel reads a row once, where torch's operations read and write it about six times in fp32. One program computes
the statistics of a row, block by block: the sum is rescaled when the maximum grows, as in the softmax of attention.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .attention.blocks import tanh
from .cache_keys import fix_cache_keys
from .device import on_device
from .language import rounded

_BLOCK = 4096
_BLOCKS_PER_PROGRAM = 4  # of the gradients, whose blocks do not depend on each other
_NUM_WARPS = 8


class LogitConstants(NamedTuple):
    """Constants of the kernels.

    Attributes:
        BLOCK: columns of a block.
        BLOCKS: blocks of a program that computes gradients.
        CAPPED: True if logits are capped.
        NEEDS_SUM: True if the sum of the logits is needed.
    """

    BLOCK: Any
    BLOCKS: Any
    CAPPED: Any
    NEEDS_SUM: Any


@triton.jit
def to_logits(x, scale, softcap, C: tl.constexpr):
    """Return (fp32 logits of x, their derivatives by x)."""
    if C.CAPPED:
        capped = tanh(x.to(tl.float32) * (scale / softcap))
        return capped * softcap, (1.0 - capped * capped) * scale
    else:
        return x.to(tl.float32) * scale, scale


@triton.jit
def finite_or_0(x):
    """Return x, or 0 if x is infinite."""
    return tl.where(tl.abs(x) == float("inf"), 0.0, x)


@triton.jit(do_not_specialize=["first", "last"])
def statistics_kernel(x, row_stride, targets, stats, num_columns, first, last, scale, softcap, C: tl.constexpr):
    """Write the statistics of a row; targets `first` to `last` - 1 are columns of this shard."""
    row = tl.program_id(0).to(tl.int64)
    row_x = x + row * row_stride
    row_max = -float("inf")
    row_sum = 0.0
    logit_sum = 0.0
    for start in tl.range(0, num_columns, C.BLOCK):
        columns = start + tl.arange(0, C.BLOCK)
        exists = columns < num_columns
        logits, _ = to_logits(tl.load(row_x + columns, mask=exists, other=0.0), scale, softcap, C)
        block_max = tl.max(tl.where(exists, logits, -float("inf")), 0)
        new_max = tl.maximum(row_max, block_max)
        # exp(-inf - -inf) would be NaN, and so would 0 * exp of a large number.
        rescale = tl.where(row_sum == 0.0, 0.0, tl.exp(finite_or_0(row_max) - finite_or_0(new_max)))
        exponentials = tl.where(exists, tl.exp(logits - finite_or_0(new_max)), 0.0)
        row_sum = row_sum * rescale + tl.sum(exponentials, 0)
        row_max = new_max
        if C.NEEDS_SUM:
            logit_sum += tl.sum(tl.where(exists, logits, 0.0), 0)
    target = tl.load(targets + row)
    is_local = (target >= first) & (target < last)
    target_x = tl.load(row_x + tl.where(is_local, target - first, 0), mask=is_local, other=0.0)
    target_logit, _ = to_logits(target_x, scale, softcap, C)
    # The sum is relative to the shift, which is the maximum unless that is infinite.
    tl.store(stats + 4 * row, tl.where(row_sum > 0.0, finite_or_0(row_max), row_max))
    tl.store(stats + 4 * row + 1, row_sum)
    tl.store(stats + 4 * row + 2, tl.where(is_local, target_logit, 0.0))
    tl.store(stats + 4 * row + 3, logit_sum)


@triton.jit(do_not_specialize=["first", "last"])
def gradients_kernel(
    x, out, row_stride, out_stride, targets, log_sum_exp, d_exp, d_smoothing, d_target, num_columns, first, last, scale,
    softcap, C: tl.constexpr,
):  # fmt: skip
    """Write the gradients of some blocks of a row of x to `out`, which may be x; zeros if those of the row are 0."""
    row = tl.program_id(0).to(tl.int64)
    row_d_exp = tl.load(d_exp + row)
    row_d_smoothing = tl.load(d_smoothing + row)
    row_d_target = tl.load(d_target + row)
    row_lse = tl.load(log_sum_exp + row)
    local_target = tl.load(targets + row) - first
    has_gradient = (row_d_exp != 0.0) | (row_d_smoothing != 0.0) | (row_d_target != 0.0)
    num_read = tl.where(has_gradient, num_columns, 0)
    BLOCKS: tl.constexpr = C.BLOCKS
    for block in tl.static_range(BLOCKS):
        columns = (tl.program_id(1) * BLOCKS + block) * C.BLOCK + tl.arange(0, C.BLOCK)
        exists = columns < num_columns
        logits, derivatives = to_logits(
            tl.load(x + row * row_stride + columns, mask=columns < num_read, other=0.0), scale, softcap, C
        )
        d_logits = tl.exp(logits - row_lse) * row_d_exp - row_d_smoothing
        d_logits += tl.where((columns == local_target) & (columns < last - first), row_d_target, 0.0)
        d_x = tl.where(has_gradient, d_logits * derivatives, 0.0)
        tl.store(out + row * out_stride + columns, rounded(d_x, out.dtype.element_ty), mask=exists)


def fill_statistics(
    stats: Tensor,
    x: Tensor,
    targets: Tensor,
    vocab_range: tuple[int, int],
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    needs_logit_sum: bool,
) -> None:
    """Write the statistics of the logits of x to `stats`.

    Args:
        stats: [T, 4], fp32, contiguous.
        x: [T, v], bf16, fp16 or fp32.
        targets: [T], int64.
        vocab_range: targets that are columns of x.
    """
    if not len(stats):
        return
    x = x if x.stride(1) == 1 else x.contiguous()
    constants = _constants(softcap, needs_logit_sum)
    with on_device(x):
        statistics_kernel[(len(stats),)](
            x=x,
            row_stride=x.stride(0),
            targets=targets.contiguous(),
            stats=stats,
            num_columns=x.shape[1],
            first=vocab_range[0],
            last=vocab_range[1],
            scale=scale,
            softcap=softcap or 1.0,
            C=constants,
            num_warps=_NUM_WARPS,
        )


def fill_gradients(
    out: Tensor,
    x: Tensor,
    targets: Tensor,
    vocab_range: tuple[int, int],
    log_sum_exp: Tensor,
    d_exp: Tensor,
    d_smoothing: Tensor,
    d_target: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
) -> None:
    """Write the gradients of x [T, v] to `out`.

    Args:
        out: [T, v] with dense rows; may be x.
        targets, vocab_range: see `fill_statistics`.
        log_sum_exp, d_exp, d_smoothing, d_target: [T], fp32; see the equation above.
    """
    if not x.numel():
        return
    x = x if x.stride(1) == 1 else x.contiguous()
    constants = _constants(softcap, needs_logit_sum=False)
    grid = (len(x), triton.cdiv(x.shape[1], _BLOCK * _BLOCKS_PER_PROGRAM))
    with on_device(x):
        gradients_kernel[grid](
            x=x,
            out=out,
            row_stride=x.stride(0),
            out_stride=out.stride(0),
            targets=targets.contiguous(),
            log_sum_exp=log_sum_exp.contiguous(),
            d_exp=d_exp.contiguous(),
            d_smoothing=d_smoothing.contiguous(),
            d_target=d_target.contiguous(),
            num_columns=x.shape[1],
            first=vocab_range[0],
            last=vocab_range[1],
            scale=scale,
            softcap=softcap or 1.0,
            C=constants,
            num_warps=_NUM_WARPS,
        )


def _constants(softcap: float | None, needs_logit_sum: bool) -> LogitConstants:
    return LogitConstants(_BLOCK, _BLOCKS_PER_PROGRAM, softcap is not None, needs_logit_sum)


fix_cache_keys(__name__)
