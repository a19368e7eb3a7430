"""matmul + all-reduce (+ residual, RMS norm) and + reduce-scatter in one launch, interpreted, W processes over CPU
shared memory."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton", reason="needs Triton")

from fused_tp.runtime.partition import shard_range
from fused_tp.triton_kernels.gemm import gemm_all_reduce as reduces
from fused_tp.triton_kernels.gemm import gemm_reduce_scatter as scatters
from fused_tp.triton_kernels.gemm.configs import GemmConfig
from fused_tp.triton_kernels.gemm.launch import Launch, launch_for, plan_loads
from tests.kernels.ranks import delays, interpreted, interpreted_ranks, same_everywhere, sum_of_matmuls, workspace_of
from tests.reference import assert_within_dtype_error, matmul64, rms_norm64, seeded

CONFIG = GemmConfig(16, 16, 16, num_warps=4, num_stages=1, group_m=2)
LAUNCH = Launch(2, CONFIG, strip_elements=128)
EPS = 1e-5
OPS = ("reduce_scatter", "one_shot", "two_shot")


def launched(op, products, workspace, launch=LAUNCH, *, bias=None, **tail):
    """(out, normed or None)."""
    if op == "reduce_scatter":
        return scatters.gemm_reduce_scatter(products, workspace=workspace, launch=launch, bias=bias), None
    return reduces.gemm_all_reduce(
        products, workspace=workspace, launch=launch, two_shot=op == "two_shot", bias=bias, eps=EPS, **tail
    )


def own_rows(op, group, wanted):
    if op != "reduce_scatter":
        return wanted
    start, stop = shard_range(wanted.shape[0], group.size(), group.rank())
    return wanted[start:stop]


def call(group, workspace, op, m, n, k, dtype, *, with_tail=False, launch=LAUNCH, seed=0, lay_out=lambda t: t):
    """One call, with bias, residual and norm if `with_tail`; returns how to check it against fp64 and between ranks."""
    x, w, wanted, terms = sum_of_matmuls(group, m, n, k, dtype, seed)
    tail = {}
    if with_tail:
        tail["bias"] = seeded(n, dtype=dtype, seed=7)
        wanted = wanted + tail["bias"].double()
        if op != "reduce_scatter":
            tail |= {"residual": seeded(m, n, dtype=dtype, seed=7), "norm_weight": seeded(n, dtype=dtype, seed=7)}
            wanted = wanted + tail["residual"].double()
    out, normed = launched(op, [(lay_out(x), lay_out(w))], workspace, launch, **tail)

    def check():
        # Terms travel in dtype: one rounding each, of random sign, and one of the sum.
        assert_within_dtype_error(out, own_rows(op, group, wanted), dtype, reduced_over=terms, roundings=2, name=op)
        assert op == "reduce_scatter" or same_everywhere(group, out)
        if normed is not None:
            # Of the rounded out: the norm itself adds one rounding.
            assert_within_dtype_error(normed, rms_norm64(out, tail["norm_weight"], EPS), dtype, reduced_over=n)
            assert same_everywhere(group, normed)

    return check


def each_op(group, m, n, k, dtype, with_tail, programs):
    for op in OPS:
        workspace, launch = workspace_of(group), Launch(programs, CONFIG, strip_elements=128)
        check = call(group, workspace, op, m, n, k, dtype, with_tail=with_tail, launch=launch)
        assert workspace.expired() is None
        check()


@pytest.mark.parametrize(
    ("world_size", "m", "n", "k", "dtype", "with_tail", "programs"),
    [
        (2, 67, 41, 19, torch.bfloat16, True, 2),
        (2, 1, 16, 7, torch.float16, False, 1),  # rank 1 has no rows
        (3, 37, 50, 33, torch.float32, True, 3),
        (3, 5, 70, 16, torch.bfloat16, False, 2),
        (4, 40, 35, 17, torch.float16, True, 2),
        (4, 5, 16, 32, torch.float32, False, 2),  # rows 2, 2, 1, none; fewer tiles than ranks
    ],
)
def test_equals_the_sum(world_size, m, n, k, dtype, with_tail, programs):
    interpreted_ranks(world_size, each_op, m, n, k, dtype, with_tail, programs)


def many_calls(group, late_rank):
    """Calls on one workspace, of shapes that change, with this rank slow at random points if it is `late_rank`: ops
    that lay flags and slots out differently in turn, then some of each."""
    workspace = workspace_of(group)
    n = 20 if group.size() < 4 else 12  # four interpreters share the cores: one column of tiles
    checks = []
    for number, op in enumerate([*OPS * 3, *(op for op in OPS for _ in range(8))]):
        # M of 1 to 17 rows: ranks without rows wait for nobody's tiles, and must not run ahead all the same.
        m, with_tail = 1 + number % 3 * 8, number % 4 == 3
        with delays(seed=number, on=group.rank() == late_rank):
            checks.append(call(group, workspace, op, m, n, 7, torch.bfloat16, with_tail=with_tail, seed=number))
    assert workspace.expired() is None and int(workspace.state[0]) == len(checks)
    for check in checks:  # afterwards: comparing ranks would keep them in step
        check()


@pytest.mark.parametrize(("world_size", "late_rank"), [(2, 1), (3, 0), (4, 2)])
def test_many_calls_with_no_reset(world_size, late_rank):
    interpreted_ranks(world_size, many_calls, late_rank)


@interpreted(2)
def test_operands_of_any_strides(group):
    for op in OPS[:2]:
        how = {"lay_out": lambda t: t.t().contiguous().t()}
        call(group, workspace_of(group), op, 33, 20, 17, torch.float32, **how)()


@pytest.mark.full
@interpreted(1)
def test_matmul_of_one_rank(group):
    """Tiles of 32: dtypes, transposed operands, sizes that do not fit a tile; inf and NaN stay in their rows."""

    def multiply(x, w, bias=None):
        launch = launch_for(x.dtype, len(x), len(w), 1, arch=0, sms=3)
        return launched("reduce_scatter", [(x, w)], workspace_of(group), launch, bias=bias)[0]

    def operand(rows, columns, dtype, seed, swapped):
        lies = seeded(*((columns, rows) if swapped else (rows, columns)), dtype=dtype, seed=seed)
        return lies.t() if swapped else lies

    sizes = ((64, 48, 80), (37, 53, 29), (1, 1, 1), (97, 8, 1), (2, 3, 131))
    layouts = itertools.product((False, True), repeat=2)
    for dtype, (m, n, k), layout in itertools.product((torch.bfloat16, torch.float16, torch.float32), sizes, layouts):
        x, w = operand(m, k, dtype, 1, layout[0]), operand(n, k, dtype, 2, layout[1])
        bias = seeded(n, dtype=dtype, seed=4) if layout[0] else None
        assert_within_dtype_error(multiply(x, w, bias), matmul64(x, w, bias), dtype, reduced_over=k, roundings=2)
    x, w = seeded(40, 33, dtype=torch.bfloat16), seeded(35, 33, dtype=torch.bfloat16, seed=1)
    x[3, 5], x[7, 2] = torch.inf, torch.nan
    y = multiply(x, w)
    assert bool(torch.isnan(y[7]).all()) and bool(torch.isinf(y[3]).all())
    assert bool(torch.isfinite(y[[row for row in range(40) if row not in (3, 7)]]).all())
    halfway, ones = torch.tensor([[1.0, 2.0**-8]]).bfloat16(), torch.tensor([[1.0, 1.0], [1.0, 3.0]]).bfloat16()
    assert multiply(halfway, ones).tolist() == [[1.0, 1.015625]]  # to the nearest even


def several_products(group, op, dtype, ks):
    """q, k and v's dX: pairs with a K each, which may differ between ranks, as views and not; in the least memory."""
    rank, world, m, n = group.rank(), group.size(), 37, 24
    launch = LAUNCH if op == "reduce_scatter" else launch_for(dtype, m, n, world, arch=0, sms=2)

    def operand(rows, k, seed):
        t = seeded(rows, k, dtype=dtype, seed=seed)
        return t.t().contiguous().t() if seed % 2 else t

    def pairs(of):
        return [(operand(m, k + of, 10 * of + i), operand(n, k + of, 10 * of + i + 5)) for i, k in enumerate(ks)]

    if op == "reduce_scatter":
        needed = scatters.workspace_bytes(m, n, dtype, world, launch)
    else:
        needed = reduces.workspace_bytes(m, n, dtype, world, launch, two_shot=op == "two_shot")
    out, _ = launched(op, pairs(rank), workspace_of(group, needed), launch)
    total = torch.stack([matmul64(x, w) for of in range(world) for x, w in pairs(of)]).sum(0)
    reduced_over = sum(k + of for k in ks for of in range(world))
    assert_within_dtype_error(out, own_rows(op, group, total), dtype, reduced_over=reduced_over, roundings=2)


