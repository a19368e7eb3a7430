"""Ranks that are killed, stopped, interrupted or leave while the others are in an op: what the others see, and when.

    python -m tests.faults kill --count 50 --seed 1 --schedule one_sided

A rank costs a fork, not an import of torch: this process imports everything, starts no thread, and forks W children per
trial, which join over a FileStore. Every trial prints one line of JSON. Times are CLOCK_MONOTONIC, one for all.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fused_tp
from fused_tp.runtime.errors import FusedTPError
from tests import forks
from tests.workers import REPOSITORY, die_with_parent

TRIAL_SECONDS = 60
NOTICE_SECONDS = 2.0  # how long a loss may go unnoticed
Step = Callable[[], Any]


@dataclass
class Report:
    """What one rank has to say: its error, when it came, and whether a group of the survivors then worked."""

    rank: int
    error: str = ""
    message: str = ""
    at: float = 0.0
    again: str = ""
    survivors_work: bool = False
    crash: str = ""


@dataclass
class Trial:
    op: str
    schedule: str
    victim: int
    at: float
    reports: list[Report] = field(default_factory=list)
    left_in_dev_shm: list[str] = field(default_factory=list)


# ---- the ops ---------------------------------------------------------------------------------------------------


def make_step(op: str, group: Any) -> Step:
    """One forward and, where there is one, backward of a public op, on shapes the ranks agree about."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    m, k, n = 4 * size, 64, 8 * size
    torch.manual_seed(rank)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, requires_grad=True)

    x, w, wide = leaf(m, k), leaf(n, k), leaf(m, 8)
    residual, norm = torch.randn(m, n), torch.ones(n)
    target = torch.arange(m) % n
    qkv = [torch.randn(1, 2 * 8, 2, 16, requires_grad=True) for _ in range(3)]
    large = torch.randn(400_000, requires_grad=True)
    steps: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: fused_tp.all_gather(x, 0, group=group),
        "all_gather_matmul": lambda: fused_tp.all_gather_matmul(x, w, group=group),
        "all_reduce": lambda: fused_tp.all_reduce(large, group=group),
        "all_reduce_rms_norm": lambda: fused_tp.all_reduce_rms_norm(
            torch.mm(x, w.t()), residual, norm, 1e-5, group=group
        )[0],
        "column_parallel_matmul": lambda: fused_tp.column_parallel_matmul(x, w, group=group),
        "matmul_all_reduce": lambda: fused_tp.matmul_all_reduce(x, w, group=group),
        "matmul_all_reduce_rms_norm": lambda: fused_tp.matmul_all_reduce_rms_norm(
            x, w, residual, norm, 1e-5, group=group
        )[0],
        "matmul_reduce_scatter": lambda: fused_tp.matmul_reduce_scatter(x, w, group=group),
        "reduce_scatter": lambda: fused_tp.reduce_scatter(wide, 0, group=group),
        "vocab_parallel_cross_entropy": lambda: fused_tp.vocab_parallel_cross_entropy(wide, target, group=group),
    }
    for attention in ("ring_attention", "ulysses_attention"):
        if hasattr(fused_tp, attention):
            heads = [t.repeat(1, 1, size, 1) for t in qkv]
            steps[attention] = partial(getattr(fused_tp, attention), *heads, group=group)
    forward = steps[op]

    def step() -> None:
        out = forward()
        (out[0] if isinstance(out, tuple) else out).float().sum().backward()

    return step


def op_names() -> list[str]:
    """The public ops that move anything (explain does not)."""
    names = """all_gather all_gather_matmul all_reduce all_reduce_rms_norm column_parallel_matmul matmul_all_reduce
    matmul_all_reduce_rms_norm matmul_reduce_scatter reduce_scatter ring_attention ulysses_attention
    vocab_parallel_cross_entropy"""
    return [name for name in names.split() if hasattr(fused_tp, name)]


# ---- forked ranks ----------------------------------------------------------------------------------------------


