"""More tensor parallel ranks than heads of keys and values: neighboring ranks compute the same head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fused_tp.nn import gather_state_dict
from fused_tp.nn.linear import RepeatedColumnLinear
from fused_tp.parallelizing.parallelize import parallelize
from fused_tp.parallelizing.state_dict import load_full_state_dict
from fused_tp.planning import find_shape
from fused_tp.planning.config import ParallelConfig
from tests.integrations.models import (
    assert_equal_states,
    assert_near,
    assert_same_calls,
    assert_trains_alike,
    copy_of,
    make,
    make_tokens,
    mesh_of,
)
from tests.reference import refuses
from tests.workers import fresh_ranks, on_ranks

pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")

KEYWORDS: dict[str, dict[str, Any]] = {
    "tp4": {},
    "tp4_sp_lossparallel": {"sequence_parallel": True, "loss_parallel": True},
}


def generated(model: Any, **keywords: Any) -> torch.Tensor:
    with torch.no_grad():
        ids: torch.Tensor = model.eval().generate(make_tokens(2, 6), max_new_tokens=6, do_sample=False, **keywords)
    model.train()
    return ids


@pytest.mark.parametrize("layout", KEYWORDS)
@pytest.mark.parametrize(
    "family",
    ["llama", "qwen2", "qwen3", "gpt_oss", *(pytest.param(f, marks=pytest.mark.full) for f in ("gemma2", "qwen3_moe"))],
)
@on_ranks(4)
def test_training_and_generation(group: dist.ProcessGroup, layout: str, family: str) -> None:
    whole = make(family, num_attention_heads=8)
    parallel = parallelize(copy_of(whole), mesh_of(group, 1, 4), **KEYWORDS[layout])
    attention = parallel.model.layers[0].self_attn
    assert type(attention.k_proj) is type(attention.v_proj) is RepeatedColumnLinear
    assert attention.num_key_value_groups == 2 and whole.model.layers[0].self_attn.num_key_value_groups == 4
    tokens = make_tokens(2, 9)
    assert_same_calls(parallel, whole, tokens, tokens)
    assert torch.equal(generated(parallel), generated(whole))
    assert torch.equal(generated(parallel, cache_implementation="static"), generated(whole))


@on_ranks(4)
def test_one_head_and_context_parallel_ranks(group: dist.ProcessGroup) -> None:
    whole = make("llama", num_key_value_heads=1, attention_bias=True)
    tokens = make_tokens(2, 13)
    layouts: list[tuple[int, int, dict[str, Any]]] = [(2, 2, {"sequence_parallel": True}), (1, 4, {})]
    for cp, tp, keywords in layouts:
        parallel = parallelize(copy_of(whole), mesh_of(group, cp, tp), **keywords)
        assert_trains_alike(parallel, copy_of(whole), lambda model: model(tokens, labels=tokens).loss)


@on_ranks(4)
def test_states_travel_to_other_sizes(group: dist.ProcessGroup, tmp_path: Path) -> None:
    import transformers

    whole = make("qwen3")  # 2 heads of keys for 4 of queries
    state = whole.state_dict()
    on_four, on_two = (parallelize(copy_of(whole), mesh_of(group, cp, tp)) for cp, tp in ((1, 4), (2, 2)))
    for model in (on_four, on_two):
        assert_equal_states(gather_state_dict(model), state)
    changed = {name: t + 1 for name, t in gather_state_dict(on_two).items()}
    load_full_state_dict(on_four, changed)
    assert_equal_states(gather_state_dict(on_four), changed)
    load_full_state_dict(on_four, state)
    folder = tmp_path / "saved"
    on_four.save_pretrained(folder)
    dist.barrier(group)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens = make_tokens(1, 5)
    with torch.no_grad():
        assert_near(on_four(tokens).logits, loaded(tokens).logits, "logits")


@on_ranks(2)
def test_sizes_that_are_refused(group: dist.ProcessGroup) -> None:
    one = {"hidden_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
    refuses(ValueError, "these TP sizes: 1", parallelize, make("llama", **one), mesh_of(group, 1, 2))
    shape = find_shape.find_shape(make("llama", num_attention_heads=8).config)
    ParallelConfig(tp=8).check(shape)
    refuses(ValueError, "tp=9 is more than the 8 attention heads", ParallelConfig(tp=9).check, shape)


@pytest.mark.full
def test_eight_ranks_and_four_heads() -> None:
    for outcome in fresh_ranks(8, compare_on_eight_ranks):
        outcome.unwrap()


def compare_on_eight_ranks(group: dist.ProcessGroup) -> None:
    whole = make("qwen3_moe", hidden_size=64, num_attention_heads=16, num_key_value_heads=4, moe_intermediate_size=32)
    tokens = make_tokens(2, 9)
    parallel = parallelize(copy_of(whole), mesh_of(group, 1, 8), sequence_parallel=True)
    assert_same_calls(parallel, whole, tokens, tokens)
    assert torch.equal(generated(parallel), generated(whole))
