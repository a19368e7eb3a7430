"""Schedule `copy_engine` on several ranks: real processes, with CPU tensors and a test double of the CUDA driver."""

from __future__ import annotations

import functools
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

if find_spec("fused_tp._core") is None:
    pytest.skip("needs the native core: pip install -e .", allow_module_level=True)

from fused_tp.backends.copy_engine.copy_engine_schedule import CopyEngineSchedule
from fused_tp.backends.registry import SCHEDULES
from fused_tp.backends.symmetric_memory.symm_mem import GroupMemory
from fused_tp.core.errors import FusedTPError
from fused_tp.core.group import resolve_group
from tests.distributed.schedule_cases import CPU, ranks_on, step
from tests.faults import failure_of
from tests.late import give_up, wait_for_those_who_gave_up
from tests.workers import body_of, fresh_ranks

pytestmark = pytest.mark.full


def ranks(world_size: int, fn: Callable[..., Any], *args: Any, **how: Any) -> list[Any]:
    """`run_ranks` of `fn(schedule, *args)`."""
    return ranks_on("copy_engine", world_size, with_schedule, fn, args, **how)


def with_schedule(group: Any, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return body_of(fn)(schedule_of(group), *args)


def schedule_of(group: Any) -> CopyEngineSchedule:
    """Create the schedule as dispatch does."""
    described, spec = resolve_group(group), SCHEDULES["copy_engine"]
    assert spec.available(described, CPU)
    schedule = spec.make(described, CPU, None)
    assert isinstance(schedule, CopyEngineSchedule)
    return schedule


def group_of(schedule: CopyEngineSchedule) -> Any:
    memory = schedule.engine._memory
    assert isinstance(memory, GroupMemory)
    return memory.group.process_group


# ---- failures ------------------------------------------------------------------------------------------------------

OPS = ("all_gather", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "reduce_scatter")


@contextmanager
def results_of_calls() -> Iterator[list[Tensor]]:
    """Collect the result tensors of calls, including calls that raise."""
    from fused_tp.backends.copy_engine.copy_engine import CopyCall

    kept: list[Tensor] = []
    real = CopyCall.finish

    def finish(self: CopyCall, *results: Tensor) -> None:
        kept.extend(results)
        real(self, *results)

    with mock.patch.object(CopyCall, "finish", finish):
        yield kept


def failures(schedule: CopyEngineSchedule) -> list[str]:
    """Messages of failures, each on a separate group, which is unusable afterwards."""
    cases = [functools.partial(is_late, op=op) for op in OPS] + [gives_up_at_random]
    everyone = list(range(schedule.world_size))
    schedules = [schedule_of(dist.new_group(everyone)) for _ in cases]
    said = []
    for one, case in zip(schedules, cases, strict=True):
        os.environ["FUSED_TP_TIMEOUT"] = "60"
        step(one, "matmul_all_reduce")
        dist.barrier(group_of(schedule))
        said.append(case(one))
    return said


def is_late(schedule: CopyEngineSchedule, op: str) -> str:
    """Let the last rank arrive too late at a call."""
    os.environ["FUSED_TP_TIMEOUT"] = "0.5"
    last = schedule.world_size - 1
    if schedule.rank == last:
        wait_for_those_who_gave_up(op, range(last))
    with results_of_calls() as kept:
        failure = failure_of(lambda lost: step(schedule, op))
    give_up(op)
    assert failure.kind == "CollectiveTimeoutError" and failure.seconds < 4
    assert all(bool(result.isnan().all()) for result in kept)
    return failure.message


def gives_up_at_random(schedule: CopyEngineSchedule) -> str:
    """Let ranks give up at different times, with several calls in flight: no rank may return wrong bytes."""
    os.environ["FUSED_TP_TIMEOUT"] = str(0.3 + 0.2 * schedule.rank)
    pace = random.Random(schedule.rank)
    right = []
    try:
        for number in range(200):
            x = torch.full((6, 3), float(number + 1))
            moving = [schedule.all_gather(x, gather_dim=0, gather_size=None) for _ in range(3)]
            y = schedule.matmul_reduce_scatter([(x, torch.ones(2, 3))], None, scatter_dim=0)
            right.append(bool((y == 3 * schedule.world_size * (number + 1)).all()))
            right.extend(bool((one.wait() == number + 1).all()) for one in moving)
            if pace.random() < 0.05:
                time.sleep(0.4)  # longer than rank 0's deadline
    except FusedTPError as error:
        assert all(right)
        return str(error)
    raise AssertionError("nobody has been late")


def test_failures_end_a_call_on_all_ranks_in_time() -> None:
    said = [outcome.unwrap() for outcome in ranks(3, failures, run=fresh_ranks)]
    for number, op in enumerate(OPS):
        texts = [one[number] for one in said]
        assert any(re.search(rf"{op}, call 2: rank \d waited .* of ranks? (\d, )?2\.", text) for text in texts[:2]), (
            texts
        )
        assert all("FUSED_TP_TIMEOUT is 0.5 s" in text for text in texts)
