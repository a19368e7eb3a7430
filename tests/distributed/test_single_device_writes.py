"""Initialisation of sharded parameters: same values as on one process with the same random state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import init

from fused_tp.integrations.dtensor import FusedColwiseParallel
from fused_tp.nn import (
    ColumnParallelLinear,
    ParallelMLP,
    RowParallelLinear,
    VocabParallelEmbedding,
    gather_state_dict,
    plain_parameters_,
)
from tests.reference import refuses
from tests.workers import device_mesh, on_ranks

WRITES: dict[str, Callable[[Any], object]] = {
    "normal": lambda w: init.normal_(w, std=0.02),
    "uniform": lambda w: init.uniform_(w, -1, 1),
    "truncated": lambda w: init.trunc_normal_(w, std=0.02),
    "kaiming": init.kaiming_uniform_,  # uses the unsharded fan-in
    "xavier": init.xavier_normal_,
    "data": lambda w: w.data.normal_(),
    "generator": lambda w: w.data.uniform_(generator=torch.Generator().manual_seed(5)),
    "exponential": lambda w: w.data.exponential_(),
    "transposed": lambda w: w.data.t().uniform_(),
    "noise": lambda w: w.add_(torch.randn_like(w), alpha=0.1),
    "row": lambda w: (init.ones_(w), init.zeros_(w[1])),
    "row of data": lambda w: (init.ones_(w), w.data[-2].fill_(3)),
    "rows": lambda w: w.data[1:4].normal_(),
    "block": lambda w: w.detach()[2:5, 1:4].zero_(),
    "assigned row": lambda w: w.data.__setitem__(2, 0.5),
    "assigned rows": lambda w: w.data.__setitem__(slice(1, 3), 0),
    "column": lambda w: w[:, 2].uniform_(),
    "scaled rows": lambda w: w[1:4].mul_(2),
    "sum of a row": lambda w: w[3].add_(w[1], alpha=2),
    "clamped block": lambda w: w.data[1:3, 2:4].clamp_(-0.1, 0.1),
    "copied rows": lambda w: w[1:3].copy_(w[3:5]),
    "rows of one": lambda w: w.__setitem__(slice(4, None), w[1]),
    "scaled row": lambda w: w.__setitem__(2, w[2] * 3),
    "rows of a transposed view": lambda w: w.t()[:, 1:].mul_(2),
    "filled rows": lambda w: w[2:5].index_fill_(0, torch.tensor([1]), 3.0),
    "broadcast": lambda w: w.mul_(w[:1].clone()),
    "whole": lambda w: w.addcmul_(w, w.neg(), value=0.5).copy_(w[1:2].clone()),
}


def make(group: dist.ProcessGroup) -> tuple[nn.ModuleList, nn.ModuleList]:
    torch.manual_seed(0)
    mesh, embedding = device_mesh(group), nn.Embedding(7, 6, padding_idx=2)
    whole = nn.ModuleList([nn.Linear(6, 9), nn.Linear(9, 6), embedding, nn.Linear(5, 9), nn.Linear(6, 8)])
    own = copy.deepcopy(whole)
    parallelize_module(own[3], mesh, FusedColwiseParallel())
    own[0] = ColumnParallelLinear.from_linear(own[0], mesh=mesh)
    own[1] = RowParallelLinear.from_linear(own[1], mesh=mesh)
    own[2] = VocabParallelEmbedding.from_embedding(embedding, mesh=mesh)
    own[4] = ColumnParallelLinear.from_linear(own[4], mesh=mesh, parts=2) if group.size() == 2 else own[4]
    return whole, own


def assert_same_state(own: nn.Module, whole: nn.Module, what: str) -> None:
    gathered = gather_state_dict(own)
    for name, value in whole.state_dict().items():
        assert torch.equal(gathered[name], value), f"{what}: {name}"


@on_ranks(2, 3)
@torch.no_grad()
def test_writes_to_sharded_parameters_are_those_of_one_process(group: dist.ProcessGroup) -> None:
    whole, own = make(group)
    for what, write in WRITES.items():
        for model in (whole[:4], own[:4]):
            torch.manual_seed(7)
            for module in model:
                write(module.weight)
        assert_same_state(own, whole, what)
    weight: Any = own[0].weight
    terms = DTensor.from_local(weight.to_local(), weight.device_mesh, [Partial()])
    refuses(ValueError, "whose ranks hold partial sums", terms.normal_)
    refuses(ValueError, "whose ranks hold partial sums", terms.fill_, 1.0)
    terms = DTensor.from_local(torch.ones(3), weight.device_mesh, [Partial()])
    assert torch.equal(terms.mul_(2).full_tensor(), torch.full((3,), 2.0 * group.size()))
    refuses(ValueError, "whose ranks hold partial sums", terms.add_, 1.0)
    for number in (
        torch.norm,
        torch.sum,
        torch.mean,
        torch.max,
        torch.min,
        lambda w: w.norm(1),
        lambda w: (w > 1).any(),
    ):
        assert number(weight).item() == pytest.approx(number(whole[0].weight).item(), rel=1e-5, abs=1e-6)
    refuses(RuntimeError, "mixed torch.Tensor and DTensor", weight[1:3].copy_, torch.ones(2, 6))


@on_ranks(2)
def test_apply_finds_sharded_layers(group: dist.ProcessGroup) -> None:
    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, std=0.1)
            init.uniform_(module.bias)
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_()
            module.weight.data[module.padding_idx].zero_()

    whole, own = make(group)
    for plain in (False, True):
        for model in (whole, plain_parameters_(own) if plain else own):
            torch.manual_seed(3 + plain)
            model.apply(initialise)
        assert_same_state(own, whole, f"plain: {plain}")
    assert type(own[0].weight) is nn.Parameter
    own.apply(lambda module: module.requires_grad_(False))
    assert not any(parameter.requires_grad for parameter in own.parameters())


@on_ranks(2)
@torch.no_grad()
def test_whole_parameters_stay_equal_with_unequal_random_states(group: dist.ProcessGroup) -> None:
    row = RowParallelLinear(6, 4, mesh=device_mesh(group))
    torch.manual_seed(dist.get_rank(group))
    init.normal_(row.bias)
    bias: Any = row.bias
    theirs = [torch.empty(4) for _ in range(2)]
    dist.all_gather(theirs, bias.to_local(), group=group)
    assert torch.equal(*theirs)


@on_ranks(2)
def test_a_sharded_layer_is_no_whole_one(group: dist.ProcessGroup) -> None:
    mesh = device_mesh(group)
    mlp = plain_parameters_(ParallelMLP(6, 8, mesh=mesh))
    refuses(TypeError, "needs an nn.Linear, got Column", ColumnParallelLinear.from_linear, mlp.up_proj, mesh=mesh)


@on_ranks(4)
@pytest.mark.full
def test_init_under_fsdp(group: dist.ProcessGroup) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    kinds: tuple[Any, ...] = (ColumnParallelLinear, RowParallelLinear)
    layers = (kind.from_linear(layer, mesh=mesh["tp"]) for kind, layer in zip(kinds, whole, strict=True))
    own = fully_shard(nn.Sequential(*layers), mesh=mesh["dp"])
    for model in (whole, own):
        torch.manual_seed(3)
        for parameter in model.parameters():
            init.normal_(parameter)
    assert_same_state(own, whole, "FSDP2")
