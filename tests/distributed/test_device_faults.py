"""A rank that stalls, stops or dies in a device kernel: the others raise in time, say who, and nothing is wrong unsaid.

The kernels run in their CPU build. Ranks that only come late are those of the pool: their kernels are made new for each
test, and what a failure leaves unusable goes with them.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fused_tp
from benchmarks.local_ranks import LocalRank, run_local
from fused_tp.runtime.availability import Availability
from fused_tp.runtime.errors import CollectiveTimeoutError, FusedTPError, PeerLostError
from fused_tp.runtime.group import resolve_group
from fused_tp.schedules import registry
from fused_tp.schedules.device import DeviceSchedule
from fused_tp.transport.device_collectives import DeviceCollectives
from fused_tp.transport.symm_mem import group_memory
from tests.distributed.device_tools import CPU, device_ranks, forced, fresh_device_ranks
from tests.native_build import cpu_device_library, use_library

pytestmark = pytest.mark.full

X = torch.ones(40, 24)
NOTICE_SECONDS = 4.0  # where many processes share a core

CALLS: dict[str, Callable[[DeviceCollectives], Any]] = {
    "one_shot": lambda device: device.all_reduce(X, "one_shot"),
    "two_shot": lambda device: device.all_reduce(X, "two_shot"),
    "reduce_scatter": lambda device: device.reduce_scatter(X),
    "all_gather": lambda device: device.all_gather(X),
    "all_to_all": lambda device: device.sequence_to_heads(X.view(1, 40, 6, 4)),
    "rms_norm": lambda device: device.all_reduce_rms_norm(X, X, X[0], 1e-6, "two_shot"),
}


@pytest.fixture(autouse=True)
def no_library_stays() -> Iterator[None]:
    """Ranks that are threads have set one in this very process."""
    yield
    use_library(None)


def own_kernels(group: Any) -> DeviceCollectives:
    """Kernels that nothing else of the group knows of."""
    memory = group_memory(resolve_group(group), CPU)
    assert not isinstance(memory, Availability), memory
    return DeviceCollectives(memory)


def late_ranks(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    return device_ranks(world_size, fn, *args, env={"FUSED_TP_TIMEOUT": "60"}, timeout=60)


def too_late(group: Any) -> str:
    """Rank 1 comes when the others have given up: it hears of it, and its result is not taken for one."""
    device = own_kernels(group)
    rank = group.rank()
    x = torch.ones(4000)
    device.all_reduce(x, "two_shot")
    dist.barrier(group)
    if rank == 1:
        dist.barrier(group)
    else:
        os.environ["FUSED_TP_TIMEOUT"] = "0.5"
    out = torch.zeros_like(x)
    begun = time.monotonic()
    with pytest.raises(CollectiveTimeoutError) as raised:
        device.all_reduce(x, "two_shot", out=out)
    assert time.monotonic() - begun < 10  # and not the 60 seconds that rank 1 would wait
    if rank != 1:
        dist.barrier(group)
    assert bool(out.isnan().any()) and bool((out.isnan() | (out == 3)).all())
    return str(raised.value)


def test_a_rank_that_comes_too_late_raises_too_and_what_is_missing_is_nan() -> None:
    sentences = late_ranks(3, too_late)
    assert "gave up" in sentences[1]
    for rank in (0, 2):
        assert "rank 1 had not begun the call" in sentences[rank]


def stopped(group: Any) -> str:
    """Rank 1 is stopped somewhere in its calls, and goes on long after."""
    rank = group.rank()
    device = own_kernels(group)
    device.all_reduce(torch.ones(1000))
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid(), group=group)
    timers = [
        threading.Timer(when, os.kill, (pids[1], s)) for when, s in ((0.2, signal.SIGSTOP), (1.5, signal.SIGCONT))
    ]
    for timer in timers if rank == 0 else []:
        timer.start()
    os.environ["FUSED_TP_TIMEOUT"] = "0.5"
    with pytest.raises(CollectiveTimeoutError) as raised:
        for call in range(1_000_000):
            x = torch.full((1000,), float(call % 7 + rank))
            assert bool((device.all_reduce(x, "two_shot") == 2 * (call % 7) + 1).all())
    for timer in timers if rank == 0 else []:
        timer.join()
    return str(raised.value)


def test_a_rank_that_is_stopped_by_the_system() -> None:
    for sentence in late_ranks(2, stopped):
        assert "all_reduce, call" in sentence


def dies(group: Any, name: str) -> float:
    device = own_kernels(group)
    CALLS[name](device)
    dist.barrier(group)
    if group.rank() == 1:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    began_last = time.monotonic()
    with pytest.raises(PeerLostError, match="lost rank 1: it has ended"):
        while True:  # rank 1 is killed in one of these, or between two
            began_last = time.monotonic()
            CALLS[name](device)
    took = time.monotonic() - began_last
    with pytest.raises(FusedTPError, match="unusable since an earlier failure"):
        CALLS[name](device)
    return took


@pytest.mark.parametrize("name", ["all_gather", "rms_norm"])
def test_a_rank_that_is_killed_is_noticed_long_before_the_deadline(name: str) -> None:
    outcomes = fresh_device_ranks(3, dies, name, expect_deaths=True)
    assert outcomes[1].died
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.unwrap() < 5


def op_dies(group: Any) -> None:
    """The same behind a public op; afterwards what would go to plain collectives is refused too."""
    x, w = torch.ones(4, 6), torch.ones(5, 6)
    fused_tp.matmul_all_reduce(x, w, group=group)
    dist.barrier(group)
    if group.rank() == 0:
        os._exit(9)
    with pytest.raises(PeerLostError, match="lost rank 0"):
        for _ in range(1000):
            fused_tp.matmul_all_reduce(x, w, group=group)
    schedule = registry._MADE[resolve_group(group)]["one_shot", CPU, None]
    assert isinstance(schedule, DeviceSchedule)
    for argument in (x, x.double()):
        with pytest.raises(FusedTPError, match="unusable since an earlier failure"):
            schedule.all_reduce(argument)


def test_an_op_whose_peer_dies() -> None:
    outcomes = fresh_device_ranks(2, op_dies, env={"FUSED_TP_SCHEDULE": "one_shot"}, expect_deaths=True)
    assert outcomes[0].died
    outcomes[1].unwrap()


@pytest.mark.parametrize("name", list(CALLS))
def test_a_thread_that_does_not_come(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel: the call names the rank, and what was to come from it is NaN, never what was there."""
    use_library(cpu_device_library())

    def ranks(rank: LocalRank) -> None:
        device = DeviceCollectives(rank)
        CALLS[name](device)
        rank.barrier()
        if rank.rank == 0:
            return
        monkeypatch.setenv("FUSED_TP_TIMEOUT", "0.2")
        with mock.patch.object(device._workspaces, "raise_failure"):  # as on a GPU, where a later call raises
            result = CALLS[name](device)
        for out in result if isinstance(result, tuple) else [result]:
            missing = out.view(2, -1)[0] if name in ("all_gather", "all_to_all") else out
            assert bool(missing.isnan().all()), name
        said = r"rank 0 had not begun the call, in 0\.2 s \(FUSED_TP_TIMEOUT\)"
        with pytest.raises(CollectiveTimeoutError, match=said):
            device.raise_if_failed()

    run_local(2, ranks, timeout=30)


