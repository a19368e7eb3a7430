"""torch.autograd.gradcheck of every op in fp64, on several ranks in lockstep.

All ranks hold the same whole inputs and perturb the same element; each cuts its shard with an op whose backward puts
the shards' gradients together, runs the op under test, and gathers the output. So the function that gradcheck sees is
the unsharded one, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fused_tp
from fused_tp.ops import collectives
from fused_tp.runtime.partition import shard_range
from tests.distributed.schedule_variants import SCHEDULES, run_variant
from tests.reference import seeded

pytestmark = pytest.mark.full

D = torch.float64


def _all_gather_matmul(group: Any) -> tuple[Callable[..., Any], list[Tensor]]:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Any:
        y, gathered = fused_tp.all_gather_matmul(
            collectives.scatter(x, 1, group=group),
            [collectives.scatter(w, 0, group=group), collectives.scatter(w * 2.0, 0, group=group)],
            [collectives.scatter(b, 0, group=group), None],
            group=group,
            gather_dim=1,
            gather_size=x.shape[1],
            return_gathered=True,
        )
        # The gathered x is for work that differs by rank; here every rank works on its own slice of it.
        start, stop = shard_range(x.shape[0], dist.get_world_size(group), dist.get_rank(group))
        own = gathered[start:stop]
        outputs = [collectives.gather(t, -1, group=group, gather_size=w.shape[0]) for t in y]
        return *outputs, collectives.gather(own, 0, group=group, gather_size=x.shape[0])

    return fn, [seeded(3, 3, 2, dtype=D), seeded(3, 2, dtype=D, seed=1), seeded(3, dtype=D, seed=2)]


def _matmul_reduce_scatter(group: Any) -> tuple[Callable[..., Any], list[Tensor]]:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Any:
        y = fused_tp.matmul_reduce_scatter(
            collectives.scatter(x, -1, group=group),
            collectives.scatter(w, 1, group=group),
            b,
            group=group,
            scatter_dim=1,
        )
        return collectives.gather(y, 1, group=group, gather_size=x.shape[1])

    return fn, [seeded(2, 4, 3, dtype=D), seeded(2, 3, dtype=D, seed=1), seeded(2, dtype=D, seed=2)]


def _matmul_all_reduce(group: Any) -> tuple[Callable[..., Any], list[Tensor]]:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Any:
        return fused_tp.matmul_all_reduce(
            collectives.scatter(x, -1, group=group), collectives.scatter(w, 1, group=group), b, group=group
        )

    return fn, [seeded(4, 5, dtype=D), seeded(3, 5, dtype=D, seed=1), seeded(3, dtype=D, seed=2)]


def _column_parallel_matmul(group: Any) -> tuple[Callable[..., Any], list[Tensor]]:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Any:
        y, z = fused_tp.column_parallel_matmul(
            x,
            [collectives.scatter(w, 0, group=group), collectives.scatter(w * 2.0, 0, group=group)],
            [None, collectives.scatter(b, 0, group=group)],
            group=group,
        )
        return tuple(collectives.gather(t, -1, group=group, gather_size=w.shape[0]) for t in (y, z))

    return fn, [seeded(4, 3, dtype=D), seeded(5, 3, dtype=D, seed=1), seeded(5, dtype=D, seed=2)]


def _all_reduce_rms_norm(group: Any) -> tuple[Callable[..., Any], list[Tensor]]:
    def fn(partials: Tensor, residual: Tensor, weight: Tensor) -> Any:
        own = collectives.scatter(partials, 0, group=group).sum(0)
        return fused_tp.all_reduce_rms_norm(own, residual, weight, 1e-3, group=group)

    return fn, [seeded(3, 2, 4, dtype=D), seeded(2, 4, dtype=D, seed=1), seeded(4, dtype=D, seed=2)]


def _matmul_all_reduce_rms_norm(group: Any) -> tuple[Callable[..., Any], list[Tensor]]:
    def fn(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor) -> Any:
        return fused_tp.matmul_all_reduce_rms_norm(
            collectives.scatter(x, -1, group=group),
            collectives.scatter(w, 1, group=group),
            residual,
            weight,
            1e-3,
            group=group,
        )

    return fn, [
        seeded(2, 3, dtype=D),
        seeded(4, 3, dtype=D, seed=1),
        seeded(2, 4, dtype=D, seed=2),
        seeded(4, dtype=D, seed=3),
    ]


def _vocab_parallel_cross_entropy(group: Any) -> tuple[Callable[..., Any], list[Tensor]]:
    target = torch.tensor([3, -100, 0, 6])

    def fn(logits: Tensor) -> Any:
        shard = collectives.scatter(logits, -1, group=group)
        return tuple(
            fused_tp.vocab_parallel_cross_entropy(
                shard, target, group=group, vocab_size=7, label_smoothing=smoothing, reduction=reduction
            )
            for smoothing, reduction in ((0.0, "mean"), (0.2, "none"))
        )

    return fn, [seeded(4, 7, dtype=D)]


OPS = [
    _all_gather_matmul,
    _matmul_reduce_scatter,
    _matmul_all_reduce,
    _column_parallel_matmul,
    _all_reduce_rms_norm,
    _matmul_all_reduce_rms_norm,
    _vocab_parallel_cross_entropy,
]


def check_gradients(group: Any, make: Callable[[Any], tuple[Callable[..., Any], list[Tensor]]]) -> None:
    fn, inputs = make(group)
    leaves = [t.clone().requires_grad_() for t in inputs]
    assert torch.autograd.gradcheck(fn, leaves)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("make", OPS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradcheck(schedule: str, make: Callable[..., Any], world_size: int) -> None:
    run_variant(schedule, world_size, check_gradients, make)
