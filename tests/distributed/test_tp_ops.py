"""Forward and all gradients of the tensor-parallel ops against one process in fp64: odd sizes, strides, dtypes, W."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fused_tp
from fused_tp.core.partition import shard_range
from tests.distributed.schedule_cases import NEEDS_CORE, SCHEDULES, VARIANTS, run_variant
from tests.reference import assert_within_dtype_error, gradients64, matmul64, refuses, rms_norm64, seeded
from tests.workers import on_ranks, run_ranks

# [B, M, K, N]: ones, primes, fewer than ranks (empty shards), multiples of nothing, and one that divides evenly.
Shape = tuple[int, int, int, int]
SHAPES = [(1, 1, 1, 1), (2, 3, 5, 7), (1, 13, 17, 11), (3, 12, 8, 24)]
DTYPES = ["float64", "float32", "bfloat16", "float16"]


def own_part(t: Tensor | None, dim: int, group: Any) -> Tensor:
    """Shard on this rank of a full tensor (or of a gradient, which must exist) along `dim`."""
    assert t is not None
    start, stop = shard_range(t.shape[dim], dist.get_world_size(group), dist.get_rank(group))
    return t.narrow(dim, start, stop - start)


def leaf(t: Tensor, strided: bool = False) -> Tensor:
    """Copy t to a leaf that requires grad; `strided` makes it a transposed view of other memory."""
    own = t.detach().clone()
    if strided and t.ndim >= 2:
        own = own.transpose(-1, -2).contiguous().transpose(-1, -2)
    return own.requires_grad_()


def problem(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [B, M, K], weight [N, K], bias [N] and the output's gradient [B, M, N], equal on every rank."""
    b, m, k, n = shape
    return (
        seeded(b, m, k, dtype=dtype, seed=1),
        seeded(n, k, dtype=dtype, seed=2, scale=k**-0.5),
        seeded(n, dtype=dtype, seed=3),
        seeded(b, m, n, dtype=dtype, seed=4),
    )


def check(name: str, actual: Tensor | None, wanted: Tensor | None, dtype: torch.dtype, reduced_over: int) -> None:
    """Compare with twice the rounding error of one op: the terms of a sum over ranks are rounded, and the result."""
    assert actual is not None and wanted is not None, f"{name} has no gradient"
    assert_within_dtype_error(actual, wanted, dtype, reduced_over=max(1, reduced_over), roundings=2, name=name)


class Matmul(NamedTuple):
    """Sharding of x, weight, bias and output of an op: a dim, "tokens" to try each dim of tokens, None: replicated."""

    run: Callable[..., Any]
    x: Any
    weight: int
    bias: int | None
    output: Any


MATMULS = {
    "all_gather_matmul": Matmul(
        lambda x, w, b, dim, size, group: fused_tp.all_gather_matmul(
            x, w, b, group=group, gather_dim=dim, gather_size=size, return_gathered=True
        ),
        *("tokens", 0, 0, -1),
    ),
    "matmul_reduce_scatter": Matmul(
        lambda x, w, b, dim, size, group: fused_tp.matmul_reduce_scatter(x, w, b, group=group, scatter_dim=dim),
        *(-1, 1, None, "tokens"),
    ),
    "matmul_all_reduce": Matmul(
        lambda x, w, b, dim, size, group: fused_tp.matmul_all_reduce(x, w, b, group=group), *(-1, 1, None, None)
    ),
    "column_parallel_matmul": Matmul(
        lambda x, w, b, dim, size, group: fused_tp.column_parallel_matmul(x, w, b, group=group), *(None, 0, 0, -1)
    ),
}


