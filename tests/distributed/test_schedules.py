"""Schedules for GPUs on test doubles: every method at any size, repeated calls, concurrent groups, overlap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fused_tp.backends.copy_engine import copy_engine_schedule as copy_engine
from fused_tp.backends.nccl import nccl_pipeline
from fused_tp.backends.schedule import GatherMatmul
from tests.distributed.schedule_cases import at_random, every_method, own, ranks_on, schedule_on, stalled_until
from tests.native.doubles.libraries import double_knobs
from tests.reference import seeded

pytest.importorskip("fused_tp._core", reason="needs the native core: pip install -e .")
pytestmark = pytest.mark.full

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
OVERLAPPING: dict[str, Any] = {"copy_engine": copy_engine, "nccl_pipeline": nccl_pipeline}  # modules


def asked(group: Any, name: str, case: Callable[..., None], args: tuple[Any, ...], how: dict[str, Any]) -> None:
    with schedule_on(group, name) as schedule:
        case(schedule, *args, **how)


def ask(name: str, world_size: int, case: Callable[..., None], *args: Any, **how: Any) -> None:
    ranks_on(name, world_size, asked, name, case, args, how)


@pytest.mark.parametrize(
    ("name", "world_size", "dtype"),
    [
        *(("two_shot", 1, FP32), ("two_shot", 2, BF16)),
        *(("one_shot", 2, FP32), ("one_shot", 3, FP64), ("one_shot", 4, FP16)),
        *(("multimem", 3, FP16), ("multimem", 4, BF16)),
        *(("copy_engine", 1, FP32), ("copy_engine", 2, BF16), ("copy_engine", 3, FP32), ("copy_engine", 4, FP64)),
        *(("copy_engine", 4, FP16), ("nccl_pipeline", 1, FP64), ("nccl_pipeline", 2, FP32), ("nccl_pipeline", 3, BF16)),
        *(("nccl_pipeline", 4, FP16), ("nccl_pipeline", 4, FP64)),
        *(("symm_mem", 2, BF16), ("symm_mem", 3, FP32), ("symm_mem", 4, FP16), ("symm_mem", 2, FP64)),
    ],
)
def test_every_method(name: str, world_size: int, dtype: torch.dtype) -> None:
    # A switch adds in another order; torch's ops round bfloat16 in between, and before the bias.
    ask(name, world_size, every_method, dtype, exact=name not in ("multimem", "symm_mem"))


@pytest.mark.parametrize(
    ("name", "world_size", "dtype"),
    [
        ("two_shot", 3, FP32),
        ("symm_mem", 3, FP32),
        *((name, size, FP64) for name in ("copy_engine", "nccl_pipeline") for size in (2, 4)),
    ],
)
def test_many_calls_at_a_random_pace_in_growing_workspaces(name: str, world_size: int, dtype: torch.dtype) -> None:
    ask(name, world_size, at_random, 5, 60, dtype)


def two_groups(group: Any, name: str) -> None:
    """All ranks as one group and as two pairs: ops of both overlap, and finish in the opposite order."""
    rank = dist.get_rank(group)
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    with schedule_on(group, name) as whole, schedule_on(pair, name) as half:
        whole.num_chunks, half.num_chunks = 2, 3
        for call in range(10):
            terms = [seeded(6, 8, dtype=FP64, seed=10 * call + r) for r in range(4)]
            mine = [terms[r] for r in ((0, 1), (2, 3))[rank // 2]]
            first = whole.all_gather(terms[rank], gather_dim=0, gather_size=None)
            second = half.all_gather(terms[rank], gather_dim=1, gather_size=None)
            y = half.matmul_all_reduce([(terms[rank], torch.eye(8, dtype=FP64))], None)
            assert torch.equal(second.wait(), torch.cat(mine, 1))
            assert torch.equal(first.wait(), torch.cat(terms, 0))
            torch.testing.assert_close(y, mine[0] + mine[1])


@pytest.mark.parametrize("name", ["copy_engine", "nccl_pipeline"])
def test_two_groups_at_once(name: str) -> None:
    ranks_on(name, 4, two_groups, name)


def matmuls_before_anything_moves(group: Any, name: str) -> None:
    """Matmuls run before any transfer completes; a schedule that waits for one earlier raises after 5 s."""
    world_size, stall, module = dist.get_world_size(group), double_knobs().cuda_double_stall, OVERLAPPING[name]
    x, w = seeded(12, 4, seed=1), seeded(5, 4, seed=2)
    with mock.patch.object(nccl_pipeline, "ONE_SHOT_BYTES", 0), schedule_on(group, name) as schedule:
        schedule.matmul_all_reduce([(x, w)], None)
        schedule.num_chunks = world_size - 1
        with stalled_until(module, 1):  # the rank's own shard
            (y,), _ = schedule.all_gather_matmul(GatherMatmul(own(schedule, x, 0), [w], [None], 0, 12))
        torch.testing.assert_close(y, x @ w.t())
        # The blocks of all owners, and the `meanwhile` function.
        stall(1)
        with mock.patch.object(module, "sum_of_products", wraps=module.sum_of_products) as products:
            y = schedule.matmul_reduce_scatter([(x, w)], None, scatter_dim=0, overlapped_work=lambda: stall(0))
        torch.testing.assert_close(y, own(schedule, world_size * (x @ w.t()), 0))
        assert products.call_count == world_size
        if name == "nccl_pipeline":
            schedule.num_chunks = 2
            with stalled_until(module, 2):  # the chunk after the first
                y = schedule.matmul_all_reduce([(x, w)], None)
            torch.testing.assert_close(y, world_size * (x @ w.t()))


@pytest.mark.parametrize(("name", "world_size"), [("copy_engine", 2), ("nccl_pipeline", 2), ("nccl_pipeline", 4)])
def test_matmuls_run_while_nothing_moves(name: str, world_size: int) -> None:
    ranks_on(name, world_size, matmuls_before_anything_moves, name, env={"FUSED_TP_TIMEOUT": "5"})
