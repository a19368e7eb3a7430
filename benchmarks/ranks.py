"""The ranks that CPU cases run on: processes of one thread, each on a core of its own, that run what they are sent.

Nothing here waits without a deadline. A rank that is stuck, even in native code that spins for a dead peer, is ended by
its own watchdog with a traceback; should that fail too, the parent ends it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import mmap
import multiprocessing as mp
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # a rank takes its core before torch, and the threads of its libraries, come
    from .case import Case, Contestant

START_SECONDS = 120.0  # importing torch on a busy machine
_GRACE_SECONDS = 5.0  # for the watchdog's traceback
MIN_TIMED_SECONDS = 2e-3  # of what is timed at once: far above what leaving the barrier and reading the clock take
_WARM_UP_CALLS = 3  # the first builds and allocates, the second still faults pages in
_WARM_UP_SECONDS = 0.5  # enough of it, where calls are long
_LINE = 8  # int64 to a cache line: ranks do not write to each other's

# One thread for each library; gloo has no business on a network that the ranks of one host do not need.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


class RankFailure(RuntimeError):
    """A rank raised, died or took too long; the others were ended with it."""


class SpinBarrier(contextlib.AbstractContextManager["SpinBarrier"]):
    """Ranks of one host meet in a file that all map, and leave within a microsecond; gloo's barrier takes a hundred.
    One thread of each rank may use it.

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
            TimeoutError: a rank did not answer in time.
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

    def __exit__(self, *raised: object) -> None:
        del self._slots  # the array keeps the map open
        self._map.close()


class RankContext:
    """What a function that runs on a rank is given; a `case.Context`."""

    checks_again = False

    def __init__(self, rank: int, world_size: int, barrier: SpinBarrier, run_id: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self.barrier = barrier
        self.run_id = run_id  # the same on all ranks, and unlike that of any other run on this host

    def exchange(self, mine: Any) -> list[Any]:
        import torch.distributed as dist

        answers: list[Any] = [None] * self.world_size
        dist.all_gather_object(answers, mine)
        return answers

    def synchronize(self) -> None:
        pass

    def start(self, case: Case) -> None:
        pass

    def warm_up(self, contestant: Contestant) -> tuple[float, int]:
        times: list[float] = []
        while len(times) < _WARM_UP_CALLS and sum(times) < _WARM_UP_SECONDS:
            times.append(max(self.exchange(self.seconds(contestant, 1))))
        return min(times), max(1, math.ceil(MIN_TIMED_SECONDS / max(min(times), 1e-7)))

    def seconds(self, contestant: Contestant, calls: int) -> float:
        run = contestant.run
        self.barrier.wait()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - start) / calls


class Ranks(contextlib.AbstractContextManager["Ranks"]):
    """`world_size` ranks with a gloo group as their world; a context manager.

    Example:
        with Ranks(2) as ranks:
            sums = ranks.call(some_module.function, argument, seconds=60)
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory(prefix="fused_tp_bench_")
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        context = mp.get_context("spawn")  # fork would carry over the parent's threads and settings
        values = dict(_ENVIRONMENT)
        if sys.platform == "linux":
            values["GLOO_SOCKET_IFNAME"] = "lo"
        with environment(values):  # before the child imports torch, which reads it once
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_rank_main, args=(rank, world_size, self._folder.name, theirs), daemon=True
                )
                process.start()
                theirs.close()  # so that the end of the child is the end of the pipe
                self._connections.append(ours)
                self._processes.append(process)
        try:
            self._collect(START_SECONDS)
        except RankFailure:
            self.close()
            raise

    def call(self, function: Callable[..., Any], *arguments: Any, seconds: float) -> list[Any]:
        """What `function(context, *arguments)`, of the top level of a module, returns on each rank.

        Raises:
            RankFailure: a rank raised, died, or had no result within `seconds`. The ranks have ended then.
        """
        for connection in self._connections:
            connection.send((function, arguments, seconds))
        try:
            return self._collect(seconds + _GRACE_SECONDS)
        except RankFailure:
            self.close()
            raise

    def _collect(self, seconds: float) -> list[Any]:
        deadline = time.monotonic() + seconds
        results: list[Any] = [None] * self.world_size
        waiting = set(range(self.world_size))
        while waiting:
            for rank in sorted(waiting):
                # In turns: a rank that died explains why the other waits, whichever has the lower number.
                if not self._connections[rank].poll(0.02):
                    continue
                try:
                    ok, results[rank] = self._connections[rank].recv()
                except EOFError:
                    self._processes[rank].join(_GRACE_SECONDS)
                    code = self._processes[rank].exitcode
                    raise RankFailure(f"Rank {rank} ended with exit status {code}; see its output above.") from None
                if not ok:
                    raise RankFailure(f"Rank {rank} raised:\n{results[rank]}")
                waiting.discard(rank)
            if waiting and time.monotonic() > deadline:
                raise RankFailure(f"Ranks {sorted(waiting)} had no result within {seconds:.0f} s.")
        return results

    def close(self) -> None:
        """End the ranks; harmless when they have ended."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def __exit__(self, *raised: object) -> None:
        self.close()


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Variables that are set within the context and as before after it."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _rank_main(rank: int, world_size: int, folder: str, connection: Connection) -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(START_SECONDS, exit=True)
    usable = cores()
    if hasattr(os, "sched_setaffinity"):
        # Before any thread starts: gloo's inherit the core.
        os.sched_setaffinity(0, {usable[rank % len(usable)]})
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), world_size)
    timeout = timedelta(seconds=START_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    faulthandler.cancel_dump_traceback_later()
    with SpinBarrier(Path(folder, "barrier"), world_size, rank, START_SECONDS) as barrier:
        context = RankContext(rank, world_size, barrier, Path(folder).name)
        connection.send((True, None))
        while True:
            try:
                function, arguments, seconds = connection.recv()
            except (EOFError, OSError):  # the parent has closed the pipe, or has died
                break
            # A timer in a thread of C: it fires even where native code holds the interpreter.
            faulthandler.dump_traceback_later(seconds, exit=True)
            os.environ["FUSED_TP_TIMEOUT"] = str(seconds)
            try:
                answer = (True, function(context, *arguments))
            except Exception:
                answer = (False, traceback.format_exc())
            faulthandler.cancel_dump_traceback_later()
            connection.send(answer)
    # Not through the interpreter's shutdown: a peer that exited first would keep gloo waiting.
    sys.stdout.flush()
    os._exit(0)
