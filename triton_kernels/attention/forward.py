"""Attention of queries over some or all of their keys, accumulated in an fp32 state.

    s[i, j] = score(q[i] . k[j]) in base 2                              blocks.py
    n[i]    = max(n[i], ceil(max_j s[i, j]))
    total[i], weighted[i] = those * 2^(old n - n) + sum_j 2^(s[i, j] - n[i]) * (1, dropped(v[j]))
    out = weighted / total,  lse = ln 2 * (n + log2(total))

Softmax is usually kept relative to the highest score. Here n is the next whole number above it, in base 2: rescaling
is by powers of 2 and rounds nothing, so the number of steps, blocks and launches over the keys does not matter. The
state holds n * ln 2 (`highest`); reading it recovers n exactly. A step of a ring reads the state and writes it; the
first step does not read it (FIRST). A single step has no state: it writes out and lse, with the sinks.

A mask is an interval of keys for each query (`tiles.StepMask`): causal, windows, packed documents, different lengths,
and any part of these that belongs to a rank. Tensors are [batch, seq, heads, head_dim]; k and v may have fewer heads, v
another head dim.

A key that a query does not see changes no bit of its results as long as it is finite. NaN and infinities in k or v
reach all queries whose tile visits a block with such a key, also those that do not see it (0 times them is NaN); those
in q or grad_out reach, in dk and dv, all keys whose tile visits the block of such a query. A tile does not visit blocks
of keys that none of its queries sees, or of queries that see none of its keys.

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
    dropout_keeps,
    head_rows,
    head_score,
    head_vector,
    load_block,
    load_seen,
    load_vector,
    load_whole,
    masked_block,
    masked_blocks,
    program_tile,
    scores_from_products,
    store_block,
)
from .configs import AttentionConfig
from .launch import (
    Terms,
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

    weighted: Any  # `HeadsTensor` [B, S, H, DV]
    highest: Any  # `HeadsTensor` [B, H, S]
    total: Any  # `HeadsTensor` [B, H, S]


@triton.jit(do_not_specialize=UNSPECIALIZED)
def forward_kernel(
    q, k, v, k_tma, v_tma, state, out, lse, sinks, mask, scores,
    tiles, tile_count, heads, batch_heads, together, shared,
    seed_low, seed_high, dropped_below, first_head,
    C: tl.constexpr,
):  # fmt: skip
    """Compute attention of a tile of queries: update `state`, or, if it is None, store out and lse.

    q, k, v, out and lse are `HeadsTensor`; `shared` query heads read each key head. With TMA k_tma and v_tma are
    descriptors of k and v. With a state out, lse and sinks are None; sinks may always be None.
    """
    tile = program_tile(tiles, tile_count, heads, batch_heads, together)
    batch, head, row, row_end = tile.batch, tile.head, tile.row, tile.row_end
    rows = head_rows(k, batch, head // shared), head_rows(v, batch, head // shared)
    queries = load_block(head_rows(q, batch, head), row, row_end, C.D, C.ROWS, C.PADDED_D)
    seen = load_seen(mask.first, mask.last, mask, row, row_end, C)
    score = head_score(scores, batch, head, (first_head, seed_low, seed_high, dropped_below), C)

    if C.FIRST:
        n, row_sums, weighted = empty_sums(C)
    else:
        n, row_sums, weighted = load_state(state, batch, head, row, row_end, C)
    bounds = tile.begin, tile.end, tile.full_begin, tile.full_end
    n, row_sums, weighted = add_all_keys(
        n, row_sums, weighted, queries, rows, k_tma, v_tma, batch, head // shared, 0, bounds, seen, mask.k_indices,
        score, False, C,
    )  # fmt: skip

    here = row + tl.arange(0, C.ROWS)
    if out is not None:
        if sinks is not None:
            n, row_sums, weighted = add_sink(n, row_sums, weighted, tl.load(sinks + head) * LOG2_E)
        weighted, log = normalize_sums(n, row_sums, weighted)
        tl.store(head_vector(lse, batch, head) + here, log, mask=here < row_end)
        store_block(head_rows(out, batch, head), rounded(weighted, out.ptr.dtype.element_ty), row, row_end, C.DV)
    else:
        tl.store(head_vector(state.highest, batch, head) + here, n * LN_2, mask=here < row_end)
        tl.store(head_vector(state.total, batch, head) + here, row_sums, mask=here < row_end)
        store_block(head_rows(state.weighted, batch, head), weighted, row, row_end, C.DV)


@triton.jit
def add_all_keys(
    n, row_sums, weighted, queries, rows, k_tma, v_tma, batch, key_head, first, bounds, seen, k_indices, score,
    NO_LICM: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Return (n, row_sums, weighted) after adding the keys [begin, end) of `bounds`, unmasked blocks first.

    The keys are stored from row `first` on of `rows`, of k and of v. NO_LICM: loop invariants are computed inside the
    loop, since hoisted they would take registers.
    """
    k_rows, v_rows = rows
    begin, end, full_begin, full_end = bounds
    for key in tl.range(full_begin, full_end, C.BLOCK, disable_licm=NO_LICM):
        keys = load_whole(k_tma, k_rows, batch, key_head, first + key, C.D, C.BLOCK, C.PADDED_D, C.TMA)
        v_block = load_whole(v_tma, v_rows, batch, key_head, first + key, C.DV, C.BLOCK, C.PADDED_DV, C.TMA)
        n, row_sums, weighted = add_key_block(
            n, row_sums, weighted, queries, keys, v_block, key, end, seen, k_indices, score, False, C
        )
    blocks = masked_blocks(begin, end, full_begin, full_end, C.BLOCK)
    for index in tl.range(0, blocks, disable_licm=NO_LICM):
        key = masked_block(index, begin, full_begin, full_end, C.BLOCK)
        keys = load_block(k_rows, first + key, first + end, C.D, C.BLOCK, C.PADDED_D)
        v_block = load_block(v_rows, first + key, first + end, C.DV, C.BLOCK, C.PADDED_DV)
        n, row_sums, weighted = add_key_block(
            n, row_sums, weighted, queries, keys, v_block, key, end, seen, k_indices, score, True, C
        )
    return n, row_sums, weighted


