"""Plan features of single families other than styles; test_model_types covers every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fused_tp.parallelizing.parallelize import parallelize
from tests.integrations.models import (
    assert_near,
    assert_same_calls,
    assert_states_travel,
    assert_trains_alike,
    assert_trains_checkpointed,
    copy_of,
    make_tokens,
    mesh_of,
)
from tests.integrations.sweep import make_model, small_config
from tests.reference import refuses
from tests.workers import on_ranks

pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")

# Base models that embed the whole sequence, and blocks that receive two sharded tensors: a norm between layers.
IN_PARTS = {"ctrl": "transformer.h.1.layernorm1", "zaya": "model.layers.1.input_layernorm"}


@on_ranks(2)
@pytest.mark.parametrize("kind", IN_PARTS)
def test_parts_of_any_length(group: dist.ProcessGroup, kind: str) -> None:
    whole = make_model(kind)
    parallel = parallelize(copy_of(whole), mesh_of(group, 1, 2), sequence_parallel=True)
    lengths: list[int] = []
    norm = parallel.get_submodule(IN_PARTS[kind])
    norm.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    for length in (9, 2):
        tokens = make_tokens(2, length)
        assert_same_calls(parallel, whole, tokens, tokens)
        whole.zero_grad()
        parallel.zero_grad()
    assert lengths == ([5, 5, 1, 1] if dist.get_rank(group) == 0 else [4, 4, 1, 1])
    if whole.supports_gradient_checkpointing:
        assert_trains_checkpointed(parallel, whole)


@on_ranks(2)
def test_fewer_tokens_than_ranks(group: dist.ProcessGroup) -> None:
    """The pass is not sharded: a rank without tokens would fail in the model's code while the other waits for it."""
    whole = make_model("deepseek_v4")
    parallel = parallelize(copy_of(whole), mesh_of(group, 1, 2), sequence_parallel=True)
    tokens = make_tokens(2, 1)
    assert_near(parallel(input_ids=tokens).logits, whole(input_ids=tokens).logits, "logits")


@on_ranks(4)
def test_embeddings_of_the_whole_sequence(group: dist.ProcessGroup) -> None:
    """Embeddings that are passed in receive their gradient; a context parallel shard is sharded again."""
    whole = make_model("ctrl")
    parallel = parallelize(copy_of(whole), mesh_of(group, 2, 2), sequence_parallel=True)
    tokens = make_tokens(2, 9)
    assert_trains_alike(parallel, whole, lambda model: model(input_ids=tokens, labels=tokens).loss)
    given = [torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(3)).requires_grad_() for _ in range(2)]
    for model, x in zip((whole, parallel), given, strict=True):
        model(inputs_embeds=x * 1.0, labels=tokens).loss.backward()
    assert_near(given[1].grad, given[0].grad, "gradient of the embeddings")


@on_ranks(2)
@pytest.mark.parametrize("kind", ["modernbert-decoder", "moshi", "zamba2", "zaya"])
def test_states(group: dist.ProcessGroup, kind: str, tmp_path: Path) -> None:
    assert_states_travel(group, make_model(kind), tmp_path)


@on_ranks(2)
@pytest.mark.parametrize(("kind", "dim", "cache"), [("mamba2", "cp", "cache_params"), ("rwkv", "tp", "state")])
def test_a_state_that_is_given_is_a_cache(group: dist.ProcessGroup, kind: str, dim: str, cache: str) -> None:
    """A state that is passed in counts as a cache even without use_cache: the tokens follow those that it holds."""
    whole = make_model(kind).eval()
    mesh = mesh_of(group, 2, 1) if dim == "cp" else mesh_of(group, 1, 2)
    parallel = parallelize(copy_of(whole), mesh, sequence_parallel=dim == "tp")
    first, following = make_tokens(2, 8), make_tokens(2, 4)
    logits = []
    with torch.no_grad():
        for model in (whole, parallel):
            state = getattr(model(input_ids=first, use_cache=True), cache)
            logits.append(model(input_ids=following, **{cache: state}).logits)
    assert_near(logits[1], logits[0], "logits of the tokens that follow")