@pytest.mark.parametrize(
    ("world_size", "op", "dtype", "ks"),
    [
        (2, "reduce_scatter", torch.bfloat16, (7, 32, 0)),
        (1, "reduce_scatter", torch.float16, (3,) * 4),
        (2, "one_shot", torch.bfloat16, (7, 16)),
        (2, "two_shot", torch.float32, (5, 5)),
    ],
)
def test_products_add_up(world_size, op, dtype, ks):
    interpreted_ranks(world_size, several_products, op, dtype, ks)


def by_tma(group):
    """Aligned operands come by TMA, on a rank whose others may not; the tiles are the same."""
    launch = launch_for(torch.bfloat16, 70, 48, group.size(), arch=0, sms=3)
    ks = (16, 40) if group.rank() else (17, 39)
    xs = [seeded(70, k, dtype=torch.bfloat16, seed=k) for k in ks]
    ws = [seeded(48, k, dtype=torch.bfloat16, seed=100 + k) for k in ks]
    products = list(zip(xs, ws, strict=True))
    out, _ = launched("reduce_scatter", products, workspace_of(group), launch)
    total = torch.stack([matmul64(x, w) for x, w in products]).sum(0)
    dist.all_reduce(total, group=group)
    wanted = own_rows("reduce_scatter", group, total)
    assert_within_dtype_error(out, wanted, torch.bfloat16, reduced_over=112, roundings=2)
    return plan_loads(products, launch).tma


