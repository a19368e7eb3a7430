"""Continuous batching of transformers over tensor parallel ranks: the tokens of one process."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