def images(whole: Any, tokens: Tensor) -> dict[str, Tensor]:
    batch, seq = tokens.shape
    return {
        "pixel_values": torch.randn(batch, 1, 2, 3, 28, 28, generator=torch.Generator().manual_seed(5)),
        "aspect_ratio_ids": torch.ones(batch, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(batch, 1, 2, dtype=torch.long),
        "cross_attention_mask": torch.ones(batch, seq, 1, 2, dtype=torch.long),
    }


@on_ranks(2)
def test_attention_to_images(group: dist.ProcessGroup) -> None:
    from transformers import MllamaConfig, MllamaForCausalLM, MllamaForConditionalGeneration
    from transformers.models.mllama.configuration_mllama import MllamaTextConfig, MllamaVisionConfig

    text = small_config(MllamaTextConfig, num_hidden_layers=2, cross_attention_layers=[1])
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_global_layers": 1}
    sizes |= {"attention_heads": 4, "image_size": 28, "patch_size": 14, "max_num_tiles": 2, "vision_output_dim": 64}
    vision = MllamaVisionConfig(**sizes, intermediate_layers_indices=[0], supported_aspect_ratios=[[1, 1], [1, 2]])
    torch.manual_seed(0)
    whole = MllamaForConditionalGeneration(MllamaConfig(vision_config=vision, text_config=text, image_token_index=3))
    with torch.no_grad():
        for parameter in whole.parameters():  # gates of zero would hide the branch behind them
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    mesh, tokens = mesh_of(group, 1, 2), make_tokens(2, 9)
    parallel = parallelize(copy_of(whole), mesh)
    assert_same_calls(parallel, whole, tokens, tokens, **images(whole, tokens))
    refuses(
        ValueError, "supports only these. Omit sequence_parallel=True", parallelize, whole, mesh, sequence_parallel=True
    )
    parallel = parallelize(MllamaForCausalLM(text), mesh, sequence_parallel=True)
    states = {"cross_attention_states": torch.randn(2, 5, 64)}
    refuses(ValueError, "'.*k_proj' received another tensor. Pass", parallel, input_ids=tokens, **states)


@on_ranks(2)
def test_a_language_model_inside(group: dist.ProcessGroup) -> None:
    """BLIP-2 uses the plan of OPT for its language model, whose base model is two modules below."""
    from transformers import Blip2Config, Blip2ForConditionalGeneration, OPTConfig

    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Blip2Config(
        vision_config={**tower, "image_size": 28, "patch_size": 14},
        qformer_config={**tower, "encoder_hidden_size": 16},
        text_config=small_config(OPTConfig),
        num_query_tokens=3,
        image_token_index=66,
    )
    torch.manual_seed(0)
    whole = Blip2ForConditionalGeneration(config).eval()
    parallel = parallelize(copy_of(whole), mesh_of(group, 1, 2))
    layer = parallel.get_submodule("language_model.model.decoder.layers.0")
    cut = {name for name, p in layer.named_parameters() if p.placements[0].is_shard()}
    assert cut >= {"self_attn.q_proj.weight", "self_attn.out_proj.weight", "fc1.weight", "fc2.weight"}
    tokens = torch.tensor([[66, 66, 66, 4, 5, 6, 7, 8, 9]])
    pixels = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(1))
    assert_trains_alike(parallel, whole, lambda model: model(input_ids=tokens, labels=tokens, pixel_values=pixels).loss)


@on_ranks(2)
def test_heads_by_other_names(group: dist.ProcessGroup) -> None:
    sizes = {"hidden_size": 48, "num_attention_heads": 3}
    for kind, more in (
        ("cpmant", {}),
        ("ctrl", {"n_embd": 48, "n_head": 3}),
        ("moshi", {"num_key_value_heads": 3}),
    ):
        model = make_model(kind, **sizes, **more)
        parallel, tokens = parallelize(copy_of(model), mesh_of(group, 1, 2)), make_tokens(2, 9)
        with torch.no_grad():
            assert_near(parallel.eval()(tokens).logits, model.eval()(tokens).logits, f"logits of {kind}")
