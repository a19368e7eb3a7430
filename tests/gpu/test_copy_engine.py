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
from torch import Tensor

from fused_tp.runtime.availability import Availability
from fused_tp.runtime.group import resolve_group
from fused_tp.schedules.base import GatherMatmul
from fused_tp.schedules.copy_engine import CopyEngineSchedule
from fused_tp.schedules.plain import Plain
from fused_tp.transport.base import sum_in_rank_order
from fused_tp.transport.copy_engine import CopyEngine, copy_engine_available
from fused_tp.transport.failure import abort_hook
from fused_tp.transport.store import agree
from fused_tp.transport.symm_mem import group_memory
from fused_tp.transport.torch_dist import torch_dist
from tests.distributed import test_copy_engine_schedule as checks
from tests.distributed import test_tp_ops as ops
from tests.gpu.on_device import Graph, OnDevice, device_of, gpu_sharing, public_ops_on, why_not
from tests.native_build import use_driver
from tests.reference import seeded
from tests.workers import fresh_ranks

pytestmark = pytest.mark.gpu

PATIENCE = "60"  # seconds, for a GPU to start


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
    engine = CopyEngine(memory, abort_hook(plain.transport))
    schedule = CopyEngineSchedule(engine, plain)
    with mock.patch.dict(os.environ, FUSED_TP_TIMEOUT=PATIENCE):
        x = torch.ones(8, 8, device=device)
        schedule.matmul_all_reduce([(x, x)], None).cpu()
        dist.barrier(group)
    return schedule


def with_schedule(group: Any, kind: str, library: str | None, case: str, args: tuple[Any, ...]) -> Any:
    """What a case of the tests over doubles returns; or why these ranks cannot run it."""
    device = device_of(dist.get_rank(group), kind)
    if library is not None:
        use_driver(library)
    schedule = schedule_on(group, device)
    if isinstance(schedule, str):
        return schedule

    def proxy(schedule: CopyEngineSchedule) -> OnDevice:
        return OnDevice(schedule, device, schedule.engine.raise_failure)

    def schedule_of(group: Any, library: str) -> OnDevice:
        made = schedule_on(group, device)
        assert isinstance(made, CopyEngineSchedule), made
        return proxy(made)

    with mock.patch.object(checks, "schedule_of", schedule_of):
        return getattr(checks, case)(proxy(schedule), *args)


def graph_case(group: Any, kind: str, library: str | None) -> str:
    """'' or why not. Gathers and sums in one graph, replayed on other inputs each time, with calls in between."""
    device = device_of(dist.get_rank(group), kind)
    if library is not None:
        use_driver(library)
    schedule = schedule_on(group, device)
    if isinstance(schedule, str):
        return schedule
    rank, world_size = schedule.rank, schedule.world_size
    rows, columns = 6 * world_size, 16
    eye = torch.eye(columns, dtype=torch.bfloat16, device=device)
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)

    def work() -> list[Tensor]:
        (gathered,), _ = schedule.all_gather_matmul(GatherMatmul(x, [eye], [None], 0))
        scattered = schedule.matmul_reduce_scatter([(x, eye)], None, scatter_dim=0)
        return [gathered, scattered, schedule.matmul_all_reduce([(x, eye)], None)]

    def check(results: list[Tensor], seed: int) -> None:
        terms = inputs(seed)
        gathered, scattered, summed = (result.cpu() for result in results)
        schedule.engine.raise_failure()
        total = sum_in_rank_order(terms)
        assert torch.equal(gathered, terms.flatten(0, 1))
        assert torch.equal(summed, total)
        assert torch.equal(scattered, total.chunk(world_size)[rank])

    def inputs(seed: int) -> Tensor:
        return torch.stack(
            [seeded(rows, columns, dtype=torch.bfloat16, seed=100 * seed + r) for r in range(world_size)]
        )

    for seed in range(2):
        x.copy_(inputs(seed)[rank])
        check(work(), seed)
    graph = Graph(device, work)
    for seed in range(2, 8):
        x.copy_(inputs(seed)[rank])
        check(graph.replay(), seed)
        if seed % 2:
            check(work(), seed)
    dist.barrier(group)
    return ""


def public_ops(group: Any, dtype_name: str) -> str:
    """'' or why not; forward and all gradients."""
    device = device_of(dist.get_rank(group), "cuda")
    reason = why_not(group, "copy_engine", device)
    if reason is not None:
        return reason
    with mock.patch.dict(os.environ, FUSED_TP_SCHEDULE="copy_engine"), public_ops_on(device):
        ops.all_cases(group, dtype_name, False)
    dist.barrier(group)
    return ""


def unwrapped(outcomes: list[Any]) -> list[Any]:
    results = [outcome.unwrap() for outcome in outcomes]
    if isinstance(results[0], str) and results[0]:
        pytest.skip(f"these ranks cannot use copy engines: {results[0]}")
    return results


def environment(world_size: int) -> dict[str, str]:
    return {**gpu_sharing(world_size), "FUSED_TP_TIMEOUT": PATIENCE}


def on_gpus(world_size: int, case: str, *args: Any, expect_deaths: bool = False) -> list[Any]:
    return fresh_ranks(
        world_size,
        with_schedule,
        "cuda",
        None,
        case,
        args,
        timeout=300,
        env=environment(world_size),
        expect_deaths=expect_deaths,
    )


@pytest.mark.parametrize(("world_size", "dtype_name"), [(1, "float32"), (2, "bfloat16"), (4, "float16")])
def test_every_op(world_size: int, dtype_name: str) -> None:
    unwrapped(on_gpus(world_size, "every_op", dtype_name))


def test_same_bits() -> None:
    assert len({bits for result in unwrapped(on_gpus(3, "same_bits")) for bits in result}) == 1


@pytest.mark.parametrize("world_size", [2, 4])
def test_many_calls_at_a_random_pace(world_size: int) -> None:
    unwrapped(on_gpus(world_size, "at_random", 3, 60))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_graphs_and_calls_between_replays(world_size: int) -> None:
    unwrapped(fresh_ranks(world_size, graph_case, "cuda", None, timeout=300, env=environment(world_size)))


def test_public_ops() -> None:
    unwrapped(fresh_ranks(2, public_ops, "bfloat16", timeout=300, env=environment(2)))


def test_a_rank_that_is_late_ends_the_call_on_all() -> None:
    said = unwrapped(on_gpus(3, "without_last", ""))
    for number, op in enumerate(checks.OPS):
        texts = [one[number] for one in said]
        assert any(f"{op}, call " in text and "of rank 2" in text for text in texts[:2]), texts


def test_a_rank_that_dies_is_noticed() -> None:
    outcomes = on_gpus(3, "killed", "matmul_all_reduce", expect_deaths=True)
    assert outcomes[2].died and all(seconds < 8 for seconds in unwrapped(outcomes[:2]))
