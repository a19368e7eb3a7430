"""Parts of all attention kernels: rows of [B, S, H, D] tensors, the tile of a program, scores and probabilities.

Offsets of a row are 64-bit, those inside a block 32-bit. Head dims that are not a power of 2 are padded with zeros.

    score = cap(scale * q.k) - slope * |position of q - index of k|     cap(x) = softcap * tanh(x / softcap)
    p     = exp(score - lse) = 2^(score * log2(e) - ...)

The position of a query is on the axis of the keys (`fused_tp.attention.spec`).

The kernels work in base 2. Plain scores stay products until the exponent, where one multiply-add scales and subtracts;
`scores_from_products` scales all others. Its result times `base_2_factor` (1 unless plain) is a score in base 2.

Dropout is Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011): key (seed low, seed
high); counter (index of k // 4, index of q, head, batch row); index of k % 4 selects one of the four words. An element
is dropped if its word is below a threshold.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..cache_keys import fix_cache_keys
from ..language import split_columns
from .tiles import COLUMNS as TILE_COLUMNS

COLUMNS = tl.constexpr(TILE_COLUMNS)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

# Integer arguments that launches leave unspecialized, so that Triton does not recompile a kernel for a value that is 1
# or a multiple of 16. It always specializes integers inside a tuple, so these are separate arguments.
UNSPECIALIZED = (
    *("tile_count", "heads", "batch_heads", "interleaved_heads", "heads_per_kv_head"),
    *("seed_low", "seed_high", "dropped_below", "first_head"),
)


class HeadsTensor(NamedTuple):
    """A tensor [B, S, H, D] or [B, H, S] with a dense last dim, and the strides of its other dims."""

    ptr: Any
    strides: Any


class HeadRows(NamedTuple):
    """The rows [S, D] of one head."""

    ptr: Any
    stride: Any


class Mask(NamedTuple):
    """int32 vectors: the interval [start, stop) of keys (or queries) that each row sees, and positions of tokens."""

    starts: Any
    stops: Any
    q_positions: Any  # on the axis of the keys, for slopes
    q_indices: Any  # for dropout
    k_indices: Any  # for slopes and dropout


class ScoreArguments(NamedTuple):
    """The terms of a score besides q.k, as a launch passes them."""

    slopes: Any  # [heads], or None
    scale: Any
    softcap: Any
    keep_scale: Any


class Score(NamedTuple):
    """The terms of a score besides q.k for one head, in a kernel."""

    slope: Any
    scale: Any
    softcap: Any
    keep_scale: Any
    batch: Any
    head: Any  # index among the heads of all ranks
    seed_low: Any
    seed_high: Any
    dropped_below: Any


class Tile(NamedTuple):
    """The work of a program: rows [row, row_end) of a head, against [begin, end) of the other side.

    All rows see all of a block that begins in [full_begin, full_end).
    """

    index: Any
    batch: Any
    head: Any
    row: Any
    row_end: Any
    begin: Any
    end: Any
    full_begin: Any
    full_end: Any


class VisibleKeys(NamedTuple):
    """Vectors over the rows of a tile: the interval of keys that each row sees, and where its token is."""

    start: Any
    stop: Any
    q_position: Any  # on the axis of the keys, for slopes
    q_index: Any  # for dropout


class AttentionConstants(NamedTuple):
    """The constexpr `C` of an attention kernel."""

    D: int
    DV: int
    PADDED_D: int
    PADDED_DV: int
    PRECISION: str
    ROWS: int
    BLOCK: int
    TMA: bool = False
    CAPPED: bool = False
    ALIBI: bool = False
    DROPOUT: bool = False
    IS_FIRST_STEP: bool = False  # forward: there is no state to read


# -- tiles and rows ----------------------------------------------------------------------------------------------------


@triton.jit
def program_tile(tiles, tile_count, heads, batch_heads, interleaved_heads):
    """Return the `Tile` of this program.

    The tiles of `interleaved_heads` heads alternate, so that their operands stay in L2. Tiles with most work are first,
    so that none ends late.
    """
    program = tl.program_id(0)
    group = program // (interleaved_heads * tile_count)
    index_in_group = program % (interleaved_heads * tile_count)
    group_heads = tl.minimum(batch_heads - group * interleaved_heads, interleaved_heads)
    tile_index = index_in_group // group_heads
    tile = tiles + tile_index * COLUMNS
    batch_and_head = group * interleaved_heads + index_in_group % group_heads
    return Tile(
        tile_index, batch_and_head // heads, batch_and_head % heads, tl.load(tile), tl.load(tile + 1),
        tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4), tl.load(tile + 5),
    )  # fmt: skip


@triton.jit
def count_masked_blocks(begin, end, full_begin, full_end, BLOCK: tl.constexpr):
    """Return the number of blocks that need a mask."""
    return (full_begin - begin) // BLOCK + tl.cdiv(end - full_end, BLOCK)


@triton.jit
def masked_block_start(index, begin, full_begin, full_end, BLOCK: tl.constexpr):
    """Return the first row of masked block `index`: masked blocks before the full ones, then those after them."""
    num_before = (full_begin - begin) // BLOCK
    return tl.where(index < num_before, begin + index * BLOCK, full_end + (index - num_before) * BLOCK)


@triton.jit
def head_rows(x, batch, head):
    """Return the `HeadRows` of a head of x [B, S, H, D]."""
    return HeadRows(
        x.ptr + tl.cast(batch, tl.int64) * x.strides[0] + tl.cast(head, tl.int64) * x.strides[2], x.strides[1]
    )


@triton.jit
def head_vector(x, batch, head):
    """Return the pointer to row 0 of a head of x [B, H, S], whose last dim is dense."""
    return x.ptr + tl.cast(batch, tl.int64) * x.strides[0] + tl.cast(head, tl.int64) * x.strides[1]


@triton.jit
def block_pointers(rows, row, end, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr):
    """Return (pointers, mask) [BLOCK, PADDED] of `HeadRows` from `row` on, before `end`, of WIDTH elements."""
    block_rows = tl.arange(0, BLOCK)[:, None]
    columns = tl.arange(0, PADDED)[None, :]
    pointers = rows.ptr + tl.cast(row, tl.int64) * rows.stride + (block_rows * rows.stride + columns)
    mask = row + block_rows < end
    if WIDTH != PADDED:
        mask = mask & (columns < WIDTH)
    return pointers, mask


@triton.jit
def load_block(rows, row, end, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr):
    """Return the block [BLOCK, PADDED] of `HeadRows`, zeros from `end` on and beyond WIDTH."""
    pointers, mask = block_pointers(rows, row, end, WIDTH, BLOCK, PADDED)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def load_full_block(
    x, rows, batch, head, row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr, TMA: tl.constexpr
):
    """Return a block [BLOCK, PADDED] of `HeadRows` that all exist; with TMA `x` is a descriptor of [B, H, S, D]."""
    if TMA:
        return x.load([batch, head, row, 0]).reshape(BLOCK, PADDED)
    else:
        pointers, _ = block_pointers(rows, row, row, WIDTH, BLOCK, PADDED)
        if WIDTH != PADDED:
            return tl.load(pointers, mask=tl.arange(0, PADDED)[None, :] < WIDTH, other=0.0)
        else:
            return tl.load(pointers)


@triton.jit
def store_block(rows, values, row, end, WIDTH: tl.constexpr):
    """Write `values` to the rows from `row` on, before `end`."""
    pointers, mask = block_pointers(rows, row, end, WIDTH, values.shape[0], values.shape[1])
    tl.store(pointers, values, mask=mask)


@triton.jit
def add_block(rows, values, row, end, WIDTH: tl.constexpr):
    """Add `values` to the rows from `row` on, before `end`; no other program adds to them.

    One half of the columns at a time: the old values take as many registers as the added ones.
    """
    PADDED: tl.constexpr = values.shape[1]
    if PADDED >= 64:
        left, right = split_columns(values)
        _add_columns(rows, left, row, end, 0, WIDTH)
        _add_columns(rows, right, row, end, PADDED // 2, WIDTH)
    else:
        _add_columns(rows, values, row, end, 0, WIDTH)


@triton.jit
def _add_columns(rows, values, row, end, FIRST_COLUMN: tl.constexpr, WIDTH: tl.constexpr):
    NUM_COLUMNS: tl.constexpr = values.shape[1]
    NUM_VALID: tl.constexpr = WIDTH - FIRST_COLUMN if WIDTH - FIRST_COLUMN < NUM_COLUMNS else NUM_COLUMNS
    columns = HeadRows(rows.ptr + FIRST_COLUMN, rows.stride)
    pointers, mask = block_pointers(columns, row, end, NUM_VALID, values.shape[0], NUM_COLUMNS)
    tl.store(pointers, tl.load(pointers, mask=mask, other=0.0) + values, mask=mask)


@triton.jit
def load_vector(base, row, end, BLOCK: tl.constexpr, other):
    """Return the block [BLOCK] of a dense vector, `other` from `end` on."""
    rows = row + tl.arange(0, BLOCK)
    return tl.load(base + rows, mask=rows < end, other=other)


@triton.jit
def load_lse(base, row, end, BLOCK: tl.constexpr):
    """Return a block [BLOCK] of lse; +inf from `end` on and for rows that see no keys, since 2^(score - inf) is 0."""
    lse = load_vector(base, row, end, BLOCK, float("inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse)


@triton.jit
def load_visible_keys(starts, stops, mask, row, row_end, C: tl.constexpr):
    """Return the `VisibleKeys` of the queries of a tile."""
    start = load_vector(starts, row, row_end, C.ROWS, 0)
    stop = load_vector(stops, row, row_end, C.ROWS, 0)
    q_position = start
    q_index = start
    if C.ALIBI:
        q_position = load_vector(mask.q_positions, row, row_end, C.ROWS, 0)
    if C.DROPOUT:
        q_index = load_vector(mask.q_indices, row, row_end, C.ROWS, 0)
    return VisibleKeys(start, stop, q_position, q_index)


# -- scores ------------------------------------------------------------------------------------------------------------


@triton.jit
def head_score(scores, batch, head, dropout, C: tl.constexpr):
    """Return the `Score` of a head; `dropout` is (first head, seed low, seed high, dropped below)."""
    slope = 0.0
    if C.ALIBI:
        slope = tl.load(scores.slopes + head)
    first_head, seed_low, seed_high, dropped_below = dropout
    return Score(
        slope, scores.scale, scores.softcap, scores.keep_scale, batch, head + first_head,
        seed_low, seed_high, dropped_below,
    )  # fmt: skip


@triton.jit
def tanh(x):
    """Return tanh(x); near 0 by its series, because the quotient would cancel and amplify the rounding of `exp2`."""
    power = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    quotient = (1.0 - power) / (1.0 + power)
    square = x * x
    series = x * (1.0 + square * (-0.3333333333 + square * (0.1333333333 - 0.0539682540 * square)))
    return tl.where(square < 0.04, series, tl.where(x < 0, -quotient, quotient))


@triton.jit
def scores_from_products(products, distance, score, C: tl.constexpr):
    """Return (scores, derivative of the cap) of products q.k.

    `distance` is |position of q - index of k|, for ALIBI only.
    """
    cap_derivative = products
    if C.CAPPED:
        tanh_score = tanh(products * (score.scale / score.softcap))
        cap_derivative = 1.0 - tanh_score * tanh_score
        products = tanh_score * (score.softcap * LOG2_E)
    elif C.ALIBI:
        products = products * (score.scale * LOG2_E)
    if C.ALIBI:
        products -= distance * (score.slope * LOG2_E)
    return products, cap_derivative


@triton.jit
def base_2_factor(score, C: tl.constexpr):
    """Return the factor that converts the scores of `scores_from_products` to base 2."""
    if C.CAPPED or C.ALIBI:
        return 1.0
    else:
        return score.scale * LOG2_E


@triton.jit
def probabilities(products, lse, visible, distance, score, MASKED: tl.constexpr, C: tl.constexpr):
    """Return (p = exp(score - lse), derivative of the cap) of a block of products; lse, in base 2, broadcasts.

    p is 0 where not `visible`, for any score: selected, not multiplied, since 0 times an infinity is NaN.
    """
    s, cap_derivative = scores_from_products(products, distance, score, C)
    p = tl.exp2(s * base_2_factor(score, C) - lse)
    if MASKED:
        p = tl.where(visible, p, 0.0)
    return p, cap_derivative


@triton.jit
def dropout_keeps(q_indices, k_indices, score):
    """True where dropout keeps a probability. int32 indices broadcast; seeds and threshold are read as unsigned."""
    c0 = (k_indices // 4).to(tl.uint32)
    c1 = q_indices.to(tl.uint32)
    c2, c3 = score.head.to(tl.uint32), score.batch.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox_impl(
        c0, c1, c2, c3, score.seed_low.to(tl.uint32, bitcast=True), score.seed_high.to(tl.uint32, bitcast=True)
    )
    word = k_indices % 4
    bits = tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))
    return bits >= score.dropped_below.to(tl.uint32, bitcast=True)


@triton.jit
def apply_dropout(values, keep, score, DROPOUT: tl.constexpr):
    """Apply dropout to probabilities, or to the gradients of its results."""
    if DROPOUT:
        return tl.where(keep, values * score.keep_scale, 0.0)
    else:
        return values


fix_cache_keys(__name__)
