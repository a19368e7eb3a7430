"""Continuous batching of transformers over tensor parallel ranks: the tokens of one process."""

from __future__ import annotations

import copy
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fused_tp.parallelizing.parallelize import parallelize
from tests.integrations.models import mesh_of
from tests.integrations.sweep import make_model
from tests.workers import on_ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")

PROMPTS = [[3, 5, 7, 9, 11][: 2 + index % 3] * (1 + index) for index in range(6)]
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
MLP = {"gate": "colwise", "up": "colwise", "down": "rowwise"}
GREEDY = transformers.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)


def small_cache() -> Any:
    """Settings of a cache of a few kilobytes; the default takes most of the memory."""
    return transformers.ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64)


@contextmanager
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def generated(model: Any) -> list[list[int]]:
    outputs = model.generate_batch(
        PROMPTS, generation_config=GREEDY, continuous_batching_config=small_cache(), warmup=False
    )
    return [outputs[name].generated_tokens for name in sorted(outputs)]


@pytest.mark.parametrize(
    ("kind", "sequence_parallel"),
    [("llama", False), ("llama", True), ("gpt2", False), ("phi3", False), ("gemma2", True), ("qwen3_moe", False)],
)
@on_ranks(4)  # all ranks of the pool, because torch counts the groups that transformers creates
def test_batches(group: dist.ProcessGroup, kind: str, sequence_parallel: bool) -> None:
    """Heads are sharded, also those of one layer for q, k and v (gpt2), or are not (phi3)."""
    with quiet():
        whole = make_model(kind, **({} if kind in ("gpt2", "phi3") else HEADS)).eval()
        model = parallelize(copy.deepcopy(whole), mesh_of(group, 1, 4)["tp"], sequence_parallel=sequence_parallel)
        assert generated(copy.deepcopy(model)) == generated(model) == generated(whole)


@on_ranks(4)
def test_heads_of_a_plan_and_of_strided_ranks(group: dist.ProcessGroup) -> None:
    """A plan of MLPs leaves the cache whole; ranks that are no neighbours would sample with different seeds."""
    with quiet():
        whole = make_model("gemma3_text").eval()
        plan = {f"model.layers.*.mlp.{name}_proj": style for name, style in MLP.items()}
        assert generated(parallelize(copy.deepcopy(whole), mesh_of(group, 1, 4)["tp"], plan=plan)) == generated(whole)
        mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("tp", "dp"))
        model = parallelize(make_model("llama").eval(), mesh["tp"])
        with pytest.raises(ValueError, match="needs tensor parallel ranks that are neighbours"):
            generated(model)


@on_ranks(4)
def test_requests_and_cancellations(group: dist.ProcessGroup) -> None:
    """Rank 0 takes requests while others run, and cancels some; the other ranks follow."""
    with quiet():
        whole = make_model("llama", **HEADS).eval()
        expected = generated(whole)
        model = parallelize(whole, mesh_of(group, 1, 4)["tp"])
        manager = model.init_continuous_batching(generation_config=GREEDY, continuous_batching_config=small_cache())
        manager.start()
        results: dict[str, list[int]] = {}
        if group.rank() == 0:
            for index, prompt in enumerate(PROMPTS):
                manager.add_request(prompt, request_id=f"long {index}", max_new_tokens=400)
                manager.add_request(prompt, request_id=f"request {index}", max_new_tokens=8)
                time.sleep(0.01 * index)
                manager.cancel_request(f"long {index}")
            deadline = time.monotonic() + 60
            while len(results) < len(PROMPTS) and time.monotonic() < deadline:
                output = manager.get_result(timeout=1)
                if output is not None and output.request_id.startswith("request"):
                    results[output.request_id] = output.generated_tokens
            manager.stop(block=True, timeout=30)
        else:
            manager.join(time.perf_counter(), timeout=100)  # until rank 0 stops all
        manager.destroy()
    if group.rank() == 0:
        assert [results.get(f"request {index}") for index in range(len(PROMPTS))] == expected


def save_with_tokenizer(folder: Path) -> Any:
    """Save a model and a tokenizer of words w0, w1, ...; return the model."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = {word: index for index, word in enumerate(("<unk>", "</s>", *(f"w{index}" for index in range(60))))}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", pad_token="</s>"
    ).save_pretrained(folder)
    model = make_model("llama", vocab_size=len(words), initializer_range=0.3, **HEADS).eval()
    model.save_pretrained(folder)
    return model


def complete(port: int, prompt: str) -> str:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"http://localhost:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        text: str = json.loads(reply.read())["choices"][0]["text"]
    return text


@pytest.mark.full
def test_server_over_ranks(tmp_path: Path) -> None:
    """Requests that arrive at once get the tokens of generate() on one process; at its end all ranks end."""
    for name in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(name)
    with quiet():
        model = save_with_tokenizer(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    with socket.socket() as unused:
        unused.bind(("localhost", 0))
        port = unused.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "fused_tp.integrations.transformers_serve", str(tmp_path), "--port", str(port)]
    command += ["--cb-num-blocks", "64", "--cb-max-batch-tokens", "64"]
    log = tmp_path / "log"
    with log.open("w") as file:
        server = subprocess.Popen(
            command, stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        )
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://localhost:{port}/health", timeout=5).close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(0.3)
        prompts = ["w3 w5 w7", "w9", "w11 w2", "w1 w1 w1 w4 w20"]
        with ThreadPoolExecutor(len(prompts)) as pool:
            texts = [*pool.map(lambda prompt: complete(port, prompt), prompts)]
        for prompt, text in zip(prompts, texts, strict=True):
            tokens = tokenizer(prompt, return_tensors="pt").input_ids
            wanted = model.generate(tokens, max_new_tokens=8, do_sample=False, eos_token_id=1, pad_token_id=1)
            assert text == tokenizer.decode(wanted[0, tokens.shape[1] :], skip_special_tokens=True), log.read_text()
        server.send_signal(signal.SIGINT)
        server.wait(60)
        assert "after parallelize" not in log.read_text()
    finally:
        server.kill()
