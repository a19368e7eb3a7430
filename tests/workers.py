"""Run a function on several ranks: a pool of worker processes that lives as long as the pytest session.

Starting a process and importing torch takes seconds, so four workers start at the first call and serve every test:

    def sum_of_ranks(group, scale):                      # a module-level function of the test file
        t = torch.full((1,), scale * (dist.get_rank(group) + 1.0))
        dist.all_reduce(t, group=group)
        return t.item()

    def test_sum():
        assert run_ranks(3, sum_of_ranks, 2.0) == [12.0, 12.0, 12.0]

    @on_ranks(2, 3)                                      # a test that each rank runs whole
    def test_equal_sums(group):
        assert sum_of_ranks(group, 2.0) == group.size() * (group.size() + 1.0)

`group` is a gloo ProcessGroup of ranks 0..world_size-1. The default process group of a pool worker always has all four
ranks: use `device_mesh(group)` for a mesh of exactly the group, and `fresh_ranks` (new processes, default group of
exactly `world_size` ranks) for tests of `group=None`, of dying ranks, or of anything that spoils a process.

Expected errors are returned as values; one call may return many:

    def refusals(group):
        return [error_of(fused_tp.all_reduce, bad, group=group) for bad in (3, "x")]

Process groups made within a call are destroyed after it: each has threads that poll for as long as the group lives.
After an error the ranks may disagree about how many collectives they have issued, so the pool recreates its groups.

Every wait has a deadline: the stacks of a stuck rank are added to the failure, and the pool ends.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import faulthandler
import functools
import gc
import importlib.util
import inspect
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from tests import forks

POOL_SIZE = 4
START_SECONDS = 120  # importing torch in four processes at once on a busy machine
GROUP_TIMEOUT = datetime.timedelta(seconds=60)
REJOIN_SECONDS = 20  # gloo ends a group once its work has ended
GRACE_SECONDS = 15  # for the other ranks to finish or to notice, once a rank has failed
EXIT_SECONDS = 60  # the last garbage collection takes seconds on a busy machine
REPOSITORY = Path(__file__).resolve().parent.parent


class RanksFailed(Exception):
    """Some rank raised, died or got stuck; the message holds the output of every rank."""


class RanksTimedOut(RanksFailed):
    """Some rank did not finish in time; the message holds its stacks."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a call on one rank: exactly one of a result, an error, or a death (`exit_code`, -N for signal N)."""

    rank: int
    result: Any = None
    error: BaseException | None = None
    traceback: str = ""
    exit_code: int | None = None

    @property
    def died(self) -> bool:
        return self.exit_code is not None

    def unwrap(self) -> Any:
        """Return the result; raise the rank's error, or RanksFailed if the rank died."""
        if self.error is not None:
            raise self.error
        if self.died:
            raise RanksFailed(self.describe())
        return self.result

    def describe(self) -> str:
        if self.died:
            return f"rank {self.rank} died ({_exit_name(self.exit_code)})"
        return f"rank {self.rank} raised:\n{self.traceback}" if self.error is not None else f"rank {self.rank} finished"


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 120,
    env: Mapping[str, str | None] | None = None,
    interpreted: bool = False,
) -> list[Any]:
    """Call `fn(group, *args)` on ranks 0..world_size-1 of the pool and return the results in rank order.

    `fn` is a module-level function; arguments and results are pickled. `env` is set inside the workers for the call
    and restored afterwards (None removes a variable). The error of the first rank to fail is re-raised here, with the
    tracebacks of all ranks as its cause. Raises RanksFailed when a rank dies, RanksTimedOut past `timeout` seconds.
    `interpreted`: use a separate pool, whose ranks interpret Triton kernels (tests.kernels.ranks).
    """
    if not 1 <= world_size <= POOL_SIZE:
        raise ValueError(f"world_size must be 1 to {POOL_SIZE}, got {world_size}; use fresh_ranks for more ranks")
    if interpreted not in _pools:
        _pools[interpreted] = _Workers(POOL_SIZE, env={"TRITON_INTERPRET": "1"} if interpreted else None, pool=True)
    pool = _pools[interpreted]
    try:
        outcomes = pool.call(world_size, fn, args, timeout, env)
        pool.end_call(world_size, failed=any(outcome.error is not None for outcome in outcomes))
    except (RanksFailed, KeyboardInterrupt):
        stop_pool(interpreted)
        raise
    _raise_first_error(outcomes)
    return [outcome.result for outcome in sorted(outcomes, key=lambda outcome: outcome.rank)]


