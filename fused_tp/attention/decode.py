"""Attention of new tokens to this rank's shard of a cache, and the merge of all ranks' results.

With out_r and lse_r, the output and log-sum-exp over the keys of rank r,

    lse = log(sum over r of exp(lse_r)),    out = sum over r of exp(lse_r - lse) * out_r

("Flash-Decoding for long-context inference", Dao et al., 2023, where r indexes splits of one device's cache.) For up to
MAX_DECODE_QUERIES queries per sequence the cache is read once for all query heads of a key head, and computed in fp32;
on GPUs one kernel computes all sequences. More queries are computed in steps, with the kernels of ring attention.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fused_tp.attention.cache import CacheRows
from fused_tp.attention.kernels.base import AttentionKernel, KernelRequest
from fused_tp.attention.kernels.select import forced_kernel
from fused_tp.attention.kernels.triton import to_kernel_terms, triton_availability
from fused_tp.attention.layout import BlockCyclicLayout, TokenRanges
from fused_tp.attention.ring_plan import Step, make_step
from fused_tp.attention.softmax import SoftmaxState
from fused_tp.attention.spec import AttentionMask, ScoreParameters
from fused_tp.backends.symmetric_memory.symm_mem import is_capturing
from fused_tp.core.pending import accumulate_dtype

_T = TypeVar("_T")

MAX_DECODE_QUERIES = 16  # per sequence; a call with more queries is a prefill
# Size of the fp32 copies to which reduced-precision keys are converted, chunk by chunk: they stay in a CPU cache.
_MAX_CONVERTED_BYTES = 2 << 20
NUM_CHECKSUMS = 2  # number of checksums sent with a rank's result: one of the keywords, one of the new tokens
_MAX_STEP_ROWS = 8192  # maximum rows of keys per prefill step, which limits the copies of paged rows


@dataclass(frozen=True)
class CacheCall:
    """Parameters that all sequences of a call share.

    Attributes:
        visible_window: (left, right), the numbers of keys that a query sees before and after its position; -1: no
            limit. For a causal call, right is 0.
        is_paged: True if rows can be read for only one sequence at a time.
    """

    layout: BlockCyclicLayout
    score_parameters: ScoreParameters
    visible_window: tuple[int, int]
    kernel: AttentionKernel
    is_paged: bool


def num_exchanged_elements(q_shape: Sequence[int], v_head_dim: int) -> int:
    """Return the number of elements that a rank sends for queries of shape `q_shape`: partial out, lse, checksums."""
    return NUM_CHECKSUMS + prod(q_shape[:3]) * (v_head_dim + 1)


def attend_to_cache(
    call: CacheCall, q: Tensor, lengths: Sequence[int], keys: CacheRows, values: CacheRows, v_head_dim: int
) -> Tensor:
    """Attend to this rank's keys; return [batch, new, heads, v_head_dim + 1] in fp32 (fp64 for fp64): out, then lse.

    `q` [batch, new, heads, head_dim] holds the queries of the last tokens of sequences of lengths `lengths`. If a
    sequence has fewer than `new` tokens, its first queries are padding and see no keys.
    """
    result = q.new_empty((*q.shape[:3], v_head_dim + 1), dtype=accumulate_dtype(q.dtype))
    num_new, is_decoding = q.shape[1], q.shape[1] <= MAX_DECODE_QUERIES
    for seqs, length in equal_length_runs(lengths, is_decoding or call.is_paged):
        num_padding = max(0, num_new - length)
        _fill_empty(result[seqs, :num_padding])
        if num_padding == num_new:
            continue
        if is_decoding:
            _attend_few_queries(
                call, q[seqs.start, num_padding:], length, keys, values, seqs, result[seqs.start, num_padding:]
            )
        else:
            _attend_many_queries(call, q[seqs, num_padding:], length, keys, values, seqs, result[seqs, num_padding:])
    return result


def merge_partial_outputs(partials: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Merge the ranks' partial outputs into (out [batch, new, heads, dim], lse [batch, heads, new]).

    `partials` [W, batch, new, heads, dim + 1] holds each rank's output, followed by its log-sum-exp. Sums are in the
    order of the ranks, so all ranks compute the same bits. `sinks` [heads] count once, not per rank.
    """
    out, lse = partials[..., :-1], partials[..., -1]
    max_lse = lse.amax(0)
    if sinks is not None:
        max_lse = torch.maximum(max_lse, sinks.to(max_lse.dtype))
    base = max_lse.masked_fill(max_lse == -torch.inf, 0.0)  # exp(-inf - -inf) would be NaN
    weights = torch.exp(lse - base)
    weight_sum = weights.sum(0)
    if sinks is not None:
        weight_sum = weight_sum + torch.exp(sinks.to(weight_sum.dtype) - base)
    merged_out = (weights.unsqueeze(-1) * out).sum(0) / weight_sum.clamp_min(
        torch.finfo(weight_sum.dtype).tiny
    ).unsqueeze(-1)
    return merged_out, (base + weight_sum.log()).transpose(1, 2)