@dataclass
class Rank:
    """One rank, in its own process."""

    rank: int
    size: int
    folder: Path
    step: Step
    report: Report

    def say(self, what: str) -> None:
        (self.folder / what).touch()

    def wait_for(self, *what: str) -> None:
        while not all((self.folder / name).exists() for name in what):
            time.sleep(0.01)

    def get_ready(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.step()
        dist.barrier()
        self.say(f"ready{self.rank}")

    def run(self) -> None:
        """Calls the op until it fails, which it reports."""
        with self._reported(self.report):
            while True:
                self.step()

    def run_again(self) -> None:
        """Calls the op once more after an error, which it reports."""
        again = Report(self.rank)
        with self._reported(again):
            self.step()
        self.report.again = f"{again.error}: {again.message}"

    @contextlib.contextmanager
    def _reported(self, report: Report) -> Iterator[None]:
        try:
            yield
        except (FusedTPError, KeyboardInterrupt) as error:
            report.at = time.monotonic()
            report.error, report.message = type(error).__name__, str(error)


class Ranks:
    """W forked children running `main(rank)` with `op` to call, each of which gets ready and ends with its report."""

    def __init__(self, op: str, schedule: str, size: int, main: Callable[[Rank], None]) -> None:
        self.size = size
        # Not a TemporaryDirectory: some trials run exit handlers in a fork, and its own would remove the folder there.
        self.folder = Path(tempfile.mkdtemp(prefix="fused_tp_faults_"))
        os.environ["FUSED_TP_SCHEDULE"] = schedule
        self.before = dev_shm()
        self.pids = [self._fork(rank, op, main) for rank in range(size)]
        self.codes: dict[int, int] = {}
        self._wait_ready()

    def _fork(self, rank: int, op: str, main: Callable[[Rank], None]) -> int:
        sys.stdout.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        die_with_parent(parent)
        report = Report(rank)
        try:
            store = dist.FileStore(str(self.folder / "store"), self.size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=self.size)
            main(Rank(rank, self.size, self.folder, make_step(op, dist.group.WORLD), report))
        except BaseException:
            report = Report(rank, crash=traceback.format_exc())
        unfinished = self.folder / f"unfinished{rank}"
        unfinished.write_text(json.dumps(asdict(report)))
        unfinished.rename(self.folder / f"report{rank}")
        os._exit(0)  # this is a fork: the parent's exit handlers are not its own

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + TRIAL_SECONDS
        while not all((self.folder / f"ready{rank}").exists() for rank in range(self.size)):
            if time.monotonic() > deadline or (self.folder / "report0").exists():
                raise TimeoutError(f"the ranks did not get ready: {self._reports(())}")
            time.sleep(0.002)

    def signal(self, number: int, *ranks: int) -> float:
        """Sends the signal to these ranks and returns when."""
        at = time.monotonic()
        for rank in ranks:
            os.kill(self.pids[rank], number)
        return at

    def finish(self, trial: Trial, dead: tuple[int, ...] = ()) -> Trial:
        """The trial with the reports of all but `dead`, and what all have left in shared memory."""
        trial.reports = self._reports(dead)
        trial.left_in_dev_shm = sorted(dev_shm() - self.before)
        return trial

    def _reports(self, dead: tuple[int, ...]) -> list[Report]:
        """Kills who does not come to an end."""
        deadline = time.monotonic() + TRIAL_SECONDS
        while len(self.codes) < self.size:
            for rank, pid in enumerate(self.pids):
                if rank not in self.codes and os.waitpid(pid, os.WNOHANG)[0]:
                    self.codes[rank] = 0
            if time.monotonic() > deadline:
                self.signal(signal.SIGKILL, *(set(range(self.size)) - set(self.codes)))
            time.sleep(0.002)
        reports = []
        for rank in set(range(self.size)) - set(dead):
            said = self.folder / f"report{rank}"
            reports.append(Report(**json.loads(said.read_text())) if said.exists() else Report(rank, crash="stuck"))
        shutil.rmtree(self.folder)
        return reports


def dev_shm() -> set[str]:
    with contextlib.suppress(OSError):
        return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}  # of others' multiprocessing
    return set()


# ---- trials ----------------------------------------------------------------------------------------------------


def kill_trial(op: str, schedule: str, size: int, chance: random.Random) -> Trial:
    """SIGKILL one rank at some moment of an endless loop of `op`."""
    victim = chance.randrange(size)

    def main(me: Rank) -> None:
        me.get_ready()
        me.run()
        me.run_again()
        survivors = [rank for rank in range(size) if rank != victim]
        group = dist.new_group(survivors, use_local_synchronization=True)
        total = fused_tp.all_reduce(torch.full((3,), float(me.rank)), group=group)
        me.report.survivors_work = total.tolist() == [float(sum(survivors))] * 3

    ranks = Ranks(op, schedule, size, main)
    time.sleep(chance.random() * 0.05)
    at = ranks.signal(signal.SIGKILL, victim)
    return ranks.finish(Trial(op, schedule, victim, at), dead=(victim,))


