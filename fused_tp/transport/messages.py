"""Sends and receives under way, waited for in slices.

gloo can wait for one only with a timeout that closes the connections when it passes, and does not say of itself whether
one has ended. So a thread waits for them, and whoever wants to look around meanwhile waits for that thread.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

_AT_ONCE = timedelta(milliseconds=1)  # 0 is "no timeout" to torch
_END_SECONDS = 0.5  # at exit, for a thread that waits: where it waits on, so does gloo


class Messages:
    """Works that end together, within `seconds` from their first wait.

    Args:
        works: each with the group rank at its other end. Receives first: of a closed connection they tell more surely.
        seconds: how long at most; gloo then closes the connections of the group.

    Example:
        messages = Messages([(1, dist.irecv(x, 1)), (2, dist.isend(y, 2))], 60.0)
        while not messages.wait_for(0.5):
            look_around()
    """

    def __init__(self, works: Sequence[tuple[int, Any]], seconds: float) -> None:
        self._left = list(works)
        self._seconds = seconds
        self._ended = Event()
        self._error: BaseException | None = None
        self._begun = False
        if not works:
            self._ended.set()

    @property
    def peer(self) -> int | None:
        """The rank at the other end of the work that is waited for now; others may have ended long ago."""
        return next((peer for peer, _ in self._left), None)

    def wait_for(self, seconds: float) -> bool:
        """Whether they have ended; waits no longer than `seconds`. Raises what one of them has ended with."""
        if not self._begun and self._left:
            self._begun = True
            _waiter().wait_for(self)
        ended = self._ended.wait(seconds)
        if self._error is not None:
            raise self._error
        return ended

    def run(self) -> None:
        """Wait for one after the other, in whatever thread this is."""
        deadline = time.perf_counter() + self._seconds
        try:
            while self._left:
                self._left[0][1].wait(max(timedelta(seconds=deadline - time.perf_counter()), _AT_ONCE))
                del self._left[0]
        except BaseException as error:  # whatever it is: what has not come must not pass for data
            self._error = error.with_traceback(None)  # whose frame has this, and with it the tensors
        finally:
            self._ended.set()


class _Waiter:
    """A thread that waits for messages, of one op after the other. One whose messages do not end is not used again."""

    def __init__(self) -> None:
        self._next: SimpleQueue[Messages | None] = SimpleQueue()
        # A daemon: the process may end while it waits.
        thread = Thread(target=self._run, name="fused_tp messages", daemon=True)
        _threads.add(thread)
        thread.start()

    def wait_for(self, messages: Messages) -> None:
        self._next.put(messages)

    def _run(self) -> None:
        while (messages := self._next.get()) is not None:
            messages.run()
            del messages  # and with it the tensors
            _idle.append(self)

    def end(self) -> None:
        self._next.put(None)


_idle: list[_Waiter] = []
_threads: weakref.WeakSet[Thread] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """A thread that comes back from torch while the interpreter goes away would end the process with an abort."""
    while _idle:
        _idle.pop().end()
    for thread in list(_threads):
        thread.join(_END_SECONDS)


os.register_at_fork(after_in_child=_idle.clear)  # its threads are the parent's


def _waiter() -> _Waiter:
    """One that is not waiting, new where there is none."""
    try:
        return _idle.pop()
    except IndexError:
        return _Waiter()
