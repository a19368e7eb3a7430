"""Fault campaign: inject many faults with fixed seeds and check the error of every rank, and its time.

    python -m tests.campaign [--count 1000] [--seed 0]

A batch starts 2 to 4 ranks and injects its faults one after the other, each into a new group that runs random public
ops forward and backward, on shared memory or gloo. Ranks are killed one by one, except rank 0; the survivors continue.
A fault counts as a hang if a rank has no error long after its deadline, as a wrong class if the error is not the one
in FAULTS, as a leak if a rank holds more segments, mappings, pidfds, threads or children than before.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import resource
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

import fused_tp
from fused_tp.core.settings import override_environment
from tests import faults
from tests.distributed import test_failures
from tests.distributed.shm_tools import core_resources
from tests.faults import MATMULS, NOTICE_SECONDS, OPS
from tests.workers import error_of, fresh_ranks

BATCH = 25
MEET_SECONDS = 40.0
NONE, LOST, LATE, OTHER = "none", "PeerLostError", "CollectiveTimeoutError", "RankMismatchError"
ANY = f"{LOST}|{LATE}|FusedTPError"


class Fault(NamedTuple):
    """A fault of one rank, its share per thousand, and the errors that the rank and its peers raise."""

    about: str
    share: int
    victim: str
    peers: str
    first: bool = False  # before the group's first call
    seconds: float = 60.0  # FUSED_TP_TIMEOUT
    schedules: Sequence[str] = ("one_sided", "plain", "pipelined")
    says: str = ""  # part of the victim's message


FAULTS = {
    "kill": Fault("is killed within a call", 80, "died", LOST),
    "kill first": Fault("is killed before its first call", 20, "died", LOST, first=True),
    "stop": Fault("is stopped for longer than the deadline", 60, ANY, LATE, seconds=0.8),
    "late": Fault("comes after the deadline", 60, ANY, LATE, seconds=0.8),
    "late first": Fault("comes after the deadline of the first call", 20, ANY, LATE, first=True, seconds=0.8),
    "shape": Fault("gives another shape", 90, OTHER, OTHER),
    "dtype": Fault("gives another dtype", 80, OTHER, OTHER),
    "op": Fault("calls another op", 90, OTHER, OTHER),
    "setting": Fault("has another setting", 60, OTHER, OTHER, first=True),
    "raise": Fault("runs out of memory within an op", 80, "OutOfMemory", LOST),
    "fork": Fault("forks a child that calls ops", 80, NONE, NONE),
    "fork first": Fault("forks a child before the first call", 20, NONE, NONE, first=True),
    "destroy": Fault("destroys the group", 120, NONE, LOST),
    "threads": Fault("may start no thread (RLIMIT_NPROC)", 60, "FusedTPError", LOST, first=True, says="RLIMIT_NPROC"),
    "files": Fault("may open no file (RLIMIT_NOFILE)", 40, NONE, NONE, first=True, schedules=("",)),
    "memory": Fault("has no address space (RLIMIT_AS)", 40, NONE, NONE, first=True, schedules=("",)),
}
SETTINGS = {"FUSED_TP_SHM": "0", "FUSED_TP_CHECK": "0", "FUSED_TP_RING_GRADIENTS": "input", "FUSED_TP_SM_MARGIN": "3"}


class Record(NamedTuple):
    """Result of one injection on one rank."""

    kind: str
    seconds: float
    said: str
    leaked: str


def meet(name: str, ranks: Sequence[int], mine: Any = None) -> dict[int, Any]:
    """Exchange `mine` among these ranks and return it by rank; over the store, which outlives every rank."""
    store, deadline = _get_default_store(), time.monotonic() + MEET_SECONDS
    store.set(f"campaign/{name}/{dist.get_rank()}", json.dumps(mine))
    keys = {rank: f"campaign/{name}/{rank}" for rank in ranks}
    while not store.check(list(keys.values())):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all of ranks {list(ranks)} came to {name}: a hang")
        time.sleep(0.005)  # store.wait would not honour this deadline
    return {rank: json.loads(store.get(key)) for rank, key in keys.items()}


def resources() -> dict[str, int]:
    gc.collect()
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("fused_tp store")]
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {**core_resources(), "threads": len(ours), "children": len(children)}


def until_error(run: Callable[..., object]) -> tuple[str, str]:
    while True:
        if (error := error_of(run, lost=True)) is not None:
            return type(error).__name__, str(error)


# ---- the victim; its peers call ops until one raises, or make as many calls as the victim ----------------------------


def in_a_child(run: Callable[..., object]) -> str:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, str(error_of(run)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    said = os.read(read, 10_000).decode()
    os.close(read)
    os.close(write)
    assert "is a fork of rank" in said, said
    return said


def limited(fault: str) -> ExitStack:
    """Scope without threads, files or address space. RLIMIT_NPROC is simulated, because root ignores that limit."""
    scope = ExitStack()
    if fault == "threads":
        none = mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread"))
        scope.enter_context(none)
        return scope
    which, now = resource.RLIMIT_NOFILE, max(map(int, os.listdir("/proc/self/fd"))) + 1
    if fault == "memory":
        which, now = resource.RLIMIT_AS, int(Path("/proc/self/statm").read_text().split()[0]) * 4096 + (256 << 20)
    before = resource.getrlimit(which)
    resource.setrlimit(which, (now, before[1]))
    scope.callback(resource.setrlimit, which, before)
    return scope


def raising(group: Any, schedule: str) -> tuple[str, str]:
    places = {"one_sided": "shared memory", "plain": "after a gather", "pipelined": "shards"}
    place = test_failures.PLACES[places[schedule]]
    double = test_failures.at_call(place.number, getattr(place.where, place.name))
    with mock.patch.object(place.where, place.name, double):
        error = error_of(OPS["all_gather_matmul"], group, 1.0)
    return type(error).__name__, str(error)


def suffer(name: str, group: Any, schedule: str, run: Callable[..., object], peers: list[int], delay: float) -> Any:
    """Run the victim's part; return the class and the message of its error."""
    kind = name.split()[0]
    if kind == "kill":
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        time.sleep(delay + 1.0 if name == "kill first" else 0.0)  # dies before its call
        return until_error(run)
    if kind == "stop":
        return until_error(run)  # a peer stops it
    if kind == "late":
        meet(f"gave up {group.group_name}", [*peers, dist.get_rank()])
        return until_error(run)
    if kind == "raise":
        return raising(group, schedule)
    if kind == "fork":
        return NONE, in_a_child(run)
    if kind == "destroy":
        time.sleep(delay)  # random: the others may be waiting for this rank already, or not yet
        dist.destroy_process_group(group)
        return NONE, ""
    with limited(kind):
        error = error_of(run)
    return (NONE if error is None else type(error).__name__), str(error)


