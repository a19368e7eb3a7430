"""`fused-tp compare`: trains the same model in several ways for a few steps, and prints what each costs, side by side.

Each way is a run of `fused-tp train` with other `parallel` sizes: one process, then those that are asked for, each with
plain collectives too where tensor or context parallel ranks communicate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fused_tp.cli import at_least, make_folder
from fused_tp.cli.train import start_ranks

PLAIN = {"FUSED_TP_SCHEDULE": "plain", "FUSED_TP_SHM": "0"}  # matmul, then a collective of torch.distributed
ALIKE = 1e-3  # of the loss, in nats: rounding in fp32 comes to 1e-6 in some steps, and grows with their number
WARMUP = 2  # steps left out of times: they allocate, connect and choose
SMALL: dict[str, Any] = {
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
}


@dataclass(frozen=True)
class Result:
    """Of one way.

    Attributes:
        step_seconds: the median behind the first steps.
        waiting: share of these steps in which a rank waited for its peers, in the mean.
        memory: bytes, the most that a rank has had.
    """

    name: str
    ranks: int
    step_seconds: float
    tokens_per_second: float
    waiting: float
    memory: int
    losses: list[float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="of `fused-tp train`; default: a Llama of 4 layers")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of it")
    for name, words in (
        ("tp", "tensor parallel ranks"),
        ("cp", "context parallel ranks"),
        ("pp", "pipeline ranks, with twice as many microbatches"),
        ("fsdp", "data parallel ranks that shard parameters"),
        ("dp", "data parallel ranks with copies"),
    ):
        parser.add_argument(f"--{name}", type=at_least(2), action="append", default=[], help=words, metavar="N")
    parser.add_argument("--parallel", action="append", default=[], metavar="JSON", help='such as {"tp": 2, "cp": 2}')
    parser.add_argument("--steps", type=at_least(WARMUP + 1), default=10, help="of each run (10)")
    parser.add_argument("--out", type=Path, default=Path("out/compare"), help="for the runs, compare.json, compare.png")


def main(arguments: argparse.Namespace) -> int:
    """0: all ways train alike; 1: one failed, or trains otherwise; 2: settings that do not fit.

    In fp32 losses that differ by more than ALIKE are another training; in 16 bits rounding may differ by more.
    """
    from fused_tp.planning.config import read_mapping
    from fused_tp.training.settings import TrainSettings, changed

    try:
        given = read_mapping(arguments.config) if arguments.config else SMALL
        given = changed({**given, "steps": arguments.steps, "parallel": {}}, arguments.set)
        ways = ways_of(arguments)
        for way in ways.values():
            TrainSettings.of({**given, "parallel": way}).least_ranks()
        make_folder("--out", arguments.out)
    except ValueError as error:
        print(f"fused-tp compare: {error}", file=sys.stderr)
        return 2
    results = []
    for name, way in ways.items():
        for suffix, env in (("", {}), (", plain collectives", PLAIN)):
            if suffix and not {"tp", "cp"} & set(way):
                continue
            result = run_way(name + suffix, {**given, "parallel": way}, arguments.out, env)
            if result is None:
                print(f"fused-tp compare: {name}{suffix} has failed; its output is above.", file=sys.stderr)
                return 1
            results.append(result)
    print(table(results))
    (arguments.out / "compare.json").write_text(json.dumps([asdict(result) for result in results], indent=1))
    draw(results, arguments.out / "compare.png")
    first = results[0].losses
    apart = max(abs(a - b) for result in results for a, b in zip(result.losses, first, strict=True))
    print(f"Losses differ by {apart:.1e} at most. Written: {arguments.out}/compare.json, compare.png")
    return 0 if apart < ALIKE or given.get("precision", "fp32") != "fp32" else 1


def ways_of(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """`parallel` of each way, by name; one process first."""
    ways: dict[str, dict[str, Any]] = {"one process": {}}
    for size in arguments.tp:
        ways[f"tp{size}"] = {"tp": size}
    for size in arguments.cp:
        ways[f"cp{size}"] = {"cp": size}
    for size in arguments.pp:
        ways[f"pp{size}"] = {"pp": size, "microbatches": 2 * size}
    for size in arguments.fsdp:
        ways[f"fsdp{size}"] = {"dp_shard": size}
    for size in arguments.dp:
        ways[f"dp{size}"] = {"dp_replicate": size}
    for text in arguments.parallel:
        try:
            way = json.loads(text)
        except ValueError as error:
            raise ValueError(f"--parallel {text} is no JSON: {error}.") from None
        if not isinstance(way, dict):
            raise ValueError(f'--parallel {text} is no mapping; write {{"tp": 2}}.')
        ways[" x ".join(f"{name}{size}" for name, size in way.items())] = way
    return ways


def run_way(name: str, settings: dict[str, Any], out: Path, env: dict[str, str]) -> Result | None:
    """Trains in one way; None where a rank failed."""
    from fused_tp.training.log import read_log
    from fused_tp.training.settings import TrainSettings

    folder = out / name.replace(" ", "_").replace(",", "")
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "train.json"
    config.write_text(json.dumps({**settings, "out": str(folder)}))
    ranks = TrainSettings.of(settings).least_ranks()
    print(f"{name}: {ranks} rank{'s' if ranks > 1 else ''}", flush=True)
    if start_ranks(ranks, config, env=env, quiet=True):
        return None
    steps = read_log(folder)["step"]
    timed = steps[WARMUP:]
    seconds = statistics.median(step["seconds"] for step in timed)
    return Result(
        name,
        ranks,
        seconds,
        steps[0]["tokens"] / seconds,
        sum(step["waited"] for step in timed) / sum(step["seconds"] for step in timed),
        max(step["memory"] for step in steps),
        [step["loss"] for step in steps],
    )


def table(results: list[Result]) -> str:
    """A line for each way."""
    lines = [
        f"{'':28} {'ranks':>5} {'s/step':>8} {'speed':>6} {'tokens/s':>9} {'waiting':>8} {'GiB/rank':>9} {'loss':>8}"
    ]
    for one in results:
        speed = results[0].step_seconds / one.step_seconds
        lines.append(
            f"{one.name:28} {one.ranks:5} {one.step_seconds:8.3f} {speed:5.2f}x {one.tokens_per_second:9,.0f} "
            f"{one.waiting:8.0%} {one.memory / 2**30:9.2f} {one.losses[-1]:8.4f}"
        )
    return "\n".join(lines)


def draw(results: list[Result], path: Path) -> None:
    """Bars of each way: time of a step, of which waiting, and memory."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.45 * len(results)), layout="constrained")
    time, memory = figure.subplots(1, 2, sharey=True)
    names = [one.name for one in results]
    time.barh(names, [one.step_seconds for one in results], label="a step")
    time.barh(names, [one.step_seconds * one.waiting for one in results], label="waiting for peers")
    time.set_xlabel("seconds")
    time.invert_yaxis()
    time.legend(loc="lower right")
    memory.barh(names, [one.memory / 2**30 for one in results])
    memory.set_xlabel("peak memory of a rank, GiB")
    figure.savefig(path, dpi=120)
