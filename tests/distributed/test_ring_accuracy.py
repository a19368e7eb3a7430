"""The error of ring attention does not grow with the group: whatever W is, each sum is rounded once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fused_tp import ring_attention, shard_sequence, ulysses_attention, unshard_sequence
from tests.attention_cases import ROUTES
from tests.attention_reference import dense_attention
from tests.reference import seeded
from tests.workers import run_ranks

pytestmark = pytest.mark.full

# "Within 1.05x of one rank"; sums of the same terms in another order differ by a little of it.
MOST = 1.05


def inputs(seq_len: int, heads: int) -> list[Tensor]:
    """q, k, v and the gradient of the output, in bf16."""
    return [seeded(1, seq_len, heads, 64, dtype=torch.bfloat16, seed=seed) for seed in range(4)]


def by_ranks(group: dist.ProcessGroup, op: str, seq_len: int, heads: int) -> list[Tensor]:
    """[out, dq, dk, dv] of the whole sequence."""
    attention = ring_attention if op == "ring" else ulysses_attention
    shards = [shard_sequence(t, 1, group=group) for t in inputs(seq_len, heads)]
    q, k, v = (t.requires_grad_() for t in shards[:3])
    out = attention(q, k, v, group=group, causal=True)
    grads = torch.autograd.grad(out, (q, k, v), shards[3])
    return [unshard_sequence(t.detach(), 1, group=group) for t in (out, *grads)]


def errors(got: list[Tensor], wanted: list[Tensor]) -> list[float]:
    return [float((one.double() - other).norm() / other.norm()) for one, other in zip(got, wanted, strict=True)]


def reference(seq_len: int, heads: int) -> list[Tensor]:
    q, k, v, grad = (t.double() for t in inputs(seq_len, heads))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    places = torch.arange(seq_len)
    distance = places[:, None] - places
    out, _ = dense_attention(q, k, v, distance >= 0, distance)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


SHAPE = 2048, 4  # tokens, heads


@pytest.fixture(scope="module")
def one_rank() -> tuple[list[Tensor], list[float]]:
    """The reference, and the error of one rank."""
    wanted = reference(*SHAPE)
    return wanted, errors(run_ranks(1, by_ranks, "ring", *SHAPE)[0], wanted)


@pytest.mark.parametrize(
    ("op", "world_size", "route"),
    [("ring", 2, "one_sided"), ("ring", 4, "one_sided"), ("ring", 4, "pipelined"), ("ulysses", 4, "one_sided")],
)
def test_as_near_as_one_rank(op: str, world_size: int, route: str, one_rank: tuple[list[Tensor], list[float]]) -> None:
    wanted, alone = one_rank
    together = errors(run_ranks(world_size, by_ranks, op, *SHAPE, env=ROUTES[route])[0], wanted)
    assert all(error <= MOST * one for error, one in zip(together, alone, strict=True)), (alone, together)
