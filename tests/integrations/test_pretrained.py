"""load_pretrained: a checkpoint read shard by shard into a model from the meta device."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fused_tp.nn import gather_state_dict
from fused_tp.parallelizing.hf.hf_pretrained import load_pretrained
from fused_tp.parallelizing.parallelize import parallelize
from tests.integrations.models import assert_near, make, make_tokens, mesh_of
from tests.integrations.sweep import make_model
from tests.reference import refuses
from tests.workers import fresh_ranks, on_ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")


def blank_of(whole: Any, mesh: Any, **keywords: Any) -> Any:
    with torch.device("meta"):
        model = type(whole)(whole.config)
    return parallelize(model.to(whole.dtype), mesh, **keywords)


def saved(model: Any, folder: Path, group: dist.ProcessGroup, **keywords: Any) -> Path:
    if dist.get_rank(group) == 0:
        model.save_pretrained(folder, **keywords)
    dist.barrier(group)
    return folder


@pytest.mark.parametrize("kind", ["llama", "tied", "qwen3_moe", "phi3", "gpt2", "mixtral", "granitemoehybrid"])
@on_ranks(2)
def test_values_are_those_of_from_pretrained(group: dist.ProcessGroup, kind: str, tmp_path: Path) -> None:
    """Packed layers, tied weights, experts that transformers merges, and transposed layers."""
    torch.manual_seed(0)
    whole = make("qwen3", tied=True) if kind == "tied" else make_model(kind)
    folder = saved(whole, tmp_path / "saved", group, max_shard_size="100KB")  # several files
    wanted = type(whole).from_pretrained(folder)
    parallel = load_pretrained(blank_of(whole, mesh_of(group, 1, 2)), folder)
    for name, value in gather_state_dict(parallel).items():
        assert torch.equal(value, wanted.state_dict()[name]), name
    tokens = make_tokens(2, 9) % whole.config.vocab_size
    with torch.no_grad():
        assert_near(parallel(tokens).logits, wanted(tokens).logits, "logits")
    assert parallel.generation_config.to_dict() == wanted.generation_config.to_dict()


@on_ranks(2)
def test_missing_weights_and_other_layouts(group: dist.ProcessGroup, tmp_path: Path) -> None:
    whole = make("llama").bfloat16()
    folder = saved(whole.model, tmp_path / "base", group)  # without its output layer
    state = whole.model.state_dict()
    for cp, tp, keywords in ((2, 1, {}), (1, 2, {"sequence_parallel": True, "parameters": "plain"})):
        parallel = load_pretrained(blank_of(whole, mesh_of(group, cp, tp), **keywords), str(folder))
        found = gather_state_dict(parallel)
        heads: list[Tensor] = [torch.empty_like(found["lm_head.weight"]) for _ in range(2)]
        dist.all_gather(heads, found.pop("lm_head.weight").contiguous(), group=group)
        assert torch.equal(*heads) and heads[0].isfinite().all() and heads[0].float().std() > 0.01
        for name, value in found.items():
            assert torch.equal(value, state[name.removeprefix("model.")]), name


@on_ranks(2)
def test_what_is_refused(group: dist.ProcessGroup, tmp_path: Path) -> None:
    whole, mesh = make("llama"), mesh_of(group, 1, 2)
    folder = saved(whole, tmp_path / "saved", group)
    refuses(TypeError, "needs a transformers model that parallelize returned", load_pretrained, whole, folder)
    parallel = parallelize(make("llama"), mesh)
    refuses(ValueError, "takes no device_map", load_pretrained, parallel, folder, device_map="auto")
    refuses(OSError, "nowhere", load_pretrained, parallel, tmp_path / "nowhere")
    other = parallelize(make("llama", intermediate_size=48), mesh)
    refuses(RuntimeError, "size", load_pretrained, other, folder)
    whole.config.quantization_config = {"quant_method": "x"}
    parallel.config.quantization_config = {"quant_method": "x"}
    refuses(ValueError, "has a quantization_config", load_pretrained, parallel, folder)


def peak_of_rank(group: dist.ProcessGroup, folder: Path, config: Any) -> tuple[int, int]:
    """Bytes of anonymous memory that loading takes at its peak, and of this rank's shards."""

    def anonymous() -> int:
        lines = Path(f"/proc/{os.getpid()}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    before, peak, is_done = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_done.is_set():
            peak = max(peak, anonymous())
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    load_pretrained(parallelize(model, mesh_of(group, 1, 2)), folder)
    is_done.set()
    thread.join()
    return peak - before, sum(p.to_local().nbytes for p in model.parameters())


@pytest.mark.full
def test_peak_memory_is_that_of_the_shards(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=8, vocab_size=8192
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path, max_shard_size="200MB")
    for outcome in fresh_ranks(2, peak_of_rank, tmp_path, config, timeout=200):
        peak, shards = outcome.unwrap()
        assert peak < 1.3 * shards, (peak, shards)