def stall_trial(op: str, schedule: str, size: int, chance: random.Random) -> Trial:
    """SIGSTOP one rank for longer than the deadline, then let it go on."""
    victim = chance.randrange(size)
    others = [f"gave_up{rank}" for rank in range(size) if rank != victim]

    def main(me: Rank) -> None:
        me.get_ready()
        me.run()
        me.run_again()
        me.say(f"gave_up{me.rank}")
        if me.rank != victim:
            me.wait_for(f"gave_up{victim}")  # its end would be another reason to fail

    ranks = Ranks(op, schedule, size, main)
    time.sleep(chance.random() * 0.05)
    at = ranks.signal(signal.SIGSTOP, victim)
    while not all((ranks.folder / name).exists() for name in others) and time.monotonic() < at + TRIAL_SECONDS:
        time.sleep(0.01)
    ranks.signal(signal.SIGCONT, victim)
    return ranks.finish(Trial(op, schedule, victim, at))


def massacre_trial(op: str, schedule: str, size: int, chance: random.Random) -> Trial:
    """SIGKILL all ranks at once."""

    def main(me: Rank) -> None:
        me.get_ready()
        me.run()

    ranks = Ranks(op, schedule, size, main)
    at = ranks.signal(signal.SIGKILL, *range(size))
    return ranks.finish(Trial(op, schedule, -1, at), dead=tuple(range(size)))


def early_trial(op: str, schedule: str, size: int, chance: random.Random) -> Trial:
    """SIGKILL one rank that has joined the group but not yet called anything of fused_tp, while the others wait."""
    victim = chance.randrange(size)

    def main(me: Rank) -> None:
        me.get_ready(steps=0)
        if me.rank == victim:
            time.sleep(TRIAL_SECONDS)  # until it is killed
        me.run()

    ranks = Ranks(op, schedule, size, main)
    time.sleep(chance.random())
    at = ranks.signal(signal.SIGKILL, victim)
    return ranks.finish(Trial(op, schedule, victim, at), dead=(victim,))


def leave_trial(op: str, schedule: str, size: int, chance: random.Random) -> Trial:
    """One rank ends as a program does that has finished, while the others wait for it."""
    victim = chance.randrange(size)

    def main(me: Rank) -> None:
        me.get_ready()
        if me.rank != victim:
            me.run()
            return
        time.sleep(0.2)  # the others are waiting for it, most likely
        me.report.at = time.monotonic()
        atexit._run_exitfuncs()
        me.wait_for(*(f"report{rank}" for rank in range(size) if rank != victim))  # its end tells them, too

    trial = Ranks(op, schedule, size, main).finish(Trial(op, schedule, victim, 0.0))
    trial.at = next(report.at for report in trial.reports if report.rank == victim)
    trial.reports = [report for report in trial.reports if report.rank != victim]
    return trial


def interrupt_trial(op: str, schedule: str, size: int, chance: random.Random) -> Trial:
    """Ctrl-C for one rank that waits for peers that do not come: in an op, or (every other time) in the rendezvous."""
    in_rendezvous = chance.random() < 0.5

    def main(me: Rank) -> None:
        me.report.again = "rendezvous" if in_rendezvous else "op"
        signal.signal(signal.SIGINT, signal.default_int_handler)
        me.get_ready(steps=0 if in_rendezvous else 1)
        if me.rank == 0:
            me.run()
        else:
            me.wait_for("report0")

    ranks = Ranks(op, schedule, size, main)
    time.sleep(0.3)  # it waits in the op by then, most likely
    at = ranks.signal(signal.SIGINT, 0)
    trial = ranks.finish(Trial(op, schedule, 0, at))
    trial.reports = [report for report in trial.reports if report.rank == 0]
    return trial


