"""matmul + all-reduce (+ residual, RMS norm) and matmul + reduce-scatter in one launch, interpreted, W processes over
CPU shared memory."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from fused_tp.core.partition import shard_range
from fused_tp.triton_kernels.gemm import gemm_sum
from fused_tp.triton_kernels.gemm.tiles import GemmConfig, Launch, launch_for, plan_loads
from tests.kernels.ranks import interpreted, interpreted_ranks, workspace_of
from tests.reference import assert_within_dtype_error, matmul64, seeded

CONFIG = GemmConfig(16, 16, 16, num_warps=4, num_stages=1, group_m=2)
LAUNCH = Launch(2, CONFIG, strip_elements=128)
EPS = 1e-5
OPS = ("reduce_scatter", "one_shot", "two_shot")


def launched(op, products, workspace, launch=LAUNCH, *, bias=None, **tail):
    """Launch `op`; return (out, normed or None)."""
    if op == "reduce_scatter":
        return gemm_sum.gemm_reduce_scatter(products, workspace=workspace, launch=launch, bias=bias), None
    return gemm_sum.gemm_all_reduce(
        products, workspace=workspace, launch=launch, two_shot=op == "two_shot", bias=bias, eps=EPS, **tail
    )


@pytest.mark.full
@interpreted(1)
def test_matmul_of_one_rank(group):
    """Tiles of 32 with all dtypes, transposed operands and sizes that do not fit; inf and NaN stay in their rows."""

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
    assert multiply(halfway, ones).tolist() == [[1.0, 1.015625]]  # rounds half to even


def several_products(group, op, dtype, ks):
    """Several products, like dX of q, k and v: each pair has its own K, which may differ between ranks; operands may be
    views; the workspace has the least size."""
    rank, world, m, n = group.rank(), group.size(), 37, 24
    launch = LAUNCH if op == "reduce_scatter" else launch_for(dtype, m, n, world, arch=0, sms=2)

    def operand(rows, k, seed):
        t = seeded(rows, k, dtype=dtype, seed=seed)
        return t.t().contiguous().t() if seed % 2 else t

    def pairs(of):
        return [(operand(m, k + of, 10 * of + i), operand(n, k + of, 10 * of + i + 5)) for i, k in enumerate(ks)]

    if op == "reduce_scatter":
        needed = gemm_sum.reduce_scatter_bytes(m, n, dtype, world, launch)
    else:
        needed = gemm_sum.all_reduce_bytes(m, n, dtype, world, launch, two_shot=op == "two_shot")
    out, _ = launched(op, pairs(rank), workspace_of(group, needed), launch)
    total = torch.stack([matmul64(x, w) for of in range(world) for x, w in pairs(of)]).sum(0)
    reduced_over = sum(k + of for k in ks for of in range(world))
    rows = shard_range(m, world, rank) if op == "reduce_scatter" else (0, m)
    assert_within_dtype_error(out, total[slice(*rows)], dtype, reduced_over=reduced_over, roundings=2)


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


def test_launches_depend_on_what_all_ranks_know():
    for arch in (80, 90, 100):
        for m, n in ((1, 4096), (512, 4096), (4096, 4096), (8192, 8192)):
            launch = launch_for(torch.bfloat16, m, n, 8, arch=arch, sms=132, sm_margin=4)
            assert 1 <= launch.programs <= 128 * launch.config.programs_per_sm
            assert launch_for(torch.bfloat16, m, n, 8, arch=arch, sms=132, sm_margin=4) == launch
    large = launch_for(torch.bfloat16, 8192, 8192, 8, arch=90, sms=132)
    assert (large.block_m, large.block_n, large.programs) == (128, 256, 132)
    # Each rank decides on its own how to load its operands.
    for kx, kw, tma in ((16, 40, True), (17, 40, False)):
        products = [(torch.empty(2, 70, k).bfloat16()[0], torch.empty(2, 48, k).bfloat16()[0]) for k in (kx, kw)]
        assert plan_loads(products, large).uses_tma == tma
    with pytest.raises(ValueError, match="sm_margin must leave"):
        launch_for(torch.bfloat16, 8, 8, 2, arch=90, sms=132, sm_margin=132)


@interpreted(1)
def test_a_workspace_that_is_too_small_is_refused(group):
    workspace = workspace_of(group)
    with pytest.raises(ValueError, match="Create a larger one"):
        launched("two_shot", [(torch.zeros(40_000, 4), torch.zeros(6, 4))], workspace)
    assert int(workspace.state[0]) == 0
