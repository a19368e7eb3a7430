"""Parallel models whose parameters are plain tensors: gradients, norms, state and DistributedDataParallel."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fused_tp
from fused_tp.nn import (
    ColumnParallelLinear,
    ParallelMLP,
    RowParallelLinear,
    clip_grad_norm_,
    gather_state_dict,
    original_shapes,
    plain_parameters_,
)
from fused_tp.nn.sharding import as_dtensors
from tests.integrations.models import VOCAB, copy_of, make, make_tokens, mesh_of
from tests.workers import error_of, on_ranks

pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")


def whole_gradients(parallel: nn.Module) -> dict[str, Tensor]:
    """Gradients of the unsharded model, in the form of gather_state_dict."""
    held = {name: p.detach().clone() for name, p in parallel.named_parameters()}
    with torch.no_grad():
        for p in parallel.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
        found = gather_state_dict(parallel)
        for name, p in parallel.named_parameters():
            p.copy_(held[name])
    return found


@torch.no_grad()
def scaled(model: nn.Module, factor: float) -> nn.Module:
    for p in model.parameters():
        p *= factor
    return model


def assert_same(parallel: nn.Module, whole: nn.Module) -> None:
    assert not any(isinstance(p, DTensor) for p in parallel.parameters())
    found = whole_gradients(parallel)
    for name, p in whole.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("family", "cp", "keywords"),
    [
        ("llama", 2, {"sequence_parallel": True, "loss_parallel": True}),
        ("qwen3_moe", 1, {}),
        pytest.param("llama", 1, {}, marks=pytest.mark.full),
        pytest.param("gpt_oss", 2, {"sequence_parallel": True}, marks=pytest.mark.full),
        pytest.param("mixtral", 2, {"sequence_parallel": True}, marks=pytest.mark.full),
        pytest.param("bamba", 1, {"sequence_parallel": True}, marks=pytest.mark.full),
    ],
)
@on_ranks(4)
def test_gradients_and_norm(group: dist.ProcessGroup, family: str, cp: int, keywords: dict[str, Any]) -> None:
    whole = make(family)
    mesh = fused_tp.make_mesh("cpu", **{"dp_shard" if cp == 1 else "cp": 2}, tp=2)
    parallel = fused_tp.parallelize(copy_of(whole), mesh, parameters="plain", **keywords)
    tokens = make_tokens(2, 18)
    for model in (whole, parallel):
        model(input_ids=tokens, labels=tokens).loss.backward()
    assert_same(parallel, whole)
    wanted = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    torch.testing.assert_close(clip_grad_norm_(parallel, 0.1).float(), wanted)
    assert_same(parallel, whole)


@on_ranks(2, 3)
def test_norm_where_some_ranks_lack_gradients(group: dist.ProcessGroup) -> None:
    """All ranks compute the same norm, in float64, too, and for rows that do not divide evenly."""
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    for dtype in (torch.float64, torch.bfloat16):
        layer = plain_parameters_(ColumnParallelLinear(4, 7, mesh=mesh, dtype=dtype))
        rows = layer.weight.shape[0]
        if dist.get_rank(group):
            layer.weight.grad = torch.full_like(layer.weight, 2.0)
        known = (7 - (4 if group.size() == 2 else 3)) * 4 * 4.0
        assert rows in (4, 3, 1)
        torch.testing.assert_close(clip_grad_norm_(layer, float("inf")), torch.tensor(known).double().sqrt())


@on_ranks(2)
def test_what_tells_how_a_parameter_is_cut(group: dist.ProcessGroup) -> None:
    mesh = mesh_of(group, 1, 2)["tp"]
    mlp = plain_parameters_(ParallelMLP(8, 32, mesh=mesh))
    assert isinstance(mlp.up_proj.weight, nn.Parameter)
    cuts = {name: (p.tensor_model_parallel, p.partition_dim, p.partition_stride) for name, p in mlp.named_parameters()}
    assert cuts["up_proj.weight"] == (True, 0, 1) and cuts["down_proj.weight"] == (True, 1, 1)
    whole = fused_tp.parallelize(make("llama"), mesh_of(group, 1, 2), parameters="plain")
    assert whole.model.norm.weight.partition_dim == -1 and not whole.model.norm.weight.tensor_model_parallel
    assert whole.lm_head.weight.shape[0] in (VOCAB // 2, VOCAB - VOCAB // 2)
    tied = fused_tp.parallelize(make("llama", tied=True), mesh_of(group, 1, 2), parameters="plain")
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    # Weights are read at each use, so that replaced data takes effect.
    tokens = make_tokens(1, 8)
    before = whole(input_ids=tokens).logits
    for p in whole.parameters():
        p.data = p.data * 1.5
    assert not torch.allclose(before, whole(input_ids=tokens).logits)


@on_ranks(2)
def test_state(group: dist.ProcessGroup) -> None:
    tokens, mesh = make_tokens(2, 16), mesh_of(group, 1, 2)
    for family in ("llama", "qwen3_moe"):  # qwen3_moe has packed parameters
        whole = make(family)
        parallel = fused_tp.parallelize(copy_of(whole), mesh, parameters="plain")
        for name, t in gather_state_dict(parallel).items():
            torch.testing.assert_close(t, whole.state_dict()[name], rtol=0, atol=0)
        other = scaled(make(family), 1.5)
        fused_tp.parallelizing.state_dict.load_full_state_dict(parallel, other.state_dict())
        wanted = other(input_ids=tokens).logits
        torch.testing.assert_close(parallel(input_ids=tokens).logits, wanted, rtol=1e-4, atol=1e-5)
        # Copies, pickles and moves keep the information about sharding.
        stream = io.BytesIO()
        torch.save(parallel.state_dict(), stream)
        for one in (copy.deepcopy(parallel), parallel.to(torch.float64).to(torch.float32)):
            torch.testing.assert_close(one(input_ids=tokens).logits, wanted, rtol=1e-4, atol=1e-5)
            assert gather_state_dict(one)["lm_head.weight"].shape == whole.lm_head.weight.shape


@pytest.mark.full
@on_ranks(4)
def test_checkpoints_at_another_size(group: dist.ProcessGroup, tmp_path: Path) -> None:
    tokens = make_tokens(2, 16)
    for family in ("llama", "qwen3_moe"):
        states: list[dict[str, Any]] = []
        for sizes, parameters in (((2, 2), "plain"), ((4, 1), "plain"), ((2, 2), "dtensor")):
            model = fused_tp.parallelize(
                scaled(make(family), 1 + len(states)), mesh_of(group, *sizes), parameters=parameters
            )
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
            if not states:
                model(input_ids=tokens, labels=tokens).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            own, moments = get_state_dict(model, optimizer)
            state = {"model": own, "optimizer": moments}
            if not states:
                dcp.save(original_shapes(model, state), checkpoint_id=tmp_path / family)
            else:
                dcp.load(original_shapes(model, state), checkpoint_id=tmp_path / family)
                set_state_dict(model, optimizer, model_state_dict=own, optim_state_dict=moments)
            model(input_ids=tokens, labels=tokens).loss.backward()
            clip_grad_norm_(model, 1.0)
            optimizer.step()
            states.append(gather_state_dict(model))
        for other in states[1:]:
            for name, t in states[0].items():
                torch.testing.assert_close(other[name], t, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@on_ranks(2)
def test_original_shapes_of_names_that_end_in_others(group: dist.ProcessGroup) -> None:
    mesh, module = mesh_of(group, 1, 2)["tp"], nn.Module()
    module.proj, module.inner = ColumnParallelLinear(8, 16, mesh=mesh), nn.Module()
    module.inner.proj = RowParallelLinear(16, 8, mesh=mesh)  # of the same shape on each rank
    module.inner.tied = module.proj
    state = {"model": plain_parameters_(module).state_dict()}
    found = {name: tuple(t.shape) for name, t in original_shapes(module, state)["model"].items()}
    assert found["proj.weight"] == found["inner.tied.weight"] == (16, 8) and found["inner.proj.weight"] == (8, 16)


@on_ranks(4)
def test_distributed_data_parallel(group: dist.ProcessGroup) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = make("llama")
    parallel = fused_tp.parallelize(copy_of(whole), mesh, parameters="plain", sequence_parallel=True)
    wrapped = DistributedDataParallel(parallel, process_group=mesh.get_group("dp"))
    tokens = make_tokens(4, 16)
    own = tokens.chunk(2)[mesh["dp"].get_local_rank()]
    whole(input_ids=tokens, labels=tokens).loss.backward()
    wrapped(input_ids=own, labels=own).loss.backward()
    assert_same(parallel, whole)


@on_ranks(2)
def test_adapters(group: dist.ProcessGroup) -> None:
    """LoRA adapters added before parallelize, and after it."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed; pip install peft")
    from fused_tp.parallelizing.peft import parallel_config

    def adapted(model: nn.Module, prepare: Any = lambda config: config) -> Any:
        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj", "o_proj", "down_proj"])
        return peft.get_peft_model(model, prepare(config))

    tokens, keywords = make_tokens(2, 16), {"parameters": "plain", "sequence_parallel": True}
    mesh = mesh_of(group, 1, 2)
    whole = adapted(make("llama"))
    whole(input_ids=tokens, labels=tokens).loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), float("inf"))
    before = fused_tp.parallelize(adapted(make("llama")), mesh, **keywords)
    base = fused_tp.parallelize(make("llama"), mesh, **keywords)
    after = adapted(base, lambda config: parallel_config(base, config))
    for parallel in (before, after):
        assert not any(isinstance(p, DTensor) for p in parallel.parameters())
        parallel(input_ids=tokens, labels=tokens).loss.backward()
        torch.testing.assert_close(clip_grad_norm_(parallel, float("inf")).float(), norm)


@on_ranks(4)
def test_what_is_refused(group: dist.ProcessGroup) -> None:
    mesh = mesh_of(group, 4, 1)
    refused = error_of(fused_tp.parallelize, make("qwen3_moe"), mesh, ep_dim="cp", parameters="plain")
    assert "those of different experts" in str(refused)
    assert "'dtensor' or 'plain'" in str(error_of(fused_tp.parallelize, make("llama"), mesh, parameters="flat"))
    cut = nn.Linear(4, 4)
    both = dist.device_mesh.init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    from torch.distributed.tensor import Shard, distribute_tensor

    cut.weight = nn.Parameter(distribute_tensor(cut.weight, both, [Shard(0), Shard(1)]))
    assert "over several mesh dims" in str(error_of(plain_parameters_, cut))
    assert not as_dtensors(cut)
