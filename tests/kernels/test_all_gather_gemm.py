"""all-gather + matmul, interpreted, W processes over CPU shared memory."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from fused_tp.runtime.group import resolve_group
from fused_tp.transport.symm_mem import allocate_cpu
from fused_tp.triton_kernels.comm.gather import GatherWorkspace, run, stage_launch
from fused_tp.triton_kernels.gemm.all_gather_gemm import all_gather_gemm, workspace_bytes
from fused_tp.triton_kernels.gemm.configs import GemmConfig
from fused_tp.triton_kernels.gemm.launch import Launch
from tests.kernels.ranks import interpreted, interpreted_ranks, same_everywhere
from tests.reference import assert_within_dtype_error, matmul64, seeded

CONFIG = GemmConfig(16, 16, 16, num_warps=4, num_stages=1, group_m=2)
SPLIT = GemmConfig(16, 32, 16, num_warps=4, num_stages=1, group_m=2, split_store=True)
POINTERS = Launch(2, CONFIG)
TMA = Launch(3, SPLIT, tma_config=SPLIT)


def workspace_of(group, m, k, dtype, timeout_seconds=20.0):
    per_rank = -(-m // group.size())
    nbytes = workspace_bytes(per_rank, k, dtype, group.size())
    buffer, handle = allocate_cpu(resolve_group(group), nbytes)
    return GatherWorkspace(buffer, handle, timeout_seconds=timeout_seconds)


def shard(x, group):
    return x.chunk(group.size())[group.rank()] if group.rank() < len(x.chunk(group.size())) else x[:0]


def check(group, workspace, launch, m, ns, k, dtype, *, seed=0, with_bias=False, lay_out=None, **how):
    x = seeded(m, k, dtype=dtype, seed=1000 * seed)
    weights = [seeded(n, k, dtype=dtype, seed=1000 * seed + 1 + i + 10 * group.rank()) for i, n in enumerate(ns)]
    biases = [seeded(n, dtype=dtype, seed=7 + i) if with_bias and i != 1 else None for i, n in enumerate(ns)]
    x_shard = shard(x, group)
    if lay_out is not None:
        x_shard, weights = lay_out(x_shard), [lay_out(weight) for weight in weights]
    ys, gathered = all_gather_gemm(
        x_shard, weights, workspace=workspace, launch=launch, rows=m, biases=biases, **how
    )  # fmt: skip
    assert workspace.expired() is None
    for y, weight, bias in zip(ys, weights, biases, strict=True):
        assert_within_dtype_error(y, matmul64(x, weight, bias), dtype, reduced_over=k)
    assert (gathered is not None) == how.get("gathered", False)
    if gathered is not None:
        assert torch.equal(gathered, x)
        assert same_everywhere(group, gathered)


def both_ways(group, launch, m, ns, k, dtype, how):
    for direct in (False, True):
        check(group, workspace_of(group, m, k, dtype), launch, m, ns, k, dtype, direct=direct, **how)


@pytest.mark.parametrize(
    ("world_size", "launch", "m", "ns", "k", "dtype", "how"),
    [
        (1, POINTERS, 19, (17,), 23, torch.bfloat16, {"gathered": True}),
        (2, POINTERS, 67, (41, 16, 5), 19, torch.bfloat16, {"gathered": True, "with_bias": True}),
        (2, TMA, 67, (41, 40), 24, torch.bfloat16, {"with_bias": True}),
        (2, POINTERS, 1, (16,), 7, torch.float16, {"gathered": True}),  # rank 1 has no rows
        (3, TMA, 50, (37, 64, 33), 40, torch.float16, {"gathered": True}),
        (3, POINTERS, 50, (37,), 33, torch.float32, {"with_bias": True}),
        (3, TMA, 96, (32, 16, 16, 16, 8), 16, torch.bfloat16, {"gathered": True}),  # two launches
        (4, POINTERS, 70, (35, 3), 17, torch.float32, {"gathered": True}),
        (4, POINTERS, 5, (33,), 32, torch.bfloat16, {}),  # rows 2, 2, 1, none
    ],
)
def test_equals_the_matmul_of_all_rows(world_size, launch, m, ns, k, dtype, how):
    interpreted_ranks(world_size, both_ways, launch, m, ns, k, dtype, how)


@interpreted(3)
def test_ranks_may_want_different_things_of_one_gather(group):
    """Rows per rank that are not ceil(M / W), ranks with different weights, and a rank with none."""
    rank, world = group.rank(), group.size()
    workspace = workspace_of(group, 60, 24, torch.bfloat16)
    x = seeded(37, 24, dtype=torch.bfloat16, seed=3)
    for direct in (False, True):
        for ns in ((20, 0), ()):
            weights = [seeded(n, 24, dtype=torch.bfloat16, seed=n) for n in (*ns, *(8,) * rank)]
            ys, gathered = all_gather_gemm(
                x[rank * 18 : rank * 18 + 18], weights, workspace=workspace, launch=POINTERS, rows=37,
                rows_per_rank=18, gathered=True, direct=direct,
            )  # fmt: skip
            assert workspace.expired() is None
            assert torch.equal(gathered, x)
            assert [y.shape for y in ys] == [(37, weight.shape[0]) for weight in weights]
            for y, weight in zip(ys, weights, strict=True):
                assert_within_dtype_error(y, matmul64(x, weight), torch.bfloat16, reduced_over=24)
    assert world == 3 and int(workspace.state[0]) == 4


@interpreted(2)
def test_operands_of_any_strides(group):
    how = {"lay_out": lambda t: t.t().contiguous().t(), "gathered": True}
    both_ways(group, TMA, 33, (24, 16), 24, torch.float16, how)


@interpreted(1)
def test_rows_apart_of_one_rank(group):
    """Nothing is staged for peers, yet rows with gaps between them are not read where they lie."""
    how = {"lay_out": lambda t: torch.cat([t, torch.full_like(t, torch.nan)], 1)[:, : t.shape[1]]}
    for launch in (TMA, POINTERS):
        both_ways(group, launch, 33, (24, 16), 24, torch.float16, how)


def stuck_reader(group):
    """Rank 1 makes one call fewer: rank 0 must not overwrite what it may not have read, and says so in call 2."""
    workspace = workspace_of(group, 8, 8, torch.float32, timeout_seconds=0.3)
    ones = torch.ones(4, 8)
    if group.rank() == 0:
        stage = stage_launch(ones, workspace, 2)
        run(stage)
        run(stage_launch(2 * ones, workspace, 2))
        assert torch.equal(workspace.region(0, 4, 8, torch.float32), ones)
        assert workspace.expired() is not None
        return str(workspace.expired())
    return None


def test_a_region_is_not_overwritten_before_it_was_read():
    text, _ = interpreted_ranks(2, stuck_reader)
    assert text.startswith("all_gather_matmul, call 2: rank 0 waited for its beginning of rank 1")
