"""Compare a training run across layouts, and across a change of layout in the middle of the run.

Each layout trains `--steps` steps, whose losses are compared with those of one process. The next layout then resumes
from the checkpoint in the middle, and its losses are compared with those of the uninterrupted run.

    python -m benchmarks.layouts --steps 200 --out out/layouts
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from fused_tp.cli import at_least
from fused_tp.cli.train import start_ranks
from fused_tp.training.log import read_log
from fused_tp.training.settings import TrainSettings

LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "dp2": {"dp_replicate": 2},
    "tp2": {"tp": 2},
    "cp2": {"cp": 2},
    "pp2": {"pp": 2, "microbatches": 4},
    "tp2 x pp2": {"tp": 2, "pp": 2, "microbatches": 4},
    "dp2 x tp2": {"dp_shard": 2, "tp": 2},
}
SETTINGS: dict[str, Any] = {
    "model": {
        "type": "llama",
        "config": {  # 9.6M parameters
            "hidden_size": 384,
            "intermediate_size": 1024,
            "num_hidden_layers": 6,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
        },
    },
    "data": {"seq": 64},
    "global_batch": 4,
    "optimizer": {"learning_rate": 5e-4, "warmup": 10},
}


def train(folder: Path, parallel: dict[str, Any], steps: int) -> dict[int, float]:
    """Train, and return the loss of each step by its number."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {**SETTINGS, "steps": steps, "parallel": parallel, "out": str(folder)}
    settings["checkpoints"] = {"folder": str(folder / "checkpoints"), "every": steps // 2}
    config = folder / "train.json"
    config.write_text(json.dumps(settings))
    if start_ranks(TrainSettings.from_mapping(settings).minimum_ranks(), config):
        sys.exit(f"{folder.name} has failed.")
    return {step["number"]: step["loss"] for step in read_log(folder)["step"]}


def largest_difference(losses: dict[int, float], reference: dict[int, float]) -> float:
    """Largest absolute difference of losses of the same step."""
    return max(abs(loss - reference[step]) for step, loss in losses.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=at_least(4), default=200, help="of each run (200)")
    parser.add_argument("--out", type=Path, default=Path("out/layouts"), help="for the runs and layouts.json")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.out, ignore_errors=True)
    losses = {name: train(arguments.out / name, parallel, arguments.steps) for name, parallel in LAYOUTS.items()}
    names, rows = [*LAYOUTS], []
    for name, next_name in zip(names, names[1:] + names[:1], strict=True):
        folder = arguments.out / f"{name}, then {next_name}"
        checkpoint = f"step-{arguments.steps // 2:08d}"
        shutil.copytree(arguments.out / name / "checkpoints" / checkpoint, folder / "checkpoints" / checkpoint)
        resumed_losses = train(folder, LAYOUTS[next_name], arguments.steps)
        rows.append(
            {
                "layout": name,
                "off one process": largest_difference(losses[name], losses["one process"]),
                "goes on in": next_name,
                "off the run without interruption": largest_difference(resumed_losses, losses[name]),
                "steps": len(resumed_losses),
                "last loss": resumed_losses[arguments.steps],
            }
        )
    (arguments.out / "layouts.json").write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        print("| " + " | ".join(f"{v:.1e}" if "off" in k else str(v) for k, v in row.items()) + " |")


if __name__ == "__main__":
    main()
