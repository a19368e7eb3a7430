"""y = sum over ranks of x @ w^T, on all ranks, in one launch; with the residual add and RMS norm behind it.

    x [M, K_r], w [N, K_r] per rank -> out [M, N]: sum_r x_r @ w_r^T (+ bias) (+ residual)
    normed [M, N] = out / sqrt(mean(out^2) + eps) * norm_weight

Each rank multiplies all of [M, N] and sends each tile, in the dtype of out, to whoever sums it; there the terms are
added in fp32 in the order of the ranks, and rounded once. `two_shot` says who sums:

    one-shot   everybody everything: a tile goes to all ranks, W times the traffic, but one hop. For small M.
    two-shot   tile t's owner, which sends the sum to all: 2 * (W-1)/W of the bytes of out per rank, two hops. Ranks
               begin with the next rank's tiles and end with their own, so at any time they write to different owners.

Either way a sum is the same bits on all ranks: they add the same numbers in one order, or one of them adds for all.
Tiles are pushed to their reader, not pulled: once the flag is there the data is local, and no read waits for the link.

The norm of a row of tiles is taken by whichever program stores the last of them, so no program waits for another of its
own rank. It is taken of the rounded out, because that is what backward has and what the next layer sees.

Sources: one-shot and two-shot all-reduce: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH", 2005; flags per tile: Chang et al., "FLUX: Fast Software-based Communication Overlap On GPUs
Through Kernel Fusion", 2024.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, check_like, check_matmul, compile_arguments, launches
from .resources import Variant
from .signals import begin, end, is_last, put, wait
from .slots import rounds_of, slot_pointers, store_slot, sum_terms, tile_of, wait_terms
from .tiles import load_tile, multiply_tile, store_tile, tile_at, tile_offsets
from .workspace import OPS, Workspace

OP = tl.constexpr(OPS.index("matmul_all_reduce"))


@triton.jit(do_not_specialize=["rank"])
def gemm_all_reduce_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    residual_ptr,
    norm_weight_ptr,
    out_ptr,
    normed_ptr,
    M,
    N,
    K,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    stride_rm,
    stride_om,
    stride_normed_m,
    eps,
    workspaces_ptr,
    state_ptr,
    error_ptr,
    rank,
    half_bytes,
    timeout_ns,
    terms_offset,
    sums_offset,
    WORLD: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
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
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    per_owner = tl.cdiv(tiles, WORLD)
    rounds = rounds_of(program, programs, tiles)
    # One-shot terms lie by (tile, source); two-shot ones by (tile of the owner, source), and the sums behind them.
    first_sum = WORLD * per_owner

    for step in tl.range(0, rounds):
        tile = tile_of(step, (rank + 1) % WORLD * per_owner, rounds, program, programs)
        tile_m, tile_n = tile_at(tile, tiles_m, tiles_n, GROUP_M)
        term = multiply_tile(
            x_ptr, w_ptr, tile_m, tile_n, M, N, K, stride_xm, stride_xk, stride_wn, stride_wk,
            BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, EVEN_K,
        )  # fmt: skip
        if TWO_SHOT:
            owner = tile // per_owner
            slot = (tile - owner * per_owner) * WORLD + rank
            store_slot(call, owner, slot, term, terms_offset, ELEMENT, BLOCK_M, BLOCK_N)
            put(call, owner, WORLD + slot, True)
        else:
            slot = tile * WORLD + rank
            for distance in tl.static_range(WORLD):
                store_slot(
                    call, (rank + distance) % WORLD, slot, term, terms_offset, ELEMENT, BLOCK_M, BLOCK_N
                )  # fmt: skip
            for distance in tl.static_range(WORLD):
                put(call, (rank + distance) % WORLD, WORLD + slot, True)

    for step in tl.range(0, rounds):
        tile = step * programs + program
        if not TWO_SHOT or tile // per_owner == rank:
            first_slot = tile * WORLD
            if TWO_SHOT:
                first_slot -= rank * per_owner * WORLD
            tile_m, tile_n = tile_at(tile, tiles_m, tiles_n, GROUP_M)
            good = wait_terms(call, first_slot, tile, WORLD, OP)
            for strip in tl.range(0, STRIPS):
                total = sum_terms(
                    call, first_slot, strip, terms_offset, ELEMENT, STRIP_M, BLOCK_N, STRIPS, WORLD
                )  # fmt: skip
                strip_m = tile_m * STRIPS + strip
                if HAS_BIAS:
                    columns = tile_offsets(tile_n, BLOCK_N)
                    total += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
                if HAS_RESIDUAL:
                    residual = load_tile(residual_ptr, strip_m, tile_n, M, N, stride_rm, 1, STRIP_M, BLOCK_N)
                    total += residual.to(tl.float32)
                if TWO_SHOT:
                    for distance in tl.static_range(1, WORLD):
                        store_slot(
                            call, (rank + distance) % WORLD, tile * STRIPS + strip, total, sums_offset,
                            ELEMENT, STRIP_M, BLOCK_N,
                        )  # fmt: skip
                store_tile(out_ptr, total, strip_m, tile_n, M, N, stride_om, 1, STRIP_M, BLOCK_N)
            if TWO_SHOT:
                for distance in tl.static_range(1, WORLD):
                    put(call, (rank + distance) % WORLD, WORLD + first_sum + tile, good)
            if HAS_NORM:
                norm_if_last(
                    call, out_ptr, norm_weight_ptr, normed_ptr, tile_m, tiles_n, M, N, stride_om, stride_normed_m, eps,
                    STRIP_M, BLOCK_N, STRIPS,
                )  # fmt: skip

    if TWO_SHOT:
        for step in tl.range(0, rounds):
            tile = step * programs + program
            owner = tile // per_owner
            if owner != rank:
                tile_m, tile_n = tile_at(tile, tiles_m, tiles_n, GROUP_M)
                wait(call, WORLD + first_sum + tile, owner, tile, WORLD, OP)
                for strip in tl.range(0, STRIPS):
                    place = slot_pointers(call, rank, tile * STRIPS + strip, sums_offset, ELEMENT, STRIP_M, BLOCK_N)
                    total = tl.load(place).to(tl.float32)
                    store_tile(
                        out_ptr, total, tile_m * STRIPS + strip, tile_n, M, N, stride_om, 1, STRIP_M, BLOCK_N
                    )  # fmt: skip
                if HAS_NORM:
                    norm_if_last(
                        call, out_ptr, norm_weight_ptr, normed_ptr, tile_m, tiles_n, M, N, stride_om, stride_normed_m,
                        eps, STRIP_M, BLOCK_N, STRIPS,
                    )  # fmt: skip
    end(call, WORLD, OP)


@triton.jit
def norm_if_last(
    call,
    h_ptr,
    weight_ptr,
    normed_ptr,
    tile_m,
    tiles_n,
    M,
    N,
    stride_hm,
    stride_normed_m,
    eps,
    STRIP_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STRIPS: tl.constexpr,
):
    """RMS norm of the rows of h [M, N] in row of tiles `tile_m`, once all of its tiles are stored.

    The same bits whichever program does it: squares add along a row in the order of the columns.
    """
    if is_last(call, tile_m, tiles_n):
        for strip in tl.range(0, STRIPS):
            strip_m = tile_m * STRIPS + strip
            squares = tl.zeros((STRIP_M,), dtype=tl.float32)
            for block in tl.range(0, tiles_n):
                h = load_tile(h_ptr, strip_m, tl.cast(block, tl.int32), M, N, stride_hm, 1, STRIP_M, BLOCK_N)
                h = h.to(tl.float32)
                squares += tl.sum(h * h, axis=1)
            scale = 1.0 / tl.sqrt_rn(squares / N + eps)
            for block in tl.range(0, tiles_n):
                tile_n = tl.cast(block, tl.int32)
                h = load_tile(h_ptr, strip_m, tile_n, M, N, stride_hm, 1, STRIP_M, BLOCK_N).to(tl.float32)
                columns = tile_offsets(tile_n, BLOCK_N)
                weight = tl.load(weight_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
                normed = h * scale[:, None] * weight[None, :]
                store_tile(normed_ptr, normed, strip_m, tile_n, M, N, stride_normed_m, 1, STRIP_M, BLOCK_N)


def gemm_all_reduce(
    x: Tensor,
    weight: Tensor,
    *,
    workspace: Workspace,
    launch: Launch,
    two_shot: bool,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(out, normed): sum over ranks of x @ weight^T (+ bias) (+ residual), and its RMS norm where norm_weight is given.

    Args:
        x: [M, K_r] bf16, fp16 or fp32; K_r may differ between ranks. Any strides.
        weight: [N, K_r] of that dtype. Any strides.
        workspace: of this group and stream.
        launch: tiles and programs, the same on all ranks; with fewer programs on the device than `launch.programs` at
            once the ranks must share it fairly, see `signals`.
        two_shot: who sums, the same on all ranks.
        bias, norm_weight: [N], residual: [M, N] with rows in one piece; the same values on all ranks.
        out: [M, N] in rows of one piece, in place of new memory; may be `residual`.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit, or a workspace that is too small.

    Example:
        y, _ = gemm_all_reduce(x_shard_k, w_shard_k, workspace=workspace, launch=launch, two_shot=True)
    """
    check_matmul(x, weight, workspace)
    m, k, n = x.shape[0], x.shape[1], weight.shape[0]
    check_like("bias", bias, (n,), x)
    check_like("residual", residual, (m, n), x)
    check_like("norm_weight", norm_weight, (n,), x)
    check_like("out", out, (m, n), x)
    if out is None:
        out = x.new_empty(m, n)
    normed = None if norm_weight is None else x.new_empty(m, n)
    tiles_m, tiles_n = launch.tiles(m, n)
    slot_bytes = launch.block_m * launch.block_n * x.element_size()
    world = workspace.world_size
    per_owner = -(-tiles_m * tiles_n // world)
    terms, sums = (per_owner, tiles_m * tiles_n) if two_shot else (tiles_m * tiles_n, 0)
    terms_offset, sums_offset = workspace.layout(
        [(world * terms, slot_bytes), (sums, slot_bytes)], counters=0 if normed is None else tiles_m
    )
    gemm_all_reduce_kernel[(launch.programs,)](
        x,
        weight,
        bias,
        residual,
        norm_weight,
        out,
        normed,
        m,
        n,
        k,
        *x.stride(),
        *weight.stride(),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        n,
        eps,
        *workspace.arguments,
        terms_offset,
        sums_offset,
        WORLD=world,
        TWO_SHOT=two_shot,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_NORM=norm_weight is not None,
        **launch.options(k),
    )
    return out, normed


def compile_variants(arch: int) -> Iterator[Variant]:
    """Everything that `gemm_all_reduce` may launch on `arch` with W = 8, with all that may follow the sum."""
    for kind, element, launch in launches(arch):
        for two_shot in (False, True):
            yield Variant(
                "gemm_all_reduce",
                f"{kind} {'two' if two_shot else 'one'}-shot {launch.config}",
                arch,
                gemm_all_reduce_kernel,
                compile_arguments(gemm_all_reduce_kernel, element),
                launch.constants()
                | {"WORLD": 8, "TWO_SHOT": two_shot, "EVEN_K": False}
                | {"HAS_BIAS": True, "HAS_RESIDUAL": True, "HAS_NORM": True},
                launch.config.options(),
                odd=frozenset({"rank"}),
                matrix_instruction=kind != "ieee",
            )
