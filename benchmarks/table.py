"""Print stored results as a Markdown table: `python -m benchmarks.table FILE [FILE ...]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from .case import MEASURES
from .results import Record, read_records

CLOCK_NAMES = ("SM clock", "memory clock")  # clocks of a GPU, read after each case
HEADER = ("case", "contestant", "ms", "fused_tp against it", "needs", "met", "rounds", "note")
EXPLANATION = """\
`time ratio`: fused_tp's time over the contestant's; `speedup`: the contestant's time over fused_tp's; `efficiency`: the
contestant's time over W times fused_tp's. Values are medians of paired ratios, quartiles in brackets. `microseconds`:
fused_tp's time, beside the contestant's. A GPU's rates count the multiplications of all ranks, or the least number of
bytes that they read and write."""


def markdown(records: Sequence[Record], skip_reasons: Sequence[str] = (), minutes: float | None = None) -> str:
    """Markdown with machine, versions and dates, the table of records, and the skipped measurements."""
    lines = []
    for machine in dict.fromkeys(record.machine for record in records):
        cpu = f"{machine.cpu}, {machine.isa}, {machine.cores} cores."
        lines.append(f"{machine.gpu}; launched by {cpu}" if machine.gpu else cpu)
    version_texts = (
        "; ".join(f"{name} {v}" for name, v in r.versions.items() if name not in CLOCK_NAMES) for r in records
    )
    lines += [f"{versions}." for versions in dict.fromkeys(version_texts)]
    for name in CLOCK_NAMES:
        clocks = sorted({record.versions[name] for record in records if name in record.versions}, key=_leading_number)
        if clocks:
            lines.append(f"{name}: {' to '.join(dict.fromkeys((clocks[0], clocks[-1])))}.")
    dates = sorted(record.date for record in records)
    if dates:
        duration = "" if minutes is None else f", in {minutes:.1f} minutes"
        lines.append(f"From {dates[0]} to {dates[-1]}{duration}.")
    lines += ["", EXPLANATION, "", *_align_columns([HEADER, *_format_rows(records)])]
    if skip_reasons:
        lines += ["", "Not measured:", "", *(f"- {text}" for text in skip_reasons)]
    return "\n".join(lines) + "\n"


def _format_rows(records: Iterable[Record]) -> Iterable[Sequence[str]]:
    previous_case = ""
    for record in records:
        row = ["" if record.case == previous_case else record.case, record.contestant, f"{record.ms.median:.4g}"]
        previous_case = record.case
        comparison = record.comparison
        if comparison is None:
            yield [*row, "", "", "", str(record.rounds), record.note]
            continue
        measure, value = MEASURES[comparison.measure], comparison.value
        sign = "<=" if measure.lower_is_better else ">="
        needs = ", aim ".join(f"{sign} {limit:g}" for limit in (comparison.bar, comparison.aim) if limit is not None)
        met = "" if comparison.bar is None else "yes" if measure.meets(value.median, comparison.bar) else "**no**"
        ratio = f"{comparison.measure} {value.median:.3f} [{value.q1:.3f}, {value.q3:.3f}]"
        yield [*row, ratio, needs, met, str(record.rounds), record.note]


def _align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
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
    print(markdown([record for file in files for record in read_records(file)]), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
