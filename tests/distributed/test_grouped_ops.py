"""Grouped matmuls of experts against one process in fp64: forward, gradients, odd sizes, dtypes, W, schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fused_tp
from fused_tp.backends.grouped import Routing
from tests.distributed.schedule_cases import NEEDS_CORE, VARIANTS, run_variant
from tests.distributed.test_tp_ops import check, leaf, own_part
from tests.reference import gradients64, refuses, seeded
from tests.workers import on_ranks, run_ranks

# [B, M, K, N], experts, and experts per token. With more experts than rows, some experts are empty.
CASES = [((1, 1, 1, 1), 1, 1), ((2, 3, 5, 7), 4, 2), ((1, 13, 8, 12), 40, 3), ((3, 12, 8, 24), 3, 1)]


def route(tokens: int, experts: int, top_k: int) -> tuple[Routing, Tensor]:
    """Draw different experts for each token; return the routing and the sorted experts."""
    generator = torch.Generator().manual_seed(tokens + experts)
    chosen = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k].reshape(-1)
    sorted_experts, order = chosen.sort(stable=True)
    offsets = torch.bincount(sorted_experts, minlength=experts).cumsum(0).int()
    return Routing(order // top_k, offsets), sorted_experts


def up64(routing: Routing, experts: Tensor) -> Any:
    return lambda x, w: torch.einsum("sk,snk->sn", x.flatten(0, -2)[routing.tokens], w[experts])


def down64(routing: Routing, experts: Tensor, shape: tuple[int, ...]) -> Any:
    def down(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        rows = torch.einsum("sk,snk->sn", x, w[experts]) * scale[:, None]
        out = rows.new_zeros(int(torch.tensor(shape).prod()), rows.shape[1]).index_add(0, routing.tokens, rows)
        return out.view(*shape, -1)

    return down


def grouped_case(group: Any, dtype_name: str, transposed: bool) -> None:
    dtype = getattr(torch, dtype_name)
    for (b, m, k, n), count, top_k in CASES:
        routing, experts = route(b * m, count, top_k)
        rows = len(routing.tokens)
        name = f"{(b, m, k, n)} {count} experts"
        x, w = seeded(b, m, k, dtype=dtype, seed=1), seeded(count, n, k, dtype=dtype, seed=2, scale=k**-0.5)
        d = seeded(rows, n, dtype=dtype, seed=3)
        wanted, (dx, dw) = gradients64(up64(routing, experts), (x, w), d)
        for dim in (None, 0, 1):
            w_own = leaf(own_part(w, 1, group), transposed)
            if dim is None:
                x_own = leaf(x)
                y = fused_tp.column_parallel_grouped_matmul(x_own, w_own, *routing, group=group)
            else:
                x_own = leaf(own_part(x, dim, group))
                y = fused_tp.all_gather_grouped_matmul(
                    x_own, w_own, *routing, group=group, gather_dim=dim, gather_size=x.shape[dim]
                )
            y.backward(own_part(d, 1, group))
            check(f"{name} up", y, own_part(wanted, 1, group), dtype, k)
            check(f"{name} dx", x_own.grad, dx if dim is None else own_part(dx, dim, group), dtype, n * top_k)
            check(f"{name} dw", w_own.grad, own_part(dw, 1, group), dtype, rows)

        h, scale = seeded(rows, k, dtype=dtype, seed=4), seeded(rows, dtype=dtype, seed=5)
        d = seeded(b, m, n, dtype=dtype, seed=6)
        wanted, (dh, dw, dscale) = gradients64(down64(routing, experts, (b, m)), (h, w, scale), d)
        assert dscale is not None
        for dim in (None, 0, 1):
            h_own, w_own, s_own = leaf(own_part(h, 1, group)), leaf(own_part(w, 2, group), transposed), leaf(scale)
            if dim is None:
                y = fused_tp.grouped_matmul_all_reduce(h_own, w_own, *routing, s_own, shape=(b, m), group=group)
                y.backward(d)
            else:
                y = fused_tp.grouped_matmul_reduce_scatter(
                    h_own, w_own, *routing, s_own, shape=[b, m], group=group, scatter_dim=dim
                )
                y.backward(own_part(d, dim, group))
            check(f"{name} down", y, wanted if dim is None else own_part(wanted, dim, group), dtype, k * top_k)
            check(f"{name} dh", h_own.grad, own_part(dh, 1, group), dtype, n)
            check(f"{name} dw", w_own.grad, own_part(dw, 2, group), dtype, rows)
            assert s_own.grad is not None
            total = s_own.grad.double()
            dist.all_reduce(total, group=group)  # each rank holds one term
            # Each rank rounds its term to the dtype twice: as the gradient of a row, and as the sum of these.
            bound = 8 * torch.finfo(dtype).eps * dist.get_world_size(group) * (1 + dscale.abs().max())
            torch.testing.assert_close(total, dscale, atol=float(bound), rtol=0)


@pytest.mark.parametrize(
    ("world_size", "dtype_name"), [(2, "float64"), (3, "float64"), (2, "bfloat16"), (4, "float32"), (3, "float16")]
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_and_gradients(variant: str, world_size: int, dtype_name: str) -> None:
    run_variant(variant, world_size, grouped_case, dtype_name, dtype_name != "float64")


@pytest.mark.full
@NEEDS_CORE
@pytest.mark.parametrize("variant", ["one_shot", "two_shot", "copy_engine-chunked", "nccl_pipeline-chunked"])
def test_forward_and_gradients_on_doubles(variant: str) -> None:
    run_variant(variant, 2, grouped_case, "float32", True)


@pytest.mark.parametrize("dtype_name", ["float64", "bfloat16"])
def test_one_rank(dtype_name: str) -> None:
    run_ranks(1, grouped_case, dtype_name, True)


@on_ranks(2)
def test_ranks_of_different_rows(group: dist.ProcessGroup) -> None:
    """Ranks hold different experts, and none for some tokens; a factor may be more precise than the rows it scales."""
    x, w = seeded(6, 4, dtype=torch.bfloat16, seed=1), seeded(2, 5, 4, dtype=torch.bfloat16, seed=2)
    tokens = [torch.tensor([0, 2, 4, 1, 2]), torch.tensor([5, 2])][group.rank()]
    offsets = torch.tensor([[3, 5], [0, 2]][group.rank()], dtype=torch.int32)
    up = fused_tp.column_parallel_grouped_matmul(x.requires_grad_(), w, tokens, offsets, group=group)
    scale = torch.linspace(0.5, 1.5, len(tokens)).requires_grad_()
    given, given_scale = (tokens, offsets), scale.detach()
    eye = torch.eye(5, dtype=torch.bfloat16).expand(2, 5, 5)
    y = fused_tp.grouped_matmul_all_reduce(up, eye, tokens, offsets, scale, shape=(6,), group=group)
    y.sum().backward()
    every: list[Any] = [None, None]
    dist.all_gather_object(every, (tokens, offsets, scale.detach(), up.detach()), group=group)
    wanted = torch.zeros(6, 5, dtype=torch.float64)
    for tokens, _, scale, up in every:
        wanted.index_add_(0, tokens, up.double() * scale.double()[:, None])
    # Numbers up to 8 in bfloat16: each rank rounds its term, and the sum is rounded once more, by 2^-9 of its value.
    torch.testing.assert_close(y.double(), wanted, atol=0.05, rtol=0)
    assert not y[3].any() and x.grad is not None and not x.grad[3].any()
    own = leaf(own_part(x, 0, group))
    up = fused_tp.all_gather_grouped_matmul(own, w, *given, group=group)
    part = fused_tp.grouped_matmul_reduce_scatter(up, eye, *given, given_scale, shape=(6,), group=group)
    part.sum().backward()
    assert own.grad is not None
    assert torch.equal(part, own_part(y, 0, group)) and torch.equal(own.grad, own_part(x.grad, 0, group))


@on_ranks(2)
def test_no_rows(group: dist.ProcessGroup) -> None:
    none, offsets = torch.empty(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
    w, x = leaf(seeded(3, 4, 4)), leaf(seeded(2, 4))
    up = fused_tp.column_parallel_grouped_matmul(x, w, none, offsets, group=group)
    y = fused_tp.grouped_matmul_all_reduce(up, w, none, offsets, shape=(2,), group=group)
    y.sum().backward()
    assert up.shape == (0, 4) and torch.equal(y, torch.zeros(2, 4))
    assert w.grad is not None and not w.grad.any() and x.grad is not None and not x.grad.any()


@on_ranks(2)
def test_refusals(group: dist.ProcessGroup) -> None:
    routing, _ = route(4, 3, 2)
    x, w = seeded(4, 6), seeded(3, 5, 6)
    up = fused_tp.column_parallel_grouped_matmul
    refuses(ValueError, r"it must be \[experts, out, 6\]", up, x, w[0], *routing, group=group)
    refuses(TypeError, "tokens is torch.int32", up, x, w, routing.tokens.int(), routing.offsets, group=group)
    refuses(ValueError, "one for each expert", up, x, w, routing.tokens, routing.offsets[:2], group=group)
    refuses(
        ValueError,
        "ascending ends of the experts' rows, the last one equal to the number of rows, 8",
        up,
        x,
        w,
        routing.tokens,
        0 * routing.offsets,
        group=group,
    )
    refuses(ValueError, "tokens must be from 0 to 3", up, x, w, routing.tokens + 1, routing.offsets, group=group)
    down = fused_tp.grouped_matmul_all_reduce
    rows = seeded(8, 6)
    refuses(ValueError, r"it must be \[8, features\]", down, x, w, *routing, shape=(4,), group=group)
    refuses(ValueError, "scale has shape", down, rows, w, *routing, seeded(3), shape=(4,), group=group)
    refuses(ValueError, "shape is empty", down, rows, w, *routing, shape=(), group=group)
    refuses(TypeError, "shape must be a sequence", down, rows, w, *routing, shape=4, group=group)
    scatter = fused_tp.grouped_matmul_reduce_scatter
    refuses(ValueError, "scatter_dim", scatter, rows, w, *routing, shape=(4,), group=group, scatter_dim=1)
