"""Attention of queries over some or all of their keys, accumulated in an fp32 state.

    s[i, j] = score(q[i] . k[j]) in base 2                              blocks.py
    row_max[i] = max(row_max[i], ceil(max_j s[i, j]))
    row_sum[i], acc[i] = those * 2^(old row_max - row_max) + sum_j 2^(s[i, j] - row_max[i]) * (1, dropped(v[j]))
    out = acc / row_sum,  lse = ln 2 * (row_max + log2(row_sum))

Softmax is usually kept relative to the highest score. Here row_max is the next whole number above it, in base 2:
rescaling is by powers of 2 and rounds nothing, so the number of steps, blocks and launches over the keys does not
matter. The state holds row_max * ln 2; reading it recovers row_max exactly. A step of a ring reads and writes the
state; the first step does not read it (IS_FIRST_STEP). A single step has no state: it writes out and lse, with sinks.

A mask is an interval of keys for each query (`tiles.StepMask`): causal, windows, packed documents, different lengths,
and any part of these that belongs to a rank. Tensors are [batch, seq, heads, head_dim]; k and v may have fewer heads, v
another head dim.

A key that a query does not see changes no bit of its results as long as it is finite. NaN and infinities in k or v
reach all queries whose tile visits a block with such a key, also those that do not see it (0 times them is NaN); those
in q or grad_out reach the dk and dv of all keys whose tile visits the block of such a query. A tile does not visit
blocks of keys that none of its queries sees, or of queries that see none of its keys.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867); Dao, "FlashAttention-2"
(arXiv:2307.08691).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cache_keys import fix_cache_keys
from ..language import dot, rounded, zeros
from .blocks import (
    LN_2,
    LOG2_E,
    UNSPECIALIZED,
    base_2_factor,
    count_masked_blocks,
    dropout_keeps,
    head_rows,
    head_score,
    head_vector,
    load_block,
    load_full_block,
    load_vector,
    load_visible_keys,
    masked_block_start,
    program_tile,
    scores_from_products,
    store_block,
)
from .configs import AttentionConfig
from .launch import (
    ScoreTerms,
    check_row_strides,
    default_config,
    dense_vector,
    heads_tensor,
    launch_tiles,
    mask_arguments,
)
from .tiles import StepMask, query_tiles

State = tuple[Tensor, Tensor, Tensor]


class StateArguments(NamedTuple):
    """The state as a kernel argument."""

    acc: Any  # `HeadsTensor` [B, S, H, DV]
    row_max: Any  # `HeadsTensor` [B, H, S]
    row_sum: Any  # `HeadsTensor` [B, H, S]


@triton.jit(do_not_specialize=UNSPECIALIZED)
def forward_kernel(
    q, k, v, k_tma, v_tma, state, out, lse, sinks, mask, scores,
    tiles, tile_count, heads, batch_heads, interleaved_heads, heads_per_kv_head,
    seed_low, seed_high, dropped_below, first_head,
    C: tl.constexpr,
):  # fmt: skip
    """Compute attention of a tile of queries: update `state`, or, if it is None, store out and lse.

    q, k, v, out and lse are `HeadsTensor`. With TMA k_tma and v_tma are descriptors of k and v. With a state, out, lse
    and sinks are None; sinks may always be None.
    """
    tile = program_tile(tiles, tile_count, heads, batch_heads, interleaved_heads)
    batch, head, row, row_end = tile.batch, tile.head, tile.row, tile.row_end
    kv_head = head // heads_per_kv_head
    kv_rows = head_rows(k, batch, kv_head), head_rows(v, batch, kv_head)
    queries = load_block(head_rows(q, batch, head), row, row_end, C.D, C.ROWS, C.PADDED_D)
    visible_keys = load_visible_keys(mask.starts, mask.stops, mask, row, row_end, C)
    score = head_score(scores, batch, head, (first_head, seed_low, seed_high, dropped_below), C)

    if C.IS_FIRST_STEP:
        row_max, row_sum, acc = empty_softmax(C)
    else:
        row_max, row_sum, acc = load_state(state, batch, head, row, row_end, C)
    key_bounds = tile.begin, tile.end, tile.full_begin, tile.full_end
    row_max, row_sum, acc = add_all_keys(
        row_max, row_sum, acc, queries, kv_rows, k_tma, v_tma, batch, kv_head, 0, key_bounds, visible_keys,
        mask.k_indices, score, False, C,
    )  # fmt: skip

    row_indices = row + tl.arange(0, C.ROWS)
    if out is not None:
        if sinks is not None:
            row_max, row_sum, acc = add_sink(row_max, row_sum, acc, tl.load(sinks + head) * LOG2_E)
        acc, row_lse = finalize_softmax(row_max, row_sum, acc)
        tl.store(head_vector(lse, batch, head) + row_indices, row_lse, mask=row_indices < row_end)
        store_block(head_rows(out, batch, head), rounded(acc, out.ptr.dtype.element_ty), row, row_end, C.DV)
    else:
        tl.store(head_vector(state.row_max, batch, head) + row_indices, row_max * LN_2, mask=row_indices < row_end)
        tl.store(head_vector(state.row_sum, batch, head) + row_indices, row_sum, mask=row_indices < row_end)
        store_block(head_rows(state.acc, batch, head), acc, row, row_end, C.DV)


@triton.jit
def add_all_keys(
    row_max, row_sum, acc, queries, kv_rows, k_tma, v_tma, batch, kv_head, first_row, key_bounds, visible_keys,
    k_indices, score,
    NO_LICM: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Return (row_max, row_sum, acc) after adding the keys [begin, end) of `key_bounds`, unmasked blocks first.

    The keys are stored from row `first_row` of `kv_rows` on. NO_LICM: loop invariants are computed inside the loop,
    since hoisted they would take registers.
    """
    k_rows, v_rows = kv_rows
    begin, end, full_begin, full_end = key_bounds
    for first_key in tl.range(full_begin, full_end, C.BLOCK, disable_licm=NO_LICM):
        row = first_row + first_key
        keys = load_full_block(k_tma, k_rows, batch, kv_head, row, C.D, C.BLOCK, C.PADDED_D, C.TMA)
        v_block = load_full_block(v_tma, v_rows, batch, kv_head, row, C.DV, C.BLOCK, C.PADDED_DV, C.TMA)
        row_max, row_sum, acc = add_key_block(
            row_max, row_sum, acc, queries, keys, v_block, first_key, end, visible_keys, k_indices, score, False, C
        )
    num_masked_blocks = count_masked_blocks(begin, end, full_begin, full_end, C.BLOCK)
    for block in tl.range(0, num_masked_blocks, disable_licm=NO_LICM):
        first_key = masked_block_start(block, begin, full_begin, full_end, C.BLOCK)
        keys = load_block(k_rows, first_row + first_key, first_row + end, C.D, C.BLOCK, C.PADDED_D)
        v_block = load_block(v_rows, first_row + first_key, first_row + end, C.DV, C.BLOCK, C.PADDED_DV)
        row_max, row_sum, acc = add_key_block(
            row_max, row_sum, acc, queries, keys, v_block, first_key, end, visible_keys, k_indices, score, True, C
        )
    return row_max, row_sum, acc


