"""Column- and row-parallel linear layers and the vocabulary-parallel embedding against their unsharded originals."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.weak import WeakIdKeyDictionary

from fused_tp.nn import ColumnParallelLinear, ParallelAttention, RowParallelLinear, VocabParallelEmbedding
from fused_tp.nn.linear import RepeatedColumnLinear
from fused_tp.nn.sharding import local_shard
from tests.distributed.layers import EXACT, assert_same, assert_same_parameters, part
from tests.reference import refuses, seeded
from tests.workers import device_mesh, on_ranks

# Shape of x, out_features, gather_output: odd sizes; 3 features over 4 ranks leave one empty, as do 5 tokens.
COLUMNS = [((2, 5, 6), 9, False), ((7, 5), 3, True), ((1, 1, 1), 1, False)]
# Shape of x, out_features.
ROWS = [((2, 5, 9), 6), ((7, 3), 5)]


@on_ranks(1, 2, 3, 4)
def test_linear_layers_equal_the_unsharded(group: dist.ProcessGroup) -> None:
    mesh = device_mesh(group)
    torch.manual_seed(0)
    for sp, bias in itertools.product((False, True), repeat=2):
        for shape, out, whole in [*COLUMNS, *([] if sp else [((4,), 8, False)])]:
            full = nn.Linear(shape[-1], out, bias, dtype=torch.float64)
            column = ColumnParallelLinear.from_linear(full, mesh=mesh, sequence_parallel=sp, gather_output=whole)
            size = shape[-2] if sp else None
            cuts = {"cut": -2 if sp else None, "out_cut": None if whole else -1}
            assert_same(group, full, column, shape, gather_size=size, **cuts)
        for shape, out in ROWS:
            full = nn.Linear(shape[-1], out, bias, dtype=torch.float64)
            row = RowParallelLinear.from_linear(full, mesh=mesh, sequence_parallel=sp)
            assert_same(group, full, row, shape, cut=-1, out_cut=-2 if sp else None)
    full = nn.Linear(7, 4, dtype=torch.float64)
    assert_same(group, full, RowParallelLinear.from_linear(full, mesh=mesh, input_is_parallel=False), (2, 5, 7))


@on_ranks(1, 2, 3, 4)
def test_embedding_equals_the_unsharded(group: dist.ProcessGroup) -> None:
    torch.manual_seed(0)
    # 5 rows over 4 ranks: 2, 2, 1, 0.
    for vocabulary, padding_idx in ((16, None), (13, 12), (5, -5), (1, None)):
        for sp in (False, True):
            full = nn.Embedding(vocabulary, 6, padding_idx, dtype=torch.float64)
            layer = VocabParallelEmbedding.from_embedding(full, mesh=device_mesh(group), sequence_parallel=sp)
            ids = torch.randint(vocabulary, (2, 7), generator=torch.Generator().manual_seed(3))
            assert_same(group, full, layer, ids, out_cut=-2 if sp else None)
            # Each sum has only one nonzero term, so it must be exact.
            assert torch.equal(layer(ids), part(full(ids), -2 if sp else None, group))


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
    attention = ParallelAttention(6, 3, sinks=True, mesh=mesh)
    nn.init.ones_(attention.sinks)
    attention.reset_parameters()  # as after to_empty
    assert not attention.sinks.full_tensor().any()
    # Replicated parameters agree even if random states differ.
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
    # Conversion sends nothing, so that a single rank can convert.
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
    assert_same_parameters(model, full)

    memo = {}
    linear = nn.Linear(4, 4)
    ColumnParallelLinear.from_linear(linear, mesh=mesh, memo=memo)
    refuses(
        ValueError,
        "Tied weights must have equal placements",
        RowParallelLinear.from_linear,
        linear,
        mesh=mesh,
        memo=memo,
    )


@on_ranks(2)
def test_bad_inputs_are_refused_before_anything_is_sent(group: dist.ProcessGroup) -> None:
    mesh = device_mesh(group)
    grid: Any = object()
    column, row = ColumnParallelLinear(4, 6, mesh=mesh), RowParallelLinear(6, 4, mesh=mesh)
    for make in (ColumnParallelLinear, RowParallelLinear):
        refuses(TypeError, "mesh must be a 1-D DeviceMesh", make, 4, 6, mesh=grid)
        refuses(ValueError, "in_features must be a positive integer", make, 0, 6, mesh=mesh)
        refuses(ValueError, "out_features must be a positive integer", make, 4, -1, mesh=mesh)
        refuses(TypeError, "dtype must be a floating point type", make, 4, 6, mesh=mesh, dtype=torch.int32)
        refuses(TypeError, r"from_linear needs an nn\.Linear", make.from_linear, nn.Embedding(4, 4), mesh=mesh)
        refuses(TypeError, "DTensor already", make.from_linear, _as_linear(column), mesh=mesh)
    for layer, width in ((column, 4), (row, 3)):
        refuses(TypeError, "x must be a Tensor", layer, [1.0])
        refuses(TypeError, "floating point", layer, torch.ones(2, width, dtype=torch.int64))
        refuses(ValueError, f"last dim of x must have size {width}", layer, torch.ones(2, width + 1))
        refuses(ValueError, "last dim of x must have size", layer, torch.ones(()))
    with pytest.raises(ValueError, match="input_is_parallel=True"):
        RowParallelLinear(6, 4, mesh=mesh, sequence_parallel=True, input_is_parallel=False)
    cut = ColumnParallelLinear(4, 6, mesh=mesh, sequence_parallel=True, sequence_dim=-1)
    refuses(ValueError, "sequence_dim must be a dim of .* got -1", cut, torch.ones(2, 4))
    refuses(
        ValueError,
        "sequence_dim must be a dim of .* got -2",
        ColumnParallelLinear(4, 6, mesh=mesh, sequence_parallel=True),
        torch.ones(4),
    )
    refuses(ValueError, "num_blocks must divide .* got 3", RepeatedColumnLinear, 4, 6, num_blocks=3, mesh=mesh)

    embedding = VocabParallelEmbedding(5, 4, mesh=mesh, sequence_parallel=True, sequence_dim=1)
    refuses(TypeError, "ids must be a Tensor of dtype int64", embedding, torch.ones(2, 3))
    refuses(IndexError, "got ids from 0 to 5", embedding, torch.tensor([[0, 5]]))
    refuses(IndexError, "got ids from -1 to 1", embedding, torch.tensor([[-1, 1]]))
    refuses(ValueError, "sequence_dim must be a dim of .* got 1", embedding, torch.tensor([1, 2]))
    refuses(ValueError, "padding_idx must be in .* got 5", VocabParallelEmbedding, 5, 4, 5, mesh=mesh)
    refuses(ValueError, "num_embeddings", VocabParallelEmbedding, 0, 4, mesh=mesh)
    refuses(ValueError, "max_norm", VocabParallelEmbedding.from_embedding, nn.Embedding(5, 4, max_norm=1.0), mesh=mesh)
    refuses(TypeError, r"needs an nn\.Embedding", VocabParallelEmbedding.from_embedding, nn.Linear(5, 4), mesh=mesh)


def _as_linear(layer: ColumnParallelLinear) -> nn.Linear:
    linear = nn.Linear(4, 6, device="meta")
    linear.weight = layer.weight
    return linear


@on_ranks(2)
def test_a_gradient_of_columns_that_do_not_divide_lies_as_they_do(group: dist.ProcessGroup) -> None:
    """The gradient of a sum is one expanded number; that of unevenly sharded columns must have the weight's strides."""
    weight = RowParallelLinear(5, 4, mesh=device_mesh(group)).weight
    for times in (1, 2):
        local_shard(weight).sum().backward()
        assert weight.grad.stride() == weight.stride() and weight.grad.to_local().is_contiguous()
        assert torch.equal(weight.grad.to_local(), torch.full((4, 3 - dist.get_rank(group)), float(times)))


@on_ranks(4)
def test_a_mesh_of_two_dims(group: dist.ProcessGroup) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    refuses(
        ValueError, r"mesh must have one dim, got 2: .* such as mesh\['tp'\]", ColumnParallelLinear, 4, 6, mesh=mesh
    )
    layer = ColumnParallelLinear(4, 6, mesh=mesh["tp"], gather_output=True)
    assert layer(torch.ones(3, 4)).shape == (3, 6)
