"""Gradients of attention over keys that may be some of those the queries see, added to sums in fp32.

    p  = exp(score - lse),  p' = dropped(p),  dp = grad_out v^T
    ds = p' * dp - p * sums                        sums = sum_d grad_out * out (- grad_lse), made once for all keys
    dv = p'^T grad_out,  dk = scale * (dcap * ds)^T q,  dq = scale * (dcap * ds) k,  dslope = -sum ds * distance

One kernel has tiles of queries and gives dq, the other tiles of keys and gives dk and dv: each sum has one program that
adds its terms in a fixed order, so there are no atomics and every run gives the same bits. The queries of all heads
that share keys are taken by the program that has those keys.

That computes the scores and dp twice: 7 products of a block where one pass over the tiles of keys would do with 5. But
one pass has to add dq to memory in fp32 from every tile of keys: by atomics, whose order, and so whose bits, differ
from run to run, or in turns, where each tile waits for the one before it. Equal bits are promised, so it is not
offered.

Source: Dao, "FlashAttention-2" (arXiv:2307.08691), algorithm 2, in two passes.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from ..gemm.tiles import dot, rounded
from ..resources import Variant
from .blocks import (
    add_block,
    base_of,
    load_block,
    load_lse,
    load_rows,
    load_whole,
    masked_block,
    masked_blocks,
    program_tile,
    row_of,
)
from .scores import LOG2_E, dropped, gradient_of_scores, kept, probabilities
from .variants import ODD, attention_shapes


@triton.jit(do_not_specialize=ODD)
def queries_kernel(
    q,
    k,
    v,
    grad_out,
    k_tma,
    v_tma,
    lse,
    sums,
    dq,
    d_slopes,
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
    grad_strides,
    lse_strides,
    sums_strides,
    dq_strides,
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
    """dq of tiles of queries, and of each the term of d_slopes [tiles, batch, heads]."""
    ALIBI: tl.constexpr = slopes is not None
    number, batch, head, row, row_end, begin, end, full_begin, full_end = program_tile(
        tiles, tile_count, heads, batch_heads, together
    )
    k_base = base_of(k, batch, head // shared, k_strides)
    v_base = base_of(v, batch, head // shared, v_strides)
    queries = load_block(base_of(q, batch, head, q_strides), row, row_end, q_strides[1], D, ROWS, PADDED_D)
    grads = load_block(base_of(grad_out, batch, head, grad_strides), row, row_end, grad_strides[1], DV, ROWS, PADDED_DV)
    lse_rows = load_lse(row_of(lse, batch, head, lse_strides), row, row_end, ROWS) * LOG2_E
    sums_rows = load_rows(row_of(sums, batch, head, sums_strides), row, row_end, ROWS, 0.0)
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

    total = tl.zeros((ROWS, PADDED_D), tl.float32)
    slanted = tl.zeros((ROWS,), tl.float32)
    for key in tl.range(full_begin, full_end, BLOCK):
        keys = load_whole(k_tma, k_base, batch, head // shared, key, k_strides[1], D, BLOCK, PADDED_D, TMA)
        values = load_whole(v_tma, v_base, batch, head // shared, key, v_strides[1], DV, BLOCK, PADDED_DV, TMA)
        total, slanted = add_keys(
            total, slanted, queries, grads, keys, values, key, end, lse_rows, sums_rows, first_key, last_key, place,
            query, k_indices, slope, scale, softcap, keep_scale, head + first_head, batch, seed_low, seed_high,
            dropped_below, False, CAPPED, ALIBI, DROPOUT, PRECISION, BLOCK,
        )  # fmt: skip
    for index in tl.range(0, masked_blocks(begin, end, full_begin, full_end, BLOCK)):
        key = masked_block(index, begin, full_begin, full_end, BLOCK)
        keys = load_block(k_base, key, end, k_strides[1], D, BLOCK, PADDED_D)
        values = load_block(v_base, key, end, v_strides[1], DV, BLOCK, PADDED_DV)
        total, slanted = add_keys(
            total, slanted, queries, grads, keys, values, key, end, lse_rows, sums_rows, first_key, last_key, place,
            query, k_indices, slope, scale, softcap, keep_scale, head + first_head, batch, seed_low, seed_high,
            dropped_below, True, CAPPED, ALIBI, DROPOUT, PRECISION, BLOCK,
        )  # fmt: skip

    base = base_of(dq, batch, head, dq_strides)
    add_block(base, total * scale, row, row_end, dq_strides[1], D, ROWS, PADDED_D)
    if ALIBI and d_slopes is not None:
        tl.store(d_slopes + number * batch_heads + batch * heads + head, -tl.sum(slanted, 0))


@triton.jit
def add_keys(
    total,
    slanted,
    queries,
    grads,
    keys,
    values,
    key,
    end,
    lse,
    sums,
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
):
    """dq / scale, and the sums of ds * distance, with the keys of one block in them."""
    products = dot(queries, keys.T, None, PRECISION)
    columns = key + tl.arange(0, BLOCK)[None, :]
    index = columns
    distance = products
    keep = products
    seen = products
    if ALIBI or DROPOUT:
        index = load_rows(k_indices, key, end, BLOCK, 0)[None, :]
    if ALIBI:
        distance = tl.abs(place[:, None] - index).to(tl.float32)
    if DROPOUT:
        keep = kept(query[:, None], index, head, batch, seed_low, seed_high, dropped_below)
    if MASKED:
        seen = (columns >= first_key[:, None]) & (columns < last_key[:, None])
    p, slant = probabilities(products, lse[:, None], seen, distance, slope, scale, softcap, MASKED, CAPPED, ALIBI)
    gradient = dropped(dot(grads, values.T, None, PRECISION), keep, keep_scale, DROPOUT)
    ds = gradient_of_scores(p, gradient, sums[:, None], seen, MASKED)
    if ALIBI:
        slanted += tl.sum(ds * distance, 1)
    if CAPPED:
        ds *= slant
    return dot(rounded(ds, keys.dtype), keys, total, PRECISION), slanted


@triton.jit(do_not_specialize=ODD)
def keys_kernel(
    q,
    k,
    v,
    grad_out,
    q_tma,
    grad_tma,
    lse,
    sums,
    dk,
    dv,
    slopes,
    first,
    last,
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
    grad_strides,
    lse_strides,
    sums_strides,
    dk_strides,
    dv_strides,
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
    """dk and dv of tiles of keys; `heads` are those of the keys."""
    ALIBI: tl.constexpr = slopes is not None
    _, batch, kv_head, row, row_end, begin, end, full_begin, full_end = program_tile(
        tiles, tile_count, heads, batch_heads, together
    )
    keys = load_block(base_of(k, batch, kv_head, k_strides), row, row_end, k_strides[1], D, ROWS, PADDED_D)
    values = load_block(base_of(v, batch, kv_head, v_strides), row, row_end, v_strides[1], DV, ROWS, PADDED_DV)
    first_query = load_rows(first, row, row_end, ROWS, 0)
    last_query = load_rows(last, row, row_end, ROWS, 0)
    key_index = first_query
    if ALIBI or DROPOUT:
        key_index = load_rows(k_indices, row, row_end, ROWS, 0)

    dk_sum = tl.zeros((ROWS, PADDED_D), tl.float32)
    dv_sum = tl.zeros((ROWS, PADDED_DV), tl.float32)
    # Of wide heads dk and dv leave no registers for what two loops keep: all blocks are masked, in one.
    if PADDED_D + PADDED_DV > 256 and not TMA:
        full_begin = begin
        full_end = begin
    # One loop over the blocks of all heads, not one in another: loads run on from head to head, registers are saved.
    # They are also why nothing is moved in front of these loops: what costs an instruction there would be spilled.
    whole = (full_end - full_begin) // BLOCK
    for index in tl.range(0, whole * shared, disable_licm=True):
        head = kv_head * shared + index // whole
        query = full_begin + index % whole * BLOCK
        q_base = base_of(q, batch, head, q_strides)
        grad_base = base_of(grad_out, batch, head, grad_strides)
        queries = load_whole(q_tma, q_base, batch, head, query, q_strides[1], D, BLOCK, PADDED_D, TMA)
        grads = load_whole(grad_tma, grad_base, batch, head, query, grad_strides[1], DV, BLOCK, PADDED_DV, TMA)
        dk_sum, dv_sum = add_queries(
            dk_sum, dv_sum, keys, values, queries, grads, query, end, row_of(lse, batch, head, lse_strides),
            row_of(sums, batch, head, sums_strides), first_query, last_query, key_index, places, q_indices, slopes,
            scale, softcap, keep_scale, head, first_head, batch, seed_low, seed_high, dropped_below,
            False, CAPPED, ALIBI, DROPOUT, PRECISION, BLOCK,
        )  # fmt: skip
    partial = masked_blocks(begin, end, full_begin, full_end, BLOCK)
    for index in tl.range(0, partial * shared, disable_licm=True):
        head = kv_head * shared + index // partial
        query = masked_block(index % partial, begin, full_begin, full_end, BLOCK)
        queries = load_block(base_of(q, batch, head, q_strides), query, end, q_strides[1], D, BLOCK, PADDED_D)
        grads = load_block(
            base_of(grad_out, batch, head, grad_strides), query, end, grad_strides[1], DV, BLOCK, PADDED_DV
        )
        dk_sum, dv_sum = add_queries(
            dk_sum, dv_sum, keys, values, queries, grads, query, end, row_of(lse, batch, head, lse_strides),
            row_of(sums, batch, head, sums_strides), first_query, last_query, key_index, places, q_indices, slopes,
            scale, softcap, keep_scale, head, first_head, batch, seed_low, seed_high, dropped_below,
            True, CAPPED, ALIBI, DROPOUT, PRECISION, BLOCK,
        )  # fmt: skip

    base = base_of(dk, batch, kv_head, dk_strides)
    add_block(base, dk_sum * scale, row, row_end, dk_strides[1], D, ROWS, PADDED_D)
    base = base_of(dv, batch, kv_head, dv_strides)
    add_block(base, dv_sum, row, row_end, dv_strides[1], DV, ROWS, PADDED_DV)


@triton.jit
def add_queries(
    dk_sum,
    dv_sum,
    keys,
    values,
    queries,
    grads,
    query,
    end,
    lse,
    sums,
    first_query,
    last_query,
    key_index,
    places,
    q_indices,
    slopes,
    scale,
    softcap,
    keep_scale,
    head,
    first_head,
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
):
    """(dk / scale, dv) with the queries of one block in them; scores are [keys, queries] here."""
    # What is loaded where it is first needed takes no registers before.
    lse_rows = load_lse(lse, query, end, BLOCK) * LOG2_E
    products = dot(keys, queries.T, None, PRECISION)
    columns = query + tl.arange(0, BLOCK)[None, :]
    distance = products
    keep = products
    seen = products
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes + head)
        distance = tl.abs(load_rows(places, query, end, BLOCK, 0)[None, :] - key_index[:, None]).to(tl.float32)
    if DROPOUT:
        q_index = load_rows(q_indices, query, end, BLOCK, 0)[None, :]
        keep = kept(q_index, key_index[:, None], head + first_head, batch, seed_low, seed_high, dropped_below)
    if MASKED:
        seen = (columns >= first_query[:, None]) & (columns < last_query[:, None])
    p, slant = probabilities(products, lse_rows[None, :], seen, distance, slope, scale, softcap, MASKED, CAPPED, ALIBI)
    dv_sum = dot(rounded(dropped(p, keep, keep_scale, DROPOUT), grads.dtype), grads, dv_sum, PRECISION)
    sums_rows = load_rows(sums, query, end, BLOCK, 0.0)
    gradient = dropped(dot(values, grads.T, None, PRECISION), keep, keep_scale, DROPOUT)
    ds = gradient_of_scores(p, gradient, sums_rows[None, :], seen, MASKED)
    if CAPPED:
        ds *= slant
    dk_sum = dot(rounded(ds, queries.dtype), queries, dk_sum, PRECISION)
    return dk_sum, dv_sum


def compile_variants(arch: int) -> Iterator[Variant]:
    """Both kernels, as `attention_variants` says."""
    for shape in attention_shapes("queries", arch):
        yield shape.variant(
            queries_kernel,
            {
                **shape.sums(),
                "k_tma": shape.descriptor(shape.head_dim),
                "v_tma": shape.descriptor(shape.v_head_dim),
                "dq": "*fp32",
                "d_slopes": "*fp32" if shape.rich else None,
                "starts": "*i32",
                "stops": "*i32",
                "dq_strides": ("i32",) * 3,
            },
        )
    for shape in attention_shapes("keys", arch):
        yield shape.variant(
            keys_kernel,
            {
                **shape.sums(),
                "q_tma": shape.descriptor(shape.head_dim),
                "grad_tma": shape.descriptor(shape.v_head_dim),
                **dict.fromkeys(("dk", "dv"), "*fp32"),
                **dict.fromkeys(("first", "last"), "*i32"),
                **dict.fromkeys(("dk_strides", "dv_strides"), ("i32",) * 3),
            },
        )
