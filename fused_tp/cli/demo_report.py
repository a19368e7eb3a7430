"""What the demo found, as tables, as demo.json and as demo.png."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fused_tp.cli.demo import DemoSettings
from fused_tp.cli.demo_train import FUSED, PLAIN, SINGLE, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WARMUP = 3  # steps left out of every time: they allocate, connect and choose
EQUAL = {"fp32": 1e-4, "bf16": 5e-2}  # of the loss, in nats: what rounding alone may add up to in ...
EQUAL_STEPS = 50

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


@dataclass(frozen=True)
class Sample:
    """`text` is what followed `prompt`: `tokens` new tokens, made in `seconds`."""

    prompt: str
    text: str
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Summary:
    """One run in a few numbers.

    Attributes:
        step_seconds: median over the steps after warm-up.
        waited_share: of the time of these steps, how much a rank waited for its peers.
        largest_difference: of the loss of any step to that of the single process; None for a run on other steps.
    """

    step_seconds: float
    tokens_per_second: float
    waited_share: float
    final_loss: float
    largest_difference: float | None


@dataclass(frozen=True)
class DemoResult:
    """All that there is to report.

    Attributes:
        single, plain, fused: trained on the same batches, the single process with the threads of one rank.
        threaded: steps of the single process with the threads of all ranks; None with one rank, or on GPUs.
    """

    settings: DemoSettings
    parameters: int
    tokenizer: str
    steps_in_all: int
    single: Run
    threaded: Run | None
    plain: Run
    fused: Run
    sample: Sample | None

    @property
    def runs(self) -> list[Run]:
        return [run for run in (self.single, self.threaded, self.plain, self.fused) if run is not None]

    def summary(self, run: Run) -> Summary:
        seconds, waited = after_warmup(run.seconds), after_warmup(run.waited)
        step_seconds = statistics.median(seconds)
        return Summary(
            step_seconds=step_seconds,
            tokens_per_second=self.settings.batch * self.settings.seq / step_seconds,
            waited_share=sum(waited) / sum(seconds),
            final_loss=run.losses[-1],
            largest_difference=None if run is self.threaded else largest(self.differences(run)),
        )

    def differences(self, run: Run) -> list[float]:
        """|loss - loss of the single process| for each step."""
        return [abs(loss - single) for loss, single in zip(run.losses, self.single.losses, strict=True)]

    @property
    def largest_difference(self) -> float:
        """Of either parallel run, over the first steps: in time the last bits of any two runs grow apart."""
        return largest(self.differences(self.plain)[:EQUAL_STEPS] + self.differences(self.fused)[:EQUAL_STEPS])

    @property
    def trained_alike(self) -> bool:
        return self.largest_difference <= EQUAL[self.settings.dtype]

    @property
    def speedup(self) -> float:
        """Plain step time over fused step time, the median over pairs of steps that ran one after the other."""
        pairs = zip(after_warmup(self.plain.seconds), after_warmup(self.fused.seconds), strict=True)
        return statistics.median(plain / fused for plain, fused in pairs)

    def to_json(self) -> dict[str, object]:
        return {
            "settings": self.settings.to_json(),
            "parameters": self.parameters,
            "tokenizer": self.tokenizer,
            "steps_in_all": self.steps_in_all,
            "machine": machine(),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "trained_alike": self.trained_alike,
            "speedup_over_plain": self.speedup,
            "runs": {run.name: asdict(self.summary(run)) | asdict(run) for run in self.runs},
            "sample": None if self.sample is None else asdict(self.sample),
        }


def largest(values: list[float]) -> float:
    """The largest of `values`; nan where one is nan, which max() may miss."""
    return max(values, key=lambda value: math.inf if math.isnan(value) else value)


def after_warmup(values: list[float]) -> list[float]:
    return values[min(WARMUP, len(values) - 1) :]


def machine() -> dict[str, object]:
    """What the times depend on."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [
            line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return {
        "cpu": model,
        "cpus": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def report(result: DemoResult) -> None:
    """Write demo.json and demo.png into settings.out and print the rest."""
    out = result.settings.out
    out.mkdir(parents=True, exist_ok=True)
    (out / "demo.json").write_text(json.dumps(result.to_json(), indent=1) + "\n")
    plot(result, out / "demo.png")
    print_tables(result)


def print_tables(result: DemoResult) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    settings = result.settings
    console = Console(soft_wrap=True)

    def table(title: str) -> Table:
        return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True)

    losses = table("Loss")
    trained = [run for run in result.runs if run is not result.threaded]
    losses.add_column("step", justify="right")
    for run in trained:
        losses.add_column(run.name, justify="right")
    first = result.steps_in_all - settings.steps
    for index in shown_steps(settings.steps):
        losses.add_row(str(first + index + 1), *(f"{run.losses[index]:.6f}" for run in trained))
    console.print(losses)

    speed = table("Speed, equality and time spent waiting for peers")
    for name in ("", "ranks", "step", "tokens/s", "loss off by", "waiting"):
        speed.add_column(name, justify="right" if name else "left", no_wrap=True)
    for run in result.runs:
        summary = result.summary(run)
        difference = summary.largest_difference
        speed.add_row(
            SINGLE if run is result.threaded else run.name,
            f"{run.ranks} x {_several(run.threads, 'thread')}",
            f"{1e3 * summary.step_seconds:.0f} ms",
            f"{summary.tokens_per_second:,.0f}",
            "" if difference is None or run is result.single else f"{difference:.1e}",
            "" if run.ranks == 1 else f"{summary.waited_share:.0%}",
        )
    console.print(speed)
    console.print(
        f"fused_tp is {result.speedup:.2f}x as fast as plain collectives (median over pairs of neighbouring steps)."
    )
    console.print(verdict(result))
    if result.sample is not None:
        sample = result.sample
        console.print(f"\nA sample, {sample.tokens / sample.seconds:.0f} tokens/s through the KV cache:")
        console.print(Text.assemble((sample.prompt, "bold"), sample.text))
    console.print(f"\nWrote {settings.out / 'demo.json'} and {settings.out / 'demo.png'}.")
    if settings.save is not None:
        console.print(
            f"Saved model and optimizer after {result.steps_in_all} steps to {settings.save}; go on with --resume."
        )


