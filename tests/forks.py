"""New processes without another import of torch: they are forked from a process that has imported it and is idle.

    process = fork("tests.soak", "main", [seed], environment, log)       # calls main(seed) in it

A fork costs 50 ms and almost no memory; a new Python that imports torch costs 2 s of CPU time. The forking process has
one thread, so no state of other threads is lost. It starts with the environment of the tests; each fork sets its own
before it runs anything, in time for all modules not imported yet, fused_tp and Triton among them.

All forks share one hash seed, unlike separately started processes. A fork runs its exit handlers and ends without a
teardown of the interpreter, which would write to, and so copy, all memory that it shares with the forking process:
0.3 s of CPU time. `finalize` makes it end as other processes do.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
_MOST_BYTES = 1 << 20  # limit of a request


class Forked:
    """A process that is not a child of this one, with the part of the `subprocess.Popen` interface that tests need."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status  # pipe from which the exit code is read, once

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0.0)
            told = os.read(self._status, 4)
            os.close(self._status)
            # The pipe is empty if the forking process has died, and its forks with it.
            self.returncode = struct.unpack("i", told)[0] if told else -signal.SIGKILL
        return self.returncode

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Server:
    """The forking process, as the tests see it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": path}
        command = [sys.executable, "-m", "tests.forks", str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self.process = subprocess.Popen(command, env=env, cwd=REPOSITORY, pass_fds=[theirs.fileno()])

    def fork(self, request: bytes, log: int, fds: Sequence[int]) -> Forked:
        ours, theirs = os.pipe()
        try:
            socket.send_fds(self._socket, [request], [theirs, log, *fds])
            pid = struct.unpack("i", self._socket.recv(4))[0]
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return Forked(pid, ours)


_lock = threading.Lock()
_server: _Server | None = None


def can_fork() -> bool:
    """True if this system supports `fork`; elsewhere use `subprocess`."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


def fork(
    module: str,
    function: str,
    arguments: Sequence[Any],
    env: Mapping[str, str],
    log: int,
    fds: Sequence[int] = (),
    finalize: bool = False,
) -> Forked:
    """Call `module.function(*fds, *arguments)` in a new process, which ends when the forking process does.

    Args:
        env: complete environment of the process.
        log: file descriptor for its stdout and stderr.
        fds: file descriptors passed to it; `function` takes their numbers in that process before `arguments`.
        finalize: tear down the interpreter at the end.
    """
    global _server
    with _lock:
        if _server is None or _server.process.poll() is not None:
            _server = _Server()
        return _server.fork(pickle.dumps((module, function, arguments, dict(env), finalize)), log, fds)


# ---- in the forking process ------------------------------------------------------------------------------------


def _serve(fd: int, parent: int) -> Callable[[], None] | None:
    """Serve fork requests until the tests have ended; in each fork, return the function that it runs."""
    from tests.workers import die_with_parent

    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the tests' to handle
    own = os.getpid()
    requests = socket.socket(fileno=fd)
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    forks: dict[int, tuple[int, int]] = {}  # by pidfd: the process, and the pipe for its exit code
    while True:
        for ready, _ in poll.poll():
            if ready != requests.fileno():
                pid, status = forks.pop(ready)
                poll.unregister(ready)
                os.close(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(BrokenPipeError):
                    os.write(status, struct.pack("i", code))
                os.close(status)
                continue
            message, fds, _, _ = socket.recv_fds(requests, _MOST_BYTES, 8)
            if not message:
                return None
            pid = os.fork()
            if pid == 0:
                requests.close()
                for other, (_, status) in forks.items():
                    os.close(other)
                    os.close(status)
                return _fork_of(message, fds, own)
            status, *rest = fds
            for received in rest:
                os.close(received)
            pidfd = os.pidfd_open(pid)
            forks[pidfd] = pid, status
            poll.register(pidfd, select.POLLIN)
            requests.send(struct.pack("i", pid))


def _fork_of(message: bytes, fds: Sequence[int], parent: int) -> Callable[[], None]:
    module, function, arguments, env, finalize = pickle.loads(message)
    status, log, *mine = fds
    os.close(status)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)

    def run() -> None:
        from tests.workers import die_with_parent

        die_with_parent(parent)
        getattr(importlib.import_module(module), function)(*mine, *arguments)
        if not finalize:
            threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as an interpreter that ends does
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    return run


def _main() -> None:
    import gc

    # Modules that every rank needs, and none that reads environment variables that tests set.
    import numpy  # noqa: F401  # for the forks
    import pytest  # noqa: F401  # for the forks
    import torch
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor

    with contextlib.suppress(ImportError):  # optional; would cost a second of CPU time in each rank that imports it
        import transformers.models.llama.modeling_llama
        import transformers.trainer_utils  # noqa: F401  # for the forks

    from tests.forks import _serve as serve  # under its own name

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    work = serve(int(sys.argv[1]), int(sys.argv[2]))
    if work is not None:
        work()


if __name__ == "__main__":
    _main()
