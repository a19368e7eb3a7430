"""Ring attention under gradcheck, torch.compile, activation checkpointing and autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fused_tp.ops.ring_attention import ring_attention
from fused_tp.ops.sequence import sequence_positions, shard_sequence, unshard_sequence
from tests.reference import attention64, seeded
from tests.workers import on_ranks, run_ranks

ROUTES = {
    "one_sided": {"FUSED_TP_SHM": "1", "FUSED_TP_SCHEDULE": "one_sided"},
    "pipelined": {"FUSED_TP_SHM": "0", "FUSED_TP_SCHEDULE": "pipelined"},
}
ON_EVERY_ROUTE = pytest.mark.parametrize("route", list(ROUTES))


def whole(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
    """Full tensors in and out, so that every rank perturbs the same element and sees the whole effect."""
    where = {"group": arguments["group"], "layout": arguments["layout"]}
    seq_len = q.shape[1]
    out = ring_attention(*(shard_sequence(t, 1, **where) for t in (q, k, v)), seq_len=seq_len, **arguments)
    return unshard_sequence(out, 1, seq_len=seq_len, **where)


def checked(group: dist.ProcessGroup) -> None:
    for causal, layout, fast in ((True, "zigzag", False), (False, "zigzag", True), (True, "contiguous", True)):
        torch.manual_seed(0)  # fast gradcheck draws directions, which must be those of all ranks
        q, k, v = (
            seeded(1, 5, heads, 2, dtype=torch.float64, seed=heads + i).requires_grad_()
            for i, heads in enumerate((2, 1, 1))
        )
        arguments = {"group": group, "causal": causal, "layout": layout}
        assert torch.autograd.gradcheck(
            lambda q, k, v, arguments=arguments: whole(q, k, v, **arguments), (q, k, v), fast_mode=fast
        )


@pytest.mark.full
@ON_EVERY_ROUTE
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradcheck(world_size: int, route: str) -> None:
    run_ranks(world_size, checked, env=ROUTES[route])


def block(x: Tensor, weight: Tensor, group: dist.ProcessGroup, seq_len: int) -> Tensor:
    """An attention block on a shard of the tokens, with positions."""
    x = x + sequence_positions(seq_len, group=group).to(x.dtype)[None, :, None].sin()
    q, k, v = (x @ weight).unflatten(-1, (6, 8)).split([4, 1, 1], dim=2)
    return ring_attention(q, k, v, group=group, causal=True, seq_len=seq_len).flatten(2)


def leaves(group: dist.ProcessGroup, seq_len: int) -> tuple[Tensor, Tensor]:
    x = shard_sequence(seeded(2, seq_len, 16), 1, group=group)
    return x.requires_grad_(), seeded(16, 48, seed=1, scale=0.25).requires_grad_()


def compiled(group: dist.ProcessGroup) -> None:
    torch._dynamo.reset()
    fn = torch.compile(block, fullgraph=True, backend="aot_eager")
    for seq_len in (11, 12):
        x, weight = leaves(group, seq_len)
        wanted = block(x, weight, group, seq_len)
        got = fn(x, weight, group, seq_len)
        torch.testing.assert_close(got, wanted)
        for one, two in zip(
            torch.autograd.grad(got.sum(), (x, weight)),
            torch.autograd.grad(wanted.sum(), (x, weight)),
            strict=True,
        ):
            torch.testing.assert_close(one, two)


@ON_EVERY_ROUTE
def test_compile(route: str) -> None:
    run_ranks(2, compiled, env=ROUTES[route])


@on_ranks(2)
def test_compile_of_sharding(group: dist.ProcessGroup) -> None:
    torch._dynamo.reset()

    def there_and_back(x: Tensor) -> Tensor:
        return unshard_sequence(shard_sequence(x, 1, group=group) * 2, 1, group=group, seq_len=x.shape[1])

    x = seeded(2, 7, 3).requires_grad_()
    got = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(got, 2 * x)
    got.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.full_like(x, 2.0))


def checkpointed(group: dist.ProcessGroup) -> None:
    x, weight = leaves(group, 10)
    wanted = torch.autograd.grad(block(x, weight, group, 10).sum(), (x, weight))
    out = checkpoint(block, x, weight, group, 10, use_reentrant=False)
    assert isinstance(out, Tensor)
    for one, two in zip(torch.autograd.grad(out.sum(), (x, weight)), wanted, strict=True):
        assert torch.equal(one, two)


@ON_EVERY_ROUTE
def test_activation_checkpointing(route: str) -> None:
    run_ranks(3, checkpointed, env=ROUTES[route])


@on_ranks(2)
def test_autocast(group: dist.ProcessGroup) -> None:
    q, k, v = (shard_sequence(seeded(1, 9, 2, 8, seed=i), 1, group=group).requires_grad_() for i in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = ring_attention(q, k.bfloat16(), v, group=group, return_lse=True, seq_len=9)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    out.sum().backward()
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in (q, k, v))


def frozen_keys(group: dist.ProcessGroup) -> None:
    """Only some ranks, or some inputs, need a gradient: messages must match all the same."""
    full = [seeded(1, 8, 2, 4, seed=i) for i in range(4)]
    q, k, v, grad = (shard_sequence(t, 1, group=group) for t in full)
    q.requires_grad_()
    v.requires_grad_(dist.get_rank(group) == 0)
    ring_attention(q, k, v, group=group).backward(grad)
    reference = [t.double().requires_grad_() for t in full[:3]]
    attention64(*reference)[0].backward(full[3].double())
    wanted = reference[0].grad
    assert wanted is not None and q.grad is not None
    torch.testing.assert_close(q.grad.double(), shard_sequence(wanted, 1, group=group), atol=1e-5, rtol=1e-5)


@ON_EVERY_ROUTE
def test_frozen_inputs(route: str) -> None:
    run_ranks(2, frozen_keys, env=ROUTES[route])


def test_only_once_differentiable() -> None:
    q = seeded(1, 3, 1, 4).requires_grad_()
    (grad,) = torch.autograd.grad(ring_attention(q, q, q, group=None).sum(), q, create_graph=False)
    assert not grad.requires_grad
    with pytest.raises(RuntimeError, match="differentiated only once"):
        torch.autograd.grad(ring_attention(q, q, q, group=None).sum(), q, create_graph=True)
