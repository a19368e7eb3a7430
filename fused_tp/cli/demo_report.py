"""What the demo found, as tables, as demo.json and as demo.png."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import tempfile
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fused_tp.cli import cpu_name
from fused_tp.cli.demo import DemoSettings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SINGLE, THREADED = "single process", "single process, all threads"
PLAIN, FUSED = "plain collectives", "fused_tp"  # names of runs

WARMUP = 3  # steps left out of every time: they allocate, connect and choose
EQUAL = {"fp32": 1e-4, "bf16": 5e-2}  # of the loss, in nats: what rounding alone may add up to in ...
EQUAL_STEPS = 50

INK, MUTED = "#1f2933", "#7b8794"
# Color, and width of the line of losses: equal runs lie on each other.
DRAWN = {SINGLE: ("#b8c2cc", 7.0), PLAIN: ("#f29e4c", 3.0), FUSED: ("#1b6ca8", 1.4)}
STYLE = {
    "font.size": 10.5,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
}


@dataclass
class Run:
    """What one way of training gave, a value for each step.

    Attributes:
        name: how the report calls it.
        ranks, threads: processes, and threads of each.
        losses: mean cross entropy in nats.
        seconds: wall time of the step on the slowest rank.
        waited: the part of it that a rank waited for its peers, in seconds, mean over the ranks.
    """

    name: str
    ranks: int
    threads: int
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)

    @property
    def step_seconds(self) -> float:
        """Median over the steps after warm-up."""
        return statistics.median(after_warmup(self.seconds))

    @property
    def waited_share(self) -> float:
        """How much of the time of these steps a rank waited for its peers."""
        return sum(after_warmup(self.waited)) / sum(after_warmup(self.seconds))


@dataclass(frozen=True)
class Sample:
    """`text` is what followed `prompt`: `tokens` new tokens, made in `seconds`."""

    prompt: str
    text: str
    tokens: int
    seconds: float


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

    def tokens_per_second(self, run: Run) -> float:
        return self.settings.batch * self.settings.seq / run.step_seconds

    def summary(self, run: Run) -> dict[str, float | None]:
        return {
            "step_seconds": run.step_seconds,
            "tokens_per_second": self.tokens_per_second(run),
            "waited_share": run.waited_share,
            "final_loss": run.losses[-1],
            "largest_difference": None if run is self.threaded else largest(self.differences(run)),
        }

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
            "runs": {run.name: self.summary(run) | asdict(run) for run in self.runs},
            "sample": None if self.sample is None else asdict(self.sample),
        }


def largest(values: list[float]) -> float:
    """The largest of `values`; nan where one is nan, which max() may miss."""
    return max(values, key=lambda value: math.inf if math.isnan(value) else value)


def after_warmup(values: list[float]) -> list[float]:
    return values[min(WARMUP, len(values) - 1) :]


def machine() -> dict[str, object]:
    """What the times depend on."""
    return {
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def report(result: DemoResult) -> None:
    """Write demo.json and demo.png into settings.out and print the rest."""
    out = result.settings.out
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as folder:  # so that a full disk leaves the old ones
        written = Path(folder, "demo.json"), Path(folder, "demo.png")
        written[0].write_text(json.dumps(result.to_json(), indent=1) + "\n")
        plot(result, written[1])
        for file in written:
            file.replace(out / file.name)
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
        trained_by_itself = run is result.single or run is result.threaded
        speed.add_row(
            SINGLE if run is result.threaded else run.name,
            f"{run.ranks} x {_several(run.threads, 'thread')}",
            f"{1e3 * run.step_seconds:.0f} ms",
            f"{result.tokens_per_second(run):,.0f}",
            "" if trained_by_itself else f"{largest(result.differences(run)):.1e}",
            "" if run.ranks == 1 else f"{run.waited_share:.0%}",
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

    settings = result.settings
    model = settings.hf.name if settings.hf else "Llama"
    size = f"{result.parameters / 1e6:.1f}M" if result.parameters < 1e9 else f"{result.parameters / 1e9:.1f}B"
    unit = "GPU" if settings.device == "cuda" else _several(settings.threads, "CPU thread")
    what = f"{settings.ranks} ranks of {unit}, {settings.dtype}, {settings.batch} x {settings.seq} tokens a step"
    with pyplot.style.context(["seaborn-v0_8-whitegrid", STYLE]):
        figure = pyplot.figure(figsize=(11.5, 5.2), dpi=160)
        grid = figure.add_gridspec(
            2, 2, height_ratios=(2.4, 1), width_ratios=(1.25, 1), top=0.79, right=0.97, wspace=0.3
        )
        losses = figure.add_subplot(grid[0, 0])
        _draw_losses(losses, figure.add_subplot(grid[1, 0], sharex=losses), result)
        _draw_times(figure.add_subplot(grid[:, 1]), result)
        figure.suptitle(
            f"{model}, {size} parameters, trained three ways", x=0.125, ha="left", fontsize=15, weight="bold"
        )
        figure.text(0.125, 0.885, f"TP {settings.tp} x CP {settings.cp}: {what}", color=MUTED)
        figure.savefig(path)
        pyplot.close(figure)


def _draw_losses(losses: Axes, differences: Axes, result: DemoResult) -> None:
    """Below the losses the largest difference so far: one step's is as often 0 as not, since losses are fp32."""
    steps = range(result.steps_in_all - result.settings.steps + 1, result.steps_in_all + 1)
    for run in (result.single, result.plain, result.fused):
        color, width = DRAWN[run.name]
        losses.plot(steps, run.losses, color=color, linewidth=width, solid_capstyle="round", label=run.name)
        if run is not result.single:
            # 0 has no place on a log axis; it is drawn at the floor, below one rounding of fp32.
            so_far = accumulate(result.differences(run), max, initial=1e-8)
            differences.plot(steps, list(so_far)[1:], color=color, linewidth=width)
    losses.set(title="Loss", ylabel="nats per token")
    losses.tick_params(labelbottom=False)
    losses.legend(loc="upper right")
    differences.set(yscale="log", xlabel="step", ylabel="difference to\nsingle, so far")
    differences.margins(y=0.2)


