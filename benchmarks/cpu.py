"""The CPU suite: `python -m benchmarks.cpu [--case REGEX] [--rounds N] [--out DIR]`, which is `fused-tp bench`.

A case takes up to four minutes on two cores. Nothing else should run on the machine meanwhile. `--tune` writes the
machine's dispatch table instead; `fused-tp bench serve` compares vLLM or SGLang with and without the plugin.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from fused_tp.cli import at_least, make_folder, positive_number
from fused_tp.core.settings import table_path

from . import cpu_attention, cpu_block, cpu_experts, cpu_matmul, serving
from .case import BenchCase, select_cases
from .plot import plot
from .ranks import RankFailure, Ranks
from .results import Record, make_records, merge_records, read_records, this_machine, versions
from .runner import run_case
from .table import markdown

RANK_COUNTS = (2, 4, 8, 16)  # numbers of ranks that divide the sizes of all cases
# Time for a case to start: the first case that needs DeepSpeed's extension compiles it.
CASE_START_SECONDS = 300.0


def cpu_cases() -> list[BenchCase]:
    """Cases of the CPU suite, in the order of its table."""
    return [*cpu_matmul.cases(), *cpu_attention.cases(), *cpu_block.cases(), *cpu_experts.cases()]


def run_cases(
    cases: Iterable[BenchCase],
    *,
    world_size: int = 2,
    rounds: int | None = None,
    scale: float = 1.0,
    print_line: Callable[[str], None] = print,
) -> Iterator[tuple[BenchCase, list[Record]]]:
    """Run cases one after the other; yield each with its records, empty if it failed.

    Args:
        rounds: rounds of every case; None for as many as fit the case's time.
        scale: multiplies the time of every case.
        print_line: called with a sentence on each skipped contestant and failed case.
    """
    for _, family in itertools.groupby(cases, key=lambda case: case.family):
        ranks: Ranks | None = None
        try:
            for case in family:
                try:
                    # Start new ranks for each family, and after a failure, which ends the ranks.
                    ranks = ranks or Ranks(world_size)
                    deadline = CASE_START_SECONDS + 4 * scale * case.seconds
                    times = ranks.call(run_case, case, rounds, scale, seconds=deadline)
                except RankFailure as error:
                    ranks = None
                    print_line(f"{case.name} failed. {error}")
                    yield case, []
                    continue
                for name, reason in times[0].skip_reasons.items():
                    print_line(f"{case.name}: {name} {reason}")
                yield case, make_records(case, times, world_size, this_machine(), versions())
        finally:
            if ranks is not None:
                ranks.close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the suites and of tuning."""
    parser.add_argument(
        "suite",
        nargs="?",
        default="ops",
        choices=("ops", "serve"),
        help="ops: the ops against plain collectives (default); serve: vLLM or SGLang with and without the plugin",
    )
    parser.add_argument("--case", default="", metavar="REGEX", help="only cases whose name contains a match")
    parser.add_argument("--rounds", type=at_least(1), metavar="N", help="rounds of each case (as many as fit its time)")
    parser.add_argument(
        "--scale", type=positive_number, default=1.0, metavar="X", help="multiply the time for each case (1)"
    )
    parser.add_argument(
        "--ranks", type=int, default=2, choices=RANK_COUNTS, metavar="W", help="ranks of one thread, a core each (2)"
    )
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument(
        "--out", type=Path, default=Path("out/bench"), metavar="DIR", help="for cpu.jsonl, cpu.png (out/bench)"
    )
    parser.add_argument(
        "--tune",
        action="store_true",
        help="write the dispatch table of this machine, which should be idle; running processes keep theirs",
    )
    parser.add_argument(
        "--table",
        type=Path,
        metavar="FILE",
        help="table that --tune writes (default: FUSED_TP_TABLE, else OUT/dispatch.json)",
    )
    serving.add_arguments(parser)


def main(options: argparse.Namespace) -> int:
    """Run, print and store, or tune; exit code 0: done, 1: a case failed, 2: invalid arguments."""
    if options.suite == "serve":
        if options.tune or options.list or options.table is not None or options.scale != 1.0:
            print("--tune, --list, --table and --scale are for the ops; see `fused-tp bench --help`.", file=sys.stderr)
            return 2
        return serving.main(options)
    if options.engine or options.model or options.compile or options.dtype is not None:
        print("--engine, --model, --dtype and --compile are for `fused-tp bench serve`.", file=sys.stderr)
        return 2
    if options.tune:
        return _tune(options)
    if options.table is not None:
        print("--table is for --tune; the suite runs on the table that FUSED_TP_TABLE names.", file=sys.stderr)
        return 2
    try:
        cases = select_cases(cpu_cases(), options.case, "--case")
        if not options.list:
            make_folder("--out", options.out)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    importlib.import_module("matplotlib")  # raise ImportError now, not after minutes of measuring
    path = options.out / "cpu.jsonl"
    new_records: list[Record] = []
    failed_count = 0
    start = time.monotonic()
    for case, records in run_cases(cases, world_size=options.ranks, rounds=options.rounds, scale=options.scale):
        print(f"{time.monotonic() - start:6.1f} s  {case.name}", flush=True)
        failed_count += not records
        new_records += records
        if records:
            merge_records(path, records)  # after each case, so that an interrupted run keeps its records
    if not new_records:
        return 1
    print(markdown(new_records))
    print(f"Results: {path}")
    stored_records = read_records(path)
    if any(record.comparison for record in stored_records):
        picture = path.with_suffix(".png")
        plot(stored_records, picture)
        print(f"Picture: {picture}")
    return min(failed_count, 1)


def _tune(options: argparse.Namespace) -> int:
    from . import tune

    if options.case or options.list or options.scale != 1.0:
        print("--case, --list and --scale are for the suite; --tune takes --ranks, --rounds, --out.", file=sys.stderr)
        return 2
    path = options.table or Path(table_path() or options.out / "dispatch.json")
    try:
        make_folder("--table", path.parent)
        if path.is_dir():
            raise ValueError(f"--table: {path} is a folder; name a file.")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        tune.tune(path, options.ranks, options.rounds or tune.ROUNDS)
    except (RankFailure, ValueError) as error:
        print(f"Tuning failed; {path} is unchanged. {error}", file=sys.stderr)
        return 1
    return 0


def from_command_line(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python -m benchmarks.cpu`."""
    parser = argparse.ArgumentParser(prog="benchmarks.cpu", description=__doc__)
    add_arguments(parser)
    return main(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(from_command_line())
