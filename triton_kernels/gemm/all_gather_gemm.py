"""y_i = AG(x) @ w_i^T, in one launch for several weights, which multiplies what is there while the rest is on its way.

    x_shard [M_r, K], weights [N_i, K] per rank -> y_i [M, N_i] = gathered x @ w_i^T (+ bias_i)

Rank r has rows r*c to (r+1)*c of x, c = ceil(M / W); the last ranks may have fewer, or none. How shards come is the
choice of each rank alone (module `gather` has the protocol, which is the same for both):

    copied   the copy engine pulls peers' shards into `gathered` on side streams, while a persistent matmul takes tiles
             of this rank's own rows and then those of each shard that has arrived, in the order of arrival. Each byte
             crosses the link once, no SM moves it, and operands come by TMA where they are aligned for it.
    direct   the matmul loads tiles of x from the peers' memory itself, its own rows first and then source by source.
             Two launches and one hop, but every column of tiles reads x over the link again: for few rows.

All tiles of a shard, of all weights, are taken before the next shard is waited for, once by each program. The wait is
outside of the loop over tiles, so this loop may be flattened with the one over K: loads run ahead across tiles, but
never across a wait. Programs count on from shard to shard and from weight to weight, so that the last round of one is
filled up by the next. Own rows are read where x lies, or, if they are not in one piece, from the copy that peers read.
Results are stored by threads, not by TMA: a tile may end where the rows of the next shard begin.

Nothing here depends on the number of the call but in device memory, and the host waits for nothing, so calls may be
captured in a CUDA graph. A captured one copies first, then multiplies: CUDA does not promise that branches of a graph
run at once, nor does it with CUDA_LAUNCH_BLOCKING=1.

Source: Chang et al., "FLUX: Fast Software-based Communication Overlap On GPUs Through Kernel Fusion", 2024.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..comm import gather, ptx
from ..comm.gather import (
    ARRIVED,
    DONE,
    OP,
    ORDER,
    PULLED,
    READY,
    GatherWorkspace,
    LaunchOf,
    Puller,
    Shards,
    copy_rows,
    fill_nan,
    region_at,
)
from ..comm.signals import flag_at, is_last, join, put_all, unbroken, wait
from ..device import sms_of
from ..language import zeros
from .configs import GemmConfig
from .launch import Launch, LoadPlan, descriptor, is_swapped, plan_loads
from .tiles import Matrix, Sizes, add_product, store_result, tile_at

# Weights of one launch: each takes a loop of its own in the kernel. More are launched after one another.
MAX_WEIGHTS = 3


class Weight(NamedTuple):
    """What belongs to one weight of a launch, but for the weight itself."""

    y: Any
    bias: Any
    n: Any
    strides: Any  # of the weight, (along N, along K)


@triton.jit
def multiply_shard(x, w, weight, x_row, y_row, rows, K, first, C: tl.constexpr):
    """Rows y_row.. of y = `rows` rows of x from x_row on @ w^T (+ bias): tiles first, first + programs, ...

    Returns which tile of the next shard or weight this program begins with.
    """
    tiles_m = tl.cdiv(rows, C.BLOCK_M)
    tiles_n = tl.cdiv(weight.n, C.BLOCK_N)
    tiles = tiles_m * tiles_n
    programs = tl.num_programs(0)
    y = Matrix(weight.y + tl.cast(y_row, tl.int64) * weight.n, weight.n)
    for tile in tl.range(first, tiles, programs, flatten=C.FLATTEN):
        tile_m, tile_n = tile_at(tile, tiles_m, tiles_n, C.GROUP_M)
        total = zeros(C.BLOCK_M, C.BLOCK_N)
        sizes = Sizes(K, (K, 1), weight.strides)
        total = add_product(total, x, w, sizes, tile_m, tile_n, rows, weight.n, x_row, C)
        store_result(y, total, weight.bias, tile_m, tile_n, rows, weight.n, C.SPLIT_STORE)
    return first + tl.cdiv(tl.maximum(tiles - first, 0), programs) * programs - tiles


@triton.jit
def fill_missing(ptr, missing, M, N, rows_per_rank, WORLD: tl.constexpr, KNOWN: tl.constexpr):
    """NaN in the rows of [M, N] that belong to ranks whose bits are set in `missing`; if not KNOWN, in all rows.

    Other programs may have seen a shard come that this one has not, and store results: each is right, or NaN.
    """
    if KNOWN:
        for source in tl.range(0, WORLD):
            row = tl.minimum(source * rows_per_rank, M)
            rows = tl.minimum(M - row, rows_per_rank)
            if (missing >> tl.cast(source, tl.int64)) & 1 != 0:
                fill_nan(ptr + tl.cast(row, tl.int64) * N, tl.cast(rows, tl.int64) * N)
    else:
        fill_nan(ptr, tl.cast(M, tl.int64) * N)


@triton.jit(do_not_specialize=["rank", "rows_per_rank"])
def all_gather_gemm_kernel(
    x_own, x, w0, w1, w2, weights, gathered_ptr,
    M, K, rows_per_rank,
    ws, rank, WORLD: tl.constexpr,
    DIRECT: tl.constexpr, LAST: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """x_own [rows of this rank, K] and x [M, K] are in one piece each; DIRECT has no x.

    With TMA they and the weights w0, ... are descriptors, else pointers. weights[i] is the `Weight` of w{i}.
    """
    operands = (w0, w1, w2)
    ELEMENT: tl.constexpr = weights[0].y.dtype.element_ty
    WEIGHTS: tl.constexpr = len(weights)
    first = tl.program_id(0)
    own_row = tl.minimum(rank * rows_per_rank, M)
    own_rows = tl.minimum(M - own_row, rows_per_rank)
    if C.TMA:
        # A descriptor cannot be chosen while the kernel runs, so these tiles have a loop of their own.
        for i in tl.static_range(WEIGHTS):
            first = multiply_shard(x_own, operands[i], weights[i], 0, own_row, own_rows, K, first, C)

    one = tl.cast(1, tl.int64 if DIRECT else tl.int32)
    missing = one - 1  # bit s: rank s's shard did not come; copied: which is not known, only that one did not
    position = 1 if C.TMA else 0
    if WORLD > 1 or not C.TMA:  # Triton 3.6 fails on a loop that cannot begin
        while position < WORLD:  # not a range: Triton flattens the outermost of nested `for`s only
            # Anew for each shard, so that nothing of it takes registers while tiles are multiplied.
            call = join(ws, rank)
            source = rank
            arrived = position == 0
            if position > 0:
                if DIRECT:
                    source = (rank + position) % WORLD
                    arrived = wait(call, READY * WORLD + source, source, -1, WORLD, OP)
                else:
                    # A shard that did not come is there too, as NaN; what this rank waits for is its own copy.
                    arrived = wait(call, ARRIVED * WORLD + position - 1, rank, position, WORLD, OP)
                    source = tl.load(flag_at(call, rank, ORDER * WORLD + position - 1)).to(tl.int32)
            if C.TMA:
                ptx.async_fence()
            row = tl.minimum(source * rows_per_rank, M)
            rows = tl.minimum(M - row, rows_per_rank)
            wide_row = tl.cast(row, tl.int64)
            rows = tl.where(arrived, rows, 0)
            missing |= tl.where(arrived, 0, (one << tl.cast(source, tl.int64)) if DIRECT else one)
            if C.TMA:
                x_rows = x
                x_row = row
            else:
                x_row = 0
                x_rows = region_at(call, source, ELEMENT, WORLD) if DIRECT else x + wide_row * K
                x_rows = tl.where(position == 0, x_own, x_rows)
            if DIRECT and gathered_ptr is not None:
                copy_rows(x_rows, (K, 1), gathered_ptr + wide_row * K, rows, K, True)
            for i in tl.static_range(WEIGHTS):
                first = multiply_shard(x_rows, operands[i], weights[i], x_row, row, rows, K, first, C)
            position += 1
        # Behind the tiles, so that nothing of it takes registers there.
        if missing != 0:
            for i in tl.static_range(WEIGHTS):
                fill_missing(weights[i].y, missing, M, weights[i].n, rows_per_rank, WORLD, DIRECT)
            if DIRECT and gathered_ptr is not None:
                fill_missing(gathered_ptr, missing, M, K, rows_per_rank, WORLD, DIRECT)
    if DIRECT and LAST:
        call = join(ws, rank)
        if is_last(call, DONE, tl.num_programs(0)):
            put_all(call, rank + PULLED * WORLD, unbroken(call), WORLD)


def all_gather_gemm(
    x_shard: Tensor,
    weights: Sequence[Tensor],
    *,
    workspace: GatherWorkspace,
    launch: Launch,
    rows: int,
    rows_per_rank: int | None = None,
    biases: Sequence[Tensor | None] | None = None,
    gathered: bool = False,
    direct: bool = False,
) -> tuple[list[Tensor], Tensor | None]:
    """([y_i [M, N_i]], gathered x [M, K] or None): y_i = gathered x @ weights[i]^T (+ biases[i]).

    Args:
        x_shard: [M_r, K] bf16, fp16 or fp32, K the same on all ranks; any strides.
        weights: [N_i, K] of that dtype; any strides. How many, and N_i, may differ between ranks. None: only a gather,
            of which then `gathered` must be wanted.
        workspace: of this group and stream, of at least `workspace_bytes(...)` bytes.
        launch: tiles and programs of this rank; see `launch_for`. On a GPU and not `direct` it must leave at least one
            SM free (`sm_margin`), for the kernels between the copies.
        rows: M, over all ranks.
        rows_per_rank: c, where it is not ceil(M / W).
        biases: [N_i] each, or None.
        gathered: whether to return gathered x too.
        direct: whether tiles are loaded from the peers' memory, see the module.

    Raises:
        ValueError: the workspace is too small, or no SM is left free. Nothing has run then.
    """
    biases = [None] * len(weights) if biases is None else list(biases)
    per_rank = -(-rows // workspace.world_size) if rows_per_rank is None else rows_per_rank
    shards = Shards(rows, per_rank, x_shard.shape[1])
    workspace.require(workspace_bytes(per_rank, shards.k, x_shard.dtype, workspace.world_size))
    ys = [x_shard.new_empty(rows, weight.shape[0]) for weight in weights]
    used = [(w, y, b) for w, y, b in zip(weights, ys, biases, strict=True) if y.numel()]
    direct = direct and bool(used)
    kept = x_shard.new_empty(rows, shards.k) if gathered or not direct else None
    if rows == 0:
        return ys, kept if gathered else None
    if x_shard.is_cuda and not direct and workspace.world_size > 1:
        at_once = sms_of(x_shard.device) * launch.config.programs_per_sm
        if launch.programs > at_once - launch.config.programs_per_sm:
            raise ValueError(
                f"launch has {launch.programs} programs and the GPU runs {at_once} at once; leave at least one SM free "
                "(sm_margin=1), where the kernels between the copies run."
            )

    # No peer reads what one rank would stage.
    read_in_place = workspace.world_size == 1 and _is_read_in_place(x_shard) and not gathered
    stage = gather.stage_launch(x_shard[:0] if read_in_place else x_shard, workspace, launch.programs)
    groups = [used[i : i + MAX_WEIGHTS] for i in range(0, len(used), MAX_WEIGHTS)]
    matmuls = [
        matmul_launch(
            x_shard, group, kept if not direct or index == 0 else None, shards, workspace, launch, direct,
            last=index == len(groups) - 1,
        )
        for index, group in enumerate(groups)
    ]  # fmt: skip
    puller = None
    if not direct:
        assert kept is not None
        puller = Puller(kept, gathered, shards, workspace)
    if x_shard.is_cuda:
        key = _key(x_shard, weights, biases, shards, launch, gathered, direct, workspace.timeout_ns)
        if key not in workspace.loaded:
            for kernel in (stage, *matmuls, *([puller.relay_launch(None, None)] if puller else [])):
                gather.load(kernel)
            workspace.loaded.add(key)

    gather.run(stage)
    staged, at_once = (gather.staged_on(x_shard), gather.runs_at_once(x_shard)) if puller else (None, False)
    if puller and not at_once:
        puller.pull(staged)
    for matmul in matmuls:
        gather.run(matmul)
    if puller and at_once:
        # Behind the matmul, which has enough to begin with, so that the host's time for all of this is hidden by it.
        puller.pull(staged)
    return ys, kept if gathered else None


def workspace_bytes(rows_per_rank: int, k: int, dtype: torch.dtype, world_size: int) -> int:
    """Bytes of the smallest `GatherWorkspace` for shards of at most [rows_per_rank, k]; the same on all ranks."""
    return gather.region_offset(world_size) + rows_per_rank * k * dtype.itemsize


def matmul_launch(
    x_shard: Tensor,
    used: Sequence[tuple[Tensor, Tensor, Tensor | None]],
    kept: Tensor | None,
    shards: Shards,
    workspace: GatherWorkspace,
    launch: Launch,
    direct: bool,
    *,
    last: bool = True,
) -> LaunchOf:
    """The matmul of up to MAX_WEIGHTS weights, each with its result and bias.

    Alone, on a workspace of one rank, it waits for nothing: what the benchmarks compare with.
    """
    weights = [weight for weight, _, _ in used]
    x_own = x_shard
    if not _is_read_in_place(x_shard):
        x_own = workspace.region(workspace.rank, x_shard.shape[0], shards.k, x_shard.dtype)
    if direct:
        plan = LoadPlan(launch.config, False, False, is_swapped(weights[0]))
    else:
        assert kept is not None
        if not x_own.shape[0]:
            x_own = kept  # no tile of it will be loaded
        plan = plan_loads([(x, weight) for x in (x_own, kept) for weight in weights], launch)
    if not plan.tma:
        plan = plan._replace(config=by_pointers(plan.config))
    config = plan.config
    operands = {"x_own": x_own, "x": None if direct else kept}
    operands |= {f"w{i}": weights[i] if i < len(weights) else None for i in range(MAX_WEIGHTS)}
    arguments: dict[str, Any] = dict(operands)
    if plan.tma:
        for name, t in operands.items():
            block = (config.block_n if name.startswith("w") else config.block_m, config.block_k)
            arguments[name] = None if t is None else descriptor(t, block)
    arguments |= {
        "weights": tuple(Weight(y, bias, weight.shape[0], weight.stride()) for weight, y, bias in used),
        "gathered_ptr": kept if direct else None,
        "M": shards.rows,
        "K": shards.k,
        "rows_per_rank": shards.rows_per_rank,
        "WORLD": workspace.world_size,
        "DIRECT": direct,
        "LAST": last,
        # Flattened loops of several weights at 128x128 hold so much from loop to loop that they spill.
        "C": plan.constants(
            launch.precision,
            even_k=shards.k % config.block_k == 0,
            flatten=len(weights) == 1 or config.block_n > 128,
        ),
    }
    # Relays wait for peers and say so when they give up; this deadline only bounds the wait.
    arguments |= workspace.arguments(workspace.timeout_ns * (1 if direct else 2))
    tiles_m = sum(-(-shards.range(rank)[1] // config.block_m) for rank in range(workspace.world_size))
    tiles = tiles_m * sum(-(-weight.shape[0] // config.block_n) for weight in weights)
    return all_gather_gemm_kernel, (min(launch.programs, tiles),), arguments | config.options()


def _is_read_in_place(x_shard: Tensor) -> bool:
    """Whether the matmul takes own rows where x lies, and not from the copy that peers read."""
    return x_shard.is_contiguous() and x_shard.data_ptr() % 16 == 0


def by_pointers(config: GemmConfig) -> GemmConfig:
    """`config` with tiles that leave registers for operands that come by pointers: 128x256 would spill.

    Tiles may differ between ranks here, since flags are those of whole shards.
    """
    if config.block_m * config.block_n <= 128 * 128:
        return config
    return dataclasses.replace(config, block_n=config.block_n // 2)


def _key(
    x_shard: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    shards: Shards,
    *rest: Any,
) -> tuple[Any, ...]:
    """Launches of the same key run the same compiled kernels: Triton compiles for 1, multiples of 16, and others."""
    tensors = [x_shard, *weights, *(bias for bias in biases if bias is not None)]
    layouts = tuple(
        (tuple((size == 1, size % 16) for size in (*t.shape, *t.stride())), t.data_ptr() % 16) for t in tensors
    )
    rows = tuple((size == 0, size == 1, size % 16) for size in (shards.rows, shards.rows_per_rank, x_shard.shape[0]))
    return x_shard.dtype, shards.k, rows, layouts, tuple(bias is None for bias in biases), *rest
