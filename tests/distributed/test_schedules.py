"""Schedules of GPUs over doubles, in one table: every method at any size, calls in a row, two groups at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.schedule_cases import at_random, every_method, ranks_on, schedule_on
from tests.reference import seeded

pytest.importorskip("fused_tp._core", reason="needs the native core: pip install -e .")
pytestmark = pytest.mark.full

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


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
    ],
)
def test_every_method(name: str, world_size: int, dtype: torch.dtype) -> None:
    ask(name, world_size, every_method, dtype, exact=name != "multimem")  # whose switch rounds the sum


@pytest.mark.parametrize(
    ("name", "world_size", "dtype"),
    [("two_shot", 3, FP32), *((name, size, FP64) for name in ("copy_engine", "nccl_pipeline") for size in (2, 4))],
)
def test_many_calls_at_a_random_pace_in_growing_workspaces(name: str, world_size: int, dtype: torch.dtype) -> None:
    ask(name, world_size, at_random, 5, 60, dtype)


def two_groups(group: Any, name: str) -> None:
    """All ranks as one group and as two pairs: ops of both are under way at once, and finished the other way round."""
    rank = dist.get_rank(group)
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    with schedule_on(group, name) as whole, schedule_on(pair, name) as half:
        whole.chunks, half.chunks = 2, 3
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
