"""Hybrid models over context parallel ranks: convolutions, linear attention and state spaces receive their state from
the ranks that hold the preceding tokens."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from fused_tp.parallelizing.hf import state_layers
from fused_tp.parallelizing.hf.state_layers import (
    CONVOLUTION,
    STATE_LAYERS,
    find_called_functions,
    find_runs,
    find_state_layers,
)
from fused_tp.parallelizing.parallelize import parallelize
from tests.integrations.models import (
    LAYOUTS,
    assert_near,
    assert_same_calls,
    assert_same_gradients,
    assert_trains_alike,
    copy_of,
    make,
    make_tokens,
    mesh_of,
    on_layouts,
)
from tests.integrations.sweep import make_model
from tests.reference import refuses
from tests.workers import on_ranks

pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")

FULL = pytest.mark.full
FAMILIES = ["qwen3_next", "granitemoehybrid", "bamba", "lfm2"]
# No routers: rounding would select other experts, and reentrant checkpoints do not work with experts.
DENSE = {"qwen3_next": {"mlp_only_layers": [0, 1]}}


def make_hybrid(family: str, **changes: Any) -> Any:
    """A model with slowly decaying states: with the usual decays they vanish within a few tokens."""
    model = make(family, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.sub_(4.0)
    return model


def pair(group: dist.ProcessGroup, layout: str, family: str, **changes: Any) -> tuple[Any, Any]:
    cp, tp, keywords = LAYOUTS[layout]
    whole = make_hybrid(family, **changes)
    return whole, parallelize(copy_of(whole), mesh_of(group, cp, tp), **keywords)


def assert_same(parallel: Any, whole: Any, *lengths: int) -> None:
    """Compare logits, and gradients of a function of all logits. A loss of two tokens has one target, which sees only
    itself, so that the gradients of keys would be only rounding."""
    for length in lengths:
        tokens, weights = make_tokens(2, length), torch.randn(2, length, 1, generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            assert_near(parallel(tokens).logits, whole(tokens).logits, f"logits of {length} tokens")
        for model in (whole, parallel):
            model.zero_grad()
        assert_trains_alike(parallel, whole, lambda model, x=tokens, w=weights: (model(x).logits.square() * w).mean())


@on_layouts("cp2", full=["ring2_ulysses2", "cp2_tp2", "cp2_tp2_sp", "cp2_tp2_sp_lossparallel"])
@pytest.mark.parametrize("family", [*FAMILIES, pytest.param("kimi_linear", marks=FULL)])
def test_hybrids(group: dist.ProcessGroup, layout: str, family: str) -> None:
    whole, parallel = pair(group, layout, family)
    assert len(find_state_layers(whole)) == 1
    tokens = make_tokens(2, 13)
    assert_same_calls(parallel, whole, tokens, tokens)
    padded = torch.where(torch.arange(13) < torch.tensor([[13], [8]]), tokens, -100)
    mask = (padded != -100).long()
    for model in (whole, parallel):
        model.zero_grad()
    assert_trains_alike(parallel, whole, lambda model: model(tokens, attention_mask=mask, labels=padded).loss)
    # With 6 tokens a halo holds the ends of two runs; with 3 or 2 there are fewer runs than usual.
    assert_same(parallel, whole, 6, 3, 2, 1)


@on_ranks(2)
def test_state_spaces_alone(group: dist.ProcessGroup) -> None:
    whole, parallel = pair(group, "cp2", "mamba2", tied=True)
    assert_same(parallel, whole, 13, 3, 1)


@on_ranks(2, 3)
@pytest.mark.parametrize("kind", ["jamba", pytest.param("mamba", marks=FULL), pytest.param("falcon_mamba", marks=FULL)])
def test_mamba_1(group: dist.ProcessGroup, kind: str) -> None:
    """Compare state spaces with a decay for each channel and state, in blocks shorter than a run."""
    whole = make_model(kind)
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            if name.endswith("A_log"):
                parameter.sub_(4.0)
    parallel = parallelize(copy_of(whole), mesh_of(group, group.size(), 1))
    block, state_layers._STATE_BLOCK = state_layers._STATE_BLOCK, 4
    try:
        assert_same(parallel, whole, 20, 7, group.size(), 2)
    finally:
        state_layers._STATE_BLOCK = block


@on_ranks(3, 4)
@pytest.mark.parametrize("family", ["qwen3_next", pytest.param("bamba", marks=FULL), pytest.param("lfm2", marks=FULL)])
def test_more_ranks(group: dist.ProcessGroup, family: str) -> None:
    whole = make_hybrid(family)
    parallel = parallelize(copy_of(whole), mesh_of(group, group.size(), 1))
    assert_same(parallel, whole, 20, 7, group.size(), 2)


@on_layouts("cp2", full=["cp2_tp2_sp"])
@pytest.mark.parametrize("family", ["bamba", pytest.param("qwen3_next", marks=FULL)])
@pytest.mark.parametrize("use_reentrant", [False, pytest.param(True, marks=FULL)])
def test_checkpointed(group: dist.ProcessGroup, layout: str, family: str, use_reentrant: bool) -> None:
    """Backward recomputes layers after forward passes of other lengths."""
    whole, parallel = pair(group, layout, family, **DENSE.get(family, {}))
    for model in (whole, parallel):
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        losses = [model(tokens, labels=tokens).loss for tokens in (make_tokens(2, n) for n in (9, 13, 1, 3))]
        sum(losses[:2] + losses[3:]).backward()
    assert_same_gradients(parallel, whole)


@on_ranks(2)
@pytest.mark.parametrize("family", FAMILIES[:2])
def test_a_base_model_and_inputs_embeds(group: dist.ProcessGroup, family: str) -> None:
    whole = make_hybrid(family).model
    parallel = parallelize(copy_of(whole), mesh_of(group, 2, 1))
    made = [torch.randn(2, 11, 32, generator=torch.Generator().manual_seed(2)).requires_grad_() for _ in range(2)]
    outputs = [model(inputs_embeds=x).last_hidden_state for model, x in zip((whole, parallel), made, strict=True)]
    assert_near(outputs[1], outputs[0], "hidden states")
    for output in outputs:
        output[:, -1].square().mean().backward()
    assert_near(made[1].grad, made[0].grad, "gradient of what the last token knows of all others")


@on_layouts("cp2", full=["cp2_tp2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generate(group: dist.ProcessGroup, layout: str, family: str) -> None:
    """Generate with a cache: every rank computes everything."""
    whole, parallel = pair(group, layout, family)
    tokens, mask = make_tokens(3, 7), torch.ones(3, 7, dtype=torch.long)
    mask[1, :3] = 0
    for keywords in ({}, {"attention_mask": mask}):
        made = [
            model.eval().generate(tokens, max_new_tokens=5, do_sample=False, disable_compile=True, **keywords)
            for model in (whole, parallel)
        ]
        assert torch.equal(*made)
    with torch.no_grad():
        told = [model(tokens, use_cache=True) for model in (whole, parallel)]
        said = [
            model(tokens[:, :1], past_key_values=one.past_key_values, use_cache=True)
            for model, one in zip((whole, parallel), told, strict=True)
        ]
    assert_near(said[1].logits, said[0].logits, "logits of one more token")
    for model in (whole, parallel):  # a pass without a cache is sharded again
        model.train()
    assert_same(parallel, whole, 5)


@pytest.mark.full
@on_ranks(2)
@pytest.mark.parametrize("family", ["qwen3_next", "bamba"])
def test_compiled_and_over_fsdp2(group: dist.ProcessGroup, family: str) -> None:
    whole, tokens = make_hybrid(family), make_tokens(2, 9)
    loss = whole(tokens, labels=tokens).loss
    loss.backward()
    mesh = mesh_of(group, 2, 1)
    compiled = parallelize(copy_of(whole), mesh)
    sharded = parallelize(copy_of(whole), mesh, grad_sync=False)
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    for model, call in ((compiled, torch.compile(compiled, backend="eager")), (sharded, sharded)):
        found = call(tokens, labels=tokens).loss
        found.backward()
        assert_near(found, loss, "loss")
        assert_same_gradients(model, whole)


@on_ranks(2)
@pytest.mark.parametrize("family", ["qwen3_next", "bamba"])
def test_half_precision(group: dist.ProcessGroup, family: str) -> None:
    """Logits in bf16 are as near to fp32 as those of the whole model in bf16."""
    whole = make_hybrid(family, **DENSE.get(family, {}))
    half = copy_of(whole).bfloat16()
    parallel = parallelize(copy_of(half), mesh_of(group, 2, 1))
    with torch.no_grad():
        exact, own, ours = (model(make_tokens(2, 64)).logits.float() for model in (whole, half, parallel))
    assert (ours - exact).abs().mean() < 1.1 * (own - exact).abs().mean()


@on_ranks(2)
def test_refusals(group: dist.ProcessGroup) -> None:
    mesh = mesh_of(group, 2, 1)
    for family in ("qwen3_next", "bamba", "lfm2"):
        model = parallelize(make(family), mesh)
        tokens = make_tokens(1, 8)
        documents = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
        refuses(ValueError, "their state would leak", model, tokens, position_ids=documents, use_cache=False)
        refuses(ValueError, "their state would leak", model, tokens, cu_seq_lens_q=torch.tensor([0, 5, 8]))
        one = model(tokens, cu_seq_lens_q=torch.tensor([0, 8])).logits
        assert_near(one, make(family)(tokens).logits, "logits of one document")
        mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
        refuses(ValueError, "padding on the left", model, tokens, attention_mask=mask)


@on_ranks(2)
@pytest.mark.parametrize("family", ["lfm2", "bamba"])
def test_padding_that_sequence_parallel_ranks_would_be_given_a_part_of(group: dist.ProcessGroup, family: str) -> None:
    model = parallelize(make(family), mesh_of(group, 1, 2), sequence_parallel=True)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    refuses(ValueError, "attention_mask has padding", model, make_tokens(1, 8), attention_mask=mask)


@on_ranks(2)
def test_layers_that_are_not_known(group: dist.ProcessGroup) -> None:
    mesh = mesh_of(group, 2, 1)
    refuses(ValueError, r"MiniMax.* by other means .*bamba, .*zamba2", parallelize, make_model("minimax"), mesh)
    replaced = make("bamba")
    replaced.model.layers[0].mamba.forward = replaced.model.layers[0].mamba.forward  # set as a kernel would be
    refuses(ValueError, "no kernel from the hub", parallelize, replaced, mesh)
    assert type(replaced.model.layers[0].mamba).forward.__module__.startswith("transformers.")
    summed = make("bamba", z_loss_coefficient=0.1)
    tokens = make_tokens(1, 8)
    refuses(ValueError, "loss", parallelize(summed, mesh), tokens, labels=tokens)


def test_the_table_is_that_of_this_version_of_transformers() -> None:
    """Each entry must exist in transformers; layers of a stale entry would be refused unnoticed."""
    for kind, (name, calls) in STATE_LAYERS.items():
        family = kind.removesuffix("_text")
        layer = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)
        assert find_called_functions(inspect.unwrap(layer.forward)).keys() == {CONVOLUTION, *calls}, kind


def test_runs_cover_the_sequence() -> None:
    for ranks in (1, 2, 3, 5):
        for length in range(ranks, 4 * ranks + 2):
            all_runs = [find_runs(length, ranks, rank, "zigzag") for rank in range(ranks)]
            assert sum(sum(runs.local_lengths) for runs in all_runs) == sum(all_runs[0].lengths) == length
            assert sorted(n for runs in all_runs for n in runs.preceding_counts) == list(
                range(len(all_runs[0].lengths))
            )
            for rank, runs in enumerate(all_runs):
                assert [runs.lengths[n] for n in runs.preceding_counts] == list(runs.local_lengths)
                assert [runs.slots[n] // runs.max_runs for n in runs.preceding_counts] == [rank] * len(
                    runs.local_lengths
                )