def skips_a_batch(group: Any) -> tuple[str, float, list[float]]:
    """Rank 0 raises in a backward when its gather has been launched and its sum has not, and goes on."""
    w, found = torch.ones(8, 6, requires_grad=True), []
    begun = time.perf_counter()
    with forced(group, "two_shot"):
        try:
            for batch in range(4):
                x = torch.full((4, 6), 10.0**batch, requires_grad=True)
                y = fused_tp.all_gather_matmul(x, w, group=group) * 10.0**batch
                if dist.get_rank(group) == 0 and batch == 1:
                    broken = mock.patch.object(DeviceSchedule, "matmul_reduce_scatter", side_effect=MemoryError)
                    with broken, pytest.raises(MemoryError):
                        y.sum().backward()
                    continue
                found += [g.flatten()[0].item() for g in torch.autograd.grad(y.sum(), (x, w))]
        except FusedTPError as error:
            return str(error), time.perf_counter() - begun, found
    return "", 0.0, found


def raises_between_tensors(group: Any) -> str:
    """Rank 0 raises when q is on its way to the ranks that have its heads, and k and v are not."""
    q = torch.ones(1, 4, 2, 4)
    with forced(group, "two_shot"):
        if dist.get_rank(group) == 0:
            real = DeviceCollectives.sequence_to_heads
            moves = iter((real, mock.Mock(side_effect=MemoryError)))
            once = mock.patch.object(DeviceCollectives, "sequence_to_heads", lambda device, x: next(moves)(device, x))
            with once, pytest.raises(MemoryError):
                fused_tp.ulysses_attention(q, q, q, group=group)
        with pytest.raises(FusedTPError) as raised:
            fused_tp.ulysses_attention(q, q, q, group=group)
        return str(raised.value)


