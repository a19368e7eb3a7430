"""Log of a training run: printed lines, train.jsonl, tensorboard events, and report.png at the end."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fused_tp.planning.hardware import Machine, find_machine, machine_of_gpu
from fused_tp.training.run import TrainingRun, TrainingStep

LOG_FILE = "train.jsonl"
# Names in Machine.peak_flops; fp16 is as fast as bf16.
_PEAK_PRECISION = {"fp32": "fp32", "bf16": "bf16", "fp16": "bf16"}


class RunLog:
    """Log of a run on rank 0; silent on other ranks.

    A resumed run appends to train.jsonl; if a step is logged twice, its last line counts. A new run replaces the file.

    Args:
        run: the run to log; its settings name the folder.
        is_writer: True on rank 0.
    """

    def __init__(self, run: TrainingRun, *, is_writer: bool) -> None:
        self._run, self._is_writer = run, is_writer
        self._settings = run.settings
        self._summary_writer: Any = None
        self._machine: Machine | None = None
        if not is_writer:
            return
        if self._settings.machine is not None:
            self._machine = find_machine(self._settings.machine)
        elif run.device.type == "cuda":
            self._machine = machine_of_gpu(torch.cuda.get_device_name())
        self._settings.out.mkdir(parents=True, exist_ok=True)
        self._file = self._settings.out / LOG_FILE
        if run.done_steps == 0:
            self._file.unlink(missing_ok=True)
        if self._settings.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._summary_writer = SummaryWriter(str(self._settings.out))

    def start(self) -> None:
        """Print the model, the parallel dims and the settings of the run."""
        run = self._run
        shape = run.shape
        parameter_count = shape.parameters
        parameters = (
            f"{parameter_count / 1e6:.1f}M parameters"
            if parameter_count >= 1e6
            else f"{parameter_count:,.0f} parameters"
        )
        steps = self._settings.steps
        progress = (
            f"step {run.done_steps} of {steps}"
            if run.done_steps <= steps
            else f"step {run.done_steps}, beyond steps={steps}"
        )
        self._print(
            f"{shape.name}, {parameters}, {run.config.shown()}, {self._settings.precision}; {progress}, "
            f"{self._settings.global_batch} rows of {self._settings.data.seq} tokens a step"
        )
        if run.has_dropout and run.config.world_size > 1:
            self._print(
                "The model has dropout, which draws different random numbers on several ranks: losses differ from "
                "one process. Set dropout to 0 in model.config to compare them."
            )
        if run.done_steps >= steps:
            self._print("All steps are done: nothing to train. Increase steps, or change the folder of checkpoints.")

    def log_step(self, step: TrainingStep) -> None:
        """Log a step."""
        if not self._is_writer:
            return
        flops = self._run.shape.flops(step.tokens, self._settings.data.seq)
        waited_share = step.waited / step.seconds
        tokens_per_second = step.tokens / step.seconds
        tflops = flops / step.seconds / self._run.config.world_size / 1e12
        peak_flops = self._machine and self._machine.peak_flops.get(_PEAK_PRECISION[self._settings.precision])
        mfu = 1e12 * tflops / peak_flops if peak_flops else None
        self._record(
            "step", asdict(step) | {"tokens_per_second": tokens_per_second, "tflops_per_rank": tflops, "mfu": mfu}
        )
        if self._summary_writer is not None:
            for name in ("loss", "norm", "learning_rate", "seconds", "waited"):
                self._summary_writer.add_scalar(name, getattr(step, name), step.number)
        if step.number % self._settings.log_every == 0 or step.number == self._settings.steps:
            self._print(
                f"step {step.number}: loss {step.loss:.4f}, norm {step.norm:.3f}, lr {step.learning_rate:.2e}, "
                f"{tokens_per_second:,.0f} tokens/s, {tflops:.3f} TFLOP/s per rank, "
                + ("" if mfu is None else f"{mfu:.1%} MFU, ")
                + f"{waited_share:.0%} waiting for peers, "
                f"{step.memory / 2**30:.2f} GiB" + (", skipped: gradients overflowed" if step.skipped else "")
            )

    def log_evaluation(self, step: int, loss: float | None, sample: str | None) -> None:
        """Log the evaluation loss and the sample after step `step`."""
        if not self._is_writer:
            return
        if loss is not None:
            self._record("evaluation", {"number": step, "loss": loss})
            self._print(f"step {step}: evaluation loss {loss:.4f}")
            if self._summary_writer is not None:
                self._summary_writer.add_scalar("evaluation loss", loss, step)
        if sample is not None:
            self._record("sample", {"number": step, "text": sample})
            self._print(f"step {step}: sample {sample!r}")

    def close(self) -> None:
        """Name the exported model, close tensorboard's file, and draw report.png if matplotlib is installed."""
        if not self._is_writer:
            return
        if (folder := self._settings.export) is not None:
            self._print(f"The model is in {folder}: AutoModelForCausalLM.from_pretrained({str(folder)!r}).")
        if self._summary_writer is not None:
            self._summary_writer.close()
        try:
            draw_report(self._settings.out)
        except ModuleNotFoundError as error:
            self._print(f"No report.png: {error}.")

    def _record(self, kind: str, values: dict[str, Any]) -> None:
        try:
            with self._file.open("a") as file:
                file.write(json.dumps({"kind": kind, **values}) + "\n")
        except OSError as error:  # OSError from write() lacks the file name; add it
            raise OSError(error.errno, error.strerror, str(self._file)) from None

    def _print(self, line: str) -> None:
        if self._is_writer:
            print(line, file=sys.stdout, flush=True)


def read_log(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the records of train.jsonl by kind, sorted by step. A step logged twice has its last record."""
    records: dict[str, dict[int, dict[str, Any]]] = {"step": {}, "evaluation": {}, "sample": {}}
    for line in (folder / LOG_FILE).read_text().splitlines():
        values = json.loads(line)
        records[values["kind"]][values["number"]] = values
    return {kind: [lines[number] for number in sorted(lines)] for kind, lines in records.items()}


def draw_report(folder: Path) -> None:
    """Draw report.png in `folder`: losses, speed, and the fraction of time that ranks waited for peers."""
    from matplotlib.figure import Figure

    log = read_log(folder)
    steps = log["step"]
    if not steps:
        return
    step_numbers = [step["number"] for step in steps]
    figure = Figure(figsize=(8, 8), layout="constrained")
    loss_axes, speed_axes, waiting_axes = figure.subplots(3, 1, sharex=True)
    loss_axes.plot(step_numbers, [step["loss"] for step in steps], label="training")
    if log["evaluation"]:
        loss_axes.plot(
            [evaluation["number"] for evaluation in log["evaluation"]],
            [evaluation["loss"] for evaluation in log["evaluation"]],
            "o-",
            label="evaluation",
        )
    loss_axes.set_ylabel("loss per token")
    loss_axes.legend()
    speed_axes.plot(step_numbers, [step["tokens_per_second"] for step in steps])
    speed_axes.set_ylabel("tokens per second")
    speed_axes.set_ylim(bottom=0)
    waiting_axes.plot(step_numbers, [100 * step["waited"] / step["seconds"] for step in steps])
    waiting_axes.set_ylabel("waiting for peers, % of a step")
    waiting_axes.set_ylim(0, 100)
    waiting_axes.set_xlabel("step")
    figure.savefig(folder / "report.png", dpi=120)
