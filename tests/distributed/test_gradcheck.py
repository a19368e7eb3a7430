"""torch.autograd.gradcheck of every op in fp64, on several ranks in lockstep.

All ranks hold the same whole inputs and perturb the same element; each cuts its shard with an op whose backward puts
the shards' gradients together, runs the op under test, and gathers the output. So the function that gradcheck sees is
the unsharded one, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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

SHAPES = {  # of the inputs
    "all_gather_matmul": [(3, 3, 2), (3, 2), (3,)],
    "matmul_reduce_scatter": [(2, 4, 3), (2, 3), (2,)],
    "matmul_all_reduce": [(4, 5), (3, 5), (3,)],
    "column_parallel_matmul": [(4, 3), (5, 3), (5,)],
    "all_reduce_rms_norm": [(3, 2, 4), (2, 4), (4,)],
    "matmul_all_reduce_rms_norm": [(2, 3), (4, 3), (2, 4), (4,)],
    "vocab_parallel_cross_entropy": [(4, 7)],
}


def unsharded(group: Any) -> dict[str, Callable[..., Any]]:
    cut, together = partial(collectives.scatter, group=group), partial(collectives.gather, group=group)
    target = torch.tensor([3, -100, 0, 6])

    def all_gather_matmul(x: Tensor, w: Tensor, b: Tensor) -> Any:
        weights, biases = [cut(w, 0), cut(w * 2.0, 0)], [cut(b, 0), None]
        y, gathered = fused_tp.all_gather_matmul(
            cut(x, 1), weights, biases, group=group, gather_dim=1, gather_size=x.shape[1], return_gathered=True
        )
        # The gathered x is for work that differs by rank; here every rank works on its own slice of it.
        own = gathered[slice(*shard_range(x.shape[0], dist.get_world_size(group), dist.get_rank(group)))]
        return *(together(t, -1, gather_size=w.shape[0]) for t in y), together(own, 0, gather_size=x.shape[0])

    def matmul_reduce_scatter(x: Tensor, w: Tensor, b: Tensor) -> Any:
        y = fused_tp.matmul_reduce_scatter(cut(x, -1), cut(w, 1), b, group=group, scatter_dim=1)
        return together(y, 1, gather_size=x.shape[1])

    def matmul_all_reduce(x: Tensor, w: Tensor, b: Tensor) -> Any:
        return fused_tp.matmul_all_reduce(cut(x, -1), cut(w, 1), b, group=group)

    def column_parallel_matmul(x: Tensor, w: Tensor, b: Tensor) -> Any:
        weights, biases = [cut(w, 0), cut(w * 2.0, 0)], [None, cut(b, 0)]
        outputs = fused_tp.column_parallel_matmul(x, weights, biases, group=group)
        return tuple(together(t, -1, gather_size=w.shape[0]) for t in outputs)

    def all_reduce_rms_norm(partials: Tensor, residual: Tensor, weight: Tensor) -> Any:
        return fused_tp.all_reduce_rms_norm(cut(partials, 0).sum(0), residual, weight, 1e-3, group=group)

    def matmul_all_reduce_rms_norm(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor) -> Any:
        return fused_tp.matmul_all_reduce_rms_norm(cut(x, -1), cut(w, 1), residual, weight, 1e-3, group=group)

    def vocab_parallel_cross_entropy(logits: Tensor) -> Any:
        return tuple(
            fused_tp.vocab_parallel_cross_entropy(
                cut(logits, -1), target, group=group, vocab_size=7, label_smoothing=smoothing, reduction=reduction
            )
            for smoothing, reduction in ((0.0, "mean"), (0.2, "none"))
        )

    return {name: op for name, op in locals().items() if name in SHAPES}


def check_gradients(group: Any) -> None:
    for name, fn in unsharded(group).items():
        leaves = [seeded(*shape, dtype=torch.float64, seed=i) for i, shape in enumerate(SHAPES[name])]
        assert torch.autograd.gradcheck(fn, [t.requires_grad_() for t in leaves]), name


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradcheck(schedule: str, world_size: int) -> None:
    run_variant(schedule, world_size, check_gradients)
