"""What is known of families of transformers models: plans where transformers has none, or a wrong one.

A family needs an entry here only where its configuration class has no `base_model_tp_plan` that is right. To add one:

1. `plan`: names in the base model, `*` for one part, to styles (see `fused_tp.integrations.plan.STYLES`). None takes
   an entry of transformers' plan out.
2. `counts`: attributes of attention modules by which their forward shapes what the projections return, such as
   `view(batch, seq, self.num_heads, self.head_dim)`. On a rank they count its own heads.
3. `attention`: where its modules attend by code of their own, what takes its place over context parallel ranks.
4. `python -m tests.integrations.sweep --out DIR my_model_type` compares every gradient; docs/reference/models.md says
   how the table of model types is made of that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fused_tp.integrations import own_attention
from fused_tp.integrations.own_attention import OwnAttention


@dataclass(frozen=True)
class Family:
    """Of one model type.

    Attributes:
        plan: styles by names in the base model.
        counts: attributes, by names of modules in the base model, of which a rank has its share.
        per_head: arguments of modules that hold something for each head, of which a rank's module gets its heads': the
            dims [heads] or [batch * heads] of tensors, by names of arguments, by names of modules in the base model.
        unread: parameters in the base model that no forward reads by itself, though its source does, under an option
            that is off.
        embeds: modules without parameters that make something for each token of the whole sequence, of its positions.
        joins: the last module of layers, after which the base model takes its input's shape for that of hidden states.
            Where a rank has a part of the sequence the output of that module is gathered, and the rest sees all of it.
        cuts_head: the output layer is cut by vocabulary, and the embedding with it where they are tied.
        flattens: it gives layers [batch * seq, hidden] instead of [batch, seq, hidden].
        eager_sequences: it computes attention by itself and not by the function that its config names. Its eager one
            is known to see the whole sequence where projections and transformers' masks do (sequence_parallel).
        attention: that it computes by itself, as far as other code can take its place (context parallel ranks).
        names_attention: it computes attention by the function that its config names, though transformers does not say
            so of it (`_supports_attention_backend`).
        positions_of_mask: it counts the tokens that the attention mask shows, and gives padding the position -1.
        length_of_mask: it reads the length of the sequence off the attention mask, or else off the embeddings.
        shares_cache: in generation each context parallel rank can hold a part of the key/value cache. Not where
            attention is given other keys than the cache has, or runs by code whose place none of ours takes.
        expert_rows: its experts are given a row of each token for each of them, expert after expert.
    """

    plan: Mapping[str, str | None] = field(default_factory=dict)
    counts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    per_head: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    embeds: tuple[str, ...] = ()
    joins: str = ""
    cuts_head: bool = False
    flattens: bool = False
    eager_sequences: bool = False
    attention: OwnAttention | None = None
    names_attention: bool = False
    length_of_mask: bool = False
    positions_of_mask: bool = False
    shares_cache: bool = True
    expert_rows: bool = False


def _each(parent: str, style: str | None, *leaves: str) -> dict[str, str | None]:
    return {f"{parent}.{leaf}": style for leaf in leaves}


def _attention(parent: str, out: str = "o_proj") -> dict[str, str | None]:
    return _each(parent, "colwise", "q_proj", "k_proj", "v_proj") | _each(parent, "rowwise", out)


def _pair(parent: str, up: str, down: str) -> dict[str, str | None]:
    return _each(parent, "colwise", up) | _each(parent, "rowwise", down)


_GATED_MLP = _each("layers.*.mlp", "colwise", "gate_proj", "up_proj") | _each("layers.*.mlp", "rowwise", "down_proj")
_PACKED_MLP = _each("layers.*.mlp", "packed_colwise", "gate_up_proj") | _each("layers.*.mlp", "rowwise", "down_proj")
_LLAMA = _attention("layers.*.self_attn") | _GATED_MLP
_FC = _attention("layers.*.self_attn", "out_proj") | _pair("layers.*", "fc1", "fc2")  # after fairseq

_GPT2_MLP = _pair("h.*.mlp", "c_fc", "c_proj")
_GPT2 = _each("h.*.attn", "packed_colwise_3", "c_attn") | _each("h.*.attn", "rowwise", "c_proj") | _GPT2_MLP
_BLOOM_MLP = _pair("h.*.mlp", "dense_h_to_4h", "dense_4h_to_h")


def _bloom(config: Any) -> Family:
    reads_weights = config.pretraining_tp > 1 and config.slow_but_exact
    attention = OwnAttention("BloomAttention", own_attention.bloom, dropout="attention_dropout")
    return Family(
        _pair("h.*.self_attention", "query_key_value", "dense") | _BLOOM_MLP,
        {"h.*.self_attention": ("num_heads",)},
        per_head={"h.*.self_attention": {"alibi": 0}},
        unread=() if reads_weights else ("h.*.self_attention.dense.weight", "h.*.mlp.dense_4h_to_h.weight"),
        cuts_head=True,
        eager_sequences=True,
        attention=None if reads_weights else attention,
        length_of_mask=True,
    )


def _falcon(config: Any) -> Family:
    one_head = config.multi_query and not config.new_decoder_architecture
    return Family(
        _each("h.*.self_attention", "multi_query_colwise" if one_head else "colwise", "query_key_value")
        | _each("h.*.self_attention", "rowwise", "dense")
        | _BLOOM_MLP,
        {"h.*.self_attention": ("num_heads",) if one_head else ("num_heads", "num_kv_heads")},
        per_head={"h.*.self_attention": {"alibi": 1, "attention_mask": 1}},
        cuts_head=True,
        eager_sequences=True,
        attention=None if config.alibi else OwnAttention("FalconAttention", own_attention.falcon),
        length_of_mask=True,
    )


def _gpt_bigcode(config: Any) -> Family:
    one_head = config.multi_query
    return Family(
        _each("h.*.attn", "multi_query_colwise" if one_head else "colwise", "c_attn")
        | _each("h.*.attn", "rowwise", "c_proj")
        | _GPT2_MLP,
        {"h.*.attn": ("num_heads", *(("embed_dim", "num_key_value_groups") if one_head else ()))},
        cuts_head=True,
    )


def _openai_gpt(config: Any) -> Family:
    return Family(
        _GPT2,
        {"h.*.attn": ("n_head", "split_size")},
        joins=f"h.{config.num_hidden_layers - 1}.ln_2",
        cuts_head=True,
        eager_sequences=True,
        attention=OwnAttention("Attention", own_attention.openai_gpt, "_attn", "attn_dropout"),
        shares_cache=False,  # it takes none
    )


FAMILIES: dict[str, Family | Callable[[Any], Family]] = {
    "biogpt": Family(_FC, cuts_head=True, names_attention=True),
    "bloom": _bloom,
    "codegen": Family(
        # Rows of q, k and v lie in four blocks, each with all three of some heads.
        _each("h.*.attn", "packed_colwise_12", "qkv_proj")
        | _each("h.*.attn", "packed_rowwise_4", "out_proj")
        | _pair("h.*.mlp", "fc_in", "fc_out"),
        {"h.*.attn": ("num_attention_heads",)},
        cuts_head=True,
        eager_sequences=True,
        attention=OwnAttention("CodeGenAttention", own_attention.of_heads, "_attn", "attn_dropout"),
    ),
    # Its attention pairs heads of the first half with heads of the second, which a rank's part would tear apart.
    "diffllama": Family(_GATED_MLP, shares_cache=False),
    # Its attention makes a mask for each head of the values of all heads; its router reads tokens in pairs.
    "doge": Family(
        _each("layers.*.self_attn", None, "q_proj", "k_proj", "v_proj", "dt_proj", "o_proj")
        | _each("layers.*.mlp", None, "router_gate", "down_embed", "up_embed")
        | {"layers.*": "replicate"}
    ),
    "emu3_text_model": Family(_LLAMA),
    "falcon": _falcon,
    **dict.fromkeys(("glm", "glm4", "phi3", "phi4_multimodal"), Family(_PACKED_MLP)),  # gathered in transformers' plan
    "gpt2": Family(_GPT2, {"h.*.attn": ("num_heads", "split_size")}, joins="ln_f", cuts_head=True),
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neo": Family(
        _attention("h.*.attn.attention", "out_proj") | _pair("h.*.mlp", "c_fc", "c_proj"),
        {"h.*.attn.attention": ("num_heads",)},
        cuts_head=True,
        eager_sequences=True,
        attention=OwnAttention("GPTNeoSelfAttention", own_attention.gpt_neo, "_attn", "attn_dropout"),
    ),
    "gpt_neox_japanese": Family(
        _pair("layers.*.attention", "query_key_value", "dense")
        | _pair("layers.*.mlp", "dense_h_to_4h", "dense_4h_to_h")
        | {"layers.*.attention": "replicate"},  # with a bias that is added outside of it
        {"layers.*.attention": ("num_attention_heads",)},
        cuts_head=True,
        eager_sequences=True,
        attention=OwnAttention("GPTNeoXJapaneseAttention", own_attention.of_heads, "_attn", "attention_dropout"),
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
        eager_sequences=True,
        attention=OwnAttention("GPTJAttention", own_attention.of_heads, "_attn", "attn_dropout"),
    ),
    "hunyuan_v1_dense": Family(
        _LLAMA | _each("layers.*.self_attn", "replicated_with_grad_allreduce", "query_layernorm", "key_layernorm")
    ),
    "inkling2_text": Family({"layers.*.mlp.experts.gate_up_proj": "packed_colwise"}),  # its own tears gates from ups
    **dict.fromkeys(("hrm_text", "jetmoe", "mllama_text_model"), Family(shares_cache=False)),
    **dict.fromkeys(("llama4", "llama4_text"), Family(expert_rows=True)),
    "mpt": Family(
        _each("blocks.*.attn", "packed_colwise_3", "Wqkv")
        | _each("blocks.*.attn", "rowwise", "out_proj")
        | _pair("blocks.*.ffn", "up_proj", "down_proj"),
        {"blocks.*.attn": ("n_heads",)},
        per_head={"blocks.*.attn": {"position_bias": 0}},
        cuts_head=True,
        eager_sequences=True,
        attention=OwnAttention("MptAttention", own_attention.mpt, dropout="attn_dropout_p"),
    ),
    "nemotron_h": Family(cuts_head=True),
    "openai-gpt": _openai_gpt,
    "opt": Family(
        {f"decoder.{name}": style for name, style in _FC.items()},
        {"decoder.layers.*.self_attn": ("num_heads",)},
        cuts_head=True,
        flattens=True,
        positions_of_mask=True,
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
    "stablelm": Family(
        _LLAMA,
        {"layers.*.self_attn": ("num_heads", "num_key_value_heads")},
        cuts_head=True,
        names_attention=True,
    ),
    "xglm": Family(
        _FC,
        {"layers.*.self_attn": ("num_heads", "embed_dim")},
        embeds=("embed_positions",),
        cuts_head=True,
        eager_sequences=True,
        attention=OwnAttention("XGLMAttention", own_attention.xglm, dropout="dropout"),
    ),
}


def family_of(config: Any) -> Family:
    """What is known of models of that config; an empty entry where nothing is."""
    known = FAMILIES.get(getattr(config, "model_type", ""), Family())
    return known if isinstance(known, Family) else known(config)
