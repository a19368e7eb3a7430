"""Model families of the tests, by transformers' model type, and their own small sizes. The documentation lists them."""

from __future__ import annotations

from typing import Any

FAMILIES = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mistral": "Mistral",
    "gemma2": "Gemma2",
    "gpt_oss": "GptOss",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3Moe",
    "deepseek_v3": "DeepseekV3",
    "llama4_text": "Llama4",
    "granite_swa": "GraniteSWA",
    "bamba": "Bamba",
    "granitemoehybrid": "GraniteMoeHybrid",
    "kimi_linear": "KimiLinear",
    "lfm2": "Lfm2",
    "mamba2": "Mamba2",
    "qwen3_next": "Qwen3Next",
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 6, "mamba_n_groups": 2, "mamba_chunk_size": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Windows are shorter than the tests' sequences. Gemma 2's sizes make its caps change the scores.
OWN_SIZES: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "gemma2": {
        "attn_implementation": "eager",
        "sliding_window": 4,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 5,
    },
    "gpt_oss": {"attn_implementation": "eager", "sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": EXPERTS,
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 48, "attention_chunk_size": 64},
    "granite_swa": {
        "attn_implementation": "eager",
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **MAMBA,
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 4,
        "shared_intermediate_size": 24,
    },
    "kimi_linear": {
        **EXPERTS,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "num_key_value_heads": 4,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 5},
    "mamba2": {
        "attn_implementation": "eager",
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 6,
        "n_groups": 2,
        "chunk_size": 4,
    },
    "qwen3_next": {
        **EXPERTS,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_conv_kernel_dim": 3,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
        "shared_expert_intermediate_size": 24,
    },
}
