"""The ranks that race: processes of one thread, each on a core of its own, that run what they are sent.

Nothing here waits without a deadline. A rank that is stuck, even in native code that spins for a dead peer, is ended by
its own watchdog with a traceback; should that fail too, the parent ends it.
"""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from .barrier import SpinBarrier
from .machine import cores

START_SECONDS = 120.0  # importing torch on a busy machine
_GRACE_SECONDS = 5.0  # for the watchdog's traceback

# One thread for each library; gloo has no business on a network that the ranks of one host do not need.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class RankFailure(RuntimeError):
    """A rank raised, died or took too long; the others were ended with it."""


class RankContext:
    """What a function that runs on a rank is given."""

    def __init__(self, rank: int, world_size: int, barrier: SpinBarrier, run_id: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self.barrier = barrier
        self.run_id = run_id  # the same on all ranks, and unlike that of any other run on this host


class Ranks:
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
        environment = dict(_ENVIRONMENT)
        if sys.platform == "linux":
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        with _environment(environment):  # before the child imports torch, which reads it once
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
            RankFailure: a rank raised, died, or had no result within `seconds`. The ranks are gone then.
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
        """End the ranks; harmless when they are gone."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
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
    # Not through the interpreter's shutdown: a peer that has gone first would keep gloo waiting.
    sys.stdout.flush()
    os._exit(0)