def verdict(result: DemoResult) -> str:
    """Whether the parallel runs trained as the single process did, in a sentence."""
    if result.trained_alike:
        return f"All runs train alike: their losses differ by at most {result.largest_difference:.1e}."
    return (
        f"THE RUNS DIFFER: a loss is {result.largest_difference:.1e} off that of the single process, "
        f"where rounding explains {EQUAL[result.settings.dtype]:.0e}."
    )


def shown_steps(steps: int) -> list[int]:
    """About ten of the steps, the last among them; all are in demo.json."""
    every = max(1, steps // 10)
    return sorted({*range(0, steps, every), steps - 1})


# ---- picture ----


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
        size = f"{result.parameters / 1e6:.1f}M" if result.parameters < 1e9 else f"{result.parameters / 1e9:.1f}B"
        unit = "GPU" if settings.device == "cuda" else _several(settings.threads, "CPU thread")
        title = f"{model}, {size} parameters, trained three ways"
        figure.text(0.075, 0.935, title, fontsize=15, weight="bold")
        what = f"{settings.ranks} ranks of {unit}, {settings.dtype}, {settings.batch} x {settings.seq} tokens a step"
        figure.text(0.075, 0.885, f"TP {settings.tp} x CP {settings.cp}: {what}", color=MUTED)
        figure.savefig(path)
        pyplot.close(figure)


def _draw_losses(axes: Axes, result: DemoResult) -> None:
    steps = _steps(result)
    axes.plot(steps, result.single.losses, color=SINGLE_COLOR, linewidth=7, solid_capstyle="round", label=SINGLE)
    axes.plot(steps, result.plain.losses, color=PLAIN_COLOR, linewidth=3, label=PLAIN)
    axes.plot(steps, result.fused.losses, color=FUSED_COLOR, linewidth=1.4, label=FUSED)
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
    for place, run in enumerate(runs):
        summary = result.summary(run)
        milliseconds = 1e3 * summary.step_seconds
        waiting = milliseconds * summary.waited_share
        color = {PLAIN: PLAIN_COLOR, FUSED: FUSED_COLOR}.get(run.name, SINGLE_COLOR)
        axes.barh(place, milliseconds - waiting, height=0.5, color=color)
        lighter: dict[str, Any] = {"color": color, "alpha": 0.35, "hatch": "////", "edgecolor": "white"}
        axes.barh(place, waiting, left=milliseconds - waiting, height=0.5, **lighter)
        faster = f"\n{result.speedup:.2f}x plain" if run is result.fused else ""
        speed = f"{summary.tokens_per_second:,.0f} tokens/s{faster}"
        axes.text(1.02 * milliseconds, place, speed, va="center", linespacing=1.2)
        axes.text(0, place + 0.31, SINGLE if run.ranks == 1 else run.name, weight="bold", va="bottom")
        who = _several(run.ranks, "GPU" if result.settings.device == "cuda" else "rank")
        who += f" x {_several(run.threads, 'thread')}" if result.settings.device != "cuda" else ""
        wait = f", {summary.waited_share:.0%} of it waiting for peers" if run.ranks > 1 else ""
        axes.text(0.0, place - 0.29, f"{who}{wait}", color=MUTED, va="top", fontsize=9)
    axes.set_title("Time of a step", loc="left", fontsize=11.5, weight="bold")
    axes.set_xlabel("milliseconds (median)")
    axes.set_xlim(0, 1.4e3 * max(result.summary(run).step_seconds for run in runs))
    axes.set_ylim(-0.6, len(runs) - 0.4)
    axes.set_yticks([])
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)


def _steps(result: DemoResult) -> list[int]:
    return list(range(result.steps_in_all - result.settings.steps + 1, result.steps_in_all + 1))


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count > 1)}"
