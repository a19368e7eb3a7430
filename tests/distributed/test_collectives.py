"""The plain collectives: results, gradients, and exact bits of everything that is not summed."""

from __future__ import annotations

import json
import unittest.mock
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fused_tp
from fused_tp.backends.messages.torch_dist import TorchDist
from fused_tp.core.partition import shard_range
from fused_tp.core.pending import Pending
from fused_tp.ops import collectives
from tests.distributed.schedule_cases import VARIANTS, run_variant
from tests.reference import assert_within_dtype_error, seeded
from tests.workers import device_mesh, on_ranks, run_fresh, run_ranks

SHAPES = [(1, 1), (5, 3), (2, 7, 3), (12, 8)]


def part(t: Tensor, dim: int, size: int, rank: int) -> Tensor:
    start, stop = shard_range(t.shape[dim], size, rank)
    return t.narrow(dim, start, stop - start)


def moves(group: Any, dtype_name: str) -> None:
    dtype = getattr(torch, dtype_name)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    for shape in SHAPES:
        whole = seeded(*shape, dtype=dtype, seed=1)
        terms = [seeded(*shape, dtype=dtype, seed=10 + r) for r in range(size)]
        total = torch.stack([t.double() for t in terms]).sum(0)
        for dim in range(-1, len(shape) - 1):
            own = part(whole, dim, size, rank).clone().requires_grad_()
            # all_gather: every rank's gradient of the gathered tensor is a term of the shard's.
            gathered = fused_tp.all_gather(own, dim, group=group, gather_size=shape[dim])
            assert torch.equal(gathered, whole)
            gathered.backward(terms[rank])
            _close(own.grad, part(total, dim, size, rank), dtype, size)
            # gather: the gradient is the same on all ranks and counts once.
            own.grad = None
            gathered = collectives.gather(own, dim, group=group, gather_size=shape[dim])
            assert torch.equal(gathered, whole)
            gathered.backward(terms[0])
            assert torch.equal(_given(own.grad), part(terms[0], dim, size, rank))
            # reduce_scatter, and its gradient: an all_gather, so exact.
            term = terms[rank].clone().requires_grad_()
            reduced = fused_tp.reduce_scatter(term, dim, group=group)
            _close(reduced, part(total, dim, size, rank), dtype, size)
            reduced.backward(part(whole, dim, size, rank))
            assert torch.equal(_given(term.grad), whole)
            # scatter, likewise.
            replicated = whole.clone().requires_grad_()
            cut = collectives.scatter(replicated, dim, group=group)
            assert torch.equal(cut, part(whole, dim, size, rank))
            cut.backward(part(terms[0], dim, size, rank))
            assert torch.equal(_given(replicated.grad), terms[0])
        term = terms[rank].t().contiguous().t() if len(shape) == 2 else terms[rank].clone()
        term.requires_grad_()
        reduced = fused_tp.all_reduce(term, group=group)
        _close(reduced, total, dtype, size)
        assert torch.equal(term, terms[rank]), "all_reduce changed its input"
        reduced.backward(whole)
        assert torch.equal(_given(term.grad), whole)
        replicated = whole.clone().requires_grad_()
        copied = collectives.copy_to_group(replicated, group=group)
        assert torch.equal(copied, whole)
        copied.backward(terms[rank])
        _close(replicated.grad, total, dtype, size)
    scalar = fused_tp.all_reduce(torch.tensor(float(rank + 1), dtype=dtype), group=group)
    assert scalar.item() == size * (size + 1) / 2


def _given(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad


def _close(actual: Tensor | None, wanted: Tensor, dtype: torch.dtype, terms: int) -> None:
    assert_within_dtype_error(_given(actual), wanted, dtype, reduced_over=terms)


@pytest.mark.parametrize(("world_size", "dtype_name"), [(2, "bfloat16"), (3, "float64"), (4, "float32")])
@pytest.mark.parametrize("variant", VARIANTS)
def test_moves(variant: str, world_size: int, dtype_name: str) -> None:
    run_variant(variant, world_size, moves, dtype_name)


@pytest.mark.parametrize("dtype_name", ["float32", "bfloat16"])
def test_one_rank(dtype_name: str) -> None:
    run_ranks(1, moves, dtype_name)


def uneven_gather(group: Any) -> None:
    whole = seeded(5, 4)
    own = part(whole, 0, dist.get_world_size(group), dist.get_rank(group))
    assert torch.equal(fused_tp.all_gather(own, 0, group=group, gather_size=5), whole)


def test_ranks_choose_alike_for_uneven_shards(tmp_path: Path) -> None:
    """Shards of 3 and 2 rows are on both sides of this table's limit; the total of 5, known to all ranks, decides."""
    rules = [{"max_m": 2, "schedule": "plain"}, {"schedule": "one_sided"}]
    others = [{"max_m": 2, "schedule": "plain"}, {"schedule": "pipelined"}]
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"arch": {"default": {"shm": {"default": rules}, "default": {"default": others}}}}))
    run_ranks(2, uneven_gather, env={"FUSED_TP_TABLE": str(table), "FUSED_TP_TIMEOUT": "10"})


@on_ranks(2, env={"FUSED_TP_SCHEDULE": "plain"})
def test_strided_shards_are_dense_on_the_wire(group: Any) -> None:
    """Shards must be dense: gloo copies strided tensors, and NCCL rejects them."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    moved: list[Tensor] = []
    all_gather = TorchDist.all_gather

    def spy(self: TorchDist, op: str, x: Tensor) -> Pending[Tensor]:
        moved.append(x)
        return all_gather(self, op, x)

    for terms in (seeded(size, 4, 6)[:, :, ::2], seeded(size, 1, 1).expand(size, 4, 3)):  # 1-D with a stride of 2, of 0
        with unittest.mock.patch.object(TorchDist, "all_gather", spy):
            gathered = fused_tp.all_gather(terms[rank], 0, group=group)
        assert torch.equal(gathered, terms.flatten(0, 1))
    assert len(moved) == 2 and all(x.is_contiguous() for x in moved)


@on_ranks(2)
def test_second_derivative(group: Any) -> None:
    """Collectives are linear, so they can be differentiated twice: d2/dx2 of (sum over ranks of all_reduce(x)^3)."""
    x = torch.full((2,), float(dist.get_rank(group) + 1), dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(fused_tp.all_reduce(x, group=group).pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(second, torch.full((2,), 18.0, dtype=torch.float64))


@on_ranks(2, run=run_fresh)
def test_group_may_be_a_mesh_or_the_world(group: Any) -> None:
    for given in (device_mesh(group), None):
        assert torch.equal(fused_tp.all_reduce(torch.ones(3), group=given), torch.full((3,), 2.0))
