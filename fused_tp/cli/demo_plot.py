"""The demo's picture: losses on top of each other, how far they are apart, and what a step costs."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the report calls the plot, which reads the report's result
    from matplotlib.axes import Axes

    from fused_tp.cli.demo_report import DemoResult

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
SINGLE_COLOR, PLAIN_COLOR, FUSED_COLOR = "#b8c2cc", "#f29e4c", "#1b6ca8"
STYLE = {
    "font.size": 10.5,
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
}


def plot(result: DemoResult, path: Path) -> None:
    """Draw `result` into the PNG file `path`."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed, and none is looked for
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure = pyplot.figure(figsize=(11.5, 5.2), dpi=160, facecolor="white")
        grid = figure.add_gridspec(
            2, 2, height_ratios=(2.4, 1), width_ratios=(1.25, 1), hspace=0.14, wspace=0.3,
            left=0.075, right=0.97, top=0.79, bottom=0.11,
        )  # fmt: skip
        losses = figure.add_subplot(grid[0, 0])
        _draw_losses(losses, result)
        _draw_differences(figure.add_subplot(grid[1, 0], sharex=losses), result)
        _draw_times(figure.add_subplot(grid[:, 1]), result)
        settings = result.settings
        model = settings.hf.name if settings.hf else "Llama"
        figure.text(
            0.075,
            0.935,
            f"{model}, {_millions(result.parameters)} parameters, trained three ways",
            fontsize=15,
            weight="bold",
        )
        unit = "GPU" if settings.device == "cuda" else f"{settings.threads} CPU thread{'s' * (settings.threads > 1)}"
        figure.text(
            0.075,
            0.885,
            f"TP {settings.tp} x CP {settings.cp}: {settings.ranks} ranks of {unit}, {settings.dtype}, "
            f"{settings.batch} x {settings.seq} tokens a step",
            color=MUTED,
        )
        figure.savefig(path)
        pyplot.close(figure)


def _draw_losses(axes: Axes, result: DemoResult) -> None:
    steps = _steps(result)
    axes.plot(
        steps, result.single.losses, color=SINGLE_COLOR, linewidth=7, solid_capstyle="round", label="single process"
    )
    axes.plot(steps, result.plain.losses, color=PLAIN_COLOR, linewidth=3, label="plain collectives")
    axes.plot(steps, result.fused.losses, color=FUSED_COLOR, linewidth=1.4, label="fused_tp")
    axes.set_title("Loss", loc="left", fontsize=11.5, weight="bold")
    axes.set_ylabel("nats per token")
    axes.tick_params(labelbottom=False)
    axes.legend(loc="upper right")


def _draw_differences(axes: Axes, result: DemoResult) -> None:
    """The largest difference so far: one step's is as often 0 as not, since losses are fp32 numbers."""
    for run, color, width in ((result.plain, PLAIN_COLOR, 4.0), (result.fused, FUSED_COLOR, 1.4)):
        # 0 has no place on a log axis; it is drawn at the floor, below one rounding of fp32.
        largest = accumulate(result.differences(run), max, initial=1e-8)
        axes.plot(_steps(result), list(largest)[1:], color=color, linewidth=width)
    axes.set_yscale("log")
    axes.set_ylabel("difference to\nsingle, so far", fontsize=9.5)
    axes.set_xlabel("step")
    axes.margins(y=0.2)
    axes.minorticks_off()


def _draw_times(axes: Axes, result: DemoResult) -> None:
    """A bar each: time a step computes and moves data, and, lighter at its end, time it waits for peers."""
    runs = result.runs[::-1]
    colors = {id(result.plain): PLAIN_COLOR, id(result.fused): FUSED_COLOR}
    longest = max(result.summary(run).step_seconds for run in runs)
    for place, run in enumerate(runs):
        summary = result.summary(run)
        milliseconds = 1e3 * summary.step_seconds
        waiting = milliseconds * summary.waited_share
        color = colors.get(id(run), SINGLE_COLOR)
        axes.barh(place, milliseconds - waiting, height=0.5, color=color)
        axes.barh(
            place,
            waiting,
            left=milliseconds - waiting,
            height=0.5,
            color=color,
            alpha=0.35,
            hatch="////",
            edgecolor="white",
        )
        speed = f"{summary.tokens_per_second:,.0f} tokens/s"
        if run is result.fused:
            speed += f"\n{result.speedup:.2f}x plain"
        axes.text(1.02 * milliseconds, place, speed, va="center", linespacing=1.2)
        who = f"{run.ranks} rank{'s' * (run.ranks > 1)} x {run.threads} thread{'s' * (run.threads > 1)}"
        if result.settings.device == "cuda":
            who = f"{run.ranks} GPU{'s' * (run.ranks > 1)}"
        name = "single process" if run.ranks == 1 else run.name
        axes.text(0, place + 0.31, name, weight="bold", va="bottom")
        wait = f", {summary.waited_share:.0%} of it waiting for peers" if run.ranks > 1 else ""
        axes.text(0.0, place - 0.29, f"{who}{wait}", color=MUTED, va="top", fontsize=9)
    axes.set_title("Time of a step", loc="left", fontsize=11.5, weight="bold")
    axes.set_xlabel("milliseconds (median)")
    axes.set_xlim(0, 1.4e3 * longest)
    axes.set_ylim(-0.6, len(runs) - 0.4)
    axes.set_yticks([])
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)


def _steps(result: DemoResult) -> list[int]:
    return list(range(result.steps_in_all - result.settings.steps + 1, result.steps_in_all + 1))


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f}M" if count < 1e9 else f"{count / 1e9:.1f}B"
