"""Self-check of the small models that the sweep compares: fields of their configs and parameters that do nothing.

    python -m tests.integrations.live --out out/live [llama gpt_oss ...]

The sweep does not test a mechanism that does nothing in a small model, such as a window longer than the sequence. So
this check changes each field as little as possible (a number by one, a flag, the kinds of two layers); the logits of
the whole model, with the same parameters, must change. A field is also live if changing it changes names or shapes of
parameters, or if the config or the model refuses the change. A parameter is live if it has a gradient or if logits
depend on it (an indexer selects without a gradient).
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fused_tp.planning.small_config import VOCAB_SIZE, small_config
from tests.integrations.sweep import TOKENS, all_kinds, make_model

CHANGE = 1e-3  # of the largest logit; an error below that could pass as rounding
# Names of fields that configure no mechanism in the forward pass of tokens.
OTHERS = (
    r".*_token_ids?|.*_token_index|.*_idx|.*_token_type.*|mask_token.*|.*layerdrop|.*dropout.*|.*pdrop.*|.*jitter.*",
    r"initializer.*|.*init_std|.*init_(scale|range|method).*|init_std|.*_init|.*time_step_.*|rescale.*|.*initializer.*",
    r".*eps|.*epsilon|use_cache|output_.*|return_dict|dtype|torch_dtype|model_type|architectures|_.*|transformers_.*",
    r"linear_(a_log|dt)_.*|model_max_length|.*no_repeat_ngram_size|lambda_std_dev|id2label|label2id|num_labels|problem_type|chunk_size_feed_forward|is_encoder_decoder|tokenizer_class|bad_words.*",
    # transformers expands these into lists with one entry per layer, which the small config sets itself.
    r"first_k_dense_replace|layer_group_size|max_window_layers|.*_layers?_(interval|period|offset|step)|.*_pattern",
    r"global_attn_every_n_layers|moe_layers|full_attn_idxs|.*attn_every.*|num_attention_heads_per_layer",
    # Not used by transformers, or by kernels only.
    r"num_nextn_predict_layers|mtp_.*|(mamba_)?chunk_size|use_associative_scan|use_mambapy|residual_in_fp32|.*_in_fp32",
    r"tie_word_embeddings|max_position_embeddings|n_positions|max_seq_len|num_logits_to_keep|mamba_expand|summary_.*|.*aux_loss.*|.*loss_(coef|weight).*|pretraining_tp|.*use_.*kernels?|name_or_path|.*z_loss.*",
)
# Fields of single types that change nothing here, with the reason.
SCALED = "a norm follows, or the scores add up to 1 already"
UNREAD = "the model of transformers does not read it"
OFF = "of what its usual config leaves off; test_model_types.py has some of that"
DERIVED = "made of, or into, another field"
NGRAMS = (
    *("heads_per_ngram", "make_ngram_vocab_size_divisible_by", "ngram_size", "ngram_vocab_size_base", "seed"),
    *("number_of_conv_states", "ple_conv_kernel_size", "ple_embed_dim", "split_ngram_parts"),
)
INERT: dict[str, dict[str, str]] = {
    "beam": {"norm_topk_prob": SCALED, "routed_scaling_factor": SCALED},
    "big_bird": {"block_size": OFF, "num_random_blocks": OFF},
    "bloom": {"slow_but_exact": OFF},
    "codegen": {"n_ctx": UNREAD},
    "cohere2_moe": {"norm_topk_prob": SCALED},
    "dbrx": {"num_key_value_heads": DERIVED},
    "deepseek_v2": {"norm_topk_prob": UNREAD},
    "deepseek_v32": {"mlp_bias": UNREAD},
    "deepseek_v4": {
        **dict.fromkeys(("attention_bias", "n_shared_experts", "norm_topk_prob", "num_key_value_heads"), UNREAD),
        "hc_sinkhorn_iters": "has converged",
        "rope_theta": DERIVED,
    },
    "doge": dict.fromkeys(("norm_topk_prob", "num_experts", "num_experts_per_tok"), OFF),
    "dots3_note_text": {"mlp_bias": UNREAD, "head_dim": DERIVED},
    "ernie": {"task_type_vocab_size": OFF},
    "ernie4_5_moe": {"moe_norm_min": "a floor of what is above it"},
    "falcon": {"num_kv_heads": OFF},
    "falcon_h1": {"mamba_norm_before_gate": OFF},
    "falcon_mamba": {"expand": DERIVED},
    "flex_olmo": {"norm_topk_prob": SCALED},
    "fuyu": {"image_size": "of images"},
    "gemma3": {"mm_tokens_per_image": "of images"},
    "gemma4": dict.fromkeys(
        [f"text_config.{one}" for one in ("moe_intermediate_size", "num_experts", "use_double_wide_mlp")], OFF
    ),
    "gemma4_text": dict.fromkeys(("moe_intermediate_size", "num_experts", "use_double_wide_mlp"), OFF),
    "gemma4_unified": {"text_config.use_double_wide_mlp": OFF},
    "gemma4_unified_text": {"use_double_wide_mlp": OFF},
    "glm_moe_dsa": {"mlp_bias": UNREAD},
    "got_ocr2": {"image_seq_length": "of images"},
    "gpt-sw3": {"reorder_and_upcast_attn": "of eager attention alone"},
    "gpt2": {"reorder_and_upcast_attn": "of eager attention alone"},
    "gpt_bigcode": {"num_key_value_heads": DERIVED},
    "gpt_neo": {"attention_types": DERIVED},
    "gpt_neox": {"is_decoder": UNREAD},
    "gpt_neox_japanese": {"is_decoder": UNREAD},
    "gpt_oss": {"hidden_act": UNREAD},
    "granite_swa": {"rope_parameters": DERIVED},
    "granitemoe_swa": {"rope_parameters": DERIVED},
    "granitemoehybrid": {"rope_parameters": OFF},
    "hrm_text": {"L_bp_cycles": "of the backward pass", "prefix_lm": OFF},
    "hy_v3": {"enable_moe_fp32_combine": "rounding"},
    "inkling2_text": {"hidden_act": UNREAD, "unpadded_vocab_size": "a slice of the logits that takes all of them"},
    "inkling_text": {
        "shared_expert_sink": OFF,
        **dict.fromkeys(("chain_hidden_post_norm", "number_of_conv_states", "rms_norm_eps_moe_gate"), UNREAD),
    },
    "jetmoe": {"num_attention_heads": DERIVED},
    "laguna": {"num_attention_heads": DERIVED},
    "lfm2": {"block_ffn_dim_multiplier": DERIVED, "intermediate_size": DERIVED},
    "mamba": {"expand": DERIVED},
    "minimax_m3_vl_text": {"hidden_act": UNREAD, "rotary_dim": DERIVED},
    "mllama": {"text_config.cross_attention_layers": "of images"},
    "modernbert-decoder": {"local_attention": DERIVED},
    "moshi": dict.fromkeys(("audio_vocab_size", "num_codebooks", "sliding_window"), UNREAD),
    "moss_transcribe_diarize": dict.fromkeys(("audio_chunk_size", "projector_hidden_act"), "of sounds"),
    "mpt": dict.fromkeys(("embedding_fraction", "expansion_ratio", "learned_pos_emb", "no_bias"), UNREAD),
    "nemotron_h": dict.fromkeys(
        ("attention_bias", "expand", "mamba_proj_bias", "moe_shared_expert_overlap", "n_shared_experts"), UNREAD
    ),
    "phi3": {"original_max_position_embeddings": OFF},
    "phi4_multimodal": {"original_max_position_embeddings": OFF},
    "phimoe": {"num_experts_per_tok": UNREAD},
    "qwen2_moe": {"intermediate_size": OFF},
    "qwen3_moe": {"intermediate_size": OFF},
    "qwen3_next": {"intermediate_size": OFF},
    "qwen4_exp": {f"text_config.{name}": OFF for name in NGRAMS},
    "qwen4_exp_text": dict.fromkeys(NGRAMS, OFF),
    "recurrent_gemma": dict.fromkeys(("final_w_init_variance_scale", "w_init_variance_scale"), "initialization"),
    "rwkv": {"context_length": UNREAD},
    "smollm3": {"use_sliding_window": DERIVED},
    "xlm": dict.fromkeys(
        ("end_n_top", "lang_id", "mask_index", "sinusoidal_embeddings", "start_n_top", "unk_index", "use_lang_emb"), OFF
    ),
    "xlnet": dict.fromkeys(
        ("clamp_len", "end_n_top", "mem_len", "same_length", "start_n_top", "use_mems_eval", "use_mems_train"), OFF
    ),
    "xlstm": dict.fromkeys(
        ("add_out_norm", "max_inference_chunksize", "norm_reduction_force_float32", "return_last_states"), UNREAD
    ),
    "zamba2": {
        **dict.fromkeys(("kv_channels", "num_query_groups", "use_conv_bias", "use_mem_eff_path"), UNREAD),
        **dict.fromkeys(("num_mem_blocks", "rope_parameters", "use_long_context"), OFF),
    },
}
LATENT = {"head_dim", "num_key_value_heads", "qk_head_dim"}  # latent attention does not use these
# Parameters that tokens alone do not reach, and buffers that are recomputed or hold a tiny constant.
UNSEEN = r".*(vision|audio|image|multi_modal|encoder_attn|pooler|act_fn\.eps|slope_rate|query_decay|key_decay).*"
ACTIVATIONS = ("silu", "relu", "gelu")


def candidates(value: Any) -> Iterator[tuple[int, Any]]:
    """Yield (order, other value) for a field with `value`. Order 0: as little as possible; order 1: larger changes,
    tried if none of order 0 runs."""
    if isinstance(value, bool):
        yield 0, not value
    elif isinstance(value, int):
        yield from ((0, other) for other in (value - 1, value + 1) if other >= 0)
        yield from ((1, other) for other in (value * 2, value // 2) if other > 0)
    elif isinstance(value, float):
        yield from ((0, other) for other in ((value * 1.5, value * 0.6) if value else (0.5, 1.0)))
    elif isinstance(value, str) and value.removesuffix("_new") in (*ACTIVATIONS, "gelu_pytorch_tanh", "swish", "relu2"):
        yield from ((0, one) for one in ACTIVATIONS if one != value)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if not is_other(str(key)):
                yield from ((order, {**value, key: other}) for order, other in candidates(inner))
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            others = [one for one in value if one != inner]
            if isinstance(inner, str) and others:
                yield 0, [*value[:i], others[0], *value[i + 1 :]]
            elif not isinstance(inner, str):
                yield from ((order, [*value[:i], other, *value[i + 1 :]]) for order, other in candidates(inner))


def is_other(name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in OTHERS)


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    torch.manual_seed(0)  # for layers that draw random numbers
    with torch.no_grad():
        made: Tensor = model(input_ids=tokens).logits
    return made


def differ(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return True
    return not bool((one - other).abs().max() <= CHANGE * other.abs().max())


def inert_fields(kind: str, whole: Any, tokens: Tensor, names: list[str] | None, given: dict[str, Any]) -> list[str]:
    """Fields of the small config of that type that change nothing; fields of nested configs as dotted names."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    expected, held = logits_of(whole, tokens), whole.state_dict()
    shapes = {name: t.shape for name, t in held.items()}

    def changes(path: tuple[str, ...], value: Any) -> bool:
        config = small_config(CONFIG_MAPPING[kind], **given | nested(CONFIG_MAPPING[kind], path, value))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        if {name: t.shape for name, t in model.state_dict().items()} != shapes:
            return True
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(config)
        model.load_state_dict(held)
        return differ(logits_of(model.float().train(), tokens), expected)

    found = []
    kind_of_config = CONFIG_MAPPING[kind]
    inside = [name for name, one in kind_of_config.sub_configs.items() if one is type(whole.config)]
    latent = LATENT if getattr(whole.config, "kv_lora_rank", None) else set()
    for path, value in fields(whole.config, () if type(whole.config) is kind_of_config else (*inside[:1],)):
        name = ".".join(path)
        if (names is not None and name not in names) or path[-1] in latent or name in INERT.get(kind, {}):
            continue
        ran = set()  # orders of the values that ran
        live = refused = False
        for order, other in candidates(value):
            if live or (order and 0 in ran):
                break
            try:
                live |= changes(path, other)
                ran.add(order)
            except Exception:
                refused = True
        if ran and not live:
            found.append(name)
        elif not ran and not refused:
            continue  # a name or None: nothing to change
    return found


