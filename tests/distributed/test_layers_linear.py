"""Column- and row-parallel linear layers and the vocabulary-parallel embedding against their unsharded originals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.weak import WeakIdKeyDictionary

from fused_tp.nn import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from fused_tp.nn.linear import RepeatedColumnLinear
from fused_tp.nn.sharding import local
from fused_tp.runtime.partition import shard_range
from tests.reference import seeded
from tests.workers import device_mesh, on_ranks, run_ranks

# fp64: what is left is the order of summation.
EXACT = {"rtol": 1e-11, "atol": 1e-11}


def part(t: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    start, stop = shard_range(t.shape[dim], group.size(), group.rank())
    return t.narrow(dim, start, stop - start).contiguous()


def assert_same_parameters_and_grads(sharded: nn.Module, full: nn.Module) -> None:
    for (name, mine), (_, theirs) in zip(sharded.named_parameters(), full.named_parameters(), strict=True):
        assert isinstance(mine, DTensor), name
        assert mine.shape == theirs.shape, name
        assert torch.equal(mine.full_tensor(), theirs), name
        if theirs.grad is None:
            assert mine.grad is None
            continue
        assert isinstance(mine.grad, DTensor) and mine.grad.placements == mine.placements, name
        assert mine.grad.shape == theirs.shape, name
        torch.testing.assert_close(
            mine.grad.full_tensor(), theirs.grad, msg=lambda m, name=name: f"{name}: {m}", **EXACT
        )


def check_column(
    group: dist.ProcessGroup,
    shape: tuple[int, ...],
    out_features: int,
    bias: bool,
    sequence_parallel: bool,
    gather_output: bool,
) -> None:
    mesh = device_mesh(group)
    torch.manual_seed(0)
    full = nn.Linear(shape[-1], out_features, bias, dtype=torch.float64)
    layer = ColumnParallelLinear.from_linear(
        full, mesh=mesh, sequence_parallel=sequence_parallel, gather_output=gather_output
    )
    x_full = seeded(*shape, dtype=torch.float64, seed=1).requires_grad_()
    x = part(x_full.detach(), -2, group) if sequence_parallel else x_full.detach().clone()
    x.requires_grad_()
    y_full, y = full(x_full), layer(x, gather_size=shape[-2] if sequence_parallel else None)
    grad = seeded(*y_full.shape, dtype=torch.float64, seed=2)
    y_full.backward(grad)
    y.backward(grad if gather_output else part(grad, -1, group))
    torch.testing.assert_close(y, y_full if gather_output else part(y_full, -1, group), **EXACT)
    wanted = part(x_full.grad, -2, group) if sequence_parallel else x_full.grad
    torch.testing.assert_close(x.grad, wanted, **EXACT)
    assert_same_parameters_and_grads(layer, full)


def check_row(
    group: dist.ProcessGroup,
    shape: tuple[int, ...],
    out_features: int,
    bias: bool,
    sequence_parallel: bool,
    parallel_input: bool,
) -> None:
    mesh = device_mesh(group)
    torch.manual_seed(0)
    full = nn.Linear(shape[-1], out_features, bias, dtype=torch.float64)
    layer = RowParallelLinear.from_linear(
        full, mesh=mesh, sequence_parallel=sequence_parallel, input_is_parallel=parallel_input
    )
    x_full = seeded(*shape, dtype=torch.float64, seed=1).requires_grad_()
    x = (part(x_full.detach(), -1, group) if parallel_input else x_full.detach().clone()).requires_grad_()
    y_full, y = full(x_full), layer(x)
    grad = seeded(*y_full.shape, dtype=torch.float64, seed=2)
    y_full.backward(grad)
    y.backward(part(grad, -2, group) if sequence_parallel else grad)
    torch.testing.assert_close(y, part(y_full, -2, group) if sequence_parallel else y_full, **EXACT)
    wanted = part(x_full.grad, -1, group) if parallel_input else x_full.grad
    torch.testing.assert_close(x.grad, wanted, **EXACT)
    assert_same_parameters_and_grads(layer, full)


def check_embedding(
    group: dist.ProcessGroup, vocabulary: int, padding_idx: int | None, sequence_parallel: bool
) -> None:
    mesh = device_mesh(group)
    torch.manual_seed(0)
    full = nn.Embedding(vocabulary, 6, padding_idx, dtype=torch.float64)
    layer = VocabParallelEmbedding.from_embedding(full, mesh=mesh, sequence_parallel=sequence_parallel)
    ids = torch.randint(vocabulary, (2, 7), generator=torch.Generator().manual_seed(3))
    y_full, y = full(ids), layer(ids)
    grad = seeded(*y_full.shape, dtype=torch.float64, seed=2)
    y_full.backward(grad)
    y.backward(part(grad, -2, group) if sequence_parallel else grad)
    # One term of each sum is not zero: no tolerance.
    assert torch.equal(y, part(y_full, -2, group) if sequence_parallel else y_full)
    assert_same_parameters_and_grads(layer, full)


@on_ranks(1, 2, 3, 4)
def test_linear_layers_equal_the_unsharded(group: dist.ProcessGroup) -> None:
    for sequence_parallel in (False, True):
        for bias in (False, True):
            # odd sizes; 3 features over 4 ranks leave one without any; 5 tokens over 4 ranks likewise
            check_column(group, (2, 5, 6), 9, bias, sequence_parallel, gather_output=False)
            check_column(group, (7, 5), 3, bias, sequence_parallel, gather_output=True)
            check_row(group, (2, 5, 9), 6, bias, sequence_parallel, parallel_input=True)
            check_row(group, (7, 3), 5, bias, sequence_parallel, parallel_input=True)
        check_column(group, (1, 1, 1), 1, True, sequence_parallel, gather_output=False)
    check_column(group, (4,), 8, True, False, gather_output=False)
    check_row(group, (2, 5, 7), 4, True, False, parallel_input=False)


@on_ranks(1, 2, 3, 4)
def test_embedding_equals_the_unsharded(group: dist.ProcessGroup) -> None:
    for sequence_parallel in (False, True):
        check_embedding(group, 16, None, sequence_parallel)
        check_embedding(group, 13, 12, sequence_parallel)
        check_embedding(group, 5, -5, sequence_parallel)  # over 4 ranks: 2, 2, 1, 0 rows
        check_embedding(group, 1, None, sequence_parallel)


@on_ranks(2, 4)
def test_repeated_column_layer(group: dist.ProcessGroup) -> None:
    mesh = device_mesh(group)
    for parts in (parts for parts in (1, 2, 4) if group.size() % parts == 0):
        torch.manual_seed(0)
        full = nn.Linear(6, 12, dtype=torch.float64)
        layer = RepeatedColumnLinear.from_linear(full, parts=parts, mesh=mesh)
        x_full = seeded(3, 6, dtype=torch.float64, seed=1).requires_grad_()
        x = x_full.detach().clone().requires_grad_()
        index, size = group.rank() // (group.size() // parts), 12 // parts
        wanted = full(x_full)[:, index * size : (index + 1) * size]
        y = layer(x)
        torch.testing.assert_close(y, wanted, **EXACT)
        # each rank of a part contributes its own term of the loss
        loss = sum(
            (full(x_full)[:, r // (group.size() // parts) * size :][:, :size] * (r + 1)).sum()
            for r in range(group.size())
        )
        assert isinstance(loss, Tensor)
        loss.backward()
        (y * (group.rank() + 1)).sum().backward()
        torch.testing.assert_close(x.grad, x_full.grad, **EXACT)
        assert_same_parameters_and_grads(layer, full)


@on_ranks(3)
def test_initial_weights_are_those_of_the_unsharded_layer(group: dist.ProcessGroup) -> None:
    mesh = device_mesh(group)
    for make, original, sizes in (
        (ColumnParallelLinear, nn.Linear, (6, 9)),
        (RowParallelLinear, nn.Linear, (9, 6)),
        (VocabParallelEmbedding, nn.Embedding, (11, 4, 3)),
    ):
        torch.manual_seed(5)
        full: Any = original(*sizes)
        torch.manual_seed(5)
        layer: Any = make(*sizes, mesh=mesh)
        assert torch.equal(layer.weight.full_tensor(), full.weight)
        if getattr(full, "bias", None) is not None:
            assert torch.equal(layer.bias.full_tensor(), full.bias)
    # Replicated parameters agree even where random states do not.
    torch.manual_seed(group.rank())
    bias = RowParallelLinear(4, 5, mesh=mesh).bias
    assert isinstance(bias, DTensor)
    both = [torch.empty(5) for _ in range(group.size())]
    dist.all_gather(both, bias.to_local(), group=group)
    assert all(torch.equal(one, both[0]) for one in both)


@on_ranks(3)
def test_placements_and_names(group: dist.ProcessGroup) -> None:
    mesh = device_mesh(group)
    column, row = ColumnParallelLinear(4, 7, mesh=mesh), RowParallelLinear(7, 4, mesh=mesh)
    embedding = VocabParallelEmbedding(9, 4, mesh=mesh)
    assert list(column.state_dict()) == list(row.state_dict()) == ["weight", "bias"]
    assert list(embedding.state_dict()) == ["weight"]
    assert [p.placements for p in column.parameters()] == [(Shard(0),), (Shard(0),)]
    assert [p.placements for p in row.parameters()] == [(Shard(1),), (Replicate(),)]
    assert embedding.weight.placements == (Shard(0),)
    assert "tp=3" in repr(column) and "tp=3" in repr(row) and "tp=3" in repr(embedding)


@on_ranks(2)
def test_conversion(group: dist.ProcessGroup) -> None:
    mesh = device_mesh(group)
    linear = nn.Linear(6, 8).eval()
    linear.weight.requires_grad_(False)
    layer = ColumnParallelLinear.from_linear(linear, mesh=mesh)
    assert not layer.training and not layer.weight.requires_grad and layer.bias is not None and layer.bias.requires_grad
    local = layer.weight.to_local()
    assert local.untyped_storage().nbytes() == linear.weight.untyped_storage().nbytes() // group.size()
    # Nothing is sent: one rank alone can convert.
    if group.rank() == 0:
        ColumnParallelLinear.from_linear(linear, mesh=mesh)
        RowParallelLinear.from_linear(linear, mesh=mesh)

    on_meta = ColumnParallelLinear.from_linear(nn.Linear(6, 8, device="meta"), mesh=mesh)
    assert on_meta.weight.to_local().device.type == "cpu"
    on_meta.reset_parameters()
    assert on_meta.weight.to_local().abs().max() <= 6**-0.5
    later = ColumnParallelLinear(6, 8, mesh=mesh, device="meta")
    assert later.weight.is_meta
    later.to_empty(device="cpu").reset_parameters()
    assert later.weight.shape == (8, 6) and not later.weight.is_meta

    clone = copy.deepcopy(layer)
    assert torch.equal(clone(torch.ones(2, 6)), layer(torch.ones(2, 6)))


@on_ranks(1, 3)
def test_tied_weights_stay_tied(group: dist.ProcessGroup) -> None:
    mesh = device_mesh(group)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed: nn.Module = nn.Embedding(11, 6, dtype=torch.float64)
            self.head: nn.Module = nn.Linear(6, 11, bias=False, dtype=torch.float64)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embed(ids))

    torch.manual_seed(0)
    full = Tied()
    model = copy.deepcopy(full)
    memo: Any = WeakIdKeyDictionary()
    assert isinstance(model.embed, nn.Embedding) and isinstance(model.head, nn.Linear)
    model.embed = VocabParallelEmbedding.from_embedding(model.embed, mesh=mesh, memo=memo)
    model.head = ColumnParallelLinear.from_linear(model.head, mesh=mesh, gather_output=True, memo=memo)
    assert model.embed.weight is model.head.weight
    assert not memo  # the full weight is gone
    ids = torch.tensor([[0, 3, 10, 3]])
    y_full, y = full(ids), model(ids)
    torch.testing.assert_close(y, y_full, **EXACT)
    grad = seeded(*y.shape, dtype=torch.float64)
    y_full.backward(grad)
    y.backward(grad)
    assert_same_parameters_and_grads(model, full)

    memo = {}
    linear = nn.Linear(4, 4)
    ColumnParallelLinear.from_linear(linear, mesh=mesh, memo=memo)
    with pytest.raises(ValueError, match="tied weights must be cut alike"):
        RowParallelLinear.from_linear(linear, mesh=mesh, memo=memo)


def autocast(group: dist.ProcessGroup) -> None:
    mesh = device_mesh(group)
    torch.manual_seed(0)
    full = nn.Linear(8, 6)
    layer = ColumnParallelLinear.from_linear(full, mesh=mesh, gather_output=True)
    x = seeded(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y, wanted = layer(x), full(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, wanted)
    y.sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32


def test_autocast() -> None:
    run_ranks(2, autocast)


@on_ranks(2)
def test_bad_inputs_are_refused_before_anything_is_sent(group: dist.ProcessGroup) -> None:
    mesh = device_mesh(group)
    grid: Any = object()
    column, row = ColumnParallelLinear(4, 6, mesh=mesh), RowParallelLinear(6, 4, mesh=mesh)
    for make in (ColumnParallelLinear, RowParallelLinear):
        with pytest.raises(TypeError, match="mesh must be a 1-D DeviceMesh"):
            make(4, 6, mesh=grid)
        with pytest.raises(ValueError, match="in_features must be a positive integer"):
            make(0, 6, mesh=mesh)
        with pytest.raises(ValueError, match="out_features must be a positive integer"):
            make(4, -1, mesh=mesh)
        with pytest.raises(TypeError, match="dtype must be a floating point type"):
            make(4, 6, mesh=mesh, dtype=torch.int32)
        with pytest.raises(TypeError, match=r"from_linear takes an nn\.Linear"):
            make.from_linear(nn.Embedding(4, 4), mesh=mesh)
        with pytest.raises(TypeError, match="DTensor already"):
            make.from_linear(_as_linear(column), mesh=mesh)
    for layer, width in ((column, 4), (row, 3)):
        with pytest.raises(TypeError, match="x must be a Tensor"):
            layer([1.0])
        with pytest.raises(TypeError, match="floating point"):
            layer(torch.ones(2, width, dtype=torch.int64))
        with pytest.raises(ValueError, match=f"last dim must be {width}"):
            layer(torch.ones(2, width + 1))
        with pytest.raises(ValueError, match="last dim must be"):
            layer(torch.ones(()))
    with pytest.raises(ValueError, match="input_is_parallel=True"):
        RowParallelLinear(6, 4, mesh=mesh, sequence_parallel=True, input_is_parallel=False)
    cut = ColumnParallelLinear(4, 6, mesh=mesh, sequence_parallel=True, sequence_dim=-1)
    with pytest.raises(ValueError, match="sequence_dim is -1"):
        cut(torch.ones(2, 4))
    with pytest.raises(ValueError, match="sequence_dim is -2"):
        ColumnParallelLinear(4, 6, mesh=mesh, sequence_parallel=True)(torch.ones(4))
    with pytest.raises(ValueError, match="parts is 3"):
        RepeatedColumnLinear(4, 6, parts=3, mesh=mesh)

    embedding = VocabParallelEmbedding(5, 4, mesh=mesh, sequence_parallel=True, sequence_dim=1)
    with pytest.raises(TypeError, match="ids must be a Tensor of dtype int64"):
        embedding(torch.ones(2, 3))
    with pytest.raises(IndexError, match="ids holds 0 to 5"):
        embedding(torch.tensor([[0, 5]]))
    with pytest.raises(IndexError, match="ids holds -1 to 1"):
        embedding(torch.tensor([[-1, 1]]))
    with pytest.raises(ValueError, match="sequence_dim is 1"):
        embedding(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="padding_idx is 5"):
        VocabParallelEmbedding(5, 4, 5, mesh=mesh)
    with pytest.raises(ValueError, match="num_embeddings"):
        VocabParallelEmbedding(0, 4, mesh=mesh)
    with pytest.raises(ValueError, match="max_norm"):
        VocabParallelEmbedding.from_embedding(nn.Embedding(5, 4, max_norm=1.0), mesh=mesh)
    with pytest.raises(TypeError, match=r"takes an nn\.Embedding"):
        VocabParallelEmbedding.from_embedding(nn.Linear(5, 4), mesh=mesh)


def _as_linear(layer: ColumnParallelLinear) -> nn.Linear:
    linear = nn.Linear(4, 6, device="meta")
    linear.weight = layer.weight
    return linear


@on_ranks(2)
def test_a_gradient_of_columns_that_do_not_divide_lies_as_they_do(group: dist.ProcessGroup) -> None:
    """Of columns that do not divide, from a sum: autograd gives one number for all of it."""
    weight = RowParallelLinear(5, 4, mesh=device_mesh(group)).weight
    for times in (1, 2):
        local(weight).sum().backward()
        assert weight.grad.stride() == weight.stride() and weight.grad.to_local().is_contiguous()
        assert torch.equal(weight.grad.to_local(), torch.full((4, 3 - dist.get_rank(group)), float(times)))


@on_ranks(4)
def test_a_mesh_of_two_dims(group: dist.ProcessGroup) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match=r"mesh has 2 dims .* such as mesh\['tp'\]"):
        ColumnParallelLinear(4, 6, mesh=mesh)
    layer = ColumnParallelLinear(4, 6, mesh=mesh["tp"], gather_output=True)
    assert layer(torch.ones(3, 4)).shape == (3, 6)
