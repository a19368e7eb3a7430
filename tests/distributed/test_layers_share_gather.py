"""share_gather: one op for all layers of a group, with the results of calling each layer."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from fused_tp.nn import ColumnParallelLinear
from fused_tp.nn.share_gather import share_gather
from tests.distributed.layers import EXACT, assert_same, assert_same_parameters, part
from tests.reference import seeded
from tests.workers import device_mesh, on_ranks


def counting() -> Any:
    """Record the multi-weight calls of the layers."""
    module = sys.modules["fused_tp.nn.share_gather"]
    return mock.patch.object(module, "column_forward", wraps=module.column_forward)


def layers_of(calls: mock.Mock) -> list[int]:
    return [len(call.args[0]) for call in calls.call_args_list]


class CountingBackend:
    """torch.compile backend "aot_eager" that counts calls of column_parallel_matmul in the traced graph."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        for module in graph.modules():  # checkpointed regions are submodules
            if isinstance(module, torch.fx.GraphModule):
                self.calls += sum("column_parallel_matmul" in str(node.target) for node in module.graph.nodes)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


class Projections(nn.Module):
    def __init__(self, mesh: dist.device_mesh.DeviceMesh | None, sequence_parallel: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linears = nn.ModuleList(nn.Linear(6, out, dtype=torch.float64) for out in (8, 4, 3))
        if mesh is not None:
            for i, linear in enumerate(list(self.linears)):
                assert isinstance(linear, nn.Linear)
                self.linears[i] = ColumnParallelLinear.from_linear(
                    linear, mesh=mesh, sequence_parallel=sequence_parallel, gather_output=True
                )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x) for linear in self.linears)
        return q.sum(-1) * k.prod(-1) + v.sin().sum(-1)


class Checkpointed(nn.Module):
    """`model` inside a checkpoint; unchanged if `use_reentrant` is None."""

    def __init__(self, model: Projections, use_reentrant: bool | None) -> None:
        super().__init__()
        self.linears, self.model, self.use_reentrant = model.linears, [model], use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.use_reentrant is None:
            return self.model[0](x)
        return checkpoint(self.model[0], x, use_reentrant=self.use_reentrant)


def shared_projections(group: dist.ProcessGroup, sequence_parallel: bool = False) -> Projections:
    model = Projections(device_mesh(group), sequence_parallel)
    share_gather(list(model.linears))
    return model


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_results_are_those_of_separate_layers(group: dist.ProcessGroup, sequence_parallel: bool) -> None:
    full, model = Projections(None), shared_projections(group, sequence_parallel)
    dim, tokens = 0 if sequence_parallel else None, 2 * group.size()
    for use_reentrant in (None, False, True):
        with counting() as counted:
            assert_same(group, full, Checkpointed(model, use_reentrant), (tokens, 6), cut=dim)
            assert layers_of(counted) == [3] * (1 if use_reentrant is None else 2)
        x = part(seeded(tokens, 6, dtype=torch.float64), dim, group)
        with torch.no_grad():
            without = model(x)
        assert torch.equal(model(x), without)


@on_ranks(2)
def test_never_stale(group: dist.ProcessGroup) -> None:
    model = shared_projections(group)
    alone = Projections(device_mesh(group))  # the same weights, no group
    q, k, _ = model.linears
    x = seeded(4, 6, dtype=torch.float64)

    def same(i: int, x: Tensor) -> None:
        assert torch.equal(model.linears[i](x), alone.linears[i](x))

    with counting() as counted:
        q(x)
        x.add_(1)  # written to in place
        same(1, x)
        same(2, x)
        assert layers_of(counted) == [3, 3]
    with counting() as counted:  # an equal tensor is not the same tensor
        x = x.clone()
        q(x)
        same(1, x.clone())
        assert layers_of(counted) == [3, 3]
    with counting() as counted:  # a part is used only once
        x = x.clone()
        for _ in range(3):
            same(0, x)
        assert layers_of(counted) == [3, 3, 3]
    x = x.clone()
    q(x)
    with torch.no_grad():
        for projections in (model, alone):
            projections.linears[1].weight.mul_(2)
    same(1, x)
    x = x.clone()
    with torch.no_grad():
        q(x)
    assert k(x).requires_grad  # gathered under no_grad, used under grad
    with torch.inference_mode():  # inference tensors have no version counter
        y = seeded(4, 6, dtype=torch.float64)
        q(y)
        y.add_(1)
        same(2, y)
    single = Projections(device_mesh(group)).float()
    share_gather(list(single.linears))
    z = seeded(4, 6)
    single.linears[0](z)
    with torch.autocast("cpu", torch.bfloat16):
        assert single.linears[1](z).dtype == torch.bfloat16


