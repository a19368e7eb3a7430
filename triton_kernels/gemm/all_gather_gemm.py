"""y_i = AG(x) @ w_i^T for several weights in one launch, which multiplies arrived shards while the others arrive.

    x_shard [M_r, K], weights [N_i, K] per rank -> y_i [M, N_i] = gathered x @ w_i^T (+ bias_i)

Rank r has rows r*c to (r+1)*c of x, c = ceil(M / W); the last ranks may have fewer, or none. Shards arrive in one of
two ways, the same on all ranks:

    copied   copy engines transfer peers' shards to `gathered` (csrc/copy_engine), while a persistent matmul computes
             the tiles of this rank's own rows and then those of each arrived shard, in the order of arrival
             (`arrivals`). Each byte crosses the link once, no SM moves it, and operands are loaded by TMA if they are
             aligned for it.
    direct   the matmul loads tiles of x from the peers' memory itself (`gather`), its own rows first and then source by
             source. Two launches and one hop, but every column of tiles reads x over the link again: for few rows.

Each program computes its tiles of a shard, for all weights, before it waits for the next shard. The wait is outside of
the loop over tiles, so this loop may be flattened with the one over K: loads are prefetched across tiles, but never
across a wait. Tiles are distributed over programs across shards and weights: the next one fills up the last round of
the one before. Own rows are read from x in place; if x is read directly and not contiguous and aligned, from the copy
that peers read. Threads store the results, not TMA: a tile may end where the rows of the next shard begin.

Direct calls may be captured in a CUDA graph: only device memory holds the call number, and the host waits for nothing.
Copied calls may not, as CUDA does not guarantee that branches of a graph run concurrently.

Source: Chang et al., "FLUX: Fast Software-based Communication Overlap On GPUs Through Kernel Fusion", 2024.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cache_keys import fix_cache_keys
from ..comm import gather
from ..comm.arrivals import Arrivals, next_shard
from ..comm.gather import (
    DONE,
    OP,
    PULLED,
    READY,
    GatherWorkspace,
    KernelLaunch,
    Shards,
    copy_rows,
    fill_nan,
    shard_pointer,
)
from ..comm.signals import current_call, is_last, is_unbroken, signal_all, wait
from ..language import async_fence, zeros
from .tiles import (
    GemmConfig,
    GemmSizes,
    Launch,
    LoadPlan,
    Matrix,
    add_product,
    descriptor,
    is_column_major,
    plan_loads,
    store_result,
    tile_position,
)

# Weights per launch: each has its own loop in the kernel. More weights take several launches.
MAX_WEIGHTS = 3


class Weight(NamedTuple):
    """Output, size N and strides of one weight [N, K] of a launch.

    The bias is not in this tuple because it may be None: Triton 3.6 drops the constants of a tuple that contains None,
    such as a stride of 1.
    """

    y: Any
    n: Any
    strides: Any  # of the weight, (along N, along K)


@triton.jit
def multiply_shard(x, w, weight, bias_ptr, x_row, y_row, rows, K, first_tile, C: tl.constexpr):
    """Multiply `rows` rows of x from x_row on by w^T (+ bias), into y from y_row on: tiles first_tile, + programs, ...

    Return the tile of the next shard or weight with which this program begins.
    """
    tiles_m = tl.cdiv(rows, C.BLOCK_M)
    tiles_n = tl.cdiv(weight.n, C.BLOCK_N)
    num_tiles = tiles_m * tiles_n
    num_programs = tl.num_programs(0)
    y = Matrix(weight.y + tl.cast(y_row, tl.int64) * weight.n, weight.n)
    for tile in tl.range(first_tile, num_tiles, num_programs, flatten=C.FLATTENS_LOOP):
        tile_m, tile_n = tile_position(tile, tiles_m, tiles_n, C.GROUP_M)
        acc = zeros(C.BLOCK_M, C.BLOCK_N)
        sizes = GemmSizes(K, (K, 1), weight.strides)
        acc = add_product(acc, x, w, sizes, tile_m, tile_n, rows, weight.n, x_row, C)
        store_result(y, acc, bias_ptr, tile_m, tile_n, rows, weight.n, C.SPLITS_STORE)
    return first_tile + tl.cdiv(tl.maximum(num_tiles - first_tile, 0), num_programs) * num_programs - num_tiles


@triton.jit
def fill_missing_ranks(ptr, missing_ranks, M, N, rows_per_rank, WORLD: tl.constexpr, KNOWN: tl.constexpr):
    """Store NaN in the rows of [M, N] of ranks whose bits are set in `missing_ranks`; in all rows if not KNOWN.

    Other programs may have seen a shard that this one has not, and store its results: each element is right or NaN.
    """
    if KNOWN:
        for source in tl.range(0, WORLD):
            row = tl.minimum(source * rows_per_rank, M)
            rows = tl.minimum(M - row, rows_per_rank)
            if (missing_ranks >> tl.cast(source, tl.int64)) & 1 != 0:
                fill_nan(ptr + tl.cast(row, tl.int64) * N, tl.cast(rows, tl.int64) * N)
    else:
        fill_nan(ptr, tl.cast(M, tl.int64) * N)


@triton.jit(do_not_specialize=["rank", "rows_per_rank"])
def all_gather_gemm_kernel(
    x_own, x, w0, w1, w2, b0, b1, b2, weights, gathered_ptr,
    M, K, rows_per_rank,
    ws, arrivals, rank, WORLD: tl.constexpr,
    DIRECT: tl.constexpr, IS_LAST_LAUNCH: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Multiply this rank's rows, and then each arriving shard, by up to MAX_WEIGHTS weights.

    x_own [rows of this rank, K] and x [M, K] are contiguous. If DIRECT, x is None, else ws is None. With TMA x_own, x
    and the weights w0, ... are descriptors, else pointers. weights[i] is the `Weight` of w{i}, b{i} its bias or None.
    """
    operands, biases = (w0, w1, w2), (b0, b1, b2)
    ELEMENT: tl.constexpr = weights[0].y.dtype.element_ty
    WEIGHTS: tl.constexpr = len(weights)
    first_tile = tl.program_id(0)
    own_row = tl.minimum(rank * rows_per_rank, M)
    own_rows = tl.minimum(M - own_row, rows_per_rank)
    if C.TMA:
        # A descriptor cannot be chosen while the kernel runs, so the tiles of x_own have a loop of their own.
        for i in tl.static_range(WEIGHTS):
            first_tile = multiply_shard(
                x_own, operands[i], weights[i], biases[i], 0, own_row, own_rows, K, first_tile, C
            )

    one_i64 = tl.cast(1, tl.int64)
    taken_ranks = one_i64 << tl.cast(rank, tl.int64)  # bit s: rank s's rows have been multiplied, or are being
    missing_ranks = one_i64 - 1  # bit s: rank s's shard did not arrive; if copied, any bit: some shard did not
    position = 1 if C.TMA else 0
    if WORLD > 1 or not C.TMA:  # Triton 3.6 fails on a loop that never runs
        while position < WORLD:  # not a range: Triton flattens the outermost of nested `for`s only
            # `source` is computed again for each shard, so that it takes no registers while tiles are multiplied.
            source = rank
            has_arrived = position == 0
            if position > 0:
                if DIRECT:
                    source = (rank + position) % WORLD
                    has_arrived = wait(current_call(ws, rank), READY * WORLD + source, source, -1, WORLD, OP)
                else:
                    source = next_shard(arrivals, position - 1, taken_ranks, rank, WORLD)
                    has_arrived = source >= 0
                    source = tl.maximum(source, 0)
                    taken_ranks |= one_i64 << tl.cast(source, tl.int64)
            if C.TMA:
                async_fence()
            row = tl.minimum(source * rows_per_rank, M)
            rows = tl.minimum(M - row, rows_per_rank)
            wide_row = tl.cast(row, tl.int64)
            rows = tl.where(has_arrived, rows, 0)
            missing_ranks |= tl.where(has_arrived, 0, one_i64 << tl.cast(source, tl.int64))
            if not DIRECT:  # stop at the first shard that is late: each further wait could last as long
                position = tl.where(has_arrived, position, WORLD)
            if C.TMA:
                x_rows = x
                x_row = row
            else:
                x_row = 0
                x_rows = shard_pointer(current_call(ws, rank), source, ELEMENT, WORLD) if DIRECT else x + wide_row * K
                x_rows = tl.where(position == 0, x_own, x_rows)
            if DIRECT and gathered_ptr is not None:
                copy_rows(x_rows, (K, 1), gathered_ptr + wide_row * K, rows, K, True)
            for i in tl.static_range(WEIGHTS):
                first_tile = multiply_shard(
                    x_rows, operands[i], weights[i], biases[i], x_row, row, rows, K, first_tile, C
                )
            position += 1
        # NaN is stored after all tiles, because earlier it would take registers from the tiles.
        if missing_ranks != 0:
            for i in tl.static_range(WEIGHTS):
                fill_missing_ranks(weights[i].y, missing_ranks, M, weights[i].n, rows_per_rank, WORLD, DIRECT)
            if DIRECT and gathered_ptr is not None:
                fill_missing_ranks(gathered_ptr, missing_ranks, M, K, rows_per_rank, WORLD, DIRECT)
    if DIRECT and IS_LAST_LAUNCH:
        call = current_call(ws, rank)
        if is_last(call, DONE, tl.num_programs(0)):
            signal_all(call, rank + PULLED * WORLD, is_unbroken(call), WORLD)