def on_ranks(
    *world_sizes: int | Callable[..., int], run: Callable[..., list[Any]] | None = None, **options: Any
) -> Callable[[Callable[..., Any]], Any]:
    """Turn `fn(group, ...)` into a test that runs on the ranks of the pool, once for each of these sizes.

    Its other parameters are the test's; their values must be picklable. A size or an option may also be a function of
    some of these parameters. `options` are passed to `run`, by default `run_ranks`.
    """

    def decorate(fn: Callable[..., Any]) -> Any:
        parameters = list(inspect.signature(fn).parameters.values())[1:]

        @functools.wraps(fn)
        def test(**given: Any) -> None:
            def of_test(value: Any) -> Any:
                if not callable(value):
                    return value
                return value(**{name: given[name] for name in inspect.signature(value).parameters})

            size = of_test(given.get("world_size", world_sizes[0]))
            how = {name: of_test(value) for name, value in options.items()}
            (run or run_ranks)(size, test, *(given[parameter.name] for parameter in parameters), **how)

        test.rank_function = fn  # type: ignore[attr-defined]
        several = len(world_sizes) > 1
        added = [inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)] if several else []
        test.__signature__ = inspect.Signature(parameters + added)  # type: ignore[attr-defined]
        return pytest.mark.parametrize("world_size", world_sizes)(test) if several else test

    return decorate


def fresh_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 120,
    env: Mapping[str, str | None] | None = None,
    expect_deaths: bool = False,
    finalize: bool = False,
) -> list[Outcome]:
    """Call `fn(group, *args)` in `world_size` new processes and return one Outcome per rank.

    `group` is their default process group. `env` is set from the start of each process. Errors are returned, not
    raised: call `.unwrap()` where none is expected. A rank that dies (also while it exits) raises RanksFailed unless
    `expect_deaths`; one that is stuck past `timeout` seconds always raises RanksTimedOut. `finalize` is that of
    `tests.forks`.
    """
    workers = _Workers(world_size, env=env, finalize=finalize)
    try:
        outcomes = workers.call(world_size, fn, args, timeout, None, accept_deaths=expect_deaths)
        # A rank that raised may have left peers within a collective, and gloo's threads then take long to end.
        if not expect_deaths and all(outcome.error is None for outcome in outcomes):
            workers.exit_cleanly()
        return sorted(outcomes, key=lambda outcome: outcome.rank)
    finally:
        workers.kill()


