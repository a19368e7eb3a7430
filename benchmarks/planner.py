"""Predicted and measured training steps on CPU ranks of this machine: `python -m benchmarks.planner [--out DIR]`.

The benchmark measures the machine by microbenchmarks, trains two models in several parallel configurations, and
compares each step time with its prediction. Nothing else should run meanwhile. Results: planner.json and planner.svg.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fused_tp.cli import at_least, make_folder
from fused_tp.cli.compare import WARMUP, Variant, VariantResult, train_alternately
from fused_tp.cli.compare_report import step_seconds
from fused_tp.cli.plan import measure_this_machine
from fused_tp.cli.ranks import Job, choose_start_method, launch, preload
from fused_tp.planning.config import ParallelConfig
from fused_tp.planning.costs import CostModel
from fused_tp.planning.hardware import Machine
from fused_tp.planning.model_count import count_config
from fused_tp.planning.model_shape import ModelShape
from fused_tp.planning.recommend import recommend

from .results import now, versions, write_atomically

SEQ, GLOBAL_BATCH = 256, 8
MODELS: dict[str, dict[str, int]] = {
    "256 x 4": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8},
    "512 x 6": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 8},
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "one process": {},
    "one process, recomputed": {"recompute": "full"},
    "tp2": {"tp": 2, "sequence_parallel": False},
    "tp2, sequence parallel": {"tp": 2},
    "cp2": {"cp": 2},
    "pp2, 4 microbatches": {"pp": 2, "microbatches": 4},
    "pp2, 8 microbatches": {"pp": 2, "microbatches": 8},
    "dp_replicate2": {"dp_replicate": 2},
    "dp_shard2": {"dp_shard": 2},
    "dp_shard2, recomputed": {"dp_shard": 2, "recompute": "full"},
}


@dataclass(frozen=True)
class PlannerRow:
    """Step time of a model in one parallel configuration, in seconds."""

    model: str
    way: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1


def train_settings(model: dict[str, int], steps: int) -> dict[str, Any]:
    """Settings of `fused-tp train`."""
    config = {**model, "num_key_value_heads": 4}
    return {
        "model": {"type": "llama", "config": config},
        "data": {"seq": SEQ},
        "global_batch": GLOBAL_BATCH,
        "steps": steps,
    }


def planner_shape(model: dict[str, int]) -> ModelShape:
    """ModelShape of the model, as the planner counts it."""
    from transformers import LlamaConfig

    return count_config(LlamaConfig(**model, num_key_value_heads=4, vocab_size=256))


def make_cost_model(machine: Machine, model: dict[str, int], config: dict[str, Any]) -> CostModel:
    """Return the cost model of a training step in a parallel configuration."""
    return CostModel(
        shape=planner_shape(model),
        config=ParallelConfig(**config),
        machine=machine,
        seq=SEQ,
        global_batch=GLOBAL_BATCH,
        precision="fp32",
    )


def measure_seconds(model: dict[str, int], config: dict[str, Any], steps: int) -> float:
    """Train for `steps` steps; return the median step time after the warmup.

    Raises:
        ValueError, ChildProcessError: a rank has rejected the configuration, or failed.
    """
    variant = Variant("", {**train_settings(model, steps), "parallel": config})
    method = choose_start_method("cpu")
    if method == "forkserver":
        preload(["fused_tp.training.run", "transformers.modeling_utils", "torch._dynamo"])
    results: list[VariantResult] = launch(
        Job(train_alternately, [variant], ParallelConfig(**config).world_size), method
    )[0]
    return step_seconds(results[0])


def measure_rows(machine: Machine, steps: int) -> Iterator[PlannerRow]:
    """Train all models in all configurations, and yield a row for each."""
    for name, model in MODELS.items():
        for config_name, config in CONFIGURATIONS.items():
            seconds = measure_seconds(model, config, steps)
            yield PlannerRow(name, config_name, make_cost_model(machine, model, config).time.total, seconds)


def format_table(rows: Sequence[PlannerRow]) -> str:
    """Format a table with a line per row, and the mean and largest error."""
    lines = [f"{'model':10} {'spread':26} {'measured':>9} {'predicted':>9} {'error':>7}"]
    lines += [f"{r.model:10} {r.way:26} {r.measured:7.3f} s {r.predicted:7.3f} s {r.error:+7.1%}" for r in rows]
    mean = sum(abs(row.error) for row in rows) / len(rows)
    return "\n".join([*lines, f"mean of absolute errors {mean:.1%}, largest {max(abs(r.error) for r in rows):.1%}"])


def fastest_and_recommended(machine: Machine, rows: Sequence[PlannerRow], name: str) -> tuple[str, str]:
    """Return the fastest measured configuration of two ranks, and the first one that `recommend` returns."""
    two_rank_seconds = {
        row.way: row.measured
        for row in rows
        if row.model == name and ParallelConfig(**CONFIGURATIONS[row.way]).world_size == 2
    }
    plan = recommend(
        planner_shape(MODELS[name]), 2, machine=machine, seq=SEQ, global_batch=GLOBAL_BATCH, precision="fp32"
    )[0]
    matching_names = (name for name, config in CONFIGURATIONS.items() if ParallelConfig(**config) == plan.config)
    fastest = min(two_rank_seconds, key=lambda name: two_rank_seconds[name])
    return fastest, next(matching_names, plan.config.shown())


def draw(rows: Sequence[PlannerRow], path: Path) -> None:
    """Draw measured and predicted step times as bars."""
    import matplotlib

    matplotlib.rcParams |= {"svg.hashsalt": "fused_tp", "svg.fonttype": "none"}  # small and reproducible
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(MODELS)), MODELS, strict=True):
        model_rows = [row for row in rows if row.model == name]
        positions = range(len(model_rows))
        axes.barh(
            [position - 0.2 for position in positions],
            [row.measured for row in model_rows],
            0.4,
            label="measured",
        )
        axes.barh(
            [position + 0.2 for position in positions], [row.predicted for row in model_rows], 0.4, label="predicted"
        )
        axes.set_yticks(positions, [row.way for row in model_rows], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel("seconds of a step")
        axes.set_title(f"hidden size x layers: {name}")
        axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure this machine, time training under each configuration, print a table, and write the results."""
    parser = argparse.ArgumentParser(prog="benchmarks.planner", description=__doc__)
    parser.add_argument("--steps", type=at_least(WARMUP + 1), default=10, help="of each run (10)")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="for planner.json, planner.svg (out/bench)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="in place of OUT/planner.svg")
    options = parser.parse_args(arguments)
    make_folder("--out", options.out)
    machine = measure_this_machine()
    print(json.dumps(machine.to_dict(), indent=1), flush=True)
    rows = list(measure_rows(machine, options.steps))
    print(format_table(rows))
    choices = {name: fastest_and_recommended(machine, rows, name) for name in MODELS}
    for name, (config_name, plan) in choices.items():
        print(f"{name}: fastest of two ranks: {config_name}; recommended: {plan}")
    summary = {"machine": machine.to_dict(), "versions": versions(), "date": now(), "fastest": choices}
    write_atomically(
        options.out / "planner.json", json.dumps({**summary, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"
    )
    draw(rows, options.picture or options.out / "planner.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
