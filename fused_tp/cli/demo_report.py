"""What the demo found, as tables, as demo.json and as demo.png."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

from fused_tp.cli.demo_plot import plot
from fused_tp.cli.demo_sample import Sample
from fused_tp.cli.demo_settings import DemoSettings
from fused_tp.cli.demo_train import Run

WARMUP = 3  # steps left out of every time: they allocate, connect and choose
EQUAL = {"fp32": 1e-4, "bf16": 5e-2}  # of the loss, in nats: what rounding alone may add up to in ...
EQUAL_STEPS = 50


@dataclass(frozen=True)
class Summary:
    """One run in a few numbers.

    Attributes:
        step_seconds: median over the steps after warm-up.
        waited_share: of the time of these steps, how much a rank stood still for its peers.
        largest_difference: of the loss of any step to that of the single process; None for a run on other steps.
    """

    step_seconds: float
    tokens_per_second: float
    waited_share: float
    final_loss: float
    largest_difference: float | None


@dataclass(frozen=True)
class DemoResult:
    """All that there is to report. `single`, `plain` and `fused` trained on the same batches; `threaded` is None where
    there was only one rank's worth of threads to give to the single process, or a GPU."""

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
    losses = Table(title="Loss", title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True)
    trained = [run for run in result.runs if run is not result.threaded]
    losses.add_column("step", justify="right")
    for run in trained:
        losses.add_column(run.name, justify="right")
    first = result.steps_in_all - settings.steps
    for index in shown_steps(settings.steps):
        losses.add_row(str(first + index + 1), *(f"{run.losses[index]:.6f}" for run in trained))
    console.print(losses)

    speed = Table(
        title="Speed, equality and time spent waiting for peers",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
    )
    for name in ("", "ranks", "step", "tokens/s", "loss off by", "waiting"):
        speed.add_column(name, justify="right" if name else "left", no_wrap=True)
    for run in result.runs:
        summary = result.summary(run)
        difference = summary.largest_difference
        speed.add_row(
            "single process" if run is result.threaded else run.name,
            f"{run.ranks} x {run.threads} thread{'s' * (run.threads > 1)}",
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
