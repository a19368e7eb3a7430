"""`fused-tp compare`: train the same model in several configurations for a few steps, and print their costs.

| configuration | ranks | variants that run in turn, step by step                    |
|---------------|-------|------------------------------------------------------------|
| one process   | 1     | one thread; a thread per rank of the largest configuration |
| tp, cp, ...   | n     | fused_tp; plain collectives, if it uses tp or cp           |

Other load on the machine affects both variants equally, so that the ratio of their times is reliable even where the
times are not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fused_tp.cli import at_least, make_folder
from fused_tp.cli.compare_result import WARMUP, VariantResult
from fused_tp.cli.ranks import Job, choose_start_method, is_under_torchrun, launch, preload
from fused_tp.core.settings import override_environment

# Settings with which an op runs a matmul, then a collective of torch.distributed.
PLAIN_ENVIRONMENT = {"FUSED_TP_SCHEDULE": "plain", "FUSED_TP_SHM": "0"}
SMALL_LLAMA: dict[str, Any] = {
    "model": {
        "type": "llama",
        "config": {
            "hidden_size": 256,
            "intermediate_size": 704,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        },
    },
    "data": {"seq": 256},
    "global_batch": 8,
    "optimizer": {"learning_rate": 1e-3, "warmup": 5},
}


@dataclass(frozen=True)
class Variant:
    """One of the runs of a parallel configuration, which alternate step by step.

    Attributes:
        name: label of its line in the table.
        settings: keys of `fused_tp.training.settings.TrainSettings`.
        uses_plain_collectives: True to run a matmul, then a collective of torch.distributed, instead of fused_tp's
            schedules and transports.
        threads: CPU threads per rank.
    """

    name: str
    settings: dict[str, Any]
    uses_plain_collectives: bool = False
    threads: int = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="configuration of `fused-tp train` (default: a Llama of 4 layers)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the configuration"
    )
    for name, help_text in (
        ("tp", "tensor parallel ranks"),
        ("cp", "context parallel ranks"),
        ("pp", "pipeline ranks, with twice as many microbatches"),
        ("fsdp", "data parallel ranks that shard parameters"),
        ("dp", "data parallel ranks with copies"),
    ):
        parser.add_argument(f"--{name}", type=at_least(2), action="append", default=[], help=help_text, metavar="N")
    parser.add_argument("--parallel", action="append", default=[], metavar="JSON", help='such as {"tp": 2, "cp": 2}')
    parser.add_argument("--steps", type=at_least(WARMUP + 1), default=20, help="number of steps of each run (20)")
    parser.add_argument("--out", type=Path, default=Path("out/compare"), help="folder for compare.json and compare.png")


def main(arguments: argparse.Namespace) -> int:
    """Run all configurations; exit code 0: all train alike, 1: one failed or trains otherwise, 2: invalid settings."""
    # Imported here, so that `fused-tp --help` and invalid arguments do not wait for the import of torch.
    import torch

    from fused_tp.cli.compare_report import Comparison
    from fused_tp.planning.config import read_mapping
    from fused_tp.training.settings import TrainSettings, apply_changes

    try:
        if is_under_torchrun():
            raise ValueError(
                "the command starts the ranks of each configuration itself, on this machine; run it without torchrun."
            )
        settings = apply_changes(read_mapping(arguments.config) if arguments.config else SMALL_LLAMA, arguments.set)
        # A configuration must not resume from another's checkpoint, and a process supports one profiler only.
        settings |= {"steps": arguments.steps, "checkpoints": None, "profile": None, "export": None}
        device = "cuda" if torch.cuda.is_available() else "cpu"
        jobs = make_jobs(settings, parse_configs(arguments), device)
        for job in jobs:
            TrainSettings.from_mapping(job.settings[0].settings)
            if device == "cuda" and job.ranks > torch.cuda.device_count():
                raise ValueError(
                    f"{job.settings[0].name} needs {job.ranks} GPUs; torch sees {torch.cuda.device_count()}."
                )
        make_folder("--out", arguments.out)
        method = choose_start_method(device)
        if method == "forkserver":
            preload(["fused_tp.training.run", "transformers.modeling_utils", "torch._dynamo"])
        results: list[list[VariantResult]] = []
        sample = None
        for job in jobs:
            print(f"{job.settings[0].name}, {arguments.steps} steps ...", flush=True)
            config_results, sample = launch(job, method)
            results.append(config_results)
    except ValueError as error:
        print(f"fused-tp compare: {error}", file=sys.stderr)
        return 2
    except ChildProcessError as error:
        print(f"fused-tp compare: {job.settings[0].name} has failed. {error}", file=sys.stderr)
        return 1
    comparison = Comparison(results, settings.get("precision", "fp32"))
    comparison.write(arguments.out, settings)
    print(comparison)
    if sample is not None:
        print(f"Sample of the last configuration: {sample!r}")
    print(f"Written: {arguments.out}/compare.json, compare.png")
    return 0 if comparison.is_alike else 1


def parse_configs(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the value of setting `parallel` for each requested configuration, by name."""
    configs: dict[str, dict[str, Any]] = {}
    for size in arguments.tp:
        configs[f"tp{size}"] = {"tp": size}
    for size in arguments.cp:
        configs[f"cp{size}"] = {"cp": size}
    for size in arguments.pp:
        configs[f"pp{size}"] = {"pp": size, "microbatches": 2 * size}
    for size in arguments.fsdp:
        configs[f"fsdp{size}"] = {"dp_shard": size}
    for size in arguments.dp:
        configs[f"dp{size}"] = {"dp_replicate": size}
    for text in arguments.parallel:
        try:
            config = json.loads(text)
        except ValueError as error:
            raise ValueError(f"--parallel {text} is not valid JSON: {error}.") from None
        if not isinstance(config, dict):
            raise ValueError(f'--parallel must be a JSON mapping such as {{"tp": 2}}, got {text}.')
        configs[" x ".join(f"{name}{size}" for name, size in config.items())] = config
    return configs