def nested(kind: Any, path: tuple[str, ...], value: Any) -> dict[str, Any]:
    if len(path) == 1:
        return {path[0]: value}
    part = kind.sub_configs[path[0]]
    return {path[0]: small_config(part, **nested(part, path[1:], value))}


def fields(config: Any, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    from transformers import PreTrainedConfig

    text = config.get_text_config()
    for name, value in sorted(config.to_dict().items()):
        value = getattr(config, name, None) if isinstance(value, dict) else value
        if isinstance(value, PreTrainedConfig):
            if value is text:
                yield from fields(value, (*before, name))
        elif not is_other(name):
            yield (*before, name), value


def inert_parameters(whole: Any, tokens: Tensor) -> list[str]:
    """Parameters, and buffers that checkpoints hold, that neither have a gradient nor change logits."""
    model = copy.deepcopy(whole)
    model(input_ids=tokens, labels=tokens).loss.backward()
    expected = logits_of(model, tokens)
    found = []
    for name, t in (*model.named_parameters(), *persistent_buffers(model)):
        if not t.is_floating_point() or re.fullmatch(UNSEEN, name) or (t.grad is not None and bool(t.grad.any())):
            continue
        held = t.detach().clone()
        live = False
        for seed in range(4):
            torch.manual_seed(seed)
            with torch.no_grad():
                t.copy_(torch.randn_like(t))
                live |= not torch.equal(logits_of(model, tokens), expected)
                t.copy_(held)
            if live:
                break
        if not live:
            found.append(name)
    return found


def persistent_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    held = model.state_dict(keep_vars=True)
    return [(name, t) for name, t in model.named_buffers() if name in held]


def inert(kind: str, names: list[str] | None = None, **changes: Any) -> dict[str, list[str]]:
    """Fields (all, or those in `names`) and parameters that do nothing in the small model of that type, with `changes`
    applied to its config."""
    torch.manual_seed(2)
    tokens = torch.randint(3, VOCAB_SIZE, TOKENS)
    try:
        whole = make_model(kind, **changes)
        whole(input_ids=tokens, labels=tokens)
    except Exception as error:
        return {"alone": [f"{type(error).__name__}: {error}"[:200]]}
    fields_found = inert_fields(kind, whole, tokens, names, changes)
    return {"fields": fields_found, "parameters": inert_parameters(whole, tokens)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Fields and parameters of the sweep's small models that do nothing.")
    parser.add_argument("kinds", nargs="*", help="model types, such as llama; all of them where none is given")
    parser.add_argument("--out", type=Path, required=True, help="folder for inert.json")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    found = {}
    for kind in chosen.kinds or all_kinds():
        found[kind] = inert(kind)
        print(kind, json.dumps(found[kind]), flush=True)
        (chosen.out / "inert.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
