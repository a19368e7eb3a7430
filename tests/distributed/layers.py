"""A layer over a mesh against the unsharded one it came from: outputs, gradients of inputs and of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fused_tp.runtime.partition import shard_range
from tests.reference import seeded

# fp64: what is left is the order of summation.
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def part(t: Tensor, dim: int | None, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of `t`; all of it where `dim` is None."""
    if dim is None:
        return t
    start, stop = shard_range(t.shape[dim], group.size(), group.rank())
    return t.narrow(dim, start, stop - start).contiguous()


def assert_same(
    group: dist.ProcessGroup,
    full: nn.Module,
    sharded: nn.Module,
    shape: Sequence[int] | Tensor,
    *,
    cut: int | None = None,
    out_cut: int | None = None,
    full_given: Sequence[Any] = (),
    **given: Any,
) -> None:
    """`sharded` computes this rank's part of what `full` does from x of `shape` (or from these ids), bit for bit alike
    in its parameters and to rounding in the rest; its input is cut along `cut`, its output along `out_cut`."""
    full.zero_grad()
    sharded.zero_grad()
    ids = isinstance(shape, Tensor)
    x_full = shape if ids else seeded(*shape, dtype=torch.float64, seed=1).requires_grad_()
    x = x_full if ids else part(x_full.detach(), cut, group).clone().requires_grad_()
    y_full, y = full(x_full, *full_given), sharded(x, **given)
    grad = seeded(*y_full.shape, dtype=torch.float64, seed=2)
    y_full.backward(grad)
    y.backward(part(grad, out_cut, group))
    torch.testing.assert_close(y, part(y_full, out_cut, group), **EXACT)
    if not ids:
        torch.testing.assert_close(x.grad, part(x_full.grad, cut, group), **EXACT)
    assert_same_parameters(sharded, full)


def assert_same_parameters(sharded: nn.Module, full: nn.Module) -> None:
    """Equal values under the same names, and the same gradients, as DTensors of one placement."""
    theirs = dict(full.named_parameters())
    assert {name for name, _ in sharded.named_parameters()} == set(theirs)
    for name, mine in sharded.named_parameters():
        wanted = theirs[name].grad
        assert isinstance(mine, DTensor) and torch.equal(mine.full_tensor(), theirs[name]), name
        assert (mine.grad is None) == (wanted is None), name
        if wanted is not None:
            assert isinstance(mine.grad, DTensor) and mine.grad.placements == mine.placements, name
            found = mine.grad.full_tensor()
            torch.testing.assert_close(found, wanted, msg=lambda m, name=name: f"{name}: {m}", **EXACT)