@on_ranks(2)
def test_nothing_is_kept_alive(group: dist.ProcessGroup) -> None:
    model, other = shared_projections(group), shared_projections(group)
    x = seeded(4, 6, dtype=torch.float64)
    held = weakref.ref(x)
    model(x)
    del x
    gc.collect()
    assert held() is None
    x = seeded(4, 6, dtype=torch.float64)
    held = weakref.ref(x)
    model.linears[0](x)  # interrupted: two parts are left
    other(seeded(4, 6, dtype=torch.float64))  # a call of another group
    del x
    gc.collect()
    assert held() is None

    model.linears[0](seeded(4, 6, dtype=torch.float64))
    layer = weakref.ref(model.linears[0])
    del model
    gc.collect()
    assert layer() is None


@pytest.mark.full
@on_ranks(2)
def test_under_compile(group: dist.ProcessGroup) -> None:
    full, model = Projections(None), shared_projections(group)
    x_full = seeded(4, 6, dtype=torch.float64).requires_grad_()
    full(x_full).sum().backward()
    body = {
        "plain": lambda x: model(x),
        "inside a checkpoint": lambda x: checkpoint(lambda x: model(x * 1.0), x, use_reentrant=False),
        "input of a checkpoint": lambda x: checkpoint(model, x, use_reentrant=False),
    }
    for name, run in body.items():
        torch._dynamo.reset()
        model.zero_grad()
        x = x_full.detach().clone().requires_grad_()
        counted = CountingBackend()
        y = torch.compile(run, fullgraph=True, backend=counted)(x)
        # A checkpointed region must not mutate its inputs, so each layer computes separately there.
        assert counted.calls == (3 if name == "input of a checkpoint" else 1), name
        y.sum().backward()
        torch.testing.assert_close(y, full(x_full), **EXACT)
        torch.testing.assert_close(x.grad, x_full.grad, **EXACT)
        assert_same_parameters(model, full)

    torch._dynamo.reset()
    q, k, _ = model.linears

    @torch.compile(fullgraph=True, backend="aot_eager")
    def written_between(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + 1
        first = q(x)
        x.mul_(2)
        return first, k(x)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def one(x: Tensor) -> Tensor:
        return q(x)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def another(x: Tensor) -> Tensor:
        return k(x)

    with torch.no_grad():
        x = seeded(4, 6, dtype=torch.float64)
        first, second = written_between(x)
        torch.testing.assert_close(first, full.linears[0](x + 1), **EXACT)
        torch.testing.assert_close(second, full.linears[1]((x + 1) * 2), **EXACT)
        one(x)  # its parts do not reach another graph, nor code that is not compiled
        x.add_(1)
        torch.testing.assert_close(another(x), full.linears[1](x), **EXACT)
        one(x)
        x.add_(1)
        torch.testing.assert_close(k(x), full.linears[1](x), **EXACT)


@on_ranks(2)
def test_pruned_layers(group: dist.ProcessGroup) -> None:
    """A pruned layer's weight is computed before each of its calls; before the first layer's it is the last step's."""
    full, model = Projections(None), shared_projections(group)
    x = seeded(4, 6, dtype=torch.float64)
    for one in (full, model):
        for linear in one.linears[1:]:
            prune.identity(linear, "weight")
            linear.weight_mask[:, ::2] = 0.0
    for _ in range(3):
        outputs = [one(x) for one in (full, model)]
        torch.testing.assert_close(*outputs)
        for one, output in zip((full, model), outputs, strict=True):
            one.zero_grad()
            output.sum().backward()
    for (name, p), expected in zip(model.named_parameters(), full.parameters(), strict=True):
        assert p.grad is not None, name
        torch.testing.assert_close(p.grad.full_tensor(), expected.grad, check_dtype=True)
