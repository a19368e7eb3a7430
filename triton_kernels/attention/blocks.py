"""Rows of [B, S, H, D] tensors in and out of a kernel, and which tile a program takes. Shared by all attention kernels.

Offsets of a row are 64-bit, those inside of a block 32-bit. Head dims that are no power of 2 are padded with zeros.
"""

import triton
import triton.language as tl

from ..gemm.tiles import halves
from .tiles import COLUMNS as TILE_COLUMNS

COLUMNS = tl.constexpr(TILE_COLUMNS)


@triton.jit
def program_tile(tiles, tile_count, heads, batch_heads, together):
    """(number of the tile, batch row, head, row, end of rows, begin, end, full begin, full end) of this program.

    `together` heads take turns, so that what they read stays in L2, and of these the tiles with most to do come first,
    so that none ends late.
    """
    index = tl.program_id(0)
    group = index // (together * tile_count)
    within = index % (together * tile_count)
    size = tl.minimum(batch_heads - group * together, together)
    number = within // size
    tile = tiles + number * COLUMNS
    batch_head = group * together + within % size
    return (
        number, batch_head // heads, batch_head % heads, tl.load(tile), tl.load(tile + 1), tl.load(tile + 2),
        tl.load(tile + 3), tl.load(tile + 4), tl.load(tile + 5),
    )  # fmt: skip


@triton.jit
def base_of(x, batch, head, strides):
    """Pointer to row 0 of a head of x [B, S, H, D], with strides of the first three."""
    return x + tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[2]


@triton.jit
def row_of(x, batch, head, strides):
    """Pointer to row 0 of a head of x [B, H, S], the last dense, with strides of the first two."""
    return x + tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]


@triton.jit
def block_pointers(base, row, end, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr):
    """(pointers, mask) [BLOCK, PADDED] of rows from `row` on, before `end`, of WIDTH elements."""
    rows = tl.arange(0, BLOCK)[:, None]
    columns = tl.arange(0, PADDED)[None, :]
    pointers = base + tl.cast(row, tl.int64) * stride + (rows * stride + columns)
    mask = row + rows < end
    if WIDTH != PADDED:
        mask = mask & (columns < WIDTH)
    return pointers, mask


@triton.jit
def load_block(
    base, row, end, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr, WHOLE: tl.constexpr = False
):
    """[BLOCK, PADDED], zeros from `end` on and beyond WIDTH; WHOLE says that all rows are before `end`."""
    pointers, mask = block_pointers(base, row, end, stride, WIDTH, BLOCK, PADDED)
    if not WHOLE:
        return tl.load(pointers, mask=mask, other=0.0)
    elif WIDTH != PADDED:
        return tl.load(pointers, mask=tl.arange(0, PADDED)[None, :] < WIDTH, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_whole(
    x, base, batch, head, row, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr, TMA: tl.constexpr
):
    """[BLOCK, PADDED] of rows that are all there; by TMA `x` is a descriptor of [B, H, S, D]."""
    if TMA:
        return x.load([batch, head, row, 0]).reshape(BLOCK, PADDED)
    else:
        return load_block(base, row, row, stride, WIDTH, BLOCK, PADDED, True)


@triton.jit
def load_turned(
    base, row, end, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr, WHOLE: tl.constexpr = False
):
    """`load_block` of what lies turned, each column's rows behind one another, with the stride of columns; `row` is a
    multiple of 16."""
    columns = tl.arange(0, PADDED)[:, None]
    rows = tl.multiple_of(row, 16) + tl.arange(0, BLOCK)[None, :]
    pointers = base + columns * stride + rows
    mask = columns < WIDTH
    if not WHOLE:
        mask = mask & (rows < end)
    return tl.load(pointers, mask=mask, other=0.0).T


@triton.jit
def load_whole_turned(
    x, base, batch, head, row, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr, TMA: tl.constexpr
):
    """`load_whole` of what lies turned; by TMA `x` is a descriptor of [B, H, D, S]."""
    if TMA:
        return x.load([batch, head, 0, row]).reshape(PADDED, BLOCK).T
    else:
        return load_turned(base, row, row, stride, WIDTH, BLOCK, PADDED, True)


@triton.jit
def load_rows(base, row, end, BLOCK: tl.constexpr, other):
    """[BLOCK] of a dense vector, `other` from `end` on."""
    rows = row + tl.arange(0, BLOCK)
    return tl.load(base + rows, mask=rows < end, other=other)


@triton.jit
def load_lse(base, row, end, BLOCK: tl.constexpr):
    """[BLOCK] of lse; +inf from `end` on and for rows that have seen nothing, since 2^(score - inf) is 0."""
    lse = load_rows(base, row, end, BLOCK, float("inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse)


@triton.jit
def masked_block(index, begin, full_begin, full_end, BLOCK: tl.constexpr):
    """Where block number `index` begins, of those that need a mask: before the full ones, then behind them."""
    before = (full_begin - begin) // BLOCK
    return tl.where(index < before, begin + index * BLOCK, full_end + (index - before) * BLOCK)


@triton.jit
def masked_blocks(begin, end, full_begin, full_end, BLOCK: tl.constexpr):
    """How many blocks need a mask."""
    return (full_begin - begin) // BLOCK + tl.cdiv(end - full_end, BLOCK)


@triton.jit
def add_block(base, values, row, end, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr):
    """Adds `values` [BLOCK, PADDED] to the rows from `row` on, before `end`; no other program adds to them.

    By halves of the columns: what was there takes as many registers as what is added.
    """
    if PADDED >= 64:
        left, right = halves(values)
        add_columns(base, left, row, end, stride, 0, WIDTH, BLOCK, PADDED // 2)
        add_columns(base, right, row, end, stride, PADDED // 2, WIDTH, BLOCK, PADDED // 2)
    else:
        add_columns(base, values, row, end, stride, 0, WIDTH, BLOCK, PADDED)


@triton.jit
def add_columns(
    base, values, row, end, stride, FIRST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr
):
    """`add_block` of columns [FIRST, FIRST + COUNT)."""
    LEFT: tl.constexpr = WIDTH - FIRST if WIDTH - FIRST < COUNT else COUNT
    pointers, mask = block_pointers(base + FIRST, row, end, stride, LEFT, BLOCK, COUNT)
    tl.store(pointers, tl.load(pointers, mask=mask, other=0.0) + values, mask=mask)