def make_jobs(settings: dict[str, Any], configs: dict[str, dict[str, Any]], device: str) -> list[Job[list[Variant]]]:
    """Create a job for each configuration, one process first.

    Raises:
        ValueError: a configuration has invalid sizes.
    """
    from fused_tp.planning.config import ParallelConfig

    sizes = {name: ParallelConfig.from_dict(config).world_size for name, config in configs.items()}
    variants = [Variant("one process", {**settings, "parallel": {}})]
    # More threads than cores would slow each other down.
    num_threads = min(max(sizes.values(), default=1), os.cpu_count() or 1)
    if device == "cpu" and num_threads > 1:
        variants.append(Variant(f"one process, {num_threads} threads", variants[0].settings, threads=num_threads))
    jobs = [Job(train_alternately, variants, 1, device)]
    for name, config in configs.items():
        variants = [Variant(name, {**settings, "parallel": config})]
        if {"tp", "cp"} & set(config):
            variants.append(Variant(f"{name}, plain collectives", variants[0].settings, uses_plain_collectives=True))
        jobs.append(Job(train_alternately, variants, sizes[name], device))
    return jobs


def train_alternately(variants: list[Variant]) -> tuple[list[VariantResult], str | None]:
    """Train the variants of a configuration in turn, on every rank; return their results and a sample of the first."""
    import torch
    import torch.distributed as dist

    from fused_tp.training.run import TrainingRun, TrainingStep, peak_memory_bytes
    from fused_tp.training.settings import TrainSettings

    results: list[VariantResult] = []
    runs: list[tuple[Variant, TrainingRun, Iterator[TrainingStep]]] = []

    def run_step(index: int) -> None:
        variant, _, steps = runs[index]
        dist.barrier()  # all ranks start a step together, so that earlier delays do not count as waiting
        torch.set_num_threads(variant.threads)
        with override_environment(PLAIN_ENVIRONMENT if variant.uses_plain_collectives else {}):
            finished_step = next(steps)
        results[index].seconds.append(finished_step.seconds)
        results[index].waited.append(finished_step.waited)
        results[index].losses.append(finished_step.loss)

    for index, variant in enumerate(variants):
        with override_environment(PLAIN_ENVIRONMENT if variant.uses_plain_collectives else {}):
            run = TrainingRun(TrainSettings.from_mapping(variant.settings))
        runs.append((variant, run, run.steps()))
        tokens = run.settings.global_batch * run.settings.data.seq
        results.append(VariantResult(variant.name, dist.get_world_size(), variant.threads, tokens, [], [], [], None))
        for _ in range(WARMUP):
            run_step(index)
        if index == 0:
            peak_memory = torch.tensor(peak_memory_bytes(run.device), dtype=torch.int64, device=run.device)
            dist.all_reduce(peak_memory, dist.ReduceOp.MAX)
            results[0].memory = int(peak_memory)
    for step_index in range(runs[0][1].settings.steps - WARMUP):
        for index in range(len(runs))[:: -1 if step_index % 2 else 1]:
            run_step(index)
    torch.set_num_threads(variants[0].threads)
    return results, runs[0][1].sample()
