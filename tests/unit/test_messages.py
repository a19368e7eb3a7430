"""Sends and receives are waited for in slices, and a process group that gloo cannot end is not ended."""

from __future__ import annotations

import sys
import threading
import time
from datetime import timedelta
from typing import Any

import pytest

from fused_tp.transport import gloo_connections, messages
from fused_tp.transport.gloo_connections import outlive
from fused_tp.transport.messages import Messages


class Work:
    """Ends when it is told to, or at the timeout of its wait."""

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
    both = Messages([(1, first), (2, second)], 60.0)
    assert not both.wait_for(0.01)
    peers = [both.peer]
    first.end.set()
    while peers[-1] == 1:
        assert not both.wait_for(0.01)
        peers.append(both.peer)
    second.end.set()
    assert both.wait_for(60.0) and both.wait_for(0.0)
    peers.append(both.peer)
    assert list(dict.fromkeys(peers)) == [1, 2, None]


@pytest.mark.parametrize("error", [MemoryError("no room"), OverflowError("too long")])
def test_what_has_ended_with_any_error_has_not_ended_well(error: BaseException) -> None:
    def wait(timeout: timedelta) -> None:
        raise error

    work = Work()
    work.wait = wait  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(type(error)):
            Messages([(1, work)], 60.0).wait_for(60.0)


def test_nothing_to_wait_for_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_waiter", None)
    assert Messages([], 60.0).wait_for(0.0)


def test_messages_share_one_timeout() -> None:
    begun = time.perf_counter()
    both = Messages([(1, Work()), (2, Work())], 0.3)
    with pytest.raises(RuntimeError, match="Timed out"):
        both.wait_for(60.0)
    assert time.perf_counter() - begun < 0.55
    with pytest.raises(RuntimeError, match="Timed out"):
        both.wait_for(0.0)


def waiting_threads() -> int:
    return sum(thread.name == "fused_tp messages" for thread in threading.enumerate())


def test_a_thread_serves_one_op_after_the_other_and_none_that_is_stuck() -> None:
    stuck, end = Messages([(1, work := Work())], 60.0), work.end
    assert not stuck.wait_for(0.0)
    assert Messages([(1, Work(ended=True))], 60.0).wait_for(60.0)
    while not messages._idle:  # its thread has to come back
        time.sleep(0.001)
    before = waiting_threads()
    for _ in range(20):
        assert Messages([(1, Work(ended=True))], 60.0).wait_for(60.0)
        while not messages._idle:
            time.sleep(0.001)
    assert waiting_threads() == before
    end.set()
    assert stuck.wait_for(60.0)


class Group:
    """Counts nothing but its references."""


@pytest.mark.parametrize(("works", "kept"), [([], False), ([Work(ended=True)], False), ([Work(), Work(True)], True)])
def test_a_group_is_kept_only_if_its_collectives_do_not_end(
    monkeypatch: pytest.MonkeyPatch, works: list[Work], kept: bool
) -> None:
    monkeypatch.setattr(gloo_connections, "_END_SECONDS", 0.02)
    group: Any = Group()
    before = sys.getrefcount(group)
    assert outlive(group, works) == kept
    assert sys.getrefcount(group) - before == kept
