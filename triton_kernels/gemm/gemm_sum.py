"""y = sum over ranks of x @ w^T in one launch: on all ranks (all-reduce), or each rank its rows (reduce-scatter).

    x [M, K_r], w [N, K_r] per rank
    all-reduce      out [M, N] = sum_r x_r @ w_r^T (+ bias) (+ residual), the same bits on all ranks
                    normed [M, N] = out / sqrt(mean(out^2) + eps) * norm_weight, if a norm is requested
    reduce-scatter  out [M_r, N] = rows r*c to (r+1)*c of sum_r x_r @ w_r^T (+ bias)

c is `rows_per_rank`, by default ceil(M / W); the last ranks may have fewer rows, or none. A rank may have several pairs
(x, w) with different K, whose products are added in fp32 before anything is sent: dX of layers that share an input.

Each rank multiplies all of [M, N] and stores each tile, in the dtype of out, in the memory of the ranks that sum it:
once its flag is set the data is local, and no read waits for the link. The terms are added in fp32 in rank order and
rounded once. A tile is NaN if a term or the sum of it did not arrive in time.

    one-shot        all-reduce in which all ranks sum every tile: W times the traffic, but one hop. For small M.
    two-shot        all-reduce in which the owner of a tile sums it and sends the sum to all: 2 * (W-1)/W of the bytes
                    of out per rank, two hops.
    reduce-scatter  as two-shot, without sending the sum. A tile never holds rows of two owners.

With owners, ranks begin with the tiles of the next rank and end with their own, so that at any time they write to
different owners. The program that stores the last tile of a row of tiles computes the norm of that row, so no program
waits for another of its own rank. The norm is that of the rounded out, which backward and the next layer use too.

Tiles are numbered by owner: owner o has tiles [o * per_owner, (o+1) * per_owner). Program p of P computes tiles
p, p+P, ... on every rank, and waits only for programs p of the other ranks. A tile is sent to a slot, BLOCK_M x BLOCK_N
contiguous elements of the receiver's workspace: whole, without masks and in full vectors, for any M and N. Flag W + i
of a rank signals that its slot number i is filled.

Sources: one-shot and two-shot all-reduce: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH", 2005; flags per tile: Chang et al., "FLUX: Fast Software-based Communication Overlap On GPUs
Through Kernel Fusion", 2024.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cache_keys import fix_cache_keys
from ..comm.signals import (
    OPS,
    Workspace,
    begin,
    end,
    flag_at,
    half_at,
    is_last,
    needed_bytes,
    signal_all,
    wait,
    wait_all,
)
from ..language import or_nan, rounded, split_columns, store_release, thread_barrier, zeros
from .tiles import (
    Launch,
    Matrix,
    add_bias,
    load_tile,
    multiply_products,
    operand_arguments,
    store_tile,
    tile_offsets,
    tile_position,
)

ALL_REDUCE = tl.constexpr(OPS.index("matmul_all_reduce"))
REDUCE_SCATTER = tl.constexpr(OPS.index("matmul_reduce_scatter"))


@triton.jit(do_not_specialize=["rank"])
def gemm_all_reduce_kernel(
    x0, w0, x1, w1, x2, w2, x3, w3, sizes, bias_ptr, residual, norm_weight_ptr, out, normed,
    M, N, eps,
    ws, rank, terms_offset, sums_offset, WORLD: tl.constexpr,
    TWO_SHOT: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Compute out [M, N] = sum over ranks of xi @ wi^T (+ bias) (+ residual) on all ranks, and normed, its RMS norm.

    `out`, `normed` [M, N] and `residual` are each a `Matrix`. An operand is None if it is not used.
    """
    call = begin(ws, rank, WORLD)
    ELEMENT: tl.constexpr = out.ptr.dtype.element_ty
    STRIPS: tl.constexpr = C.BLOCK_M // C.STRIP_M
    # For each output element, a sum loads one number per rank, a copy only one. So a copy takes strips of up to 4 times
    # as many rows, to keep about as many bytes in flight.
    COPY_M: tl.constexpr = C.BLOCK_M if C.BLOCK_M < 4 * C.STRIP_M else 4 * C.STRIP_M
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    tiles_m = tl.cdiv(M, C.BLOCK_M)
    tiles_n = tl.cdiv(N, C.BLOCK_N)
    num_tiles = tiles_m * tiles_n
    tiles_per_owner = tl.cdiv(num_tiles, WORLD)
    num_rounds = round_count(program, num_programs, num_tiles)
    # Order of the slots, and of their flags. One-shot: terms by (tile, source). Two-shot: terms by (tile of the owner,
    # source), then the sums.
    first_sum = WORLD * tiles_per_owner
    first_tile = (rank + 1) % WORLD * tiles_per_owner

    # Multiply all tiles, and send each to the ranks that sum it.
    for step in tl.range(0, num_rounds, flatten=C.FLATTENS_LOOP):
        tile = tile_of_round(step, first_tile, num_rounds, program, num_programs)
        tile_m, tile_n = tile_position(tile, tiles_m, tiles_n, C.GROUP_M)
        term = multiply_products((x0, x1, x2, x3), (w0, w1, w2, w3), sizes, tile_m, tile_n, M, N, 0, C)
        if TWO_SHOT:
            signal_tile(call, step - 1, first_tile, num_rounds, program, num_programs, tiles_per_owner, WORLD)
            slot = tile % tiles_per_owner * WORLD + rank
            store_slot(call, tile // tiles_per_owner, slot, term, terms_offset, ELEMENT, C.SPLITS_STORE)
        else:
            slot = tile * WORLD + rank
            # Not unrolled: the addresses of all peers at once would take the registers of the tile.
            for distance in tl.range(0, WORLD):
                peer = (rank + distance) % WORLD
                store_slot(call, peer, slot, term, terms_offset, ELEMENT, C.SPLITS_STORE)
            signal_all(call, WORLD + slot, True, WORLD)
    if TWO_SHOT:
        signal_tile(call, num_rounds - 1, first_tile, num_rounds, program, num_programs, tiles_per_owner, WORLD)

    # Sum the terms of all tiles (one-shot) or of this rank's tiles (two-shot, which also sends the sums).
    for step in tl.range(0, num_rounds):
        tile = step * num_programs + program
        if not TWO_SHOT or tile // tiles_per_owner == rank:
            first_slot = tile * WORLD
            if TWO_SHOT:
                first_slot -= rank * tiles_per_owner * WORLD
            tile_m, tile_n = tile_position(tile, tiles_m, tiles_n, C.GROUP_M)
            is_valid = wait_all(call, WORLD + first_slot, tile, WORLD, ALL_REDUCE)
            for strip in tl.range(0, STRIPS):
                sum_slot = tile * STRIPS + strip
                total = sum_terms(call, first_slot, strip, terms_offset, ELEMENT, WORLD, C)
                strip_m = tile_m * STRIPS + strip
                total = add_bias(total, bias_ptr, tile_n, N)
                if residual is not None:
                    total += load_tile(residual, strip_m, tile_n, M, N, C.STRIP_M, C.BLOCK_N).to(tl.float32)
                total = or_nan(total, is_valid)
                if TWO_SHOT:
                    for distance in tl.range(1, WORLD):
                        store_slot(call, (rank + distance) % WORLD, sum_slot, total, sums_offset, ELEMENT)
                store_tile(out, total, strip_m, tile_n, M, N)
            if TWO_SHOT:
                signal_all(call, WORLD + first_sum + tile, is_valid, WORLD)
            if norm_weight_ptr is not None:
                norm_if_last(call, out, norm_weight_ptr, normed, tile_m, tiles_n, M, N, eps, C)

    # Copy the sums of the other ranks' tiles to out.
    if TWO_SHOT:
        for step in tl.range(0, num_rounds):
            tile = step * num_programs + program
            owner = tile // tiles_per_owner
            if owner != rank:
                tile_m, tile_n = tile_position(tile, tiles_m, tiles_n, C.GROUP_M)
                is_valid = wait(call, WORLD + first_sum + tile, owner, tile, WORLD, ALL_REDUCE)
                for strip in tl.range(0, C.BLOCK_M // COPY_M):
                    sum_slot = tile * (C.BLOCK_M // COPY_M) + strip
                    pointers = slot_pointers(call, rank, sum_slot, sums_offset, ELEMENT, COPY_M, C.BLOCK_N)
                    total = or_nan(tl.load(pointers).to(tl.float32), is_valid)
                    strip_m = tile_m * (C.BLOCK_M // COPY_M) + strip
                    store_tile(out, total, strip_m, tile_n, M, N)
                if norm_weight_ptr is not None:
                    norm_if_last(call, out, norm_weight_ptr, normed, tile_m, tiles_n, M, N, eps, C)
    end(call, WORLD, ALL_REDUCE)


@triton.jit
def norm_if_last(call, h, weight_ptr, normed, tile_m, tiles_n, M, N, eps, C: tl.constexpr):
    """Store the RMS norm of the rows of h [M, N] in row of tiles `tile_m`, in the program that stores its last tile.

    The bits do not depend on which program that is: squares are added along a row in the order of the columns.
    """
    STRIP_M: tl.constexpr = C.STRIP_M
    STRIPS: tl.constexpr = C.BLOCK_M // STRIP_M
    if is_last(call, tile_m, tiles_n):
        for strip in tl.range(0, STRIPS):
            strip_m = tile_m * STRIPS + strip
            squares = tl.zeros((STRIP_M,), dtype=tl.float32)
            for block in tl.range(0, tiles_n):
                values = load_tile(h, strip_m, tl.cast(block, tl.int32), M, N, STRIP_M, C.BLOCK_N).to(tl.float32)
                squares += tl.sum(values * values, axis=1)
            scale = 1.0 / tl.sqrt_rn(squares / N + eps)
            for block in tl.range(0, tiles_n):
                tile_n = tl.cast(block, tl.int32)
                values = load_tile(h, strip_m, tile_n, M, N, STRIP_M, C.BLOCK_N).to(tl.float32)
                columns = tile_offsets(tile_n, C.BLOCK_N)
                weight = tl.load(weight_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
                store_tile(normed, values * scale[:, None] * weight[None, :], strip_m, tile_n, M, N)


@triton.jit(do_not_specialize=["rank"])
def gemm_reduce_scatter_kernel(
    x0, w0, x1, w1, x2, w2, x3, w3, sizes, bias_ptr, out,
    M, N, rows_per_rank,
    ws, rank, terms_offset, WORLD: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Compute out [M_r, N], this rank's rows of the sum over ranks of xi @ wi^T (+ bias); `out` is a `Matrix`."""
    call = begin(ws, rank, WORLD)
    ELEMENT: tl.constexpr = out.ptr.dtype.element_ty
    STRIPS: tl.constexpr = C.BLOCK_M // C.STRIP_M
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    tiles_m = tl.cdiv(rows_per_rank, C.BLOCK_M)
    tiles_n = tl.cdiv(N, C.BLOCK_N)
    tiles_per_owner = tiles_m * tiles_n
    # Owners with all rows come first, then one with fewer, then owners without rows: tile numbers have no gaps.
    num_full_owners = M // rows_per_rank
    num_tiles = num_full_owners * tiles_per_owner + tl.cdiv(M - num_full_owners * rows_per_rank, C.BLOCK_M) * tiles_n
    num_rounds = round_count(program, num_programs, num_tiles)

    first_tile = (rank + 1) % WORLD * tiles_per_owner

    # Multiply all tiles, and send each to its owner.
    for step in tl.range(0, num_rounds, flatten=C.FLATTENS_LOOP):
        tile = tile_of_round(step, first_tile, num_rounds, program, num_programs)
        owner = tile // tiles_per_owner
        tile_of_owner = tile - owner * tiles_per_owner
        first_row = owner * rows_per_rank
        rows = tl.minimum(M - first_row, rows_per_rank)
        tile_m, tile_n = tile_position(tile_of_owner, tl.cdiv(rows, C.BLOCK_M), tiles_n, C.GROUP_M)
        term = multiply_products(
            (x0, x1, x2, x3), (w0, w1, w2, w3), sizes, tile_m, tile_n, rows, N, first_row, C
        )  # fmt: skip
        signal_tile(call, step - 1, first_tile, num_rounds, program, num_programs, tiles_per_owner, WORLD)
        slot = tile_of_owner * WORLD + rank
        store_slot(call, owner, slot, term, terms_offset, ELEMENT, C.SPLITS_STORE)
    signal_tile(call, num_rounds - 1, first_tile, num_rounds, program, num_programs, tiles_per_owner, WORLD)

    # Sum the terms of this rank's tiles.
    rows = tl.minimum(M - rank * rows_per_rank, rows_per_rank)
    for step in tl.range(0, num_rounds):
        tile = step * num_programs + program
        if tile // tiles_per_owner == rank:
            tile_of_owner = tile - rank * tiles_per_owner
            tile_m, tile_n = tile_position(tile_of_owner, tl.cdiv(rows, C.BLOCK_M), tiles_n, C.GROUP_M)
            first_slot = tile_of_owner * WORLD
            is_valid = wait_all(call, WORLD + first_slot, tile, WORLD, REDUCE_SCATTER)
            for strip in tl.range(0, STRIPS):
                total = sum_terms(call, first_slot, strip, terms_offset, ELEMENT, WORLD, C)
                total = or_nan(add_bias(total, bias_ptr, tile_n, N), is_valid)
                store_tile(out, total, tile_m * STRIPS + strip, tile_n, rows, N)
    end(call, WORLD, REDUCE_SCATTER)


# -- slots, and the order in which programs fill them ------------------------------------------------------------------


@triton.jit
def slot_start(call, rank, slot, data_offset, ELEMENT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the pointer to slot `slot` at `rank`; slots begin `data_offset` bytes into the half."""
    # The compiler cannot know the alignment of an address from a table, and would move single elements.
    data = tl.multiple_of((half_at(call, rank) + data_offset).to(tl.pointer_type(ELEMENT)), 16)
    return data + tl.cast(slot, tl.int64) * (BLOCK_M * BLOCK_N)


@triton.jit
def slot_pointers(call, rank, slot, data_offset, ELEMENT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the pointers [BLOCK_M, BLOCK_N] to slot `slot` at `rank`."""
    tile = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    return slot_start(call, rank, slot, data_offset, ELEMENT, BLOCK_M, BLOCK_N) + tile


@triton.jit
def store_slot(call, rank, slot, values, data_offset, ELEMENT: tl.constexpr, SPLIT: tl.constexpr = False):
    """Write `values` to a slot of their shape, rounded to ELEMENT; with SPLIT the left columns, then the right ones.

    Plain stores, never TMA: the flag that follows orders stores of threads only.
    """
    BLOCK_M: tl.constexpr = values.shape[0]
    BLOCK_N: tl.constexpr = values.shape[1]
    if SPLIT:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = split_columns(values)
        rows = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, HALF)[None, :]
        data = slot_start(call, rank, slot, data_offset, ELEMENT, BLOCK_M, BLOCK_N)
        tl.store(data + rows, rounded(left, ELEMENT))
        tl.store(data + HALF + rows, rounded(right, ELEMENT))
    else:
        tl.store(slot_pointers(call, rank, slot, data_offset, ELEMENT, BLOCK_M, BLOCK_N), rounded(values, ELEMENT))


@triton.jit
def sum_terms(call, first_slot, strip, data_offset, ELEMENT: tl.constexpr, WORLD: tl.constexpr, C: tl.constexpr):
    """Return the sum over ranks, in fp32, of strip `strip` of a tile; rank s's term is in slot first_slot + s here.

    A strip is [STRIP_M, BLOCK_N], some rows of a tile: tiles have the best size for the matmul, and the sum of a whole
    tile and its terms would not fit into registers. Terms are added in rank order.
    """
    total = zeros(C.STRIP_M, C.BLOCK_N)
    for source in tl.static_range(WORLD):
        strip_slot = (first_slot + source) * (C.BLOCK_M // C.STRIP_M) + strip
        pointers = slot_pointers(call, call.rank, strip_slot, data_offset, ELEMENT, C.STRIP_M, C.BLOCK_N)
        total += tl.load(pointers).to(tl.float32)
    return total


@triton.jit
def round_count(program, num_programs, num_tiles):
    """Return the number of tiles that program `program` computes."""
    return tl.maximum(tl.cdiv(num_tiles - program, num_programs), 0)


@triton.jit
def tile_of_round(step, first_tile, num_rounds, program, num_programs):
    """Return the tile that a program computes in round `step`: in order from `first_tile` on, wrapping around.

    If `first_tile` is the next rank's first tile, ranks write to different owners at any time and end with their own.
    """
    num_skipped_rounds = tl.cdiv(tl.maximum(first_tile - program, 0), num_programs)
    return program + (step + num_skipped_rounds) % num_rounds * num_programs


@triton.jit
def signal_tile(call, step, first_tile, num_rounds, program, num_programs, tiles_per_owner, WORLD: tl.constexpr):
    """Release: `signals.signal` for the tile that this program stored at its owner in round `step`; none if `step` < 0.

    For a loop that stores the next tile now. The fence of a release stalls the program until its stores have arrived;
    those of the previous tile arrived while this one was multiplied. So each flag is set one tile late, the last one
    after the loop. Slots at an owner are ordered by its tile, then by source.
    """
    tile = tile_of_round(tl.maximum(step, 0), first_tile, tl.maximum(num_rounds, 1), program, num_programs)
    slot = tile % tiles_per_owner * WORLD + call.rank
    thread_barrier()
    store_release(flag_at(call, tile // tiles_per_owner, WORLD + slot), call.epoch, step >= 0)


# -- launches ----------------------------------------------------------------------------------------------------------


def gemm_all_reduce(
    products: Sequence[tuple[Tensor, Tensor]],
    *,
    workspace: Workspace,
    launch: Launch,
    two_shot: bool,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor | None]:
    """Return (out, normed): the sum over ranks and products of x @ weight^T (+ bias) (+ residual), and its RMS norm.

    Args:
        products: pairs (x [M, K_i], weight [N, K_i]), bf16, fp16 or fp32; K_i may differ between pairs and
            between ranks. Any strides.
        workspace: of this group and stream, of at least `all_reduce_bytes(...)` bytes.
        launch: tiles and programs, the same on all ranks; see `launch_for`. If the device runs fewer than
            `launch.programs` programs at once, ranks on that device must get equal shares of it; see Progress in
            `signals`.
        two_shot: the owner of a tile sums it, not all ranks; the same on all ranks.
        bias, norm_weight: [N], residual: [M, N] with contiguous rows; the same values on all ranks.

    Raises:
        ValueError: the workspace is too small.
    """
    x, w = products[0]
    m, n = x.shape[0], w.shape[0]
    out = x.new_empty(m, n)
    normed = None if norm_weight is None else x.new_empty(m, n)
    if m == 0 or n == 0:
        return out, normed
    world = workspace.world_size
    slots = _all_reduce_slots(m, n, x.dtype, world, launch, two_shot)
    terms_offset, sums_offset = workspace.slot_offsets(
        slots, counters=0 if normed is None else launch.tile_counts(m, n)[0]
    )
    gemm_all_reduce_kernel[(launch.programs,)](
        bias_ptr=bias,
        residual=None if residual is None else Matrix(residual, residual.stride(0)),
        norm_weight_ptr=norm_weight,
        out=Matrix(out, n),
        normed=None if normed is None else Matrix(normed, n),
        M=m,
        N=n,
        eps=eps,
        **workspace.arguments(),
        terms_offset=terms_offset,
        sums_offset=sums_offset,
        WORLD=world,
        TWO_SHOT=two_shot,
        **operand_arguments(products, launch, flatten=two_shot),
    )
    return out, normed


def all_reduce_bytes(m: int, n: int, dtype: torch.dtype, world_size: int, launch: Launch, *, two_shot: bool) -> int:
    """Return the bytes of the smallest workspace for `gemm_all_reduce` of a result [m, n]."""
    return needed_bytes(world_size, _all_reduce_slots(m, n, dtype, world_size, launch, two_shot))


def _all_reduce_slots(
    m: int, n: int, dtype: torch.dtype, world_size: int, launch: Launch, two_shot: bool
) -> list[tuple[int, int]]:
    """Return (number of slots, bytes of each) of terms and of sums."""
    tiles_m, tiles_n = launch.tile_counts(m, n)
    slot_bytes = launch.block_m * launch.block_n * dtype.itemsize
    num_tiles = tiles_m * tiles_n
    tiles_per_owner = -(-num_tiles // world_size)
    num_terms, num_sums = (tiles_per_owner, num_tiles) if two_shot else (num_tiles, 0)
    return [(world_size * num_terms, slot_bytes), (num_sums, slot_bytes)]


def gemm_reduce_scatter(
    products: Sequence[tuple[Tensor, Tensor]],
    *,
    workspace: Workspace,
    launch: Launch,
    rows_per_rank: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return out [M_r, N]: this rank's rows of the sum over ranks and products of x @ weight^T (+ bias).

    Args:
        products: pairs (x [M, K_i], weight [N, K_i]), bf16, fp16 or fp32; K_i may differ between pairs and
            between ranks. Any strides.
        workspace: of this group and stream, of at least `reduce_scatter_bytes(...)` bytes.
        launch: tiles and programs, the same on all ranks; see `launch_for`.
        rows_per_rank: rows of out per rank (the last ranks may have fewer), equal on all ranks; None: ceil(M / W).
        bias: [N], added once, to the sum.

    Raises:
        ValueError: the workspace is too small.
    """
    x, w = products[0]
    m, n = x.shape[0], w.shape[0]
    world, rank = workspace.world_size, workspace.rank
    rows_per_rank = -(-m // world) if rows_per_rank is None else rows_per_rank
    rows = min(max(m - rank * rows_per_rank, 0), rows_per_rank)
    out = x.new_empty(rows, n)
    if m == 0 or n == 0:
        return out
    (terms_offset,) = workspace.slot_offsets(_reduce_scatter_slots(rows_per_rank, n, x.dtype, world, launch))
    gemm_reduce_scatter_kernel[(launch.programs,)](
        bias_ptr=bias,
        out=Matrix(out, n),
        M=m,
        N=n,
        rows_per_rank=rows_per_rank,
        **workspace.arguments(),
        terms_offset=terms_offset,
        WORLD=world,
        **operand_arguments(products, launch, flatten=True),
    )
    return out


def reduce_scatter_bytes(
    m: int, n: int, dtype: torch.dtype, world_size: int, launch: Launch, *, rows_per_rank: int | None = None
) -> int:
    """Return the bytes of the smallest workspace for `gemm_reduce_scatter` of a result [m, n]."""
    rows = -(-m // world_size) if rows_per_rank is None else rows_per_rank
    return needed_bytes(world_size, _reduce_scatter_slots(rows, n, dtype, world_size, launch))


def _reduce_scatter_slots(
    rows_per_rank: int, n: int, dtype: torch.dtype, world_size: int, launch: Launch
) -> list[tuple[int, int]]:
    """Return (number of slots, bytes of each) of terms."""
    tiles_m, tiles_n = launch.tile_counts(rows_per_rank, n)
    return [(world_size * tiles_m * tiles_n, launch.block_m * launch.block_n * dtype.itemsize)]


fix_cache_keys(__name__)
