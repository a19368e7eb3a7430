"""Ranks on this machine: start them, run one function on each, and return the result of rank 0.

Starting a rank takes seconds, mostly for imports. So ranks are forked from one process that has imported the modules
that all need, and this module imports torch only where a rank runs, or is about to.
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
# Ranks of one host need no network. Otherwise gloo resolves the host's name, which can fail.
LOOPBACK = "lo"
_LONGEST_FOLDER = 64  # a socket's path has 104 bytes at most, of which names in the folder take some 35
# Files in a folder that only this user can read and write. Rejected: keys of the ranks' store, which others may reach
# over the network.
_REFUSAL = "refusal-of-rank-"  # message of a ValueError or OSError of a rank
_RESULT = "result"


@dataclass(frozen=True)
class Job(Generic[Settings]):
    """Call that ranks make: `function(settings)`, both of which can be pickled.

    Attributes:
        threads: CPU threads of each rank.
    """

    function: Callable[[Settings], Any]
    settings: Settings
    ranks: int
    device: str = "cpu"
    threads: int = 1


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start_method(device: str) -> str:
    """Choose "forkserver", which imports modules once for all ranks and so saves seconds per rank, or "spawn".

    Ranks on GPUs are spawned: a library that uses a GPU while it is imported would break it for all forks. So are ranks
    where the path of the server's socket, in the folder for temporary files, would be too long for the system.
    """
    too_long = len(os.fsencode(tempfile.gettempdir())) > _LONGEST_FOLDER
    if too_long or device != "cpu" or "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    return "forkserver"


def preload(modules: Sequence[str]) -> None:
    """Start the fork server, which imports `modules` for the ranks in parallel with this process.

    From then on SIGTERM raises SystemExit in this process, since otherwise the server's folder would remain.
    """
    in_main = threading.current_thread() is threading.main_thread()  # the only thread that may set handlers
    if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)  # ranks inherit the server's environment
    forkserver.set_forkserver_preload(list(modules))
    forkserver.ensure_running()


def _exit(number: int, _: Any) -> None:
    print(f"fused-tp: {signal.Signals(number).name} has ended this before it was done.", file=sys.stderr)
    sys.exit(128 + number)


def launch(job: Job[Any], start_method: str | None) -> Any:
    """Run `job` on ranks started by `start_method`, or on the ranks of torchrun (None).

    Returns:
        Result of the function on rank 0; under torchrun on this rank.

    Raises:
        ValueError: a rank has raised ValueError or OSError: invalid arguments, or a file that cannot be written.
        ChildProcessError: a rank has failed, or a signal has ended it.
    """
    import torch.distributed as dist
    import torch.multiprocessing as mp

    if start_method is None:
        return _run_rank(job, int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0")), None)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    # This process serves the store of the ranks, so that no other process can take its port before they use it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="fused-tp-") as name:
        folder = Path(name)
        try:
            # Daemons, so that an interrupt ends them and does not wait for them.
            arguments = (job, store.port, os.getpid(), folder)
            mp.start_processes(_started, arguments, job.ranks, daemon=True, start_method=start_method)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            # The rank with the actual error may not exit first, as its peers lose their connection to it.
            for refusal in sorted(folder.glob(f"{_REFUSAL}*")):
                raise ValueError(refusal.read_text(encoding="utf-8")) from None
            if isinstance(error, mp.ProcessExitedException) and error.signal_name:
                raise ChildProcessError(f"{error.signal_name} has ended rank {error.error_index}.") from None
            raise ChildProcessError(f"A rank has failed. {error}") from None
        return pickle.loads((folder / _RESULT).read_bytes())


def _started(rank: int, job: Job[Any], port: int, launcher: int, folder: Path) -> None:
    import torch.distributed as dist

    from fused_tp.core.settings import timeout_seconds

    end_with(launcher)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout_seconds()))
    result = _run_rank(job, rank, rank, (store, folder))
    if rank == 0:
        (folder / _RESULT).write_bytes(pickle.dumps(result))


def end_with(process: int) -> None:
    """Make this rank exit when `process` ends, even by a signal that it cannot handle. On Linux only."""
    if not hasattr(os, "pidfd_open"):
        return
    try:
        ended = os.pidfd_open(process)
    except OSError:  # older kernels lack the call, and some containers block it
        return

    def wait() -> None:
        select.select([ended], [], [])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _run_rank(job: Job[Any], rank: int, local_rank: int, launched: tuple[dist.Store, Path] | None) -> Any:
    """Run the job on one rank. `launched`: the store of the ranks and the folder of `launch`; None under torchrun."""
    import torch
    import torch.distributed as dist

    from fused_tp.core.settings import timeout_seconds

    torch.set_num_threads(job.threads)
    backend = "gloo"
    if job.device == "cuda":
        torch.cuda.set_device(local_rank)
        backend = "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=timeout_seconds())
    if launched is None:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=launched[0], rank=rank, world_size=job.ranks, timeout=timeout)
    try:
        return job.function(job.settings)
    except (ValueError, OSError) as error:
        if launched is not None:
            (launched[1] / f"{_REFUSAL}{rank}").write_text(str(error), encoding="utf-8")
        raise
    finally:
        dist.destroy_process_group()
