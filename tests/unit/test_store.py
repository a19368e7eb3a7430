"""The group's store and its status board when the store's host is stopped, slow or dead."""

from __future__ import annotations

import threading
import time
from functools import partialmethod
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from fused_tp.backends.shared_memory import shm
from fused_tp.core import failure
from fused_tp.core import store as store_module
from fused_tp.core.errors import CollectiveTimeoutError, FusedTPError, PeerLostError
from fused_tp.core.failure import RankStatus, StatusBoard, describe_late_ranks
from fused_tp.core.group import resolve_group
from fused_tp.core.store import StoreWithTimeout, exchange
from tests.distributed.shm_tools import with_store
from tests.workers import run_ranks

CALLS = ("add", "set", "get", "check", "wait")


class FaultyStore(dist.Store):
    """Wraps `store` as if its host did not answer until `answers` is set, and were dead for the calls in `dead`."""

    def __init__(self, store: dist.Store | None = None, dead: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._store = dist.HashStore() if store is None else store
        self._dead = dead
        self.answers = threading.Event()
        self.asked = 0
        if dead:
            self.answers.set()

    def _ask(self, call: str, *args: Any) -> Any:
        self.asked += 1
        if call in self._dead:
            raise RuntimeError("Connection reset by peer")
        assert self.answers.wait(60)
        return getattr(self._store, call)(*args)

    add, set, get = partialmethod(_ask, "add"), partialmethod(_ask, "set"), partialmethod(_ask, "get")
    check, wait = partialmethod(_ask, "check"), partialmethod(_ask, "wait")


# ---- the board -------------------------------------------------------------------------------------------------------

WAITING = RankStatus(1, ["all_reduce"], 0.5)
FAILED = RankStatus(1, ["all_reduce"], 0.5, has_failed=True, error=PeerLostError())


def test_hesitating_store_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "STORE_TIMEOUT_SECONDS", 0.1)
    shared = dist.HashStore()
    other, store = StatusBoard(shared, "name", 1, 2), FaultyStore(shared)
    board = StatusBoard(store, "name", 0, 2)
    board.post(WAITING)
    assert board.read() == {} and not board.is_answering, "it does not know which group it belongs to"
    store.answers.set()
    other.post(FAILED)
    assert set(until_it_answers(board)) == {1} and board.has_failure()
    store.answers.clear()
    board.post(WAITING)
    assert not board.is_answering
    store.answers.set()
    assert set(until_it_answers(board)) == {0, 1}
    assert set(other.read()) == {0, 1}, "both are on the board of the same group"


def until_it_answers(board: StatusBoard) -> dict[int, RankStatus]:
    deadline = time.perf_counter() + 10.0
    while time.perf_counter() < deadline:
        statuses = board.read()
        if board.is_answering:
            return statuses
        time.sleep(0.01)
    raise AssertionError("the store answers, the board does not")


@pytest.mark.parametrize(
    "store",
    [
        FaultyStore(),  # stopped: accepts connections and never answers
        FaultyStore(dead=("add",)),  # the store may have counted the add, so a guessed number could be another group's
    ],
)
def test_board_without_a_number_stays_blank_and_asks_once(store: FaultyStore) -> None:
    begun = time.perf_counter()
    board = StatusBoard(store, "name", 0, 2)
    board.post(FAILED)
    assert not board.has_failure() and board.read() == {} and board.read_until(bool, 5.0) == {}
    assert store.asked == 1 and time.perf_counter() - begun < 4.0 and not board.is_answering


def test_no_thread_to_ask_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    board = StatusBoard(dist.HashStore(), "name", 0, 2)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("can't start new thread")))
        board.post(WAITING)
        assert not board.has_failure() and board.read() == {} and not board.is_answering
    board.post(WAITING)
    assert board.read()[0].call == 1 and board.is_answering


def test_statuses_of_an_earlier_group_of_the_name_are_not_read() -> None:
    store = dist.HashStore()
    first = StatusBoard(store, "name", 0, 2)
    first.post(FAILED)
    assert first.has_failure() and first.read()[0].op_of_call(1) == "all_reduce"
    second = StatusBoard(store, "name", 0, 2)
    assert not second.has_failure() and second.read() == {}


def test_late_ranks_in_a_sentence() -> None:
    waiting = RankStatus(5, ["all_gather", "all_reduce"], 9.0, has_failed=True)
    behind = RankStatus(4, ["all_gather"], 3.0)
    only_now = RankStatus(5, ["all_reduce"], 0.3, has_failed=True)  # has just arrived, on a busy machine

    def said(statuses: dict[int, RankStatus], ranks: list[int], op: str) -> str:
        late, rest = describe_late_ranks(statuses, ranks, 5, op)
        return str(CollectiveTimeoutError("{op}" + rest, op="op", missing=late)).removeprefix("op")

    assert said({1: waiting, 2: only_now}, [1, 2], "all_reduce") == " for rank 2, which had not arrived."
    assert said({1: waiting, 2: behind}, [1, 2, 3], "all_reduce") == (
        " for ranks 2 (last heard of at call 4, all_gather) and 3, which had not arrived."
    )
    assert said({1: waiting}, [1], "broadcast").startswith(
        ", though all ranks had arrived. But rank 1's call 5 is all_reduce, not broadcast: all ranks"
    )
    assert "the data did not arrive" in said({1: waiting}, [1], "all_reduce")


# ---- exchanges -------------------------------------------------------------------------------------------------------

# Calls that find the host dead, or None if it is stopped; the error that exchanges raise then, and its message.
HOSTS: dict[str, tuple[tuple[str, ...] | None, type[FusedTPError], str]] = {
    "stopped": (None, CollectiveTimeoutError, "answered within 0.3 s (FUSED_TP_TIMEOUT)"),
    "died after this rank's part": (("wait", "get", "check"), CollectiveTimeoutError, "is gone"),
    "dead": (CALLS, PeerLostError, "its value in {op}. Error of the store: Con"),
}


def exchange_over(group: Any, host: str) -> list[str]:
    dead, kind, _ = HOSTS[host]
    said = []
    with mock.patch.object(store_module, "STORE_TIMEOUT_SECONDS", 0.1):
        for meet in (lambda described: exchange(described, "names", "mine"), shm._create_transport):
            store = FaultyStore(dead=dead or ())
            described, begun = with_store(resolve_group(group), store), time.perf_counter()
            with pytest.raises(kind) as caught:
                meet(described)
            assert time.perf_counter() - begun < 4.0
            said.append(str(caught.value))
            with pytest.raises(FusedTPError, match="unusable since an exchange between its ranks failed"):
                exchange(described, "names", "mine")
            store.answers.set()
    return said


@pytest.mark.parametrize("host", list(HOSTS))
def test_exchange_over_a_store_whose_host(host: str) -> None:
    (said,) = run_ranks(1, exchange_over, host, env={"FUSED_TP_TIMEOUT": "0.3"})
    for sentence, op in zip(said, ("names", "the shared-memory rendezvous"), strict=True):
        assert HOSTS[host][2].format(op=op) in sentence and "did not" not in sentence, sentence


def test_deadline_longer_than_a_thread_can_wait() -> None:
    assert StoreWithTimeout(dist.HashStore()).request(lambda store: store.add("count", 1), 1e12) == 1
