"""Every schedule for GPUs: ranks are processes, which share GPUs if there are not enough.

The checks are those of the tests with doubles of NCCL and of the CUDA driver (tests/distributed) and of the public ops.
Several NCCL ranks on one GPU require NCCL 2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1, which NCCL calls experimental.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fused_tp.backends.registry import SCHEDULES
from fused_tp.cli.tune import CHECKED_SIZES
from fused_tp.core.group import resolve_group
from fused_tp.ops.verify import verify
from tests.distributed import test_copy_engine_schedule as engine_checks
from tests.distributed.schedule_cases import at_random, every_method, torch_ops
from tests.distributed.test_nccl_pipeline import movements_case
from tests.distributed.test_tp_ops import all_cases
from tests.gpu.on_device import PATIENCE, OnDevice, device_of, environment, in_graph, public_ops_on, unwrapped, why_not
from tests.native.doubles.libraries import doubles
from tests.workers import fresh_ranks

pytestmark = pytest.mark.gpu

WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 4])
BETWEEN_RANKS = pytest.mark.parametrize("world_size", [2, 4])
WITHOUT_SWITCH = ["one_shot", "two_shot", "fused_kernel", "nccl_pipeline", "copy_engine", "symm_mem"]


def schedule_of(group: Any, name: str, device: torch.device) -> tuple[Any, Callable[[], None]]:
    """Make a schedule and run its first call, with the setup; return it and the function that raises its failures."""
    schedule: Any = SCHEDULES[name].make(resolve_group(group), device, None)
    if device.type == "cuda":
        with mock.patch.dict(os.environ, FUSED_TP_TIMEOUT=PATIENCE):
            x = torch.ones(8, 8, device=device)
            schedule.matmul_all_reduce([(x, x)], None).cpu()
            dist.barrier(group)
    return schedule, getattr(getattr(schedule, "_kernels", None), "raise_if_call_failed", lambda: None)


def on_schedule(group: Any, kind: str, name: str, case: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run `case` on a schedule's proxy; return its result, or why these ranks cannot run it."""
    device = device_of(dist.get_rank(group), kind)
    with doubles(name if kind == "cpu" else ""), torch_ops(name if kind == "cpu" else ""):
        reason = why_not(group, name, device) if kind != "cpu" else None
        if reason is not None:
            return reason
        schedule, raise_failure = schedule_of(group, name, device)
        if case is in_graph:
            return in_graph(group, schedule, device, raise_failure)
        if case is movements_case:
            return case(OnDevice(schedule.transport, device), *args)

        def proxy_of(group: Any) -> OnDevice:
            made, raise_failure = schedule_of(group, name, device)
            return OnDevice(made, device, raise_failure)

        with mock.patch.object(engine_checks, "schedule_of", proxy_of):
            return case(OnDevice(schedule, device, raise_failure), *args)


def on_gpus(world_size: int, name: str, case: Callable[..., Any], *args: Any, kind: str) -> list[Any]:
    how = {"timeout": 300, "env": environment(world_size)}
    return unwrapped(fresh_ranks(world_size, on_schedule, kind, name, case, args, **how))


@pytest.mark.parametrize(
    ("name", "world_size", "dtype"),
    [
        *(("copy_engine", 1, torch.float32), ("copy_engine", 2, torch.bfloat16), ("copy_engine", 4, torch.float16)),
        *(("nccl_pipeline", size, dtype) for size in (1, 2, 4) for dtype in (torch.float32, torch.bfloat16)),
        *(("symm_mem", 2, torch.bfloat16), ("symm_mem", 4, torch.float32), ("symm_mem", 4, torch.bfloat16)),
    ],
)
def test_every_method(name: str, world_size: int, dtype: torch.dtype, kind: str = "cuda") -> None:
    # torch's ops round intermediate sums to bfloat16; a switch adds in another order.
    case = partial(every_method, exact=False) if name == "symm_mem" else every_method
    on_gpus(world_size, name, case, dtype, kind=kind)


@pytest.mark.parametrize("name", ["copy_engine", "nccl_pipeline", "symm_mem"])
@BETWEEN_RANKS
def test_many_calls_at_a_random_pace(name: str, world_size: int, kind: str = "cuda") -> None:
    on_gpus(world_size, name, at_random, 3, 60, kind=kind)


@pytest.mark.parametrize("name", ["copy_engine", "nccl_pipeline"])
@WORLD_SIZES
def test_graphs_and_calls_between_replays(name: str, world_size: int, kind: str = "cuda") -> None:
    on_gpus(world_size, name, in_graph, kind=kind)


def test_torchs_ops_in_graphs(kind: str = "cuda") -> None:
    """Runs on two ranks, whose sums are rounded only once."""
    on_gpus(2, "symm_mem", in_graph, kind=kind)


@WORLD_SIZES
def test_movements_of_nccl(world_size: int, kind: str = "cuda") -> None:
    on_gpus(world_size, "nccl_pipeline", movements_case, kind=kind)


def test_a_rank_that_is_late_to_copy_engines_ends_the_call_on_all(kind: str = "cuda") -> None:
    said = on_gpus(3, "copy_engine", engine_checks.failures, kind=kind)
    for number, op in enumerate(engine_checks.OPS):
        texts = [one[number] for one in said]
        assert any(f"{op}, call " in text and "of rank 2" in text for text in texts[:2]), texts


def public_ops(group: Any, kind: str, name: str, dtype_name: str) -> str:
    """Check forward and gradients of the public ops on one schedule against fp64; return '' or why it cannot run."""
    device = device_of(dist.get_rank(group), kind)
    reason = why_not(group, name, device)
    if reason is not None:
        return reason
    with mock.patch.dict(os.environ, FUSED_TP_SCHEDULE=name), public_ops_on(device):
        all_cases(group, dtype_name, False)
    dist.barrier(group)
    return ""


@BETWEEN_RANKS
@pytest.mark.parametrize("name", WITHOUT_SWITCH)
def test_forward_and_gradients_of_the_public_ops(name: str, world_size: int) -> None:
    env = environment(world_size)
    unwrapped(fresh_ranks(world_size, public_ops, "cuda", name, "bfloat16", timeout=400, env=env))


def verified(group: Any, folder: str, dtype: torch.dtype) -> Any:
    """Problems that `fused-tp tune` finds, by op and schedule; or why these ranks cannot run it."""
    device = device_of(dist.get_rank(group), "cuda")
    if not torch.cuda.is_available():
        return "there is no GPU"
    with mock.patch.dict(os.environ, FUSED_TP_AUTOTUNE=folder):
        found = [*verify(group, device, dtype, CHECKED_SIZES, num_calls=20)]
    return {f"{verdict.op} on {verdict.schedule}": verdict.problem for verdict in found if verdict.problem}


@BETWEEN_RANKS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_tune_checks(world_size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    how = {"timeout": 600, "env": environment(world_size)}
    for problems in unwrapped(fresh_ranks(world_size, verified, str(tmp_path), dtype, **how)):
        assert problems == {}
