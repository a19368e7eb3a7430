"""Two levels: ranks of one machine that take themselves for several hosts, shared memory inside and gloo across."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fused_tp
from fused_tp.ops import collectives
from fused_tp.runtime.group import resolve_group
from fused_tp.schedules import hierarchical
from fused_tp.schedules.hierarchical import Hierarchical
from fused_tp.schedules.select import select_schedule
from fused_tp.transport.hosts import ranks_per_host
from tests.reference import assert_within_dtype_error
from tests.workers import fresh_ranks, run_ranks

pytest.importorskip("fused_tp._core", reason="needs the native core: pip install -e .")


@pytest.mark.parametrize(
    ("names", "answer"),
    [
        ("aabb", 2),
        ("aaabbb", 3),
        ("aabbcc", 2),
        ("aaaa", "all of its ranks are on one host"),
        ("abcd", "each of its ranks is on a host of its own"),
        ("abab", "its 4 ranks are not laid out host by host, equally many on each of 2 hosts"),
        ("aaab", "not laid out host by host"),
        ("aabbb", "not laid out host by host"),
        ("aabbaa", "not laid out host by host"),
    ],
)
def test_hosts_have_equally_many_ranks_side_by_side(names: str, answer: int | str) -> None:
    found = ranks_per_host(list(names))
    assert found == answer if isinstance(answer, int) else answer in str(found)


def on_hosts(names: str) -> Any:
    """A new group of the first ranks, on hosts of these names; the world makes it."""
    os.environ["FUSED_TP_SCHEDULE"] = "hierarchical"
    rank = dist.get_rank()
    if rank < len(names):
        os.environ["FUSED_TP_HOST"] = names[rank]
    return dist.new_group(list(range(len(names))))


def seeded(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def same_everywhere(group: Any, x: Tensor) -> None:
    everyone: list[Tensor | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, x.detach(), group=group)
    assert all(torch.equal(other, x.detach()) for other in everyone if other is not None)


def all_ops(_: Any, names: str, dtype: torch.dtype, chunk_bytes: int) -> list[str]:
    group = on_hosts(names)
    if dist.get_rank() >= len(names):
        return []
    hierarchical.CHUNK_BYTES = chunk_bytes
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    described = resolve_group(group)
    made = select_schedule("all_reduce", described, dtype, torch.device("cpu"), 3, None, 4)
    assert isinstance(made, Hierarchical)
    terms = world + 40
    for dim, lengths in ((0, (2 * world, 3)), (1, (2, 3 * world)), (1, (3, 2 * world + 1)), (0, (world - 1, 2))):
        # Shards that are not equally long go flat, and come out right.
        x64 = seeded(1, *lengths, 10)
        shards = torch.tensor_split(x64, world, dim) if lengths[dim] % world == 0 else None
        chunk = -(-lengths[dim] // world)
        own = (
            shards[rank]
            if shards is not None
            else x64.narrow(dim, min(rank * chunk, lengths[dim]), max(0, min(chunk, lengths[dim] - rank * chunk)))
        )
        x = own.to(dtype).requires_grad_()
        weights = [seeded(2, 6, 10), seeded(3, 5, 10)]
        ws = [w.to(dtype).requires_grad_() for w in weights]
        size = None if lengths[dim] % world == 0 else lengths[dim]
        (y, z), gathered = fused_tp.all_gather_matmul(
            x, ws, group=group, gather_dim=dim, return_gathered=True, gather_size=size
        )
        whole = x64.to(dtype).double()
        assert torch.equal(gathered, x64.to(dtype))
        assert_within_dtype_error(y, whole @ ws[0].detach().double().t(), dtype, reduced_over=10)
        assert_within_dtype_error(z, whole @ ws[1].detach().double().t(), dtype, reduced_over=10)
        (y.sum() + z.sum()).backward()
        # d x_shard = sum over ranks of ones @ w, the same for every row
        expected = world * (ws[0].detach().double().sum(0) + ws[1].detach().double().sum(0))
        assert x.grad is not None
        assert_within_dtype_error(x.grad, expected.expand(x.shape), dtype, reduced_over=terms)
        partial64 = [seeded(100 + r, *lengths, 10) for r in range(world)]
        total = sum(p.to(dtype).double() for p in partial64)
        mine = partial64[rank].to(dtype)
        summed = collectives.all_reduce(mine, group=group)
        assert_within_dtype_error(summed, total, dtype, reduced_over=world)
        same_everywhere(group, summed)
        part = collectives.reduce_scatter(mine, dim, group=group)
        start = min(rank * chunk, lengths[dim])
        assert_within_dtype_error(part, total.narrow(dim, start, part.shape[dim]), dtype, reduced_over=world)
        w64, bias = seeded(5, 7, 10), seeded(6, 7).to(dtype)
        w = w64.to(dtype).requires_grad_()
        product = total @ w.detach().double().t() + bias.double()
        x = mine.clone().requires_grad_()
        y = fused_tp.matmul_all_reduce(x, w, bias, group=group)
        assert_within_dtype_error(y, product, dtype, reduced_over=terms)
        same_everywhere(group, y)
        x2 = mine.clone().requires_grad_()
        part = fused_tp.matmul_reduce_scatter(x2, w, bias, group=group, scatter_dim=dim)
        assert_within_dtype_error(part, product.narrow(dim, start, part.shape[dim]), dtype, reduced_over=terms)
        part.sum().backward()
        assert x2.grad is not None
        assert_within_dtype_error(x2.grad, w.detach().double().sum(0).expand(x2.shape), dtype, reduced_over=terms)
        residual, norm_weight = seeded(7, *lengths, 7).to(dtype), seeded(8, 7).to(dtype)
        normed, new_residual = fused_tp.matmul_all_reduce_rms_norm(
            mine, w.detach(), residual, norm_weight, 1e-6, group=group
        )
        assert_within_dtype_error(
            new_residual, total @ w.detach().double().t() + residual.double(), dtype, reduced_over=terms
        )
        same_everywhere(group, normed)
    explained = str(fused_tp.explain("matmul_all_reduce", (4, 8), (6, 8), dtype=dtype, group=group))
    hosts = described.memo["hosts"]
    return [explained, str(hosts.inside.ranks), str(hosts.across.ranks)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_bytes", [32, 1 << 20])
def test_two_hosts_of_two_ranks(dtype: torch.dtype, chunk_bytes: int) -> None:
    answers = run_ranks(4, all_ops, "aabb", dtype, chunk_bytes)
    assert [answer[1:] for answer in answers] == [
        ["(0, 1)", "(0, 2)"],
        ["(0, 1)", "(1, 3)"],
        ["(2, 3)", "(0, 2)"],
        ["(2, 3)", "(1, 3)"],
    ]
    assert "hierarchical over memory inside of hosts, messages across" in answers[0][0]


def whole_and_part(group: Any) -> None:
    all_ops(group, "aabbcc", torch.float32, 64)
    all_ops(group, "aabb", torch.float32, 64)  # a part of the world, whose other ranks know nothing of its hosts


def test_three_hosts_of_two_ranks_and_two_of_them() -> None:
    for outcome in fresh_ranks(6, whole_and_part):
        outcome.unwrap()


def refused(_: Any, names: str) -> str:
    group = on_hosts(names)
    with pytest.raises(ValueError) as caught:
        fused_tp.matmul_all_reduce(torch.ones(2, 3), torch.ones(4, 3), group=group)
    return str(caught.value)


@pytest.mark.parametrize(("names", "why"), [("aaaa", "one host"), ("abcd", "a host of its own"), ("abab", "laid out")])
def test_other_layouts_are_refused_in_a_sentence(names: str, why: str) -> None:
    for said in run_ranks(4, refused, names):
        assert "Schedule 'hierarchical' cannot serve this group" in said and why in said


def without_shared_memory(group: Any) -> str:
    if dist.get_rank() > 1:  # one host lacks it, and then all do without
        os.environ["FUSED_TP_SHM"] = "0"
    return refused(group, "aabb")


def test_without_fast_links_inside_there_is_nothing_to_gain() -> None:
    for outcome in fresh_ranks(4, without_shared_memory):
        assert "no fast links inside of a host" in outcome.unwrap()
