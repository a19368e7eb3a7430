"""Types of transformers models that once were wrong, crashed, or were refused too late; and all types."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")

from docs import tables
from tests.integrations.live import inert
from tests.integrations.sweep import MODES, all_kinds, sweep
from tests.tiers import quick

# One type per mechanism; test_every_type_is_right_or_refused covers the others.
RIGHT = [
    ("aria_text", "tp"),  # experts [in, out], called with the number of tokens of each
    ("apertus", "tp"),  # a parameter of the activation, between two sharded layers
    ("bamba", "tp"),  # reads the weight of a convolution inside
    ("beam", "advised"),  # a separate bias that is sharded
    ("biogpt", "tp+sp"),  # makes a mask of its embeddings' length
    ("biogpt", "cp"),  # looks its attention up, without a mark by transformers
    ("codegen", "cp"),  # attention code of its own, with queries and keys in fp32
    ("doge", "tp+sp"),  # a wrong plan in transformers
    ("deepseek_v2", "advised"),  # keys shared by all heads; a plan with names that it does not have
    ("falcon_h1", "cp"),  # a state space beside attention
    ("ernie4_5_moe", "tp+sp"),  # passes a shared expert the tokens of all rows in one dim
    ("bitnet", "tp+sp"),  # norms of all features between sharded layers
    ("cpmant", "tp"),  # a bias of attention that has parameters
    ("ctrl", "tp+sp"),  # adds positions to its embeddings itself; attention receives its input three times
    ("fuyu", "tp"),  # a text model of another type inside
    ("gemma3n_text", "tp"),  # layers called through methods; a function of all features of a gate
    ("gemma4", "tp"),  # reads its embedding itself
    ("gemma4_text", "tp+sp"),  # embeds for each layer
    ("glm_moe_dsa", "tp+sp"),  # passes indices from layer to layer
    ("gpt_neox", "tp+sp"),  # q, k and v of one layer
    ("gpt_neox_japanese", "tp+sp"),  # a bias that is added outside
    ("hy_v4", "tp+sp"),  # several streams of hidden states
    ("inkling_text", "tp"),  # experts for all tokens
    ("inkling2_text", "tp+sp"),  # a wrong plan of its own; a norm in its embedding; attention with three inputs
    ("laguna", "tp+sp"),  # a gate in attention
    ("lfm2", "tp"),  # a sharded output layer, tied to an embedding that the plan lacks
    ("llama4_text", "cp"),  # another base model; queries scaled by position
    ("llama4_text", "tp+sp"),  # returns tokens of all rows, one after the other
    ("longcat_flash", "tp"),  # experts that return their input
    ("mamba", "tp+sp"),  # no attention at all
    ("mamba2", "cp"),
    ("minicpm3", "tp"),
    ("modernbert-decoder", "tp+sp"),  # a layer between the base model and the output layer
    ("moshi", "tp+sp"),  # projections in modules of their own; returns hidden states next to logits
    ("nemotron", "cp"),  # passes no keywords to attention
    ("nemotron_h", "tp+sp"),  # an output layer that transformers' plan lacks
    ("qwen2_moe", "cp"),  # a window of 0
    ("qwen3_next", "tp+sp"),  # linear attention
    ("openai-gpt", "cp"),  # attention code of its own, without a cache
    ("olmo2", "tp+sp"),  # norms of all heads, so gathered projections
    ("opt", "tp+sp"),  # tokens of all rows in one dim
    ("phi4_multimodal", "tp+sp"),  # puts images among its embeddings
    ("stablelm", "tp"),  # a plan of our own
    ("recurrent_gemma", "tp+sp"),  # blocks of two kinds under one name
    ("roberta", "cp"),  # counts positions from after its padding
    ("rwkv", "tp+sp"),  # a state that is no cache
    ("xlstm", "tp"),
    ("zamba2", "cp"),  # one attention block used in several layers
    ("zaya", "tp+sp"),  # parameters of the base model itself; a router that receives the state of the previous one
]
IN_TEST = [
    *(("beam", "advised"), ("biogpt", "cp"), ("doge", "tp+sp"), ("falcon_h1", "cp"), ("gemma3n_text", "tp")),
    *(("gpt_neox", "tp+sp"), ("llama4_text", "cp"), ("longcat_flash", "tp"), ("modernbert-decoder", "tp+sp")),
    *(("olmo2", "tp+sp"), ("zaya", "tp+sp")),
]
NGRAMS = {"ple_layer_ids": [1], "ple_embed_dim": 64, "ngram_vocab_size_base": 50, "heads_per_ngram": 2}
NGRAMS |= {"make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 2}
VARIANTS: list[Any] = [
    pytest.param("doge", "tp+sp", {"is_moe": True, "num_experts": 16}, marks=pytest.mark.full),
    pytest.param("qwen4_exp_text", "advised", NGRAMS, marks=pytest.mark.full),
    ("falcon", "tp+sp", {"attn_implementation": "eager"}),  # as its refusal advises
    ("gemma4_text", "tp+sp", {"enable_moe_block": True, "top_k_experts": 2, "hidden_size_per_layer_input": 0}),
    ("recurrent_gemma", "tp+sp", {"num_key_value_heads": 1}),
    pytest.param(
        "zamba2",
        "tp+sp",
        {
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid"],
            "num_hidden_layers": 5,
            "num_mem_blocks": 2,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "use_shared_attention_adapter": True,
            "adapter_rank": 8,
        },
        marks=pytest.mark.full,
    ),
]
REFUSED = [
    ("bart", "cp", "'model.decoder.layers.0.self_attn' (BartAttention) is not known to use"),
    ("doge", "cp", "uses a custom attention mask"),
    ("minimax", "cp", "by other means than attention"),
    ("minimax_m3_vl_text", "cp", "mix tokens by other means than attention (minimax_m3_sparse)"),
    ("falcon", "tp+sp", "load it with attn_implementation='eager'"),
    ("gemma4", "tp+sp", "neither a causal language model nor a base model"),
    ("jetmoe", "tp", "in modules like 'model.layers.0.mlp.input_linear' (JetMoeParallelExperts)"),
]


Outcomes = dict[str, tuple[str, str]]  # by mode


@pytest.fixture(scope="module")
def outcomes_of(request: pytest.FixtureRequest) -> Callable[[str, str], Outcomes]:
    """Function that sweeps a type in that mode; in all modes, and once, if the test of all types runs later."""
    all_of = cache(sweep)
    if any(item.name == test_every_type_is_right_or_refused.__name__ for item in request.session.items):
        return lambda kind, mode: all_of(kind)
    return lambda kind, mode: sweep(kind, modes=[mode])


@pytest.mark.parametrize(("kind", "mode"), quick(RIGHT, *IN_TEST, others=pytest.mark.long))
def test_is_right(outcomes_of: Callable[[str, str], Outcomes], kind: str, mode: str) -> None:
    outcome, said = outcomes_of(kind, mode)[mode]
    assert outcome == "right", said


@pytest.mark.parametrize(("kind", "mode", "changes"), VARIANTS)
def test_of_another_config_is_right(kind: str, mode: str, changes: dict[str, Any]) -> None:
    outcome, said = sweep(kind, modes=[mode], **changes)[mode]
    assert outcome == "right", said


@pytest.mark.parametrize(("kind", "mode", "says"), REFUSED)
def test_is_refused_before_anything_is_changed(
    outcomes_of: Callable[[str, str], Outcomes], kind: str, mode: str, says: str
) -> None:
    outcome, said = outcomes_of(kind, mode)[mode]
    assert outcome == "refused" and says in said, said


SELECTS = ["index_topk", "n_group", "topk_group", "num_experts_per_tok"]
LOOKS = ["attn_logit_softcapping", "final_logit_softcapping", "layer_types", "sliding_window"]
LIVE = ["deepseek_v4", "dots3_note_text", "falcon_h1", "gemma4_text", "llama4_text", "minimax_m3_vl_text", "qwen3_next"]


@pytest.mark.parametrize(("kind", "names"), [("deepseek_v32", SELECTS), ("gemma2", LOOKS)])
def test_what_makes_a_type_special_does_something(kind: str, names: list[str]) -> None:
    assert inert(kind, names) == {"fields": [], "parameters": []}


def test_what_does_nothing_is_found() -> None:
    longer = inert("llama4_text", ["attention_chunk_size", "attn_scale"], attention_chunk_size=64)
    assert longer == {"fields": ["attention_chunk_size"], "parameters": []}


@pytest.mark.full
@pytest.mark.parametrize("kind", LIVE)
def test_every_field_does_something(kind: str) -> None:
    assert inert(kind) == {"fields": [], "parameters": []}


@pytest.mark.long
def test_every_field_of_every_type_does_something() -> None:
    documented = json.loads((Path(tables.__file__).parent / "model_types.json").read_text())["types"]
    served = [kind for kind, (*outcomes,) in documented.items() if "yes" in outcomes]
    found = {kind: inert(kind) for kind in served}
    assert not {kind: one for kind, one in found.items() if any(one.values())}


@pytest.mark.long
def test_every_type_is_right_or_refused(outcomes_of: Callable[[str, str], Outcomes]) -> None:
    outcomes = {kind: outcomes_of(kind, "tp") for kind in all_kinds()}
    found = [(kind, mode, *outcomes[kind][mode]) for kind in outcomes for mode in MODES]
    bad = [one for one in found if one[2] in ("late", "wrong", "crashed")]
    assert not bad, bad
    documented = json.loads((Path(tables.__file__).parent / "model_types.json").read_text())["types"]
    now = tables.model_types_of(outcomes)
    assert now == documented, (
        "docs/model_types.json says otherwise; python -m tests.integrations.sweep --out DIR, and then python -m "
        "docs.tables DIR/outcomes.json > docs/model_types.json"
    )
    counts = Counter(one[1] for one in found if one[2] == "right")
    assert counts["tp"] >= 145 and counts["tp+sp"] >= 134 and counts["cp"] >= 133, counts


@pytest.mark.long
def test_rounding_is_no_reason_to_refuse() -> None:
    found = [(kind, mode, *one) for kind in all_kinds() for mode, one in sweep(kind, dtype=torch.bfloat16).items()]
    bad = [one for one in found if one[2] in ("late", "wrong", "crashed")]
    assert not bad, bad
    counts = Counter(one[1] for one in found if one[2] == "right")
    assert counts["tp"] >= 143 and counts["tp+sp"] >= 132 and counts["cp"] >= 133, counts  # two types fail unsharded