def matmul_case(group: Any, op: str, shape: Shape, dtype: torch.dtype, strided: bool = False) -> None:
    run, *cuts = MATMULS[op]
    *whole, d = problem(shape, dtype)
    wanted, grads = gradients64(matmul64, whole, d)
    rows, k, n = shape[0] * shape[1], shape[2], shape[3]

    def own(t: Tensor | None, cut: Any, dim: int) -> Tensor | None:
        return t if cut is None else own_part(t, dim if cut == "tokens" else cut, group)

    for dim in (0, -2) if "tokens" in cuts else (0,):
        leaves = []
        for t, cut in zip(whole, cuts, strict=False):
            part = own(t, cut, dim)
            assert part is not None
            leaves.append(leaf(part, strided))
        y = run(*leaves, dim, shape[1] if dim else shape[0], group)
        if op == "all_gather_matmul":
            y, gathered = y
            assert torch.equal(gathered, whole[0])
        y.backward(own(d, cuts[3], dim))
        check(f"{op} {shape} y", y, own(wanted, cuts[3], dim), dtype, k)
        for name, t, grad, cut, over in zip("xwb", leaves, grads, cuts, (n, rows, rows), strict=False):
            check(f"{op} {shape} d{name}", t.grad, own(grad, cut, dim), dtype, over)
    if op == "matmul_all_reduce":
        vector = fused_tp.matmul_all_reduce(leaves[0][0, 0], leaves[1], group=group)
        check(f"{shape} one row", vector, wanted[0, 0] - whole[2].double(), dtype, k)


def several_weights_case(group: Any, dtype_name: str, sequence_parallel: bool) -> None:
    """Three weights of different widths share one gather (or one reduction of dx); one of them has no bias."""
    dtype = getattr(torch, dtype_name)
    x, _, _, _ = problem((2, 7, 6, 1), dtype)
    widths = (5, 8, 4)
    ws = [seeded(n, 6, dtype=dtype, seed=10 + n, scale=0.4) for n in widths]
    bs = [seeded(5, dtype=dtype, seed=20), None, seeded(4, dtype=dtype, seed=21)]
    ds = [seeded(2, 7, n, dtype=dtype, seed=30 + n) for n in widths]
    x64 = leaf(x.double())
    ws64 = [leaf(w.double()) for w in ws]
    outs64 = [matmul64(x64, w, b) for w, b in zip(ws64, bs, strict=True)]
    torch.autograd.backward(outs64, [d.double() for d in ds])
    x_own = leaf(own_part(x, 1, group)) if sequence_parallel else leaf(x)
    ws_own = [leaf(own_part(w, 0, group)) for w in ws]
    bs_own = [None if b is None else leaf(own_part(b, 0, group)) for b in bs]
    if sequence_parallel:
        outs = fused_tp.all_gather_matmul(x_own, ws_own, bs_own, group=group, gather_dim=1, gather_size=7)
    else:
        outs = fused_tp.column_parallel_matmul(x_own, ws_own, bs_own, group=group)
    torch.autograd.backward(outs, [own_part(d, -1, group) for d in ds])
    assert x64.grad is not None and x_own.grad is not None
    dx = own_part(x64.grad, 1, group) if sequence_parallel else x64.grad
    # Each product is rounded when it is added to the previous one.
    assert_within_dtype_error(x_own.grad, dx, dtype, reduced_over=17, roundings=4, name="dx")
    for i, (out, out64, w, w64) in enumerate(zip(outs, outs64, ws_own, ws64, strict=True)):
        assert w64.grad is not None
        check(f"y[{i}]", out, own_part(out64.detach(), -1, group), dtype, 6)
        check(f"dw[{i}]", w.grad, own_part(w64.grad, 0, group), dtype, 14)
    assert bs_own[0] is not None
    check("db[0]", bs_own[0].grad, own_part(ds[0].double().sum((0, 1)), 0, group), dtype, 14)