def inject(number: int, name: str, schedule: str, victim: int, alive: list[int], rng: random.Random) -> Record:
    """Take part in one fault, as its victim or as a peer."""
    fault, rank, before = FAULTS[name], dist.get_rank(), resources()
    kind, delay = name.split()[0], rng.random() * 0.05
    ops, setting = rng.sample(list(OPS), 3), rng.choice(list(SETTINGS))
    if kind == "raise":  # raises within this op
        ops = ["all_gather_matmul"]
    peers = [other for other in alive if other != victim]
    pids = meet(f"{number} begins", alive, os.getpid())
    env = {"FUSED_TP_TIMEOUT": str(fault.seconds)}
    if schedule:
        env["FUSED_TP_SCHEDULE"] = schedule
    if kind in ("shape", "dtype", "op", "setting"):
        env["FUSED_TP_CHECK"] = "1"
    with override_environment(env):
        # torch may reuse the name of an earlier group of the same ranks for a group that only its members make.
        group = dist.new_group(alive, use_local_synchronization=len(alive) < dist.get_world_size())
        run = faults.calls_of(group, [MATMULS[0], *ops] if kind == "threads" else ops)
        if not fault.first:
            with override_environment({"FUSED_TP_TIMEOUT": "60"}):
                for _op in ops:
                    run()
        meet(f"{number} is set up", alive)
        begun = time.monotonic()
        if kind in ("shape", "dtype", "op", "setting"):
            differs = kind == "setting" and rank == victim
            call, _ = test_failures.DISAGREE["op" if kind == "setting" else kind]
            with override_environment({setting: SETTINGS[setting]} if differs else {}):
                error = error_of(call, group, kind != "setting" and rank == victim)
            found = type(error).__name__, str(error)
            seconds = time.monotonic() - begun
            run()  # the group remains usable
        elif rank == victim:
            found = suffer(name, group, schedule, run, peers, delay)
            seconds = time.monotonic() - begun if kind not in ("stop", "late", "kill") else 0.0
        else:
            if kind == "stop" and rank == 0:
                threading.Timer(delay, os.kill, (pids[victim], signal.SIGSTOP)).start()
            if fault.peers == NONE:
                error = error_of(run)
                found = type(error).__name__ if error else NONE, str(error)
            else:
                found = until_error(run)
            seconds = time.monotonic() - begun
            if kind == "stop":
                meet(f"{number} gave up", peers)
                if rank == 0:
                    os.kill(pids[victim], signal.SIGCONT)
            if kind == "late":
                meet(f"gave up {group.group_name}", alive)
        if kind == "fork":
            error = error_of(run) if rank == victim else None
            assert error is None, error
        del run
    meet(f"{number} ends", peers if kind == "kill" else alive)
    if group in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)
    del group
    after = resources()
    leaked = ", ".join(f"{after[what] - before[what]} {what}" for what in before if after[what] > before[what])
    return Record(found[0], seconds, found[1], leaked)


