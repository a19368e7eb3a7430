"""Ranks whose CPU tensors go where those of GPUs do: the CPU build of the device kernels, doubles of NCCL and CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from benchmarks.local_ranks import LocalSymmetricMemory
from fused_tp.runtime.availability import Availability
from fused_tp.runtime.group import resolve_group
from fused_tp.schedules import nccl_pipeline
from fused_tp.schedules.device import DeviceSchedule
from fused_tp.schedules.nccl_pipeline import NcclPipeline
from fused_tp.schedules.plain import Plain
from fused_tp.transport.device_collectives import DeviceCollectives
from fused_tp.transport.nccl import NcclDist, nccl_dist
from fused_tp.transport.symm_mem import CpuSymmetricMemory, group_memory
from fused_tp.transport.torch_dist import torch_dist
from tests.distributed import schedule_cases
from tests.distributed.schedule_cases import CPU
from tests.native.doubles.libraries import build_doubles, double_knobs, doubles
from tests.workers import body_of, run_ranks

ALGORITHMS = ("one_shot", "two_shot", "multimem")


def ranks_on(
    transport: str, world_size: int, fn: Callable[..., Any], *args: Any, run: Callable[..., Any] = run_ranks, **how: Any
) -> list[Any]:
    """`run_ranks` of `fn(group, *args)` with the doubles of that transport."""
    build_doubles(transport)
    return run(world_size, with_doubles, transport, fn, args, **how)


def with_doubles(group: Any, transport: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with doubles(transport), multicast():
        return body_of(fn)(group, *args)


device_ranks, nccl_ranks = partial(ranks_on, "two_shot"), partial(ranks_on, "nccl_pipeline")


@contextmanager
def stalled_until(schedule: Any, multiplied: int) -> Iterator[None]:
    """Nothing moves before that many matmuls of the module have run: who waits for a movement before waits in vain."""
    streams, product, done = double_knobs(), schedule.sum_of_products, 0

    def counting(*args: Any, **keywords: Any) -> Tensor:
        nonlocal done
        y = product(*args, **keywords)
        done += 1
        if done == multiplied:
            streams.cuda_double_stall(0)
        return y

    streams.cuda_double_stall(1)
    try:
        with mock.patch.object(schedule, "sum_of_products", counting):
            yield
    finally:
        streams.cuda_double_stall(0)
    assert done >= multiplied


# -- device kernels ---------------------------------------------------------------------------------------------------


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


# -- NCCL --------------------------------------------------------------------------------------------------------------


def transport_of(group: Any) -> NcclDist:
    found = nccl_dist(resolve_group(group), CPU)
    assert isinstance(found, NcclDist), found
    return found


@contextmanager
def public_ops_use(group: Any, chunks: int | None, one_shot_bytes: int = 0) -> Iterator[None]:
    """The public ops run by NcclPipeline, sums in two steps from more than `one_shot_bytes` on."""
    schedule = NcclPipeline(transport_of(group), chunks)
    with schedule_cases.forced(group, schedule), mock.patch.object(nccl_pipeline, "ONE_SHOT_BYTES", one_shot_bytes):
        yield