def rms_norm_case(group: Any, shape: Shape, dtype: torch.dtype, strided: bool = False) -> None:
    """Both RMS norm ops. new_residual is compared first; the reference norm is that of the rounded new_residual."""
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    b, m, _, n = shape
    x, w, _, _ = problem(shape, dtype)
    residual, weight = seeded(b, m, n, dtype=dtype, seed=5), seeded(n, dtype=dtype, seed=6)
    d_normed, d_stream = seeded(b, m, n, dtype=dtype, seed=7), seeded(b, m, n, dtype=dtype, seed=8)
    partials = [seeded(b, m, n, dtype=dtype, seed=40 + r) for r in range(world_size)]
    total = torch.stack([p.double() for p in partials]).sum(0)
    for fused in (False, True):
        h, norm_weight = leaf(residual, strided), leaf(weight)
        if fused:
            x_own, w_own = leaf(own_part(x, -1, group), strided), leaf(own_part(w, 1, group), strided)
            normed, stream = fused_tp.matmul_all_reduce_rms_norm(x_own, w_own, h, norm_weight, 1e-6, group=group)
            stream64 = residual.double() + matmul64(x, w)
        else:
            partial = leaf(partials[rank], strided)
            normed, stream = fused_tp.all_reduce_rms_norm(partial, h, norm_weight, 1e-6, group=group)
            stream64 = residual.double() + total
        torch.autograd.backward([normed, stream], [d_normed, d_stream])
        s = stream.detach()
        normed64, (dh, dweight) = gradients64(lambda h, w: rms_norm64(h, w, 1e-6), (s, weight), d_normed)
        assert dh is not None
        dh = dh + d_stream.double()
        check(f"{shape} new_residual", stream, stream64, dtype, shape[2])
        check(f"{shape} normed", normed, normed64, dtype, n)
        check(f"{shape} d residual", h.grad, dh, dtype, n)
        check(f"{shape} d norm_weight", norm_weight.grad, dweight, dtype, b * m)
        if fused:
            dx, dw = dh @ w.double(), dh.flatten(0, 1).t() @ x.double().flatten(0, 1)
            check(f"{shape} dx", x_own.grad, own_part(dx, -1, group), dtype, n)
            check(f"{shape} dw", w_own.grad, own_part(dw, 1, group), dtype, b * m)
        else:
            check(f"{shape} d partial", partial.grad, dh, dtype, n)


def all_cases(group: Any, dtype_name: str, strided: bool) -> None:
    dtype = getattr(torch, dtype_name)
    for op, shape in itertools.product(MATMULS, SHAPES):
        matmul_case(group, op, shape, dtype, strided)
    for shape in SHAPES:
        rms_norm_case(group, shape, dtype, strided)
    several_weights_case(group, dtype_name, sequence_parallel=True)
    several_weights_case(group, dtype_name, sequence_parallel=False)


