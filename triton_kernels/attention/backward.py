"""Gradients of attention over some or all of the keys that the queries see, added to sums in fp32.

    p  = exp(score - lse),  p' = dropped(p),  dp = grad_out v^T
    ds = p' * dp - p * delta                       delta = sum_d grad_out * out (- grad_lse), computed once for all keys
    dv = p'^T grad_out,  dk = scale * (dcap * ds)^T q,  dq = scale * (dcap * ds) k,  dslope = -sum ds * distance

One kernel computes dq for tiles of queries, the other dk and dv for tiles of keys. One program adds all terms of a sum
in a fixed order, so every run produces the same bits. The program of a tile of keys processes the queries of all heads
that share these keys.

This computes the scores and dp twice: 7 products per block, where one pass over the tiles of keys would need 5.
Rejected: in one pass every tile of keys adds to dq in memory, either by atomics, whose order and so whose bits differ
from run to run, or in turns, so that each tile waits for the one before it.

Source: Dao, "FlashAttention-2" (arXiv:2307.08691), algorithm 2, in two passes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cache_keys import fix_cache_keys
from ..language import dot, rounded, zeros
from .blocks import (
    LOG2_E,
    UNSPECIALIZED,
    add_block,
    apply_dropout,
    count_masked_blocks,
    dropout_keeps,
    head_rows,
    head_score,
    head_vector,
    load_block,
    load_full_block,
    load_lse,
    load_vector,
    load_visible_keys,
    masked_block_start,
    probabilities,
    program_tile,
)
from .configs import AttentionConfig
from .launch import (
    ScoreTerms,
    check_row_strides,
    default_config,
    heads_tensor,
    launch_tiles,
    mask_arguments,
)
from .tiles import StepMask, key_tiles, query_tiles


class Queries(NamedTuple):
    """Values of a tile of queries in `queries_kernel`."""

    q: Any
    grad_out: Any
    lse: Any  # in base 2
    delta: Any
    visible_keys: Any
    score: Any


class Keys(NamedTuple):
    """Values of a tile of keys in `keys_kernel`."""

    k: Any
    v: Any
    query_start: Any  # first query that sees each key
    query_stop: Any
    index: Any


@triton.jit(do_not_specialize=UNSPECIALIZED)
def queries_kernel(
    q, k, v, grad_out, k_tma, v_tma, lse, delta, dq, d_slopes, mask, scores,
    tiles, tile_count, heads, batch_heads, interleaved_heads, heads_per_kv_head,
    seed_low, seed_high, dropped_below, first_head,
    C: tl.constexpr,
):  # fmt: skip
    """Compute dq of tiles of queries, and their terms in d_slopes [tiles, batch, heads]. Tensors are `HeadsTensor`."""
    tile = program_tile(tiles, tile_count, heads, batch_heads, interleaved_heads)
    batch, head, row, row_end, end = tile.batch, tile.head, tile.row, tile.row_end, tile.end
    kv_head = head // heads_per_kv_head
    k_rows = head_rows(k, batch, kv_head)
    v_rows = head_rows(v, batch, kv_head)
    queries = load_block(head_rows(q, batch, head), row, row_end, C.D, C.ROWS, C.PADDED_D)
    grads = load_block(head_rows(grad_out, batch, head), row, row_end, C.DV, C.ROWS, C.PADDED_DV)
    lse_rows = load_lse(head_vector(lse, batch, head), row, row_end, C.ROWS) * LOG2_E
    delta_rows = load_vector(head_vector(delta, batch, head), row, row_end, C.ROWS, 0.0)
    visible_keys = load_visible_keys(mask.starts, mask.stops, mask, row, row_end, C)
    score = head_score(scores, batch, head, (first_head, seed_low, seed_high, dropped_below), C)
    query_tile = Queries(queries, grads, lse_rows, delta_rows, visible_keys, score)

    ROWS: tl.constexpr = C.ROWS
    dq_acc = zeros(ROWS, C.PADDED_D)
    slope_sums = tl.zeros((ROWS,), tl.float32)
    for first_key in tl.range(tile.full_begin, tile.full_end, C.BLOCK):
        keys = load_full_block(k_tma, k_rows, batch, kv_head, first_key, C.D, C.BLOCK, C.PADDED_D, C.TMA)
        values = load_full_block(v_tma, v_rows, batch, kv_head, first_key, C.DV, C.BLOCK, C.PADDED_DV, C.TMA)
        dq_acc, slope_sums = add_keys(
            dq_acc, slope_sums, query_tile, keys, values, first_key, end, mask.k_indices, False, C
        )
    for block in tl.range(0, count_masked_blocks(tile.begin, end, tile.full_begin, tile.full_end, C.BLOCK)):
        first_key = masked_block_start(block, tile.begin, tile.full_begin, tile.full_end, C.BLOCK)
        keys = load_block(k_rows, first_key, end, C.D, C.BLOCK, C.PADDED_D)
        values = load_block(v_rows, first_key, end, C.DV, C.BLOCK, C.PADDED_DV)
        dq_acc, slope_sums = add_keys(
            dq_acc, slope_sums, query_tile, keys, values, first_key, end, mask.k_indices, True, C
        )

    add_block(head_rows(dq, batch, head), dq_acc * scores.scale, row, row_end, C.D)
    if C.ALIBI and d_slopes is not None:
        tl.store(d_slopes + tile.index * batch_heads + batch * heads + head, -tl.sum(slope_sums, 0))


@triton.jit
def add_keys(
    dq_acc, slope_sums, query_tile, keys, values, first_key, end, k_indices, MASKED: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Return (dq / scale, sums of ds * distance) after adding the keys of one block."""
    queries, grads, lse, delta, visible_keys, score = query_tile
    products = dot(queries, keys.T, None, C)
    columns = first_key + tl.arange(0, C.BLOCK)[None, :]
    k_index = columns
    distance = products
    keep = products
    visible = products
    if C.ALIBI or C.DROPOUT:
        k_index = load_vector(k_indices, first_key, end, C.BLOCK, 0)[None, :]
    if C.ALIBI:
        distance = tl.abs(visible_keys.q_position[:, None] - k_index).to(tl.float32)
    if C.DROPOUT:
        keep = dropout_keeps(visible_keys.q_index[:, None], k_index, score)
    if MASKED:
        visible = (columns >= visible_keys.start[:, None]) & (columns < visible_keys.stop[:, None])
    p, cap_derivative = probabilities(products, lse[:, None], visible, distance, score, MASKED, C)
    gradient = apply_dropout(dot(grads, values.T, None, C), keep, score, C.DROPOUT)
    ds = gradient_of_scores(p, gradient, delta[:, None], visible, MASKED)
    if C.ALIBI:
        slope_sums += tl.sum(ds * distance, 1)
    if C.CAPPED:
        ds *= cap_derivative
    return dot(rounded(ds, keys.dtype), keys, dq_acc, C), slope_sums


