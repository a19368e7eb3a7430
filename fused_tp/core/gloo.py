"""Operations that gloo lacks: detect connections that peers have closed, close connections, and wait with a deadline.

The first two operations start receives with reserved tags, which no peer answers. gloo raises when a receive is started
on a closed connection. A receive that times out closes every connection of this process in the group
(gloo/transport/tcp/unbound_buffer.cc, `waitRecv`); `Work.abort` does this on NCCL, but not on gloo. Peers notice the
closed connection within milliseconds, in any wait.

With TORCH_GLOO_LAZY_INIT a receive opens the connection first, which blocks if the peer is absent. Connections are then
neither probed nor closed: ranks that wait for a lost peer get an error from gloo, and a rank that has aborted is
detected by its published status (`failure`).

gloo does not finish all transfers on a closed connection. It drops a message that was being written when the peer
closed (`Pair::signalException` skips it), so a worker thread of the process group waits for that message until the
group's own timeout, by default half an hour. The group's destructor waits for that thread (`keep_alive_if_pending`).

Sends and receives accept host memory only, because they pass its address to the socket (`ProcessGroupGloo::send`,
`recv`). The collectives broadcast, all-gather, all-to-all, gather and scatter accept GPU tensors and copy them to the
host themselves.
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

IMMEDIATE_TIMEOUT = timedelta(milliseconds=1)  # for torch, 0 means "no timeout"
_PROBE_TAG, _CLOSE_TAG = 1_937_006_961, 1_937_006_962
_COMPLETION_SECONDS = 0.3  # gloo marks a finished work as completed within 1 ms, unless the machine is overloaded
# gloo's message for a connection that a timeout of this process has closed.
_CLOSED_HERE_MESSAGE = "Application timeout"


def closed_peers(group: dist.ProcessGroup) -> list[int]:
    """Return the group ranks that have died or have closed their connection to this process. Never waits.

    Peers whose connection this process has closed itself are not included, because their state is unknown. Each call
    leaves a receive of one byte pending for every live peer, for which gloo allocates about 100 bytes.
    """
    return [rank for rank in _probed_peers(group) if _has_closed(group, rank)]


def close_connections(group: dist.ProcessGroup) -> None:
    """Close this process's connections in `group`, which aborts the group's transfers on this rank and its peers."""
    for rank in _probed_peers(group):
        # The first receive that times out closes all connections; the receives after it then raise immediately.
        with suppress(RuntimeError):
            _receive(group, rank, _CLOSE_TAG).wait(IMMEDIATE_TIMEOUT)


def keep_alive_if_pending(group: dist.ProcessGroup, works: Sequence[Any]) -> bool:
    """Keep `group` alive until the process exits if some of its collectives, `works`, do not complete.

    Returns True if the group is kept alive.

    Otherwise the code that drops the last reference, such as `destroy_process_group`, would run the group's destructor,
    which waits for gloo's timeout.
    """
    deadline = time.perf_counter() + _COMPLETION_SECONDS
    while not all(work.is_completed() for work in works):
        if time.perf_counter() > deadline:
            # A reference from a module-level list would not suffice: the interpreter frees the list at exit.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            return True
        time.sleep(0.001)  # polls, because gloo's threads do not notify when a work completes
    return False


def uses_gloo_on_cpu(group: dist.ProcessGroup) -> bool:
    """True if gloo is the backend of `group` for CPU tensors."""
    return not {"gloo", "cpu:gloo"}.isdisjoint(dist.get_backend_config(group).split(","))


def _probed_peers(group: dist.ProcessGroup) -> list[int]:
    if os.environ.get("TORCH_GLOO_LAZY_INIT", "0").lower() in ("1", "y", "yes", "t", "true"):
        return []
    return [rank for rank in range(group.size()) if rank != group.rank()]


def _has_closed(group: dist.ProcessGroup, rank: int) -> bool:
    try:
        _receive(group, rank, _PROBE_TAG)
    except RuntimeError as error:
        return _CLOSED_HERE_MESSAGE not in str(error)
    return False


def _receive(group: dist.ProcessGroup, rank: int, tag: int) -> Any:
    # not dist.irecv, which raises for a group that has been destroyed
    return group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], rank, tag)


# -- staging GPU tensors in host memory --------------------------------------------------------------------------------


def copy_to_host(x: Tensor) -> Tensor:
    """Return a copy of `x` in host memory, made in the order of the current stream and complete on return."""
    host_tensor = host_buffer(x)
    host_tensor.copy_(x, non_blocking=x.is_cuda)
    if x.is_cuda:
        # Synchronize this stream only: other streams may be waiting for data that peers have not sent yet.
        torch.cuda.current_stream(x.device).record_event().synchronize()
    return host_tensor


def host_buffer(template: Tensor) -> Tensor:
    """Allocate a host tensor like `template` (shape and dtype); pinned for GPU tensors, so that copies are async."""
    return torch.empty(template.shape, dtype=template.dtype, device="cpu", pin_memory=template.is_cuda)


def copy_from_host(host_tensor: Tensor, out: Tensor) -> None:
    """Copy received data to `out` on the current stream; torch keeps a pinned `host_tensor` alive during the copy."""
    out.copy_(host_tensor, non_blocking=out.is_cuda)


# -- sends and receives with interruptible waits -----------------------------------------------------------------------

_EXIT_SECONDS = 0.5  # longest time that the process exit waits for a thread that is blocked in gloo


class PendingMessages:
    """Sends and receives that one thread waits for, so that the caller can poll other conditions during the wait.

    Args:
        works: pairs (group rank of the peer, work). Receives come first: they report closed connections more reliably.
        timeout_seconds: timeout, from the first `wait_for`. When it expires, gloo closes the group's connections.

    Example:
        messages = PendingMessages([(1, dist.irecv(x, 1)), (2, dist.isend(y, 2))], 60.0)
        while not messages.wait_for(0.5):
            poll_for_failures()
    """

    def __init__(self, works: Sequence[tuple[int, Any]], timeout_seconds: float) -> None:
        self._pending_works = list(works)
        self._timeout_seconds = timeout_seconds
        self._done_event = Event()
        self._error: BaseException | None = None
        self._has_begun = False
        if not works:
            self._done_event.set()

    @property
    def awaited_peer(self) -> int | None:
        """Peer of the work that the thread waits for now; None if all works have finished."""
        return next((peer for peer, _ in self._pending_works), None)

    def wait_for(self, seconds: float) -> bool:
        """Wait up to `seconds`; return True if all works have finished. Raises the error of a work that failed."""
        if not self._has_begun and self._pending_works:
            self._has_begun = True
            _idle_or_new_waiter().submit(self)
        is_finished = self._done_event.wait(seconds)
        if self._error is not None:
            raise self._error
        return is_finished

    def wait_all(self) -> None:
        """Wait for the works in order, on the calling thread."""
        deadline = time.perf_counter() + self._timeout_seconds
        try:
            while self._pending_works:
                self._pending_works[0][1].wait(
                    max(timedelta(seconds=deadline - time.perf_counter()), IMMEDIATE_TIMEOUT)
                )
                del self._pending_works[0]
        except BaseException as error:  # not only Exception: the caller must not read memory that was not received
            self._error = error.with_traceback(None)  # the traceback would keep this object and its tensors alive
        finally:
            self._done_event.set()


class _WaiterThread:
    """A thread that waits for one `PendingMessages` object at a time, and is reused when that object has finished."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[PendingMessages | None] = SimpleQueue()
        # a daemon, so that the process can exit while the thread is blocked
        thread = Thread(target=self._run, name="fused_tp messages", daemon=True)
        start_thread(thread)
        _waiter_threads.add(thread)

    def submit(self, messages: PendingMessages | None) -> None:
        """Make the thread wait for `messages` next; None ends the thread."""
        self._queue.put(messages)

    def _run(self) -> None:
        while (messages := self._queue.get()) is not None:
            messages.wait_all()
            del messages  # the loop variable would keep the tensors alive until the next messages
            _idle_waiters.append(self)


_idle_waiters: list[_WaiterThread] = []
_waiter_threads: weakref.WeakSet[Thread] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    """End the waiting threads: a thread that returns from torch during interpreter exit would abort the process."""
    while _idle_waiters:
        _idle_waiters.pop().submit(None)
    for thread in list(_waiter_threads):
        thread.join(_EXIT_SECONDS)


os.register_at_fork(after_in_child=_idle_waiters.clear)  # a forked child inherits the list, but not the threads


def _idle_or_new_waiter() -> _WaiterThread:
    """Return an idle waiter, or a new one if none is idle."""
    try:
        return _idle_waiters.pop()
    except IndexError:
        return _WaiterThread()