def all_gather_gemm(
    x_shard: Tensor,
    weights: Sequence[Tensor],
    *,
    workspace: GatherWorkspace,
    launch: Launch,
    rows: int,
    rows_per_rank: int | None = None,
    biases: Sequence[Tensor | None] | None = None,
    return_gathered: bool = False,
) -> tuple[list[Tensor], Tensor | None]:
    """Return ([y_i [M, N_i]], gathered x [M, K] or None): y_i = gathered x @ weights[i]^T (+ biases[i]), read directly.

    Args:
        x_shard: [M_r, K] bf16, fp16 or fp32, K the same on all ranks; any strides.
        weights: [N_i, K] of that dtype; any strides. Their number and N_i may differ between ranks; may be empty if
            `return_gathered` is True.
        workspace: of this group and stream, of at least `workspace_bytes(...)` bytes.
        launch: tiles and programs of this rank; see `launch_for`.
        rows: M, number of rows over all ranks.
        rows_per_rank: rows of x per rank (the last ranks may have fewer), equal on all ranks; None: ceil(M / W).
        biases: [N_i] each, or None.
        return_gathered: True to return gathered x too.

    Raises:
        ValueError: the workspace is too small. No kernel has been launched then.
    """
    biases = [None] * len(weights) if biases is None else list(biases)
    per_rank = -(-rows // workspace.world_size) if rows_per_rank is None else rows_per_rank
    shards = Shards(rows, per_rank, x_shard.shape[1])
    workspace.require_bytes(workspace_bytes(per_rank, shards.k, x_shard.dtype, workspace.world_size))
    ys = [x_shard.new_empty(rows, weight.shape[0]) for weight in weights]
    gathered_out = x_shard.new_empty(rows, shards.k) if return_gathered else None
    if rows == 0:
        return ys, gathered_out

    # A single rank has no peer that would read a staged shard.
    reads_in_place = workspace.world_size == 1 and is_read_in_place(x_shard) and not return_gathered
    stage = gather.stage_launch(x_shard[:0] if reads_in_place else x_shard, workspace, launch.programs)
    x_own = x_shard
    if not is_read_in_place(x_shard):
        x_own = workspace.region(workspace.rank, x_shard.shape[0], shards.k, x_shard.dtype)
    # A call without weights still launches the kernel, which gathers x and sets the flags PULLED that peers wait for.
    weight_groups = _launch_groups(weights, ys, biases) or [
        [(x_shard.new_empty(0, shards.k), x_shard.new_empty(rows, 0), None)]
    ]
    peers = Peers(workspace.rank, workspace.world_size, workspace.arguments())
    matmuls = [
        matmul_launch(
            x_own, weight_group, gathered_out if index == 0 else None, shards, peers, launch, is_direct=True,
            is_last_launch=index == len(weight_groups) - 1,
        )
        for index, weight_group in enumerate(weight_groups)
    ]  # fmt: skip
    if x_shard.is_cuda:
        key = _variant_key(x_shard, weights, biases, shards, launch, return_gathered, workspace.timeout_ns)
        if key not in workspace.loaded_keys:
            for kernel in (stage, *matmuls):
                gather.load_kernel(kernel)
            workspace.loaded_keys.add(key)
    for kernel in (stage, *matmuls):
        gather.run_kernel(kernel)
    return ys, gathered_out


def multiply_arriving_shards(
    x_own: Tensor,
    gathered: Tensor,
    weights: Sequence[Tensor],
    *,
    start_gather: Callable[[], Arrivals],
    rank: int,
    world_size: int,
    launch: Launch,
    rows_per_rank: int,
    timeout_ns: int,
    loaded_keys: set[Any],
    biases: Sequence[Tensor | None] | None = None,
) -> list[Tensor]:
    """Return [y_i [M, N_i]]: y_i = gathered x @ weights[i]^T (+ biases[i]), for shards that arrive while it multiplies.

    Args:
        x_own: [M_r, K], this rank's rows, contiguous.
        gathered: [M, K], where the peers' shards arrive; this rank's rows in it are not read.
        weights: [N_i, K]; any strides.
        start_gather: starts the gather and returns the words that signal arrivals. It is called once the kernels are
            loaded: loading may wait for running kernels, while peers wait for this rank.
        rank, world_size: of the group. `launch` and `rows_per_rank` (c) are equal on all its ranks.
        timeout_ns: longest wait of the kernel for its own rank's copies.
        loaded_keys: keys of calls whose kernels are on the device; kept by the caller for all calls.
        biases: [N_i] each, or None.
    """
    biases = [None] * len(weights) if biases is None else list(biases)
    rows, k = gathered.shape
    shards = Shards(rows, rows_per_rank, k)
    ys = [x_own.new_empty(rows, weight.shape[0]) for weight in weights]
    weight_groups = _launch_groups(weights, ys, biases)

    def make_launches(arrivals: Arrivals) -> list[KernelLaunch]:
        peers = Peers(rank, world_size, {"arrivals": arrivals, "rank": rank})
        return [
            matmul_launch(x_own, weight_group, gathered, shards, peers, launch, is_direct=False)
            for weight_group in weight_groups
        ]

    if x_own.is_cuda:
        key = _variant_key(x_own, weights, biases, shards, launch, world_size, timeout_ns)
        if key not in loaded_keys:
            for kernel in make_launches(no_arrivals(world_size, timeout_ns, x_own.device)):
                gather.load_kernel(kernel)
            loaded_keys.add(key)
    for kernel in make_launches(start_gather()):
        gather.run_kernel(kernel)
    return ys


def no_arrivals(world_size: int, timeout_ns: int, device: torch.device) -> Arrivals:
    """Return the words of a gather to which no shard arrives: to load kernels, and for a group of one rank."""
    words = torch.zeros(2, world_size + world_size % 2, dtype=torch.int64, device=device)
    return Arrivals(words[0], words[1], words[0], timeout_ns)


class Peers(NamedTuple):
    """The ranks of a launch, and the kernel arguments to reach them: `rank`, with `ws` or `arrivals`."""

    rank: int
    world_size: int
    arguments: dict[str, Any]


def _launch_groups(
    weights: Sequence[Tensor], ys: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> list[list[tuple[Tensor, Tensor, Tensor | None]]]:
    """Return (weight, result, bias) of the weights of each launch, without those whose result is empty."""
    nonempty_results = [(w, y, b) for w, y, b in zip(weights, ys, biases, strict=True) if y.numel()]
    return [nonempty_results[i : i + MAX_WEIGHTS] for i in range(0, len(nonempty_results), MAX_WEIGHTS)]


def workspace_bytes(rows_per_rank: int, k: int, dtype: torch.dtype, world_size: int) -> int:
    """Return the bytes of the smallest `GatherWorkspace` for shards of up to [rows_per_rank, k]; equal on all ranks."""
    return gather.region_offset(world_size) + rows_per_rank * k * dtype.itemsize


def matmul_launch(
    x_own: Tensor,
    weight_group: Sequence[tuple[Tensor, Tensor, Tensor | None]],
    gathered_out: Tensor | None,
    shards: Shards,
    peers: Peers,
    launch: Launch,
    is_direct: bool,
    *,
    is_last_launch: bool = True,
) -> KernelLaunch:
    """Return the launch that multiplies by up to MAX_WEIGHTS weights, each with its result and bias.

    With a single rank the kernel waits for nothing; benchmarks use it as the baseline.
    """
    weights = [weight for weight, _, _ in weight_group]
    if is_direct:
        plan = LoadPlan(launch.config, False, False, is_column_major(weights[0]))
    else:
        assert gathered_out is not None
        if not x_own.shape[0]:
            x_own = gathered_out  # no tile of it will be loaded
        plan = plan_loads([(x, weight) for x in (x_own, gathered_out) for weight in weights], launch)
    if not plan.uses_tma:
        plan = plan._replace(config=pointer_config(plan.config))
    config = plan.config
    operands = {"x_own": x_own, "x": None if is_direct else gathered_out}
    operands |= {f"w{i}": weights[i] if i < len(weights) else None for i in range(MAX_WEIGHTS)}
    arguments: dict[str, Any] = dict(operands)
    if plan.uses_tma:
        for name, t in operands.items():
            block_shape = (config.block_n if name.startswith("w") else config.block_m, config.block_k)
            arguments[name] = None if t is None else descriptor(t, block_shape)
    arguments |= {f"b{i}": weight_group[i][2] if i < len(weight_group) else None for i in range(MAX_WEIGHTS)}
    arguments |= {
        "weights": tuple(Weight(y, weight.shape[0], weight.stride()) for weight, y, _ in weight_group),
        "gathered_ptr": gathered_out if is_direct else None,
        "M": shards.rows,
        "K": shards.k,
        "rows_per_rank": shards.rows_per_rank,
        "ws": None,
        "arrivals": None,
        "WORLD": peers.world_size,
        "DIRECT": is_direct,
        "IS_LAST_LAUNCH": is_last_launch,
        # Flattened loops of several weights at 128x128 keep so many registers across loops that they spill.
        "C": plan.constants(
            launch.precision,
            even_k=shards.k % config.block_k == 0,
            flatten=len(weights) == 1 or config.block_n > 128,
        ),
    }
    arguments |= peers.arguments
    tiles_m = sum(-(-shards.rank_rows(rank)[1] // config.block_m) for rank in range(peers.world_size))
    tiles = tiles_m * sum(-(-weight.shape[0] // config.block_n) for weight in weights)
    programs = launch.programs if is_direct and gathered_out is not None else min(launch.programs, max(1, tiles))
    return all_gather_gemm_kernel, (programs,), arguments | config.options()


def is_read_in_place(x_shard: Tensor) -> bool:
    """True if the matmul reads own rows from x in place, not from the copy that peers read."""
    return x_shard.is_contiguous() and x_shard.data_ptr() % 16 == 0


def pointer_config(config: GemmConfig) -> GemmConfig:
    """Return `config` with tiles that leave registers for operands loaded by pointers: 128x256 would spill.

    Tiles may differ between ranks here, since a flag covers a whole shard.
    """
    if config.block_m * config.block_n <= 128 * 128:
        return config
    return dataclasses.replace(config, block_n=config.block_n // 2)


def _variant_key(
    x_shard: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    shards: Shards,
    *rest: Any,
) -> tuple[Any, ...]:
    """Return the key of a call: calls with equal keys run the same compiled kernels.

    Triton specializes for 1 and for multiples of 16.
    """
    tensors = [x_shard, *weights, *(bias for bias in biases if bias is not None)]
    layouts = tuple(
        (tuple((size == 1, size % 16) for size in (*t.shape, *t.stride())), t.data_ptr() % 16) for t in tensors
    )
    rows = tuple((size == 0, size == 1, size % 16) for size in (shards.rows, shards.rows_per_rank, x_shard.shape[0]))
    return x_shard.dtype, shards.k, rows, layouts, tuple(bias is None for bias in biases), *rest


fix_cache_keys(__name__)
