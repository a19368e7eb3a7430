"""Our NCCL communicator and the pipelines over it: one rank, several on one GPU where NCCL takes that, one on each GPU.

The checks are those made over the doubles of NCCL and CUDA (tests/distributed/test_nccl_pipeline.py).
Several ranks on one GPU take NCCL 2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1, which NCCL calls experimental.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fused_tp.runtime.availability import Availability
from fused_tp.runtime.group import resolve_group
from fused_tp.schedules.nccl_pipeline import NcclPipeline
from fused_tp.transport.nccl import NcclDist, nccl_dist
from tests.distributed import test_nccl_pipeline as checks
from tests.gpu.on_device import PATIENCE, OnDevice, device_of, environment, graph_case, unwrapped
from tests.native_build import use_nccl
from tests.workers import fresh_ranks

pytestmark = pytest.mark.gpu


def start(group: Any, kind: str, libraries: tuple[str, str] | None) -> torch.device:
    if libraries is not None:
        use_nccl(*libraries)
    return device_of(dist.get_rank(group), kind)


def transport_on(group: Any, device: torch.device) -> NcclDist | Availability:
    """The group's communicator, all of what a first call loads being there; or why there is none."""
    deadline = os.environ.get("FUSED_TP_TIMEOUT", PATIENCE)
    with mock.patch.dict(os.environ, FUSED_TP_TIMEOUT=PATIENCE):
        transport = nccl_dist(resolve_group(group), device)
        if isinstance(transport, NcclDist) and device.type == "cuda":
            x = torch.ones(8, 8, device=device)
            NcclPipeline(transport, 2).matmul_all_reduce([(x, x)], None).cpu()
            dist.barrier(group)
    os.environ["FUSED_TP_TIMEOUT"] = deadline
    return transport


@contextmanager
def checks_on(device: torch.device) -> Iterator[None]:
    """What `checks` makes of a group works on `device`."""

    def transport_of(group: Any) -> OnDevice:
        transport = transport_on(group, device)
        assert isinstance(transport, NcclDist), transport
        return OnDevice(transport, device)

    def pipeline(transport: OnDevice, chunks: int | None = None) -> OnDevice:
        return OnDevice(NcclPipeline(transport.target, chunks), device)

    with (
        mock.patch.object(checks, "transport_of", transport_of),
        mock.patch.object(checks, "NcclPipeline", pipeline),
    ):
        yield


def case_on(group: Any, kind: str, libraries: Any, case: str, args: tuple[Any, ...]) -> Any:
    """What a case of the tests over doubles returns; or why these ranks cannot run it."""
    device = start(group, kind, libraries)
    if isinstance(transport := transport_on(group, device), Availability):
        return transport.reason
    with checks_on(device):
        return getattr(checks, case)(group, *args)


def prepare(group: Any, kind: str, libraries: Any) -> Any:
    """(schedule, device, what raises its failures), or why not."""
    device = start(group, kind, libraries)
    transport = transport_on(group, device)
    if isinstance(transport, Availability):
        return transport.reason
    return NcclPipeline(transport, 2), device, lambda: None


WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 4])


@WORLD_SIZES
@pytest.mark.parametrize(
    ("case", "args"),
    [
        *(("schedule_case", (dtype,)) for dtype in ("float32", "bfloat16")),
        ("movements_case", ()),
        ("many_calls_case", ()),
    ],
)
def test_pipelines(world_size: int, case: str, args: tuple[str, ...]) -> None:
    env = environment(world_size)
    unwrapped(fresh_ranks(world_size, case_on, "cuda", None, case, args, timeout=300, env=env))


@WORLD_SIZES
def test_graphs_and_calls_between_replays(world_size: int) -> None:
    unwrapped(fresh_ranks(world_size, graph_case, prepare, "cuda", None, timeout=300, env=environment(world_size)))
