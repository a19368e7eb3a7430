"""y = sum over ranks of x @ w^T, on all ranks, in one launch; optionally with a residual add and RMS norm after it.

    x [M, K_r], w [N, K_r] per rank -> out [M, N]: sum_r x_r @ w_r^T (+ bias) (+ residual)
    normed [M, N] = out / sqrt(mean(out^2) + eps) * norm_weight

A rank may have several pairs (x, w), each with a K of its own, whose products are added in fp32 before anything is
sent. Each rank multiplies all of [M, N] and pushes each tile, in the dtype of out, to the ranks that sum it: once its
flag is set the data is local, and no read waits for the link. The terms are added in fp32 in rank order and rounded
once, so a sum has the same bits on all ranks. A rank's tile is NaN if a term or the sum of it did not arrive in time.

    one-shot   all ranks sum every tile: W times the traffic, but one hop. For small M.
    two-shot   the owner of a tile sums it and sends the sum to all: 2 * (W-1)/W of the bytes of out per rank, two hops.
               Ranks begin with the tiles of the next rank and end with their own, so they write to different owners.

The program that stores the last tile of a row of tiles computes the norm of that row, so no program waits for another
of its own rank. The norm is that of the rounded out, which backward and the next layer use too.

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
from ..comm.signals import begin, end, is_last, put_all, wait
from ..comm.slots import put_tile, rounds_of, slot_pointers, store_slot, sum_terms, tile_of, wait_terms
from ..comm.workspace import OPS, Workspace, needed_bytes
from ..language import or_nan
from .launch import Launch, operand_arguments
from .tiles import Matrix, add_bias, load_tile, multiply_products, store_tile, tile_at, tile_offsets

OP = tl.constexpr(OPS.index("matmul_all_reduce"))


@triton.jit(do_not_specialize=["rank"])
def gemm_all_reduce_kernel(
    x0, w0, x1, w1, x2, w2, x3, w3, sizes, bias_ptr, residual, norm_weight_ptr, out, normed,
    M, N, eps,
    ws, rank, terms_offset, sums_offset, WORLD: tl.constexpr,
    TWO_SHOT: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    call = begin(ws, rank, WORLD)
    ELEMENT: tl.constexpr = out.ptr.dtype.element_ty
    STRIPS: tl.constexpr = C.BLOCK_M // C.STRIP_M
    # Copies load one number per element, not one per rank: more rows at a time keep as many bytes in flight.
    COPY_M: tl.constexpr = C.BLOCK_M if C.BLOCK_M < 4 * C.STRIP_M else 4 * C.STRIP_M
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    tiles_m = tl.cdiv(M, C.BLOCK_M)
    tiles_n = tl.cdiv(N, C.BLOCK_N)
    tiles = tiles_m * tiles_n
    per_owner = tl.cdiv(tiles, WORLD)
    rounds = rounds_of(program, programs, tiles)
    # Order of the slots, and of their flags. One-shot: terms by (tile, source). Two-shot: terms by (tile of the owner,
    # source), then the sums.
    first_sum = WORLD * per_owner
    first_tile = (rank + 1) % WORLD * per_owner

    for step in tl.range(0, rounds, flatten=C.FLATTEN):
        tile = tile_of(step, first_tile, rounds, program, programs)
        tile_m, tile_n = tile_at(tile, tiles_m, tiles_n, C.GROUP_M)
        term = multiply_products((x0, x1, x2, x3), (w0, w1, w2, w3), sizes, tile_m, tile_n, M, N, 0, C)
        if TWO_SHOT:
            put_tile(call, step - 1, first_tile, rounds, program, programs, per_owner, WORLD)
            slot = tile % per_owner * WORLD + rank
            store_slot(call, tile // per_owner, slot, term, terms_offset, ELEMENT, C.SPLIT_STORE)
        else:
            slot = tile * WORLD + rank
            # Not unrolled: the addresses of all peers at once would take the registers of the tile.
            for distance in tl.range(0, WORLD):
                peer = (rank + distance) % WORLD
                store_slot(call, peer, slot, term, terms_offset, ELEMENT, C.SPLIT_STORE)
            put_all(call, WORLD + slot, True, WORLD)
    if TWO_SHOT:
        put_tile(call, rounds - 1, first_tile, rounds, program, programs, per_owner, WORLD)

    for step in tl.range(0, rounds):
        tile = step * programs + program
        if not TWO_SHOT or tile // per_owner == rank:
            first_slot = tile * WORLD
            if TWO_SHOT:
                first_slot -= rank * per_owner * WORLD
            tile_m, tile_n = tile_at(tile, tiles_m, tiles_n, C.GROUP_M)
            good = wait_terms(call, first_slot, tile, WORLD, OP)
            for strip in tl.range(0, STRIPS):
                place = tile * STRIPS + strip
                total = sum_terms(call, first_slot, strip, terms_offset, ELEMENT, WORLD, C)
                strip_m = tile_m * STRIPS + strip
                total = add_bias(total, bias_ptr, tile_n, N)
                if residual is not None:
                    total += load_tile(residual, strip_m, tile_n, M, N, C.STRIP_M, C.BLOCK_N).to(tl.float32)
                total = or_nan(total, good)
                if TWO_SHOT:
                    for distance in tl.range(1, WORLD):
                        store_slot(call, (rank + distance) % WORLD, place, total, sums_offset, ELEMENT)
                store_tile(out, total, strip_m, tile_n, M, N)
            if TWO_SHOT:
                put_all(call, WORLD + first_sum + tile, good, WORLD)
            if norm_weight_ptr is not None:
                norm_if_last(call, out, norm_weight_ptr, normed, tile_m, tiles_n, M, N, eps, C)

    if TWO_SHOT:
        for step in tl.range(0, rounds):
            tile = step * programs + program
            owner = tile // per_owner
            if owner != rank:
                tile_m, tile_n = tile_at(tile, tiles_m, tiles_n, C.GROUP_M)
                good = wait(call, WORLD + first_sum + tile, owner, tile, WORLD, OP)
                for strip in tl.range(0, C.BLOCK_M // COPY_M):
                    place = slot_pointers(
                        call, rank, tile * (C.BLOCK_M // COPY_M) + strip, sums_offset, ELEMENT, COPY_M, C.BLOCK_N
                    )  # fmt: skip
                    total = or_nan(tl.load(place).to(tl.float32), good)
                    strip_m = tile_m * (C.BLOCK_M // COPY_M) + strip
                    store_tile(out, total, strip_m, tile_n, M, N)
                if norm_weight_ptr is not None:
                    norm_if_last(call, out, norm_weight_ptr, normed, tile_m, tiles_n, M, N, eps, C)
    end(call, WORLD, OP)


@triton.jit
def norm_if_last(call, h, weight_ptr, normed, tile_m, tiles_n, M, N, eps, C: tl.constexpr):
    """RMS norm of the rows of h [M, N] in row of tiles `tile_m`, once all of its tiles are stored.

    The bits do not depend on the program: squares are added along a row in the order of the columns.
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
    """(out, normed): sum over ranks and products of x @ weight^T (+ bias) (+ residual); its RMS norm by norm_weight.

    Args:
        products: 1 to 4 pairs (x [M, K_i], weight [N, K_i]), bf16, fp16 or fp32; K_i may differ between pairs and
            between ranks. Any strides.
        workspace: of this group and stream, of at least `workspace_bytes(...)` bytes.
        launch: tiles and programs, the same on all ranks; see `launch_for`. If the device runs fewer than
            `launch.programs` programs at once, the ranks must share it fairly, see `signals`.
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
    terms_offset, sums_offset = workspace.layout(
        _slots(m, n, x.dtype, world, launch, two_shot), counters=0 if normed is None else launch.tiles(m, n)[0]
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


def workspace_bytes(m: int, n: int, dtype: torch.dtype, world_size: int, launch: Launch, *, two_shot: bool) -> int:
    """Bytes of the smallest workspace for `gemm_all_reduce` of a result [m, n]."""
    return needed_bytes(world_size, _slots(m, n, dtype, world_size, launch, two_shot))


def _slots(
    m: int, n: int, dtype: torch.dtype, world_size: int, launch: Launch, two_shot: bool
) -> list[tuple[int, int]]:
    """(number, bytes of each) of the slots of terms and of sums."""
    tiles_m, tiles_n = launch.tiles(m, n)
    slot_bytes = launch.block_m * launch.block_n * dtype.itemsize
    tiles = tiles_m * tiles_n
    per_owner = -(-tiles // world_size)
    terms, sums = (per_owner, tiles) if two_shot else (tiles, 0)
    return [(world_size * terms, slot_bytes), (sums, slot_bytes)]


fix_cache_keys(__name__)
