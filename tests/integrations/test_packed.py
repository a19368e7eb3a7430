"""Models with q, k and v in one layer, with weights [in, out], or with an attention bias for each head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from fused_tp.nn import ColumnParallelLinear
from fused_tp.parallelizing.parallelize import parallelize
from tests.integrations.models import (
    LAYOUTS,
    assert_near,
    assert_same_calls,
    assert_same_gradients,
    assert_states_travel,
    assert_steps_alike,
    assert_trains_alike,
    assert_trains_checkpointed,
    copy_of,
    make_tokens,
    mesh_of,
    on_layouts,
)
from tests.integrations.sweep import make_model
from tests.reference import refuses
from tests.tiers import quick
from tests.workers import on_ranks

pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "openai-gpt": ("openai-gpt", {}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "gpt_bigcode, all heads": ("gpt_bigcode", {"multi_query": False}),
    "bloom": ("bloom", {}),
    "falcon": ("falcon", {"bias": True}),
    "falcon, grouped": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon, alibi": ("falcon", {"multi_query": False, "alibi": True, "parallel_attn": False}),
    "falcon, eager": ("falcon", {"multi_query": False, "alibi": True, "attn_implementation": "eager"}),
    "falcon, one head, eager": ("falcon", {"attn_implementation": "eager"}),
    "mpt": ("mpt", {}),
    "codegen": ("codegen", {}),
    "gpt_neox_japanese": ("gpt_neox_japanese", {}),
    "phi3": ("phi3", {}),
    "glm4": ("glm4", {}),
    "doge": ("doge", {}),
    "doge, experts": ("doge", {"is_moe": True, "num_experts": 16}),
}
WITH_RING = ["gpt2", "gpt_bigcode", "gpt_bigcode, all heads", "phi3"]
# Without those whose attention checks the config for "sdpa".
IN_SEQUENCE = [name for name in MODELS if name not in ("falcon", "falcon, grouped", "falcon, alibi")]
# Not packed; with sequence parallelism they also have attention or shapes of hidden states of their own.
OTHERS = {kind: (kind, {}) for kind in ("gpt_neo", "gptj", "xglm", "opt", "biogpt")}


def made(name: str, **changes: Any) -> Any:
    kind, own = (MODELS | OTHERS)[name]
    return make_model(kind, **{**own, **changes})


def check(whole: Any, parallel: Any) -> None:
    for length in (9, 8, 2, 1):
        tokens = make_tokens(2, length)
        if length > 1:  # a single token has no loss
            assert_same_calls(parallel, whole, tokens, tokens)
        else:
            compare_weighted(whole, parallel, tokens)
        whole.zero_grad()
        parallel.zero_grad()


def compare_weighted(whole: Any, parallel: Any, tokens: Tensor) -> None:
    # Small: with one token the gradients of queries and keys are only rounding, which scales with these weights.
    weights = 1e-3 * torch.randn(*tokens.shape, 128, generator=torch.Generator().manual_seed(3))
    for model in (whole, parallel):
        model.zero_grad()
        (model(input_ids=tokens).logits * weights).sum().backward()
    assert_same_gradients(parallel, whole)


@on_layouts("tp2", full=["tp2_lossparallel"])
@pytest.mark.parametrize("name", quick(MODELS, "bloom", "falcon, grouped", "falcon, eager", "phi3"))
def test_packed(group: dist.ProcessGroup, layout: str, name: str) -> None:
    compare(group, layout, name)


@on_layouts("tp2_sp", full=["tp2_sp_lossparallel"])
@pytest.mark.parametrize("name", quick([*IN_SEQUENCE, *OTHERS], "gpt2", "gpt_bigcode", "doge, experts", "gptj"))
def test_packed_in_parts_of_the_sequence(group: dist.ProcessGroup, layout: str, name: str) -> None:
    compare(group, layout, name)


@pytest.mark.full
@on_layouts("cp2_tp2", "cp2_tp2_sp_lossparallel")
@pytest.mark.parametrize("name", WITH_RING)
def test_packed_over_a_ring(group: dist.ProcessGroup, layout: str, name: str) -> None:
    compare(group, layout, name)


def compare(group: dist.ProcessGroup, layout: str, name: str) -> None:
    cp, tp, keywords = LAYOUTS[layout]
    whole = made(name)
    parallel = parallelize(copy_of(whole), mesh_of(group, cp, tp), **keywords)
    check(whole, parallel)
    if cp == 1:
        tokens = make_tokens(2, 9)
        mask = torch.ones_like(tokens)
        mask[1, :3] = 0
        with torch.no_grad():
            padded = [model(tokens, attention_mask=mask).logits * mask[..., None] for model in (parallel, whole)]
        assert_near(*padded, "logits of padded rows")
    if "experts" in name:  # routers read other tokens in a pass with a cache
        return
    texts = [model.eval().generate(make_tokens(2, 9), max_new_tokens=4, do_sample=False) for model in (whole, parallel)]
    assert torch.equal(*texts)


@on_ranks(2)
def test_gpt2_alone(group: dist.ProcessGroup) -> None:
    """The base model returns hidden states, which its last norm gathers."""
    whole = made("gpt2").transformer
    parallel = parallelize(copy_of(whole), mesh_of(group, 1, 2), sequence_parallel=True)
    tokens = make_tokens(2, 9)
    hidden = [model(tokens).last_hidden_state for model in (whole, parallel)]
    assert_near(hidden[1], hidden[0], "hidden states")
    for one in hidden:
        one.square().sum().backward()
    assert_same_gradients(parallel, whole)


@pytest.mark.full
@on_ranks(3)
def test_three_ranks(group: dist.ProcessGroup) -> None:
    sizes = {"hidden_size": 48, "num_attention_heads": 6}
    bloom = {**sizes, "n_head": 6}
    for name, own, keywords in (
        ("gpt2", sizes, {}),
        ("gpt2", sizes, {"sequence_parallel": True}),
        ("gpt_bigcode", sizes, {"sequence_parallel": True}),
        ("bloom", bloom, {}),
        ("falcon", sizes, {}),
    ):
        whole = made(name, **own)
        parallel = parallelize(copy_of(whole), mesh_of(group, 1, 3), **keywords)
        for length in (1, 2, 7):
            compare_weighted(whole, parallel, make_tokens(2, length))


@on_ranks(3)
def test_losses_of_passes_that_are_not_cut(group: dist.ProcessGroup) -> None:
    """The pass is not sharded: the model's own code cannot make a view of a rank without tokens."""
    whole = made("gptj", hidden_size=48, num_attention_heads=6, n_embd=48, n_head=6)
    keywords = {"sequence_parallel": True, "loss_parallel": True}
    parallel = parallelize(copy_of(whole), mesh_of(group, 1, 3), **keywords)
    for length in (2, 3, 4, 5):
        tokens = make_tokens(2, length)
        assert_same_calls(parallel, whole, tokens, tokens)
        whole.zero_grad()
        parallel.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize(
    "name", quick(["gpt2", "codegen", "gptj", "gpt_neo", "xglm", "opt", "falcon, eager"], "gpt2", "opt")
)
def test_documents_in_parts_of_the_sequence(group: dist.ProcessGroup, name: str) -> None:
    whole = made(name)
    parallel = parallelize(copy_of(whole), mesh_of(group, 1, 2), sequence_parallel=True)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    assert_same_calls(parallel, whole, make_tokens(2, 9), make_tokens(2, 9), position_ids=positions, use_cache=False)


