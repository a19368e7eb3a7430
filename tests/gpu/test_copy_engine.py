"""Schedule `copy_engine` on GPUs: ranks as processes, which share a GPU where there are not enough.

The checks are those made over a double of the CUDA driver (tests/distributed/test_copy_engine_schedule.py).
"""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fused_tp.runtime.availability import Availability
from fused_tp.runtime.group import resolve_group
from fused_tp.schedules.copy_engine import CopyEngineSchedule
from fused_tp.schedules.plain import Plain
from fused_tp.transport.copy_engine import CopyEngine, copy_engine_available
from fused_tp.transport.store import agree
from fused_tp.transport.symm_mem import group_memory
from fused_tp.transport.torch_dist import torch_dist
from tests.distributed import test_copy_engine_schedule as checks
from tests.gpu.on_device import PATIENCE, OnDevice, device_of, environment, graph_case, unwrapped
from tests.native_build import use_driver
from tests.workers import fresh_ranks

pytestmark = pytest.mark.gpu


def schedule_on(group: Any, device: torch.device) -> CopyEngineSchedule | str:
    """The schedule of a group, with all that a first call sets up; or why it cannot have it."""
    described = resolve_group(group)
    found = agree(described, "copy engines", lambda: copy_engine_available(device))
    if not found:
        return found.reason
    memory = group_memory(described, device)
    if isinstance(memory, Availability):
        return memory.reason
    plain = Plain(torch_dist(described, device.type))
    engine = CopyEngine(memory, plain.transport)
    schedule = CopyEngineSchedule(engine, plain)
    with mock.patch.dict(os.environ, FUSED_TP_TIMEOUT=PATIENCE):
        x = torch.ones(8, 8, device=device)
        schedule.matmul_all_reduce([(x, x)], None).cpu()
        dist.barrier(group)
    return schedule


def prepare(group: Any, kind: str, library: str | None) -> Any:
    """(schedule, device, what raises its failures), or why not."""
    device = device_of(dist.get_rank(group), kind)
    if library is not None:
        use_driver(library)
    schedule = schedule_on(group, device)
    return schedule if isinstance(schedule, str) else (schedule, device, schedule.engine.raise_failure)


def with_schedule(group: Any, kind: str, library: str | None, case: str, args: tuple[Any, ...]) -> Any:
    """What a case of the tests over doubles returns; or why these ranks cannot run it."""
    prepared = prepare(group, kind, library)
    if isinstance(prepared, str):
        return prepared
    schedule, device, _ = prepared

    def proxy(schedule: CopyEngineSchedule) -> OnDevice:
        return OnDevice(schedule, device, schedule.engine.raise_failure)

    def schedule_of(group: Any) -> OnDevice:
        made = schedule_on(group, device)
        assert isinstance(made, CopyEngineSchedule), made
        return proxy(made)

    with mock.patch.object(checks, "schedule_of", schedule_of):
        return getattr(checks, case)(proxy(schedule), *args)


def on_gpus(world_size: int, case: str, *args: Any) -> list[Any]:
    return fresh_ranks(world_size, with_schedule, "cuda", None, case, args, timeout=300, env=environment(world_size))


@pytest.mark.parametrize(("world_size", "dtype_name"), [(1, "float32"), (2, "bfloat16"), (4, "float16")])
def test_every_method(world_size: int, dtype_name: str) -> None:
    unwrapped(on_gpus(world_size, "numbers", dtype_name))


@pytest.mark.parametrize("world_size", [2, 4])
def test_many_calls_at_a_random_pace(world_size: int) -> None:
    unwrapped(on_gpus(world_size, "at_random", 3, 60))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_graphs_and_calls_between_replays(world_size: int) -> None:
    unwrapped(fresh_ranks(world_size, graph_case, prepare, "cuda", None, timeout=300, env=environment(world_size)))


def test_a_rank_that_is_late_ends_the_call_on_all() -> None:
    said = unwrapped(on_gpus(3, "failures"))
    for number, op in enumerate(checks.OPS):
        texts = [one[number] for one in said]
        assert any(f"{op}, call " in text and "of rank 2" in text for text in texts[:2]), texts
