"""Properties of families of transformers models, and plans where transformers has none or a wrong one.

A family needs an entry only if its configuration class has no correct `base_model_tp_plan`. To add one:

1. `plan`: map names in the base model, where `*` matches one component, to styles (see `STYLES` in
   `fused_tp.parallelizing.shard_plan`). "" is the base model itself. None removes an entry of transformers' plan.
2. `head_attributes`: list the attributes of attention modules that their forward uses to reshape projections, as in
   `view(batch, seq, self.num_heads, self.head_dim)`. They are divided by the number of tensor parallel ranks.
3. `attention`: if the family has custom attention code, the replacement over context parallel ranks.
4. Run `python -m tests.integrations.sweep --out DIR my_model_type`, which compares every gradient.
   docs/reference/models.md explains how the table of model types is made from the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fused_tp.parallelizing import custom_attention
from fused_tp.parallelizing.custom_attention import CustomAttention


@dataclass(frozen=True)
class Family:
    """Properties of one model type. Names of modules are names in the base model.

    Attributes:
        plan: styles by names of modules and parameters.
        head_attributes: attributes that are divided by the number of ranks, by names of modules.
        per_head_arguments: arguments with one entry per head: {module name: {argument name: dim of size heads or batch
            * heads}}. The module on a rank receives the entries of its heads.
        unread_parameters: parameters that the source of a forward reads only under an option that is off.
        position_modules: modules without parameters that return one entry per token of the full sequence, from its
            positions.
        modules_before_layers: modules before the layers that run on the full sequence under sequence parallelism,
            because the base model combines their output with another tensor of all tokens.
        full_arguments: arguments of layers that hold all tokens because of `modules_before_layers`, by names of
            modules. They are sharded when the layer receives them.
        sharded_arguments: arguments of blocks on the full sequence (`whole_blocks`) that hold a shard of it, besides
            the first argument, which always holds a shard. An argument may have the tokens of all rows in one dim.
        gather_after: the last module of the layers, after which the base model reshapes hidden states to its input's
            shape. Under sequence parallelism its output is gathered, and all later modules run on the full sequence.
        shards_head: True if the output layer is sharded by vocabulary, together with a tied embedding; False if it is
            not sharded; None to follow transformers' plan.
        flattens_tokens: the base model passes layers [batch * seq, hidden] instead of [batch, seq, hidden].
        supports_eager_sequences: sequence parallelism works with the custom attention code of the family, which ignores
            the attention function of the config: it sees the full sequence, because projections and masks have its
            length. Also set for models without attention, whose state blocks run on the full sequence.
        needs_tokens: the model's code between layers fails on zero tokens.
        attention: replacement for custom attention code over context parallel ranks, or None.
        uses_configured_attention: the model calls the attention function of its config, although transformers does not
            declare this (`_supports_attention_backend`).
        counts_positions_in_mask: the model computes positions by counting unmasked tokens in the attention mask;
            padding gets -1.
        reads_length_from_mask: the model reads the sequence length from the attention mask, or without a mask from the
            embeddings.
        can_shard_cache: in generation each context parallel rank can hold a shard of the key/value cache. False if
            attention receives keys that differ from the cached ones, or if custom attention code has no replacement.
        takes_expert_rows: experts receive one row per pair of expert and token, sorted by expert.
    """

    plan: Mapping[str, str | None] = field(default_factory=dict)
    head_attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    per_head_arguments: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    unread_parameters: tuple[str, ...] = ()
    position_modules: tuple[str, ...] = ()
    modules_before_layers: tuple[str, ...] = ()
    full_arguments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sharded_arguments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gather_after: str = ""
    shards_head: bool | None = None
    flattens_tokens: bool = False
    supports_eager_sequences: bool = False
    needs_tokens: bool = False
    attention: CustomAttention | None = None
    uses_configured_attention: bool = False
    reads_length_from_mask: bool = False
    counts_positions_in_mask: bool = False
    can_shard_cache: bool = True
    takes_expert_rows: bool = False


def _styles(parent: str, style: str | None, *leaves: str) -> dict[str, str | None]:
    return {f"{parent}.{leaf}": style for leaf in leaves}


def _attention_styles(parent: str, out: str = "o_proj") -> dict[str, str | None]:
    return _styles(parent, "colwise", "q_proj", "k_proj", "v_proj") | _styles(parent, "rowwise", out)


def _pair_styles(parent: str, up: str, down: str) -> dict[str, str | None]:
    return _styles(parent, "colwise", up) | _styles(parent, "rowwise", down)


_GATED_MLP_NAMES = ("down_proj", "gate_proj", "up_proj")
_GATED_MLP = _styles("layers.*.mlp", "colwise", "gate_proj", "up_proj") | _styles(
    "layers.*.mlp", "rowwise", "down_proj"
)
_PACKED_MLP = _styles("layers.*.mlp", "packed_colwise", "gate_up_proj") | _styles(
    "layers.*.mlp", "rowwise", "down_proj"
)
_LLAMA = _attention_styles("layers.*.self_attn") | _GATED_MLP
# Names from fairseq.
_FAIRSEQ_LAYERS = _attention_styles("layers.*.self_attn", "out_proj") | _pair_styles("layers.*", "fc1", "fc2")

_GPT2_MLP = _pair_styles("h.*.mlp", "c_fc", "c_proj")
_GPT2 = _styles("h.*.attn", "packed_colwise_3", "c_attn") | _styles("h.*.attn", "rowwise", "c_proj") | _GPT2_MLP
_BLOOM_MLP = _pair_styles("h.*.mlp", "dense_h_to_4h", "dense_4h_to_h")


def _gathered_styles(parent: str, out: str, *leaves: str) -> dict[str, str | None]:
    """Plan for layers around code that needs all features: `leaves` gather their outputs, `out` splits its input.

    Such code is a norm over all features, or a recurrent state whose weights no style shards.
    """
    return _styles(parent, "colwise_gather_output", *leaves) | _styles(parent, "rowwise_split_input", out)


def _bloom(config: Any) -> Family:
    reads_weights = config.pretraining_tp > 1 and config.slow_but_exact
    attention = CustomAttention("BloomAttention", custom_attention.attend_bloom, dropout_attribute="attention_dropout")
    return Family(
        _pair_styles("h.*.self_attention", "query_key_value", "dense") | _BLOOM_MLP,
        {"h.*.self_attention": ("num_heads",)},
        per_head_arguments={"h.*.self_attention": {"alibi": 0}},
        unread_parameters=() if reads_weights else ("h.*.self_attention.dense.weight", "h.*.mlp.dense_4h_to_h.weight"),
        shards_head=True,
        supports_eager_sequences=True,
        attention=None if reads_weights else attention,
        reads_length_from_mask=True,
    )


def _falcon(config: Any) -> Family:
    is_multi_query = config.multi_query and not config.new_decoder_architecture
    return Family(
        _styles("h.*.self_attention", "multi_query_colwise" if is_multi_query else "colwise", "query_key_value")
        | _styles("h.*.self_attention", "rowwise", "dense")
        | _BLOOM_MLP,
        {"h.*.self_attention": ("num_heads",) if is_multi_query else ("num_heads", "num_kv_heads")},
        per_head_arguments={"h.*.self_attention": {"alibi": 1, "attention_mask": 1}},
        shards_head=True,
        supports_eager_sequences=True,
        attention=None if config.alibi else CustomAttention("FalconAttention", custom_attention.attend_falcon),
        reads_length_from_mask=True,
    )


def _gpt_bigcode(config: Any) -> Family:
    is_multi_query = config.multi_query
    return Family(
        _styles("h.*.attn", "multi_query_colwise" if is_multi_query else "colwise", "c_attn")
        | _styles("h.*.attn", "rowwise", "c_proj")
        | _GPT2_MLP,
        {"h.*.attn": ("num_heads", *(("embed_dim", "num_key_value_groups") if is_multi_query else ()))},
        shards_head=True,
    )


# One embedding for each layer (Gemma), more elements than the layers have.
_LAYER_EMBEDDINGS = {
    "embed_tokens_per_layer": "embedding_rowwise",
    "per_layer_model_projection": "colwise_gather_output",
}


def _gemma4(config: Any) -> Family:
    if not config.get_text_config().hidden_size_per_layer_input:
        return Family(unread_parameters=("language_model.embed_tokens.weight",))
    # The model reads a row of the embedding's weight, which is tied to the output layer, so neither can be sharded.
    layer_embeddings = {f"language_model.{name}": style for name, style in _LAYER_EMBEDDINGS.items()}
    return Family({"language_model.embed_tokens": None, **layer_embeddings}, shards_head=False)


def _mllama(prefix: str) -> Family:
    attentions = (f"{prefix}.layers.*.self_attn", f"{prefix}.layers.*.cross_attn")
    # A layer's own parameters are gates, which scale the outputs of blocks.
    plan = _LLAMA | _attention_styles("layers.*.cross_attn") | {"layers.*": "replicate"}
    plan |= _styles("layers.*.cross_attn", "replicated_with_grad_allreduce", "q_norm", "k_norm")
    return Family(
        {f"{prefix}.{name}": style for name, style in plan.items()},
        dict.fromkeys(attentions, ("num_heads", "num_key_value_heads")),
        shards_head=True,
        can_shard_cache=False,
    )


def _recurrent_gemma(config: Any) -> Family:
    head_projections = "q_proj", "k_proj", "v_proj"
    is_multi_query = config.num_key_value_heads == 1
    attention = _gathered_styles("layers.*.temporal_block", "o_proj", *head_projections)
    return Family(
        (attention if is_multi_query else _attention_styles("layers.*.temporal_block"))
        | _gathered_styles("layers.*.temporal_block", "linear_out", "linear_x", "linear_y")
        | _styles("layers.*.mlp_block", "colwise", "gate_proj", "up_proj")
        | _styles("layers.*.mlp_block", "rowwise", "down_proj"),
        shards_head=True,
    )


def _openai_gpt(config: Any) -> Family:
    return Family(
        _GPT2,
        {"h.*.attn": ("n_head", "split_size")},
        gather_after=f"h.{config.num_hidden_layers - 1}.ln_2",
        shards_head=True,
        supports_eager_sequences=True,
        attention=CustomAttention("Attention", custom_attention.attend_openai_gpt, "_attn", "attn_dropout"),
        can_shard_cache=False,  # the model has no cache
    )


def _gemma3n(config: Any) -> Family:
    # A sparse layer needs all features of the gate: it selects by their mean and standard deviation.
    sparse_mlps = [f"layers.{n}.mlp" for n, share in enumerate(config.activation_sparsity_pattern) if share > 0]
    return Family(
        {name: style for mlp in sparse_mlps for name, style in _gathered_styles(mlp, *_GATED_MLP_NAMES).items()}
        | _LAYER_EMBEDDINGS
    )


def _zamba2(config: Any) -> Family:
    block = "layers.*.shared_transformer"
    adapters = [f"linear_{x}_adapter_list.*" for x in "qkv"]
    return Family(
        _attention_styles(f"{block}.self_attn")
        | _styles(f"{block}.self_attn", "replicate", *(f"{adapter}.0" for adapter in adapters))
        | _styles(f"{block}.self_attn", "colwise", *(f"{adapter}.1" for adapter in adapters))
        | _styles(f"{block}.feed_forward", "packed_colwise", "gate_up_proj", "gate_up_proj_adapter_list.*.1")
        | _styles(f"{block}.feed_forward", "replicate", "gate_up_proj_adapter_list.*.0")
        | _styles(f"{block}.feed_forward", "rowwise", "down_proj")
        | _styles("layers.*", "colwise_gather_output", "mamba.in_proj", "mamba_decoder.mamba.in_proj"),
        sharded_arguments={
            "layers.*.mamba_decoder": ("transformer_hidden_states",),
            block: ("original_hidden_states",),
        },
        shards_head=True,
    )


# Latent attention (DeepSeek V2 and later). The projections to the latents, which all heads read, stay whole.
_LATENT_ATTENTION = _styles("layers.*.self_attn", "colwise", "q_proj", "q_b_proj", "kv_b_proj") | {
    "layers.*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
    "layers.*.self_attn.o_proj": "rowwise",
}
_HEAD_NORMS = _styles("layers.*.self_attn", "replicated_with_grad_allreduce", "q_norm", "k_norm")


def _gated_mlp(parent: str) -> dict[str, str | None]:
    return _styles(parent, "colwise", "gate_proj", "up_proj") | _styles(parent, "rowwise", "down_proj")


def _delta_attention(gate: str) -> dict[str, str | None]:
    """Plan for Kimi delta attention by heads; `gate` is the projection to the decays of all channels."""
    attention = "layers.*.self_attn"
    return {
        **_attention_styles(attention),
        **_styles(attention, "colwise", "b_proj", f"forget_gate.{gate}"),
        **_styles(attention, "local_params", "conv1d", "forget_gate"),
        **_styles(attention, "colwise", "forget_gate.A_log", "forget_gate.dt_bias"),
        f"{attention}.conv1d.weight": "packed_depthwise_3",
        f"{attention}.o_norm": "replicated_with_grad_allreduce",
    }


# Layers of latent attention and of delta attention have the same name.
_DELTA_HEADS = {"layers.*.self_attn": ("num_heads", "qkv_dim"), "layers.*.self_attn.forget_gate": ("num_heads",)}
# Short convolutions, each of whose channels depends on one channel of each of three blocks of in_proj's.
_SHORT_CONVOLUTION = {
    "layers.*.conv.in_proj": "packed_colwise_3",
    "layers.*.conv.conv": "local_params",
    "layers.*.conv.conv.weight": "depthwise",
    "layers.*.conv.conv.bias": "colwise",
    "layers.*.conv.out_proj": "rowwise",
}
_LFM_MLP = _styles("layers.*.feed_forward", "colwise", "w1", "w3") | _styles("layers.*.feed_forward", "rowwise", "w2")
_LFM2 = Family(
    _SHORT_CONVOLUTION
    | _attention_styles("layers.*.self_attn", "out_proj")
    | _styles("layers.*.self_attn", "replicated_with_grad_allreduce", "q_layernorm", "k_layernorm")
    | _LFM_MLP
)
# Of mixers, only in_proj is sharded, two thirds of their parameters: a fused kernel reads the weights of the other
# layers directly.
_HYBRID_MAMBA = Family(
    _attention_styles("layers.*.self_attn")
    | _gated_mlp("layers.*.feed_forward")
    | {"layers.*.mamba.in_proj": "colwise_gather_output"}
)
_GRANITE_MOE = Family(
    _attention_styles("layers.*.self_attn")
    | _styles("layers.*.shared_mlp", "packed_colwise", "input_linear")
    | _styles("layers.*.shared_mlp", "rowwise", "output_linear")
    | {"layers.*.mamba.in_proj": "colwise_gather_output"}
)
_SHARED_EXPERTS = Family(_gated_mlp("layers.*.mlp.shared_experts"))

# Shards in_proj, two thirds of a mixer's parameters. Convolution and scan run unsharded on every rank, because a fused
# kernel for the mixer reads the weights of its other layers directly.
_MAMBA_FAMILY = Family(
    {"layers.*.mixer.in_proj": "colwise_gather_output"}, shards_head=True, supports_eager_sequences=True
)

# Modules that mix the parallel residual streams of hyper-connections.
_STREAM_STYLES = _styles("layers.*", "replicate", "attn_hc", "ffn_hc") | {"hc_head": "replicate"}

FAMILIES: dict[str, Family | Callable[[Any], Family]] = {
    "afmoe": Family(
        _LLAMA
        | _HEAD_NORMS
        | _styles("layers.*.self_attn", "colwise", "gate_proj")
        | _gated_mlp("layers.*.mlp.shared_experts")
    ),
    # Without a style of its own, the norm's width does not show that its input is whole.
    "axk2": Family({"layers.*.self_attn.q_a_layernorm": "replicate"}),
    "bailing_hybrid": Family(
        _delta_attention("f_proj") | _LATENT_ATTENTION | _styles("layers.*.self_attn", "colwise", "g_proj"),
        _DELTA_HEADS,
    ),
    **dict.fromkeys(("bamba", "falcon_h1"), _HYBRID_MAMBA),
    "biogpt": Family(_FAIRSEQ_LAYERS, shards_head=True, uses_configured_attention=True),
    "bitnet": Family(
        _gathered_styles("layers.*.self_attn", "o_proj", "q_proj", "k_proj", "v_proj")
        | _gathered_styles("layers.*.mlp", "down_proj", "gate_proj", "up_proj"),
        shards_head=True,
    ),
    "bloom": _bloom,
    "codegen": Family(
        # The weight has four blocks of rows, each with the q, k and v of a quarter of the heads.
        _styles("h.*.attn", "packed_colwise_12", "qkv_proj")
        | _styles("h.*.attn", "packed_rowwise_4", "out_proj")
        | _pair_styles("h.*.mlp", "fc_in", "fc_out"),
        {"h.*.attn": ("num_attention_heads",)},
        shards_head=True,
        supports_eager_sequences=True,
        attention=CustomAttention("CodeGenAttention", custom_attention.attend_by_head, "_attn", "attn_dropout"),
    ),
    "cpmant": Family(
        {
            **_styles("encoder.layers.*.self_att.self_attention", "colwise", "project_q", "project_k", "project_v"),
            **_styles("encoder.layers.*.self_att.self_attention", "rowwise", "attention_out"),
            **_styles("encoder.layers.*.ffn.ffn", "colwise", "w_in.w_0", "w_in.w_1"),
            **_styles("encoder.layers.*.ffn.ffn", "rowwise", "w_out"),
            "position_bias": "replicated_with_grad_allreduce",
        },
        {"encoder.layers.*.self_att.self_attention": ("num_heads",)},
        per_head_arguments={"encoder.layers.*.self_att.self_attention": {"position_bias": 1}},
        shards_head=True,
    ),
    "ctrl": Family(
        _styles("h.*.multi_head_attention", "colwise", "Wq", "Wk", "Wv")
        | _styles("h.*.multi_head_attention", "rowwise", "dense")
        | _pair_styles("h.*.ffn", "0", "2"),
        modules_before_layers=("w",),
        full_arguments={"h.0": ("x",)},
        shards_head=True,
    ),
    **dict.fromkeys(("axk1", "deepseek_v3", "youtu"), Family(_LATENT_ATTENTION)),
    "deepseek_v4": Family(
        {
            **_STREAM_STYLES,
            **_gated_mlp("layers.*.mlp.shared_experts"),
            # One head of keys, which are the values too. Compressed keys are joined to it.
            **_styles("layers.*.self_attn", "shared_output", "kv_norm", "compressor"),
            "layers.*.self_attn": "local_params",
            **_styles("layers.*.self_attn", "colwise", "q_b_proj", "sinks"),
            "layers.*.self_attn.o_a_proj": "grouped_colwise",
            "layers.*.self_attn.o_a_proj.weight": "colwise",
            "layers.*.self_attn.o_b_proj": "rowwise",
        },
        {"layers.*.self_attn": ("num_heads", "num_key_value_groups")},
        needs_tokens=True,
    ),
    # Attention pairs each head of the first half with one of the second half; sharding by heads would separate them.
    "diffllama": Family(
        _gathered_styles("layers.*.self_attn", "o_proj", "q_proj", "k_proj", "v_proj") | _GATED_MLP,
        can_shard_cache=False,
    ),
    # Attention computes a mask for each head from the values of all heads, and the router reads tokens in pairs.
    "doge": Family(
        _gathered_styles("layers.*.self_attn", "o_proj", "q_proj", "k_proj", "v_proj")
        | _styles("layers.*.self_attn", None, "dt_proj")
        | _styles("layers.*.mlp", None, "router_gate", "down_embed", "up_embed")
        | {"layers.*": "replicate"}
    ),
    **dict.fromkeys(("exaone_moe", "glm4_moe_lite", "solar_open"), _SHARED_EXPERTS),
    "emu3_text_model": Family(_LLAMA),
    "falcon": _falcon,
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2"), _MAMBA_FAMILY),
    "flint": Family(
        _attention_styles("layers.*.self_attn")
        | _HEAD_NORMS
        | {"layers.*.self_attn": "local_params", "layers.*.self_attn.sinks": "colwise"}
    ),
    "gemma3n_text": _gemma3n,
    "gemma4": _gemma4,
    "gemma4_text": Family(
        _styles("layers.*", "replicate", "router", "router.proj") | _LAYER_EMBEDDINGS,
        modules_before_layers=(
            "embed_tokens",
            "embed_tokens_per_layer",
            "per_layer_model_projection",
            "per_layer_projection_norm",
        ),
        full_arguments={"layers.0": ("hidden_states",), "layers.*": ("per_layer_input",)},
        sharded_arguments={"layers.*.experts": ("top_k_index", "top_k_weights")},
    ),
    # transformers' plan gathers the outputs of gate_up_proj instead of sharding them.
    **dict.fromkeys(("glm", "glm4", "phi3"), Family(_PACKED_MLP)),
    "gpt2": Family(_GPT2, {"h.*.attn": ("num_heads", "split_size")}, gather_after="ln_f", shards_head=True),
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neo": Family(
        _attention_styles("h.*.attn.attention", "out_proj") | _pair_styles("h.*.mlp", "c_fc", "c_proj"),
        {"h.*.attn.attention": ("num_heads",)},
        shards_head=True,
        supports_eager_sequences=True,
        attention=CustomAttention("GPTNeoSelfAttention", custom_attention.attend_gpt_neo, "_attn", "attn_dropout"),
    ),
    "gpt_neox_japanese": Family(
        _pair_styles("layers.*.attention", "query_key_value", "dense")
        | _pair_styles("layers.*.mlp", "dense_h_to_4h", "dense_4h_to_h")
        | {"layers.*.attention": "replicate"},  # the layer adds this module's bias, after the sum over ranks
        {"layers.*.attention": ("num_attention_heads",)},
        shards_head=True,
        supports_eager_sequences=True,
        attention=CustomAttention(
            "GPTNeoXJapaneseAttention", custom_attention.attend_by_head, "_attn", "attention_dropout"
        ),
    ),
    "gpt_oss": Family(
        {
            **_attention_styles("layers.*.self_attn"),
            "layers.*.self_attn": "local_params",
            "layers.*.self_attn.sinks": "colwise",
            "layers.*.mlp.experts": "moe_tp_experts",
            # [experts, in, out], with gate and up interleaved.
            **_styles("layers.*.mlp.experts", "rowwise", "gate_up_proj", "gate_up_proj_bias"),
            "layers.*.mlp.experts.down_proj": "colwise",
        }
    ),
    "gptj": Family(
        _attention_styles("h.*.attn", "out_proj") | _pair_styles("h.*.mlp", "fc_in", "fc_out"),
        {"h.*.attn": ("num_attention_heads",)},
        shards_head=True,
        supports_eager_sequences=True,
        attention=CustomAttention("GPTJAttention", custom_attention.attend_by_head, "_attn", "attn_dropout"),
    ),
    **dict.fromkeys(("granitemoe", "granitemoeshared", "granitemoehybrid"), _GRANITE_MOE),
    "hunyuan_v1_dense": Family(
        _LLAMA | _styles("layers.*.self_attn", "replicated_with_grad_allreduce", "query_layernorm", "key_layernorm")
    ),
    "hunyuan_v1_moe": Family(
        _attention_styles("layers.*.self_attn")
        | _styles("layers.*.self_attn", "replicated_with_grad_allreduce", "query_layernorm", "key_layernorm")
        | _gated_mlp("layers.*.mlp.shared_mlp")
    ),
    "hy_v4": Family(_STREAM_STYLES),
    "inkling2_text": Family(
        {
            # transformers' plan puts gate and up features of the same index on different ranks.
            "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
            # Convolutions with weights that depend on the token, and clips by head, read all heads.
            **_gathered_styles("layers.*.self_attn", "o_proj", "q_proj", "k_proj", "v_proj", "r_proj", "gate_proj"),
            **_styles("layers.*", "replicate", "attention_input", "mlp_input"),
            "final_input": "replicate",
        },
        sharded_arguments={"layers.*.self_attn": ("key_hidden_states", "value_hidden_states")},
        shards_head=True,
    ),
    "inkling_text": Family(
        {
            "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
            "layers.*.mlp.shared_experts": "moe_tp_experts",  # every token is routed to all of them
            **_styles("layers.*", "replicate", "mlp"),  # a dense MLP has a scale, applied after the sum over ranks
            "embed_tokens": "replicate",  # contains a norm
            **_attention_styles("layers.*.self_attn"),
            **_HEAD_NORMS,
            **_styles("layers.*.self_attn", "colwise", "r_proj"),
            **_styles("layers.*.self_attn", "replicated_with_grad_allreduce", "rel_logits_proj"),
            **_styles("layers.*.self_attn", "local_params", "k_sconv.conv1d", "v_sconv.conv1d"),
            **_styles("layers.*.self_attn", "depthwise", "k_sconv.conv1d.weight", "v_sconv.conv1d.weight"),
        },
        {"layers.*.self_attn": ("num_heads", "num_key_value_heads")},
        shards_head=True,
    ),
    "hrm_text": Family({"": "replicate"}, can_shard_cache=False),
    "jamba": Family(
        _attention_styles("layers.*.self_attn")
        | _gated_mlp("layers.*.feed_forward")
        | _gathered_styles("layers.*.mamba", "out_proj", "in_proj")
    ),
    "jetmoe": Family(can_shard_cache=False),
    "kimi_linear": Family(
        _delta_attention("f_b_proj") | _LATENT_ATTENTION | _styles("layers.*.self_attn", "colwise", "g_b_proj"),
        _DELTA_HEADS,
    ),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _LFM2),
    "lfm3": Family(
        _SHORT_CONVOLUTION
        | _attention_styles("layers.*.self_attn")
        | _HEAD_NORMS
        | _styles("layers.*.self_attn", "colwise", "g_proj")
        | _LFM_MLP
    ),
    **dict.fromkeys(("llama4", "llama4_text"), Family(takes_expert_rows=True)),
    # The norm of linear attention is over the features of all heads.
    "minimax": Family(_gathered_styles("layers.*.self_attn", "out_proj", "qkv_proj", "output_gate")),
    "minimax_m3_vl_text": Family(
        _styles("layers.*.mlp.shared_experts", "packed_colwise", "gate_up_proj")
        | _styles("layers.*.mlp", "packed_colwise", "gate_up_proj")
        | _styles("layers.*.mlp", "rowwise", "down_proj", "shared_experts.down_proj")
    ),
    "mllama": _mllama("language_model"),
    "mllama_text_model": _mllama("model"),
    "modernbert-decoder": Family(
        _attention_styles("layers.*.attn", "Wo")
        | _styles("layers.*.mlp", "packed_colwise", "Wi")
        | _styles("layers.*.mlp", "rowwise", "Wo"),
        gather_after="final_norm",
        shards_head=True,
    ),
    "moshi": Family(
        _styles("layers.*.self_attn", "colwise", "q_proj.linear", "k_proj.linear", "v_proj.linear")
        | _styles("layers.*.self_attn", "rowwise", "o_proj.linear")
        | _styles("layers.*.mlp", "packed_colwise", "fc1")
        | _styles("layers.*.mlp", "rowwise", "fc2"),
        gather_after="norm",
        shards_head=True,
        can_shard_cache=False,  # the cache drops old tokens, but the masks still include them
    ),
    "mpt": Family(
        _styles("blocks.*.attn", "packed_colwise_3", "Wqkv")
        | _styles("blocks.*.attn", "rowwise", "out_proj")
        | _pair_styles("blocks.*.ffn", "up_proj", "down_proj"),
        {"blocks.*.attn": ("n_heads",)},
        per_head_arguments={"blocks.*.attn": {"position_bias": 0}},
        shards_head=True,
        supports_eager_sequences=True,
        attention=CustomAttention("MptAttention", custom_attention.attend_mpt, dropout_attribute="attn_dropout_p"),
    ),
    "nemotron_h": Family(
        _attention_styles("layers.*.mixer")
        | _pair_styles("layers.*.mixer", "up_proj", "down_proj")
        | _pair_styles("layers.*.mixer.shared_experts", "up_proj", "down_proj")
        | {"layers.*.mixer.in_proj": "colwise_gather_output"},
        shards_head=True,
    ),
    "olmo_hybrid": Family(
        # The convolution's blocks of queries, keys and values differ in size, so its channels cannot be sharded alike.
        _gathered_styles("layers.*.linear_attn", "o_proj", "q_proj", "k_proj", "v_proj", "g_proj")
    ),
    "openai-gpt": _openai_gpt,
    "opt": Family(
        {f"decoder.{name}": style for name, style in _FAIRSEQ_LAYERS.items()},
        {"decoder.layers.*.self_attn": ("num_heads",)},
        shards_head=True,
        flattens_tokens=True,
        counts_positions_in_mask=True,
    ),
    "persimmon": Family(
        {
            **_pair_styles("layers.*.self_attn", "query_key_value", "dense"),
            **_pair_styles("layers.*.mlp", "dense_h_to_4h", "dense_4h_to_h"),
            **_styles("layers.*.self_attn", "replicated_with_grad_allreduce", "q_layernorm", "k_layernorm"),
        },
        {"layers.*.self_attn": ("num_heads",)},
        shards_head=True,
    ),
    "phi4_multimodal": Family(
        _PACKED_MLP,
        modules_before_layers=("embed_tokens", "embed_tokens_extend"),
        full_arguments={"layers.0": ("hidden_states",)},
    ),
    "phimoe": Family(_attention_styles("layers.*.self_attn")),
    "qwen2_moe": Family(_gated_mlp("layers.*.mlp.shared_expert")),
    "recurrent_gemma": _recurrent_gemma,
    "rwkv": Family(
        _gathered_styles("blocks.*.attention", "output", "key", "value", "receptance")
        | _pair_styles("blocks.*.feed_forward", "key", "value")
        | {"blocks.*.feed_forward.receptance": "colwise_gather_output"},
        shards_head=True,
        supports_eager_sequences=True,
    ),
    "stablelm": Family(
        _LLAMA,
        {"layers.*.self_attn": ("num_heads", "num_key_value_heads")},
        shards_head=True,
        uses_configured_attention=True,
    ),
    "xglm": Family(
        _FAIRSEQ_LAYERS,
        {"layers.*.self_attn": ("num_heads", "embed_dim")},
        position_modules=("embed_positions",),
        shards_head=True,
        supports_eager_sequences=True,
        attention=CustomAttention("XGLMAttention", custom_attention.attend_xglm, dropout_attribute="dropout"),
    ),
    "xlstm": Family(  # the config selects separate or fused layers; the plan lists both
        _gathered_styles("blocks.*.mlstm_layer", "out_proj", "q", "k", "v", "ogate_preact", "qkv_opreact")
        | _styles("blocks.*.ffn", "colwise", "proj_up_gate", "proj_up")
        | _styles("blocks.*.ffn", "packed_colwise", "proj_up_gate_z")
        | _styles("blocks.*.ffn", "rowwise", "proj_down"),
        {"blocks.*.ffn": ("up_proj_dim",)},
        shards_head=True,
        supports_eager_sequences=True,
    ),
    "zamba2": _zamba2,
    "zaya": Family(
        {
            **_styles("layers.*.self_attn.qkv_proj", "colwise_gather_output", "q_proj", "k_proj"),
            **_styles("layers.*.self_attn.qkv_proj", "colwise_gather_output", "v_proj_current", "v_proj_delayed"),
            "layers.*.self_attn.o_proj": "rowwise_split_input",
            "layers.*.mlp.experts": "moe_tp_experts",
            "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
            "layers.*.mlp.experts.down_proj": "rowwise",
            **_styles("layers.*", "replicate", "post_attention_residual_scale", "post_mlp_residual_scale"),
            "": "replicate",
        },
        sharded_arguments={"layers.*.mlp": ("prev_router_hidden_states",)},
        shards_head=True,
    ),
}

# Encoders, and encoders with decoders, in the layouts that they share. They support tensor parallelism only.
_BERT = (
    _styles("encoder.layer.*.attention.self", "colwise", "query", "key", "value")
    | _styles("encoder.layer.*.crossattention.self", "colwise", "query", "key", "value")
    | _styles("encoder.layer.*", "rowwise", "attention.output.dense", "crossattention.output.dense")
    | _pair_styles("encoder.layer.*", "intermediate.dense", "output.dense")
)
_VIT = _attention_styles("layers.*.attention") | _pair_styles("layers.*.mlp", "fc1", "fc2")
_DINO = _attention_styles("encoder.layer.*.attention") | _pair_styles("encoder.layer.*.mlp", "fc1", "fc2")
_CLIP = _attention_styles("encoder.layers.*.self_attn", "out_proj") | _pair_styles("encoder.layers.*.mlp", "fc1", "fc2")
_WAV2VEC2 = _attention_styles("encoder.layers.*.attention", "out_proj") | _pair_styles(
    "encoder.layers.*.feed_forward", "intermediate_dense", "output_dense"
)
_BART_LAYERS = {
    f"{part}.{name}": style
    for part in ("encoder", "decoder")
    for name, style in (_FAIRSEQ_LAYERS | _attention_styles("layers.*.encoder_attn", "out_proj")).items()
}
_BART_ATTENTIONS = ("encoder.layers.*.self_attn", "decoder.layers.*.self_attn", "decoder.layers.*.encoder_attn")
_BART = Family(_BART_LAYERS, dict.fromkeys(_BART_ATTENTIONS, ("num_heads",)))
_T5_ATTENTIONS = (
    *("encoder.block.*.layer.0.SelfAttention", "decoder.block.*.layer.0.SelfAttention"),
    "decoder.block.*.layer.1.EncDecAttention",
)
_T5_MLPS = ("encoder.block.*.layer.1.DenseReluDense", "decoder.block.*.layer.2.DenseReluDense")
_T5_PLAN: dict[str, str | None] = {}
for _name in _T5_ATTENTIONS:
    _T5_PLAN |= _styles(_name, "colwise", "q", "k", "v") | _styles(_name, "rowwise", "o")
    _T5_PLAN |= _styles(_name, "head_bias", "relative_attention_bias")
for _name in _T5_MLPS:
    _T5_PLAN |= _styles(_name, "colwise", "wi", "wi_0", "wi_1") | _styles(_name, "rowwise", "wo")
_T5 = Family(
    _T5_PLAN,
    dict.fromkeys(_T5_ATTENTIONS, ("n_heads", "inner_dim")),
    unread_parameters=tuple(f"{name}.wo.weight" for name in _T5_MLPS),  # only its dtype is read
)
FAMILIES |= {
    **dict.fromkeys(
        (
            *("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie"),
            *("roberta", "roberta-prelayernorm", "roc_bert", "xlm-roberta", "xlm-roberta-xl", "xmod"),
        ),
        Family(_BERT),
    ),
    **dict.fromkeys(
        ("megatron-bert", "rembert", "roformer"),
        Family(
            _BERT,
            dict.fromkeys(
                ("encoder.layer.*.attention.self", "encoder.layer.*.crossattention.self"),
                ("num_attention_heads", "all_head_size"),
            ),
        ),
    ),
    **dict.fromkeys(("deit", "ijepa", "vit", "vit_msn"), Family(_VIT)),
    **dict.fromkeys(("dinov2", "dinov2_with_registers"), Family(_DINO)),
    **dict.fromkeys(("clip_text_model", "clip_vision_model", "siglip_vision_model"), Family(_CLIP)),
    **dict.fromkeys(("data2vec-audio", "hubert", "unispeech", "unispeech-sat", "wav2vec2"), Family(_WAV2VEC2)),
    **dict.fromkeys(("bart", "blenderbot", "blenderbot-small", "m2m_100", "marian", "mbart", "pegasus"), _BART),
    **dict.fromkeys(("bigbird_pegasus", "plbart", "speech_to_text"), _BART),
    "mvp": Family(_BART_LAYERS, dict.fromkeys(_BART_ATTENTIONS, ("num_heads", "embed_dim"))),
    "whisper": replace(_BART, shards_head=True),
    "distilbert": Family(
        _styles("transformer.layer.*.attention", "colwise", "q_lin", "k_lin", "v_lin")
        | _styles("transformer.layer.*.attention", "rowwise", "out_lin")
        | _pair_styles("transformer.layer.*.ffn", "lin1", "lin2")
    ),
    "modernbert": Family(
        _styles("layers.*.attn", "packed_colwise_3", "Wqkv")
        | _styles("layers.*.attn", "rowwise", "Wo")
        | _styles("layers.*.mlp", "packed_colwise", "Wi")
        | _styles("layers.*.mlp", "rowwise", "Wo")
    ),
    "mpnet": Family(
        _styles("encoder.layer.*.attention.attn", "colwise", "q", "k", "v")
        | _styles("encoder.layer.*.attention.attn", "rowwise", "o")
        | _pair_styles("encoder.layer.*", "intermediate.dense", "output.dense")
        | {"encoder.relative_attention_bias": "head_bias"},
        {"encoder.layer.*.attention.attn": ("num_attention_heads", "all_head_size")},
    ),
    **dict.fromkeys(("mt5", "t5", "umt5"), _T5),
    "albert": Family(
        _styles("encoder.albert_layer_groups.*.albert_layers.*.attention", "colwise", "query", "key", "value")
        | _styles("encoder.albert_layer_groups.*.albert_layers.*.attention", "rowwise", "dense")
        | _pair_styles("encoder.albert_layer_groups.*.albert_layers.*", "ffn", "ffn_output")
    ),
}


def has_family(config: Any) -> bool:
    """True if there is an entry for the model type of `config`."""
    return getattr(config, "model_type", "") in FAMILIES


def find_family(config: Any) -> Family:
    """Return the entry for the model type of `config`; an empty Family if there is none."""
    entry = FAMILIES.get(getattr(config, "model_type", ""), Family())
    return entry if isinstance(entry, Family) else entry(config)
