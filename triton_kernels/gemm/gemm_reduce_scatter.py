"""y = sum over ranks of x @ w^T, each rank its own rows, in one launch.

    x [M, K_r], w [N, K_r] per rank -> out [M_r, N]: rows r*c to (r+1)*c of sum_r x_r @ w_r^T (+ bias)

c is ceil(M / W), or as given; the last ranks may have fewer rows, or none. A rank may have several pairs (x, w), each
with a K of its own, whose products are added in fp32 before anything is sent: dX of layers that share an input.

Each rank multiplies all of [M, N], the next rank's rows first and its own last, so that at any time ranks write to
different owners. A tile is stored, in the dtype of out, straight into the owner's slots; the owner adds the terms in
fp32 in rank order and rounds once. No tile holds rows of two owners. A tile is NaN if one of its terms did not arrive
in time.

Source: Chang et al., "FLUX: Fast Software-based Communication Overlap On GPUs Through Kernel Fusion", 2024.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cache_keys import fix_cache_keys
from ..comm.signals import begin, end
from ..comm.slots import put_tile, rounds_of, store_slot, sum_terms, tile_of, wait_terms
from ..comm.workspace import OPS, Workspace, needed_bytes
from ..language import or_nan
from .launch import Launch, operand_arguments
from .tiles import Matrix, add_bias, multiply_products, store_tile, tile_at

OP = tl.constexpr(OPS.index("matmul_reduce_scatter"))


@triton.jit(do_not_specialize=["rank"])
def gemm_reduce_scatter_kernel(
    x0, w0, x1, w1, x2, w2, x3, w3, sizes, bias_ptr, out,
    M, N, rows_per_rank,
    ws, rank, terms_offset, WORLD: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    call = begin(ws, rank, WORLD)
    ELEMENT: tl.constexpr = out.ptr.dtype.element_ty
    STRIPS: tl.constexpr = C.BLOCK_M // C.STRIP_M
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    tiles_m = tl.cdiv(rows_per_rank, C.BLOCK_M)
    tiles_n = tl.cdiv(N, C.BLOCK_N)
    per_owner = tiles_m * tiles_n
    # Full owners are first, then one with fewer rows, then those without any: tile numbers have no gaps.
    full_owners = M // rows_per_rank
    tiles = full_owners * per_owner + tl.cdiv(M - full_owners * rows_per_rank, C.BLOCK_M) * tiles_n
    rounds = rounds_of(program, programs, tiles)

    first_tile = (rank + 1) % WORLD * per_owner
    for step in tl.range(0, rounds, flatten=C.FLATTEN):
        tile = tile_of(step, first_tile, rounds, program, programs)
        owner = tile // per_owner
        tile_of_owner = tile - owner * per_owner
        first_row = owner * rows_per_rank
        rows = tl.minimum(M - first_row, rows_per_rank)
        tile_m, tile_n = tile_at(tile_of_owner, tl.cdiv(rows, C.BLOCK_M), tiles_n, C.GROUP_M)
        term = multiply_products(
            (x0, x1, x2, x3), (w0, w1, w2, w3), sizes, tile_m, tile_n, rows, N, first_row, C
        )  # fmt: skip
        put_tile(call, step - 1, first_tile, rounds, program, programs, per_owner, WORLD)
        slot = tile_of_owner * WORLD + rank
        store_slot(call, owner, slot, term, terms_offset, ELEMENT, C.SPLIT_STORE)
    put_tile(call, rounds - 1, first_tile, rounds, program, programs, per_owner, WORLD)

    rows = tl.minimum(M - rank * rows_per_rank, rows_per_rank)
    for step in tl.range(0, rounds):
        tile = step * programs + program
        if tile // per_owner == rank:
            tile_of_owner = tile - rank * per_owner
            tile_m, tile_n = tile_at(tile_of_owner, tl.cdiv(rows, C.BLOCK_M), tiles_n, C.GROUP_M)
            first_slot = tile_of_owner * WORLD
            good = wait_terms(call, first_slot, tile, WORLD, OP)
            for strip in tl.range(0, STRIPS):
                total = sum_terms(call, first_slot, strip, terms_offset, ELEMENT, WORLD, C)
                total = or_nan(add_bias(total, bias_ptr, tile_n, N), good)
                store_tile(out, total, tile_m * STRIPS + strip, tile_n, rows, N)
    end(call, WORLD, OP)


def gemm_reduce_scatter(
    products: Sequence[tuple[Tensor, Tensor]],
    *,
    workspace: Workspace,
    launch: Launch,
    rows_per_rank: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """out [M_r, N]: this rank's rows of the sum over ranks and products of x @ weight^T (+ bias).

    Args:
        products: 1 to 4 pairs (x [M, K_i], weight [N, K_i]), bf16, fp16 or fp32; K_i may differ between pairs and
            between ranks. Any strides.
        workspace: of this group and stream, of at least `workspace_bytes(...)` bytes.
        launch: tiles and programs, the same on all ranks; see `launch_for`.
        rows_per_rank: c, if it is not ceil(M / W); the same on all ranks.
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
    (terms_offset,) = workspace.layout(_slots(rows_per_rank, n, x.dtype, world, launch))
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


def workspace_bytes(
    m: int, n: int, dtype: torch.dtype, world_size: int, launch: Launch, *, rows_per_rank: int | None = None
) -> int:
    """Bytes of the smallest workspace for `gemm_reduce_scatter` of a result [m, n]."""
    rows = -(-m // world_size) if rows_per_rank is None else rows_per_rank
    return needed_bytes(world_size, _slots(rows, n, dtype, world_size, launch))


def _slots(rows_per_rank: int, n: int, dtype: torch.dtype, world_size: int, launch: Launch) -> list[tuple[int, int]]:
    tiles_m, tiles_n = launch.tiles(rows_per_rank, n)
    return [(world_size * tiles_m * tiles_n, launch.block_m * launch.block_n * dtype.itemsize)]


fix_cache_keys(__name__)
