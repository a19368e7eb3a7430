"""Initialisation of sharded parameters: same values as on one process with the same random state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import init
from torch.nn.utils import spectral_norm
from torch.optim import swa_utils

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
    "outer product": lambda w: w.addr_(w[:, 0].clone(), w[0].clone(), alpha=0.5),
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


NUMBERS: dict[str, Any] = {"p": 0.3, "train": True, "training": True, "num_samples": 3, "n": 6, "low": 2, "high": 7}
NUMBERS |= {"from": 1, "to": 6, "std": 0.5, "mean": 1.0}


def random_ops() -> list[Any]:
    """All random operations of torch that take a tensor, but those of attention and recurrent layers."""
    names = [
        name.removeprefix("aten::").split(".") for name in torch._C._dispatch_get_all_op_names() if "aten::" in name
    ]
    ops = [getattr(getattr(torch.ops.aten, name[0]), (*name, "default")[1]) for name in names]
    return [
        op
        for op in ops
        if torch.Tag.nondeterministic_seeded in op.tags
        and any(isinstance(argument.type, torch.TensorType) for argument in op._schema.arguments)
        and not any(argument.name in ("dropout", "dropout_p") for argument in op._schema.arguments)
    ]


def draw(op: Any, tensor: Any) -> list[Any]:
    """Results of `op`, and the tensors that it writes, with `tensor` and others like it as arguments."""
    arguments: dict[str, Any] = {}
    for argument in op._schema.arguments:
        if isinstance(argument.type, torch.TensorType):
            arguments[argument.name] = tensor.clone()
        elif argument.name == "size":
            arguments[argument.name] = tuple(tensor.shape)
        elif argument.name in NUMBERS and not (argument.has_default_value() and argument.name in ("low", "from")):
            arguments[argument.name] = NUMBERS[argument.name]
    torch.manual_seed(11)
    results = op(**arguments)
    written = [arguments[argument.name] for argument in op._schema.arguments if argument.is_write]
    return [results] if isinstance(results, torch.Tensor) else [*results, *written]


@on_ranks(2)
@torch.no_grad()
def test_random_operations_draw_as_one_process(group: dist.ProcessGroup) -> None:
    _, own = make(group)
    weights = [own[0].weight, own[1].weight, own[1].bias, own[4].weight]
    compared, refused = set(), {}
    for weight in weights:
        layout = weight.device_mesh, weight.placements
        full = torch.rand(weight.shape, generator=torch.Generator().manual_seed(1))
        for op in random_ops():
            try:
                expected, state = draw(op, full), torch.get_rng_state()
            except (RuntimeError, NotImplementedError):  # another device or another number of dims
                continue
            try:
                actual = draw(op, distribute_tensor(full, *layout))
            except (NotImplementedError, ValueError) as error:
                refused[op.name()] = str(error)
                continue
            for one, other in zip(actual, expected, strict=True):
                assert torch.equal(one.full_tensor(), other), f"{op.name()} {layout[1]}"
            assert torch.equal(torch.get_rng_state(), state), op.name()
            compared.add(op.name())
    assert set(refused) <= {"aten::randperm.out", "aten::randn.out"} and all(
        text.endswith(".") for text in refused.values()
    )
    assert {
        "aten::bernoulli",
        "aten::multinomial",
        "aten::rrelu_",
        "aten::native_dropout",
        "aten::binomial",
    } <= compared
    rows, terms = weights[0][1:4], DTensor.from_local(torch.ones(3), weights[0].device_mesh, [Partial()])
    torch.manual_seed(3)
    drawn = torch.normal(rows, 0.1).full_tensor()
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.normal(rows.full_tensor(), 0.1))
    assert torch.randn_like(terms).placements == torch.poisson(terms).placements == (Replicate(),)


@on_ranks(2)
def test_gradients_of_random_operations(group: dist.ProcessGroup) -> None:
    whole, own = make(group)
    for function in (
        lambda w: F.rrelu(w, training=True),
        lambda w: F.rrelu(w * 1, training=True, inplace=True),
        lambda w: torch.native_dropout(w, 0.4, True)[0],
        lambda w: torch.native_dropout(w, 0.4, False)[0],
        lambda w: torch.native_dropout(w, 1.0, True)[0],
    ):
        for model in (whole[:4], own[:4]):
            torch.manual_seed(5)
            for module in model:
                (grad,) = torch.autograd.grad((function(module.weight) ** 2).sum(), module.weight)
                module.weight.data.copy_(grad)
        assert_same_state(own, whole, "gradient")
        init.uniform_(whole[0].weight)
        own[0].weight.data = whole[0].weight.data


@pytest.mark.parametrize("has_plain_tensor", [True, False])
@on_ranks(2)
@torch.no_grad()
def test_operations_on_lists_of_tensors_and_dtensors(group: dist.ProcessGroup, has_plain_tensor: bool) -> None:
    states = []
    for model in make(group):
        weights = [*(module.weight for module in model[:4]), *[torch.ones(3)] * has_plain_tensor]
        teachers = [torch.zeros_like(weight) for weight in weights]
        torch._foreach_copy_(teachers, weights)
        torch._foreach_mul_(weights, [1.5, 2.0, 3.0, 4.0, 5.0][: len(weights)])
        torch._foreach_lerp_(teachers, weights, 0.3)
        torch._foreach_add_(teachers, weights, alpha=0.5)
        torch._foreach_addcdiv_(teachers, weights, torch._foreach_add(torch._foreach_abs(weights), 1.0), 2)
        torch._foreach_addcmul_(teachers, weights, weights, torch.arange(float(len(weights))))
        torch._foreach_minimum_(teachers, 1.0)
        teachers += torch._foreach_max(teachers)
        rows = [weight[1:4] for weight in weights[:2]]
        torch._foreach_zero_(rows)
        states.append([t.full_tensor() if isinstance(t, DTensor) else t for t in [*teachers, *weights]])
    for whole_tensor, own_tensor in zip(*states, strict=True):
        assert torch.allclose(own_tensor, whole_tensor)


@on_ranks(2)
@torch.no_grad()
def test_averaged_model_with_buffers(group: dist.ProcessGroup) -> None:
    states = []
    for model in make(group):
        student = nn.ModuleList([model[0], nn.BatchNorm1d(9)])
        student[1].num_batches_tracked = None  # torch's SWA cannot average integers
        for function in (swa_utils.get_ema_multi_avg_fn(0.5), swa_utils.get_swa_multi_avg_fn()):
            average = swa_utils.AveragedModel(student, multi_avg_fn=function, use_buffers=True)
            for _ in range(3):
                average.update_parameters(student)
                student[0].weight.mul_(2)
                student[1].running_mean.add_(1)
            states.append([average.module[0].weight, average.module[1].running_mean])
    for whole_tensors, own_tensors in zip(states[:2], states[2:], strict=True):
        assert torch.allclose(own_tensors[0].full_tensor(), whole_tensors[0])
        assert torch.equal(own_tensors[1], whole_tensors[1])


@on_ranks(2)
@torch.no_grad()
def test_a_norm_of_shards_can_be_written(group: dist.ProcessGroup) -> None:
    whole, own = make(group)
    for dim in (0, 1):
        expected = whole[0].weight.norm(dim=dim).clamp_min_(0.5)
        actual: Any = own[0].weight.norm(dim=dim).clamp_min_(0.5)
        assert torch.allclose(actual.full_tensor(), expected)
    refuses(ValueError, "whose ranks hold partial sums", own[0].weight.norm(dim=0)[1:].clamp_min_, 0.5)
    for model in (whole, own):
        torch.manual_seed(0)
        spectral_norm(model[0])(torch.ones(2, 6))
    assert torch.allclose(own[0].weight.full_tensor(), whole[0].weight)
