"""Ranks on GPUs that are late, are stopped or die: the cases of tests/faults.py on the schedules for GPUs."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests import faults
from tests.gpu.on_device import device_of, environment, unwrapped, why_not
from tests.native.doubles.libraries import DOUBLES
from tests.workers import Outcome, fresh_ranks

pytestmark = pytest.mark.gpu

NOTICE_SECONDS = 8.0  # includes the time that NCCL takes to abort


def on_gpus(group: Any, kind: str, case: str, transport: str, *args: Any) -> Any:
    """Run a case; return its result, or why these ranks cannot run it."""
    device = device_of(dist.get_rank(group), kind)
    if device.type != "cpu" and (reason := why_not(group, transport, device)) is not None:
        return reason
    with mock.patch.object(faults, "DEVICE", device), mock.patch.object(faults, "NOTICE_SECONDS", NOTICE_SECONDS):
        return getattr(faults, case)(group, transport, *args)


def failing(kind: str, case: str, *args: Any) -> list[Outcome]:
    outcomes = fresh_ranks(3, on_gpus, kind, case, *args, timeout=300, env=environment(3), expect_deaths=True)
    unwrapped(outcomes[:1])
    return outcomes


@pytest.mark.parametrize("transport", list(DOUBLES))
def test_late_rank_is_a_timeout_that_names_it(transport: str, kind: str = "cuda") -> None:
    faults.check_late([outcome.unwrap() for outcome in failing(kind, "late", transport, faults.MATMULS)])


@pytest.mark.parametrize("transport", list(DOUBLES))
def test_stopped_or_killed_rank_is_noticed(transport: str, kind: str = "cuda") -> None:
    faults.check_stopped_then_killed(failing(kind, "stopped_then_killed", transport, faults.MATMULS, 0.02))