def equal_length_runs(lengths: Sequence[_T], split_runs: bool = False) -> Iterator[tuple[slice, _T]]:
    """Yield (slice of sequences, value) for each maximal run of equal values in `lengths`.

    With `split_runs`, yield one slice per sequence.
    """
    run_start = 0
    for length, run in itertools.groupby(lengths):
        run_length = len(list(run))
        for start in range(run_start, run_start + run_length, 1 if split_runs else run_length):
            yield slice(start, start + 1 if split_runs else run_start + run_length), length
        run_start += run_length


def _fill_empty(result: Tensor) -> None:
    result[..., :-1] = 0
    result[..., -1] = -torch.inf


def _attend_few_queries(
    call: CacheCall, q: Tensor, length: int, keys: CacheRows, values: CacheRows, seq: slice, result: Tensor
) -> None:
    """Attend with few queries of one sequence: q [new, heads, head_dim] -> result [new, heads, dim + 1].

    One matmul computes all queries of a key head, so each key is read once.
    """
    intervals = [visible_rows(call.layout, call.visible_window, length - len(q) + i, length) for i in range(len(q))]
    start, stop = min(row_start for row_start, _ in intervals), max(row_stop for _, row_stop in intervals)
    if start >= stop:
        _fill_empty(result)
        return
    dtype, max_rows = result.dtype, stop - start
    if call.is_paged or dtype != q.dtype:
        _, first_block = next(keys.read_blocks(seq, start, stop, 1))
        row_bytes = first_block.shape[2] * max(q.shape[2], result.shape[2]) * dtype.itemsize
        max_rows = max(64, _MAX_CONVERTED_BYTES // row_bytes)
    scores: Tensor | None = None
    for row, k in keys.read_blocks(seq, start, stop, max_rows):
        k = k[0].to(dtype).permute(1, 2, 0)
        if scores is None:
            q_by_head = q.to(dtype).unflatten(1, (k.shape[0], -1)).permute(1, 2, 0, 3)  # [kv_heads, G, new, head_dim]
            queries = (q_by_head * call.score_parameters.scale).flatten(1, 2)
            if k.shape[2] == stop - start:
                scores = queries @ k
                break
            scores = queries.new_empty((*queries.shape[:2], stop - start))
        torch.matmul(queries, k, out=scores[..., row - start : row - start + k.shape[2]])
    assert scores is not None
    scores_by_query = scores.unflatten(1, (-1, len(q)))  # [kv_heads, G, new, keys]
    _transform_scores(call, scores_by_query, length, start, stop, intervals)
    max_score = scores.amax(-1, keepdim=True)
    probabilities = scores.sub_(max_score.masked_fill(max_score == -torch.inf, 0.0)).exp_()
    exp_sum = probabilities.sum(-1, keepdim=True)
    out: Tensor | None = None
    for row, v in values.read_blocks(seq, start, stop, max_rows):
        block_out = probabilities[..., row - start : row - start + v.shape[1]] @ v[0].to(dtype).transpose(0, 1)
        out = block_out if out is None else out.add_(block_out)
    assert out is not None
    out /= exp_sum.clamp_min(torch.finfo(dtype).tiny)
    out_and_lse = torch.cat([out, max_score + exp_sum.log()], -1).unflatten(1, (-1, len(q)))
    result.copy_(out_and_lse.permute(2, 0, 1, 3).flatten(1, 2))


def visible_rows(
    layout: BlockCyclicLayout, visible_window: tuple[int, int], position: int, length: int
) -> tuple[int, int]:
    """Return this rank's rows [start, stop) that the query at `position` sees, in a sequence of `length` tokens."""
    left, right = visible_window
    count_before = layout.count_before
    stop = count_before(max(0, length if right < 0 else min(length, position + right + 1)))
    return (0 if left < 0 else min(stop, count_before(max(0, position - left)))), stop


def _transform_scores(
    call: CacheCall, scores: Tensor, length: int, start: int, stop: int, intervals: Sequence[tuple[int, int]]
) -> None:
    """Apply softcap, ALiBi and the mask (-inf) in place to `scores` [kv_heads, G, new, stop - start]."""
    score_parameters, num_new = call.score_parameters, scores.shape[2]
    if score_parameters.softcap:
        scores.div_(score_parameters.softcap).tanh_().mul_(score_parameters.softcap)
    if score_parameters.alibi_slopes is not None:
        positions = torch.arange(length - num_new, length, device=scores.device).unsqueeze(-1)
        key_indices = torch.from_numpy(call.layout.indices(start, stop)).to(scores.device)
        slopes = score_parameters.alibi_slopes.to(scores.dtype).unflatten(0, (scores.shape[0], -1))
        scores -= slopes[:, :, None, None] * (positions - key_indices).abs()
    for i, (row_start, row_stop) in enumerate(intervals):
        if row_start > start:
            scores[:, :, i, : row_start - start] = -torch.inf
        if row_stop < stop:
            scores[:, :, i, max(0, row_stop - start) :] = -torch.inf


def _attend_many_queries(
    call: CacheCall, q: Tensor, length: int, keys: CacheRows, values: CacheRows, seqs: slice, result: Tensor
) -> None:
    """Attend with many queries, in steps: q [seqs, new, heads, head_dim] -> result [seqs, new, heads, dim + 1]."""
    state = SoftmaxState.empty(q, result.shape[3] - 1)
    q = q if q.stride(-1) == 1 else q.contiguous()
    for row_start, row_stop, step in _prefill_steps(call.layout, call.visible_window, q.shape[1], length):
        (_, k), (_, v) = (next(x.read_blocks(seqs, row_start, row_stop, sys.maxsize)) for x in (keys, values))
        rows, visible_keys = slice(step.q_start, step.q_stop), slice(step.k_start, step.k_stop)
        call.kernel.forward(
            step,
            call.score_parameters,
            q[:, rows],
            k[:, visible_keys],
            v[:, visible_keys],
            state.rows(step.q_start, step.q_stop),
        )
    out, lse = state.finalize(result.dtype)
    result[..., :-1] = out
    result[..., -1] = lse.transpose(1, 2)


# The layers of a model share an entry. Few are kept: an entry holds an interval of keys for each query.
@lru_cache(maxsize=8)
def _prefill_steps(
    layout: BlockCyclicLayout, visible_window: tuple[int, int], num_new: int, length: int
) -> tuple[tuple[int, int, Step], ...]:
    """Return (row_start, row_stop, step) for each step of the last `num_new` tokens of a sequence.

    A step reads this rank's rows [row_start, row_stop).

    No step has both rows before the new tokens and rows of the new tokens: without a window, all queries see all rows
    before the new tokens, so those steps need no mask.
    """
    mask = AttentionMask(num_new, length, window=visible_window)
    left, right = visible_window
    start = layout.count_before(max(0, length - num_new - left)) if left >= 0 else 0
    first_new_row = max(start, layout.count_before(max(0, length - num_new + 1))) if right >= 0 else start
    stop = layout.count_before(length)
    bounds = [*range(start, first_new_row, _MAX_STEP_ROWS), *range(first_new_row, stop, _MAX_STEP_ROWS), stop]
    steps = []
    for row_start, row_stop in itertools.pairwise(bounds):
        step = make_step(mask, TokenRanges((range(num_new),)), layout.tokens(row_start, row_stop))
        if not step.is_empty:
            steps.append((row_start, row_stop, step))
    return tuple(steps)


# -- with a Triton kernel ---------------------------------------------------------------------------------------------


def uses_decode_kernel(request: KernelRequest, num_queries: int) -> bool:
    """True if `attend_with_kernel` is to compute `num_queries` queries per sequence.

    It is used by default on GPUs, and on any device if FUSED_TP_ATTENTION=triton.
    """
    forced_name = forced_kernel()
    is_requested = forced_name == "triton" or (forced_name is None and request.device.type == "cuda")
    return 0 < num_queries <= MAX_DECODE_QUERIES and is_requested and bool(triton_availability(request))


def attend_with_kernel(
    call: CacheCall, q: Tensor, lengths: Sequence[int], k: Tensor, v: Tensor, page_table: Tensor | None
) -> Tensor:
    """Return the result of `attend_to_cache`, computed in one launch for all sequences.

    `k`, `v` and `page_table` are as in `context_parallel_decode`.
    """
    layout, k_indices = call.layout, None
    starts, stops, positions, max_visible = _visible_row_tables(
        layout, call.visible_window, q.shape[1], tuple(lengths), q.device
    )
    if call.score_parameters.alibi_slopes is not None:
        k_indices = _row_token_indices(layout, max(map(layout.count_before, lengths)), q.device)
    if page_table is not None:
        page_table = page_table.to(torch.int32).contiguous().to(q.device)
    from fused_tp.triton_kernels.attention.decode import flash_decode

    for table in (starts, k_indices):  # stops and positions share the storage of starts
        if table is None or not table.is_cuda:
            continue
        # The lru_cache may evict a table while kernels of this stream still read it: its memory must not be reused yet.
        if is_capturing(table.device):
            _captured_tables.add(table)
        else:
            table.record_stream(torch.cuda.current_stream(table.device))
    q = q if q.stride(-1) == 1 else q.contiguous()
    result: Tensor = flash_decode(
        q,
        k,
        v,
        starts,
        stops,
        max_visible,
        to_kernel_terms(call.score_parameters),
        pages=page_table,
        q_positions=positions,
        k_indices=k_indices,
    )
    return result


# A CUDA graph reads its tables at every replay, and there is no notification when a graph is deleted. So captured
# tables are kept forever. Tensors hash by identity, so each is kept once.
_captured_tables: set[Tensor] = set()


def _table_on_device(device: torch.device, table: np.ndarray[Any, Any]) -> Tensor:
    if is_capturing(device):
        raise RuntimeError(
            "context_parallel_decode needs index tables for these cache_seqlens, which cannot be copied to the GPU "
            "during CUDA graph capture. Run the same call once before the capture."
        )
    return torch.from_numpy(table).to(device)


@lru_cache(maxsize=4)  # the layers of a model share an entry
def _visible_row_tables(
    layout: BlockCyclicLayout,
    visible_window: tuple[int, int],
    num_new: int,
    lengths: tuple[int, ...],
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return (starts, stops, positions, max_visible).

    The first three are int32 [batch, new]: a query sees this rank's rows [start, stop), and has this position in its
    sequence. `max_visible` is the maximum over the sequences of the number of rows from the first to the last row seen.
    """
    positions = [[length - num_new + i for i in range(num_new)] for length in lengths]
    intervals = np.array(
        [
            [visible_rows(layout, visible_window, position, length) if position >= 0 else (0, 0) for position in seq]
            for seq, length in zip(positions, lengths, strict=True)
        ],
        dtype=np.int32,
    )
    starts, stops = intervals[..., 0], intervals[..., 1]
    is_visible = starts < stops
    row_starts, row_stops = (
        np.where(is_visible, starts, np.iinfo(np.int32).max).min(1),
        np.where(is_visible, stops, 0).max(1),
    )
    tables = _table_on_device(device, np.stack((starts, stops, np.array(positions, dtype=np.int32))))
    return tables[0], tables[1], tables[2], int(np.maximum(row_stops.astype(np.int64) - row_starts, 0).max())


@lru_cache(maxsize=2)
def _row_token_indices(layout: BlockCyclicLayout, rows: int, device: torch.device) -> Tensor:
    """Return the token index of each row, int32; `rows` is rounded up to a multiple of 1024."""
    rows = -(-rows // 1024) * 1024
    return _table_on_device(device, layout.indices(0, rows).astype(np.int32))
