"""What gloo can do and has no call for: tell whose connection is closed, close one's own, and wait in slices.

The first two are receives that no peer answers, with tags of their own. gloo refuses to begin one on a closed
connection, and one that is still under way at its timeout closes every connection this process has in the group
(gloo/transport/tcp/unbound_buffer.cc, `waitRecv`), as `Work.abort` does on NCCL but not on gloo. Peers then learn of it
within milliseconds, whatever they wait in.

With TORCH_GLOO_LAZY_INIT a receive first connects, which blocks where the peer is not there. So nothing is asked or
closed then: a lost peer is noticed by those who wait for it, a survivor that aborted by its status (`failure`).

gloo does not end all that is under way on a closed connection. A part that was being written when the peer
closed is forgotten (`Pair::signalException` passes over it), so a worker thread of the process group waits for it until
the group's own timeout, half an hour by default; and the group's destructor waits for that thread (`outlive`).

Sends and receives take memory of the host only: they give the address to the socket (`ProcessGroupGloo::send`, `recv`).
Of the collectives, broadcast, all-gather, all-to-all, gather and scatter copy a GPU's tensors by themselves.
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

from fused_tp.transport.base import start_thread

AT_ONCE = timedelta(milliseconds=1)  # 0 is "no timeout" to torch
_PROBE_TAG, _CLOSE_TAG = 1_937_006_961, 1_937_006_962
_END_SECONDS = 0.3  # what has been ended is seen to be within a millisecond, where the machine is not busy
_CLOSED_HERE = "Application timeout"  # what gloo says of a connection that a timeout of this process has closed


def closed_peers(group: dist.ProcessGroup) -> list[int]:
    """Group ranks that have died, or have closed their connection to this process. Never waits.

    A connection that this process has closed tells nothing of its peer, which is then not among them. Each call leaves
    a receive of one byte behind with every peer that is there, which costs gloo some 100 bytes.
    """
    return [rank for rank in _peers(group) if _has_closed(group, rank)]


def close_connections(group: dist.ProcessGroup) -> None:
    """Close this process's connections in `group`, which ends whatever is under way there, here and on all peers."""
    for rank in _peers(group):
        # Past the first one that was open all are closed, and the rest fail at once.
        with suppress(RuntimeError):
            _receive(group, rank, _CLOSE_TAG).wait(AT_ONCE)


def outlive(group: dist.ProcessGroup, works: Sequence[Any]) -> bool:
    """Keep `group` as long as the process lives where some of its collectives `works` do not end, as they should now.

    Else the owner of the last reference, `destroy_process_group` or a traceback, would wait for gloo's timeout.
    """
    deadline = time.perf_counter() + _END_SECONDS
    while not all(work.is_completed() for work in works):
        if time.perf_counter() > deadline:
            # A list of ours would not do: it is freed, and its content with it, when the interpreter ends.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            return True
        time.sleep(0.001)  # a thread of gloo's has to wake up first, without notice
    return False


def serves_cpu(group: dist.ProcessGroup) -> bool:
    """Whether gloo moves the group's CPU tensors."""
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
    # Not by dist.irecv, which refuses a group that has been destroyed.
    return group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], rank, tag)


# -- messages of a GPU, by way of the host -----------------------------------------------------------------------------


def on_host(x: Tensor) -> Tensor:
    """Copy of `x` in memory of the host, complete on return: `x` is as the current stream has left it by then."""
    host = host_room(x)
    host.copy_(x, non_blocking=x.is_cuda)
    if x.is_cuda:
        # Of this stream alone: others may wait for what peers have yet to send.
        torch.cuda.current_stream(x.device).record_event().synchronize()
    return host


def host_room(like: Tensor) -> Tensor:
    """Memory of the host for the bytes of `like`; pinned where that is on a GPU, so that copies are the stream's."""
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)


def from_host(host: Tensor, out: Tensor) -> None:
    """Copy what has arrived into `out`, in the current stream; torch keeps pinned `host` until that has been done."""
    out.copy_(host, non_blocking=out.is_cuda)


# -- sends and receives, waited for in slices --------------------------------------------------------------------------

_EXIT_SECONDS = 0.5  # at exit, for a thread that waits: where it waits on, so does gloo


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
            _waiter().put(self)
        ended = self._ended.wait(seconds)
        if self._error is not None:
            raise self._error
        return ended

    def run(self) -> None:
        """Wait for one after the other, in whatever thread this is."""
        deadline = time.perf_counter() + self._seconds
        try:
            while self._left:
                self._left[0][1].wait(max(timedelta(seconds=deadline - time.perf_counter()), AT_ONCE))
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
        start_thread(thread)
        _threads.add(thread)

    def put(self, messages: Messages | None) -> None:
        """Wait for these next; None: end."""
        self._next.put(messages)

    def _run(self) -> None:
        while (messages := self._next.get()) is not None:
            messages.run()
            del messages  # and with it the tensors
            _idle.append(self)


_idle: list[_Waiter] = []
_threads: weakref.WeakSet[Thread] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """A thread that returns from torch while the interpreter exits would end the process with an abort."""
    while _idle:
        _idle.pop().put(None)
    for thread in list(_threads):
        thread.join(_EXIT_SECONDS)


os.register_at_fork(after_in_child=_idle.clear)  # its threads are the parent's


def _waiter() -> _Waiter:
    """One that is not waiting, new where there is none."""
    try:
        return _idle.pop()
    except IndexError:
        return _Waiter()
