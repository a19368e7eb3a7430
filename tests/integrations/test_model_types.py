"""Types of transformers models that once were wrong, crashed, or were refused too late; and all of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")

from docs import tables
from tests.integrations.sweep import MODES, all_kinds, sweep

RIGHT = [
    ("aria_text", "tp"),  # experts [in, out], called with how many tokens each has
    ("apertus", "tp"),  # a parameter of the activation, between two cut layers
    ("bailing_hybrid", "cp"),  # linear attention with a decay for each channel
    ("bamba", "cp"),  # a state space of groups of heads
    ("bamba", "tp"),  # reads the weight of a convolution inside
    ("beam", "advised"),  # a bias that is cut by itself
    *((kind, "tp+sp") for kind in ("bloom", "mpt")),  # biases for all heads
    ("falcon", "tp"),  # one head of keys and values
    ("biogpt", "tp+sp"),  # makes a mask of its embeddings' length
    ("codegen", "tp+sp"),  # four blocks of q, v and k
    ("doge", "tp+sp"),  # a plan of transformers' that is wrong
    ("deepseek_v2", "advised"),  # keys that all heads share; a plan for more than its layers
    ("falcon_h1", "cp"),  # a state space beside attention
    ("falcon_h1", "tp+sp"),
    ("glm_moe_dsa", "tp+sp"),  # hands indices on from layer to layer
    ("granitemoehybrid", "cp"),
    ("gpt2", "tp+sp"),  # weights [in, out]; a view of hidden states as of all tokens
    ("gpt_bigcode", "tp+sp"),
    ("gpt_neox_japanese", "tp+sp"),  # a bias that is added outside
    ("openai-gpt", "tp+sp"),
    ("gpt_neox", "tp+sp"),  # q, k and v of one layer
    ("gpt_oss", "tp"),  # sinks; a plan of our own
    ("hunyuan_v1_dense", "tp+sp"),
    ("inkling2_text", "tp"),  # a wrong plan of its own
    ("kimi_linear", "cp"),
    ("laguna", "tp+sp"),  # a gate in attention
    *((kind, "cp") for kind in ("lfm2", "lfm2_moe", "lfm3")),  # short convolutions
    ("lfm2", "tp"),  # an output layer that is cut, tied to an embedding that the plan forgets
    ("llama4_text", "tp"),  # experts [in, out], called without routing weights
    ("llama4_text", "cp"),  # another base model; queries scaled by place
    ("llama4_text", "tp+sp"),  # returns tokens of all rows, one after the other
    ("longcat_flash", "tp"),  # experts that return what they are given
    ("mamba2", "cp"),  # no attention at all
    ("minicpm3", "tp"),
    ("nemotron", "cp"),  # hands no keywords down to attention
    ("nemotron_h", "cp"),  # one kind of block to a layer
    ("qwen2_moe", "cp"),  # a window of 0
    ("olmo2", "tp+sp"),  # norms of all heads, so gathered projections
    ("olmo_hybrid", "cp"),
    *((kind, "cp") for kind in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")),  # linear attention
    ("qwen3_moe", "tp"),
    ("qwen3_next", "tp+sp"),  # linear attention
    *((kind, "tp+sp") for kind in ("gpt_neo", "gptj", "opt", "xglm")),  # plans and attention of their own
    *((kind, "tp") for kind in ("persimmon", "stablelm")),
    ("nemotron_h", "tp+sp"),  # an output layer that transformers' plan forgets
    ("phi3", "tp+sp"),  # gate and up of one layer
    ("roberta", "cp"),  # counts positions from behind its padding
    ("zamba2", "cp"),  # one attention block at several places
]
REFUSED = [
    ("doge", "cp", "adds a mask of its own"),
    ("falcon_mamba", "cp", "by other means than attention"),
    ("falcon", "tp+sp", "load it with attn_implementation='eager'"),
    ("gemma4", "tp", "reads 'language_model.embed_tokens.weight'"),
]


@pytest.mark.parametrize(("kind", "mode"), RIGHT)
def test_is_right(kind: str, mode: str) -> None:
    outcome, said = sweep(kind, modes=[mode])[mode]
    assert outcome == "right", said


@pytest.mark.parametrize(("kind", "mode", "says"), REFUSED)
def test_is_refused_before_anything_is_changed(kind: str, mode: str, says: str) -> None:
    outcome, said = sweep(kind, modes=[mode])[mode]
    assert outcome == "refused" and says in said, said


@pytest.mark.full
def test_every_type_is_right_or_refused() -> None:
    outcomes = {kind: sweep(kind) for kind in all_kinds()}
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
    assert counts["tp"] >= 120 and counts["tp+sp"] >= 112 and counts["cp"] >= 120, counts
