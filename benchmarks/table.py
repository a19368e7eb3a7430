"""Print stored results as a Markdown table: `python -m benchmarks.table FILE [FILE ...]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from .case import MEASURES
from .results import Record, read

CLOCKS = ("SM clock", "memory clock")  # clocks of a GPU, read after each case
HEADER = ("case", "contestant", "ms", "fused_tp against it", "needs", "met", "rounds", "note")
ABOUT = """\
`time ratio`: time of fused_tp over that of the other; `speedup`: the other's over fused_tp's; `efficiency`: the
other's over W times fused_tp's. Medians of paired ratios, quartiles in brackets. `microseconds`: fused_tp's own, beside
what the other takes. A GPU's rates count the multiplications of all ranks together, or the bytes that they read and
write at least."""


def markdown(records: Sequence[Record], skipped: Sequence[str] = (), minutes: float | None = None) -> str:
    """Markdown with machine, versions and dates, the table of records, and the skipped measurements."""
    lines = []
    for machine in dict.fromkeys(record.machine for record in records):
        cpu = f"{machine.cpu}, {machine.isa}, {machine.cores} cores."
        lines.append(f"{machine.gpu}; launched by {cpu}" if machine.gpu else cpu)
    found = ("; ".join(f"{name} {v}" for name, v in r.versions.items() if name not in CLOCKS) for r in records)
    lines += [f"{versions}." for versions in dict.fromkeys(found)]
    for name in CLOCKS:
        clocks = sorted({record.versions[name] for record in records if name in record.versions}, key=_leading_number)
        if clocks:
            lines.append(f"{name}: {' to '.join(dict.fromkeys((clocks[0], clocks[-1])))}.")
    dates = sorted(record.date for record in records)
    if dates:
        took = "" if minutes is None else f", in {minutes:.1f} minutes"
        lines.append(f"From {dates[0]} to {dates[-1]}{took}.")
    lines += ["", ABOUT, "", *_aligned([HEADER, *_rows(records)])]
    if skipped:
        lines += ["", "Not measured:", "", *(f"- {text}" for text in skipped)]
    return "\n".join(lines) + "\n"


def _rows(records: Iterable[Record]) -> Iterable[Sequence[str]]:
    previous = ""
    for record in records:
        row = ["" if record.case == previous else record.case, record.contestant, f"{record.ms.median:.4g}"]
        previous = record.case
        compared = record.comparison
        if compared is None:
            yield [*row, "", "", "", str(record.rounds), record.note]
            continue
        measure, value = MEASURES[compared.measure], compared.value
        sign = "<=" if measure.lower_is_better else ">="
        needs = ", aim ".join(f"{sign} {limit:g}" for limit in (compared.bar, compared.aim) if limit is not None)
        met = "" if compared.bar is None else "yes" if measure.meets(value.median, compared.bar) else "**no**"
        ratio = f"{compared.measure} {value.median:.3f} [{value.q1:.3f}, {value.q3:.3f}]"
        yield [*row, ratio, needs, met, str(record.rounds), record.note]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |" for row in rows]
    return [lines[0], f"|{'|'.join('-' * (width + 2) for width in widths)}|", *lines[1:]]


def _leading_number(text: str) -> float:
    try:
        return float(text.split()[0])
    except (ValueError, IndexError):
        return 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the records of the given files."""
    parser = argparse.ArgumentParser(prog="benchmarks.table", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    files = parser.parse_args(arguments).files
    print(markdown([record for file in files for record in read(file)]), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
