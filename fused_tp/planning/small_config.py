"""Small configs of transformers' model types: few layers, at least one of each kind, fast on a CPU.

Sizes are chosen so that each mechanism changes the outputs for a short sequence: windows and selections are shorter
than the sequence, factors differ from 1, caps are below the values they cap. tests/integrations/live.py checks this for
every field.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCAB_SIZE = 128

# Values of config fields, under every name that they have in some model type. A config uses the fields that it defines.
SMALL_VALUES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embed_dim", "output_dim"), 64),
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_dim",
            "n_inner",
            "d_ff",
            "dff",
            "decoder_ffn_dim",
            "encoder_ffn_dim",
            "intermediate_size_mlp",
        ),
        128,
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "num_key_value_heads", "encoder_layers"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank", "linear_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 8),
    **dict.fromkeys(("topk_group", "bos_token_id"), 1),
    **dict.fromkeys(("n_group", "mamba_n_groups", "mamba_ngroups", "n_groups", "index_n_heads"), 2),
    # Windows, chunks and selections.
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "window_size"), 8),
    **dict.fromkeys(("keep_window_size", "local_attention", "attention_chunk_size", "index_topk"), 8),
    **dict.fromkeys(("position_bias_max_distance", "position_bias_num_buckets"), 8),
    "use_sliding_window": True,
    **dict.fromkeys(("max_window_layers", "first_k_dense_replace"), 1),
    **dict.fromkeys(("index_block_size", "index_kpool", "log_scaling_n_floor"), 4),
    "index_topk_blocks": 2,
    "index_head_dim": 16,
    # Caps of logits and of gates.
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap"), 3.0),
    **dict.fromkeys(("gate_soft_cap", "output_logit_soft_cap", "mlp_gate_softcap", "mlp_up_softcap"), 1.0),
    **dict.fromkeys(("swiglu_limit", "clip_qkv", "altup_coef_clip"), 0.5),
    **dict.fromkeys(("qk_l2_clip_threshold", "rel_l2_clip_threshold"), 3.0),
    **dict.fromkeys(("moe_router_logit_softcapping", "log_scaling_alpha"), 1.0),
    "query_pre_attn_scalar": 8,
    "time_step_limit": (0.3, 0.9),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB_SIZE),
    **dict.fromkeys(("pad_token_id", "num_nextn_predict_layers"), 0),
    "eos_token_id": 2,
    "is_decoder": True,
    "use_cache": False,
}
# Substrings of names of optional fields. A field whose default is None stays None: the model may not implement it.
OPTIONAL_SUBSTRINGS = ("softcap", "soft_cap", "n_group", "topk_group", "clip_qkv", "sliding_window")
# Substrings of names of factors. Their default is often 1, which hides a missing factor, so it is replaced.
FACTOR_SUBSTRINGS = ("multiplier", "scal", "factor", "alpha", "beta")
DEPTH_FIELDS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
RANDOM_SUBSTRINGS = ("dropout", "pdrop", "jitter")  # substrings of names of fields that enable random numbers; set to 0
MAMBA_SIZES = {"mamba_n_heads": 8, "mamba_d_head": 16}  # 8 x 16 features: twice the hidden size
# For model types that mix convolutions and attention, whose default configs have attention layers only.
CONVOLUTION_LAYERS = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}
MODEL_TYPE_VALUES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "num_hidden_layers": 2,
    },
    "bamba": {**MAMBA_SIZES, "attn_layer_indices": [1]},
    "codegen": {"num_attention_heads": 8, "n_head": 8, "rotary_dim": 4},  # two heads in each of its four qkv blocks
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"full_attention": None, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        # moe_top_k=1 would normalize the only weight to 1, so that the router has no gradient.
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v4": {
        "num_nextn_predict_layers": 0,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    },
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots3_note_text": {  # swa_*: sizes of its sliding window layers
        "num_key_value_heads": 4,
        **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 4),
        **dict.fromkeys(("swa_qk_nope_head_dim", "swa_qk_rope_head_dim"), 8),
        **dict.fromkeys(("swa_head_dim", "swa_v_head_dim", "swa_q_lora_rank", "swa_kv_lora_rank"), 16),
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": 128,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.5],
        **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank"), 8),
        "altup_num_inputs": 2,
    },
    "granitemoehybrid": {
        **MAMBA_SIZES,
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2": CONVOLUTION_LAYERS,
    "lfm2_moe": CONVOLUTION_LAYERS,
    "inkling_text": {"mlp_layer_types": ["dense", *["sparse"] * 5]},
    "llama4_text": {"floor_scale": 4, "moe_layers": [1, 3]},
    "longcat_flash": {"zero_expert_num": 4, "moe_topk": 4},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mellum": {"mlp_layer_types": ["sparse", "dense"]},
    "minimax_m3_vl_text": {
        "layer_types": ["minimax_m3_sparse", "full_attention"],
        "mlp_layer_types": ["sparse", "dense"],
    },
    "modernbert-decoder": {"local_attention": 8, "sliding_window": 4},  # the window is half of local_attention
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},  # the third layer is its first attention layer
    "xlstm": {"qk_dim_factor": 1.0},  # transformers rounds smaller factors differently in the layers and in the cache
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "zaya": {"num_experts_per_tok": 1},
}


def small_config(config_class: Any, **changes: Any) -> Any:
    """Create a config with few layers, at least one of each kind, and small sizes; `changes` override fields."""
    from transformers import PreTrainedConfig

    default_config = config_class()
    field_names = {*default_config.to_dict(), *getattr(config_class, "attribute_map", {})}
    num_layers = 2
    for value in _per_layer_lists(default_config).values():
        layer_types = [str(layer_type) for layer_type in value]
        num_layers = max([num_layers, *(layer_types.index(layer_type) + 1 for layer_type in set(layer_types))])
    num_layers = min(num_layers, 8)
    sizes = {name: value for name, value in SMALL_VALUES.items() if name in field_names} | depth_overrides(
        default_config, num_layers
    )
    default_values = default_config.to_dict()
    for name in [*sizes]:
        has_switch = name == "sliding_window" and "use_sliding_window" in field_names
        if (
            default_values.get(name, 0) is None
            and any(substring in name for substring in OPTIONAL_SUBSTRINGS)
            and not has_switch
        ):
            del sizes[name]
    for name, value in default_values.items():
        if (
            name not in sizes
            and any(substring in name for substring in FACTOR_SUBSTRINGS)
            and value == 1
            and value is not True
        ):
            sizes[name] = 0.7 if isinstance(value, float) else 2
    sized_layer_types = sizes.get("layer_types") or ()
    if "sliding_window" in sizes and {*sized_layer_types} == {"full_attention"} and sizes["sliding_window"]:
        # The default config leaves the window unused.
        sizes["layer_types"] = ["sliding_attention", *sized_layer_types[1:]]
    random_names = (
        name
        for name in field_names
        if any(substring in name for substring in RANDOM_SUBSTRINGS) and not name.startswith("is_")
    )
    random_values = {name: default_values.get(name) for name in random_names}
    sizes |= {name: type(default)(0) for name, default in random_values.items() if isinstance(default, int | float)}
    if "qk_rope_head_dim" in field_names:  # latent attention: head_dim is the size of the rotary part
        sizes |= {"head_dim": 8, "num_key_value_heads": 4}
    sizes |= MODEL_TYPE_VALUES.get(config_class.model_type, {})
    for name in config_class.sub_configs:
        sub_config = getattr(default_config, name, None)
        if name not in sizes and isinstance(sub_config, PreTrainedConfig):
            sizes[name] = small_config(type(sub_config))
    alias_targets: dict[str, str] = getattr(config_class, "attribute_map", {})
    # Drop aliases of changed fields, which could override them.
    changed_fields = {alias_targets.get(name, name) for name in changes}
    sizes = {name: value for name, value in sizes.items() if alias_targets.get(name, name) not in changed_fields}
    config: Any = config_class(**sizes, **changes)
    return config


def depth_overrides(config: Any, num_layers: int) -> dict[str, Any]:
    """Return overrides that reduce `config` to `num_layers` layers: their number, and shortened per-layer lists."""
    field_names = {*config.to_dict(), *getattr(type(config), "attribute_map", {})}
    layer_lists = {name: value[:num_layers] for name, value in _per_layer_lists(config).items()}
    return {name: num_layers for name in DEPTH_FIELDS if name in field_names} | layer_lists


def _per_layer_lists(config: Any) -> dict[str, list[Any]]:
    """Return the fields of a config that are lists with one entry per layer."""
    depth = next((getattr(config, name) for name in DEPTH_FIELDS if isinstance(getattr(config, name, None), int)), 2)
    return {name: value for name, value in config.to_dict().items() if isinstance(value, list) and len(value) == depth}


def draw_values(model: nn.Module) -> None:
    """Add noise to all parameters and persistent buffers of a small model.

    Afterwards no value is exactly 0 or 1, and projections return values of about 1. Initial values would hide errors: a
    softmax of nearly equal logits is uniform, and a cap does not affect small logits.
    """
    state = model.state_dict(keep_vars=True)
    buffers = [t for name, t in model.named_buffers() if name in state]
    with torch.no_grad():
        for t in (*model.parameters(), *buffers):
            if t.is_floating_point():
                t.add_(torch.randn_like(t), alpha=0.2 if t.ndim < 2 else t.shape[-1] ** -0.5)