def fork_trial(op: str, schedule: str, size: int, chance: random.Random) -> Trial:
    """A rank forks a child, as data loaders do: the child must not speak for the rank, nor its end be the rank's."""

    def main(me: Rank) -> None:
        me.get_ready()
        refused = me.folder / f"refused{me.rank}"
        pid = os.fork()
        if pid == 0:
            try:
                me.step()
            except FusedTPError as error:
                refused.write_text(str(error))
            del me.step
            gc.collect()
            atexit._run_exitfuncs()
            os._exit(0)
        os.waitpid(pid, 0)
        me.report.message = refused.read_text() if refused.exists() else ""
        dist.barrier()
        for _ in range(20):
            me.step()
        me.report.survivors_work = True

    return Ranks(op, schedule, size, main).finish(Trial(op, schedule, -1, time.monotonic()))


# ---- in the test process ---------------------------------------------------------------------------------------


def trials(kind: str, *options: str, timeout: float = 120, **env: str) -> list[Trial]:
    """The trials that `python -m tests.faults <kind> <options>` makes."""
    ours = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "FUSED_TP_TIMEOUT": "30"}
    variables = {**os.environ, **ours, **env}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        if forks.can_fork():
            process: subprocess.Popen[bytes] | forks.Forked
            process = forks.fork("tests.faults", "_forked", [[kind, *options]], variables, err.fileno(), [out.fileno()])
        else:
            command = [sys.executable, "-m", "tests.faults", kind, *options]
            process = subprocess.Popen(
                command, cwd=REPOSITORY, env=variables, stdout=out, stderr=err, start_new_session=True
            )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        out.seek(0)
        err.seek(0)
        assert code == 0, f"{out.read()}\n{err.read()[-5000:]}"
        return [as_trial(json.loads(line)) for line in out.read().splitlines()]


def _forked(out: int, command_line: list[str]) -> None:
    os.setsid()  # to be ended with its ranks
    os.dup2(out, 1)
    sys.argv = ["tests.faults", *command_line]
    main()


def as_trial(said: dict[str, Any]) -> Trial:
    return Trial(**{**said, "reports": [Report(**report) for report in said["reports"]]})


def check_killed(trial: Trial) -> float:
    """Returns how long the last survivor took to notice.

    All name the rank that was lost: those who lost it themselves, and those who were told by a peer that did.
    """
    assert len(trial.reports) == 2 and trial.left_in_dev_shm == [], trial
    for report in trial.reports:
        assert report.error == "PeerLostError", trial
        assert f"rank {trial.victim} died" in report.message or f"lost rank {trial.victim}:" in report.message, trial
        if trial.schedule == "one_sided":
            assert f"rank {trial.victim} died" in report.message, trial
            assert report.again.startswith("PeerLostError: this group is unusable"), trial
        assert "is unusable since an earlier" in report.again, trial
        assert report.survivors_work and not report.crash, trial
    noticed = max(report.at for report in trial.reports) - trial.at
    assert noticed < NOTICE_SECONDS, trial
    return noticed


def kill_many(count: int, seed: int) -> str:
    """Part of `make soak`: `count` kills with shared memory, a few without. What was found, in a sentence."""
    found = []
    for schedule, kills in (("one_sided", count), ("plain", count // 4), ("pipelined", count // 4)):
        options = ("--count", str(kills), "--seed", str(seed), "--schedule", schedule)
        made = trials("kill", *options, timeout=600)
        slowest = max(check_killed(trial) for trial in made)
        found.append(f"{schedule} {len(made)} killed, noticed within {slowest * 1e3:.0f} ms")
    return "; ".join(found)


# ---- on the command line ---------------------------------------------------------------------------------------

TRIALS = {
    "kill": kill_trial,
    "stall": stall_trial,
    "massacre": massacre_trial,
    "early": early_trial,
    "leave": leave_trial,
    "interrupt": interrupt_trial,
    "fork": fork_trial,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trial", choices=sorted(TRIALS))
    parser.add_argument("--count", type=int, default=8, help="how many trials")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--schedule", default="one_sided")
    parser.add_argument("--op", default=None, help="default: the public ops in turn, from one that the seed picks")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chance = random.Random(arguments.seed)
    names = [arguments.op] if arguments.op else op_names()
    first = chance.randrange(len(names))
    for i in range(arguments.count):
        op = names[(first + i) % len(names)]
        trial = TRIALS[arguments.trial](op, arguments.schedule, arguments.ranks, chance)
        print(json.dumps(asdict(trial)), flush=True)


if __name__ == "__main__":
    main()