def batch(_: Any, plan: list[tuple[int, str, int]]) -> list[tuple[str, str, int, int, dict[int, Any]]]:
    """Run the batch; return the records of every injection by rank."""
    alive, found = list(range(dist.get_world_size())), []
    fused_tp.all_reduce(torch.ones(1), group=None)
    for number, name, seed in plan:
        rng = random.Random(seed)
        victim, schedule = rng.choice(alive[1:]), rng.choice(list(FAULTS[name].schedules))
        place = alive.index(victim)  # its rank in the group, which errors name
        record = inject(number, name, schedule, victim, alive, rng)
        if FAULTS[name].victim == "died":
            alive = [rank for rank in alive if rank != victim]
        found.append((name, schedule, victim, place, meet(f"{number} found", alive, record)))
    return found


# ---- the campaign ----------------------------------------------------------------------------------------------------


def plan_of(count: int, seed: int) -> list[tuple[int, list[tuple[int, str, int]]]]:
    """World sizes and injections by batch. The last injections of a batch of W ranks kill up to W - 1 of them."""
    rng = random.Random(seed)
    total, names = sum(fault.share for fault in FAULTS.values()), []
    for name, fault in FAULTS.items():
        names += [name] * max(1, round(fault.share * count / total))
    rng.shuffle(names)
    kills = [name for name in names[:count] if name.startswith("kill")]
    rest = [name for name in names[:count] if not name.startswith("kill")]
    batches = []
    number = 0
    while rest or kills:
        size = rng.choice((2, 3, 3, 4))
        chosen, rest = rest[: BATCH - size + 1], rest[BATCH - size + 1 :]
        chosen, kills = chosen + kills[: size - 1], kills[size - 1 :]
        batches.append((size, [(number + at, name, rng.randrange(1 << 30)) for at, name in enumerate(chosen)]))
        number += len(chosen)
    return batches


class Tally:
    """Counts by fault, and a description of each problem."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {name: Counter() for name in FAULTS}
        self.slowest: defaultdict[str, float] = defaultdict(float)
        self.wrong: list[str] = []

    def add(self, where: str, name: str, schedule: str, victim: int, place: int, records: dict[int, Any]) -> None:
        fault, count = FAULTS[name], self.counts[name]
        count["injected"] += 1
        found = {int(rank): Record(*one) for rank, one in records.items()}
        named = any(faults.names(one.said, place) for rank, one in found.items() if rank != victim)
        for rank, (kind, seconds, said, leaked) in found.items():
            wanted = fault.victim if rank == victim else fault.peers
            problems = [] if named or fault.peers == NONE else ["the victim is not named"]
            if kind not in wanted.split("|") or (rank == victim and fault.says not in said):
                problems.append("wrong class")
            if seconds > min(30.0, fault.seconds + NOTICE_SECONDS):
                problems.append("hang")
            if leaked:
                problems.append("leak")
            self.slowest[name] = max(self.slowest[name], seconds)
            for problem in problems:
                count[problem] += 1
                self.wrong.append(
                    f"{where}, {name} of rank {victim} on {schedule or 'the table'}: {problem} on rank {rank}: {kind} "
                    f"after {seconds:.1f} s, leaked {leaked or 'nothing'}: {said[:300]}"
                )

    def table(self) -> str:
        lines = ["| a rank | injected | its peers raise | slowest | hangs | wrong classes | leaks |", "|---" * 7 + "|"]
        for name, fault in FAULTS.items():
            count, peers = self.counts[name], "nothing" if fault.peers == NONE else f"`{fault.peers}`"
            bad = " | ".join(str(count[what]) for what in ("hang", "wrong class", "leak"))
            lines.append(f"| {fault.about} | {count['injected']} | {peers} | {self.slowest[name]:.1f} s | {bad} |")
        return "\n".join(lines)


def campaign(count: int, seed: int, report: Callable[[str], object] = print) -> Tally:
    tally, left_before = Tally(), faults.left_in_dev_shm()
    for at, (size, plan) in enumerate(plan_of(count, seed)):
        where, begun = f"seed {seed}, batch {at} of {size} ranks", time.monotonic()
        try:
            outcomes = fresh_ranks(size, batch, plan, timeout=240, env={"FUSED_TP_SCHEDULE": None}, expect_deaths=True)
            for injected in outcomes[0].unwrap():
                tally.add(where, *injected)
        except Exception as error:  # raised by a rank: the rest of its batch is lost, other batches run
            tally.wrong.append(f"{where}: hang or crash: {type(error).__name__}: {str(error)[-3000:]}")
        report(f"{where}: {len(plan)} faults, {time.monotonic() - begun:.0f} s, {len(tally.wrong)} wrong so far")
    if left := faults.left_in_dev_shm() - left_before:
        tally.wrong.append(f"left in /dev/shm: {left}")
    return tally


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(given)
    tally = campaign(arguments.count, arguments.seed, lambda said: print(said, flush=True))
    print("\n".join([*tally.wrong, tally.table()]), flush=True)
    assert not tally.wrong, f"{len(tally.wrong)} faults were not met as they should be"


if __name__ == "__main__":
    # Imported under its own name: ranks import the function they run by its module's name.
    from tests.campaign import main as campaign_main

    campaign_main()
