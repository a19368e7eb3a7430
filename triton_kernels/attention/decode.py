"""Attention of a few new tokens per text over a long cache of keys and values, dense or in pages.

    part t of a text and key head:  n_t, total_t, weighted_t         as forward.py, over its keys alone
    n = max_t n_t,  (total, weighted) = sum_t 2^(n_t - n) * (total_t, weighted_t)
    out = weighted / total,  lse = ln 2 * (n + log2(total))

One query would keep only one multiprocessor busy, so several programs take a part of the cache each. All query heads
of a key head, and all new tokens, are rows of one tile, so a key is read once for them. A second kernel adds the parts
in the order of the keys: every run produces the same bits, and its rescaling is exact because n are whole numbers.

Rows of the cache are dense in [batch, capacity, heads, dim], or in pages [pages, page_size, heads, dim]: row i of a
text is row i % page_size of page pages[text, i // page_size].

Sources: Dao et al., "Flash-Decoding for long-context inference" (2023); Kwon et al., "PagedAttention"
(arXiv:2309.06180).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cache_keys import fix_cache_keys
from ..device import on_device, operand_kind, sms_of
from ..language import rounded
from .blocks import Score, SeenKeys
from .configs import AttentionConfig, decode_config, padded_head_dim
from .forward import add_key_block, empty_sums, normalize_sums
from .launch import Terms, check_row_strides, heads_tensor, kernel_constants

_PROGRAMS_PER_SM = 2
_FEWEST_BLOCKS = 4  # minimum key blocks per part: with fewer, merging the parts costs more than splitting saves
UNSPECIALIZED = ("kv_heads", "group", "new", "tiles", "splits", "span", "page_size", "pages_stride")


class SplitParts(NamedTuple):
    """Partial results of several programs for one tile: fp32 [tiles, splits, ROWS], weighted [..., PADDED_DV]."""

    weighted: Any
    highest: Any
    total: Any


@triton.jit(do_not_specialize=UNSPECIALIZED)
def parts_kernel(
    q, k, v, pages, starts, stops, places, k_indices, scores, parts, found,
    kv_heads, group, new, tiles, splits, span, page_size, pages_stride,
    C: tl.constexpr,
):  # fmt: skip
    """Program (tile of a key head of a text, part) computes one part: `span` of the keys that its rows see.

    It stores its result to `parts`, or, if it is the only part (`found` is not None), out and lse to `found`. q, k, v
    and found are `HeadsTensor`.
    """
    ROWS: tl.constexpr = C.ROWS
    BLOCK: tl.constexpr = C.BLOCK
    index = tl.program_id(0)
    split = tl.program_id(1)
    batch, kv_head, head, number, there = packed_heads(index, kv_heads, group, new, tiles, ROWS)
    first_key = tl.load(starts + batch * new + number, mask=there, other=0)
    last_key = tl.load(stops + batch * new + number, mask=there, other=0)
    sees = first_key < last_key
    end = tl.max(tl.where(sees, last_key, 0), 0)
    begin = tl.minimum(tl.min(tl.where(sees, first_key, 0x7FFFFFFF), 0), end) + split * span
    end = tl.minimum(end, begin + span)

    columns = tl.arange(0, C.PADDED_D)[None, :]
    v_columns = tl.arange(0, C.PADDED_DV)[None, :]
    q_rows = packed_rows(q, batch, number, head)
    queries = tl.load(q_rows[:, None] + columns, mask=there[:, None] & (columns < C.D), other=0.0)
    slope = 0.0
    place = first_key
    if C.ALIBI:
        slope = tl.load(scores.slopes + head, mask=there, other=0.0)[:, None]
        place = tl.load(places + batch * new + number, mask=there, other=0)
    seen = SeenKeys(first_key, last_key, place, number)
    score = Score(slope, scores.scale, scores.softcap, 1.0, batch, 0, 0, 0, 0)

    n, row_sums, weighted = empty_sums(C)
    k_base = k.ptr + tl.cast(kv_head, tl.int64) * k.strides[2]
    v_base = v.ptr + tl.cast(kv_head, tl.int64) * v.strides[2]
    for key in tl.range(begin, end, BLOCK):
        rows = key + tl.arange(0, BLOCK)
        held = rows < end
        outer = tl.zeros((BLOCK,), tl.int64) + batch
        inner = rows
        if pages is not None:
            table = pages + tl.cast(batch, tl.int64) * pages_stride
            outer = tl.load(table + rows // page_size, mask=held, other=0).to(tl.int64)
            inner = rows % page_size
        k_rows = (outer * k.strides[0] + inner.to(tl.int64) * k.strides[1])[:, None]
        v_rows = (outer * v.strides[0] + inner.to(tl.int64) * v.strides[1])[:, None]
        keys = tl.load(k_base + k_rows + columns, mask=held[:, None] & (columns < C.D), other=0.0)
        v_block = tl.load(v_base + v_rows + v_columns, mask=held[:, None] & (v_columns < C.DV), other=0.0)
        n, row_sums, weighted = add_key_block(
            n, row_sums, weighted, queries, keys, v_block, key, end, seen, k_indices, score, True, C
        )

    if found is not None:
        store_found(found, n, row_sums, weighted, batch, number, head, there, C)
    else:
        slot = (tl.cast(index, tl.int64) * splits + split) * ROWS + tl.arange(0, ROWS)
        tl.store(parts.highest + slot, n)
        tl.store(parts.total + slot, row_sums)
        tl.store(parts.weighted + slot[:, None] * C.PADDED_DV + v_columns, weighted)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def merge_kernel(parts, found, kv_heads, group, new, tiles, splits, C: tl.constexpr):
    """Merge all parts of a tile and store its out and lse."""
    index = tl.program_id(0)
    batch, _, head, number, there = packed_heads(index, kv_heads, group, new, tiles, C.ROWS)
    columns = tl.arange(0, C.PADDED_DV)[None, :]
    n, row_sums, weighted = empty_sums(C)
    for split in tl.range(0, splits):
        slot = (tl.cast(index, tl.int64) * splits + split) * C.ROWS + tl.arange(0, C.ROWS)
        here = tl.load(parts.highest + slot)
        now = tl.maximum(n, here)
        base = tl.where(now == float("-inf"), 0.0, now)  # -inf - -inf would be NaN
        before, by = tl.exp2(n - base), tl.exp2(here - base)
        row_sums = row_sums * before + tl.load(parts.total + slot) * by
        part = tl.load(parts.weighted + slot[:, None] * C.PADDED_DV + columns)
        weighted = weighted * before[:, None] + part * by[:, None]
        n = now
    store_found(found, n, row_sums, weighted, batch, number, head, there, C)


@triton.jit
def packed_heads(index, kv_heads, group, new, tiles, ROWS: tl.constexpr):
    """(text, key head, and for each row of the tile: query head, number of the query, True if the row exists)."""
    packed = index % tiles * ROWS + tl.arange(0, ROWS)
    kv_head = index // tiles % kv_heads
    return index // (tiles * kv_heads), kv_head, kv_head * group + packed // new, packed % new, packed < group * new


@triton.jit
def packed_rows(x, batch, number, head):
    """Return the pointers to the rows of a tile in x [batch, new, heads, ...], `HeadsTensor`."""
    return x.ptr + (tl.cast(batch, tl.int64) * x.strides[0] + number.to(tl.int64) * x.strides[1] + head * x.strides[2])


@triton.jit
def store_found(found, n, row_sums, weighted, batch, number, head, there, C: tl.constexpr):
    """Store out in the first DV columns of found [batch, new, heads, DV + 1], lse in the last; 0, -inf if no keys."""
    rows = packed_rows(found, batch, number, head)
    out, log = normalize_sums(n, row_sums, weighted)
    columns = tl.arange(0, C.PADDED_DV)[None, :]
    out = rounded(out, found.ptr.dtype.element_ty)
    tl.store(rows[:, None] + columns, out, mask=there[:, None] & (columns < C.DV))
    tl.store(rows + C.DV, log, mask=there)


def flash_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    stops: Tensor,
    max_keys: int,
    terms: Terms,
    *,
    pages: Tensor | None = None,
    places: Tensor | None = None,
    k_indices: Tensor | None = None,
    splits: int | None = None,
    config: AttentionConfig | None = None,
) -> Tensor:
    """Return fp32 [batch, new, heads, v_head_dim + 1]: out, then lse; 0 and -inf for a query that sees nothing.

    Args:
        q: [batch, new, heads, head_dim], bf16, fp16 or fp32.
        k, v: [batch, capacity, kv_heads, head_dim] and [..., v_head_dim], any strides with a dense last dim; with
            `pages` [pages, page_size, kv_heads, ...].
        starts, stops: int32 [batch, new], like all tables with a dense last dim and on the device of q: query i of a
            text sees the rows [starts, stops) of it. No others are read.
        max_keys: largest number of keys of a text between its lowest start and its highest stop.
        pages: int32 [batch, most pages of a text].
        places, k_indices: for slopes only: int32 [batch, new] places of queries and [rows] of the cache's rows.
        splits: number of parts of a text of `max_keys` keys; None: as many as keep the GPU busy.
        config: tiles that replace the default ones.

    Raises:
        ValueError: rows are too far apart, see `launch.check_row_strides`.
    """
    check_row_strides(q=q, k=k, v=v)
    batch, new_tokens, heads, head_dim = q.shape
    kv_heads, v_head_dim = k.shape[2], v.shape[3]
    results = q.new_empty((batch, new_tokens, heads, v_head_dim + 1), dtype=torch.float32)
    if results.numel() == 0:
        return results
    group = heads // kv_heads
    config = config or decode_config(operand_kind(q.dtype, "ieee"), max(head_dim, v_head_dim), group * new_tokens)
    tiles = -(-group * new_tokens // config.rows)
    programs = batch * kv_heads * tiles
    if splits is None:
        splits = min(sms_of(q.device) * _PROGRAMS_PER_SM // programs, max_keys // (_FEWEST_BLOCKS * config.block))
    span = max(1, -(-max_keys // (max(1, splits) * config.block))) * config.block
    splits = max(1, -(-max_keys // span))
    parts = None
    if splits > 1:
        rows = (programs, splits, config.rows)
        parts = SplitParts(
            *(q.new_empty(size, dtype=torch.float32) for size in ((*rows, padded_head_dim(v_head_dim)), rows, rows))
        )
    sizes = {"kv_heads": kv_heads, "group": group, "new": new_tokens, "tiles": tiles, "splits": splits}
    c = kernel_constants(config, q, v, terms)
    with on_device(q):
        parts_kernel[(programs, splits)](
            q=heads_tensor(q),
            k=heads_tensor(k),
            v=heads_tensor(v),
            pages=pages,
            starts=starts,
            stops=stops,
            places=places if c.ALIBI else None,
            k_indices=k_indices if c.ALIBI else None,
            scores=terms.arguments()["scores"],
            parts=parts,
            found=heads_tensor(results) if splits == 1 else None,
            span=span,
            page_size=k.shape[1],
            pages_stride=0 if pages is None else pages.stride(0),
            **sizes,
            C=c,
            **config.options(),
        )
        if splits > 1:
            merge_kernel[(programs,)](parts=parts, found=heads_tensor(results), **sizes, C=c, num_warps=8)
    return results


fix_cache_keys(__name__)
