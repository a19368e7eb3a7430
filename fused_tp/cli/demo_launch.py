"""Start the demo's ranks, or join those that torchrun has started."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fused_tp.cli.demo_settings import DemoSettings, under_torchrun
from fused_tp.runtime.settings import timeout_seconds

REFUSAL = "fused_tp_demo_refusal"  # store key of why a rank cannot do what it was asked
_LONGEST_FOLDER = 64  # a socket's name has 104 bytes at most, and what is made in the folder some 35
RankMain = Callable[[DemoSettings], None]


def launch(rank_main: RankMain, settings: DemoSettings) -> None:
    """Run `rank_main(settings)` on settings.ranks ranks; returns when all have ended.

    Raises:
        ValueError: what was asked does not fit the model or the text.
        ProcessRaisedException, ProcessExitedException: a rank has failed.

    Under torchrun this process is one of the ranks. Otherwise the ranks are started here, on this host, and this
    process holds their store, so that nobody can take its port between picking and using it.
    """
    if under_torchrun():
        _run_rank(rank_main, settings, int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0")), None)
        return
    if sys.platform == "linux":
        # Ranks of one host need no network; gloo would look for the address of the host's name, which may not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        arguments = (rank_main, settings, store.port)
        mp.start_processes(_started, arguments, settings.ranks, start_method=_start_method(settings, rank_main))
    except (mp.ProcessRaisedException, mp.ProcessExitedException):
        # The rank that refused may not be the one that ended first: its peers lose their connection to it.
        if store.check([REFUSAL]):
            raise ValueError(store.get(REFUSAL).decode()) from None
        raise


def _start_method(settings: DemoSettings, rank_main: RankMain) -> str:
    """How ranks are started: as forks of one process that has imported what they all need, seconds of work for each.

    Not where they use GPUs: a library that touches one while it is imported would break it for all forks. Nor where the
    name of its socket, in the folder for temporary files, would be too long for the system.
    """
    too_long = len(os.fsencode(tempfile.gettempdir())) > _LONGEST_FOLDER
    if too_long or settings.device != "cpu" or "forkserver" not in mp.get_all_start_methods():
        return "spawn"
    mp.set_forkserver_preload([rank_main.__module__, "torch._dynamo"])  # optimizers import the latter when they step
    return "forkserver"


def _started(rank: int, rank_main: RankMain, settings: DemoSettings, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout_seconds()))
    _run_rank(rank_main, settings, rank, rank, store)


def _run_rank(
    rank_main: RankMain, settings: DemoSettings, rank: int, local_rank: int, store: dist.Store | None
) -> None:
    torch.set_num_threads(settings.threads)
    backend = "gloo"
    if settings.device == "cuda":
        torch.cuda.set_device(local_rank)
        backend = "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=timeout_seconds())
    if store is None:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=store, rank=rank, world_size=settings.ranks, timeout=timeout)
    try:
        rank_main(settings)
    except ValueError as error:
        if store is not None:
            store.set(REFUSAL, str(error))
        raise
    finally:
        dist.destroy_process_group()
