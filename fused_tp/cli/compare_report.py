"""Report of `fused-tp compare`: its table, compare.json and compare.png."""

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

from fused_tp.cli import cpu_name
from fused_tp.cli.compare_result import WARMUP, VariantResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Largest difference of losses, in nats, that rounding explains within COMPARED_STEPS steps; later any two runs diverge.
LOSS_TOLERANCES = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 5e-2}
COMPARED_STEPS = 50

TEXT_COLOR, MUTED_COLOR = "#1f2933", "#7b8794"
PLOT_STYLE = {
    "font.size": 10.5,
    "text.color": TEXT_COLOR,
    "axes.labelcolor": MUTED_COLOR,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
}


@dataclass(frozen=True)
class Comparison:
    """Measurements of all configurations and variants.

    Attributes:
        results_by_config: results of the variants of each configuration, which alternated step by step; the first
            configuration is one process.
        precision: "fp32", "bf16" or "fp16".
    """

    results_by_config: list[list[VariantResult]]
    precision: str

    @property
    def results(self) -> list[VariantResult]:
        return [result for config_results in self.results_by_config for result in config_results]

    @property
    def largest_loss_difference(self) -> float:
        """Largest difference between a loss and the loss of one process."""
        return max(max(self.loss_differences(result)[:COMPARED_STEPS]) for result in self.results)

    @property
    def is_alike(self) -> bool:
        """True if all configurations train the same model, up to rounding."""
        return self.largest_loss_difference <= LOSS_TOLERANCES[self.precision]

    def loss_differences(self, result: VariantResult) -> list[float]:
        """Return |loss - loss of one process| of all steps; infinity where a loss is not finite."""
        pairs = zip(result.losses, self.results[0].losses, strict=True)
        return [abs(a - b) if math.isfinite(a - b) else math.inf for a, b in pairs]

    def __str__(self) -> str:
        """Format a table with a line per result, followed by speedups and the largest difference of losses."""
        lines = [
            f"{'':28} {'ranks':>5} {'s/step':>8} {'speed':>6} {'tokens/s':>9} {'waiting':>8} {'GiB/rank':>9} "
            f"{'loss':>8} {'off by':>8}"
        ]
        same_cores_result = self.results_by_config[0][
            -1
        ]  # one process with a thread per rank of the largest configuration
        reference_seconds = step_seconds(same_cores_result)
        for result in self.results:
            seconds = step_seconds(result)
            memory = "" if result.memory is None else f"{result.memory / 2**30:.2f}"
            wait_text = f"{wait_fraction(result):.0%}" if result.ranks > 1 else ""
            lines.append(
                f"{result.name:28} {result.ranks:5} {seconds:8.3f} {reference_seconds / seconds:5.2f}x "
                f"{result.tokens / seconds:9,.0f} {wait_text:>8} {memory:>9} "
                f"{result.losses[-1]:8.4f} {max(self.loss_differences(result)):8.1e}"
            )
        for config_results in self.results_by_config[1:]:
            if len(config_results) == 2:
                lines.append(
                    f"{config_results[0].name} is {speedup(config_results):.2f}x as fast as with plain collectives."
                )
        if same_cores_result is not self.results[0]:
            lines.append(f"speed: relative to {same_cores_result.name}, the cores of the largest configuration.")
        if self.is_alike:
            lines.append(
                "All train alike: losses differ from those of one process by at most "
                f"{self.largest_loss_difference:.1e}."
            )
        else:
            lines.append(
                f"THEY DIFFER: a loss differs from that of one process by {self.largest_loss_difference:.1e}; rounding "
                f"explains {LOSS_TOLERANCES[self.precision]:.0e}."
            )
        return "\n".join(lines)

    def write(self, folder: Path, settings: dict[str, Any]) -> None:
        """Write compare.json and compare.png."""
        machine = {
            "cpu": cpu_name(),
            "cpus": os.cpu_count(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        values = {
            "settings": settings,
            "machine": machine,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "alike": self.is_alike,
            "results": [asdict(result) | {"step_seconds": step_seconds(result)} for result in self.results],
            "speedup_over_plain": {
                config_results[0].name: speedup(config_results)
                for config_results in self.results_by_config[1:]
                if len(config_results) == 2
            },
        }
        (folder / "compare.json").write_text(json.dumps(values, indent=1, default=str) + "\n")
        self.draw(folder / "compare.png")

    def draw(self, path: Path) -> None:
        """Plot losses and their differences on the left, and step times on the right."""
        import matplotlib
        from matplotlib.figure import Figure

        with matplotlib.rc_context(PLOT_STYLE):
            height = max(4.6, 1.4 + 0.62 * len(self.results))
            figure = Figure(figsize=(11.5, height), dpi=120, layout="constrained")
            grid = figure.add_gridspec(2, 2, height_ratios=(2.2, 1), width_ratios=(1, 1.25))
            loss_axes = figure.add_subplot(grid[0, 0])
            self._draw_losses(loss_axes, figure.add_subplot(grid[1, 0], sharex=loss_axes))
            self._draw_times(figure.add_subplot(grid[:, 1]))
            figure.savefig(path)

    def _draw_losses(self, loss_axes: Axes, difference_axes: Axes) -> None:
        """Plot losses, and below them the largest difference so far: that of a single fp32 loss is often 0."""
        from matplotlib.ticker import MaxNLocator, NullFormatter

        steps = range(1, len(self.results[0].losses) + 1)
        for index, config_results in enumerate(self.results_by_config):
            result = config_results[0]
            loss_axes.plot(steps, result.losses, color=f"C{index}", linewidth=7 / (1 + index), label=result.name)
            if index:
                # A log axis cannot show 0, so 0 is drawn as 1e-8, which is below the rounding error of fp32.
                largest_so_far = accumulate(self.loss_differences(result), max, initial=1e-8)
                difference_axes.plot(steps, list(largest_so_far)[1:], color=f"C{index}")
        loss_axes.set(title="Loss", ylabel="nats per token")
        loss_axes.tick_params(labelbottom=False)
        loss_axes.legend()
        difference_axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        difference_axes.set(xlabel="step", title="Largest difference to one process so far")
        if len(self.results_by_config) > 1:
            difference_axes.set_yscale("log")
            difference_axes.yaxis.set_minor_formatter(NullFormatter())
            difference_axes.margins(y=0.2)

    def _draw_times(self, axes: Axes) -> None:
        """Draw a bar per result: time of compute and data transfer, then, lighter, time of waiting for peers."""
        colors = [f"C{index}" for index, config_results in enumerate(self.results_by_config) for _ in config_results]
        longest_seconds = max(map(step_seconds, self.results))
        for position, (result, color) in enumerate(zip(self.results, colors, strict=True)):
            seconds, wait_share = step_seconds(result), wait_fraction(result)
            is_fused = "plain" not in result.name
            axes.barh(position, seconds * (1 - wait_share), height=0.5, color=color, alpha=1 if is_fused else 0.6)
            axes.barh(
                position, seconds * wait_share, 0.5, seconds * (1 - wait_share), color=color, alpha=0.35, hatch="////"
            )
            wait_text = f", {wait_share:.0%} waiting for peers" if result.ranks > 1 else ""
            axes.text(0, position - 0.31, result.name, weight="bold", va="bottom")
            axes.text(
                seconds + 0.02 * longest_seconds,
                position,
                f"{result.tokens / seconds:,.0f} tokens/s{wait_text}",
                va="center",
            )
        axes.set(title="Time of a step", xlabel="seconds (median)", xlim=(0, 1.75 * longest_seconds), yticks=[])
        axes.set_ylim(len(self.results) - 0.5, -0.75)


def step_seconds(result: VariantResult) -> float:
    """Return the median step time after the warmup."""
    return statistics.median(result.seconds[WARMUP:])


def wait_fraction(result: VariantResult) -> float:
    """Return the share of the step time after the warmup that a rank waited for its peers."""
    return sum(result.waited[WARMUP:]) / sum(result.seconds[WARMUP:])


def speedup(config_results: list[VariantResult]) -> float:
    """Return the median, over pairs of consecutive steps, of the second variant's step time divided by the first's."""
    pairs = zip(config_results[1].seconds[WARMUP:], config_results[0].seconds[WARMUP:], strict=True)
    return statistics.median(plain_seconds / fused_seconds for plain_seconds, fused_seconds in pairs)
