"""Engines of vLLM and SGLang on CPU ranks, one process each (benchmarks.serving_engine), and models for them."""

from __future__ import annotations

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

from benchmarks import serving
from benchmarks.serving import Engine
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


@contextmanager
def start_engine(model: Path, folder: Path, *options: str, **keywords: Any) -> Iterator[Engine]:
    """Context manager of an engine that writes its log to `folder`; see benchmarks.serving.start_engine."""
    environment = {"VLLM_LOGGING_LEVEL": "INFO", "HF_HUB_OFFLINE": "1"}
    with serving.start_engine(
        model, folder / f"engine-{time.monotonic_ns()}.log", *options, **environment | keywords
    ) as engine:
        yield engine


def check_cancelled_requests(engine: Engine, prompts: list[int]) -> None:
    """Check that requests that are cancelled in flight leave tokens of others as they are, and nothing behind."""
    numbers = random.Random(0)
    wanted = engine.run(prompts, 16)["tokens"]
    for _ in range(10):
        tokens = engine.run(prompts, 1000, cancel_after=[numbers.randint(1, 40) for _ in prompts])["tokens"]
        assert all(a[:16] == b[: len(a)] for a, b in zip(tokens, wanted, strict=True))
    assert engine.run(prompts, 16)["tokens"] == wanted


def worker_of(engine: Engine, rank: int) -> int:
    """Return the process of a rank of `engine`."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_text().strip("\0")
        except OSError:
            continue  # it has ended meanwhile
        if title.startswith(tuple(WORKER_TITLES.values())) and _is_descendant(int(folder.name), engine.process.pid):
            named_rank = re.search(r"_TP(\d+)", title)
            if rank == (int(named_rank[1]) if named_rank else 0):
                return int(folder.name)
    raise AssertionError(f"the engine has no rank {rank}")


def kill_worker(
    engine: Engine, rank: int, sent: signal.Signals = signal.SIGKILL, new_tokens: int = 2000, seconds: float = 30.0
) -> str:
    """End a rank of a working engine by a signal, check that the engine ends within `seconds`, and return its log."""
    prompts = [5 + 11 * index for index in range(20)]
    engine.run(prompts, 4)
    engine.send(prompts=prompts, new_tokens=new_tokens, cancel_after=[None, 3] * 10)
    time.sleep(random.random())
    os.kill(worker_of(engine, rank), sent)
    with suppress(BrokenPipeError):  # it has ended
        engine.send(prompts=prompts, new_tokens=4)  # an engine without requests ends at the next one
    engine.process.wait(seconds)
    return engine.log.read_text()


def run_on_ranks(script: str, num_ranks: int) -> None:
    """Run a script of this folder on ranks; raise AssertionError with its output if it fails."""
    path = str(Path(__file__).with_name(script))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks), path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def _is_descendant(pid: int, ancestor: int) -> bool:
    while pid > 1 and pid != ancestor:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return pid == ancestor