@triton.jit
def add_key_block(
    row_max,
    row_sum,
    acc,
    queries,
    keys,
    v_block,
    first_key,
    end,
    visible_keys,
    k_indices,
    score,
    MASKED: tl.constexpr,
    C: tl.constexpr,
):
    """Return (row_max, row_sum, acc) after adding the keys of one block."""
    products = dot(queries, keys.T, None, C)
    columns = first_key + tl.arange(0, C.BLOCK)
    k_index = columns
    distance = products
    if C.ALIBI or C.DROPOUT:
        k_index = load_vector(k_indices, first_key, end, C.BLOCK, 0)
    if C.ALIBI:
        distance = tl.abs(visible_keys.q_position[:, None] - k_index[None, :]).to(tl.float32)
    s, _ = scores_from_products(products, distance, score, C)
    if MASKED:
        visible = (columns[None, :] >= visible_keys.start[:, None]) & (columns[None, :] < visible_keys.stop[:, None])
        s = tl.where(visible, s, float("-inf"))
    factor = base_2_factor(score, C)
    new_max = tl.maximum(row_max, tl.ceil(tl.max(s, 1) * factor))
    base = tl.where(new_max == float("-inf"), 0.0, new_max)  # -inf - -inf would be NaN
    p = tl.exp2(s * factor - base[:, None])
    old_scale = tl.exp2(row_max - base)
    row_sum = row_sum * old_scale + tl.sum(p, 1)
    if C.DROPOUT:
        keep = dropout_keeps(visible_keys.q_index[:, None], k_index[None, :], score)
        p = tl.where(keep, p * score.keep_scale, 0.0)
    acc = dot(rounded(p, v_block.dtype), v_block, acc * old_scale[:, None], C)
    return new_max, row_sum, acc


