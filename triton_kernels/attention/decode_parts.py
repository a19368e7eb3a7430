"""Attention of a few queries to a long cache, of which several programs take a part each.

    part t of a text and key head:  n_t, total_t, weighted_t         as flash_attention_forward.py, over its keys alone
    n = max_t n_t,  (total, weighted) = sum_t 2^(n_t - n) * (total_t, weighted_t)
    out = weighted / total,  lse = ln 2 * (n + log2(total))

One query would keep one multiprocessor busy and leave the others idle. All query heads of a key head, and all new
tokens, are rows of one tile, so a key is read once for them. A second kernel adds the parts up in the order of the
keys: every run gives the same bits, and n, which are whole, make its rescaling exact.

Rows of the cache lie dense in [batch, capacity, heads, dim], or in pages [pages, page_size, heads, dim]: row i of a
text is row i % page_size of page pages[text, i // page_size].

Sources: Dao et al., "Flash-Decoding for long-context inference" (2023); Kwon et al., "PagedAttention"
(arXiv:2309.06180).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl

from ..gemm.tiles import rounded
from ..resources import Variant
from .configs import config_arguments, decode_config
from .forward import fold
from .scores import LN_2

ODD = ("kv_heads", "group", "new", "tiles", "splits", "span", "page_size", "pages_stride")


@triton.jit(do_not_specialize=ODD)
def parts_kernel(
    q,
    k,
    v,
    pages,
    starts,
    stops,
    places,
    k_indices,
    slopes,
    weighted,
    highest,
    total,
    found,
    kv_heads,
    group,
    new,
    tiles,
    splits,
    span,
    page_size,
    pages_stride,
    scale,
    softcap,
    q_strides,
    k_strides,
    v_strides,
    found_strides,
    CAPPED: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PADDED_D: tl.constexpr,
    PADDED_DV: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (tile of a key head of a text, part): `span` keys, of those that its rows see.

    The part goes to weighted [tiles, splits, ROWS, PADDED_DV], highest and total [tiles, splits, ROWS], or, where it is
    the only one (`found` given), out and lse to where they belong.
    """
    ALIBI: tl.constexpr = slopes is not None
    index = tl.program_id(0)
    split = tl.program_id(1)
    batch, kv_head, head, number, there = rows_of(index, kv_heads, group, new, tiles, ROWS)
    first_key = tl.load(starts + batch * new + number, mask=there, other=0)
    last_key = tl.load(stops + batch * new + number, mask=there, other=0)
    sees = first_key < last_key
    end = tl.max(tl.where(sees, last_key, 0), 0)
    begin = tl.minimum(tl.min(tl.where(sees, first_key, 0x7FFFFFFF), 0), end) + split * span
    end = tl.minimum(end, begin + span)

    columns = tl.arange(0, PADDED_D)[None, :]
    v_columns = tl.arange(0, PADDED_DV)[None, :]
    q_rows = tl.cast(batch, tl.int64) * q_strides[0] + number.to(tl.int64) * q_strides[1] + head * q_strides[2]
    queries = tl.load(q + q_rows[:, None] + columns, mask=there[:, None] & (columns < D), other=0.0)
    slope = 0.0
    place = first_key
    if ALIBI:
        slope = tl.load(slopes + head, mask=there, other=0.0)[:, None]
        place = tl.load(places + batch * new + number, mask=there, other=0)

    n = tl.full((ROWS,), float("-inf"), tl.float32)
    sums = tl.zeros((ROWS,), tl.float32)
    values = tl.zeros((ROWS, PADDED_DV), tl.float32)
    k_base = k + tl.cast(kv_head, tl.int64) * k_strides[2]
    v_base = v + tl.cast(kv_head, tl.int64) * v_strides[2]
    for key in tl.range(begin, end, BLOCK):
        rows = key + tl.arange(0, BLOCK)
        held = rows < end
        outer = tl.zeros((BLOCK,), tl.int64) + batch
        inner = rows
        if pages is not None:
            table = pages + tl.cast(batch, tl.int64) * pages_stride
            outer = tl.load(table + rows // page_size, mask=held, other=0).to(tl.int64)
            inner = rows % page_size
        k_rows = (outer * k_strides[0] + inner.to(tl.int64) * k_strides[1])[:, None]
        v_rows = (outer * v_strides[0] + inner.to(tl.int64) * v_strides[1])[:, None]
        keys = tl.load(k_base + k_rows + columns, mask=held[:, None] & (columns < D), other=0.0)
        v_block = tl.load(v_base + v_rows + v_columns, mask=held[:, None] & (v_columns < DV), other=0.0)
        n, sums, values = fold(
            n, sums, values, queries, keys, v_block, key, end, first_key, last_key, place, number, k_indices, slope,
            scale, softcap, 1.0, 0, batch, 0, 0, 0, True, CAPPED, ALIBI, False, PRECISION, BLOCK,
        )  # fmt: skip

    if found is not None:
        store_found(found, n, sums, values, batch, number, head, there, found_strides, DV, PADDED_DV)
    else:
        slot = (tl.cast(index, tl.int64) * splits + split) * ROWS + tl.arange(0, ROWS)
        tl.store(highest + slot, n)
        tl.store(total + slot, sums)
        tl.store(weighted + slot[:, None] * PADDED_DV + v_columns, values)


@triton.jit(do_not_specialize=ODD)
def merge_kernel(
    weighted,
    highest,
    total,
    found,
    kv_heads,
    group,
    new,
    tiles,
    splits,
    found_strides,
    DV: tl.constexpr,
    PADDED_DV: tl.constexpr,
    ROWS: tl.constexpr,
):
    """out and lse of a tile, of all its parts."""
    index = tl.program_id(0)
    batch, _, head, number, there = rows_of(index, kv_heads, group, new, tiles, ROWS)
    columns = tl.arange(0, PADDED_DV)[None, :]
    n = tl.full((ROWS,), float("-inf"), tl.float32)
    sums = tl.zeros((ROWS,), tl.float32)
    values = tl.zeros((ROWS, PADDED_DV), tl.float32)
    for split in tl.range(0, splits):
        slot = (tl.cast(index, tl.int64) * splits + split) * ROWS + tl.arange(0, ROWS)
        here = tl.load(highest + slot)
        now = tl.maximum(n, here)
        base = tl.where(now == float("-inf"), 0.0, now)  # -inf - -inf would be NaN
        before, by = tl.exp2(n - base), tl.exp2(here - base)
        sums = sums * before + tl.load(total + slot) * by
        part = tl.load(weighted + slot[:, None] * PADDED_DV + columns)
        values = values * before[:, None] + part * by[:, None]
        n = now
    store_found(found, n, sums, values, batch, number, head, there, found_strides, DV, PADDED_DV)


@triton.jit
def rows_of(index, kv_heads, group, new, tiles, ROWS: tl.constexpr):
    """(text, key head, and of each row of the tile: query head, number of the query, whether there is such a row)."""
    packed = index % tiles * ROWS + tl.arange(0, ROWS)
    kv_head = index // tiles % kv_heads
    return index // (tiles * kv_heads), kv_head, kv_head * group + packed // new, packed % new, packed < group * new


@triton.jit
def store_found(found, n, sums, values, batch, number, head, there, strides, DV: tl.constexpr, PADDED_DV: tl.constexpr):
    """out in the first DV columns of found [batch, new, heads, DV + 1], lse behind it; 0 and -inf of no keys."""
    rows = found + tl.cast(batch, tl.int64) * strides[0] + number.to(tl.int64) * strides[1] + head * strides[2]
    none = sums == 0
    sums = tl.where(none, 1.0, sums)
    columns = tl.arange(0, PADDED_DV)[None, :]
    out = rounded(values * (1.0 / sums)[:, None], found.dtype.element_ty)
    tl.store(rows[:, None] + columns, out, mask=there[:, None] & (columns < DV))
    tl.store(rows + DV, tl.where(none, float("-inf"), (n + tl.log2(sums)) * LN_2), mask=there)


def compile_variants(arch: int) -> Iterator[Variant]:
    """Plain over a dense cache and rich over pages, in few rows and in many; fp32 once: it is the same everywhere."""
    wanted = [("bf16", 64, 16, False), ("bf16", 128, 16, True), ("bf16", 128, 64, False), ("bf16", 256, 64, True)]
    for kind, head_dim, rows, rich in wanted + ([("ieee", 128, 16, True)] if arch == 80 else []):
        yield _parts(arch, kind, head_dim, rows, rich)
    yield Variant(
        "attention decode merge",
        "64x128",
        arch,
        merge_kernel,
        {
            **dict.fromkeys(("weighted", "highest", "total", "found"), "*fp32"),
            **dict.fromkeys(("kv_heads", "group", "new", "tiles", "splits"), "i32"),
            "found_strides": ("i32",) * 3,
        },
        {"DV": 128, "PADDED_DV": 128, "ROWS": 64},
        {"num_warps": 8},
        frozenset(ODD),
        matrix_instruction=False,
    )


def _parts(arch: int, kind: str, head_dim: int, rows: int, rich: bool) -> Variant:
    config = decode_config(kind, head_dim, rows)
    dtype = "fp32" if kind == "ieee" else kind
    constants = config_arguments(config, head_dim, head_dim, "ieee")
    options = {name: constants.pop(name) for name in config.options()}
    arguments: dict[str, Any] = {
        **dict.fromkeys("qkv", f"*{dtype}"),
        **dict.fromkeys(("starts", "stops"), "*i32"),
        **dict.fromkeys(("pages", "places", "k_indices"), "*i32" if rich else None),
        "slopes": "*fp32" if rich else None,
        **dict.fromkeys(("weighted", "highest", "total"), None if rich else "*fp32"),
        "found": "*fp32" if rich else None,
        **dict.fromkeys(ODD, "i32"),
        **dict.fromkeys(("scale", "softcap"), "fp32"),
        **dict.fromkeys(("q_strides", "k_strides", "v_strides", "found_strides"), ("i32",) * 3),
    }
    name = f"{kind} {head_dim} {'rich, paged ' if rich else ''}{config}"
    constants["CAPPED"] = rich
    # Few rows fill no tile of wgmma and tcgen05, and the cache's bytes bound it.
    units = arch == 80 and kind != "ieee"
    return Variant("attention decode", name, arch, parts_kernel, arguments, constants, options, frozenset(ODD), units)
