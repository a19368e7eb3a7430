"""Tiles of y = x @ w^T: which one is next, multiplying one, where it lies. Shared by every matmul kernel.

    y[m, n] = sum_k x[m, k] * w[n, k]        x [M, K], w [N, K] (out, in, as nn.Linear keeps it), summed in fp32

Tile (i, j) is y[i*BLOCK_M : (i+1)*BLOCK_M, j*BLOCK_N : (j+1)*BLOCK_N]. Every operand comes with two strides, so that a
transposed view is read as it lies: dX = dY @ W is `multiply_tile` with W's strides swapped.

Any M, N, K >= 1 works. Rows beyond the end are masked: they are read as zeros, never from memory, and not stored. That
mask is the same for all of K, so it costs nothing in the loop; the one along K is there only without EVEN_K (wrapping
rows around with `% M`, as many kernels do, loses the vector loads along M and N, which transposed views need).
Offsets are 64-bit: a tensor may have more than 2^31 elements.
"""

import triton
import triton.language as tl

from ..interpreter import interpreter_obstacle

# Decided when @triton.jit is, at import. (knobs.runtime.interpret is TRITON_INTERPRET=1.)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
if INTERPRETED.value and (_why := interpreter_obstacle()):
    raise ImportError(f"{_why}.")


@triton.jit
def tile_at(index, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """(tile_m, tile_n) of tile number `index`: down columns of GROUP_M tiles, so that those in flight share L2."""
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
def tile_pointers(ptr, tile_m, tile_n, M, N, stride_m, stride_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(pointers, mask) [BLOCK_M, BLOCK_N] of tile (tile_m, tile_n) of a matrix [M, N] at `ptr`."""
    rows = tile_offsets(tile_m, BLOCK_M)[:, None]
    columns = tile_offsets(tile_n, BLOCK_N)[None, :]
    return ptr + rows * stride_m + columns * stride_n, (rows < M) & (columns < N)


@triton.jit
def load_tile(ptr, tile_m, tile_n, M, N, stride_m, stride_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tile (tile_m, tile_n) of a matrix [M, N]; zeros beyond its ends."""
    pointers, mask = tile_pointers(ptr, tile_m, tile_n, M, N, stride_m, stride_n, BLOCK_M, BLOCK_N)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, values, tile_m, tile_n, M, N, stride_m, stride_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Writes `values` [BLOCK_M, BLOCK_N], rounded to the dtype of `ptr`, to tile (tile_m, tile_n) of [M, N]."""
    pointers, mask = tile_pointers(ptr, tile_m, tile_n, M, N, stride_m, stride_n, BLOCK_M, BLOCK_N)
    tl.store(pointers, rounded(values, ptr.dtype.element_ty), mask=mask)


@triton.jit
def rounded(values, DTYPE: tl.constexpr):
    """fp32 `values` in DTYPE, to the nearest even.

    That is what `.to` does on the GPU. The interpreter's (Triton 3.6, 3.7) cuts the bits of bf16 off and loses carries
    of fp8, so there it is done on the bits; NaN keeps its sign and top bits, of which one must stay set.
    """
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(values == values, nearest, bits | 0x400000)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    elif INTERPRETED and DTYPE == tl.float8e4nv:
        bits = values.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000
        return tl.where(values == values, nearest, bits).to(tl.float32, bitcast=True).to(DTYPE)
    else:
        return values.to(DTYPE)


@triton.jit
def dot(x, w, total, PRECISION: tl.constexpr):
    """total + x @ w in fp32.

    The interpreter keeps bf16 as the integers of its bits and its dot multiplies those (Triton 3.6, 3.7), so there the
    operands go to fp32 first: exact, and the products of 8 and 11 bit mantissas are exact in fp32 on the GPU too.
    """
    if INTERPRETED:
        x = x.to(tl.float32)
        w = w.to(tl.float32)
    if x.dtype == tl.float8e4nv:
        # sm_90 sums fp8 products in 22 bits unless told to hand them to fp32 after so many terms; sm_100 ignores it.
        return tl.dot(x, w, total, max_num_imprecise_acc=x.shape[1])
    else:
        return tl.dot(x, w, total, input_precision=PRECISION)


@triton.jit
def load_operand(
    operand,
    tile,
    k,
    size,
    K,
    stride,
    stride_k,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA: tl.constexpr,
    SWAPPED: tl.constexpr,
    first=0,
):
    """[BLOCK, BLOCK_K] of `size` rows, from row `first` on, of an operand [.., K] of a matmul.

    Rows from tile * BLOCK, columns from k; by pointers zeros beyond `size` and K, by TMA beyond the operand's ends.

    `operand` is a pointer or, with TMA, a descriptor of blocks [BLOCK, BLOCK_K]; where columns are in one piece
    (SWAPPED), one of blocks [BLOCK_K, BLOCK] of the transposed matrix. By pointers SWAPPED is about speed alone.
    """
    if TMA:
        if SWAPPED:
            return operand.load([k, first + tile * BLOCK]).T
        else:
            return operand.load([first + tile * BLOCK, k])
    else:
        # What is in one piece comes last: else sm_80 does not pipeline the loads of a transposed weight.
        rows = tile_offsets(tile, BLOCK)
        ks = k + tl.arange(0, BLOCK_K)
        if SWAPPED:
            rows, ks = rows[None, :], ks[:, None]
        else:
            rows, ks = rows[:, None], ks[None, :]
        mask = rows < size
        if not EVEN_K:
            mask = mask & (ks < K)
        block = tl.load(operand + (first + rows) * stride + ks.to(tl.int64) * stride_k, mask=mask, other=0.0)
        if SWAPPED:
            block = block.T
        return block


@triton.jit
def add_products(
    total,
    gate,
    x,
    w,
    gate_w,
    tile_m,
    tile_n,
    M,
    N,
    K,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    stride_gn,
    stride_gk,
    first_row,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA: tl.constexpr,
    X_SWAPPED: tl.constexpr,
    W_SWAPPED: tl.constexpr,
):
    """(total + tile of x @ w^T, gate + tile of x @ gate_w^T); the loop over K of every matmul. gate_w may be None.

    The tile is (tile_m, tile_n) of the M rows of x from `first_row` on, and of all N rows of w.
    """
    for step in tl.range(0, tl.cdiv(K, BLOCK_K)):
        k = step * BLOCK_K
        x_block = load_operand(
            x, tile_m, k, M, K, stride_xm, stride_xk, BLOCK_M, BLOCK_K, EVEN_K, TMA, X_SWAPPED, first_row
        )
        w_block = load_operand(w, tile_n, k, N, K, stride_wn, stride_wk, BLOCK_N, BLOCK_K, EVEN_K, TMA, W_SWAPPED)
        total = dot(x_block, w_block.T, total, PRECISION)
        if gate_w is not None:
            gate_block = load_operand(
                gate_w, tile_n, k, N, K, stride_gn, stride_gk, BLOCK_N, BLOCK_K, EVEN_K, TMA, W_SWAPPED
            )
            gate = dot(x_block, gate_block.T, gate, PRECISION)
    if gate_w is None:
        gate = total  # Triton 3.6 cannot return None in a tuple
    return total, gate


@triton.jit
def multiply_tile(
    x,
    w,
    tile_m,
    tile_n,
    M,
    N,
    K,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr = "ieee",
    EVEN_K: tl.constexpr = False,
    TMA: tl.constexpr = False,
    X_SWAPPED: tl.constexpr = False,
    W_SWAPPED: tl.constexpr = False,
    first_row=0,
):
    """fp32 [BLOCK_M, BLOCK_N] of tile (tile_m, tile_n) of x [M, K] @ w [N, K]^T; by pointers zeros beyond M and N.

    PRECISION is of fp32 operands: "ieee" or "tf32" (10 bits of mantissa, on tensor cores). EVEN_K says that K is a
    multiple of BLOCK_K, which saves the masks along K. x has M rows from `first_row` on.
    """
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    total, _ = add_products(
        total, None, x, w, None, tile_m, tile_n, M, N, K, stride_xm, stride_xk, stride_wn, stride_wk, 0, 0, first_row,
        BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, EVEN_K, TMA, X_SWAPPED, W_SWAPPED,
    )  # fmt: skip
    return total


@triton.jit
def multiply_products(
    xs,
    ws,
    sizes,
    tile_m,
    tile_n,
    M,
    N,
    first_row,
    PRODUCTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA: tl.constexpr,
    X_SWAPPED: tl.constexpr,
    W_SWAPPED: tl.constexpr,
):
    """Tile (tile_m, tile_n) of the sum of xs[i] @ ws[i]^T over i < PRODUCTS, as `multiply_tile` has it of one.

    sizes[i] is (K, stride_xm, stride_xk, stride_wn, stride_wk).
    """
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for i in tl.static_range(PRODUCTS):
        K, stride_xm, stride_xk, stride_wn, stride_wk = sizes[i]
        total, _ = add_products(
            total, None, xs[i], ws[i], None, tile_m, tile_n, M, N, K,
            stride_xm, stride_xk, stride_wn, stride_wk, 0, 0, first_row,
            BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, EVEN_K, TMA, X_SWAPPED, W_SWAPPED,
        )  # fmt: skip
    return total


@triton.jit
def halves(total):
    """The left and the right columns of a tile: storing them in turn takes the shared memory and registers of one."""
    pairs = tl.reshape(total, (total.shape[0], 2, total.shape[1] // 2))
    return tl.split(tl.permute(pairs, (0, 2, 1)))
