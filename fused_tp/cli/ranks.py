"""Ranks on this machine: start them, run one function on each, and return the result of rank 0.

Starting a rank takes seconds, mostly for imports. So ranks are forked from one process that has already imported the
modules that all ranks need. This module imports torch only when a rank runs or is about to be started.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import select
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import torch.distributed as dist

Settings = TypeVar("Settings")
# Ranks of one host need no network. Without this setting gloo resolves the host's name, which can fail.
LOOPBACK = "lo"
_MAX_FOLDER_BYTES = 64  # a socket's path is limited to 104 bytes, and the name within the folder takes about 35
# Ranks return messages and results in files, in a folder that only this user can access. Rejected: keys in the ranks'
# TCP store, which other users may reach over the network.
_ERROR_FILE = "refusal-of-rank-"  # message of a ValueError or OSError of a rank
_RESULT_FILE = "result"


@dataclass(frozen=True)
class Job(Generic[Settings]):
    """Call of `function(settings)` on each rank; function and settings must be picklable.

    Attributes:
        threads: CPU threads of each rank.
    """

    function: Callable[[Settings], Any]
    settings: Settings
    ranks: int
    device: str = "cpu"
    threads: int = 1


def is_under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def choose_start_method(device: str) -> str:
    """Choose "forkserver", which imports modules once for all ranks and so saves seconds per rank, or "spawn".

    Ranks on GPUs are spawned: a library that initializes CUDA on import would break CUDA in all forked ranks. Ranks are
    also spawned if the path of the fork server's socket, in the folder for temporary files, would be too long.
    """
    is_too_long = len(os.fsencode(tempfile.gettempdir())) > _MAX_FOLDER_BYTES
    if is_too_long or device != "cpu" or "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    return "forkserver"


def preload(modules: Sequence[str]) -> None:
    """Start the fork server, which imports `modules` for the ranks in parallel with this process.

    From then on SIGTERM raises SystemExit in this process, so that the server's folder is removed.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()  # the only thread that may set handlers
    if is_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit_on_signal)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)  # ranks inherit the server's environment
    forkserver.set_forkserver_preload(list(modules))
    forkserver.ensure_running()


def _exit_on_signal(signum: int, _: Any) -> None:
    print(f"fused-tp: stopped by {signal.Signals(signum).name}.", file=sys.stderr)
    sys.exit(128 + signum)


def launch(job: Job[Any], start_method: str | None) -> Any:
    """Run `job` on ranks started by `start_method`, or on the ranks of torchrun (None).

    Returns:
        Result of the function on rank 0; under torchrun on this rank.

    Raises:
        ValueError: a rank raised ValueError or OSError, for invalid arguments or a file that cannot be written.
        ChildProcessError: a rank failed, or was killed by a signal.
    """
    import torch.distributed as dist
    import torch.multiprocessing as mp

    if start_method is None:
        return _run_rank(job, int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0")), None)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    # This process serves the ranks' store: a port chosen here for rank 0 to serve could be taken in the meantime.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="fused-tp-") as name:
        folder = Path(name)
        try:
            # Daemon processes, so that an interrupt kills them instead of waiting for them.
            arguments = (job, store.port, os.getpid(), folder)
            mp.start_processes(_run_rank_process, arguments, job.ranks, daemon=True, start_method=start_method)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            # The first rank to exit may be a peer that only lost its connection, so look for the actual error first.
            for error_file in sorted(folder.glob(f"{_ERROR_FILE}*")):
                raise ValueError(error_file.read_text(encoding="utf-8")) from None
            if isinstance(error, mp.ProcessExitedException) and error.signal_name:
                raise ChildProcessError(f"rank {error.error_index} was killed by {error.signal_name}.") from None
            raise ChildProcessError(f"A rank failed. {error}") from None
        return pickle.loads((folder / _RESULT_FILE).read_bytes())


def _run_rank_process(rank: int, job: Job[Any], port: int, launcher_pid: int, folder: Path) -> None:
    import torch.distributed as dist

    from fused_tp.core.settings import timeout_seconds

    exit_with_process(launcher_pid)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout_seconds()))
    result = _run_rank(job, rank, rank, (store, folder))
    if rank == 0:
        (folder / _RESULT_FILE).write_bytes(pickle.dumps(result))


def exit_with_process(pid: int) -> None:
    """Make this rank exit when process number `pid` exits, even by SIGKILL. Has an effect on Linux only."""
    if not hasattr(os, "pidfd_open"):
        return
    try:
        process_fd = os.pidfd_open(pid)
    except OSError:  # older kernels lack the call, and some containers block it
        return

    def exit_after_process() -> None:
        select.select([process_fd], [], [])
        os._exit(1)

    threading.Thread(target=exit_after_process, daemon=True).start()


def _run_rank(job: Job[Any], rank: int, local_rank: int, store_and_folder: tuple[dist.Store, Path] | None) -> Any:
    """Run `job` on one rank. `store_and_folder`: the ranks' store and the folder of `launch`; None under torchrun."""
    import torch
    import torch.distributed as dist

    from fused_tp.core.settings import timeout_seconds

    torch.set_num_threads(job.threads)
    backend = "gloo"
    if job.device == "cuda":
        torch.cuda.set_device(local_rank)
        backend = "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=timeout_seconds())
    if store_and_folder is None:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=store_and_folder[0], rank=rank, world_size=job.ranks, timeout=timeout)
    try:
        return job.function(job.settings)
    except (ValueError, OSError) as error:
        if store_and_folder is not None:
            (store_and_folder[1] / f"{_ERROR_FILE}{rank}").write_text(str(error), encoding="utf-8")
        raise
    finally:
        dist.destroy_process_group()
