"""Attention of queries over keys that may be some of those they see, from and to a state in fp32.

    s[i, j] = score(q[i] . k[j]) in base 2                              attention_scores.py
    n[i]    = max(n[i], ceil(max_j s[i, j]))
    total[i], weighted[i] = those * 2^(old n - n) + sum_j 2^(s[i, j] - n[i]) * (1, dropped(v[j]))
    out = weighted / total,  lse = ln 2 * (n + log2(total))

Softmax is usually kept relative to the highest score. Here it is the next whole number above it, in base 2: rescaling
is by powers of 2 and rounds nothing, so it does not matter in how many steps, blocks and launches keys are taken, and a
ring of any size rounds once. The state holds n * ln 2 (`highest`); what comes back from it is n again, exactly.

A step of a ring reads the state and writes it; the first need not read it (FIRST), the last writes out and lse in its
place (`out` given), with the sinks in them.

In fp8 (`scales` given) q, k and v come as e4m3, as flash_attention_fp8.py makes them, v turned as matrix units read it;
p is rounded to e4m3 too. It keeps 2^-SHIFT of its range above 1: n is SHIFT lower, and what was 2^-6, the smallest
number of full precision, is 2^-14 then.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867); Dao, "FlashAttention-2"
(arXiv:2307.08691).
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from ..gemm.tiles import dot, rounded
from ..resources import Variant
from .blocks import (
    base_of,
    block_pointers,
    load_block,
    load_rows,
    load_turned,
    load_whole,
    load_whole_turned,
    masked_block,
    masked_blocks,
    program_tile,
    row_of,
)
from .scores import LN_2, LOG2_E, factor_of, kept, scores_of
from .variants import ODD, attention_shapes

FP8_SHIFT = tl.constexpr(8)  # 2^8 is a number of e4m3, 2^9 is none


@triton.jit(do_not_specialize=ODD)
def forward_kernel(
    q,
    k,
    v,
    k_tma,
    v_tma,
    weighted,
    highest,
    total,
    out,
    lse,
    sinks,
    scales,
    slopes,
    starts,
    stops,
    places,
    q_indices,
    k_indices,
    tiles,
    tile_count,
    heads,
    batch_heads,
    together,
    shared,
    scale,
    softcap,
    keep_scale,
    seed_low,
    seed_high,
    dropped_below,
    first_head,
    q_strides,
    k_strides,
    v_strides,
    weighted_strides,
    state_strides,
    out_strides,
    lse_strides,
    FIRST: tl.constexpr,
    CAPPED: tl.constexpr,
    DROPOUT: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PADDED_D: tl.constexpr,
    PADDED_DV: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`shared` query heads read each key head; k_tma and v_tma are descriptors with TMA.

    fp8 alone has scales [batch, heads, 2], of products and of v; v is [B, H, D, S], and its strides are of B, D and H.
    """
    ALIBI: tl.constexpr = slopes is not None
    FP8: tl.constexpr = scales is not None
    SHIFT: tl.constexpr = FP8_SHIFT if FP8 else 0
    _, batch, head, row, row_end, begin, end, full_begin, full_end = program_tile(
        tiles, tile_count, heads, batch_heads, together
    )
    k_base = base_of(k, batch, head // shared, k_strides)
    v_base = base_of(v, batch, head // shared, v_strides)
    queries = load_block(base_of(q, batch, head, q_strides), row, row_end, q_strides[1], D, ROWS, PADDED_D)
    first_key = load_rows(starts, row, row_end, ROWS, 0)
    last_key = load_rows(stops, row, row_end, ROWS, 0)

    slope = 0.0
    place = first_key
    query = first_key
    if ALIBI:
        slope = tl.load(slopes + head)
        place = load_rows(places, row, row_end, ROWS, 0)
    if DROPOUT:
        query = load_rows(q_indices, row, row_end, ROWS, 0)
    if FP8:
        scale *= tl.load(scales + (batch * heads + head) * 2)
        v_scale = tl.load(scales + (batch * heads + head) * 2 + 1) * keep_scale
        keep_scale = 1.0  # with it p might be above all numbers of e4m3

    if FIRST:
        n = tl.full((ROWS,), float("-inf"), tl.float32)
        sums = tl.zeros((ROWS,), tl.float32)
        values = tl.zeros((ROWS, PADDED_DV), tl.float32)
    else:
        n, sums, values = load_state(
            base_of(weighted, batch, head, weighted_strides), row_of(highest, batch, head, state_strides),
            row_of(total, batch, head, state_strides), row, row_end, weighted_strides[1], DV, ROWS, PADDED_DV,
        )  # fmt: skip
        if FP8:
            values *= 1.0 / v_scale

    for key in tl.range(full_begin, full_end, BLOCK):
        keys = load_whole(k_tma, k_base, batch, head // shared, key, k_strides[1], D, BLOCK, PADDED_D, TMA)
        if FP8:
            v_block = load_whole_turned(
                v_tma, v_base, batch, head // shared, key, v_strides[1], DV, BLOCK, PADDED_DV, TMA
            )
        else:
            v_block = load_whole(v_tma, v_base, batch, head // shared, key, v_strides[1], DV, BLOCK, PADDED_DV, TMA)
        n, sums, values = fold(
            n, sums, values, queries, keys, v_block, key, end, first_key, last_key, place, query, k_indices, slope,
            scale, softcap, keep_scale, head + first_head, batch, seed_low, seed_high, dropped_below,
            False, CAPPED, ALIBI, DROPOUT, PRECISION, BLOCK, SHIFT,
        )  # fmt: skip
    for index in tl.range(0, masked_blocks(begin, end, full_begin, full_end, BLOCK)):
        key = masked_block(index, begin, full_begin, full_end, BLOCK)
        keys = load_block(k_base, key, end, k_strides[1], D, BLOCK, PADDED_D)
        if FP8:
            v_block = load_turned(v_base, key, end, v_strides[1], DV, BLOCK, PADDED_DV)
        else:
            v_block = load_block(v_base, key, end, v_strides[1], DV, BLOCK, PADDED_DV)
        n, sums, values = fold(
            n, sums, values, queries, keys, v_block, key, end, first_key, last_key, place, query, k_indices, slope,
            scale, softcap, keep_scale, head + first_head, batch, seed_low, seed_high, dropped_below,
            True, CAPPED, ALIBI, DROPOUT, PRECISION, BLOCK, SHIFT,
        )  # fmt: skip

    if FP8:
        values *= v_scale
    here = row + tl.arange(0, ROWS)
    if out is not None:
        if sinks is not None:
            n, sums, values = add_sink(n, sums, values, tl.load(sinks + head) * LOG2_E)
        none = sums == 0
        sums = tl.where(none, 1.0, sums)
        values *= (1.0 / sums)[:, None]
        log = tl.where(none, float("-inf"), (n + tl.log2(sums)) * LN_2)
        tl.store(row_of(lse, batch, head, lse_strides) + here, log, mask=here < row_end)
        pointers, mask = block_pointers(
            base_of(out, batch, head, out_strides), row, row_end, out_strides[1], DV, ROWS, PADDED_DV
        )
        tl.store(pointers, rounded(values, out.dtype.element_ty), mask=mask)
    else:
        tl.store(row_of(highest, batch, head, state_strides) + here, n * LN_2, mask=here < row_end)
        tl.store(row_of(total, batch, head, state_strides) + here, sums, mask=here < row_end)
        pointers, mask = block_pointers(
            base_of(weighted, batch, head, weighted_strides), row, row_end, weighted_strides[1], DV, ROWS, PADDED_DV
        )
        tl.store(pointers, values, mask=mask)


@triton.jit
def fold(
    n,
    sums,
    values,
    queries,
    keys,
    v_block,
    key,
    end,
    first_key,
    last_key,
    place,
    query,
    k_indices,
    slope,
    scale,
    softcap,
    keep_scale,
    head,
    batch,
    seed_low,
    seed_high,
    dropped_below,
    MASKED: tl.constexpr,
    CAPPED: tl.constexpr,
    ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr = 0,
):
    """(n, total, weighted) with the keys of one block in them."""
    products = dot(queries, keys.T, None, PRECISION)
    columns = key + tl.arange(0, BLOCK)
    index = columns
    distance = products
    if ALIBI or DROPOUT:
        index = load_rows(k_indices, key, end, BLOCK, 0)
    if ALIBI:
        distance = tl.abs(place[:, None] - index[None, :]).to(tl.float32)
    s, _ = scores_of(products, distance, slope, scale, softcap, CAPPED, ALIBI)
    if MASKED:
        s = tl.where(
            (columns[None, :] >= first_key[:, None]) & (columns[None, :] < last_key[:, None]), s, float("-inf")
        )
    factor = factor_of(scale, CAPPED, ALIBI)
    now = tl.maximum(n, tl.ceil(tl.max(s, 1) * factor) - SHIFT)
    base = tl.where(now == float("-inf"), 0.0, now)  # -inf - -inf would be NaN
    p = tl.exp2(s * factor - base[:, None])
    before = tl.exp2(n - base)
    sums = sums * before + tl.sum(p, 1)
    if DROPOUT:
        keep = kept(query[:, None], index[None, :], head, batch, seed_low, seed_high, dropped_below)
        p = tl.where(keep, p * keep_scale, 0.0)
    values = dot(rounded(p, v_block.dtype), v_block, values * before[:, None], PRECISION)
    return now, sums, values


@triton.jit
def load_state(
    weighted,
    highest,
    total,
    row,
    row_end,
    stride,
    DV: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED_DV: tl.constexpr,
):
    """(n, total, weighted): `highest` in base 2 as a whole number, and the others relative to that."""
    exponent = load_rows(highest, row, row_end, ROWS, float("-inf")) * LOG2_E
    n = tl.floor(exponent + 0.5)
    # What this kernel has written is n but for the rounding of n * ln 2 and of this product; others write any number.
    exact = (tl.abs(exponent - n) <= tl.abs(exponent) * 2.4e-7) | (exponent == float("-inf"))
    by = tl.where(exact, 1.0, tl.exp2(exponent - n))
    sums = load_rows(total, row, row_end, ROWS, 0.0) * by
    values = load_block(weighted, row, row_end, stride, DV, ROWS, PADDED_DV) * by[:, None]
    return n, sums, values


@triton.jit
def add_sink(n, sums, values, sink):
    """The state with one more key of score `sink`, in base 2, and value 0."""
    now = tl.maximum(n, tl.ceil(sink))
    base = tl.where(now == float("-inf"), 0.0, now)
    before = tl.exp2(n - base)
    return now, sums * before + tl.exp2(sink - base), values * before[:, None]


def compile_variants(arch: int) -> Iterator[Variant]:
    """The kernel as `attention_variants` says: plain ones from and to a state, the others from none to out and lse."""
    for shape in attention_shapes("forward", arch, fp8=True):
        ends = shape.rich
        yield shape.variant(
            forward_kernel,
            {
                "k_tma": shape.descriptor(shape.head_dim),
                "v_tma": shape.descriptor(shape.v_head_dim, turned=shape.kind == "fp8"),
                **dict.fromkeys(("weighted", "highest", "total"), None if ends else "*fp32"),
                "out": f"*{'bf16' if shape.kind == 'fp8' else shape.dtype}" if ends else None,
                "lse": "*fp32" if ends else None,
                "sinks": "*fp32" if ends else None,
                "scales": "*fp32" if shape.kind == "fp8" else None,
                **dict.fromkeys(("starts", "stops"), "*i32"),
                **dict.fromkeys(("weighted_strides", "out_strides"), ("i32",) * 3),
                **dict.fromkeys(("state_strides", "lse_strides"), ("i32",) * 2),
            },
            {"FIRST": ends},
        )
