"""Small configs of transformers' model types: few layers, at least one of each kind, fast on a CPU.

Sizes are chosen so that each mechanism changes the outputs for a short sequence: windows and selections are shorter
than the sequence, factors differ from 1, caps are below the values they cap. tests/integrations/live.py checks this for
every field.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCABULARY = 128

# Values of config fields, under every name that they have in some model type. A config uses the fields that it defines.
SMALL: dict[str, Any] = {
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
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("pad_token_id", "num_nextn_predict_layers"), 0),
    "eos_token_id": 2,
    "is_decoder": True,
    "use_cache": False,
}
# Substrings of names of optional fields. A field whose default is None stays None: the model may not implement it.
OPTIONAL = ("softcap", "soft_cap", "n_group", "topk_group", "clip_qkv", "sliding_window")
FACTORS = ("multiplier", "scal", "factor", "alpha", "beta")  # substrings of names of factors whose default is often 1
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
RANDOM = ("dropout", "pdrop", "jitter")  # substrings of names of fields that enable random numbers; set to 0
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16}  # 8 x 16 features: twice the hidden size
CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}  # default: only attention
OWN_SIZES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "num_hidden_layers": 2,
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
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
        **MAMBA,
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": CONVOLUTIONS,
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


def small_config(kind_of_config: Any, **changes: Any) -> Any:
    """Create a config with few layers, at least one of each kind, and small sizes; `changes` override fields."""
    from transformers import PreTrainedConfig

    usual = kind_of_config()
    known = {*usual.to_dict(), *getattr(kind_of_config, "attribute_map", {})}
    layers = 2
    for value in _lists_of_layers(usual).values():
        words = [str(one) for one in value]
        layers = max([layers, *(words.index(word) + 1 for word in set(words))])
    layers = min(layers, 8)
    sizes = {name: value for name, value in SMALL.items() if name in known} | at_depth(usual, layers)
    values = usual.to_dict()
    for name in [*sizes]:
        switched_on = name == "sliding_window" and "use_sliding_window" in known
        if values.get(name, 0) is None and any(part in name for part in OPTIONAL) and not switched_on:
            del sizes[name]
    for name, value in values.items():
        if name not in sizes and any(part in name for part in FACTORS) and value == 1 and value is not True:
            sizes[name] = 0.7 if isinstance(value, float) else 2
    kinds = sizes.get("layer_types") or ()
    if "sliding_window" in sizes and {*kinds} == {"full_attention"} and sizes["sliding_window"]:
        sizes["layer_types"] = ["sliding_attention", *kinds[1:]]  # the default config leaves the window unused
    random = (name for name in known if any(part in name for part in RANDOM) and not name.startswith("is_"))
    drawn = {name: values.get(name) for name in random}
    sizes |= {name: type(number)(0) for name, number in drawn.items() if isinstance(number, int | float)}
    if "qk_rope_head_dim" in known:  # latent attention: head_dim is the size of the rotary part
        sizes |= {"head_dim": 8, "num_key_value_heads": 4}
    sizes |= OWN_SIZES.get(kind_of_config.model_type, {})
    for name in kind_of_config.sub_configs:
        part = getattr(usual, name, None)
        if name not in sizes and isinstance(part, PreTrainedConfig):
            sizes[name] = small_config(type(part))
    own_name: dict[str, str] = getattr(kind_of_config, "attribute_map", {})
    changed = {
        own_name.get(name, name) for name in changes
    }  # drop aliases of changed fields, which could override them
    sizes = {name: value for name, value in sizes.items() if own_name.get(name, name) not in changed}
    made: Any = kind_of_config(**sizes, **changes)
    return made


def at_depth(config: Any, layers: int) -> dict[str, Any]:
    """Return overrides that reduce `config` to `layers` layers: the number of layers, and shortened per-layer lists."""
    known = {*config.to_dict(), *getattr(type(config), "attribute_map", {})}
    lists = {name: value[:layers] for name, value in _lists_of_layers(config).items()}
    return {name: layers for name in DEPTHS if name in known} | lists


def _lists_of_layers(config: Any) -> dict[str, list[Any]]:
    """Return the fields of a config that are lists with one entry per layer."""
    depth = next((getattr(config, name) for name in DEPTHS if isinstance(getattr(config, name, None), int)), 2)
    return {name: value for name, value in config.to_dict().items() if isinstance(value, list) and len(value) == depth}


def draw_values(model: nn.Module) -> None:
    """Add noise to all parameters and persistent buffers of a small model.

    Afterwards no value is exactly 0 or 1, and projections return values of about 1. Initial values would hide errors: a
    softmax of nearly equal logits is uniform, and a cap does not affect small logits.
    """
    held = model.state_dict(keep_vars=True)
    buffers = [t for name, t in model.named_buffers() if name in held]
    with torch.no_grad():
        for t in (*model.parameters(), *buffers):
            if t.is_floating_point():
                t.add_(torch.randn_like(t), alpha=0.2 if t.ndim < 2 else t.shape[-1] ** -0.5)
