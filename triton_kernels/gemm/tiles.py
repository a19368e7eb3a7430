"""Tiles of y = x @ w^T: their order, their product, their store. Shared by all matmul kernels.

    y[m, n] = sum_k x[m, k] * w[n, k]        x [M, K], w [N, K] (out, in, as in nn.Linear), summed in fp32

Tile (i, j) is y[i*BLOCK_M : (i+1)*BLOCK_M, j*BLOCK_N : (j+1)*BLOCK_N]. Every operand has two strides, so that a
transposed view is read in place: dX = dY @ W is a product with W's strides swapped.

Any M, N, K >= 1 works. Rows beyond the end are masked: they are read as zeros, never from memory, and not stored. That
mask is the same for all of K, so it costs nothing in the loop; a mask along K is used only without EVEN_K. Rejected:
wrapping rows around with `% M`, as many kernels do, loses the vector loads along M and N that transposed views need.
Offsets are 64-bit: a tensor may have more than 2^31 elements.

Kernels take their constants as one constexpr, `C`, a `configs.GemmConstants`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..cache_keys import fix_cache_keys
from ..language import dot, halves, rounded, zeros


class GemmSizes(NamedTuple):
    """K and strides of one product x @ w^T."""

    k: Any
    x: Any  # strides of x, (along M, along K)
    w: Any  # strides of w, (along N, along K)


class Matrix(NamedTuple):
    """A matrix in memory with contiguous rows."""

    ptr: Any
    stride: Any


@triton.jit
def tile_at(index, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """(tile_m, tile_n) of tile number `index`: down columns of GROUP_M tiles, so that tiles in flight share L2."""
    group_size = GROUP_M * tiles_n
    first_m = index // group_size * GROUP_M
    rows = tl.minimum(tiles_m - first_m, GROUP_M)
    within = index % group_size
    return first_m + within % rows, within // rows


@triton.jit
def tile_offsets(tile, BLOCK: tl.constexpr):
    """Indices of the rows (or columns) of tile number `tile`, 64-bit, not yet masked."""
    return tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def tile_pointers(matrix, tile_m, tile_n, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(pointers, mask) [BLOCK_M, BLOCK_N] of tile (tile_m, tile_n) of a `Matrix` [M, N]."""
    rows = tile_offsets(tile_m, BLOCK_M)[:, None]
    columns = tile_offsets(tile_n, BLOCK_N)[None, :]
    return matrix.ptr + rows * matrix.stride + columns, (rows < M) & (columns < N)


@triton.jit
def load_tile(matrix, tile_m, tile_n, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tile (tile_m, tile_n) of a `Matrix` [M, N]; zeros beyond its ends."""
    pointers, mask = tile_pointers(matrix, tile_m, tile_n, M, N, BLOCK_M, BLOCK_N)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def store_tile(matrix, values, tile_m, tile_n, M, N):
    """Write `values`, rounded to the dtype of the `Matrix` [M, N], to its tile (tile_m, tile_n) of their shape."""
    pointers, mask = tile_pointers(matrix, tile_m, tile_n, M, N, values.shape[0], values.shape[1])
    tl.store(pointers, rounded(values, matrix.ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_bias(values, bias_ptr, tile_n, N):
    """`values` plus bias [N], if there is one."""
    if bias_ptr is None:
        return values
    else:
        columns = tile_offsets(tile_n, values.shape[1])
        return values + tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]


@triton.jit
def store_result(y, total, bias_ptr, tile_m, tile_n, M, N, SPLIT: tl.constexpr):
    """Write total (+ bias) to tile (tile_m, tile_n) of `Matrix` y [M, N].

    With SPLIT the left columns are written first, then the right ones."""
    if SPLIT:
        left, right = halves(total)
        store_tile(y, add_bias(left, bias_ptr, 2 * tile_n, N), tile_m, 2 * tile_n, M, N)
        store_tile(y, add_bias(right, bias_ptr, 2 * tile_n + 1, N), tile_m, 2 * tile_n + 1, M, N)
    else:
        store_tile(y, add_bias(total, bias_ptr, tile_n, N), tile_m, tile_n, M, N)


@triton.jit
def load_operand(
    operand, tile, k, size, K, strides, BLOCK: tl.constexpr, SWAPPED: tl.constexpr, C: tl.constexpr, first=0
):
    """Block [BLOCK, BLOCK_K] of the `size` rows from row `first` on of an operand [.., K] of a matmul.

    Rows begin at tile * BLOCK, columns at k. The rest is zero: beyond `size` and K, with TMA beyond the operand's ends.

    `operand` is a pointer or, with TMA, a descriptor of blocks [BLOCK, BLOCK_K]; if columns are contiguous (SWAPPED),
    one of blocks [BLOCK_K, BLOCK] of the transposed matrix. With pointers SWAPPED only affects speed.
    """
    if C.TMA:
        if SWAPPED:
            return operand.load([k, first + tile * BLOCK]).T
        else:
            return operand.load([first + tile * BLOCK, k])
    else:
        # The contiguous dim is last: else sm_80 does not pipeline the loads of a transposed weight.
        rows = tile_offsets(tile, BLOCK)
        ks = k + tl.arange(0, C.BLOCK_K)
        if SWAPPED:
            rows, ks = rows[None, :], ks[:, None]
        else:
            rows, ks = rows[:, None], ks[None, :]
        mask = rows < size
        if not C.EVEN_K:
            mask = mask & (ks < K)
        block = tl.load(operand + (first + rows) * strides[0] + ks.to(tl.int64) * strides[1], mask=mask, other=0.0)
        if SWAPPED:
            block = block.T
        return block


@triton.jit
def add_product(total, x, w, sizes, tile_m, tile_n, M, N, first_row, C: tl.constexpr):
    """total + tile (tile_m, tile_n) of x @ w^T: the loop over K of every matmul.

    x has M rows from `first_row` on, w has N; with pointers the tile is zero beyond them.
    """
    for step in tl.range(0, tl.cdiv(sizes.k, C.BLOCK_K)):
        k = step * C.BLOCK_K
        x_block = load_operand(x, tile_m, k, M, sizes.k, sizes.x, C.BLOCK_M, C.X_SWAPPED, C, first_row)
        w_block = load_operand(w, tile_n, k, N, sizes.k, sizes.w, C.BLOCK_N, C.W_SWAPPED, C)
        total = dot(x_block, w_block.T, total, C)
    return total


@triton.jit
def multiply_products(xs, ws, sizes, tile_m, tile_n, M, N, first_row, C: tl.constexpr):
    """fp32 [BLOCK_M, BLOCK_N]: tile (tile_m, tile_n) of the sum of xs[i] @ ws[i]^T over i < C.PRODUCTS."""
    PRODUCTS: tl.constexpr = C.PRODUCTS
    total = zeros(C.BLOCK_M, C.BLOCK_N)
    for i in tl.static_range(PRODUCTS):
        total = add_product(total, xs[i], ws[i], sizes[i], tile_m, tile_n, M, N, first_row, C)
    return total


fix_cache_keys(__name__)