def run_fresh(world_size: int, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Like `run_ranks`, on `fresh_ranks`."""
    return [outcome.unwrap() for outcome in fresh_ranks(world_size, fn, *args, **options)]


def body_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function that ranks run: for a test made by `on_ranks` the decorated function, else `fn`."""
    return getattr(fn, "rank_function", fn)


def error_of(fn: Callable[..., Any], *args: Any, **keywords: Any) -> Exception | None:
    """Return the error of `fn(*args, **keywords)`, or None, without its traceback, which would keep tensors alive."""
    try:
        fn(*args, **keywords)
    except Exception as error:
        return error.with_traceback(None)
    return None


def device_mesh(group: dist.ProcessGroup, dim_name: str = "tp") -> dist.device_mesh.DeviceMesh:
    """The 1-D CPU DeviceMesh over `group`; unlike init_device_mesh it needs no ranks outside the group."""
    return dist.device_mesh.DeviceMesh.from_group(group, "cpu", mesh_dim_names=(dim_name,))


_pools: dict[bool, _Workers] = {}  # key: True for the pool that interprets Triton kernels


def stop_pool(*which: bool) -> None:
    """End the processes of all pools, or of the given ones; the next run_ranks starts new ones."""
    for interpreted in which or list(_pools):
        if (pool := _pools.pop(interpreted, None)) is not None:
            pool.kill()


atexit.register(stop_pool)


def _raise_first_error(outcomes: Sequence[Outcome]) -> None:
    """Raise the first error in order of arrival: the first rank to fail most likely caused the other errors."""
    for outcome in outcomes:
        if outcome.error is not None:
            everyone = sorted(outcomes, key=lambda one: one.rank)
            raise outcome.error from RanksFailed("\n".join(one.describe() for one in everyone))


def _exit_name(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


class _Workers:
    """`size` processes joined by one gloo default group, and the pipes to them.

    Forked processes start quickly (`tests.forks`). Rank 0 of the pool is not forked, so its hash seed differs: code
    that depends on a set's order then differs between ranks, as it would in production. Only the pool makes groups of a
    subset of its ranks: torch names groups that only their members make by the number of groups a rank is in.
    """

    def __init__(
        self, size: int, env: Mapping[str, str | None] | None = None, pool: bool = False, finalize: bool = False
    ) -> None:
        self.size = size
        self.pool = pool
        self.finalize = finalize
        self.folder = Path(tempfile.mkdtemp(prefix="fused_tp_ranks_"))
        self.processes: list[subprocess.Popen[bytes] | forks.Forked] = []
        self.pipes: list[Connection] = []
        self.read_from: list[int] = [0] * size
        self.times_joined = 0
        self.loaded: set[tuple[str, int]] = set()  # (module, rank that has imported it)
        # This process hosts the store, like the agent of torchrun, so that it outlives every rank.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=GROUP_TIMEOUT)
        try:
            for rank in range(size):
                self._start(rank, env)
            started = self._collect(range(size), START_SECONDS, accept_deaths=False)
            _raise_first_error(started)
        except BaseException:
            self.kill()
            raise

    def call(
        self,
        world_size: int,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        timeout: float,
        env: Mapping[str, str | None] | None,
        accept_deaths: bool = False,
    ) -> list[Outcome]:
        """Call `fn` on ranks 0..world_size-1; return the outcomes in order of arrival."""
        if fn.__module__ == "__main__":
            raise TypeError(
                f"{fn.__qualname__} cannot run on ranks from __main__: import its module under its own name"
            )
        if "<locals>" in fn.__qualname__ or "<lambda>" in fn.__qualname__:
            raise TypeError(f"{fn.__qualname__} cannot run on ranks: only a module-level function can be sent there")
        module, file = fn.__module__, sys.modules[fn.__module__].__file__
        ranks = range(world_size)
        if world_size > 1 and not self.loaded.issuperset((module, rank) for rank in ranks):
            # Import first, so that no rank waits for a peer's imports within a call, where deadlines may be short.
            self._send(ranks, (module, file, "", world_size, b"", dict(env or {})))
            self._collect(ranks, START_SECONDS, accept_deaths=False)
            self.loaded.update((module, rank) for rank in ranks)
        self._send(ranks, (module, file, fn.__qualname__, world_size, pickle.dumps(args), dict(env or {})))
        return self._collect(ranks, timeout, accept_deaths)

    def end_call(self, world_size: int, failed: bool) -> None:
        """Destroy the process groups that the last call has made; if it `failed`, all, and recreate those of the pool.

        Raises RanksFailed if the ranks cannot recreate them.
        """
        if not failed:
            for pipe in self.pipes[:world_size]:  # all have answered; ranks may end a group at different times
                pipe.send(None)
            return
        self.times_joined += 1
        self._send(range(self.size), self.times_joined)
        _raise_first_error(self._collect(range(self.size), REJOIN_SECONDS, accept_deaths=False))

    def exit_cleanly(self) -> None:
        """Let the workers run their exit handlers; raise RanksFailed if one crashes or hangs in them."""
        for pipe in self.pipes:
            pipe.close()
        deadline = time.monotonic() + EXIT_SECONDS
        for rank, process in enumerate(self.processes):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                stacks = self._stacks([rank])
                raise RanksTimedOut(f"rank {rank} did not exit within {EXIT_SECONDS} s\n{stacks}") from None
            if process.returncode != 0:
                how = _exit_name(process.returncode)
                raise RanksFailed(f"rank {rank} failed while exiting ({how})\n{self._output(rank)}")

    def kill(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process in self.processes:
            process.wait(EXIT_SECONDS)
        for pipe in self.pipes:
            pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, rank: int, overrides: Mapping[str, str | None] | None) -> None:
        env = dict(os.environ)
        env.update(
            OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo" if sys.platform == "linux" else "lo0"
        )
        env.setdefault("FUSED_TP_TIMEOUT", "60")
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), env.get("PYTHONPATH")]))
        for name, value in (overrides or {}).items():
            if value is None:
                env.pop(name, None)
            else:
                env[name] = value
        ours, theirs = Pipe()
        with open(self._log(rank), "wb") as log:
            process = self._process(rank, env, theirs.fileno(), log.fileno())
        theirs.close()
        self.processes.append(process)
        self.pipes.append(ours)

    def _process(self, rank: int, env: dict[str, str], pipe: int, log: int) -> subprocess.Popen[bytes] | forks.Forked:
        arguments = [rank, self.size, self.store.port, int(self.pool)]
        # The forking process has imported Triton (through torch._dynamo), which reads TRITON_INTERPRET on import.
        compiles = "TRITON_INTERPRET" not in env
        if compiles and forks.can_fork() and (rank > 0 or not self.pool):
            return forks.fork("tests.workers", "_worker_main", arguments, env, log, [pipe], self.finalize)
        return subprocess.Popen(
            [sys.executable, "-m", "tests.workers", str(os.getpid()), *map(str, [pipe, *arguments])],
            env=env,
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[pipe],
        )

    def _send(self, ranks: Sequence[int], request: object) -> None:
        for rank in ranks:
            self.read_from[rank] = self._log(rank).stat().st_size
            with contextlib.suppress(BrokenPipeError):  # a dead rank: _collect reports it
                self.pipes[rank].send(request)

    def _collect(self, ranks: Sequence[int], timeout: float, accept_deaths: bool) -> list[Outcome]:
        outcomes: list[Outcome] = []
        pending = {self.pipes[rank]: rank for rank in ranks}
        deadline = time.monotonic() + timeout
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                late = sorted(pending.values())
                said = "\n".join(one.describe() for one in outcomes)
                # A failed rank is why the others are stuck: report its error first.
                cause = next((one.error for one in outcomes if one.error is not None), None)
                why = f"{type(cause).__name__}: {cause}\nso " if cause is not None else ""
                raise RanksTimedOut(
                    f"{why}ranks {late} of {list(ranks)} did not finish\n{said}\n{self._stacks(late)}"
                ) from cause
            for pipe in ready:
                assert isinstance(pipe, Connection)
                outcomes.append(self._receive(pending.pop(pipe), pipe))
                failed = outcomes[-1].error is not None or (outcomes[-1].died and not accept_deaths)
                if failed:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        deaths = [one for one in outcomes if one.died]
        if deaths and not accept_deaths:
            output = "\n".join(self._output(one.rank) for one in deaths)
            raise RanksFailed("\n".join(one.describe() for one in outcomes) + "\n" + output)
        return outcomes

    def _receive(self, rank: int, pipe: Connection) -> Outcome:
        try:
            kind, payload, trace = pipe.recv()
        except (EOFError, ConnectionResetError):
            try:
                return Outcome(rank, exit_code=self.processes[rank].wait(EXIT_SECONDS))
            except subprocess.TimeoutExpired:
                raise RanksTimedOut(f"rank {rank} closed its pipe but lives\n{self._stacks([rank])}") from None
        if kind == "ok":
            return Outcome(rank, result=pickle.loads(payload))
        try:
            error = pickle.loads(payload)
        except Exception:  # an exception whose pickle does not load; the traceback names it
            error = RanksFailed(trace)
        output = self._output(rank)
        return Outcome(rank, error=error, traceback=trace + (f"{output}\n" if output else ""))

    def _stacks(self, ranks: Sequence[int]) -> str:
        """Stacks of the stuck ranks: faulthandler writes them to the rank's log, whichever thread holds the GIL."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                self.processes[rank].send_signal(signal.SIGUSR1)
        time.sleep(1)  # there is no notification of when they have been written
        return "\n".join(self._output(rank) for rank in ranks)

    def _output(self, rank: int) -> str:
        """The rank's stdout and stderr since the last request, at most the last 20,000 characters."""
        with open(self._log(rank), "rb") as log:
            log.seek(self.read_from[rank])
            text = log.read().decode(errors="replace").strip()
        return f"--- output of rank {rank} ---\n{text[-20_000:]}" if text else ""

    def _log(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"


# ---- in the worker process -------------------------------------------------------------------------------------


def _worker_main(pipe_fd: int, rank: int, world_size: int, port: int, pool: int) -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    pipe = Connection(pipe_fd)
    if "TRITON_INTERPRET" in os.environ and importlib.util.find_spec("triton"):
        from tests.kernels.ranks import quicken

        quicken()
    groups: dict[int, Any] = {}
    ours: set[dist.ProcessGroup] = set()  # `groups` and the default group

    def join(time: int) -> None:
        """Make the process groups, replacing all existing ones."""
        groups.clear()
        ours.clear()
        if dist.is_initialized():
            end_groups(_world.pg_map)
        torch.set_num_threads(1)
        store: dist.Store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=GROUP_TIMEOUT)
        if time:  # the store still holds keys of earlier groups of the same names
            store = dist.PrefixStore(f"joined again {time}", store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT)
        if pool:
            for size in range(1, POOL_SIZE + 1):
                groups[size] = dist.new_group(list(range(size)), timeout=GROUP_TIMEOUT, backend="gloo")
        else:
            groups[world_size] = dist.group.WORLD
        ours.update(_world.pg_map)

    def call(module: str, file: str, name: str, size: int, pickled_args: bytes, env: Mapping[str, str | None]) -> Any:
        loaded = _module(module, file)
        if not name:
            return None
        with _environment(env):
            return body_of(getattr(loaded, name))(groups[size], *pickle.loads(pickled_args))

    _report(pipe, join, 0)
    while True:
        try:
            request = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        if request is None:
            end_groups(_world.pg_map.keys() - ours)
        elif isinstance(request, int):
            _report(pipe, join, request)
        else:
            _report(pipe, call, *request)