def test_each_rank_loads_as_its_operands_lie():
    assert interpreted_ranks(2, by_tma) == [False, True]


def test_launches_depend_on_what_all_ranks_know():
    for arch in (80, 90, 100):
        for m, n in ((1, 4096), (512, 4096), (4096, 4096), (8192, 8192)):
            launch = launch_for(torch.bfloat16, m, n, 8, arch=arch, sms=132, sm_margin=4)
            assert 1 <= launch.programs <= 128 * launch.config.programs_per_sm
            assert launch_for(torch.bfloat16, m, n, 8, arch=arch, sms=132, sm_margin=4) == launch
    large = launch_for(torch.bfloat16, 8192, 8192, 8, arch=90, sms=132)
    assert (large.block_m, large.block_n, large.programs) == (128, 256, 132)
    for wrong, how in {
        "dtype must be": {"dtype": torch.float64},
        "precision must be": {"precision": "fp8"},
        "arch must be": {"arch": 70},
        "sm_margin must leave": {"sm_margin": 132},
    }.items():
        with pytest.raises(ValueError, match=wrong):
            launch_for(**{"dtype": torch.bfloat16, "m": 8, "n": 8, "world_size": 2, "arch": 90, "sms": 132} | how)


def missing_rank(group, missing):
    answers = []
    for op in OPS:
        workspace = workspace_of(group, timeout_seconds=0.5)
        x, w, _, _ = sum_of_matmuls(group, 40, 20, 17, torch.float32)
        if group.rank() != missing:
            begun = time.monotonic()
            out, _ = launched(op, [(x, w)], workspace)
            assert time.monotonic() - begun < 5
            assert bool(out.isnan().all())  # never a sum of fewer terms
            answers.append(workspace.expired())
        dist.barrier(group)  # what the others may still write to is there until they are done
    return answers


def test_a_missing_rank_is_named():
    answers = interpreted_ranks(3, missing_rank, 1)
    for rank in (0, 2):
        for op, expired in zip(OPS, answers[rank], strict=True):
            name = "matmul_reduce_scatter" if op == "reduce_scatter" else "matmul_all_reduce"
            assert (expired.op, expired.call, expired.rank, expired.absent) == (name, 1, rank, (1,))


@interpreted(1)
def test_bad_input_is_refused_before_anything_runs(group):
    workspace = workspace_of(group)
    x, w = torch.zeros(8, 4), torch.zeros(6, 4)

    def refused(message, x=x, w=w, products=None, **how):
        with pytest.raises(ValueError, match=message):
            launched("two_shot", products or [(x, w)], workspace, **how)

    refused(r"x must be \[M, K\] and weight \[N, K\]; got \(8, 4\) and \(6, 3\)", w=torch.zeros(6, 3))
    refused(r"both bf16, fp16 or fp32; got torch.float64 and torch.float64", x=x.double(), w=w.double())
    refused(r"bias must be \(6,\); got \(8,\)", bias=torch.zeros(8))
    refused(r"residual must be torch.float32 on cpu as x is; got torch.float16", residual=torch.zeros(8, 6).half())
    refused(r"residual must have its rows in one piece; its strides are \(1, 8\)", residual=torch.zeros(6, 8).t())
    refused(r"products must be 1 to 4 pairs \(x, weight\); got 5", products=[(x, w)] * 5)
    refused(r"products must have one M, N and dtype; .* products\[1\] \(7, 4\) by", products=[(x, w), (x[:7], w)])
    refused(r"products\[1\]\[0\] must be \[M, K\] and products\[1\]\[1\]", products=[(x, w), (x, w[:, :3])])
    refused(r"Make it larger", x=torch.zeros(40_000, 4))
    assert int(workspace.state[0]) == 0
