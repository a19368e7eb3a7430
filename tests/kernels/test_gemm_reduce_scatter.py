"""matmul + reduce-scatter in one launch, interpreted, W processes over CPU shared memory."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton", reason="needs Triton")

from fused_tp.runtime.partition import shard_range
from fused_tp.triton_kernels.gemm.configs import GemmConfig
from fused_tp.triton_kernels.gemm.gemm_reduce_scatter import gemm_reduce_scatter, workspace_bytes
from fused_tp.triton_kernels.gemm.launch import Launch, launch_for, plan_loads
from tests.kernels.ranks import delays, interpreted_ranks, sum_of_matmuls, workspace_of
from tests.reference import assert_within_dtype_error, matmul64, seeded

CONFIG = GemmConfig(16, 16, 16, num_warps=4, num_stages=1, group_m=2)
LAUNCH = Launch(2, CONFIG, strip_elements=128)


def check(group, workspace, launch, m, n, k, dtype, bias=None, seed=0, **how):
    x, w, wanted, terms = sum_of_matmuls(group, m, n, k, dtype, seed)
    x, w = how.get("lay_out", lambda x, w: (x, w))(x, w)
    out = gemm_reduce_scatter([(x, w)], workspace=workspace, launch=launch, bias=bias)
    assert workspace.expired() is None
    start, stop = shard_range(m, group.size(), group.rank())
    wanted = wanted[start:stop] + (0 if bias is None else bias.double())
    # Terms travel in dtype: one rounding each, of random sign, and one of the sum.
    assert_within_dtype_error(out, wanted, dtype, reduced_over=terms, roundings=2)
    return out


def one_call(group, m, n, k, dtype, launch, with_bias):
    bias = seeded(n, dtype=dtype, seed=7) if with_bias else None
    check(group, workspace_of(group), launch, m, n, k, dtype, bias)


@pytest.mark.parametrize(
    ("world_size", "m", "n", "k", "dtype", "with_bias", "programs"),
    [
        (2, 67, 41, 19, torch.bfloat16, True, 2),
        (2, 1, 16, 7, torch.float16, False, 1),  # rank 1 has no rows
        (3, 50, 37, 33, torch.float32, True, 3),
        (3, 64, 16, 16, torch.bfloat16, False, 2),
        (4, 70, 35, 17, torch.float16, True, 2),
        (4, 5, 33, 32, torch.float32, False, 2),  # rows 2, 2, 1, none
    ],
)
def test_equals_the_shard_of_the_sum(world_size, m, n, k, dtype, with_bias, programs):
    launch = Launch(programs, CONFIG, strip_elements=128)
    interpreted_ranks(world_size, one_call, m, n, k, dtype, launch, with_bias)


def many_calls(group, m, dtype, late_rank):
    """20 calls on one workspace, of shapes that change, with this rank slow at random points if it is `late_rank`."""
    workspace = workspace_of(group)
    n = 20 if group.size() < 4 else 12  # four interpreters share the cores: one column of tiles
    for call in range(20):
        with delays(seed=call, on=group.rank() == late_rank):
            check(group, workspace, LAUNCH, m + call % 3 * 8, n, 7, dtype, seed=call)
    return int(workspace.state[0])


@pytest.mark.parametrize(("world_size", "late_rank"), [(2, 1), (3, 0), (4, None)])
def test_20_calls_with_no_reset(world_size, late_rank):
    # M of 1 to 17 rows: ranks without rows wait for nobody's tiles, and must not run ahead all the same.
    assert interpreted_ranks(world_size, many_calls, 1, torch.bfloat16, late_rank) == [20] * world_size


def transposed_views(group):
    check(
        group, workspace_of(group), LAUNCH, 33, 20, 17, torch.float32,
        lay_out=lambda x, w: (x.t().contiguous().t(), w.t().contiguous().t()),
    )  # fmt: skip


def test_operands_of_any_strides():
    interpreted_ranks(2, transposed_views)


def several_products(group, launch, dtype, m, n, ks):
    """q, k and v's dX: pairs with a K each, which may differ between ranks, as views and not."""
    rank, world = group.rank(), group.size()

    def operand(rows, k, seed):
        t = seeded(rows, k, dtype=dtype, seed=seed)
        return t.t().contiguous().t() if seed % 2 else t

    def pairs(of):
        return [(operand(m, k + of, 10 * of + i), operand(n, k + of, 10 * of + i + 5)) for i, k in enumerate(ks)]

    needed = workspace_bytes(m, n, dtype, world, launch)
    workspace = workspace_of(group, needed)
    assert workspace_of(group, needed - 256).half_bytes < needed // 2
    out = gemm_reduce_scatter(pairs(rank), workspace=workspace, launch=launch)
    start, stop = shard_range(m, world, rank)
    wanted = torch.stack([matmul64(x, w) for of in range(world) for x, w in pairs(of)]).sum(0)[start:stop]
    assert_within_dtype_error(
        out, wanted, dtype, reduced_over=sum(k + of for k in ks for of in range(world)), roundings=2
    )


@pytest.mark.parametrize(
    ("world_size", "dtype", "ks"),
    [(2, torch.bfloat16, (7, 32, 0)), (2, torch.float32, (5, 5)), (1, torch.float16, (3,) * 4)],
)
def test_products_add_up(world_size, dtype, ks):
    interpreted_ranks(world_size, several_products, LAUNCH, dtype, 37, 24, ks)


def by_tma(group):
    """Aligned operands come by TMA, on a rank whose others may not; the tiles are the same."""
    launch = launch_for(torch.bfloat16, 70, 48, group.size(), arch=0, sms=3)
    ks = (16, 40) if group.rank() else (17, 39)
    xs = [seeded(70, k, dtype=torch.bfloat16, seed=k) for k in ks]
    ws = [seeded(48, k, dtype=torch.bfloat16, seed=100 + k) for k in ks]
    products = list(zip(xs, ws, strict=True))
    workspace = workspace_of(group)
    out = gemm_reduce_scatter(products, workspace=workspace, launch=launch)
    total = torch.stack([matmul64(x, w) for x, w in products]).sum(0)
    dist.all_reduce(total, group=group)
    start, stop = shard_range(70, group.size(), group.rank())
    assert_within_dtype_error(out, total[start:stop], torch.bfloat16, reduced_over=112, roundings=2)
    return plan_loads(products, launch).tma


def test_each_rank_loads_as_its_operands_lie():
    assert interpreted_ranks(2, by_tma) == [False, True]


def missing_rank(group, missing):
    workspace = workspace_of(group, timeout_seconds=0.5)
    x, w, _, _ = sum_of_matmuls(group, 40, 20, 17, torch.float32)
    if group.rank() == missing:
        return None
    out = gemm_reduce_scatter([(x, w)], workspace=workspace, launch=LAUNCH)
    assert bool(out.isnan().all())  # never a sum of fewer terms
    return str(workspace.expired())


def test_a_missing_rank_is_named():
    texts = interpreted_ranks(3, missing_rank, 1)
    for rank in (0, 2):
        assert texts[rank].startswith(f"matmul_reduce_scatter, call 1: rank {rank} waited for tile")
        assert texts[rank].endswith("of rank 1; rank 1 had not begun the call")
