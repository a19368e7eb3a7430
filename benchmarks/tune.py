"""Measure the schedules of the matmul ops and the kernels of attention, and write a dispatch table from the results:
`fused-tp bench --tune`.

The choices of the active table are the incumbents. Another schedule or kernel replaces an incumbent at a size only if
it is faster by a clear margin in three quarters of the rounds, so that a noisy run changes nothing, and tuning twice
has the same result as tuning once. Other ops keep their choices.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fused_tp.attention.kernels.base import KernelRequest
from fused_tp.attention.kernels.select import choose_kernel
from fused_tp.backends.autotune import choose_fastest
from fused_tp.core import dispatch, settings
from fused_tp.core.settings import override_environment

from .case import DTYPES, BenchCase, Contestant, Makers, ratio_quartiles, slowest_rank_seconds
from .cpu_matmul import make_operands, shared_memory_transport
from .ranks import RankContext, Ranks
from .results import write_atomically
from .runner import run_case

FEATURES = 2048
ROWS = (2, 16, 64, 256, 1024)
ROUNDS = 15
MIN_ROUNDS = 9
SECONDS = 300.0  # time limit for one size
TUNED_DTYPES = {name: DTYPES[name] for name in ("bf16", "fp32")}
OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
SCHEDULES = {"shm": ("one_sided", "pipelined", "plain"), "gloo": ("pipelined", "plain")}  # by transport
KERNELS = ("native-cpu", "torch-cpu")
HEAD_DIMS = (64, 128)
TOKENS, HEADS = 2048, 2

Rule = dict[str, Any]
SecondsByName = Mapping[str, Sequence[float]]  # by name and round
KernelTimes = dict[tuple[str, bool], dict[int, SecondsByName]]  # [(dtype, is_backward)][head_dim]


@dataclass(frozen=True)
class OpTimes:
    """Seconds of one op at one size, by schedule and round."""

    op: str
    dtype: torch.dtype
    rows: int
    seconds: SecondsByName

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered or reduced tensor, to which the table's max_bytes refers."""
        return self.rows * FEATURES * self.dtype.itemsize


def tune(path: Path, world_size: int, rounds: int = ROUNDS, print_line: Callable[[str], None] = print) -> None:
    """Measure, write the table to `path`, and report the changes and how to use the table.

    Raises:
        RankFailure: a rank failed; `path` is unchanged.
        ValueError: the active table is invalid, or `rounds` is too small.
    """
    if rounds < MIN_ROUNDS:
        raise ValueError(f"rounds is {rounds}; a choice by three quarters of the rounds needs at least {MIN_ROUNDS}.")
    named_path = settings.table_path()
    if named_path is not None and Path(named_path) == path and not path.exists():
        del os.environ["FUSED_TP_TABLE"]  # the shipped table is active until this run has written the named one
    table = dispatch.load_table(settings.table_path())
    rules = dispatch.attention_rules(settings.table_path())
    tuned_table, changes = _rewrite_schedules(table, _measure_schedules(world_size, rounds, print_line), world_size)
    rules, kernel_changes = _rewrite_kernels(rules, _measure_kernels(world_size, rounds, print_line))
    changes += kernel_changes
    for change in changes:
        print_line(change)
    about = f"Written by fused-tp bench --tune for {world_size} ranks. The format is that of the shipped dispatch.json."
    # One rule per line of JSON, as people read and edit tables.
    text = json.dumps({"about": about, "arch": tuned_table, "attention": rules}, indent=1)
    write_atomically(path, re.sub(r"\{[^{}]*\}", lambda rule: json.dumps(json.loads(rule[0])), text) + "\n")
    choices = "1 choice" if len(changes) == 1 else f"{len(changes) or 'no'} choices"
    usage = f"to use it: export FUSED_TP_TABLE={shlex.quote(str(path.resolve()))}"
    if named_path is not None and Path(named_path) == path:
        usage = "FUSED_TP_TABLE names it already"
    print_line(f"{path}: {choices} changed; {usage}. A process reads its table once: restart running processes.")