def _draw_times(axes: Axes, result: DemoResult) -> None:
    """A bar each: time a step computes and moves data, and, lighter at its end, time it waits for peers."""
    runs = result.runs[::-1]
    gpus = result.settings.device == "cuda"
    for place, run in enumerate(runs):
        milliseconds = 1e3 * run.step_seconds
        waiting = milliseconds * run.waited_share
        color, _ = DRAWN.get(run.name, DRAWN[SINGLE])
        axes.barh(place, milliseconds - waiting, height=0.5, color=color)
        axes.barh(place, waiting, left=milliseconds - waiting, height=0.5, color=color, alpha=0.35, hatch="////")
        faster = f"\n{result.speedup:.2f}x plain" if run is result.fused else ""
        axes.text(1.02 * milliseconds, place, f"{result.tokens_per_second(run):,.0f} tokens/s{faster}", va="center")
        axes.text(0, place + 0.31, SINGLE if run.ranks == 1 else run.name, weight="bold", va="bottom")
        who = (
            _several(run.ranks, "GPU") if gpus else f"{_several(run.ranks, 'rank')} x {_several(run.threads, 'thread')}"
        )
        wait = f", {run.waited_share:.0%} of it waiting for peers" if run.ranks > 1 else ""
        axes.text(0, place - 0.29, f"{who}{wait}", color=MUTED, va="top", fontsize=9)
    longest = 1e3 * max(run.step_seconds for run in runs)
    axes.set(title="Time of a step", xlabel="milliseconds (median)", xlim=(0, 1.4 * longest), yticks=[])
    axes.set_ylim(-0.6, len(runs) - 0.4)


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count > 1)}"
