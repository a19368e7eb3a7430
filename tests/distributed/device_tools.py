"""Ranks that run the device kernels in their CPU build: the same code and protocol, in CPU shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from benchmarks.local_ranks import LocalSymmetricMemory
from fused_tp.runtime.availability import Availability
from fused_tp.runtime.group import resolve_group
from fused_tp.schedules.device import DeviceSchedule
from fused_tp.schedules.plain import Plain
from fused_tp.transport.device_collectives import DeviceCollectives
from fused_tp.transport.symm_mem import CpuSymmetricMemory, group_memory
from fused_tp.transport.torch_dist import torch_dist
from tests.distributed import schedule_cases
from tests.distributed.schedule_cases import CPU
from tests.native_build import cpu_device_library, use_library
from tests.workers import Outcome, fresh_ranks, run_ranks

ALGORITHMS = ("one_shot", "two_shot", "multimem")


def device_ranks(world_size: int, fn: Callable[..., Any], *args: Any, **keywords: Any) -> list[Any]:
    """`run_ranks` of `fn(group, *args)` with the CPU build of the kernels."""
    return run_ranks(world_size, with_library, str(cpu_device_library()), fn, args, **keywords)


def fresh_device_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    env: Mapping[str, str | None] | None = None,
    expect_deaths: bool = False,
) -> list[Outcome]:
    """`fresh_ranks` of `fn(group, *args)` with the CPU build of the kernels."""
    library = str(cpu_device_library())
    return fresh_ranks(world_size, with_library, library, fn, args, env=env, expect_deaths=expect_deaths, timeout=60)


def with_library(group: Any, library: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    use_library(library)
    try:
        with multicast():
            return fn(group, *args)
    finally:  # the process goes on to other tests
        use_library(None)


def collectives_of(group: Any) -> DeviceCollectives:
    """New ones, whatever the group had before."""
    described = resolve_group(group)
    memory = group_memory(described, CPU)
    assert not isinstance(memory, Availability), memory
    return DeviceCollectives(memory, torch_dist(described, "cpu"))


@contextmanager
def forced(group: Any, algorithm: str) -> Iterator[DeviceSchedule]:
    """The public ops of `group` run on this schedule, made new."""
    schedule = DeviceSchedule(algorithm, collectives_of(group), Plain(torch_dist(resolve_group(group), "cpu")))
    with schedule_cases.forced(group, schedule):
        yield schedule


@contextmanager
def multicast() -> Iterator[None]:
    """Memory as if behind an NVLink switch: the CPU build does for `multimem` what the switch would."""
    with (
        mock.patch.object(CpuSymmetricMemory, "multicast_ptr", 1, create=True),
        mock.patch.object(LocalSymmetricMemory, "multicast_ptr", 1),
    ):
        yield


def rank_and_size(group: Any) -> tuple[int, int]:
    return dist.get_rank(group), dist.get_world_size(group)


def summed(terms: list[Tensor], bias: Tensor | None = None) -> Tensor:
    """The very bits that a sum over ranks must have: float32, in rank order, rounded once."""
    total = terms[0].float()
    for term in terms[1:]:
        total = total + term.float()
    if bias is not None:
        total = total + bias.float()
    return total.to(terms[0].dtype)