@pytest.mark.parametrize(
    ("world_size", "dtype_name"),
    [(2, "float64"), (3, "float64"), (4, "float64"), (2, "bfloat16"), (4, "bfloat16"), (3, "float32"), (3, "float16")],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_and_gradients(variant: str, world_size: int, dtype_name: str) -> None:
    strided = dtype_name in ("float32", "bfloat16")
    run_variant(variant, world_size, all_cases, dtype_name, strided)


# Schedules for GPUs, on test doubles; tests/kernels tests those of the fused kernels.
ON_DOUBLES = [
    *(("one_shot", 2, "bfloat16"), ("two_shot", 3, "float32"), ("multimem", 4, "float16"), ("two_shot", 2, "float64")),
    *(("copy_engine-chunked", 2, "float32"), ("copy_engine-chunked", 3, "bfloat16"), ("nccl_pipeline", 4, "float64")),
    *(("nccl_pipeline-chunked", *one) for one in ((2, "bfloat16"), (3, "float64"), (3, "float32"), (4, "float16"))),
]


@pytest.mark.full
@NEEDS_CORE
@pytest.mark.parametrize(("schedule", "world_size", "dtype_name"), ON_DOUBLES)
def test_forward_and_gradients_on_doubles(schedule: str, world_size: int, dtype_name: str) -> None:
    run_variant(schedule, world_size, all_cases, dtype_name, world_size == 2 or dtype_name == "float16")


@pytest.mark.parametrize("dtype_name", DTYPES)
def test_one_rank(dtype_name: str) -> None:
    run_ranks(1, all_cases, dtype_name, True)


def gathered_gradient_case(group: Any) -> None:
    """The gathered x is a differentiable output: its gradient is reduced over ranks into that of the shard."""
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    x, w, _, d = problem((2, 5, 3, 4), torch.float64)
    extra = [seeded(2, 5, 3, dtype=torch.float64, seed=50 + r) for r in range(world_size)]
    _, (dx, _) = gradients64(matmul64, (x, w), d)
    assert dx is not None
    for use_y in (True, False):
        x_shard = leaf(own_part(x, 1, group))
        y, gathered = fused_tp.all_gather_matmul(
            x_shard, own_part(w, 0, group), group=group, gather_dim=1, gather_size=5, return_gathered=True
        )
        loss = (gathered * extra[rank]).sum() + ((y * own_part(d, -1, group)).sum() if use_y else 0.0)
        loss.backward()
        wanted = torch.stack(extra).sum(0) + (dx if use_y else 0.0)
        check("dx", x_shard.grad, own_part(wanted, 1, group), torch.float64, 12)


def partly_used_case(group: Any) -> None:
    """Backward leaves out unused outputs and tensors that need no gradient."""
    x, w, b, d = problem((1, 6, 4, 6), torch.float64)
    _, (dx, dw, _) = gradients64(matmul64, (x, w, b), d)
    assert dx is not None and dw is not None
    x_shard, frozen, trained = leaf(own_part(x, 1, group)), own_part(w, 0, group), leaf(own_part(w, 0, group))
    y, _ = fused_tp.all_gather_matmul(x_shard, [frozen, trained], group=group, gather_dim=1, gather_size=6)
    y.backward(own_part(d, -1, group))
    assert trained.grad is None
    check("dx", x_shard.grad, own_part(dx, 1, group), torch.float64, 6)
    y = fused_tp.all_gather_matmul(own_part(x, 1, group), trained, group=group, gather_dim=1, gather_size=6)
    y.backward(own_part(d, -1, group))
    check("dw", trained.grad, own_part(dw, 0, group), torch.float64, 6)
    w_cols = leaf(own_part(w, 1, group))
    y = fused_tp.matmul_reduce_scatter(own_part(x, -1, group), w_cols, group=group, scatter_dim=1)
    y.backward(own_part(d, 1, group))
    check("dw of the row-parallel", w_cols.grad, own_part(dw, 1, group), torch.float64, 6)
    trained = leaf(own_part(w, 0, group))
    y = fused_tp.column_parallel_matmul(x, trained, group=group)
    y.backward(own_part(d, -1, group))
    check("dw of the column-parallel", trained.grad, own_part(dw, 0, group), torch.float64, 6)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("case", [gathered_gradient_case, partly_used_case])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_that_go_elsewhere(variant: str, case: Any, world_size: int) -> None:
    run_variant(variant, world_size, case)


def bits(group: Any, dtype_name: str) -> list[bytes]:
    dtype = getattr(torch, dtype_name)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    x = seeded(33, 16 * world_size, dtype=dtype, seed=1).chunk(world_size, -1)[rank]
    w = seeded(70, 16 * world_size, dtype=dtype, seed=2).chunk(world_size, -1)[rank]
    y = fused_tp.matmul_all_reduce(x, w, group=group)
    normed, stream = fused_tp.all_reduce_rms_norm(x @ w.t(), y, y[0], 1e-6, group=group)
    total = fused_tp.all_reduce(x @ w.t(), group=group)
    return [t.view(torch.uint8).numpy().tobytes() for t in (y, normed, stream, total)]


@pytest.mark.parametrize("dtype_name", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_same_bits_on_every_rank_and_run(variant: str, dtype_name: str) -> None:
    runs = [run_variant(variant, 3, bits, dtype_name) for _ in range(2)]
    assert all(result == runs[0][0] for run in runs for result in run)


# -- vocab_parallel_cross_entropy against F.cross_entropy of the full logits -------------------------------------------


def cross_entropy_cases(group: Any, dtype_name: str) -> None:
    dtype = getattr(torch, dtype_name)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for shape in [(1, 1), (7, 5), (2, 3, 11), (6, 32), (0, 4)]:
        vocab = shape[-1]
        logits = seeded(*shape, dtype=dtype, seed=1, scale=4.0)
        target = torch.randint(vocab, shape[:-1], generator=torch.Generator().manual_seed(2))
        target.view(-1)[1::3] = -100
        for reduction in ("mean", "sum", "none"):
            for smoothing in (0.0, 0.1):
                whole = logits.double().clone().requires_grad_()
                flat = whole.reshape(-1, vocab), target.reshape(-1)
                wanted = torch.nn.functional.cross_entropy(*flat, reduction=reduction, label_smoothing=smoothing)
                shard = own_part(logits, -1, group).clone().requires_grad_()
                loss = fused_tp.vocab_parallel_cross_entropy(
                    shard, target, group=group, label_smoothing=smoothing, reduction=reduction, vocab_size=vocab
                )
                d = seeded(*loss.shape, dtype=torch.float64, seed=3)
                if shape[0] == 0:
                    assert loss.shape == wanted.shape or reduction == "none"
                    continue
                wanted.backward(d.reshape(wanted.shape))
                loss.backward(d.to(wide))
                assert whole.grad is not None and shard.grad is not None
                name = f"{shape} {reduction} {smoothing}"
                # exp of logits up to +-16 has relative errors of 16 eps.
                assert_within_dtype_error(
                    loss, wanted.detach().reshape(loss.shape), wide, reduced_over=vocab, roundings=32, name=name
                )
                assert_within_dtype_error(
                    shard.grad,
                    own_part(whole.grad, -1, group),
                    dtype,
                    reduced_over=vocab,
                    roundings=32,
                    name=f"d {name}",
                )


@pytest.mark.parametrize(
    ("world_size", "dtype_name"), [(2, "float64"), (3, "bfloat16"), (4, "float32"), (3, "float16")]
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_cross_entropy(schedule: str, world_size: int, dtype_name: str) -> None:
    run_variant(schedule, world_size, cross_entropy_cases, dtype_name)


def test_cross_entropy_on_one_rank() -> None:
    run_ranks(1, cross_entropy_cases, "float32")


@on_ranks(1, 2, 4)
def test_extreme_logits(group: Any) -> None:
    """Masked vocabulary (-inf, on some ranks all of it) and logits whose exp overflows."""
    logits = torch.full((3, 4), -torch.inf)
    logits[0, 1] = 2.0
    logits[0, 3] = 1.0
    logits[1] = torch.tensor([3e38, -3e38, 3e38, 0.0])
    logits[2, 0] = 0.0  # all other logits of the row are -inf
    target = torch.tensor([1, 2, 0])
    whole = logits.double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(whole, target, reduction="none")
    wanted.sum().backward()
    shard = own_part(logits, -1, group).clone().requires_grad_()
    loss = fused_tp.vocab_parallel_cross_entropy(shard, target, group=group, reduction="none")
    loss.sum().backward()
    assert whole.grad is not None and shard.grad is not None
    torch.testing.assert_close(loss[[0, 2]].double(), wanted[[0, 2]].detach())
    torch.testing.assert_close(shard.grad[[0, 2]].double(), own_part(whole.grad, -1, group)[[0, 2]])
    assert loss[1].isfinite() and shard.grad[1].isfinite().all()


@on_ranks(2)
def test_every_target_ignored(group: Any) -> None:
    logits = own_part(seeded(3, 4), -1, group).clone().requires_grad_()
    target = torch.full((3, 2), 7)[:, 0]
    mean = fused_tp.vocab_parallel_cross_entropy(logits, target, group=group, ignore_index=7)
    total = fused_tp.vocab_parallel_cross_entropy(logits, target, group=group, ignore_index=7, reduction="sum")
    total.backward()
    assert logits.grad is not None and not logits.grad.any()
    assert mean.isnan() and total == 0


@on_ranks(2)
def test_target_out_of_range(group: Any) -> None:
    said = "^target holds 4; class indices are 0 to 3, or ignore_index=-100.$"
    target = torch.tensor([0, 4])
    refuses(ValueError, said, fused_tp.vocab_parallel_cross_entropy, torch.zeros(2, 2), target, group=group)
