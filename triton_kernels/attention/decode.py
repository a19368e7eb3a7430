"""Attention of a few new tokens per sequence over a long cache of keys and values, dense or in pages.

    part t of a sequence and key head:  max_t, sum_t, acc_t         as forward.py, over its keys alone
    row_max = max over t of max_t,  (row_sum, acc) = sum_t 2^(max_t - row_max) * (sum_t, acc_t)
    out = acc / row_sum,  lse = ln 2 * (row_max + log2(row_sum))

One query would keep only one multiprocessor busy, so several programs take a part of the cache each. All query heads
of a key head, and all new tokens, are rows of one tile, so a key is read once for them. A second kernel adds the parts
in the order of the keys, so every run produces the same bits. Its rescaling is exact, because all max_t are whole.

Rows of the cache are dense in [batch, capacity, heads, dim], or in pages [pages, page_size, heads, dim]: row i of a
sequence is row i % page_size of page pages[sequence, i // page_size].

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
from .blocks import Score, VisibleKeys
from .configs import AttentionConfig, decode_config, padded_head_dim
from .forward import add_key_block, empty_softmax, finalize_softmax
from .launch import ScoreTerms, check_row_strides, heads_tensor, kernel_constants

_PROGRAMS_PER_SM = 2
_FEWEST_BLOCKS = 4  # minimum key blocks per part: with fewer, merging the parts costs more than splitting saves
UNSPECIALIZED = (
    *("kv_heads", "heads_per_kv_head", "num_new_tokens", "num_tiles", "num_splits"),
    *("keys_per_split", "page_size", "pages_stride"),
)


class SplitParts(NamedTuple):
    """Partial results of several programs for one tile: fp32 [tiles, splits, ROWS], acc [..., PADDED_DV]."""

    acc: Any
    row_max: Any
    row_sum: Any


@triton.jit(do_not_specialize=UNSPECIALIZED)
def split_kernel(
    q, k, v, pages, starts, stops, q_positions, k_indices, scores, parts, results,
    kv_heads, heads_per_kv_head, num_new_tokens, num_tiles, num_splits, keys_per_split, page_size, pages_stride,
    C: tl.constexpr,
):  # fmt: skip
    """Compute one part of a tile of a key head of a sequence: `keys_per_split` of the keys that its rows see.

    It stores its result to `parts`, or, if there is only one part, out and lse to `results` (else None). q, k, v and
    results are `HeadsTensor`.
    """
    ROWS: tl.constexpr = C.ROWS
    BLOCK: tl.constexpr = C.BLOCK
    program = tl.program_id(0)
    split = tl.program_id(1)
    batch, kv_head, head, query_index, row_exists = packed_heads(
        program, kv_heads, heads_per_kv_head, num_new_tokens, num_tiles, ROWS
    )
    key_start = tl.load(starts + batch * num_new_tokens + query_index, mask=row_exists, other=0)
    key_stop = tl.load(stops + batch * num_new_tokens + query_index, mask=row_exists, other=0)
    sees_any = key_start < key_stop
    end = tl.max(tl.where(sees_any, key_stop, 0), 0)
    begin = tl.minimum(tl.min(tl.where(sees_any, key_start, 0x7FFFFFFF), 0), end) + split * keys_per_split
    end = tl.minimum(end, begin + keys_per_split)

    columns = tl.arange(0, C.PADDED_D)[None, :]
    v_columns = tl.arange(0, C.PADDED_DV)[None, :]
    q_rows = packed_rows(q, batch, query_index, head)
    queries = tl.load(q_rows[:, None] + columns, mask=row_exists[:, None] & (columns < C.D), other=0.0)
    slope = 0.0
    q_position = key_start
    if C.ALIBI:
        slope = tl.load(scores.slopes + head, mask=row_exists, other=0.0)[:, None]
        q_position = tl.load(q_positions + batch * num_new_tokens + query_index, mask=row_exists, other=0)
    visible_keys = VisibleKeys(key_start, key_stop, q_position, query_index)
    score = Score(slope, scores.scale, scores.softcap, 1.0, batch, 0, 0, 0, 0)

    row_max, row_sum, acc = empty_softmax(C)
    k_base = k.ptr + tl.cast(kv_head, tl.int64) * k.strides[2]
    v_base = v.ptr + tl.cast(kv_head, tl.int64) * v.strides[2]
    for first_key in tl.range(begin, end, BLOCK):
        rows = first_key + tl.arange(0, BLOCK)
        key_exists = rows < end
        page = tl.zeros((BLOCK,), tl.int64) + batch
        row_in_page = rows
        if pages is not None:
            table = pages + tl.cast(batch, tl.int64) * pages_stride
            page = tl.load(table + rows // page_size, mask=key_exists, other=0).to(tl.int64)
            row_in_page = rows % page_size
        k_rows = (page * k.strides[0] + row_in_page.to(tl.int64) * k.strides[1])[:, None]
        v_rows = (page * v.strides[0] + row_in_page.to(tl.int64) * v.strides[1])[:, None]
        keys = tl.load(k_base + k_rows + columns, mask=key_exists[:, None] & (columns < C.D), other=0.0)
        v_block = tl.load(v_base + v_rows + v_columns, mask=key_exists[:, None] & (v_columns < C.DV), other=0.0)
        row_max, row_sum, acc = add_key_block(
            row_max, row_sum, acc, queries, keys, v_block, first_key, end, visible_keys, k_indices, score, True, C
        )

    if results is not None:
        store_results(results, row_max, row_sum, acc, batch, query_index, head, row_exists, C)
    else:
        slot = (tl.cast(program, tl.int64) * num_splits + split) * ROWS + tl.arange(0, ROWS)
        tl.store(parts.row_max + slot, row_max)
        tl.store(parts.row_sum + slot, row_sum)
        tl.store(parts.acc + slot[:, None] * C.PADDED_DV + v_columns, acc)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def merge_kernel(parts, results, kv_heads, heads_per_kv_head, num_new_tokens, num_tiles, num_splits, C: tl.constexpr):
    """Merge all parts of a tile and store its out and lse."""
    program = tl.program_id(0)
    batch, _, head, query_index, row_exists = packed_heads(
        program, kv_heads, heads_per_kv_head, num_new_tokens, num_tiles, C.ROWS
    )
    columns = tl.arange(0, C.PADDED_DV)[None, :]
    row_max, row_sum, acc = empty_softmax(C)
    for split in tl.range(0, num_splits):
        slot = (tl.cast(program, tl.int64) * num_splits + split) * C.ROWS + tl.arange(0, C.ROWS)
        part_max = tl.load(parts.row_max + slot)
        new_max = tl.maximum(row_max, part_max)
        base = tl.where(new_max == float("-inf"), 0.0, new_max)  # -inf - -inf would be NaN
        old_scale, part_scale = tl.exp2(row_max - base), tl.exp2(part_max - base)
        row_sum = row_sum * old_scale + tl.load(parts.row_sum + slot) * part_scale
        part_acc = tl.load(parts.acc + slot[:, None] * C.PADDED_DV + columns)
        acc = acc * old_scale[:, None] + part_acc * part_scale[:, None]
        row_max = new_max
    store_results(results, row_max, row_sum, acc, batch, query_index, head, row_exists, C)


@triton.jit
def packed_heads(program, kv_heads, heads_per_kv_head, num_new_tokens, num_tiles, ROWS: tl.constexpr):
    """Return (sequence, key head, and for each row of the tile: query head, index of the query, True if it exists)."""
    packed = program % num_tiles * ROWS + tl.arange(0, ROWS)
    kv_head = program // num_tiles % kv_heads
    head = kv_head * heads_per_kv_head + packed // num_new_tokens
    row_exists = packed < heads_per_kv_head * num_new_tokens
    return program // (num_tiles * kv_heads), kv_head, head, packed % num_new_tokens, row_exists


@triton.jit
def packed_rows(x, batch, query_index, head):
    """Return the pointers to the rows of a tile in x [batch, new, heads, ...], `HeadsTensor`."""
    row_offsets = query_index.to(tl.int64) * x.strides[1] + head * x.strides[2]
    return x.ptr + (tl.cast(batch, tl.int64) * x.strides[0] + row_offsets)


@triton.jit
def store_results(results, row_max, row_sum, acc, batch, query_index, head, row_exists, C: tl.constexpr):
    """Store out in the first DV columns of results [batch, new, heads, DV + 1], lse in the last; 0, -inf if no keys."""
    rows = packed_rows(results, batch, query_index, head)
    out, lse = finalize_softmax(row_max, row_sum, acc)
    columns = tl.arange(0, C.PADDED_DV)[None, :]
    out = rounded(out, results.ptr.dtype.element_ty)
    tl.store(rows[:, None] + columns, out, mask=row_exists[:, None] & (columns < C.DV))
    tl.store(rows + C.DV, lse, mask=row_exists)


def flash_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    stops: Tensor,
    max_keys: int,
    terms: ScoreTerms,
    *,
    pages: Tensor | None = None,
    q_positions: Tensor | None = None,
    k_indices: Tensor | None = None,
    num_splits: int | None = None,
    config: AttentionConfig | None = None,
) -> Tensor:
    """Return fp32 [batch, new, heads, v_head_dim + 1]: out, then lse; 0 and -inf for a query that sees nothing.

    Args:
        q: [batch, new, heads, head_dim], bf16, fp16 or fp32.
        k, v: [batch, capacity, kv_heads, head_dim] and [..., v_head_dim], any strides with a dense last dim; with
            `pages` [pages, page_size, kv_heads, ...].
        starts, stops: int32 [batch, new]: a query sees the rows [start, stop) of its sequence. No others are read. Like
            all tables, they have a dense last dim and are on the device of q.
        max_keys: largest number of keys of a sequence between its lowest start and its highest stop.
        pages: int32 [batch, largest number of pages of a sequence].
        q_positions, k_indices: for slopes only: int32 [batch, new], positions of the queries on the axis of the keys,
            and [rows], indices of the cache's rows on it.
        num_splits: number of parts of a sequence of `max_keys` keys; None: as many as keep the GPU busy.
        config: tiles that replace the default ones.

    Raises:
        ValueError: rows are too far apart, see `launch.check_row_strides`.
    """
    check_row_strides(q=q, k=k, v=v)
    batch, num_new_tokens, heads, head_dim = q.shape
    kv_heads, v_head_dim = k.shape[2], v.shape[3]
    results = q.new_empty((batch, num_new_tokens, heads, v_head_dim + 1), dtype=torch.float32)
    if results.numel() == 0:
        return results
    heads_per_kv_head = heads // kv_heads
    config = config or decode_config(
        operand_kind(q.dtype, "ieee"), max(head_dim, v_head_dim), heads_per_kv_head * num_new_tokens
    )
    num_tiles = -(-heads_per_kv_head * num_new_tokens // config.rows)
    num_programs = batch * kv_heads * num_tiles
    if num_splits is None:
        num_splits = min(
            sms_of(q.device) * _PROGRAMS_PER_SM // num_programs, max_keys // (_FEWEST_BLOCKS * config.block_size)
        )
    keys_per_split = max(1, -(-max_keys // (max(1, num_splits) * config.block_size))) * config.block_size
    num_splits = max(1, -(-max_keys // keys_per_split))
    parts = None
    if num_splits > 1:
        part_shape = (num_programs, num_splits, config.rows)
        parts = SplitParts(
            *(
                q.new_empty(size, dtype=torch.float32)
                for size in ((*part_shape, padded_head_dim(v_head_dim)), part_shape, part_shape)
            )
        )
    sizes = {
        "kv_heads": kv_heads,
        "heads_per_kv_head": heads_per_kv_head,
        "num_new_tokens": num_new_tokens,
        "num_tiles": num_tiles,
        "num_splits": num_splits,
    }
    constants = kernel_constants(config, q, v, terms)
    with on_device(q):
        split_kernel[(num_programs, num_splits)](
            q=heads_tensor(q),
            k=heads_tensor(k),
            v=heads_tensor(v),
            pages=pages,
            starts=starts,
            stops=stops,
            q_positions=q_positions if constants.ALIBI else None,
            k_indices=k_indices if constants.ALIBI else None,
            scores=terms.arguments()["scores"],
            parts=parts,
            results=heads_tensor(results) if num_splits == 1 else None,
            keys_per_split=keys_per_split,
            page_size=k.shape[1],
            pages_stride=0 if pages is None else pages.stride(0),
            **sizes,
            C=constants,
            **config.options(),
        )
        if num_splits > 1:
            merge_kernel[(num_programs,)](parts=parts, results=heads_tensor(results), **sizes, C=constants, num_warps=8)
    return results


fix_cache_keys(__name__)
