"""Facts of ranks decide if they may write into each other's memory; peers' processes are watched."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from fused_tp.backends.symmetric_memory.symm_mem import SymmMemRankInfo, check_rank_infos
from fused_tp.core.peer_watch import PeerWatch, process_identity, watchable_pids

pytestmark = pytest.mark.full

PROCESS = ("pid:[1]", 10)
RANKS = [SymmMemRankInfo("host", PROCESS, f"gpu{rank}", 90, 132) for rank in range(3)]


def changed(rank: int, **fields: object) -> list[SymmMemRankInfo]:
    return [replace(fact, **fields) if r == rank else fact for r, fact in enumerate(RANKS)]


SHARED = [replace(fact, gpu="gpu0", may_share_gpu=True) for fact in RANKS]  # torch allows them to share a GPU


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (RANKS, ""),
        (SHARED, ""),
        ([*SHARED[:2], replace(SHARED[2], may_share_gpu=False)], "several ranks of the group share a GPU"),
        (changed(2, gpu="gpu0"), "several ranks of the group share a GPU"),
        (changed(1, host="other"), "the group's ranks are on several hosts"),
        (changed(2, arch=80), "the group's GPUs differ: sm_80, sm_90"),
        (changed(0, unreachable_gpus=("gpu2",)), "the GPU of rank 0 cannot access the memory of the GPU of rank 2"),
        (changed(1, problem="its GPU is sm_75; kernels need sm_80 or later"), "rank 1: its GPU is sm_75"),
    ],
)
def test_whether_ranks_can(facts: list[SymmMemRankInfo], said: str) -> None:
    found = check_rank_infos(facts)
    assert bool(found) == (not said) and said in found.reason


class Owner:
    def __init__(self) -> None:
        self.lost: list[int] = []
        self.changed = threading.Event()
        self.ticks = 0

    def on_lost(self, rank: int) -> None:
        self.lost.append(rank)
        self.changed.set()

    def on_tick(self) -> None:
        self.ticks += 1


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])


def test_a_peer_that_ends_is_noticed_and_the_others_watched_on() -> None:
    first, second = sleeper(), sleeper()
    try:
        owner = Owner()
        watch = PeerWatch(owner, {4: first.pid, 7: second.pid}, Owner.on_lost, Owner.on_tick)
        assert watch is not None and not owner.changed.wait(0.5) and owner.ticks
        for process, lost in ((second, [7]), (first, [7, 4])):
            owner.changed.clear()
            process.kill()
            assert owner.changed.wait(5) and owner.lost == lost
    finally:
        for process in (first, second):
            process.kill()
            process.wait()


def test_a_peer_that_ended_before_is_noticed_at_once() -> None:
    process = sleeper()
    process.kill()
    process.wait()
    owner = Owner()
    PeerWatch(owner, {1: process.pid}, Owner.on_lost, Owner.on_tick)
    assert owner.lost == [1]


def test_a_watch_ends_with_its_owner() -> None:
    def watching() -> int:
        return sum(thread.name == "fused_tp peer watch" for thread in threading.enumerate())

    before = watching()
    owner = Owner()
    PeerWatch(owner, {}, Owner.on_lost, Owner.on_tick)
    assert watching() == before + 1
    del owner
    gc.collect()
    deadline = time.monotonic() + 5
    while watching() > before:
        assert time.monotonic() < deadline, "the thread lives on"
        time.sleep(0.05)  # polling is the only way


def test_only_processes_of_the_same_namespace_can_be_watched() -> None:
    namespace, own = process_identity()
    process = sleeper()
    try:
        known = [(namespace, own), (namespace, process.pid), ("pid:[0]", process.pid), ("", process.pid)]
        assert watchable_pids(known) == {1: process.pid}
    finally:
        process.kill()
        process.wait()
