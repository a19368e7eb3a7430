"""Ranks for CPU cases: processes of one thread, each pinned to its own core, that run functions sent to them.

Every wait has a deadline. If a rank hangs, even in native code that spins for a dead peer, its own watchdog prints a
traceback and ends it; should that fail too, the parent ends it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import multiprocessing as mp
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a rank pins itself to its core before it imports torch, whose libraries start threads
    from .case import BenchCase, Contestant

START_SECONDS = 120.0  # time to import torch on a busy machine
_GRACE_SECONDS = 5.0  # time for the watchdog's traceback
_EXIT_NOTICE_SECONDS = 0.3  # time to notice the end of a process, which its peers notice at once
MIN_TIMED_SECONDS = 2e-3  # least span timed together, far above the cost of leaving the barrier and reading the clock
_WARM_UP_CALLS = 3  # the first call builds and allocates, the second still faults pages in
_WARM_UP_SECONDS = 0.5  # enough warmup if calls are long

# One thread per library.
_ONE_THREAD_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def usable_cores() -> list[int]:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


class RankFailure(RuntimeError):
    """Raised if a rank raised, died or took too long; all ranks have then been ended."""


class RankContext:
    """Context that a rank passes to the functions it runs; a `case.Context`."""

    rechecks_results = False

    def __init__(self, rank: int, world_size: int, run_id: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self.run_id = run_id  # equal on all ranks, and unique among runs on this host

    def exchange(self, value: Any) -> list[Any]:
        import torch.distributed as dist

        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def meet(self) -> None:
        """Return once all ranks have arrived.

        Ranks first wait asleep in gloo's barrier, as a rank that spins for seconds heats up its core's neighbours. If
        shared memory is available, they then pass a barrier there: ranks leave it within a microsecond of each other,
        and gloo's within a hundred.
        """
        import torch.distributed as dist

        from fused_tp.backends.shared_memory.shm import shm_transport
        from fused_tp.core.group import resolve_group

        dist.barrier()
        transport = shm_transport(resolve_group(None))
        if transport is not None:
            transport.barrier()

    def synchronize(self) -> None:
        pass

    def start(self, case: BenchCase) -> None:
        pass

    def warm_up(self, contestant: Contestant) -> tuple[float, int]:
        times: list[float] = []
        while len(times) < _WARM_UP_CALLS and sum(times) < _WARM_UP_SECONDS:
            times.append(max(self.exchange(self.measure_seconds(contestant, 1))))
        return min(times), max(1, math.ceil(MIN_TIMED_SECONDS / max(min(times), 1e-7)))

    def measure_seconds(self, contestant: Contestant, calls: int) -> float:
        contestant_run = contestant.run
        self.meet()
        start = time.perf_counter()
        for _ in range(calls):
            contestant_run()
        return (time.perf_counter() - start) / calls


class Ranks(contextlib.AbstractContextManager["Ranks"]):
    """Context manager for `world_size` ranks with a gloo group as their world.

    Example:
        with Ranks(2) as ranks:
            sums = ranks.call(some_module.function, argument, seconds=60)
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory(prefix="fused_tp_bench_")
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        from fused_tp.core.settings import override_environment

        context = mp.get_context("spawn")  # fork would inherit the parent's thread pools and settings
        environment_values = dict(_ONE_THREAD_ENVIRONMENT)
        if sys.platform == "linux":
            environment_values["GLOO_SOCKET_IFNAME"] = "lo"  # ranks of one host need no network
        with override_environment(environment_values):  # before the child imports torch, which reads it once
            for rank in range(world_size):
                parent_end, child_end = context.Pipe()
                process = context.Process(
                    target=_rank_main, args=(rank, world_size, self._folder.name, child_end), daemon=True
                )
                process.start()
                child_end.close()  # so that the pipe reports EOF when the child ends
                self._connections.append(parent_end)
                self._processes.append(process)
        try:
            self._collect_results(START_SECONDS)
        except RankFailure:
            self.close()
            raise

    def call(self, function: Callable[..., Any], *arguments: Any, seconds: float) -> list[Any]:
        """Call `function(context, *arguments)`, defined at the top level of a module, on each rank; return the results.

        Raises:
            RankFailure: a rank raised, died, or had no result within `seconds`. All ranks have then ended.
        """
        for connection in self._connections:
            connection.send((function, arguments, seconds))
        try:
            return self._collect_results(seconds + _GRACE_SECONDS)
        except RankFailure:
            self.close()
            raise

    def _collect_results(self, seconds: float) -> list[Any]:
        deadline = time.monotonic() + seconds
        results: list[Any] = [None] * self.world_size
        pending_ranks = set(range(self.world_size))
        while pending_ranks:
            for rank in sorted(pending_ranks):
                if not self._connections[rank].poll(0.02):
                    continue
                try:
                    has_succeeded, results[rank] = self._connections[rank].recv()
                except EOFError:
                    raise self._find_failure(rank, "an error that could not be sent", _GRACE_SECONDS) from None
                if not has_succeeded:
                    raise self._find_failure(rank, results[rank], _EXIT_NOTICE_SECONDS)
                pending_ranks.discard(rank)
            if pending_ranks and time.monotonic() > deadline:
                raise RankFailure(f"Ranks {sorted(pending_ranks)} had no result within {seconds:.0f} s.")
        return results

    def _find_failure(self, rank: int, traceback_text: str, seconds: float) -> RankFailure:
        """Find the cause of a failure: a rank that ends within `seconds`, or else the exception that `rank` raised."""
        ended_sentinels = wait([process.sentinel for process in self._processes], seconds)
        for other_rank, process in enumerate(self._processes):
            if process.sentinel in ended_sentinels:
                process.join()
                return RankFailure(
                    f"Rank {other_rank} ended with exit status {process.exitcode}; see its output above."
                )
        return RankFailure(f"Rank {rank} raised:\n{traceback_text}")

    def close(self) -> None:
        """End the ranks; does nothing if they have ended."""
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


def _rank_main(rank: int, world_size: int, folder: str, connection: Connection) -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(START_SECONDS, exit=True)
    cores = usable_cores()
    if hasattr(os, "sched_setaffinity"):
        # Before any thread starts, so that gloo's threads inherit the core.
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), world_size)
    timeout = timedelta(seconds=START_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    faulthandler.cancel_dump_traceback_later()
    context = RankContext(rank, world_size, Path(folder).name)
    connection.send((True, None))
    while True:
        try:
            function, arguments, seconds = connection.recv()
        except (EOFError, OSError):  # the parent has closed the pipe, or has died
            break
        # The timer runs in a C thread, so that it fires even while native code holds the interpreter lock.
        faulthandler.dump_traceback_later(seconds, exit=True)
        os.environ["FUSED_TP_TIMEOUT"] = str(seconds)
        try:
            answer = (True, function(context, *arguments))
        except Exception:
            answer = (False, traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        connection.send(answer)
    # Skips the interpreter's shutdown, where gloo would wait for a peer that exited first.
    sys.stdout.flush()
    os._exit(0)
