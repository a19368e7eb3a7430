"""Measure the schedules of the matmul ops here and write the dispatch table that follows: `fused-tp bench --tune`.

The table in force is the incumbent. A schedule takes its place at a size only if it is faster by a clear margin in
three quarters of the rounds, so a noisy run changes nothing, and tuning twice gives what tuning once gave. Other ops
keep the choices they had.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import re
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fused_tp.runtime import dispatch, settings
from fused_tp.runtime.settings import environment

from .case import DTYPES, Case, Contestant, Makers, paired, slowest
from .cpu_matmul import operands, shared_memory
from .ranks import RankContext, Ranks
from .results import write_whole
from .runner import run_case

MARGIN = 0.95  # of the incumbent's time, to be undercut by the third quartile of the paired ratios
FEATURES = 2048
ROWS = (2, 16, 64, 256, 1024)
ROUNDS = 15
MIN_ROUNDS = 9
SECONDS = 300.0  # the longest that one size may take
TUNED_DTYPES = {name: DTYPES[name] for name in ("bf16", "fp32")}
OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
SCHEDULES = {"shm": ("one_sided", "pipelined", "plain"), "gloo": ("pipelined", "plain")}  # of each transport

Rule = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """Seconds by schedule and round, of one op at one size."""

    op: str
    dtype: torch.dtype
    rows: int
    seconds: Mapping[str, Sequence[float]]

    @property
    def nbytes(self) -> int:
        """Of the tensor that is the same on all ranks, which is what the table's max_bytes counts."""
        return self.rows * FEATURES * self.dtype.itemsize


def tune(path: Path, world_size: int, rounds: int = ROUNDS, say: Callable[[str], None] = print) -> None:
    """Measure and write the table to `path`, then say what changed and how to use it.

    Raises:
        RankFailure: the ranks did not get through; `path` is as it was.
        ValueError: the table in force is not one, or `rounds` are too few.
    """
    if rounds < MIN_ROUNDS:
        raise ValueError(f"rounds is {rounds}; a choice by three quarters of the rounds needs {MIN_ROUNDS} at least.")
    named = settings.table_path()
    if named is not None and Path(named) == path and not path.exists():
        del os.environ["FUSED_TP_TABLE"]  # it is about to be written: until then the shipped table is in force
    table = dispatch.load_table(settings.table_path())
    tuned, changes = _rewritten(table, _measure(world_size, rounds, say), world_size)
    for change in changes:
        say(change)
    about = f"Written by fused-tp bench --tune for {world_size} ranks. The format is that of the shipped dispatch.json."
    # JSON with a rule to a line: people read and edit tables.
    text = json.dumps({"about": about, "arch": tuned}, indent=1)
    write_whole(path, re.sub(r"\{[^{}]*\}", lambda rule: json.dumps(json.loads(rule[0])), text) + "\n")
    choices = "1 choice" if len(changes) == 1 else f"{len(changes) or 'no'} choices"
    use = f"to use it: export FUSED_TP_TABLE={shlex.quote(str(path.resolve()))}"
    if named is not None and Path(named) == path:
        use = "FUSED_TP_TABLE names it already"
    say(f"{path}: {choices} changed; {use}. A process reads its table once: start anew what runs already.")


