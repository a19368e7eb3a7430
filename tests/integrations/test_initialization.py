"""Parallel transformers models that are initialised, resized, quantized or assigned to after parallelize."""

from __future__ import annotations

import copy
import pickle
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fused_tp.nn import gather_state_dict
from fused_tp.parallelizing.parallelize import parallelize
from tests.integrations.models import assert_near, copy_of, make, make_tokens, mesh_of
from tests.reference import refuses
from tests.workers import on_ranks

pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")


def assert_initialises_alike(group: dist.ProcessGroup, family: str, parameters: str) -> None:
    with torch.device("meta"):
        parallel = make(family)
    whole = copy.deepcopy(parallel).to_empty(device="cpu")
    whole.tie_weights()
    parallelize(parallel, mesh_of(group, 1, 2), parameters=parameters)
    assert not any(t.isfinite().any() for t in gather_state_dict(parallel).values() if t.is_floating_point())
    tokens = make_tokens(2, 9)
    refuses(ValueError, "built on the meta device, and .* have no values", parallel, tokens)
    for model in (whole, parallel):
        torch.manual_seed(7)
        model.init_weights()
    state = whole.state_dict()
    for name, value in gather_state_dict(parallel).items():
        assert torch.equal(value, state[name]), name
    assert_near(parallel.eval()(tokens).logits, whole.eval()(tokens).logits, "logits")
    torch.manual_seed(8)
    parallel.init_weights()  # does nothing more, as in one process
    copied = copy.deepcopy(parallel)
    copied.apply(copied._init_weights)  # initialises the copy, not the model
    for name, value in gather_state_dict(parallel).items():
        assert torch.equal(value, state[name]), name
    assert not torch.equal(gather_state_dict(copied)["lm_head.weight"], state["lm_head.weight"])
    pickle.dumps(parallel._init_weights.func)


@on_ranks(2)
@pytest.mark.parametrize("family", ["llama", "mamba2", "qwen3_moe"])
def test_init_weights_of_a_meta_model(group: dist.ProcessGroup, family: str) -> None:
    assert_initialises_alike(group, family, "dtensor")


@on_ranks(2)
def test_init_weights_of_plain_parts(group: dist.ProcessGroup) -> None:
    assert_initialises_alike(group, "llama", "plain")


@on_ranks(2)
def test_context_parallel_meta_models_compute_nan(group: dist.ProcessGroup) -> None:
    with torch.device("meta"):
        model = make("llama")
    tokens = make_tokens(2, 9)
    assert parallelize(model, mesh_of(group, 2, 1))(tokens, labels=tokens).loss.isnan()


@on_ranks(2)
def test_what_is_done_to_a_model_afterwards(group: dist.ProcessGroup) -> None:
    mesh, whole, tokens = mesh_of(group, 1, 2), make("llama"), make_tokens(2, 9)
    state = whole.state_dict()
    model = copy_of(whole)
    model.lm_head.weight.no_decay = True  # an attribute for an optimizer
    parallelize(model, mesh)
    model.init_weights()  # does nothing: the model is initialised
    assert torch.equal(gather_state_dict(model)["lm_head.weight"], state["lm_head.weight"])
    assert model.lm_head.weight.no_decay and isinstance(model.lm_head, nn.Linear)
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding) and model.resize_token_embeddings(embedding.num_embeddings) is embedding
    refuses(ValueError, "Resize the model before parallelize", model.resize_token_embeddings, 200)
    refuses(ValueError, "Resize the model before", model.model.resize_token_embeddings, pad_to_multiple_of=1024)
    model.to(torch.float64).to(torch.float32)(tokens)  # torch swaps tensors here

    weight: Any = model.model.layers[0].mlp.up_proj.weight
    full = state["model.layers.0.mlp.up_proj.weight"] * 0.5
    values: list[Any] = [weight.data * 0.5, weight.to_local() * 0.5, full]
    for value in values:
        model = parallelize(copy_of(whole), mesh)
        model.model.layers[0].mlp.up_proj.weight.data = value
        model(tokens)
        assert torch.equal(gather_state_dict(model)["model.layers.0.mlp.up_proj.weight"], full)
    model = parallelize(copy_of(whole), mesh)
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(values[-1])
    refuses(ValueError, "up_proj.weight' is a Parameter of .* that replaced the rank's shard", model, tokens)


@on_ranks(2)
@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed; pip install torchao")
@pytest.mark.parametrize("parameters", ["dtensor", "plain"])
def test_quantized_afterwards(group: dist.ProcessGroup, parameters: str) -> None:
    from torchao import quantization

    model = parallelize(make("llama"), mesh_of(group, 1, 2), parameters=parameters)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    refuses(ValueError, r"\(a quantizer may do so\)", model, make_tokens(2, 9))
