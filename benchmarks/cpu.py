"""The CPU suite: `python -m benchmarks.cpu [--case REGEX] [--rounds N] [--out DIR]`.

Takes under ten minutes on two cores. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .plot import plot
from .records import Record, merge, read
from .suite import cpu_cases, run
from .table import show

RANKS = (2, 4, 8, 16)  # what the sizes of all cases divide by


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the suite; `fused-tp bench` has them too."""
    parser.add_argument("--case", default="", metavar="REGEX", help="only cases whose name contains a match")
    parser.add_argument("--rounds", type=_count, metavar="N", help="rounds of each case (as many as fit its time)")
    parser.add_argument("--scale", type=_positive, default=1.0, metavar="X", help="multiply the time for each case (1)")
    parser.add_argument(
        "--ranks", type=int, default=2, choices=RANKS, metavar="W", help="ranks of one thread, a core each (2)"
    )
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument(
        "--out", type=Path, default=Path("out/bench"), metavar="DIR", help="for cpu.jsonl, cpu.png (out/bench)"
    )


def main(options: argparse.Namespace) -> int:
    """Run, print and store; 0 if all cases ran, 1 if one failed, 2 if the arguments do not fit."""
    try:
        cases = [case for case in cpu_cases() if re.search(options.case, case.name)]
    except re.error as error:
        return _refuse(f"--case {options.case!r} is not a regular expression ({error}).")
    if not cases:
        return _refuse(f"--case {options.case!r} matches none of the cases; --list names them.")
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    for needed in ("matplotlib", "rich"):
        importlib.import_module(needed)  # a missing one shows now, not after minutes of measuring
    path = options.out / "cpu.jsonl"
    fresh: list[Record] = []
    failed = 0
    start = time.monotonic()
    for case, records in run(cases, world_size=options.ranks, rounds=options.rounds, scale=options.scale):
        print(f"{time.monotonic() - start:6.1f} s  {case.name}", flush=True)
        failed += not records
        fresh += records
        if records:
            merge(path, records)  # at once: an interrupted run keeps what it has
    return _report(fresh, path) or min(failed, 1)


def _report(records: list[Record], path: Path) -> int:
    if not records:
        return 1
    show(records)
    print(f"Results: {path}")
    stored = read(path)
    if any(record.comparison for record in stored):
        picture = path.with_suffix(".png")
        plot(stored, picture)
        print(f"Picture: {picture}")
    return 0


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return value


def _refuse(sentence: str) -> int:
    print(sentence, file=sys.stderr)
    return 2


def from_command_line(arguments: Sequence[str] | None = None) -> int:
    """`python -m benchmarks.cpu`."""
    parser = argparse.ArgumentParser(prog="benchmarks.cpu", description=__doc__)
    add_arguments(parser)
    return main(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(from_command_line())
