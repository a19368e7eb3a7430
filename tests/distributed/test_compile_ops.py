"""torch.compile(fullgraph=True), activation checkpointing and autocast of every op, on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fused_tp
from fused_tp.ops import collectives
from tests.distributed.schedule_variants import SCHEDULES, run_variant
from tests.reference import seeded
from tests.workers import device_mesh, on_ranks


def functions(group: Any) -> dict[str, Callable[[Tensor, Tensor, Tensor], Any]]:
    """Every op as a function of x [2, 4, 6], weight [6, 6] and a vector [6]."""
    target = torch.tensor([[0, 5, 11, -100], [6, 3, 2, 1]])
    mesh = device_mesh(group)
    return {
        "all_gather_matmul": lambda x, w, b: fused_tp.all_gather_matmul(x, w, b, group=group, gather_dim=1),
        "all_gather_matmul_list": lambda x, w, b: sum(
            t.sin().sum()
            for t in fused_tp.all_gather_matmul(x, [w, 2 * w], [None, b], group=mesh, return_gathered=True)[0]
        ),
        "matmul_reduce_scatter": lambda x, w, b: fused_tp.matmul_reduce_scatter(x, w, b, group=mesh, scatter_dim=-2),
        "matmul_all_reduce": lambda x, w, b: fused_tp.matmul_all_reduce(x, w, b, group=group),
        "column_parallel_matmul": lambda x, w, b: fused_tp.column_parallel_matmul(x, w, b, group=group),
        "all_reduce_rms_norm": lambda x, w, b: sum(fused_tp.all_reduce_rms_norm(x @ w, x, b, 1e-6, group=group)),
        "matmul_all_reduce_rms_norm": lambda x, w, b: sum(
            fused_tp.matmul_all_reduce_rms_norm(x, w, x, b, 1e-6, group=mesh)
        ),
        "vocab_parallel_cross_entropy": lambda x, w, b: fused_tp.vocab_parallel_cross_entropy(
            x @ w + b, target, group=group, label_smoothing=0.1
        ),
        "collectives": lambda x, w, b: collectives.gather(
            collectives.scatter(
                fused_tp.all_gather(
                    fused_tp.reduce_scatter(collectives.copy_to_group(x, group=group) @ w, 1, group=group),
                    1,
                    group=group,
                ),
                0,
                group=group,
            )
            * fused_tp.all_reduce(b.sum(), group=group),
            0,
            group=group,
        ),
    }


def inputs(group: Any) -> list[Tensor]:
    rank = dist.get_rank(group)
    return [seeded(*shape, seed=10 * rank + i).requires_grad_() for i, shape in enumerate([(2, 4, 6), (6, 6), (6,)])]


def outcome(fn: Callable[..., Any], leaves: list[Tensor]) -> list[Tensor]:
    for t in leaves:
        t.grad = None
    y = fn(*leaves)
    y.float().square().sum().backward()
    return [y.detach(), *(t.grad.clone() for t in leaves if t.grad is not None)]


@on_ranks(2)
def test_compile(group: Any) -> None:
    for name, fn in functions(group).items():
        torch._dynamo.reset()
        leaves = inputs(group)
        eager = outcome(fn, leaves)
        compiled = outcome(torch.compile(fn, fullgraph=True, backend="aot_eager"), leaves)
        for ours, theirs in zip(compiled, eager, strict=True):
            torch.testing.assert_close(ours, theirs, msg=lambda said, name=name: f"{name}: {said}")


@on_ranks(2)
def test_compile_with_dynamic_shapes(group: Any) -> None:
    torch._dynamo.reset()
    fn = functions(group)["all_gather_matmul"]
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager", dynamic=True)
    _, w, b = inputs(group)
    for length in (4, 7, 9):
        x = seeded(2, length, 6, seed=length).requires_grad_()
        for ours, theirs in zip(outcome(compiled, [x, w, b]), outcome(fn, [x, w, b]), strict=True):
            torch.testing.assert_close(ours, theirs)


def checkpointed_like_stored(group: Any) -> None:
    for fn in functions(group).values():
        leaves = inputs(group)
        stored = outcome(fn, leaves)
        again = outcome(lambda *args, fn=fn: checkpoint(fn, *args, use_reentrant=False), leaves)
        for ours, theirs in zip(again, stored, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_activation_checkpointing(schedule: str) -> None:
    run_variant(schedule, 2, checkpointed_like_stored)


def under_autocast(group: Any) -> None:
    """Matmuls run in bf16 and give the gradients their leaves' dtype; residual streams and losses stay fp32."""
    bf16 = {"all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "column_parallel_matmul"}
    for name, fn in functions(group).items():
        leaves = inputs(group)
        exact = outcome(fn, leaves)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = fn(*leaves)
            assert name not in bf16 or y.dtype == torch.bfloat16, f"{name} gave {y.dtype}"
            assert "norm" not in name or y.dtype == torch.float32, f"{name} gave {y.dtype}"
        low = outcome(lambda *args, fn=fn: _in_autocast(fn, args), leaves)
        for ours, theirs, leaf in zip(low[1:], exact[1:], leaves, strict=True):
            assert ours.dtype == leaf.dtype
            scale = theirs.abs().max().item()
            torch.testing.assert_close(ours / scale, theirs / scale, rtol=0.0, atol=0.1, msg=name)


def _in_autocast(fn: Callable[..., Any], args: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return fn(*args)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_autocast(schedule: str) -> None:
    run_variant(schedule, 2, under_autocast)