def kernels_fail(group: Any) -> tuple[str, str]:
    """Those of rank 0, while rank 1 waits for its message; what rank 1 then says of its own kernels."""
    with forced(group, "two_shot") as schedule:
        schedule.all_reduce(X)
        transport, outside = schedule.fallback.transport, torch.ones(4)
        if dist.get_rank(group) == 0:
            schedule.device.abort("the kernels of rank 0 have failed.")
            return "", ""
        begun = time.perf_counter()
        with pytest.raises(PeerLostError) as heard, schedule.abort_scope("op"):
            transport.shift("shift", outside[:0], outside, 1).wait()
        assert time.perf_counter() - begun < NOTICE_SECONDS
        for run in (lambda: schedule.all_reduce(X), lambda: schedule.device.all_reduce(X, "two_shot")):
            with pytest.raises(FusedTPError, match="unusable since an earlier failure") as refused:
                run()
        return str(heard.value), str(refused.value)


def test_who_waits_for_messages_of_a_rank_whose_kernels_failed_hears_of_it() -> None:
    """And its own kernels, which have not failed, are given up with the messages."""
    outcomes = fresh_device_ranks(2, kernels_fail, env={"FUSED_TP_TIMEOUT": "60"})
    heard, refused = outcomes[1].unwrap()
    assert "rank 0 has given the group up" in heard and "the kernels of rank 0 have failed." in heard
    assert "The group's kernels are unusable" in refused and "the kernels of rank 0 have failed." in refused


def between_kernels(_: Any) -> tuple[tuple[str, float, list[float]], str]:
    return skips_a_batch(dist.new_group([0, 1])), raises_between_tensors(dist.new_group([0, 1]))


def test_a_rank_that_raises_between_two_kernels_and_goes_on_gives_nobody_wrong_numbers() -> None:
    ((own, _, first), heads), ((said, seconds, second), _) = (
        outcome.unwrap() for outcome in fresh_device_ranks(2, between_kernels, env={"FUSED_TP_TIMEOUT": "60"})
    )
    assert "is unusable since an earlier failure: all_gather_matmul_backward (call 0 of group" in own
    assert "raised MemoryError half-way" in own
    assert "reduce_scatter, call" in said and "waited for tile 0 of rank 0; rank 0 gave up" in said, said
    assert "raised MemoryError half-way" in said and seconds < NOTICE_SECONDS
    assert first == second == [16.0, 8.0]
    assert "unusable since an earlier failure: ulysses_attention raised MemoryError half-way" in heads
