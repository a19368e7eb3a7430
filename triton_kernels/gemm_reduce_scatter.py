"""This rank's rows of y = sum over ranks of x @ w^T, in one launch.

    x [M, K_r], w [N, K_r] per rank -> out [M_r, N]: rows r*c to (r+1)*c, c = ceil(M / W), of sum_r x_r @ w_r^T (+ bias)

The last ranks' rows may be fewer, or none. Each rank multiplies all of [M, N], the next rank's rows first and its own
last, so that at any time ranks write to different owners and what has the longest way is sent first. A tile goes, in
the dtype of out, straight into the owner's slots; the owner adds the terms in fp32 in the order of the ranks, as they
arrive, and rounds once. No tile holds rows of two owners.

Source: Chang et al., "FLUX: Fast Software-based Communication Overlap On GPUs Through Kernel Fusion", 2024.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, check_like, check_matmul, compile_arguments, launches
from .resources import Variant
from .signals import begin, end, put
from .slots import rounds_of, store_slot, sum_terms, tile_of, wait_terms
from .tiles import multiply_tile, store_tile, tile_at, tile_offsets
from .workspace import OPS, Workspace

OP = tl.constexpr(OPS.index("matmul_reduce_scatter"))


@triton.jit(do_not_specialize=["rank"])
def gemm_reduce_scatter_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    rows_per_rank,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    stride_om,
    workspaces_ptr,
    state_ptr,
    error_ptr,
    rank,
    half_bytes,
    timeout_ns,
    terms_offset,
    WORLD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    STRIP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    call = begin(workspaces_ptr, state_ptr, error_ptr, rank, half_bytes, timeout_ns, WORLD)
    ELEMENT: tl.constexpr = out_ptr.dtype.element_ty
    STRIPS: tl.constexpr = BLOCK_M // STRIP_M
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    tiles_m = tl.cdiv(rows_per_rank, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    per_owner = tiles_m * tiles_n
    rounds = rounds_of(program, programs, WORLD * per_owner)

    for step in tl.range(0, rounds):
        tile = tile_of(step, (rank + 1) % WORLD * per_owner, rounds, program, programs)
        owner = tile // per_owner
        tile_of_owner = tile - owner * per_owner
        tile_m, tile_n = tile_at(tile_of_owner, tiles_m, tiles_n, GROUP_M)
        rows = tl.minimum(M - owner * rows_per_rank, rows_per_rank)
        if tile_m * BLOCK_M < rows:
            first_row = owner.to(tl.int64) * rows_per_rank
            term = multiply_tile(
                x_ptr + first_row * stride_xm, w_ptr, tile_m, tile_n, rows, N, K,
                stride_xm, stride_xk, stride_wn, stride_wk, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, EVEN_K,
            )  # fmt: skip
            slot = tile_of_owner * WORLD + rank
            store_slot(call, owner, slot, term, terms_offset, ELEMENT, BLOCK_M, BLOCK_N)
            put(call, owner, WORLD + slot, True)

    rows = tl.minimum(M - rank * rows_per_rank, rows_per_rank)
    for step in tl.range(0, rounds):
        tile = step * programs + program
        tile_of_owner = tile - rank * per_owner
        tile_m, tile_n = tile_at(tile_of_owner, tiles_m, tiles_n, GROUP_M)
        if (tile // per_owner == rank) & (tile_m * BLOCK_M < rows):
            first_slot = tile_of_owner * WORLD
            wait_terms(call, first_slot, tile, WORLD, OP)
            for strip in tl.range(0, STRIPS):
                total = sum_terms(
                    call, first_slot, strip, terms_offset, ELEMENT, STRIP_M, BLOCK_N, STRIPS, WORLD
                )  # fmt: skip
                if HAS_BIAS:
                    columns = tile_offsets(tile_n, BLOCK_N)
                    total += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
                store_tile(out_ptr, total, tile_m * STRIPS + strip, tile_n, rows, N, stride_om, 1, STRIP_M, BLOCK_N)
    end(call, WORLD, OP)


def gemm_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    *,
    workspace: Workspace,
    launch: Launch,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """out [M_r, N]: this rank's rows of the sum over ranks of x @ weight^T (+ bias).

    Args:
        x: [M, K_r] bf16, fp16 or fp32; K_r may differ between ranks. Any strides.
        weight: [N, K_r] of that dtype. Any strides.
        workspace: of this group and stream.
        launch: tiles and programs, the same on all ranks.
        bias: [N], added once, to the sum.
        out: [M_r, N] with rows in one piece, in place of new memory.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit, or a workspace that is too small.

    Example:
        y_shard_m = gemm_reduce_scatter(x_shard_k, w_shard_k, workspace=workspace, launch=launch)
    """
    check_matmul(x, weight, workspace)
    m, k, n = x.shape[0], x.shape[1], weight.shape[0]
    world, rank = workspace.world_size, workspace.rank
    rows_per_rank = -(-m // world)
    rows = min(max(m - rank * rows_per_rank, 0), rows_per_rank)
    check_like("bias", bias, (n,), x)
    check_like("out", out, (rows, n), x)
    if out is None:
        out = x.new_empty(rows, n)
    tiles_m, tiles_n = launch.tiles(rows_per_rank, n)
    slot_bytes = launch.block_m * launch.block_n * x.element_size()
    (terms_offset,) = workspace.layout([(world * tiles_m * tiles_n, slot_bytes)])
    gemm_reduce_scatter_kernel[(launch.programs,)](
        x,
        weight,
        bias,
        out,
        m,
        n,
        k,
        rows_per_rank,
        *x.stride(),
        *weight.stride(),
        out.stride(0),
        *workspace.arguments,
        terms_offset,
        WORLD=world,
        HAS_BIAS=bias is not None,
        **launch.options(k),
    )
    return out


def compile_variants(arch: int) -> Iterator[Variant]:
    """Everything that `gemm_reduce_scatter` may launch on `arch` with W = 8."""
    for kind, element, launch in launches(arch):
        yield Variant(
            "gemm_reduce_scatter",
            f"{kind} {launch.config}",
            arch,
            gemm_reduce_scatter_kernel,
            compile_arguments(gemm_reduce_scatter_kernel, element),
            launch.constants() | {"WORLD": 8, "HAS_BIAS": True, "EVEN_K": False},
            launch.config.options(),
            odd=frozenset({"rank", "rows_per_rank"}),
            matrix_instruction=kind != "ieee",
        )