def _measure_schedules(world_size: int, rounds: int, print_line: Callable[[str], None]) -> list[OpTimes]:
    all_times: list[OpTimes] = []
    sizes = sorted({-(-rows // world_size) * world_size for rows in ROWS})  # the gather takes equal shards of all ranks
    with Ranks(world_size) as ranks:
        for op, (name, dtype), rows in itertools.product(OPS, TUNED_DTYPES.items(), sizes):
            case = BenchCase(f"{op}/{name}/M={rows}", schedule_makers, {"op": op, "dtype": name, "rows": rows})
            seconds = _measure_seconds(ranks, case, rounds, print_line, names_skipped=not all_times)
            all_times.append(OpTimes(op, dtype, rows, seconds))
    return all_times


def _measure_kernels(world_size: int, rounds: int, print_line: Callable[[str], None]) -> KernelTimes:
    kernel_times: KernelTimes = {}
    with Ranks(world_size) as ranks:
        for dtype, is_backward, head_dim in itertools.product(TUNED_DTYPES, (False, True), HEAD_DIMS):
            name = _kernel_case_name(dtype, is_backward, head_dim)
            case = BenchCase(name, kernel_makers, {"dtype": dtype, "is_backward": is_backward, "head_dim": head_dim})
            kernel_times.setdefault((dtype, is_backward), {})[head_dim] = _measure_seconds(
                ranks, case, rounds, print_line
            )
    return kernel_times


def _measure_seconds(
    ranks: Ranks, case: BenchCase, rounds: int, print_line: Callable[[str], None], *, names_skipped: bool = False
) -> SecondsByName:
    """Measure a case; return the seconds of the slowest rank by contestant and round."""
    times = ranks.call(run_case, case, rounds, 1.0, seconds=SECONDS)
    for contestant, reason in times[0].skip_reasons.items() if names_skipped else ():
        print_line(f"{contestant} {reason}")
    seconds = {
        contestant: slowest_rank_seconds([t.seconds[contestant] for t in times]) for contestant in times[0].seconds
    }
    medians = (f"{name} {1e3 * statistics.median(values):.3g} ms" for name, values in seconds.items())
    print_line(f"{case.name}: {', '.join(medians)}")
    return seconds


def _rewrite_kernels(rules: list[Rule], kernel_times: KernelTimes) -> tuple[list[Rule], list[str]]:
    """Return the attention rules after the measurement, and a sentence for each choice that changed."""
    changes: list[str] = []
    for (dtype, is_backward), seconds_by_head_dim in kernel_times.items():
        choices = []
        for head_dim, seconds in seconds_by_head_dim.items():
            request = KernelRequest(torch.device("cpu"), DTYPES[dtype], head_dim, head_dim, is_backward=is_backward)
            with override_environment({"FUSED_TP_ATTENTION": ""}):
                incumbent = choose_kernel(request)[0].name
            choices.append((_kernel_case_name(dtype, is_backward, head_dim), head_dim, incumbent, seconds))
        winners, new_changes = _choose(choices)
        if new_changes:
            scope = {"dtypes": [str(DTYPES[dtype]).removeprefix("torch.")], "backward": is_backward}
            rules = _rules_by_size("kernel", "max_head_dim", winners, scope) + _other_rules(rules, scope)
        changes += new_changes
    return rules, changes


def _kernel_case_name(dtype: str, is_backward: bool, head_dim: int) -> str:
    return f"attention {'backward' if is_backward else 'forward'}/{dtype}/D={head_dim}"


def _rewrite_schedules(
    table: dict[str, Any], all_times: Sequence[OpTimes], world_size: int
) -> tuple[dict[str, Any], list[str]]:
    """Return the table after the measurement, and a sentence for each choice that differs from `table`."""
    changes: list[str] = []
    for (transport, schedules), op, (name, dtype) in itertools.product(SCHEDULES.items(), OPS, TUNED_DTYPES.items()):
        op_times = [m for m in all_times if m.op == op and m.dtype == dtype]
        if not all(schedule in m.seconds for m in op_times for schedule in schedules):
            continue  # this machine has no shared memory
        winners, new_changes = _choose(
            (
                f"{op}/{name}/M={m.rows} over {transport}",
                m.nbytes,
                _incumbent_schedule(m, transport, world_size),
                {schedule: m.seconds[schedule] for schedule in schedules},
            )
            for m in op_times
        )
        if new_changes:
            table = with_new_rules(table, transport, op, dtype, world_size, winners)
        changes += new_changes
    return table, changes


def _choose(choices: Iterable[tuple[str, int, str, SecondsByName]]) -> tuple[list[tuple[int, str]], list[str]]:
    """Choose at each size. Return pairs (size, winner), and a sentence for each winner that is not the incumbent.

    Args:
        choices: (name, size, incumbent, seconds) of each measurement.
    """
    winners, changes = [], []
    for name, size, incumbent, seconds in choices:
        winner = choose_fastest(seconds, incumbent)
        winners.append((size, winner))
        if winner == incumbent:
            continue
        if incumbent in seconds:
            ratio = ratio_quartiles(seconds[winner], seconds[incumbent])
            gain = f", in {ratio.median:.2f} [{ratio.q1:.2f}, {ratio.q3:.2f}] of its time"
        else:
            gain = ", which did not run"
        changes.append(f"{name}: {winner} in place of {incumbent}{gain}")
    return winners, changes


def with_new_rules(
    table: Mapping[str, Any],
    transport: str,
    op: str,
    dtype: torch.dtype,
    world_size: int,
    winners: Sequence[tuple[int, str]],
) -> dict[str, Any]:
    """Copy `table` with new rules for one op and dtype on CPU: `winners` are (bytes moved, schedule), sizes ascending.

    Rules for other dtypes and group sizes are kept, after the new ones.
    """
    new_table = copy.deepcopy(dict(table))
    transports = new_table.setdefault("cpu", copy.deepcopy(new_table.get("default", {})))
    ops = transports.setdefault(transport, copy.deepcopy(transports.get("default", {})))
    scope = {"dtypes": [str(dtype).removeprefix("torch.")], "world_sizes": [world_size]}
    kept_rules = _other_rules(ops.get(op, ops.get("default", [])), scope)
    ops[op] = _rules_by_size("schedule", "max_bytes", winners, scope) + kept_rules
    return new_table


def _rules_by_size(choice_key: str, limit_key: str, winners: Sequence[tuple[int, str]], scope: Rule) -> list[Rule]:
    """Make the rules for pairs (size, winner), sizes ascending."""
    rules: list[Rule] = []
    for (size, winner), next_winner in zip(winners, [*winners[1:], None], strict=True):
        if next_winner is None:
            rules.append({choice_key: winner, **scope})
        elif next_winner[1] != winner:
            # Two sizes with different winners switch at their geometric mean.
            rules.append({choice_key: winner, limit_key: math.isqrt(size * next_winner[0]), **scope})
    return rules


def _other_rules(rules: Sequence[Rule], scope: Rule) -> list[Rule]:
    return [rule for rule in rules if any(rule.get(key) != scope[key] for key in scope)]


def schedule_makers(context: RankContext, op: str, dtype: str, rows: int) -> Makers:
    """Makers for one op on every schedule."""
    import fused_tp

    op_function = getattr(fused_tp, op)
    x, weight = make_operands(context, op, dtype, rows, FEATURES)

    def contestant(schedule: str) -> Contestant:
        if schedule == "one_sided":
            shared_memory_transport()

        def run() -> None:
            with override_environment({"FUSED_TP_SCHEDULE": schedule}):
                op_function(x, weight, group=None)

        return Contestant(run)

    return {schedule: partial(contestant, schedule) for schedule in SCHEDULES["shm"]}


def kernel_makers(context: RankContext, dtype: str, is_backward: bool, head_dim: int) -> Makers:
    """Makers for one direction of causal attention on one rank, by each of KERNELS."""
    from fused_tp.ops.ring_attention import ring_attention_from_head

    tensors = (torch.randn(1, TOKENS, HEADS, head_dim).to(DTYPES[dtype]) for _ in range(4))
    q, k, v, d_out = (tensor.requires_grad_(is_backward) for tensor in tensors)

    def contestant(kernel: str) -> Contestant:
        out = ring_attention_from_head(q, k, v, None, is_unsharded=True, causal=True) if is_backward else q

        def run() -> object:
            with override_environment({"FUSED_TP_ATTENTION": kernel}):
                if is_backward:
                    return torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)
                return ring_attention_from_head(q, k, v, None, is_unsharded=True, causal=True)

        return Contestant(run)

    return {kernel: partial(contestant, kernel) for kernel in KERNELS}


def _incumbent_schedule(times: OpTimes, transport: str, world_size: int) -> str:
    is_gather = times.op == "all_gather_matmul"
    k, n = (FEATURES, None) if is_gather else (None, FEATURES)
    key = dispatch.ScheduleKey(times.op, times.dtype, torch.device("cpu"), times.rows, k, n)
    return dispatch.choose_schedule(key, world_size, transport, "cpu").schedule