@triton.jit(do_not_specialize=UNSPECIALIZED)
def keys_kernel(
    q, k, v, grad_out, q_tma, grad_tma, lse, delta, dk, dv, mask, scores,
    tiles, tile_count, heads, batch_heads, interleaved_heads, heads_per_kv_head,
    seed_low, seed_high, dropped_below, first_head,
    C: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of tiles of keys; `heads` is the number of key heads. Tensors are `HeadsTensor`."""
    tile = program_tile(tiles, tile_count, heads, batch_heads, interleaved_heads)
    batch, kv_head, row, row_end, begin, end = tile.batch, tile.head, tile.row, tile.row_end, tile.begin, tile.end
    full_begin, full_end = tile.full_begin, tile.full_end
    keys = load_block(head_rows(k, batch, kv_head), row, row_end, C.D, C.ROWS, C.PADDED_D)
    values = load_block(head_rows(v, batch, kv_head), row, row_end, C.DV, C.ROWS, C.PADDED_DV)
    query_start = load_vector(mask.starts, row, row_end, C.ROWS, 0)
    query_stop = load_vector(mask.stops, row, row_end, C.ROWS, 0)
    key_index = query_start
    if C.ALIBI or C.DROPOUT:
        key_index = load_vector(mask.k_indices, row, row_end, C.ROWS, 0)
    key_tile = Keys(keys, values, query_start, query_stop, key_index)

    dk_sum = zeros(C.ROWS, C.PADDED_D)
    dv_sum = zeros(C.ROWS, C.PADDED_DV)
    # For wide heads dk and dv leave no registers for the values of two loops: one loop masks all blocks.
    if C.PADDED_D + C.PADDED_DV > 256 and not C.TMA:
        full_begin = begin
        full_end = begin
    # One loop over the blocks of all heads: unlike nested loops, it prefetches loads across heads and saves registers.
    # Loop invariants are not hoisted (disable_licm), which also saves registers: cheap ones would be spilled.
    dropout = (first_head, seed_low, seed_high, dropped_below)
    num_full_blocks = (full_end - full_begin) // C.BLOCK
    for block in tl.range(0, num_full_blocks * heads_per_kv_head, disable_licm=True):
        head = kv_head * heads_per_kv_head + block // num_full_blocks
        first_query = full_begin + block % num_full_blocks * C.BLOCK
        q_rows = head_rows(q, batch, head)
        grad_rows = head_rows(grad_out, batch, head)
        queries = load_full_block(q_tma, q_rows, batch, head, first_query, C.D, C.BLOCK, C.PADDED_D, C.TMA)
        grads = load_full_block(grad_tma, grad_rows, batch, head, first_query, C.DV, C.BLOCK, C.PADDED_DV, C.TMA)
        dk_sum, dv_sum = add_queries(
            dk_sum, dv_sum, key_tile, queries, grads, first_query, end, (lse, delta), mask, scores, batch, head,
            dropout, False, C,
        )  # fmt: skip
    num_masked_blocks = count_masked_blocks(begin, end, full_begin, full_end, C.BLOCK)
    for block in tl.range(0, num_masked_blocks * heads_per_kv_head, disable_licm=True):
        head = kv_head * heads_per_kv_head + block // num_masked_blocks
        first_query = masked_block_start(block % num_masked_blocks, begin, full_begin, full_end, C.BLOCK)
        queries = load_block(head_rows(q, batch, head), first_query, end, C.D, C.BLOCK, C.PADDED_D)
        grads = load_block(head_rows(grad_out, batch, head), first_query, end, C.DV, C.BLOCK, C.PADDED_DV)
        dk_sum, dv_sum = add_queries(
            dk_sum, dv_sum, key_tile, queries, grads, first_query, end, (lse, delta), mask, scores, batch, head,
            dropout, True, C,
        )  # fmt: skip

    add_block(head_rows(dk, batch, kv_head), dk_sum * scores.scale, row, row_end, C.D)
    add_block(head_rows(dv, batch, kv_head), dv_sum, row, row_end, C.DV)


@triton.jit
def add_queries(
    dk_sum, dv_sum, key_tile, queries, grads, first_query, end, lse_and_delta, mask, scores, batch, head, dropout,
    MASKED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Return (dk / scale, dv) after adding the queries of one block; scores are [keys, queries] here.

    `key_tile` is `Keys`.
    """
    keys, values, query_start, query_stop, key_index = key_tile
    lse, delta = head_vector(lse_and_delta[0], batch, head), head_vector(lse_and_delta[1], batch, head)
    # Each load is at its first use: earlier it would take registers.
    lse_rows = load_lse(lse, first_query, end, C.BLOCK) * LOG2_E
    products = dot(keys, queries.T, None, C)
    columns = first_query + tl.arange(0, C.BLOCK)[None, :]
    distance = products
    keep = products
    visible = products
    score = head_score(scores, batch, head, dropout, C)
    if C.ALIBI:
        q_position = load_vector(mask.q_positions, first_query, end, C.BLOCK, 0)[None, :]
        distance = tl.abs(q_position - key_index[:, None]).to(tl.float32)
    if C.DROPOUT:
        q_index = load_vector(mask.q_indices, first_query, end, C.BLOCK, 0)[None, :]
        keep = dropout_keeps(q_index, key_index[:, None], score)
    if MASKED:
        visible = (columns >= query_start[:, None]) & (columns < query_stop[:, None])
    p, cap_derivative = probabilities(products, lse_rows[None, :], visible, distance, score, MASKED, C)
    dv_sum = dot(rounded(apply_dropout(p, keep, score, C.DROPOUT), grads.dtype), grads, dv_sum, C)
    delta_rows = load_vector(delta, first_query, end, C.BLOCK, 0.0)
    gradient = apply_dropout(dot(values, grads.T, None, C), keep, score, C.DROPOUT)
    ds = gradient_of_scores(p, gradient, delta_rows[None, :], visible, MASKED)
    if C.CAPPED:
        ds *= cap_derivative
    dk_sum = dot(rounded(ds, queries.dtype), queries, dk_sum, C)
    return dk_sum, dv_sum


@triton.jit
def gradient_of_scores(p, gradient, delta, visible, MASKED: tl.constexpr):
    """Return p * (gradient - delta), 0 where not `visible`; `gradient` is that of p, through dropout."""
    ds = p * (gradient - delta)
    if MASKED:
        ds = tl.where(visible, ds, 0.0)
    return ds


def flash_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    step: StepMask,
    terms: ScoreTerms,
    *,
    d_slopes: Tensor | None = None,
    precision: str = "ieee",
    queries_config: AttentionConfig | None = None,
    keys_config: AttentionConfig | None = None,
) -> None:
    """Add the gradients of a step to dq, dk, dv and d_slopes [H], all fp32 and of any strides with a dense last dim.

    Args:
        grad_out: [B, S, H, Dv] in the dtype of q.
        lse, delta: fp32 [B, H, S], over all keys: delta = sum(grad_out * out, -1) - grad_lse.

    The other arguments and errors are those of `forward.flash_forward`.
    """
    grad_out, lse, delta = (x if x.stride(-1) == 1 else x.contiguous() for x in (grad_out, lse, delta))
    check_row_strides(q=q, k=k, v=v, grad_out=grad_out)
    if q.numel() == 0 or k.numel() == 0:
        return
    index_tensors = step.index_tensors_on(q.device)
    tensors: dict[str, Any] = {
        "grad_out": heads_tensor(grad_out),
        "lse": heads_tensor(lse),
        "delta": heads_tensor(delta),
    }
    qkv = q, k, v

    config = queries_config or default_config("queries", q, v, terms, precision)
    tiles = query_tiles(step, config.rows, config.block_size, q.device)
    tile_slope_grads = None
    if d_slopes is not None:
        tile_slope_grads = q.new_empty((len(tiles), q.shape[0], q.shape[2]), dtype=torch.float32)
    arguments: dict[str, Any] = {
        "dq": heads_tensor(dq),
        "d_slopes": tile_slope_grads,
        "mask": mask_arguments(index_tensors, "starts", "stops"),
    }
    tma_tensors = {"k_tma": k, "v_tma": v}
    launch_tiles(queries_kernel, tiles, config, qkv, terms, precision, tma_tensors, **tensors, **arguments)
    if d_slopes is not None and tile_slope_grads is not None:
        d_slopes += tile_slope_grads.sum((0, 1))

    config = keys_config or default_config("keys", q, v, terms, precision)
    tiles = key_tiles(step, config.rows, config.block_size, q.device)
    arguments = {
        "dk": heads_tensor(dk),
        "dv": heads_tensor(dv),
        "mask": mask_arguments(index_tensors, "query_starts", "query_stops"),
    }
    tma_tensors = {"q_tma": q, "grad_tma": grad_out}
    launch_tiles(
        keys_kernel, tiles, config, qkv, terms, precision, tma_tensors, are_key_tiles=True, **tensors, **arguments
    )


fix_cache_keys(__name__)
