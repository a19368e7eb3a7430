"""torchrun on one host, with the additions of `fused-tp launch`: `python -m fused_tp.cli.launch_node ARGUMENTS`.

It accepts torchrun's arguments, and

- does not handle signals that are ignored, such as SIGHUP under nohup;
- creates a new store for each restart, because an old store contains the addresses of dead ranks;
- sets OMP_NUM_THREADS to a rank's share of the host's processors, where torchrun sets it to 1;
- prefixes each line of a log with [host:rank], and shows the last lines of the rank that failed first;
- kills its ranks when it exits, even by SIGKILL (on Linux), and when stdin is closed (--stop-with-stdin): a process
  started by ssh outlives ssh and receives no signal.

Environment variables that are already set are not changed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

CPU_FOLDER = Path("/sys/devices/system/cpu")
RANKS_FAILED_CODE = 1  # exit code if ranks failed; 128 + n means that signal n stopped the ranks of this host
LAST_LINE_COUNT = 20
_EXEC_RANK = "--exec-rank"
_PR_SET_PDEATHSIG = 1


class RanksFailed(ChildProcessError):
    """Raised if ranks have failed and no restart was left.

    Attributes:
        code: exit code of the rank that failed first; -n if signal n has ended that rank.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def main(argv: Sequence[str] | None = None) -> int:
    """Run ranks on this host until they are done, and return the exit code.

    0: done; 1: ranks failed and no restart was left; 2: wrong arguments; 128 + n: ended by signal n.

    Example:
        >>> main(["--standalone", "--nproc-per-node", "4", "train.py"])  # doctest: +SKIP
        0
    """
    try:
        return run_ranks(argv)
    except (ValueError, RanksFailed) as error:
        print(f"fused-tp launch: {error}", file=sys.stderr)
        return RANKS_FAILED_CODE if isinstance(error, RanksFailed) else 2


def run_ranks(argv: Sequence[str] | None = None) -> int:
    """Run ranks on this host until they are done; return 0, or 128 + n if signal n has ended them.

    Raises:
        ValueError: the host does not support these arguments, or the rendezvous port is taken.
        RanksFailed: ranks have failed, and no restart was left.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError

    arguments = _make_parser().parse_args(argv)
    if arguments.stop_with_stdin:
        _stop_with_stdin()
    host = arguments.local_addr or socket.gethostname()
    is_temporary = arguments.log_dir is None
    with _restore_environment_and_handlers():
        _adjust_arguments(arguments, host)
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(line_buffering=True)  # over ssh these streams are pipes
        # One subfolder per host: hosts may share the folder, and every host has a local rank 0, 1, ...
        log_folder = Path(tempfile.mkdtemp(prefix="fused-tp-logs-") if is_temporary else arguments.log_dir, host)
        arguments.log_dir = str(log_folder)
        keeps_logs = has_logs = (arguments.redirects, arguments.tee) != ("0", "0")
        try:
            run.run(arguments)
            keeps_logs = False
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            cause = f"killed by {failure.signal_name()}" if failure.exitcode < 0 else f"exit code {failure.exitcode}"
            output = f"\n{_read_last_lines(log_folder, failure.local_rank)}" if has_logs else ""
            raise RanksFailed(f"on {host} rank {rank} failed first, {cause}.{output}", failure.exitcode) from None
        except SignalException as error:
            return 128 + error.sigval
        except RendezvousConnectionError as error:
            keeps_logs = False  # no rank has started
            reason = str(error.__cause__ or error).splitlines()[0].rstrip(".")
            raise ValueError(
                f"hosts cannot meet at {arguments.rdzv_endpoint} ({reason}); use another --port."
            ) from None
        finally:
            if is_temporary and not keeps_logs:
                shutil.rmtree(log_folder.parent, ignore_errors=True)
    return 0


@contextmanager
def _restore_environment_and_handlers() -> Iterator[None]:
    """Restore this process's environment, which ranks inherit, and its signal handlers, which torchrun replaces."""
    is_main_thread = threading.current_thread() is threading.main_thread()  # the only thread that may set handlers
    handlers = {signum: signal.getsignal(signum) for signum in signal.valid_signals()} if is_main_thread else {}
    environment = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        for signum, handler in handlers.items():
            if handler is not None and handler is not signal.getsignal(signum):
                signal.signal(signum, handler)


def _make_parser() -> argparse.ArgumentParser:
    from torch.distributed.run import get_args_parser

    parser: argparse.ArgumentParser = get_args_parser()
    parser.prog = "fused_tp.cli.launch_node"
    parser.add_argument("--bind-cores", action="store_true", help="give each rank processors of its own")
    parser.add_argument(
        "--stop-with-stdin", action="store_true", help="raise the signals that stdin names; exit when it is closed"
    )
    return parser


