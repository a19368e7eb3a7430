"""Helpers for a late rank, which waits until the others have given up: a fixed delay is too short on a busy machine.
Also a timer that interrupts a wait as Ctrl-C does.

The ranks are those of the default group and synchronize over its store:

    if rank == 2:
        wait_for_those_who_gave_up("all_reduce", (0, 1))
    with pytest.raises(CollectiveTimeoutError):
        fused_tp.all_reduce(x, group=group)
    give_up("all_reduce")
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

_SECONDS = 60


def give_up(what: str) -> None:
    """Record that this rank has given up; `what` is the same on all ranks and different for each use."""
    _get_default_store().set(_key(what, dist.get_rank()), "")


def wait_for_those_who_gave_up(what: str, ranks: Iterable[int]) -> None:
    store, keys = _get_default_store(), [_key(what, rank) for rank in ranks]
    deadline = time.monotonic() + _SECONDS
    while not store.check(keys):  # not store.wait, which would block the store for this process's other threads
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all of {keys} came within {_SECONDS} s")
        time.sleep(0.01)


def _key(what: str, rank: int) -> str:
    return f"gave up/{what}/{rank}"


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Raise KeyboardInterrupt from a signal handler after that time."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)
