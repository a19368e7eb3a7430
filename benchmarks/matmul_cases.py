"""Matmuls with their collective: weights [4096, 4096] before sharding, x of M rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from . import rivals_deepspeed, rivals_gloo
from .case import DTYPES, OURS, Case, Contestant, Maker, Rival, checked
from .ranks import RankContext
from .ratios import TIME_RATIO

FEATURES = 4096

ALONE = "matmul alone"
# In fp32 fused_tp may multiply by another library than torch picks (see fused_tp.schedules.gemm). These contestants do
# too, so that what it gains by that is not taken for what it gains by overlapping.
OUR_ALONE = "fused_tp's matmul alone"
GLOO = "matmul + gloo"
DEEPSPEED = "matmul + DeepSpeed"
OUR_DEEPSPEED = "fused_tp's matmul + DeepSpeed"


def cases() -> list[Case]:
    """All of this file, in the order of the table."""
    found = []
    for dtype in DTYPES:
        for rows in (1, 16, 128, 512, 1024):
            large = rows >= 128
            rivals = {
                ALONE: Rival(TIME_RATIO, aim=1.05 if large else None),
                GLOO: Rival(TIME_RATIO, bar=0.75 if large and dtype == "bf16" else None),
                DEEPSPEED: Rival(TIME_RATIO, bar=0.97 if large else 1.05),
                OUR_ALONE: Rival(TIME_RATIO),
                OUR_DEEPSPEED: Rival(TIME_RATIO),
            }
            found.append(_case("matmul_all_reduce", matmul_all_reduce, dtype, rows, rivals))
    for dtype in DTYPES:
        for rows in (512, 1024):
            rivals = {
                ALONE: Rival(TIME_RATIO, bar=1.06, aim=1.02),
                GLOO: Rival(TIME_RATIO),
                OUR_ALONE: Rival(TIME_RATIO),
            }
            found.append(_case("all_gather_matmul", all_gather_matmul, dtype, rows, rivals))
    for dtype in DTYPES:
        for rows in (512, 1024):
            rivals = {
                ALONE: Rival(TIME_RATIO, bar=1.08, aim=1.03),
                GLOO: Rival(TIME_RATIO),
                OUR_ALONE: Rival(TIME_RATIO),
            }
            found.append(_case("matmul_reduce_scatter", matmul_reduce_scatter, dtype, rows, rivals))
    return found


def _case(op: str, make: Callable[..., dict[str, Maker]], dtype: str, rows: int, rivals: dict[str, Rival]) -> Case:
    seconds = 4.0 if rows <= 16 else 8.0
    return Case(f"{op}/{dtype}/M={rows}", make, {"dtype": dtype, "rows": rows}, rivals, seconds)


def matmul_all_reduce(context: RankContext, dtype: str, rows: int, features: int = FEATURES) -> dict[str, Maker]:
    """Cut along K: x [M, K/W], weight [N, K/W] -> [M, N]."""
    x, weight = _operands(
        context, dtype, (rows, features // context.world_size), (features, features // context.world_size)
    )
    expected = _summed(F.linear(x.double(), weight.double()))

    def ours() -> Contestant:
        from fused_tp import matmul_all_reduce

        return checked(
            lambda: matmul_all_reduce(x, weight, group=None),
            expected,
            _schedule("matmul_all_reduce", x, rows, None, features),
        )

    def deepspeed() -> Contestant:
        rivals_deepspeed.load(context)
        return checked(lambda: rivals_deepspeed.matmul_all_reduce(x, weight), expected)

    def our_deepspeed() -> Contestant:
        from fused_tp.schedules.gemm import linear

        rivals_deepspeed.load(context)
        return checked(lambda: rivals_deepspeed.all_reduce_(linear(x, weight)), expected)

    makers: dict[str, Maker] = {
        OURS: ours,
        ALONE: _alone(x, weight),
        GLOO: lambda: checked(lambda: rivals_gloo.matmul_all_reduce(x, weight), expected),
        DEEPSPEED: deepspeed,
    }
    if dtype == "fp32":
        makers |= {OUR_ALONE: _our_alone(x, weight), OUR_DEEPSPEED: our_deepspeed}
    return makers


def all_gather_matmul(context: RankContext, dtype: str, rows: int, features: int = FEATURES) -> dict[str, Maker]:
    """Cut along N: x_shard_m [M/W, K], weight [N/W, K] -> [M, N/W]."""
    shape = (rows // context.world_size, features)
    x_shard_m, weight = _operands(context, dtype, shape, (features // context.world_size, features))
    shards = [torch.empty_like(x_shard_m) for _ in range(context.world_size)]
    dist.all_gather(shards, x_shard_m)
    x = torch.cat(shards)
    expected = F.linear(x.double(), weight.double())

    def ours() -> Contestant:
        from fused_tp import all_gather_matmul

        return checked(
            lambda: all_gather_matmul(x_shard_m, weight, group=None),
            expected,
            _schedule("all_gather_matmul", x, rows, features, None),
        )

    makers: dict[str, Maker] = {
        OURS: ours,
        ALONE: _alone(x, weight),
        GLOO: lambda: checked(lambda: rivals_gloo.all_gather_matmul(x_shard_m, weight), expected),
    }
    if dtype == "fp32":
        makers[OUR_ALONE] = _our_alone(x, weight)
    return makers


def matmul_reduce_scatter(context: RankContext, dtype: str, rows: int, features: int = FEATURES) -> dict[str, Maker]:
    """Cut along K: x [M, K/W], weight [N, K/W] -> [M/W, N]."""
    x, weight = _operands(
        context, dtype, (rows, features // context.world_size), (features, features // context.world_size)
    )
    expected = _summed(F.linear(x.double(), weight.double())).chunk(context.world_size)[context.rank]

    def ours() -> Contestant:
        from fused_tp import matmul_reduce_scatter

        return checked(
            lambda: matmul_reduce_scatter(x, weight, group=None),
            expected,
            _schedule("matmul_reduce_scatter", x, rows, None, features),
        )

    makers: dict[str, Maker] = {
        OURS: ours,
        ALONE: _alone(x, weight),
        GLOO: lambda: checked(lambda: rivals_gloo.matmul_reduce_scatter(x, weight), expected),
    }
    if dtype == "fp32":
        makers[OUR_ALONE] = _our_alone(x, weight)
    return makers


def _operands(
    context: RankContext, dtype: str, x_shape: tuple[int, int], weight_shape: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(context.rank)
    kind = DTYPES[dtype]
    return torch.randn(x_shape, generator=random).to(kind), torch.randn(weight_shape, generator=random).to(kind)


def _summed(partial: Tensor) -> Tensor:
    dist.all_reduce(partial)
    return partial


def _alone(x: Tensor, weight: Tensor) -> Maker:
    return lambda: Contestant(lambda: F.linear(x, weight))


def _our_alone(x: Tensor, weight: Tensor) -> Maker:
    def make() -> Contestant:
        from fused_tp.schedules.gemm import linear

        return Contestant(lambda: linear(x, weight))

    return make


def _schedule(op: str, x: Tensor, m: int, k: int | None, n: int | None) -> str:
    """Which schedule the op will run on; a figure means little without it."""
    from fused_tp.runtime.group import resolve_group
    from fused_tp.schedules.registry import decide

    decision = decide(op, resolve_group(None), x.dtype, x.device, m, k, n)
    return f"{decision.schedule} over {decision.transport}"
