"""Features that gloo has no call for: detecting closed connections, closing its own, and waiting in slices.

The first two are receives that no peer answers, with reserved tags. gloo refuses to begin a receive on a closed
connection, and a receive that times out closes every connection of this process in the group
(gloo/transport/tcp/unbound_buffer.cc, `waitRecv`), as `Work.abort` does on NCCL but not on gloo. Peers then notice it
within milliseconds, in any wait.

With TORCH_GLOO_LAZY_INIT a receive connects first, which blocks if the peer is absent. Nothing is probed or closed
then: ranks that wait for a lost peer notice it, and an aborted survivor is noticed by its status (`failure`).

gloo does not end all transfers on a closed connection. It forgets a part that was being written when the peer closed
(`Pair::signalException` passes over it), so a worker thread of the process group waits for it until the group's own
timeout, half an hour by default; and the group's destructor waits for that thread (`outlive`).

Sends and receives accept host memory only: they pass its address to the socket (`ProcessGroupGloo::send`, `recv`). Of
the collectives, broadcast, all-gather, all-to-all, gather and scatter copy a GPU's tensors to the host themselves.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fused_tp.core.pending import start_thread

AT_ONCE = timedelta(milliseconds=1)  # for torch, 0 means "no timeout"
_PROBE_TAG, _CLOSE_TAG = 1_937_006_961, 1_937_006_962
_END_SECONDS = 0.3  # the end of a work is visible within a millisecond if the machine is not busy
_CLOSED_HERE = "Application timeout"  # gloo's message for a connection that a timeout of this process has closed


def closed_peers(group: dist.ProcessGroup) -> list[int]:
    """Group ranks that have died, or have closed their connection to this process. Never waits.

    A connection that this process has closed shows nothing about its peer, which is then not included. Each call leaves
    a receive of one byte pending with every live peer, which costs gloo some 100 bytes.
    """
    return [rank for rank in _peers(group) if _has_closed(group, rank)]


def close_connections(group: dist.ProcessGroup) -> None:
    """Close this process's connections in `group`, which ends all transfers there, here and on all peers."""
    for rank in _peers(group):
        # The timeout of the first receive on an open connection closes all, and the rest fail at once.
        with suppress(RuntimeError):
            _receive(group, rank, _CLOSE_TAG).wait(AT_ONCE)


def outlive(group: dist.ProcessGroup, works: Sequence[Any]) -> bool:
    """Keep `group` until the process exits if some of its collectives `works` do not end, as they should by now.

    Otherwise the owner of the last reference, `destroy_process_group` or a traceback, would wait for gloo's timeout.
    """
    deadline = time.perf_counter() + _END_SECONDS
    while not all(work.is_completed() for work in works):
        if time.perf_counter() > deadline:
            # A module-level list is not enough: the interpreter frees it, with its content, at exit.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            return True
        time.sleep(0.001)  # a thread of gloo has to wake up first, without a notification
    return False


def serves_cpu(group: dist.ProcessGroup) -> bool:
    """True if gloo moves the group's CPU tensors."""
    return not {"gloo", "cpu:gloo"}.isdisjoint(dist.get_backend_config(group).split(","))


def _peers(group: dist.ProcessGroup) -> list[int]:
    if os.environ.get("TORCH_GLOO_LAZY_INIT", "0").lower() in ("1", "y", "yes", "t", "true"):
        return []
    return [rank for rank in range(group.size()) if rank != group.rank()]


def _has_closed(group: dist.ProcessGroup, rank: int) -> bool:
    try:
        _receive(group, rank, _PROBE_TAG)
    except RuntimeError as error:
        return _CLOSED_HERE not in str(error)
    return False


def _receive(group: dist.ProcessGroup, rank: int, tag: int) -> Any:
    # Not dist.irecv, which refuses a group that has been destroyed.
    return group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], rank, tag)


# -- messages from and to a GPU, through the host ----------------------------------------------------------------------


def on_host(x: Tensor) -> Tensor:
    """Copy `x` to host memory, complete on return, as the current stream leaves it."""
    host = host_room(x)
    host.copy_(x, non_blocking=x.is_cuda)
    if x.is_cuda:
        # Synchronizes this stream only: others may wait for data that peers have yet to send.
        torch.cuda.current_stream(x.device).record_event().synchronize()
    return host


def host_room(like: Tensor) -> Tensor:
    """Host memory for the bytes of `like`; pinned if `like` is on a GPU, so that copies run on the stream."""
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)


def from_host(host: Tensor, out: Tensor) -> None:
    """Copy received data into `out` on the current stream; torch keeps pinned `host` alive until the copy is done."""
    out.copy_(host, non_blocking=out.is_cuda)


# -- sends and receives, waited for in slices --------------------------------------------------------------------------

_EXIT_SECONDS = 0.5  # longest wait at exit for a thread that waits in gloo


class Messages:
    """Works that are waited for together, within `seconds` from their first wait.

    Args:
        works: each with the group rank at its other end. Receives first: they report closed connections more reliably.
        seconds: longest wait, after which gloo closes the connections of the group.

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
        """The other end of the work that is waited for now; works behind it may have ended long ago."""
        return next((peer for peer, _ in self._left), None)

    def wait_for(self, seconds: float) -> bool:
        """True once they have ended; waits no longer than `seconds`. Raises the error that one of them ended with."""
        if not self._begun and self._left:
            self._begun = True
            _waiter().put(self)
        ended = self._ended.wait(seconds)
        if self._error is not None:
            raise self._error
        return ended

    def run(self) -> None:
        """Wait for the works one after the other, on the calling thread."""
        deadline = time.perf_counter() + self._seconds
        try:
            while self._left:
                self._left[0][1].wait(max(timedelta(seconds=deadline - time.perf_counter()), AT_ONCE))
                del self._left[0]
        except BaseException as error:  # any kind: memory that was not received must not pass for data
            self._error = error.with_traceback(None)  # its frame references this object, and with it the tensors
        finally:
            self._ended.set()


class _Waiter:
    """A thread that waits for messages, one op at a time. It is not reused while its messages have not ended."""

    def __init__(self) -> None:
        self._next: SimpleQueue[Messages | None] = SimpleQueue()
        # A daemon, so that the process may exit while it waits.
        thread = Thread(target=self._run, name="fused_tp messages", daemon=True)
        start_thread(thread)
        _threads.add(thread)

    def put(self, messages: Messages | None) -> None:
        """Wait for `messages` next; None ends the thread."""
        self._next.put(messages)

    def _run(self) -> None:
        while (messages := self._next.get()) is not None:
            messages.run()
            del messages  # releases the tensors
            _idle.append(self)


_idle: list[_Waiter] = []
_threads: weakref.WeakSet[Thread] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End the waiting threads: one that returns from torch while the interpreter exits would abort the process."""
    while _idle:
        _idle.pop().put(None)
    for thread in list(_threads):
        thread.join(_EXIT_SECONDS)


os.register_at_fork(after_in_child=_idle.clear)  # its threads exist in the parent only


def _waiter() -> _Waiter:
    """An idle waiter, or a new one if there is none."""
    try:
        return _idle.pop()
    except IndexError:
        return _Waiter()
