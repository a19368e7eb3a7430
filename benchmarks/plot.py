"""Plot stored results: `python -m benchmarks.plot FILE [-o PNG]`.

The picture has a panel per op and dtype, a group of bars per size, and a bar per rival that compares fused_tp with it.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import textwrap
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .case import MEASURES
from .results import Record, read_records

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_COLUMNS = 3
# Inches: total width, maximum total height, height of a row of panels, height of the title.
WIDTH, MAX_HEIGHT, ROW_HEIGHT, TITLE_HEIGHT = 13.3, 11.6, 2.75, 0.6
DPI = 120
GROUP_GAP = 1.0  # between two sizes, in bar widths
Y_LIMIT_FACTOR = 1.5  # factor above the highest bar, which leaves room for the legend
_BYTES_PER_UNIT = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def plot(records: Sequence[Record], path: Path) -> None:
    """Draw the comparisons of `records` into an image file.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no record has a comparison.
    """
    figure = draw_figure(records)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)


def draw_figure(records: Sequence[Record]) -> Figure:
    """Draw the figure; raises as `plot`."""
    import matplotlib
    from matplotlib.figure import Figure

    panels = _group_by_panel(records)
    if not panels:
        raise ValueError("There is nothing to draw: no record compares fused_tp with another contestant.")
    columns = min(PANEL_COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    height = min(ROW_HEIGHT * rows + TITLE_HEIGHT, MAX_HEIGHT)
    figure = Figure(figsize=(WIDTH * columns / PANEL_COLUMNS, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    rivals = dict.fromkeys(_color_key(record) for panel in panels.values() for record in panel)
    shades = [matplotlib.colormaps["tab20"](i) for i in (*range(1, 20, 2), *range(0, 20, 2))]  # light ones, then dark
    colors = dict(zip(rivals, cycle(shades)))
    for axis, (title, panel) in zip(axes.flat, panels.items(), strict=False):
        _draw_panel(axis, title, panel, colors)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_axis_off()
    machines = ", ".join(sorted({f"{record.machine.cpu}, {record.machine.isa}" for record in records}))
    figure.suptitle(
        f"fused_tp against each rival on {machines}: median of paired ratios, with quartiles\n"
        "dashed: equal;  black line: the bar that fused_tp must reach;  red figure: it does not",
        fontsize=10,
    )
    return figure


def _color_key(record: Record) -> str:
    """Return the key for the color of a record: equal for a library with and without a matmul before its collective."""
    return record.contestant.removeprefix("matmul + ")


def _group_by_panel(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Group records with a comparison by the title of their panel, sizes ascending."""
    has_several_machines = len({record.machine for record in records}) > 1
    panels: dict[str, list[Record]] = {}
    for record in records:
        if record.comparison is not None:
            op, dtype, _ = _split_case_name(record)
            machine_text = f", {record.machine.cpu}" if has_several_machines else ""
            panels.setdefault(f"{op}, {dtype}{machine_text}" if dtype else op + machine_text, []).append(record)
    return {
        title: sorted(panel, key=lambda record: _parse_size(_split_case_name(record)[2]))
        for title, panel in panels.items()
    }


def _split_case_name(record: Record) -> tuple[str, str, str]:
    """Op, dtype and size in the name of a case, each "" if missing."""
    op, dtype, size = (*record.case.split("/", 2), "", "")[:3]
    return op, dtype, size


def _parse_size(text: str) -> float:
    """Parse "M=16" as 16 and "4 KiB" as 4096. A text without a size is 0, so that sorting keeps its place."""
    match = re.search(r"(\d+)\s*([KMG]iB)?", text)
    return int(match[1]) * _BYTES_PER_UNIT[match[2] or ""] if match else 0.0


def _draw_panel(axis: Axes, title: str, panel: Sequence[Record], colors: dict[str, Any]) -> None:
    position, highest = 0.0, 1.0
    centers: dict[str, list[float]] = {}
    is_crowded = len(panel) > 8
    for record in panel:
        comparison, size = record.comparison, _split_case_name(record)[2]
        assert comparison is not None
        if centers and size not in centers:
            position += GROUP_GAP
        centers.setdefault(size, []).append(position)
        value = comparison.value
        axis.bar(position, value.median, width=0.9, color=colors[_color_key(record)], label=record.contestant)
        axis.plot([position, position], [value.q1, value.q3], color="#444444", linewidth=0.8)
        misses_bar = False
        if comparison.bar is not None:
            axis.plot([position - 0.5, position + 0.5], [comparison.bar] * 2, color="black", linewidth=1.8)
            misses_bar = not MEASURES[comparison.measure].meets(value.median, comparison.bar)
        axis.annotate(  # at the foot of the bar, where no line crosses the text
            f"{value.median:.2f}" if value.median >= 0.1 else f"{value.median:.1g}",
            (position, 0.0),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            va="bottom",
            rotation=90 if is_crowded else 0,
            fontsize=8,
            color="#b00000" if misses_bar else "black",
            fontweight="bold" if misses_bar else "normal",
        )
        highest = max(highest, value.q3, comparison.bar or 0.0)
        position += 1
    axis.axhline(1.0, color="grey", linestyle="--", linewidth=0.8, zorder=0.5)
    axis.set_ylim(0, Y_LIMIT_FACTOR * highest)
    axis.set_xticks(
        [sum(group_positions) / len(group_positions) for group_positions in centers.values()],
        [textwrap.fill(size, 54 // len(centers), break_long_words=False) for size in centers],
        fontsize=7,
    )
    axis.tick_params(axis="x", length=0)
    axis.tick_params(axis="y", labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(f"{title}: {_describe_measures(panel)}", fontsize=8, loc="left")
    handles = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    axis.legend(
        handles.values(),
        handles.keys(),
        fontsize=6.5,
        loc="upper left",
        ncols=2,
        frameon=False,
        columnspacing=1.0,
    )


def _describe_measures(panel: Sequence[Record]) -> str:
    names = sorted({record.comparison.measure for record in panel if record.comparison is not None})
    return ", ".join(f"{name} ({'less' if MEASURES[name].lower_is_better else 'more'} is better)" for name in names)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the records of a file."""
    parser = argparse.ArgumentParser(prog="benchmarks.plot", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("-o", "--output", type=Path, metavar="PNG", help="FILE with .png in place of its suffix")
    options = parser.parse_args(arguments)
    output = options.output or options.file.with_suffix(".png")
    plot(read_records(options.file), output)
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
