"""A group's store, asked so that every question ends: torch's own block for ever once the host of the store is stopped.

A thread asks, and is left behind where it has no answer in time. Until it has come back nothing else is asked: the
others would only queue behind it.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from threading import TIMEOUT_MAX, Thread
from typing import TypeVar

import torch.distributed as dist

from fused_tp.runtime.group import Group, GroupSlot

T = TypeVar("T")

ANSWER_SECONDS = 2.0  # what is told and asked on the way to an error waits no longer

_threads: weakref.WeakSet[Thread] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """A thread that still calls torch while the interpreter goes away ends the process with an abort."""
    deadline = time.perf_counter() + 1.0
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.perf_counter()))


class NoAnswer(RuntimeError):
    """The store has not answered in time."""


class BoundedStore:
    """Asks `store`, as `BoundedStore(store).ask(lambda store: store.get(key), seconds)`."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._left: Thread | None = None  # the thread that had no answer in time

    def ask(self, question: Callable[[dist.Store], T], seconds: float = ANSWER_SECONDS) -> T:
        """What `question(store)` returns or raises.

        Raises:
            NoAnswer: it has not within `seconds`, or an earlier one has not yet.
        """
        if self._left is not None and self._left.is_alive():
            raise NoAnswer("An earlier question has not been answered yet.")
        answer: Future[T] = Future()

        def ask() -> None:
            try:
                answer.set_result(question(self._store))
            except Exception as error:
                answer.set_exception(error)

        thread = Thread(target=ask, name="fused_tp store", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads may be had, or the interpreter is shutting down
            raise NoAnswer(f"There is no thread to ask: {error}.") from error
        _threads.add(thread)
        thread.join(min(seconds, TIMEOUT_MAX))
        if not answer.done():
            self._left = thread
            raise NoAnswer(f"No answer within {seconds:g} s.")
        return answer.result()


def _store_of(group: Group) -> BoundedStore:
    assert group.process_group is not None
    return BoundedStore(dist.distributed_c10d._get_process_group_store(group.process_group))


STORES: GroupSlot[BoundedStore] = GroupSlot(_store_of)
