"""Gradients accumulated into `main_grad`: once per backward, in every form of backward, from ops and from layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import fused_tp
from fused_tp.nn import ColumnParallelLinear, ParallelMLP, RowParallelLinear, VocabParallelEmbedding
from fused_tp.pipelining import dw_builder
from tests.reference import seeded
from tests.workers import device_mesh, on_ranks


class Ops(nn.Module):
    """Module that calls the ops directly."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group, rank = group, dist.get_rank(group)
        for i, name in enumerate(("up", "gate", "down", "joint", "out")):
            setattr(self, name, nn.Parameter(seeded(6, 6, dtype=torch.float64, seed=10 * i + rank)))
        self.bias = nn.Parameter(seeded(6, dtype=torch.float64, seed=5))

    def forward(self, x: Tensor) -> Tensor:
        up, gate = fused_tp.all_gather_matmul(x, [self.up, self.gate], group=self.group)
        x = fused_tp.matmul_reduce_scatter(up * gate, self.down, group=self.group)
        x = fused_tp.column_parallel_matmul(x, self.joint, self.bias, group=self.group)
        return fused_tp.matmul_all_reduce(x, self.out, group=self.group)


def layers(group: Any) -> nn.Module:
    """Layers that shard unevenly over three ranks, and modules sharded by styles for `parallelize_module`."""
    mesh, of = device_mesh(group), {"dtype": torch.float64}
    torch.manual_seed(0)
    up, down = ColumnParallelLinear(6, 8, mesh=mesh, **of), RowParallelLinear(8, 6, mesh=mesh, **of)
    plain = nn.Sequential(nn.Linear(6, 8, **of), nn.Linear(8, 6, **of))
    styles = {"0": fused_tp.FusedColwiseParallel(), "1": fused_tp.FusedRowwiseParallel()}
    return nn.Sequential(up, down, ParallelMLP(6, 12, mesh=mesh, **of), parallelize_module(plain, mesh, styles))


def give_main_grads(net: nn.Module, as_dtensor: bool, flagged: bool) -> None:
    for p in net.parameters():
        of: Any = p
        zeros = torch.zeros_like(p.detach())
        of.main_grad = zeros.to_local() if isinstance(zeros, DTensor) and not as_dtensor else zeros
        vars(of).pop("grad_added_to_main_grad", None)
        if flagged:
            of.grad_added_to_main_grad = False


def backward(net: nn.Module, x: Tensor) -> int:
    net(x).sum().backward()
    return 1


def twice_accumulated(net: nn.Module, x: Tensor) -> int:
    return backward(net, x) + backward(net, x)


def of_the_input(net: nn.Module, x: Tensor) -> int:
    torch.autograd.grad(net(x).sum(), [x])
    return 0


def of_the_weights(net: nn.Module, x: Tensor) -> int:
    torch.autograd.grad(net(x).sum(), list(net.parameters()))
    return 1


def of_both(net: nn.Module, x: Tensor) -> int:
    torch.autograd.grad(net(x).sum(), [x, *net.parameters()])
    return 1


def split(net: nn.Module, x: Tensor) -> int:
    """Run backward in two halves, like torch's pipeline schedules."""
    y = net(x)
    weights = list(net.parameters())
    _, groups = stage_backward_input([y], [torch.ones_like(y)], [x], iter(weights))
    stage_backward_weight(iter(weights), groups)
    return 1


def split_in_halves(net: nn.Module, x: Tensor) -> int:
    with fused_tp.split_backward():
        return split(net, x) + twice_accumulated(net, x) + of_the_input(net, x) + recomputed(net, x)


def deferred(net: nn.Module, x: Tensor) -> int:
    """Run backward with deferred weight gradients, like torch's pipeline stages with a `dw_builder`."""
    build = dw_builder(net)
    net(x).sum().backward()
    build()()
    net._forward_pre_hooks.clear()
    net._forward_hooks.clear()
    return 1


def recomputed(net: nn.Module, x: Tensor) -> int:
    for reentrant in (False, True):
        checkpoint(net, x, use_reentrant=reentrant).sum().backward()
    return 2


MODES = (
    backward,
    twice_accumulated,
    of_the_input,
    of_the_weights,
    of_both,
    split,
    recomputed,
    split_in_halves,
    deferred,
)


@pytest.mark.parametrize("kind", [Ops, layers])
@on_ranks(1, 2, 3)
def test_main_grad_gets_what_is_asked_for_once(group: Any, kind: Callable[[Any], nn.Module]) -> None:
    net = kind(group)
    x = seeded(4, 6, dtype=torch.float64, seed=dist.get_rank(group) if kind is Ops else 0).requires_grad_()
    net(x).sum().backward()
    wanted = [p.grad.detach().clone() for p in net.parameters() if p.grad is not None]
    parameters = list(net.parameters())
    assert len(wanted) == len(parameters)
    for mode in MODES:
        for as_dtensor, flagged in ((False, False), (True, True)):
            net.zero_grad()
            give_main_grads(net, as_dtensor, flagged)
            times = mode(net, x)
            for p, grad in zip(parameters, wanted, strict=True):
                found, grad = (t.to_local() if isinstance(t, DTensor) else t for t in (p.main_grad, grad))
                what = (mode.__name__, as_dtensor, flagged, tuple(p.shape))
                torch.testing.assert_close(found, grad * times, msg=lambda m, what=what: f"{what}: {m}")
                if p.grad is None:
                    assert times == 0 or not flagged or mode in (of_the_weights, of_both), what
                else:
                    assert flagged or mode in (split, split_in_halves), what
                    assert not (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad).any(), what
                if flagged:
                    assert p.grad_added_to_main_grad == (times > 0), what


@on_ranks(2)
def test_main_grad_of_tied_and_frozen_weights_and_autocast(group: Any) -> None:
    embedding: Any = VocabParallelEmbedding(7, 4, mesh=device_mesh(group))
    head = ColumnParallelLinear(4, 7, bias=False, mesh=device_mesh(group))
    head.weight = embedding.weight
    ids = torch.tensor([0, 3, 3, 6])
    head(embedding(ids)).sum().backward()
    wanted, embedding.weight.grad = embedding.weight.grad.to_local(), None
    embedding.weight.main_grad = torch.zeros_like(wanted)
    head(embedding(ids)).sum().backward()
    assert embedding.weight.grad is None
    torch.testing.assert_close(embedding.weight.main_grad, wanted)
    x = torch.ones(3, 4)
    weight: Any = nn.Parameter(torch.ones(5, 4))
    frozen: Any = nn.Parameter(torch.ones(5, 4), requires_grad=False)
    weight.main_grad, frozen.main_grad = torch.zeros(5, 4), torch.zeros(5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        a, b = fused_tp.column_parallel_matmul(x, [weight, frozen], group=group)
        b = b + fused_tp.column_parallel_matmul(x, weight, group=group)
        (a + b).float().sum().backward()
    assert weight.main_grad.eq(6).all() and weight.grad is None and not frozen.main_grad.any()
