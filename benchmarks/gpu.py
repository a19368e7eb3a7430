"""GPU suite: `python -m benchmarks.gpu [--out DIR] [--quick] [--check] [--minutes 8] [--only REGEX]`, on one GPU.

Needs torch with CUDA and Triton; run it from the root of a checkout. Cases of csrc/cuda also need the native core and
the device kernels, which nvcc builds beforehand,

    FUSED_TP_CUDA_ARCHS=90a python setup.py build_ext --inplace && python -m benchmarks.gpu

(100a for Blackwell, 80 for Ampere; unset for all); without them those cases are skipped. Nothing else should run on the
GPU meanwhile.

Every result is checked against fp64 before it is timed, and again afterwards. Writes gpu.jsonl and gpu.md to DIR after
each case, prints the table at the end, and lists the cases for which no time was left.

The first run on a machine compiles the kernels, which takes longer than timing them. Triton caches compiled kernels, so
let several processes check the results of some cases each beforehand; they time nothing:

    for prefix in alone/bf16 alone/fp flags ranks attention/ attention-ra attention-ri; do
        python -m benchmarks.gpu --check --only "^$prefix" & done; wait
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fused_tp.cli import positive_number

from .case import MEASURES, BenchCase, Unavailable, select_cases
from .results import Record, make_records, merge_records, write_atomically
from .runner import check_case, run_case
from .table import markdown

if TYPE_CHECKING:  # importing gpu_timing loads Triton
    from .gpu_timing import TimeBudget

MIN_ROUNDS = 5
DEFAULT_MINUTES = 8.0
ROUNDS, QUICK_ROUNDS = 25, 7


def cases(is_quick: bool) -> list[BenchCase]:
    """All cases, the most informative first, since the time may run out."""
    from . import gpu_attention as attention
    from . import gpu_collectives as collectives
    from . import gpu_matmul as matmul

    common = [
        *matmul.matmul_only_cases(["bf16"], is_quick),
        *matmul.flag_cases(is_quick),
        *matmul.rank_cases(2, is_quick),
        *attention.cases(is_quick),
    ]
    small_bytes, large_bytes = collectives.SMALL_BYTES, collectives.LARGE_BYTES
    if is_quick:
        return [
            *collectives.cases(2, (small_bytes[1], large_bytes[0]), (128,), (small_bytes[1],)),
            *collectives.overhead_cases(),
            *common,
        ]
    return [
        *collectives.cases(2, large_bytes),
        *collectives.overhead_cases(),
        *common,
        *collectives.exchange_cases(2, small_bytes),
        *matmul.rank_cases(4, is_quick),
        *collectives.cases(4),
        *matmul.matmul_only_cases(["fp16"], is_quick),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), metavar="DIR", help="for the results (out/gpu)")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds, as a smoke test")
    parser.add_argument("--check", action="store_true", help="check every result; time and write nothing")
    parser.add_argument(
        "--minutes",
        type=positive_number,
        default=DEFAULT_MINUTES,
        metavar="X",
        help=f"time limit; skip cases beyond it ({DEFAULT_MINUTES:g})",
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="only cases whose name contains a match")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a summary here too, after each case")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")


def main(options: argparse.Namespace) -> int:
    """Return 0 if all cases that ran are correct, 1 if one failed, 2 if none can run or the arguments are invalid."""
    try:
        selected_cases = select_cases(cases(options.quick), options.only, "--only")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(case.name for case in selected_cases))
        return 0
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # see benchmarks.local_ranks; before CUDA starts
    os.environ.setdefault("FUSED_TP_TIMEOUT", "20")  # a kernel whose peer never signals must not use up the time
    problem = unsupported_reason()
    if problem:
        print(problem, file=sys.stderr)
        return 2
    import torch

    from .gpu_timing import GpuContext, TimeBudget, gpu_machine, gpu_versions

    budget = TimeBudget(60 * options.minutes)
    device = torch.device("cuda", torch.cuda.current_device())
    context, machine = GpuContext(device), gpu_machine(device)
    path = options.out / "gpu.jsonl"
    records: list[Record] = []
    skip_reasons: list[str] = []

    def write_summary() -> None:
        if options.json is not None:
            write_atomically(options.json, json.dumps(summary(records, skip_reasons), indent=1) + "\n")

    def measure(case: BenchCase) -> Mapping[str, str]:
        rounds = QUICK_ROUNDS if options.quick else ROUNDS
        times = run_case(
            context, case, rounds, has_time=lambda done: done < MIN_ROUNDS or budget.remaining_seconds() > 0
        )
        # Query versions after the measurement: they include the clocks, which should be those under load.
        world_size = int(case.parameters.get("world_size", 1))
        new_records = make_records(case, [times], world_size, machine, gpu_versions(device))
        records.extend(new_records)
        merge_records(path, new_records)  # at once, so that an interrupted run keeps its records
        path.with_suffix(".md").write_text(markdown(records, minutes=budget.spent_seconds() / 60))
        write_summary()
        return times.skip_reasons

    def check(case: BenchCase) -> Mapping[str, str]:
        return check_case(context, case)[1]

    measured_count, skip_reasons[:] = run_all(selected_cases, budget, check if options.check else measure)
    has_failures = any(" failed" in text for text in skip_reasons)
    if options.check:
        print("\n".join([*skip_reasons, f"{measured_count} of {len(selected_cases)} cases have correct results."]))
        return int(has_failures or not measured_count)
    write_summary()
    table = markdown(records, skip_reasons, budget.spent_seconds() / 60)
    options.out.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".md").write_text(table)
    print(f"{table}\nResults: {path} and {path.with_suffix('.md')}")
    return int(has_failures or not records)


def summary(records: Sequence[Record], skip_reasons: Sequence[str]) -> dict[str, Any]:
    """Records as one object for a report: a note, machine and versions once, and one row per contestant."""
    records_with_bar = [
        (record, record.comparison.bar) for record in records if record.comparison and record.comparison.bar is not None
    ]
    met_count = sum(
        MEASURES[c.measure].meets(c.value.median, bar) for record, bar in records_with_bar if (c := record.comparison)
    )
    failures = [text for text in skip_reasons if " failed" in text]
    note = f"{len({record.case for record in records})} cases timed, {met_count} of {len(records_with_bar)} bars met"
    rows = [
        {
            "case": record.case,
            "contestant": record.contestant,
            "ms": record.ms.median,
            "rounds": record.rounds,
            "note": record.note,
            **({"measure": c.measure, "value": c.value.median, "bar": c.bar} if (c := record.comparison) else {}),
        }
        for record in records
    ]
    return {
        "note": f"{note}; {len(failures)} failed: {failures[0]}" if failures else note,
        "machine": asdict(records[-1].machine) if records else {},
        "versions": records[-1].versions if records else {},
        "records": rows,
        "skipped": list(skip_reasons),
    }


def run_all(
    selected_cases: Sequence[BenchCase],
    budget: TimeBudget,
    measure: Callable[[BenchCase], Mapping[str, str]],
    print_line: Callable[[str], None] | None = None,
) -> tuple[int, list[str]]:
    """Measure the cases that fit the budget.

    Args:
        measure: measures a case; returns for each skipped contestant the reason, as the end of a sentence.

    Returns the number of measured cases, and a sentence for each case and contestant that was not measured.
    """
    import torch

    print_line = print_line or partial(print, flush=True)  # flush: a killed run has printed its progress
    measured_count, skip_reasons = 0, []
    for case in selected_cases:
        if not budget.fits(case.seconds):
            skip_reasons.append(f"{case.name}: no time left ({max(budget.remaining_seconds(), 0.0):.0f} s).")
            continue
        start_seconds = budget.spent_seconds()
        try:
            skip_reasons += [f"{case.name}: {name} {reason}" for name, reason in measure(case).items()]
            measured_count += 1
            print_line(f"{budget.spent_seconds():6.1f} s  {case.name}")
        except Unavailable as error:
            skip_reasons.append(f"{case.name}: {error}.")
        except Exception as error:  # a failing case must not end the run
            traceback.print_exc()
            text = f"{case.name} failed. {type(error).__name__}: {error}"
            print_line(f"{budget.spent_seconds():6.1f} s  {text}")
            skip_reasons.append(text.splitlines()[0])
        gc.collect()
        with contextlib.suppress(RuntimeError):  # on a broken GPU every case fails and is reported
            torch.cuda.empty_cache()  # also frees memory of a failed case
        budget.record(case.seconds, budget.spent_seconds() - start_seconds)
    return measured_count, skip_reasons


def unsupported_reason() -> str:
    """Return the reason why the suite cannot run here, as a sentence; '' if it can."""
    import torch

    if not torch.cuda.is_available():
        return "benchmarks.gpu needs an NVIDIA GPU, and torch finds none on this machine."
    if torch.version.hip is not None or torch.cuda.get_device_capability() < (8, 0):
        return f"benchmarks.gpu needs an NVIDIA GPU of sm_80 or later; this is {torch.cuda.get_device_name()}."
    try:
        import triton
    except ImportError:
        return "benchmarks.gpu needs Triton, which comes with torch for CUDA: pip install triton."
    if triton.knobs.runtime.interpret:
        return "benchmarks.gpu measures compiled kernels: unset TRITON_INTERPRET."
    return ""


def from_command_line(arguments: Sequence[str] | None = None) -> int:
    """Run `python -m benchmarks.gpu`."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    add_arguments(parser)
    return main(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(from_command_line())
