"""A barrier that lets ranks go within a microsecond or so of each other; gloo's leaves a tenth of a millisecond."""

from __future__ import annotations

import mmap
import time
from pathlib import Path
from types import TracebackType

import numpy as np

_LINE = 8  # int64 to a cache line: ranks do not write to each other's


class SpinBarrier:
    """Ranks of one host meet in a file that all map. One thread of each rank may use it.

    Every rank counts its arrivals in its own slot and waits until no slot is behind. An aligned int64 is stored as a
    whole, and no rank reads anything else that another wrote, so no fence is needed.
    """

    def __init__(self, path: Path, world_size: int, rank: int, timeout_seconds: float) -> None:
        nbytes = world_size * _LINE * 8
        with path.open("a+b") as file:
            file.truncate(nbytes)  # the same length from every rank; new bytes are zero
            self._map = mmap.mmap(file.fileno(), nbytes)
        self._slots = np.frombuffer(self._map, dtype=np.int64)[::_LINE]
        self._rank = rank
        self._timeout_seconds = timeout_seconds
        self._arrivals = 0

    def wait(self) -> None:
        """Return once all ranks are here.

        The ranks gather asleep first, as who is early must not heat up the core's neighbours for seconds, and then meet
        again awake, so that all leave at once.

        Raises:
            TimeoutError: a rank did not come in time.
        """
        self._meet(pause=1e-4)
        self._meet(pause=0.0)

    def _meet(self, pause: float) -> None:
        self._arrivals += 1
        self._slots[self._rank] = self._arrivals
        deadline = time.monotonic() + self._timeout_seconds
        while self._slots.min() < self._arrivals:
            if pause:
                time.sleep(pause)  # who is early must not heat up the core's neighbours
            if time.monotonic() > deadline:
                late = [rank for rank, count in enumerate(self._slots) if count < self._arrivals]
                raise TimeoutError(f"Ranks {late} did not reach the barrier within {self._timeout_seconds} s.")

    def __enter__(self) -> SpinBarrier:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        del self._slots  # the array keeps the map open
        self._map.close()
