"""Sends and receives are waited for in slices, and a process group that gloo cannot end is not ended."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fused_tp.backends.messages.torch_dist import TorchDist
from fused_tp.core import gloo
from fused_tp.core.failure import RankStatus, StartedCall
from fused_tp.core.gloo import PendingMessages, keep_alive_if_pending


class Work:
    """Fake work that ends when `end` is set; a wait ends at its timeout, too."""

    def __init__(self, ended: bool = False) -> None:
        self.end = threading.Event()
        if ended:
            self.end.set()

    def wait(self, timeout: timedelta) -> None:
        if not self.end.wait(timeout.total_seconds()):
            raise RuntimeError("Timed out waiting")

    def is_completed(self) -> bool:
        return self.end.is_set()


def test_messages_are_waited_for_in_slices() -> None:
    first, second = Work(), Work()
    both = PendingMessages([(1, first), (2, second)], 60.0)
    assert not both.wait_for(0.01)
    peers = [both.awaited_peer]
    first.end.set()
    while peers[-1] == 1:
        assert not both.wait_for(0.01)
        peers.append(both.awaited_peer)
    second.end.set()
    assert both.wait_for(60.0) and both.wait_for(0.0)
    peers.append(both.awaited_peer)
    assert list(dict.fromkeys(peers)) == [1, 2, None]


class Stream:
    """Fake of a GPU's only stream: its work runs when the host waits for it."""

    steps: ClassVar[list[Callable[[], object]]] = []

    def record_event(self) -> Stream:
        return self

    def synchronize(self) -> None:
        while self.steps:
            self.steps.pop(0)()


class OnGpu(Tensor):
    """A CPU tensor that claims to be on a GPU: its non-blocking copies run on the `Stream`."""

    is_cuda = True

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not Tensor.copy_ or not kwargs.get("non_blocking"):
            return super().__torch_function__(func, types, args, kwargs)
        to, source = (x.as_subclass(Tensor) for x in args)
        Stream.steps.append(lambda: to.copy_(source))
        return args[0]


def test_what_a_gpu_sends_and_receives_is_in_the_order_of_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    real = torch.empty
    pinned: list[bool] = []

    def empty(*shape: Any, pin_memory: bool = False, **how: Any) -> Tensor:  # there is no GPU to pin it for
        pinned.append(pin_memory)
        return real(*shape, **how)

    monkeypatch.setattr(torch, "empty", empty)
    x = torch.zeros(4)
    Stream.steps.append(lambda: x.fill_(1.0))  # x is still being computed
    host = gloo.copy_to_host(x.as_subclass(OnGpu))
    assert torch.equal(host, torch.ones(4)) and not Stream.steps
    Stream.steps.append(lambda: x.fill_(2.0))
    Stream().synchronize()
    assert torch.equal(host, torch.ones(4)), "it is a copy"
    # Received data are written after the pending work of the stream and before its next work.
    room, seen = gloo.host_buffer(x.as_subclass(OnGpu)).fill_(3.0), []
    Stream.steps.append(lambda: seen.append(x.clone()))
    gloo.copy_from_host(room, x.as_subclass(OnGpu))
    Stream.steps.append(lambda: seen.append(x.clone()))
    Stream().synchronize()
    assert [one[0].item() for one in seen] == [2.0, 3.0]
    assert pinned == [True, True]


@pytest.mark.parametrize("error", [MemoryError("no room"), OverflowError("too long")])
def test_what_has_ended_with_any_error_has_not_ended_well(error: BaseException) -> None:
    def wait(timeout: timedelta) -> None:
        raise error

    work = Work()
    work.wait = wait  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(type(error)):
            PendingMessages([(1, work)], 60.0).wait_for(60.0)


def test_nothing_to_wait_for_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "_idle_or_new_waiter", None)
    assert PendingMessages([], 60.0).wait_for(0.0)


def test_messages_share_one_timeout() -> None:
    begun = time.perf_counter()
    both = PendingMessages([(1, Work()), (2, Work())], 0.3)
    with pytest.raises(RuntimeError, match="Timed out"):
        both.wait_for(60.0)
    assert time.perf_counter() - begun < 0.55
    with pytest.raises(RuntimeError, match="Timed out"):
        both.wait_for(0.0)


def waiting_threads() -> int:
    return sum(thread.name == "fused_tp messages" for thread in threading.enumerate())


def test_a_thread_serves_one_op_after_the_other_and_none_that_is_stuck() -> None:
    stuck, end = PendingMessages([(1, work := Work())], 60.0), work.end
    assert not stuck.wait_for(0.0)
    assert PendingMessages([(1, Work(ended=True))], 60.0).wait_for(60.0)
    while not gloo._idle_waiters:
        time.sleep(0.001)  # its thread becomes idle without a notification
    before = waiting_threads()
    for _ in range(20):
        assert PendingMessages([(1, Work(ended=True))], 60.0).wait_for(60.0)
        while not gloo._idle_waiters:
            time.sleep(0.001)  # as above
    assert waiting_threads() == before
    end.set()
    assert stuck.wait_for(60.0)


@pytest.mark.parametrize(
    ("gone", "calls", "lost"),
    [
        ({}, {1: 5, 2: 5}, False),
        ({2: 6.0}, {1: 5}, True),
        ({2: 6.0}, {1: 7}, True),  # rank 1 runs further calls already
        ({2: 6.0}, {1: 4}, False),  # rank 1 is late, and may be the only rank waited for
        ({2: 6.0}, {}, False),
        ({2: 2.0}, {1: 5}, False),  # the others may still exchange data
        ({1: 2.0, 2: 2.0}, {}, True),
        ({1: 0.1, 2: 6.0}, {}, False),  # the last data of rank 1 may just have arrived
    ],
)
def test_a_collective_is_lost_when_nobody_is_left_to_wait_for(
    gone: dict[int, float], calls: dict[int, int], lost: bool
) -> None:
    statuses = {rank: RankStatus(call, ["op"], 0.6) for rank, call in calls.items()}
    transport: Any = SimpleNamespace(rank=0, world_size=3, board=SimpleNamespace(read=lambda: statuses))
    assert TorchDist._waits_for_lost_peer(transport, StartedCall("op", 5, 0.0), Work(), gone) == lost


def test_of_messages_only_the_one_that_is_waited_for_can_be_lost() -> None:
    both: Any = PendingMessages([(1, Work()), (2, Work())], 60.0)
    transport: Any = SimpleNamespace()
    for gone, lost in (({1: 2.0}, True), ({1: 0.1}, False), ({2: 9.0}, False)):
        assert TorchDist._waits_for_lost_peer(transport, StartedCall("op", 5, 0.0), both, gone) == lost


class Group:
    """Fake process group, whose references are counted."""


@pytest.mark.parametrize(("works", "kept"), [([], False), ([Work(ended=True)], False), ([Work(), Work(True)], True)])
def test_a_group_is_kept_only_if_its_collectives_do_not_end(
    monkeypatch: pytest.MonkeyPatch, works: list[Work], kept: bool
) -> None:
    monkeypatch.setattr(gloo, "_COMPLETION_SECONDS", 0.02)
    group: Any = Group()
    before = sys.getrefcount(group)
    assert keep_alive_if_pending(group, works) == kept
    assert sys.getrefcount(group) - before == kept