@triton.jit
def add_key_block(
    n,
    row_sums,
    weighted,
    queries,
    keys,
    v_block,
    key,
    end,
    seen,
    k_indices,
    score,
    MASKED: tl.constexpr,
    C: tl.constexpr,
):
    """Return (n, row_sums, weighted) after adding the keys of one block."""
    products = dot(queries, keys.T, None, C)
    columns = key + tl.arange(0, C.BLOCK)
    index = columns
    distance = products
    if C.ALIBI or C.DROPOUT:
        index = load_vector(k_indices, key, end, C.BLOCK, 0)
    if C.ALIBI:
        distance = tl.abs(seen.place[:, None] - index[None, :]).to(tl.float32)
    s, _ = scores_from_products(products, distance, score, C)
    if MASKED:
        visible = (columns[None, :] >= seen.first[:, None]) & (columns[None, :] < seen.last[:, None])
        s = tl.where(visible, s, float("-inf"))
    factor = base_2_factor(score, C)
    now = tl.maximum(n, tl.ceil(tl.max(s, 1) * factor))
    base = tl.where(now == float("-inf"), 0.0, now)  # -inf - -inf would be NaN
    p = tl.exp2(s * factor - base[:, None])
    before = tl.exp2(n - base)
    row_sums = row_sums * before + tl.sum(p, 1)
    if C.DROPOUT:
        keep = dropout_keeps(seen.index[:, None], index[None, :], score)
        p = tl.where(keep, p * score.keep_scale, 0.0)
    weighted = dot(rounded(p, v_block.dtype), v_block, weighted * before[:, None], C)
    return now, row_sums, weighted


@triton.jit
def empty_sums(C: tl.constexpr):
    """Return (n, row_sums, weighted) before the first key."""
    ROWS: tl.constexpr = C.ROWS
    return tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32), zeros(ROWS, C.PADDED_DV)


@triton.jit
def load_state(state, batch, head, row, row_end, C: tl.constexpr):
    """(n, row_sums, weighted) of a state: n is `highest` in base 2 as a whole number, the others are relative to n."""
    exponent = load_vector(head_vector(state.highest, batch, head), row, row_end, C.ROWS, float("-inf")) * LOG2_E
    n = tl.floor(exponent + 0.5)
    # A state of this kernel holds n up to the rounding of n * ln 2 and of this product; other writers store any number.
    exact = (tl.abs(exponent - n) <= tl.abs(exponent) * 2.4e-7) | (exponent == float("-inf"))
    by = tl.where(exact, 1.0, tl.exp2(exponent - n))
    row_sums = load_vector(head_vector(state.total, batch, head), row, row_end, C.ROWS, 0.0) * by
    weighted = load_block(head_rows(state.weighted, batch, head), row, row_end, C.DV, C.ROWS, C.PADDED_DV) * by[:, None]
    return n, row_sums, weighted


@triton.jit
def add_sink(n, row_sums, weighted, sink):
    """Return (n, row_sums, weighted) with one more key of score `sink`, in base 2, and value 0."""
    now = tl.maximum(n, tl.ceil(sink))
    base = tl.where(now == float("-inf"), 0.0, now)
    before = tl.exp2(n - base)
    return now, row_sums * before + tl.exp2(sink - base), weighted * before[:, None]


@triton.jit
def normalize_sums(n, row_sums, weighted):
    """Return (out, lse): 0 and -inf for rows that have seen nothing."""
    none = row_sums == 0
    row_sums = tl.where(none, 1.0, row_sums)
    return weighted * (1.0 / row_sums)[:, None], tl.where(none, float("-inf"), (n + tl.log2(row_sums)) * LN_2)


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: StepMask,
    terms: Terms,
    state: State,
    *,
    fresh: bool = False,
    precision: str = "ieee",
    config: AttentionConfig | None = None,
) -> None:
    """Add the keys k and values v to `state`: (weighted [B, S, H, Dv], highest [B, H, S], total [B, H, S]), fp32.

    Args:
        q, k, v: bf16, fp16 or fp32 of any strides with a dense last dim.
        fresh: `state` holds nothing yet and is not read; it need not be initialized.
        precision: precision of fp32 products, "ieee" or "tf32" (tensor cores, 10 bits of mantissa).
        config: tiles that replace the default ones.

    Raises:
        ValueError: rows are too far apart, see `launch.check_row_strides`.
    """
    results = {"state": StateArguments(*map(heads_tensor, state))}
    _launch(q, k, v, step, terms, results, precision, config, is_first_step=fresh)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: StepMask,
    terms: Terms,
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
    terms: Terms,
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
    tiles = query_tiles(step, config.rows, config.block, q.device)
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
