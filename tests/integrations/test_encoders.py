"""Encoders, and encoders with decoders, of text, images and sound over tensor parallel ranks."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fused_tp.parallelizing.parallelize import parallelize
from fused_tp.planning.small_config import draw_values
from tests.integrations.models import assert_near, assert_same_gradients, copy_of, mesh_of
from tests.reference import refuses
from tests.workers import on_ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")

QUICK = ("bert", "modernbert", "vit", "whisper", "t5", "bart")
OTHERS = (
    *("albert", "camembert", "data2vec-text", "distilbert", "electra", "ernie", "mpnet", "roberta"),
    *("roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "clip_text_model"),
    *("deit", "dinov2", "dinov2_with_registers", "ijepa", "vit_msn", "clip_vision_model", "siglip_vision_model"),
    *("data2vec-audio", "hubert", "unispeech", "unispeech-sat", "wav2vec2", "speech_to_text"),
    *("blenderbot", "blenderbot-small", "m2m_100", "marian", "mbart", "mt5", "pegasus", "plbart", "umt5"),
)
# By the names that one or another config has. No dropout: its random numbers depend on the number of ranks.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "dim"), 32),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "hidden_dim", "d_ff"), 48),
    **dict.fromkeys(("num_hidden_layers", "encoder_layers", "decoder_layers", "n_layers"), 2),
    **dict.fromkeys(("num_layers", "num_decoder_layers", "num_feat_extract_layers", "global_attn_every_n_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("n_heads", "num_heads"), 4),
    "decoder_ffn_dim": 40,
    "d_kv": 8,
    "vocab_size": 67,
    "embedding_size": 16,
    "image_size": 32,
    "patch_size": 8,
    "num_mel_bins": 8,
    "input_feat_per_channel": 8,
    "local_attention": 6,
    "max_position_embeddings": 40,
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "max_source_positions": 20,
    "max_target_positions": 30,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "cls_token_id": 1,
    "decoder_start_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 2,
    "activation_function": "gelu",
    "apply_spec_augment": False,
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout"), 0.0),
    **dict.fromkeys(("activation_dropout", "hidden_dropout", "feat_proj_dropout", "final_dropout"), 0.0),
    **dict.fromkeys(("embedding_dropout", "mlp_dropout", "dropout_rate", "drop_path_rate", "mask_time_prob"), 0.0),
    **dict.fromkeys(("qa_dropout", "layerdrop", "encoder_layerdrop", "decoder_layerdrop", "classifier_dropout"), 0.0),
}


def make_encoder(kind: str, auto_class: str = "AutoModel") -> Any:
    config_class = transformers.CONFIG_MAPPING[kind]
    names = {*config_class().to_dict(), *getattr(config_class, "attribute_map", {})}
    config = config_class(**{name: value for name, value in SIZES.items() if name in names})
    if config.is_encoder_decoder:
        config.decoder_start_token_id = 1
    torch.manual_seed(0)
    model = getattr(transformers, auto_class).from_config(config)
    torch.manual_seed(1)
    draw_values(model)
    # In float64, because the gradient of a key's bias is a sum of terms that cancel.
    return model.double().train()


def inputs_of(model: Any, kind: str) -> dict[str, Tensor]:
    torch.manual_seed(2)
    ids = torch.randint(3, 60, (2, 11))
    values = {
        "pixel_values": torch.randn(2, 3, 32, 32).double(),
        "input_values": torch.randn(2, 800).double(),
        "input_features": torch.randn((2, 8, 40) if kind == "whisper" else (2, 40, 8)).double(),
        "input_ids": ids,
    }
    inputs = {model.main_input_name: values[model.main_input_name]}
    if "input_ids" in inputs:
        inputs["attention_mask"] = torch.ones_like(ids).index_fill_(1, torch.arange(8, 11), 0)
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        inputs["decoder_input_ids"] = ids[:, :7]
    return inputs


def loss_of(output: Any) -> Tensor:
    floats = [t for t in output.values() if isinstance(t, Tensor) and t.is_floating_point()]
    total = sum((t * torch.sin(torch.arange(t.numel()).view(t.shape) * 0.7)).sum() for t in floats)
    assert isinstance(total, Tensor)
    return total / 10


@pytest.mark.parametrize("kind", [*QUICK, *(pytest.param(kind, marks=pytest.mark.full) for kind in OTHERS)])
@on_ranks(2)
def test_outputs_and_gradients(group: dist.ProcessGroup, kind: str) -> None:
    whole = make_encoder(kind)
    parallel = parallelize(copy_of(whole), mesh_of(group, 1, 2))
    losses = [loss_of(model(**inputs_of(whole, kind))) for model in (whole, parallel)]
    assert_near(losses[1], losses[0], "loss", least=1.0)
    for loss in losses:
        loss.backward()
    for model in (whole, parallel):  # of parameters that the call does not use
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    assert_same_gradients(parallel, whole)


@pytest.mark.parametrize(
    ("kind", "auto_class"),
    [
        ("bert", "AutoModelForMaskedLM"),
        ("roberta", "AutoModelForSequenceClassification"),
        ("vit", "AutoModelForImageClassification"),
        ("t5", "AutoModelForSeq2SeqLM"),
        pytest.param("electra", "AutoModelForTokenClassification", marks=pytest.mark.full),
        pytest.param("bart", "AutoModelForSeq2SeqLM", marks=pytest.mark.full),
        pytest.param("distilbert", "AutoModelForQuestionAnswering", marks=pytest.mark.full),
    ],
)
@on_ranks(2)
def test_heads_and_losses(group: dist.ProcessGroup, kind: str, auto_class: str) -> None:
    whole = make_encoder(kind, auto_class)
    parallel = parallelize(copy_of(whole), mesh_of(group, 1, 2))
    inputs = inputs_of(whole, kind)
    inputs.pop("decoder_input_ids", None)
    if auto_class.endswith("QuestionAnswering"):
        inputs |= {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])}
    else:
        is_for_tokens = auto_class.endswith(("LM", "TokenClassification"))
        inputs["labels"] = inputs["input_ids"] % 2 if is_for_tokens else torch.tensor([0, 1])
    losses = [model(**inputs).loss for model in (whole, parallel)]
    assert_near(losses[1], losses[0], "loss")
    for loss in losses:
        loss.backward()
    for model in (whole, parallel):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    assert_same_gradients(parallel, whole)
    if auto_class == "AutoModelForSeq2SeqLM":
        tokens = [m.eval().generate(inputs["input_ids"], max_new_tokens=6, do_sample=False) for m in (whole, parallel)]
        assert torch.equal(*tokens)


@pytest.mark.parametrize("kind", ["bart", "t5", "whisper"])
@on_ranks(2)
def test_sequences_of_encoders_with_decoders_are_refused(group: dist.ProcessGroup, kind: str) -> None:
    model = make_encoder(kind)
    before = {name: type(module) for name, module in model.named_modules()}
    refuses(ValueError, "encoder with a decoder.*not a cp_dim", parallelize, model, mesh_of(group, 2, 1))
    says = "encoder with a decoder.*not sequence_parallel=True"
    refuses(ValueError, says, parallelize, model, mesh_of(group, 1, 2), sequence_parallel=True)
    assert before == {name: type(module) for name, module in model.named_modules()}