class Gated(nn.Module):
    """A plain model with gate and up in one layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.gate_up, self.down = nn.Linear(8, 24), nn.Linear(12, 8)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.head(x + self.down(gate.sigmoid() * up))


@on_ranks(2)
def test_a_plain_model(group: dist.ProcessGroup) -> None:
    plan = {"gate_up": "packed_colwise", "down": "rowwise", "head": "colwise_gather_output"}
    whole = Gated()
    for keywords in ({}, {"sequence_parallel": True}):
        parallel = parallelize(copy_of(whole), mesh_of(group, 1, 2), plan=plan, **keywords)
        for length in (1, 5):
            tokens = torch.arange(length)[None]
            whole.zero_grad()
            parallel.zero_grad()
            assert_trains_alike(parallel, whole, lambda model, tokens=tokens: model(tokens).square().mean())


@on_ranks(2)
@pytest.mark.parametrize("name", ["gpt2", "gpt_bigcode"])
def test_main_grad(group: dist.ProcessGroup, name: str) -> None:
    whole, tokens = made(name), make_tokens(2, 9)
    parallel = parallelize(copy_of(whole), mesh_of(group, 1, 2))
    for parameter in parallel.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    for model in (whole, parallel):
        model(input_ids=tokens, labels=tokens).loss.backward()
    for parameter in parallel.parameters():
        if parameter.grad is None:
            parameter.grad = parameter.main_grad
    assert_same_gradients(parallel, whole)


@on_ranks(2)
def test_checkpointed(group: dist.ProcessGroup) -> None:
    whole = made("gpt2")
    parallel = parallelize(copy_of(whole), mesh_of(group, 1, 2), sequence_parallel=True)
    assert_trains_checkpointed(parallel, whole)


@on_ranks(2)
@pytest.mark.parametrize("name", quick(MODELS, "gpt2", "doge, experts"))
def test_states(group: dist.ProcessGroup, name: str, tmp_path: Path) -> None:
    assert_states_travel(group, made(name), tmp_path)


@pytest.mark.full
@on_ranks(4)
@pytest.mark.parametrize("along_width", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "gpt_bigcode", "mpt", "phi3"])
def test_fsdp(group: dist.ProcessGroup, name: str, along_width: bool) -> None:
    def width(parameter: nn.Parameter) -> Shard | None:
        return Shard(2) if along_width and parameter.ndim == 3 else None  # [parts, out, in]; else along the parts

    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
    whole, batches = made(name), [make_tokens(2, 9), make_tokens(2, 9).flip(1)]
    parallel = parallelize(copy_of(whole), mesh, sequence_parallel=True)
    for layers in [module for module in parallel.modules() if isinstance(module, nn.ModuleList)]:
        for layer in layers:
            fully_shard(layer, mesh=mesh["dp"], shard_placement_fn=width)
    fully_shard(parallel, mesh=mesh["dp"], shard_placement_fn=width)
    assert_steps_alike(parallel, whole, mesh, batches)


@on_ranks(2)
def test_what_is_not_served(group: dist.ProcessGroup) -> None:
    mesh = mesh_of(group, 1, 2)

    def refused(says: str, name: str, keywords: dict[str, Any] | None = None, **changes: Any) -> None:
        refuses(ValueError, says, parallelize, made(name, **changes), mesh, **(keywords or {}))

    refused("num_attention_heads=1", "gpt2", hidden_size=16, num_attention_heads=1)
    refused(r"cannot share evenly, .* Use one of these TP sizes: 1\.", "codegen", num_attention_heads=4, n_head=4)
    refused("reads 'dense.weight' directly", "bloom", pretraining_tp=2, slow_but_exact=True)
    refused("or load it with attn_implementation='eager'", "falcon", {"sequence_parallel": True})
    refuses(ValueError, "has 3 blocks", ColumnParallelLinear.from_linear, nn.Linear(8, 9), mesh=mesh, parts=3)
    odd = {"transformer.h.*.mlp.c_fc": "packed_colwise_3", "transformer.h.*.mlp.c_proj": "rowwise"}
    refused(r"dim 1 of .*c_fc.weight \(64, 128\) has 3 blocks", "gpt2", {"plan": odd})
    head = {**made("phi3").tp_plan, "lm_head": "packed_colwise"}
    for asked in ("sequence_parallel", "loss_parallel"):
        refused("needs the output layer .* sharded by columns", "phi3", {"plan": head, asked: True})
    attention = "transformer.h.*.attn"
    no_queries = {f"{attention}.c_attn": "colwise", f"{attention}.c_proj": "multi_query_colwise"}
    refused("'multi_query_colwise' needs", "gpt_bigcode", {"plan": no_queries})


@on_ranks(2)
def test_models_that_share_a_module(group: dist.ProcessGroup) -> None:
    """All OpenAI GPT models share one activation module; parallelizing one does not affect another."""
    for _ in range(2):
        parallelize(make_model("openai-gpt"), mesh_of(group, 1, 2))
