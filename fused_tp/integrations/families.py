"""What is known of families of transformers models: plans where transformers has none, or a wrong one.

A family needs an entry here only where its configuration class has no `base_model_tp_plan` that is right. To add one:

1. `plan`: names in the base model, `*` for one part, to styles (see `fused_tp.integrations.plan.STYLES`).
2. `counts`: attributes of attention modules by which their forward shapes what the projections return, such as
   `view(batch, seq, self.num_heads, self.head_dim)`. On a rank they count its own heads.
3. Its model type in RIGHT of tests/integrations/test_model_types.py, which compares every gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Family:
    """Of one model type.

    Attributes:
        plan: styles by names in the base model.
        counts: attributes, by names of modules in the base model, of which a rank has its share.
        cuts_head: the output layer is cut by vocabulary, and the embedding with it where they are tied.
        flattens: its layers make [batch * seq, hidden] of [batch, seq, hidden], which is refused where a rank has a
            part of the sequence.
        shares_cache: in generation each context parallel rank can hold a part of the key/value cache. Not where
            attention is given other keys than the cache has, or runs by code that transformers does not look up.
        expert_rows: its experts are given a row of each token for each of them, expert after expert.
    """

    plan: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    cuts_head: bool = False
    flattens: bool = False
    shares_cache: bool = True
    expert_rows: bool = False


def _each(parent: str, style: str, *leaves: str) -> dict[str, str]:
    return {f"{parent}.{leaf}": style for leaf in leaves}


def _attention(parent: str, out: str = "o_proj") -> dict[str, str]:
    return _each(parent, "colwise", "q_proj", "k_proj", "v_proj") | _each(parent, "rowwise", out)


def _pair(parent: str, up: str, down: str) -> dict[str, str]:
    return _each(parent, "colwise", up) | _each(parent, "rowwise", down)


_GATED_MLP = _each("layers.*.mlp", "colwise", "gate_proj", "up_proj") | _each("layers.*.mlp", "rowwise", "down_proj")
_LLAMA = _attention("layers.*.self_attn") | _GATED_MLP
_FC = _attention("layers.*.self_attn", "out_proj") | _pair("layers.*", "fc1", "fc2")  # after fairseq

FAMILIES = {
    "biogpt": Family(_FC, cuts_head=True),
    # Its attention pairs heads of the first half with heads of the second, which a rank's part would tear apart.
    "diffllama": Family(_GATED_MLP, shares_cache=False),
    "emu3_text_model": Family(_LLAMA),
    "gpt_neo": Family(
        _attention("h.*.attn.attention", "out_proj") | _pair("h.*.mlp", "c_fc", "c_proj"),
        {"h.*.attn.attention": ("num_heads",)},
        cuts_head=True,
    ),
    "gpt_oss": Family(
        {
            **_attention("layers.*.self_attn"),
            "layers.*.self_attn": "local_params",
            "layers.*.self_attn.sinks": "colwise",
            "layers.*.mlp.experts": "moe_tp_experts",
            # [experts, in, out], where gate and up take turns.
            **_each("layers.*.mlp.experts", "rowwise", "gate_up_proj", "gate_up_proj_bias"),
            "layers.*.mlp.experts.down_proj": "colwise",
        }
    ),
    "gptj": Family(
        _attention("h.*.attn", "out_proj") | _pair("h.*.mlp", "fc_in", "fc_out"),
        {"h.*.attn": ("num_attention_heads",)},
        cuts_head=True,
    ),
    "hunyuan_v1_dense": Family(
        _LLAMA | _each("layers.*.self_attn", "replicated_with_grad_allreduce", "query_layernorm", "key_layernorm")
    ),
    "inkling2_text": Family({"layers.*.mlp.experts.gate_up_proj": "packed_colwise"}),  # its own tears gates from ups
    **dict.fromkeys(("hrm_text", "jetmoe", "mllama_text_model"), Family(shares_cache=False)),
    **dict.fromkeys(("llama4", "llama4_text"), Family(expert_rows=True)),
    "opt": Family(
        {f"decoder.{name}": style for name, style in _FC.items()},
        {"decoder.layers.*.self_attn": ("num_heads",)},
        cuts_head=True,
        flattens=True,
    ),
    "persimmon": Family(
        {
            **_pair("layers.*.self_attn", "query_key_value", "dense"),
            **_pair("layers.*.mlp", "dense_h_to_4h", "dense_4h_to_h"),
            **_each("layers.*.self_attn", "replicated_with_grad_allreduce", "q_layernorm", "k_layernorm"),
        },
        {"layers.*.self_attn": ("num_heads",)},
        cuts_head=True,
    ),
    "stablelm": Family(_LLAMA, {"layers.*.self_attn": ("num_heads", "num_key_value_heads")}, cuts_head=True),
    "xglm": Family(_FC, {"layers.*.self_attn": ("num_heads", "embed_dim")}, cuts_head=True),
}
