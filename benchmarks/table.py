"""Stored results as a table: `python -m benchmarks.table FILE [FILE ...]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .ratios import MEASURES
from .records import Record, read

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 170  # of a table in a file


def render(records: Sequence[Record], width: int | None = None) -> str:
    """The table as plain text.

    Raises:
        ImportError: rich is not installed.
    """
    from rich.console import Console

    console = Console(width=width or WIDTH, color_system=None)
    with console.capture() as capture:
        console.print(_table(records))
    return capture.get()


def show(records: Sequence[Record]) -> None:
    """Print the table, in colours where the terminal has them."""
    from rich.console import Console

    # A pipe has no width of its own, and rich's guess of 80 columns would cut the names.
    Console(width=None if sys.stdout.isatty() else WIDTH).print(_table(records))


def _table(records: Sequence[Record]) -> Table:
    from rich.table import Table

    machines = {(record.machine.cpu, record.machine.isa, record.machine.cores) for record in records}
    title = "; ".join(f"{cpu}, {isa}, {cores} cores" for cpu, isa, cores in sorted(machines))
    table = Table(title=title, caption="fused_tp against each contestant: median \\[quartiles] of paired ratios")
    for name in ("case", "contestant", "ms", "measure", "value", "bar", "aim", "rounds", "note"):
        table.add_column(name, justify="right" if name in ("ms", "value", "rounds") else "left", overflow="fold")
    previous = ""
    for record in records:
        if previous and record.case != previous:
            table.add_section()
        table.add_row(*_cells(record, record.case != previous))
        previous = record.case
    return table


def _cells(record: Record, first: bool) -> list[str]:
    cells = [record.case if first else "", record.contestant, f"{record.ms.median:.4g}"]
    compared = record.comparison
    if compared is None:
        return [*cells, "", "", "", "", str(record.rounds), record.note]
    value = f"{compared.value.median:.3f} [{compared.value.q1:.3f}, {compared.value.q3:.3f}]".replace("[", "\\[")
    if compared.bar is not None:
        met = MEASURES[compared.measure].meets(compared.value.median, compared.bar)
        value = f"[green]{value} ok[/]" if met else f"[red]{value} missed[/]"
    better = "<=" if MEASURES[compared.measure].lower_is_better else ">="
    bar, aim = ("" if limit is None else f"{better} {limit:g}" for limit in (compared.bar, compared.aim))
    return [*cells, compared.measure, value, bar, aim, str(record.rounds), record.note]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the records of the given files."""
    parser = argparse.ArgumentParser(prog="benchmarks.table", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    files = parser.parse_args(arguments).files
    show([record for file in files for record in read(file)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
