"""`fused-tp bench`: the CPU benchmark suite, and with `--tune` this machine's dispatch table."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fused_tp.cli import shipped_module


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the suite, and those of tuning."""
    try:
        shipped_module("benchmarks", "cpu").add_arguments(parser)
    except FileNotFoundError as error:
        parser.error(str(error))
    tuning = parser.add_argument_group("tuning")
    tuning.add_argument(
        "--tune",
        action="store_true",
        help="write the dispatch table of this machine, which should be idle; running processes keep theirs",
    )
    tuning.add_argument(
        "--table",
        type=Path,
        metavar="FILE",
        help="where to (the one that FUSED_TP_TABLE names, else OUT/dispatch.json)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Run the suite or tune; 0 when all went well."""
    if not arguments.tune:
        if arguments.table is not None:
            print("--table is for --tune; the suite runs on the table that FUSED_TP_TABLE names.", file=sys.stderr)
            return 2
        return int(shipped_module("benchmarks", "cpu").main(arguments))
    if arguments.case or arguments.list or arguments.scale != 1.0:
        print("--case, --list and --scale are for the suite; --tune takes --ranks, --rounds, --out.", file=sys.stderr)
        return 2
    from fused_tp.runtime.settings import table_path

    table = arguments.table or Path(table_path() or arguments.out / "dispatch.json")
    tune = shipped_module("benchmarks", "tune")
    try:
        tune.tune(table, arguments.ranks, arguments.rounds or tune.ROUNDS)
    except (tune.RankFailure, ValueError) as error:
        print(f"Tuning did not get through, and {table} is as it was. {error}", file=sys.stderr)
        return 1
    return 0
