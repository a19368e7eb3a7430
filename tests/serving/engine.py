"""Engines of vLLM and SGLang on CPU ranks, one process each (benchmarks.serving_engine), and models for them."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from benchmarks.serving import engine_environment
from benchmarks.serving_engine import WORKER_TITLES

_SIZES = {
    "vocab_size": 8000,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "initializer_range": 0.08,  # logits far apart: a rounding must not change a token
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(intermediate_size=1376, **_SIZES),
    "qwen3_tied": Qwen3Config(intermediate_size=1376, head_dim=64, tie_word_embeddings=True, **_SIZES),
    "qwen3_moe": Qwen3MoeConfig(
        intermediate_size=1024, moe_intermediate_size=256, num_experts=16, num_experts_per_tok=4, head_dim=64, **_SIZES
    ),
    "gemma3": Gemma3TextConfig(
        intermediate_size=1024, head_dim=64, sliding_window=64, tie_word_embeddings=False, **_SIZES
    ),
}


def save_model(name: str, folder: Path) -> Path:
    """Save a model of random weights and return its folder."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.05)
        if name == "gemma3":  # its embeddings are scaled up, so that a head tied to them would repeat a prompt's end
            model.get_input_embeddings().weight.mul_(0.2)
    model.save_pretrained(folder / name)
    return folder / name


class Engine:
    """One engine in a process of its own; `log` is the file with what it writes to stderr."""

    def __init__(self, process: subprocess.Popen[str], log: Path, name: str) -> None:
        self.process, self.log, self.name = process, log, name
        self.start_seconds = self._read()["start"]

    def run(self, prompts: list[int], new_tokens: int) -> dict[str, Any]:
        """Generate for prompts of these lengths; see benchmarks.serving_engine."""
        self.send(prompts, new_tokens)
        return self._read()

    def run_cancelled(self, prompts: list[int], cancel_after: list[int]) -> dict[str, Any]:
        """Generate, and cancel each request after this number of its tokens."""
        self._write({"prompts": prompts, "new_tokens": 1000, "cancel_after": cancel_after})
        return self._read()

    def check_cancelled_requests(self, prompts: list[int]) -> None:
        """Check that requests that are cancelled in flight leave tokens of others as they are, and nothing behind."""
        numbers = random.Random(0)
        wanted = self.run(prompts, 16)["tokens"]
        for _ in range(10):
            tokens = self.run_cancelled(prompts, [numbers.randint(1, 40) for _ in prompts])["tokens"]
            assert all(a[:16] == b[: len(a)] for a, b in zip(tokens, wanted, strict=True))
        assert self.run(prompts, 16)["tokens"] == wanted

    def send(self, prompts: list[int], new_tokens: int) -> None:
        """Request a run without waiting for the reply."""
        self._write({"prompts": prompts, "new_tokens": new_tokens})

    def describe_workers(self) -> dict[str, list[int]]:
        """Return the bytes of memory ("memory") and the number of threads ("threads") of each worker."""
        self._write({"processes": True})
        return self._read()

    def workers(self) -> dict[int, int]:
        """Return the process of each rank."""
        found = {}
        for rank, pid in _worker_processes(WORKER_TITLES[self.name]):
            if _is_descendant(pid, self.process.pid):
                found[rank] = pid
        return found

    def seconds_to_end(self, timeout: float) -> float:
        """Wait for the end of the engine's process, and return how long that took."""
        start = time.monotonic()
        self.process.wait(timeout)
        return time.monotonic() - start

    def _write(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the engine ended: {self.log.read_text()[-3000:]}"
        reply: dict[str, Any] = json.loads(line)
        return reply


def run_on_ranks(script: str, num_ranks: int) -> None:
    """Run a script of this folder on ranks; raise AssertionError with its output if it fails."""
    path = str(Path(__file__).with_name(script))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks), path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@contextmanager
def start_engine(
    model: Path,
    folder: Path,
    *arguments: str,
    name: str = "vllm",
    ranks: int = 2,
    has_plugin: bool = True,
    **environment: str,
) -> Iterator[Engine]:
    """Context manager of an engine of vLLM or SGLang with `ranks` ranks, a core each."""
    log = folder / f"engine-{time.monotonic_ns()}.log"
    defaults = {**engine_environment(name, ranks, has_plugin), "VLLM_LOGGING_LEVEL": "INFO", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "benchmarks.serving_engine", str(model), "--engine", name, "--ranks", str(ranks)]
    command += arguments
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=dict(os.environ) | defaults | environment,
            start_new_session=True,
        )
    try:
        yield Engine(process, log, name)
        assert process.stdin is not None
        process.stdin.close()  # the engine ends at the end of its input
        process.wait(60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _worker_processes(worker_title: str) -> Iterator[tuple[int, int]]:
    """Yield (rank, process) of each worker, whose title begins with `worker_title`."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_text().strip("\0")
        except OSError:
            continue  # it has ended meanwhile
        if title.startswith(worker_title):
            rank = re.search(r"_TP(\d+)", title)
            yield int(rank[1]) if rank else 0, int(folder.name)


def _is_descendant(pid: int, ancestor: int) -> bool:
    while pid > 1 and pid != ancestor:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return pid == ancestor