@triton.jit
def empty_softmax(C: tl.constexpr):
    """Return (row_max, row_sum, acc) before the first key."""
    ROWS: tl.constexpr = C.ROWS
    return tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32), zeros(ROWS, C.PADDED_DV)


@triton.jit
def load_state(state, batch, head, row, row_end, C: tl.constexpr):
    """Return (row_max, row_sum, acc) of a state, relative to a whole row_max in base 2."""
    exponent = load_vector(head_vector(state.row_max, batch, head), row, row_end, C.ROWS, float("-inf")) * LOG2_E
    row_max = tl.floor(exponent + 0.5)
    # This kernel stores a whole number times ln 2, and both products round; other writers may store any number.
    is_exact = (tl.abs(exponent - row_max) <= tl.abs(exponent) * 2.4e-7) | (exponent == float("-inf"))
    scale = tl.where(is_exact, 1.0, tl.exp2(exponent - row_max))
    row_sum = load_vector(head_vector(state.row_sum, batch, head), row, row_end, C.ROWS, 0.0) * scale
    acc = load_block(head_rows(state.acc, batch, head), row, row_end, C.DV, C.ROWS, C.PADDED_DV) * scale[:, None]
    return row_max, row_sum, acc


@triton.jit
def add_sink(row_max, row_sum, acc, sink):
    """Return (row_max, row_sum, acc) with one more key of score `sink`, in base 2, and value 0."""
    new_max = tl.maximum(row_max, tl.ceil(sink))
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    old_scale = tl.exp2(row_max - base)
    return new_max, row_sum * old_scale + tl.exp2(sink - base), acc * old_scale[:, None]


@triton.jit
def finalize_softmax(row_max, row_sum, acc):
    """Return (out, lse): 0 and -inf for rows that see no keys."""
    is_empty = row_sum == 0
    row_sum = tl.where(is_empty, 1.0, row_sum)
    return acc * (1.0 / row_sum)[:, None], tl.where(is_empty, float("-inf"), (row_max + tl.log2(row_sum)) * LN_2)


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: StepMask,
    terms: ScoreTerms,
    state: State,
    *,
    is_uninitialized: bool = False,
    precision: str = "ieee",
    config: AttentionConfig | None = None,
) -> None:
    """Add the keys k and values v to `state`: (acc [B, S, H, Dv], row_max [B, H, S], row_sum [B, H, S]), fp32.

    Args:
        q, k, v: bf16, fp16 or fp32 of any strides with a dense last dim.
        is_uninitialized: `state` is uninitialized memory: it is written, but not read.
        precision: precision of fp32 products, "ieee" or "tf32" (tensor cores, 10 bits of mantissa).
        config: tiles that replace the default ones.

    Raises:
        ValueError: rows are too far apart, see `launch.check_row_strides`.
    """
    results = {"state": StateArguments(*map(heads_tensor, state))}
    _launch(q, k, v, step, terms, results, precision, config, is_first_step=is_uninitialized)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: StepMask,
    terms: ScoreTerms,
    *,
    sinks: Tensor | None = None,
    precision: str = "ieee",
    config: AttentionConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out [B, S, H, Dv] in the dtype of q, lse fp32 [B, H, S]): 0 and -inf for a query that sees nothing.

    `sinks` [H] are scores of one more key per head, whose value is 0; they count in lse. The other arguments and errors
    are those of `flash_forward`.
    """
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    results = {"out": heads_tensor(out), "lse": heads_tensor(lse), "sinks": dense_vector(sinks)}
    _launch(q, k, v, step, terms, results, precision, config, is_first_step=True)
    return out, lse


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: StepMask,
    terms: ScoreTerms,
    results: Mapping[str, Any],
    precision: str,
    config: AttentionConfig | None,
    *,
    is_first_step: bool,
) -> None:
    """Launch `forward_kernel`; `results` are the state, or out, lse and sinks."""
    check_row_strides(q=q, k=k, v=v)
    if q.numel() == 0:
        return
    config = config or default_config("forward", q, v, terms, precision)
    tiles = query_tiles(step, config.rows, config.block_size, q.device)
    tma_tensors = {"k_tma": k, "v_tma": v}
    arguments = {
        **dict.fromkeys(("state", "out", "lse", "sinks")),
        **results,
        "mask": mask_arguments(step.index_tensors_on(q.device), "starts", "stops"),
    }
    launch_tiles(
        forward_kernel,
        tiles,
        config,
        (q, k, v),
        terms,
        precision,
        tma_tensors,
        is_first_step=is_first_step,
        **arguments,
    )


fix_cache_keys(__name__)
