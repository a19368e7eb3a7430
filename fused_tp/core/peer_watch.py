"""Detection of other processes on this host that exit, within milliseconds and for any reason of the exit."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fused_tp.core.pending import start_thread

_POLL_INTERVAL_SECONDS = 0.2


def process_identity() -> tuple[str, int]:
    """Return (pid namespace, pid in that namespace) of this process, which identify it to other processes."""
    try:
        return os.readlink("/proc/self/ns/pid"), os.getpid()
    except OSError:
        return "", os.getpid()


def watchable_pids(processes: Sequence[Any]) -> dict[int, int]:
    """Return the pids, by rank, that this process can watch. `processes`: `process_identity` of each rank."""
    namespace, own_pid = process_identity()
    if not namespace or not hasattr(os, "pidfd_open"):
        return {}
    return {
        rank: pid
        for rank, (peer_namespace, pid) in enumerate(processes)
        if peer_namespace == namespace and pid != own_pid and Path(f"/proc/{pid}").exists()
    }


_exit_event = threading.Event()
_watch_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    """End the watching threads: a thread that calls torch during interpreter exit would abort the process."""
    _exit_event.set()
    for thread in list(_watch_threads):
        thread.join(5 * _POLL_INTERVAL_SECONDS)


class PeerWatch:
    """A thread that calls `on_lost` when a peer process has exited, and `on_tick` at regular intervals.

    A kernel that waits for a peer cannot detect that the peer's process has exited, and would wait until its deadline.
    The thread waits on descriptors that become readable when a process exits for any reason (pidfd_open, Linux 5.3).

    Args:
        owner: the thread exits when this object is freed, so the callbacks must not keep a reference to it.
        pids: pids by rank.
        on_lost: `on_lost(owner, rank)`, called once for each peer that has exited.
        on_tick: `on_tick(owner)`, called about five times a second.
    """

    def __init__(
        self, owner: object, pids: Mapping[int, int], on_lost: Callable[..., None], on_tick: Callable[..., None]
    ) -> None:
        self._owner = weakref.ref(owner)
        self._on_lost, self._on_tick = on_lost, on_tick
        self._rank_by_descriptor: dict[int, int] = {}
        for rank, pid in pids.items():
            try:
                self._rank_by_descriptor[os.pidfd_open(pid)] = rank
            except OSError:  # the peer has exited already, or this process may not watch it
                if not Path(f"/proc/{pid}").exists():
                    on_lost(owner, rank)
        thread = threading.Thread(target=self._run, name="fused_tp peer watch", daemon=True)
        start_thread(thread)
        _watch_threads.add(thread)

    def _run(self) -> None:
        poller = select.poll()
        for descriptor in self._rank_by_descriptor:
            poller.register(descriptor, select.POLLIN)
        while True:
            events = poller.poll(_POLL_INTERVAL_SECONDS * 1000)
            owner = self._owner()
            if owner is None or _exit_event.is_set():
                break
            for descriptor, _ in events:
                poller.unregister(descriptor)
                self._on_lost(owner, self._rank_by_descriptor.pop(descriptor))
                os.close(descriptor)
            self._on_tick(owner)
            del owner
        for descriptor in self._rank_by_descriptor:
            with contextlib.suppress(OSError):
                os.close(descriptor)
