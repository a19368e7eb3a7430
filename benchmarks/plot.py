"""Stored results as a picture: `python -m benchmarks.plot FILE [-o PNG]`.

A panel for each op; for each contestant a dot at the median, a line from quartile to quartile, a tick at the bar.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .ratios import MEASURES
from .records import Record, read


def plot(records: Sequence[Record], path: Path) -> None:
    """Draw the comparisons of `records` into an image file.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no record has a comparison.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display
    from matplotlib import pyplot as plt

    panels: dict[str, list[Record]] = {}
    for record in records:
        if record.comparison is not None:
            panels.setdefault(record.case.split("/")[0], []).append(record)
    if not panels:
        raise ValueError("There is nothing to draw: no record compares fused_tp with anybody.")
    rows = [len(panel) for panel in panels.values()]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(10, 0.22 * sum(rows) + 1.0 * len(rows)), height_ratios=rows, squeeze=False
    )
    contestants = sorted({record.contestant for panel in panels.values() for record in panel})
    colours = {name: f"C{index}" for index, name in enumerate(contestants)}
    for axis, (op, panel) in zip(axes[:, 0], panels.items(), strict=True):
        for row, record in enumerate(panel):
            compared = record.comparison
            assert compared is not None
            colour = colours[record.contestant]
            axis.plot([compared.value.q1, compared.value.q3], [row, row], color=colour, linewidth=2)
            axis.plot(compared.value.median, row, "o", color=colour, markersize=4)
            if compared.bar is not None:
                axis.plot(compared.bar, row, "|", color="black", markersize=9)
        names = [f"{record.case.partition('/')[2]}  {record.contestant}" for record in panel]
        axis.set_yticks(range(len(panel)), names, fontsize=7)
        axis.invert_yaxis()
        axis.set_xscale("log", base=2)  # twice as fast and half as fast are equally far from 1
        axis.xaxis.set_major_formatter("{x:.3g}")
        axis.axvline(1.0, color="grey", linewidth=0.5)
        axis.set_title(f"{op}: {_measure(panel)}", fontsize=9, loc="left")
        axis.tick_params(axis="x", labelsize=7)
    machines = sorted({record.machine.cpu for record in records})
    figure.suptitle(f"{', '.join(machines)}; black tick: the bar", fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")  # whole labels, however long
    plt.close(figure)


def _measure(panel: Sequence[Record]) -> str:
    names = sorted({record.comparison.measure for record in panel if record.comparison is not None})
    return ", ".join(f"{name} ({'less' if MEASURES[name].lower_is_better else 'more'} is better)" for name in names)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the records of a file."""
    parser = argparse.ArgumentParser(prog="benchmarks.plot", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("-o", "--output", type=Path, metavar="PNG", help="FILE with .png in place of its suffix")
    options = parser.parse_args(arguments)
    output = options.output or options.file.with_suffix(".png")
    plot(read(options.file), output)
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