def _measure(world_size: int, rounds: int, say: Callable[[str], None]) -> list[Measured]:
    measured: list[Measured] = []
    sizes = sorted({-(-rows // world_size) * world_size for rows in ROWS})  # the gather has equally much of each rank
    with Ranks(world_size) as ranks:
        for op, (name, dtype), rows in itertools.product(OPS, TUNED_DTYPES.items(), sizes):
            case = Case(f"{op}/{name}/M={rows}", schedules_of, {"op": op, "dtype": name, "rows": rows})
            times = ranks.call(run_case, case, rounds, 1.0, seconds=SECONDS)
            for schedule, reason in times[0].skipped.items() if not measured else ():
                say(f"{schedule} {reason}")
            seconds = {schedule: slowest([t.seconds[schedule] for t in times]) for schedule in times[0].seconds}
            measured.append(Measured(op, dtype, rows, seconds))
            medians = (f"{schedule} {1e3 * statistics.median(t):.3g} ms" for schedule, t in seconds.items())
            say(f"{case.name}: {', '.join(medians)}")
    return measured


def _rewritten(
    table: dict[str, Any], measured: Sequence[Measured], world_size: int
) -> tuple[dict[str, Any], list[str]]:
    """The table that follows from what was measured, and a sentence for each choice that differs from `table`'s."""
    changes: list[str] = []
    for transport, op, (name, dtype) in itertools.product(SCHEDULES, OPS, TUNED_DTYPES.items()):
        mine = [m for m in measured if m.op == op and m.dtype == dtype]
        if not all(schedule in m.seconds for m in mine for schedule in SCHEDULES[transport]):
            continue  # no shared memory here
        winners = [(m.nbytes, _winner(m, transport, world_size)) for m in mine]
        changed = [
            f"{op}/{name}/M={m.rows} over {transport}: {_change(m, _incumbent(m, transport, world_size), new)}"
            for m, (_, new) in zip(mine, winners, strict=True)
            if new != _incumbent(m, transport, world_size)
        ]
        if changed:
            table = retuned(table, transport, op, dtype, world_size, winners)
        changes += changed
    return table, changes


def _change(measured: Measured, old: str, new: str) -> str:
    if old not in measured.seconds:
        return f"{new} in place of {old}, which did not run"
    ratio = paired(measured.seconds[new], measured.seconds[old])
    return f"{new} in place of {old}, in {ratio.median:.2f} [{ratio.q1:.2f}, {ratio.q3:.2f}] of its time"


def challenge(incumbent: str, seconds: Mapping[str, Sequence[float]]) -> str:
    """The schedule to use: `incumbent` unless another undercuts it clearly. Takes seconds by schedule and round.

    Example:
        >>> challenge("plain", {"plain": [1.0, 1.0, 1.0], "pipelined": [0.97, 0.97, 0.5]})
        'plain'
    """
    if incumbent not in seconds:
        return min(seconds, key=lambda name: sorted(seconds[name])[len(seconds[name]) // 2])
    ratios = {name: paired(times, seconds[incumbent]) for name, times in seconds.items()}
    clear = [name for name, ratio in ratios.items() if ratio.q3 < MARGIN]
    return min(clear, key=lambda name: ratios[name].median, default=incumbent)


def retuned(
    table: Mapping[str, Any],
    transport: str,
    op: str,
    dtype: torch.dtype,
    world_size: int,
    winners: Sequence[tuple[int, str]],
) -> dict[str, Any]:
    """`table` with rules for one op and dtype on CPU: `winners` are (bytes moved, schedule), sizes ascending.

    Rules of other dtypes and group sizes stay, and follow the new ones.
    """
    tuned = copy.deepcopy(dict(table))
    transports = tuned.setdefault("cpu", copy.deepcopy(tuned.get("default", {})))
    ops = transports.setdefault(transport, copy.deepcopy(transports.get("default", {})))
    scope = {"dtypes": [str(dtype).removeprefix("torch.")], "world_sizes": [world_size]}
    kept = [rule for rule in ops.get(op, ops.get("default", [])) if any(rule.get(key) != scope[key] for key in scope)]
    new: list[Rule] = []
    for (nbytes, schedule), following in zip(winners, [*winners[1:], None], strict=True):
        if following is None:
            new.append({"schedule": schedule, **scope})
        elif following[1] != schedule:
            # Between two sizes that want different schedules the change is put at their geometric mean.
            new.append({"schedule": schedule, "max_bytes": math.isqrt(nbytes * following[0]), **scope})
    ops[op] = new + kept
    return tuned


def schedules_of(context: RankContext, op: str, dtype: str, rows: int) -> Makers:
    """One op on every schedule."""
    import fused_tp

    call = getattr(fused_tp, op)
    x, weight = operands(context, op, dtype, rows, FEATURES)

    def contestant(schedule: str) -> Contestant:
        if schedule == "one_sided":
            shared_memory()

        def run() -> None:
            with environment({"FUSED_TP_SCHEDULE": schedule}):
                call(x, weight, group=None)

        return Contestant(run)

    return {schedule: partial(contestant, schedule) for schedule in SCHEDULES["shm"]}


def _winner(measured: Measured, transport: str, world_size: int) -> str:
    possible = {name: times for name, times in measured.seconds.items() if name in SCHEDULES[transport]}
    return challenge(_incumbent(measured, transport, world_size), possible)


def _incumbent(measured: Measured, transport: str, world_size: int) -> str:
    gathers = measured.op == "all_gather_matmul"
    k, n = (FEATURES, None) if gathers else (None, FEATURES)
    key = dispatch.DispatchKey(measured.op, measured.dtype, torch.device("cpu"), measured.rows, k, n)
    return dispatch.choose(key, world_size, transport, "cpu").schedule
