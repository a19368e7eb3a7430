"""Matmuls with their collective, weights [4096, 4096] before sharding, x with M rows; and the all-reduce alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from fused_tp.core.pending import all_gather_single, reduce_scatter_single

from . import rivals_deepspeed
from .case import (
    DTYPES,
    FUSED_TP,
    TIME_RATIO,
    BenchCase,
    Contestant,
    Maker,
    Makers,
    Rival,
    Unavailable,
    checked_contestant,
)
from .ranks import RankContext

if TYPE_CHECKING:  # importing shm needs the native core
    from fused_tp.backends.shared_memory.shm import ShmTransport

FEATURES = 4096
ALL_REDUCE_BYTES = tuple(1024 * 4**i for i in range(9))  # 1 KiB to 64 MiB

FEW_ROWS = 16  # up to this many rows, reading a weight takes far longer than multiplying by it
LARGEST_GAINS = (("bf16", 1), ("fp32", 16))  # cases that gain most by reading a weight once
WEIGHT_COPIES = 4  # number of weights used in turn with few rows: more than caches hold
TORCH_MATMUL = "matmul alone"
# In fp32 and with few rows fused_tp calls another matmul library than torch (see fused_tp.backends.gemm). Contestants
# with FUSED_TP_MATMUL use it, too, which separates that gain from the gain by overlapping.
FUSED_TP_MATMUL = "fused_tp's matmul alone"
GLOO = "matmul + gloo"
DEEPSPEED = "matmul + DeepSpeed"
FUSED_TP_MATMUL_DEEPSPEED = "fused_tp's matmul + DeepSpeed"


def cases() -> list[BenchCase]:
    """All cases of this file, in the order of the table."""
    all_cases = []
    for dtype in ("bf16", "fp32"):
        for rows in (1, 16, 128, 512, 1024):
            is_large = rows >= 128
            rivals = {
                TORCH_MATMUL: Rival(TIME_RATIO, aim=1.05 if is_large else None),
                GLOO: Rival(TIME_RATIO, bar=0.75 if is_large and dtype == "bf16" else None),
                DEEPSPEED: Rival(
                    TIME_RATIO, bar=0.97 if is_large else 0.85 if (dtype, rows) in LARGEST_GAINS else 0.95
                ),
                FUSED_TP_MATMUL: Rival(TIME_RATIO),
                FUSED_TP_MATMUL_DEEPSPEED: Rival(TIME_RATIO),
            }
            all_cases.append(_matmul_case("matmul_all_reduce", dtype, rows, rivals))
    for op, bar, aim in (("all_gather_matmul", 1.06, 1.02), ("matmul_reduce_scatter", 1.08, 1.03)):
        rivals = {
            TORCH_MATMUL: Rival(TIME_RATIO, bar, aim),
            GLOO: Rival(TIME_RATIO),
            FUSED_TP_MATMUL: Rival(TIME_RATIO),
        }
        all_cases += [_matmul_case(op, dtype, rows, rivals) for dtype in ("bf16", "fp32") for rows in (512, 1024)]
    rivals = {"DeepSpeed": Rival(TIME_RATIO, bar=1.1), "gloo": Rival(TIME_RATIO)}
    for nbytes in ALL_REDUCE_BYTES:
        size = f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
        all_cases.append(
            BenchCase(f"all_reduce/bf16/{size}", all_reduce_makers, {"nbytes": nbytes}, rivals, seconds=4.0)
        )
    return all_cases


def _matmul_case(op: str, dtype: str, rows: int, rivals: dict[str, Rival]) -> BenchCase:
    seconds = 4.0 if rows <= FEW_ROWS else 8.0
    return BenchCase(f"{op}/{dtype}/M={rows}", matmul_makers, {"op": op, "dtype": dtype, "rows": rows}, rivals, seconds)


def matmul_makers(context: RankContext, op: str, dtype: str, rows: int, features: int = FEATURES) -> Makers:
    """Makers for one op.

    all_gather_matmul: x_shard_m [M/W, K], weight [N/W, K] -> [M, N/W].
    matmul_reduce_scatter: x [M, K/W], weight [N, K/W] -> [M/W, N].
    matmul_all_reduce: x [M, K/W], weight [N, K/W] -> [M, N].
    """
    x, weight = make_operands(context, op, dtype, rows, features)
    world_size, full_x = context.world_size, x
    weights = cycle([weight.clone() for _ in range(WEIGHT_COPIES)] if rows <= FEW_ROWS else [weight])
    if op == "all_gather_matmul":
        shards = [torch.empty_like(x) for _ in range(world_size)]
        dist.all_gather(shards, x)
        full_x = torch.cat(shards)
    expected = F.linear(full_x.double(), weight.double())
    if op != "all_gather_matmul":
        dist.all_reduce(expected)
    if op == "matmul_reduce_scatter":
        expected = expected.chunk(world_size)[context.rank]

    def fused_tp_contestant() -> Contestant:
        import fused_tp
        from fused_tp.backends.registry import describe_selection
        from fused_tp.core.dispatch import ScheduleKey
        from fused_tp.core.group import resolve_group

        k, n = (features, None) if op == "all_gather_matmul" else (None, features)
        key = ScheduleKey(op, x.dtype, x.device, rows, k, n)
        decision = describe_selection(key, resolve_group(None))  # recorded, because the time depends on the schedule
        op_function = getattr(fused_tp, op)
        note = f"{decision.schedule} over {decision.transport}"
        return checked_contestant(lambda: op_function(x, next(weights), group=None), expected, note)

    def run_gloo() -> Tensor:
        if op == "all_gather_matmul":
            gathered = x.new_empty(x.shape[0] * world_size, x.shape[1])
            all_gather_single(gathered, x)
            return F.linear(gathered, next(weights))
        partial = F.linear(x, next(weights))
        if op == "matmul_all_reduce":
            dist.all_reduce(partial)
            return partial
        y_shard_m = torch.empty(partial.shape[0] // world_size, partial.shape[1], dtype=partial.dtype)
        reduce_scatter_single(y_shard_m, partial)
        return y_shard_m

    def fused_tp_linear() -> Callable[[Tensor, Tensor], Tensor]:
        from fused_tp.backends.gemm import linear

        return linear

    def matmul_contestant(linear: Callable[[Tensor, Tensor], Tensor]) -> Contestant:
        return Contestant(lambda: linear(full_x, next(weights)))

    def deepspeed_contestant(linear: Callable[[Tensor, Tensor], Tensor]) -> Contestant:
        rivals_deepspeed.load_extension(context)
        return checked_contestant(lambda: rivals_deepspeed.all_reduce_(linear(x, next(weights))), expected)

    makers: dict[str, Maker] = {
        FUSED_TP: fused_tp_contestant,
        TORCH_MATMUL: lambda: matmul_contestant(F.linear),
        GLOO: lambda: checked_contestant(run_gloo, expected),
    }
    if op == "matmul_all_reduce":
        makers[DEEPSPEED] = lambda: deepspeed_contestant(F.linear)
    if dtype == "fp32" or rows <= FEW_ROWS:
        makers[FUSED_TP_MATMUL] = lambda: matmul_contestant(fused_tp_linear())
        if op == "matmul_all_reduce":
            makers[FUSED_TP_MATMUL_DEEPSPEED] = lambda: deepspeed_contestant(fused_tp_linear())
    return makers


def make_operands(context: RankContext, op: str, dtype: str, rows: int, features: int) -> tuple[Tensor, Tensor]:
    """Create x and weight of this rank, for `rows` rows and [features, features] before sharding."""
    world_size = context.world_size
    shapes = [(rows, features // world_size), (features, features // world_size)]
    if op == "all_gather_matmul":
        shapes = [(rows // world_size, features), (features // world_size, features)]
    random = torch.Generator().manual_seed(context.rank)
    x, weight = (torch.randn(shape, generator=random).to(DTYPES[dtype]) for shape in shapes)
    return x, weight


def all_reduce_makers(context: RankContext, nbytes: int) -> Makers:
    """Makers for the all-reduce of a bf16 tensor of `nbytes`, in place, through shared memory."""
    ones = torch.ones(nbytes // 2, dtype=torch.bfloat16)
    zeros = torch.zeros_like(ones).add_(0)  # the timed calls sum zeros, which do not grow

    def contestant(all_reduce_: Callable[[Tensor], Tensor]) -> Contestant:
        check = checked_contestant(lambda: all_reduce_(ones.clone()), ones * context.world_size).check
        return Contestant(lambda: all_reduce_(zeros), check)

    def fused_tp_contestant() -> Contestant:
        transport = shared_memory_transport()
        return contestant(lambda tensor: transport.all_reduce(tensor, out=tensor))

    def deepspeed_contestant() -> Contestant:
        rivals_deepspeed.load_extension(context)
        return contestant(rivals_deepspeed.all_reduce_)

    def run_gloo(tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor)
        return tensor

    return {FUSED_TP: fused_tp_contestant, "DeepSpeed": deepspeed_contestant, "gloo": lambda: contestant(run_gloo)}


def shared_memory_transport() -> ShmTransport:
    """Shared-memory transport of all ranks; raises Unavailable if there is none."""
    from fused_tp.backends.shared_memory.shm import shm_availability, shm_transport
    from fused_tp.core.group import resolve_group

    group = resolve_group(None)
    transport = shm_transport(group)
    if transport is None:
        raise Unavailable(f"fused_tp has no shared memory here: {shm_availability(group).reason}.")
    return transport
