"""matmul + reduce-scatter in one launch, interpreted, W processes over CPU shared memory."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from fused_tp.runtime.partition import shard_range
from tests.kernels.ranks import delays, interpreted_ranks, sum_of_matmuls, workspace_of
from tests.reference import assert_within_dtype_error, seeded
from triton_kernels.configs import GemmConfig
from triton_kernels.gemm_reduce_scatter import gemm_reduce_scatter
from triton_kernels.launch import Launch

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
    for call in range(20):
        with delays(seed=call, on=group.rank() == late_rank):
            check(group, workspace, LAUNCH, m + call % 3 * 8, 20, 7, dtype, seed=call)
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


def missing_rank(group, missing):
    workspace = workspace_of(group, timeout_seconds=0.5)
    x, w, _, _ = sum_of_matmuls(group, 40, 20, 17, torch.float32)
    if group.rank() == missing:
        return None
    gemm_reduce_scatter([(x, w)], workspace=workspace, launch=LAUNCH)
    return str(workspace.expired())


def test_a_missing_rank_is_named():
    texts = interpreted_ranks(3, missing_rank, 1)
    for rank in (0, 2):
        assert texts[rank].startswith(f"matmul_reduce_scatter, call 1: rank {rank} waited for tile")
        assert texts[rank].endswith("of rank 1; rank 1 had not begun the call")