def _adjust_arguments(arguments: argparse.Namespace, host: str) -> None:
    from torch.distributed.run import determine_local_world_size

    num_ranks = determine_local_world_size(arguments.nproc_per_node)
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(cpus) // num_ranks)))
    os.environ.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", f"[{host}:${{rank}}] ")
    ignored_signals = {signum.name for signum in signal.Signals if signal.getsignal(signum) is signal.SIG_IGN}
    names = arguments.signals_to_handle.split(",")
    arguments.signals_to_handle = ",".join(name for name in names if name.strip() not in ignored_signals)
    if arguments.bind_cores and sys.platform != "linux":
        raise ValueError("--bind cores needs Linux; omit --bind.")
    if arguments.bind_cores and num_ranks > len(cpus):
        raise ValueError(
            f"--bind cores needs a processor per rank; {host} has {len(cpus)} for {num_ranks} ranks. Omit --bind."
        )
    if sys.platform == "linux":
        python_command = [] if arguments.no_python else [sys.executable, "-u", *(["-m"] if arguments.module else [])]
        program = [*python_command, arguments.training_script, *arguments.training_script_args]
        binding = "cores" if arguments.bind_cores else "none"
        arguments.no_python, arguments.module = True, False
        arguments.training_script = sys.executable
        arguments.training_script_args = ["-I", __file__, _EXEC_RANK, str(os.getpid()), binding, *program]


def _stop_with_stdin() -> None:
    """Raise in this process each signal that a line of stdin names, and SIGTERM when stdin is closed."""
    control_stream = os.fdopen(os.dup(0))
    null_fd = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_fd, 0)  # stdin of the ranks
    os.close(null_fd)

    def raise_signals() -> None:
        for line in control_stream:
            os.kill(os.getpid(), signal.Signals[line.strip()])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=raise_signals, daemon=True).start()


def _read_last_lines(log_folder: Path, local_rank: int) -> str:
    """Return the last lines that a rank wrote in its latest attempt: to stderr, or if that is empty to stdout."""
    for name in ("stderr.log", "stdout.log"):
        files = sorted(log_folder.glob(f"*/attempt_*/{local_rank}/{name}"), key=lambda file: file.stat().st_mtime)
        lines = files[-1].read_text(errors="replace").splitlines()[-LAST_LINE_COUNT:] if files else []
        if lines:
            return "\n".join([f"The end of {files[-1]}:", *(f"    {line}" for line in lines)])
    return f"The rank wrote nothing ({log_folder})."


# -- a rank, before its program ---------------------------------------------------------------------------------------


def exec_rank(launcher: str, binding: str, *program: str) -> NoReturn:
    """Exec the program of a rank, which is killed when process `launcher` exits, even by SIGKILL. Linux only.

    With `binding` "cores", the rank is bound to its share of the host's processors. Rejected: torchrun's
    --numa-binding, which binds a rank by its GPU.
    """
    end_with_parent(int(launcher))
    if binding == "cores":
        rank, num_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        os.sched_setaffinity(0, share_of(rank, num_ranks, sort_by_core(os.sched_getaffinity(0))))
    os.execvp(program[0], program)


def end_with_parent(launcher: int) -> None:
    """Make the kernel kill this process when its parent, process `launcher`, exits; exit now if it already has."""
    # The setting survives exec. SIGKILL, because a launcher that exits regularly has already sent SIGTERM. The signal
    # is sent when the thread that started this process exits: torchrun's thread that waits for the ranks.
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        print(f"This rank may outlive process {launcher}: prctl is not permitted here.", file=sys.stderr)
    if os.getppid() != launcher:
        sys.exit(1)


def share_of(rank: int, num_ranks: int, cpus: Sequence[int]) -> set[int]:
    """Return the processors of a rank: a contiguous slice of `cpus`; sizes differ by at most one.

    Example:
        >>> share_of(1, 2, [0, 4, 1, 5])
        {1, 5}
    """
    return set(cpus[rank * len(cpus) // num_ranks : (rank + 1) * len(cpus) // num_ranks])


def sort_by_core(cpus: set[int]) -> list[int]:
    """Sort processors by NUMA node, socket and core: threads of a core become neighbours, as do cores of a node."""
    return sorted(cpus, key=lambda cpu: (*_read_position(CPU_FOLDER / f"cpu{cpu}"), cpu))


def _read_position(folder: Path) -> tuple[int, int, int]:
    # Kernels without NUMA expose no node, and some virtual machines expose no topology.
    node = next((int(path.name[4:]) for path in folder.glob("node[0-9]*")), 0)
    files = [folder / "topology" / name for name in ("physical_package_id", "core_id")]
    package, core = (int(file.read_text()) if file.exists() else 0 for file in files)
    return node, package, core


if __name__ == "__main__":
    # Ranks run this file by its path: as a module of the package it would import torch before the program does.
    if sys.argv[1:2] == [_EXEC_RANK]:
        exec_rank(*sys.argv[2:])
    sys.exit(main())
