"""Properties of families of transformers models, and plans where transformers has none or a wrong one.

A family needs an entry only if its configuration class has no correct `base_model_tp_plan`. To add one:

1. `plan`: map names in the base model, where `*` matches one component, to styles (see `STYLES` in
   `fused_tp.parallelizing.shard_plan`). "" is the base model itself. None removes an entry of transformers' plan.
2. `counts`: list the attributes of attention modules that their forward uses to reshape projections, as in
   `view(batch, seq, self.num_heads, self.head_dim)`. They are divided by the number of tensor parallel ranks.
3. `attention`: if the family has custom attention code, the replacement over context parallel ranks.
4. Run `python -m tests.integrations.sweep --out DIR my_model_type`, which compares every gradient.
   docs/reference/models.md explains how the table of model types is made from the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fused_tp.parallelizing import own_attention
from fused_tp.parallelizing.own_attention import OwnAttention


@dataclass(frozen=True)
class Family:
    """Properties of one model type. Names of modules are names in the base model.

    Attributes:
        plan: styles by names of modules and parameters.
        counts: attributes that are divided by the number of ranks, by names of modules.
        per_head: arguments with one entry per head: {module name: {argument name: dim of size heads or batch * heads}}.
            The module on a rank receives the entries of its heads.
        unread: parameters that the source of a forward reads only under an option that is off.
        embeds: modules without parameters that return one entry per token of the full sequence, from its positions.
        before: modules before the layers that run on the full sequence under sequence parallelism, because the base
            model combines their output with another tensor of all tokens.
        splits: arguments of layers that hold all tokens because of `before`, by names of modules. They are sharded when
            the layer receives them.
        parts: arguments of blocks on the full sequence (`whole_blocks`) that hold a shard of it, besides the first
            argument, which always holds a shard. An argument may have the tokens of all rows in one dim.
        joins: the last module of the layers, after which the base model reshapes hidden states to its input's shape.
            Under sequence parallelism its output is gathered, and all later modules run on the full sequence.
        shards_head: True if the output layer is sharded by vocabulary, together with a tied embedding; False if it is
            not sharded; None to follow transformers' plan.
        flattens: the base model passes layers [batch * seq, hidden] instead of [batch, seq, hidden].
        eager_sequences: sequence parallelism works with the custom attention code of the family, which ignores the
            attention function of the config: it sees the full sequence, because projections and masks have its length.
            Also set for models without attention, whose state blocks run on the full sequence.
        needs_tokens: the model's code between layers fails on zero tokens.
        attention: replacement for custom attention code over context parallel ranks, or None.
        names_attention: the model calls the attention function of its config, although transformers does not declare
            this (`_supports_attention_backend`).
        positions_of_mask: the model computes positions by counting unmasked tokens in the attention mask; padding gets
            -1.
        length_of_mask: the model reads the sequence length from the attention mask, or without a mask from the
            embeddings.
        shares_cache: in generation each context parallel rank can hold a shard of the key/value cache. False if
            attention receives keys that differ from the cached ones, or if custom attention code has no replacement.
        expert_rows: experts receive one row per pair of expert and token, sorted by expert.
    """

    plan: Mapping[str, str | None] = field(default_factory=dict)
    counts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    per_head: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    embeds: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    splits: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    joins: str = ""
    shards_head: bool | None = None
    flattens: bool = False
    eager_sequences: bool = False
    needs_tokens: bool = False
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


_GATED = ("down_proj", "gate_proj", "up_proj")
_GATED_MLP = _each("layers.*.mlp", "colwise", "gate_proj", "up_proj") | _each("layers.*.mlp", "rowwise", "down_proj")
_PACKED_MLP = _each("layers.*.mlp", "packed_colwise", "gate_up_proj") | _each("layers.*.mlp", "rowwise", "down_proj")
_LLAMA = _attention("layers.*.self_attn") | _GATED_MLP
_FC = _attention("layers.*.self_attn", "out_proj") | _pair("layers.*", "fc1", "fc2")  # names from fairseq

_GPT2_MLP = _pair("h.*.mlp", "c_fc", "c_proj")
_GPT2 = _each("h.*.attn", "packed_colwise_3", "c_attn") | _each("h.*.attn", "rowwise", "c_proj") | _GPT2_MLP
_BLOOM_MLP = _pair("h.*.mlp", "dense_h_to_4h", "dense_4h_to_h")


def _gathered(parent: str, out: str, *leaves: str) -> dict[str, str | None]:
    """Plan for layers around code that needs all features: `leaves` gather their outputs, `out` splits its input.

    Such code is a norm over all features, or a recurrent state whose weights no style shards.
    """
    return _each(parent, "colwise_gather_output", *leaves) | _each(parent, "rowwise_split_input", out)


def _bloom(config: Any) -> Family:
    reads_weights = config.pretraining_tp > 1 and config.slow_but_exact
    attention = OwnAttention("BloomAttention", own_attention.bloom, dropout="attention_dropout")
    return Family(
        _pair("h.*.self_attention", "query_key_value", "dense") | _BLOOM_MLP,
        {"h.*.self_attention": ("num_heads",)},
        per_head={"h.*.self_attention": {"alibi": 0}},
        unread=() if reads_weights else ("h.*.self_attention.dense.weight", "h.*.mlp.dense_4h_to_h.weight"),
        shards_head=True,
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
        shards_head=True,
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
        shards_head=True,
    )


def _gemma4(config: Any) -> Family:
    if not config.get_text_config().hidden_size_per_layer_input:
        return Family(unread=("language_model.embed_tokens.weight",))
    # The model reads a row of the embedding's weight, which is tied to the output layer, so neither can be sharded.
    return Family({"language_model.embed_tokens": None}, shards_head=False)


def _mllama(text: str) -> Family:
    attentions = (f"{text}.layers.*.self_attn", f"{text}.layers.*.cross_attn")
    # A layer's own parameters are gates, which scale the outputs of blocks.
    plan = _LLAMA | _attention("layers.*.cross_attn") | {"layers.*": "replicate"}
    plan |= _each("layers.*.cross_attn", "replicated_with_grad_allreduce", "q_norm", "k_norm")
    return Family(
        {f"{text}.{name}": style for name, style in plan.items()},
        dict.fromkeys(attentions, ("num_heads", "num_key_value_heads")),
        shards_head=True,
        shares_cache=False,
    )


def _recurrent_gemma(config: Any) -> Family:
    heads = "q_proj", "k_proj", "v_proj"
    one_head = config.num_key_value_heads == 1
    attention = _gathered("layers.*.temporal_block", "o_proj", *heads)
    return Family(
        (attention if one_head else _attention("layers.*.temporal_block"))
        | _gathered("layers.*.temporal_block", "linear_out", "linear_x", "linear_y")
        | _each("layers.*.mlp_block", "colwise", "gate_proj", "up_proj")
        | _each("layers.*.mlp_block", "rowwise", "down_proj"),
        shards_head=True,
    )


def _openai_gpt(config: Any) -> Family:
    return Family(
        _GPT2,
        {"h.*.attn": ("n_head", "split_size")},
        joins=f"h.{config.num_hidden_layers - 1}.ln_2",
        shards_head=True,
        eager_sequences=True,
        attention=OwnAttention("Attention", own_attention.openai_gpt, "_attn", "attn_dropout"),
        shares_cache=False,  # the model has no cache
    )


def _gemma3n(config: Any) -> Family:
    # A sparse layer needs all features of the gate: it selects by their mean and standard deviation.
    sparse = [f"layers.{n}.mlp" for n, share in enumerate(config.activation_sparsity_pattern) if share > 0]
    return Family({name: style for mlp in sparse for name, style in _gathered(mlp, *_GATED).items()})


def _zamba2(config: Any) -> Family:
    block = "layers.*.shared_transformer"
    adapters = [f"linear_{x}_adapter_list.*" for x in "qkv"]
    return Family(
        _attention(f"{block}.self_attn")
        | _each(f"{block}.self_attn", "replicate", *(f"{adapter}.0" for adapter in adapters))
        | _each(f"{block}.self_attn", "colwise", *(f"{adapter}.1" for adapter in adapters))
        | _each(f"{block}.feed_forward", "packed_colwise", "gate_up_proj", "gate_up_proj_adapter_list.*.1")
        | _each(f"{block}.feed_forward", "replicate", "gate_up_proj_adapter_list.*.0")
        | _each(f"{block}.feed_forward", "rowwise", "down_proj")
        | _each("layers.*", "colwise_gather_output", "mamba.in_proj", "mamba_decoder.mamba.in_proj"),
        parts={"layers.*.mamba_decoder": ("transformer_hidden_states",), block: ("original_hidden_states",)},
        shards_head=True,
    )


# Shards in_proj, two thirds of a mixer's parameters. Convolution and scan run unsharded on every rank, because a fused
# kernel for the mixer reads the weights of its other layers directly.
_MAMBA = Family({"layers.*.mixer.in_proj": "colwise_gather_output"}, shards_head=True, eager_sequences=True)

# Modules that mix parallel streams of hidden states.
_STREAMS = _each("layers.*", "replicate", "attn_hc", "ffn_hc") | {"hc_head": "replicate"}

FAMILIES: dict[str, Family | Callable[[Any], Family]] = {
    "biogpt": Family(_FC, shards_head=True, names_attention=True),
    "bitnet": Family(
        _gathered("layers.*.self_attn", "o_proj", "q_proj", "k_proj", "v_proj")
        | _gathered("layers.*.mlp", "down_proj", "gate_proj", "up_proj"),
        shards_head=True,
    ),
    "bloom": _bloom,
    "codegen": Family(
        # The weight has four blocks of rows, each with the q, k and v of a quarter of the heads.
        _each("h.*.attn", "packed_colwise_12", "qkv_proj")
        | _each("h.*.attn", "packed_rowwise_4", "out_proj")
        | _pair("h.*.mlp", "fc_in", "fc_out"),
        {"h.*.attn": ("num_attention_heads",)},
        shards_head=True,
        eager_sequences=True,
        attention=OwnAttention("CodeGenAttention", own_attention.of_heads, "_attn", "attn_dropout"),
    ),
    "cpmant": Family(
        {
            **_each("encoder.layers.*.self_att.self_attention", "colwise", "project_q", "project_k", "project_v"),
            **_each("encoder.layers.*.self_att.self_attention", "rowwise", "attention_out"),
            **_each("encoder.layers.*.ffn.ffn", "colwise", "w_in.w_0", "w_in.w_1"),
            **_each("encoder.layers.*.ffn.ffn", "rowwise", "w_out"),
            "position_bias": "replicated_with_grad_allreduce",
        },
        {"encoder.layers.*.self_att.self_attention": ("num_heads",)},
        per_head={"encoder.layers.*.self_att.self_attention": {"position_bias": 1}},
        shards_head=True,
    ),
    "ctrl": Family(
        _each("h.*.multi_head_attention", "colwise", "Wq", "Wk", "Wv")
        | _each("h.*.multi_head_attention", "rowwise", "dense")
        | _pair("h.*.ffn", "0", "2"),
        before=("w",),
        splits={"h.0": ("x",)},
        shards_head=True,
    ),
    "deepseek_v4": Family(_STREAMS, needs_tokens=True),
    # Attention pairs each head of the first half with one of the second half; sharding would separate them.
    "diffllama": Family(_GATED_MLP, shares_cache=False),
    # Attention computes a mask for each head from the values of all heads, and the router reads tokens in pairs.
    "doge": Family(
        _each("layers.*.self_attn", None, "q_proj", "k_proj", "v_proj", "dt_proj", "o_proj")
        | _each("layers.*.mlp", None, "router_gate", "down_embed", "up_embed")
        | {"layers.*": "replicate"}
    ),
    "emu3_text_model": Family(_LLAMA),
    "falcon": _falcon,
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2"), _MAMBA),
    "gemma3n_text": _gemma3n,
    "gemma4": _gemma4,
    "gemma4_text": Family(
        _each("layers.*", "replicate", "router", "router.proj"),
        before=("embed_tokens", "embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"),
        splits={"layers.0": ("hidden_states",), "layers.*": ("per_layer_input",)},
        parts={"layers.*.experts": ("top_k_index", "top_k_weights")},
    ),
    # transformers' plan gathers the outputs of gate_up_proj instead of sharding them.
    **dict.fromkeys(("glm", "glm4", "phi3"), Family(_PACKED_MLP)),
    "gpt2": Family(_GPT2, {"h.*.attn": ("num_heads", "split_size")}, joins="ln_f", shards_head=True),
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neo": Family(
        _attention("h.*.attn.attention", "out_proj") | _pair("h.*.mlp", "c_fc", "c_proj"),
        {"h.*.attn.attention": ("num_heads",)},
        shards_head=True,
        eager_sequences=True,
        attention=OwnAttention("GPTNeoSelfAttention", own_attention.gpt_neo, "_attn", "attn_dropout"),
    ),
    "gpt_neox_japanese": Family(
        _pair("layers.*.attention", "query_key_value", "dense")
        | _pair("layers.*.mlp", "dense_h_to_4h", "dense_4h_to_h")
        | {"layers.*.attention": "replicate"},  # the layer adds this module's bias, after the sum over ranks
        {"layers.*.attention": ("num_attention_heads",)},
        shards_head=True,
        eager_sequences=True,
        attention=OwnAttention("GPTNeoXJapaneseAttention", own_attention.of_heads, "_attn", "attention_dropout"),
    ),
    "gpt_oss": Family(
        {
            **_attention("layers.*.self_attn"),
            "layers.*.self_attn": "local_params",
            "layers.*.self_attn.sinks": "colwise",
            "layers.*.mlp.experts": "moe_tp_experts",
            # [experts, in, out], with gate and up interleaved.
            **_each("layers.*.mlp.experts", "rowwise", "gate_up_proj", "gate_up_proj_bias"),
            "layers.*.mlp.experts.down_proj": "colwise",
        }
    ),
    "gptj": Family(
        _attention("h.*.attn", "out_proj") | _pair("h.*.mlp", "fc_in", "fc_out"),
        {"h.*.attn": ("num_attention_heads",)},
        shards_head=True,
        eager_sequences=True,
        attention=OwnAttention("GPTJAttention", own_attention.of_heads, "_attn", "attn_dropout"),
    ),
    "hunyuan_v1_dense": Family(
        _LLAMA | _each("layers.*.self_attn", "replicated_with_grad_allreduce", "query_layernorm", "key_layernorm")
    ),
    "hy_v4": Family(_STREAMS),
    "inkling2_text": Family(
        {
            # transformers' plan puts gate and up features of the same index on different ranks.
            "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
            **_each("layers.*", "replicate", "attention_input", "mlp_input"),
            "final_input": "replicate",
        },
        parts={"layers.*.self_attn": ("key_hidden_states", "value_hidden_states")},
        shards_head=True,
    ),
    "inkling_text": Family(
        {
            "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
            "layers.*.mlp.shared_experts": "moe_tp_experts",  # every token is routed to all of them
            **_each("layers.*", "replicate", "mlp"),  # a dense MLP has a scale, applied after the sum over ranks
            "embed_tokens": "replicate",  # contains a norm
        },
        shards_head=True,
    ),
    "hrm_text": Family({"": "replicate"}, shares_cache=False),
    "jetmoe": Family(shares_cache=False),
    **dict.fromkeys(("llama4", "llama4_text"), Family(expert_rows=True)),
    "mllama": _mllama("language_model"),
    "mllama_text_model": _mllama("model"),
    "modernbert-decoder": Family(
        _attention("layers.*.attn", "Wo")
        | _each("layers.*.mlp", "packed_colwise", "Wi")
        | _each("layers.*.mlp", "rowwise", "Wo"),
        joins="final_norm",
        shards_head=True,
    ),
    "moshi": Family(
        _each("layers.*.self_attn", "colwise", "q_proj.linear", "k_proj.linear", "v_proj.linear")
        | _each("layers.*.self_attn", "rowwise", "o_proj.linear")
        | _each("layers.*.mlp", "packed_colwise", "fc1")
        | _each("layers.*.mlp", "rowwise", "fc2"),
        joins="norm",
        shards_head=True,
        shares_cache=False,  # the cache drops old tokens, but the masks still include them
    ),
    "mpt": Family(
        _each("blocks.*.attn", "packed_colwise_3", "Wqkv")
        | _each("blocks.*.attn", "rowwise", "out_proj")
        | _pair("blocks.*.ffn", "up_proj", "down_proj"),
        {"blocks.*.attn": ("n_heads",)},
        per_head={"blocks.*.attn": {"position_bias": 0}},
        shards_head=True,
        eager_sequences=True,
        attention=OwnAttention("MptAttention", own_attention.mpt, dropout="attn_dropout_p"),
    ),
    "nemotron_h": Family(shards_head=True),
    "openai-gpt": _openai_gpt,
    "opt": Family(
        {f"decoder.{name}": style for name, style in _FC.items()},
        {"decoder.layers.*.self_attn": ("num_heads",)},
        shards_head=True,
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
        shards_head=True,
    ),
    "phi4_multimodal": Family(
        _PACKED_MLP,
        before=("embed_tokens", "embed_tokens_extend"),
        splits={"layers.0": ("hidden_states",)},
    ),
    "recurrent_gemma": _recurrent_gemma,
    "rwkv": Family(
        _gathered("blocks.*.attention", "output", "key", "value", "receptance")
        | _pair("blocks.*.feed_forward", "key", "value")
        | {"blocks.*.feed_forward.receptance": "colwise_gather_output"},
        shards_head=True,
        eager_sequences=True,
    ),
    "stablelm": Family(
        _LLAMA,
        {"layers.*.self_attn": ("num_heads", "num_key_value_heads")},
        shards_head=True,
        names_attention=True,
    ),
    "xglm": Family(
        _FC,
        {"layers.*.self_attn": ("num_heads", "embed_dim")},
        embeds=("embed_positions",),
        shards_head=True,
        eager_sequences=True,
        attention=OwnAttention("XGLMAttention", own_attention.xglm, dropout="dropout"),
    ),
    "xlstm": Family(  # the config selects separate or fused layers; the plan lists both
        _gathered("blocks.*.mlstm_layer", "out_proj", "q", "k", "v", "ogate_preact", "qkv_opreact")
        | _each("blocks.*.ffn", "colwise", "proj_up_gate", "proj_up")
        | _each("blocks.*.ffn", "packed_colwise", "proj_up_gate_z")
        | _each("blocks.*.ffn", "rowwise", "proj_down"),
        {"blocks.*.ffn": ("up_proj_dim",)},
        shards_head=True,
        eager_sequences=True,
    ),
    "zamba2": _zamba2,
    "zaya": Family(
        {
            **_each("layers.*.self_attn.qkv_proj", "colwise_gather_output", "q_proj", "k_proj"),
            **_each("layers.*.self_attn.qkv_proj", "colwise_gather_output", "v_proj_current", "v_proj_delayed"),
            "layers.*.self_attn.o_proj": "rowwise_split_input",
            "layers.*.mlp.experts": "moe_tp_experts",
            "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
            "layers.*.mlp.experts.down_proj": "rowwise",
            **_each("layers.*", "replicate", "post_attention_residual_scale", "post_mlp_residual_scale"),
            "": "replicate",
        },
        parts={"layers.*.mlp": ("prev_router_hidden_states",)},
        shards_head=True,
    ),
}


def is_known(config: Any) -> bool:
    """True if there is an entry for the model type of `config`."""
    return getattr(config, "model_type", "") in FAMILIES


def family_of(config: Any) -> Family:
    """Return the entry for the model type of `config`; an empty Family if there is none."""
    known = FAMILIES.get(getattr(config, "model_type", ""), Family())
    return known if isinstance(known, Family) else known(config)