def end_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Destroy these process groups and clear caches that hold them: a group keeps its threads while referenced."""
    groups = list(groups)
    if not groups:
        return
    if dist.group.WORLD in groups:
        dist.destroy_process_group()
    else:
        for group in groups:
            if group in _world.pg_map:  # it may have been destroyed with the group that it is a part of
                dist.destroy_process_group(group)
    groups.clear()
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.tensor"):
            # Meshes of the same ranks compare equal: DTensor would reuse a destroyed group's name from its caches.
            for attribute, cached in list(vars(module).items()):
                if isinstance(cached, functools._lru_cache_wrapper):
                    cached.cache_clear()
                elif attribute == "_planner_cache":
                    cached.clear()
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        debug._clear_python_sharding_prop_cache()  # torch 2.10 has no call that clears both
        debug._clear_fast_path_sharding_prop_cache()
    gc.collect()
    gc.freeze()  # live objects, mostly modules, would cost each collection half a second


def _report(pipe: Connection, fn: Callable[..., Any], *args: Any) -> None:
    try:
        answer = ("ok", pickle.dumps(fn(*args)), "")
    except BaseException as error:
        trace = traceback.format_exc()
        try:
            payload = pickle.dumps(error)
        except Exception:  # an exception that holds something unpicklable: send its text
            payload = pickle.dumps(RanksFailed(trace))
        answer = ("error", payload, trace)
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send(answer)


def _module(name: str, file: str) -> Any:
    """Import the test module under the name that pytest gave it, so that pickles find its classes."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot load {file} as module {name}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


@contextlib.contextmanager
def _environment(env: Mapping[str, str | None]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in env}
    try:
        _set_environment(env)
        yield
    finally:
        _set_environment(before)


def _set_environment(env: Mapping[str, str | None]) -> None:
    for name, value in env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when pytest dies, however it dies; elsewhere it ends when its pipe closes."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the call above
            os._exit(1)


if __name__ == "__main__":
    # Imported under its own name, so that the exception classes pickled here are those of the test process.
    from tests import workers

    parent, *numbers = (int(argument) for argument in sys.argv[1:])
    workers.die_with_parent(parent)
    workers._worker_main(*numbers)
