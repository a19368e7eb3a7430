"""all-gather + matmul, interpreted, W processes over CPU shared memory; copy engines are those of the double of the
CUDA driver, whose streams are threads."""

from __future__ import annotations

import contextlib
import itertools
import random
import time

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton", reason="needs Triton")

from fused_tp.backends.copy_engine.copy_engine import CopyEngine
from fused_tp.backends.copy_engine.copy_engine_schedule import CopyEngineSchedule
from fused_tp.backends.schedule import DimShards, GatherMatmul
from fused_tp.backends.symmetric_memory.symm_mem import allocate_cpu, group_memory
from fused_tp.backends.triton.fused_kernel import FusedKernelSchedule
from fused_tp.core.group import resolve_group
from fused_tp.triton_kernels.comm.gather import GatherWorkspace, run_kernel, stage_launch
from fused_tp.triton_kernels.gemm.all_gather_gemm import all_gather_gemm, workspace_bytes
from fused_tp.triton_kernels.gemm.tiles import GemmConfig, Launch
from tests.kernels.ranks import delays, interpreted, interpreted_ranks, same_everywhere
from tests.native.doubles.libraries import build_doubles, doubles
from tests.native_build import prebuild
from tests.reference import assert_within_dtype_error, matmul64, seeded

prebuild(lambda: build_doubles("copy_engine"))

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
    if isinstance(workspace, Arriving):
        ys, gathered = workspace(x_shard, weights, launch, m, biases, **how)
    else:
        ys, gathered = all_gather_gemm(
            x_shard, weights, workspace=workspace, launch=launch, rows=m, biases=biases, **how
        )  # fmt: skip
        assert workspace.expired_wait() is None
    for y, weight, bias in zip(ys, weights, biases, strict=True):
        assert_within_dtype_error(y, matmul64(x, weight, bias), dtype, reduced_over=k)
    assert (gathered is not None) == how.get("return_gathered", False)
    if gathered is not None:
        assert torch.equal(gathered, x)
        assert same_everywhere(group, gathered)


class Arriving:
    """all_gather_matmul by the schedule, of shards that arrive by copy engines."""

    def __init__(self, group):
        cpu = torch.device("cpu")
        self.group = resolve_group(group)
        self.schedule = FusedKernelSchedule(
            group_memory(self.group, cpu), None, CopyEngineSchedule(CopyEngine(group_memory(self.group, cpu)), None)
        )

    def __call__(self, x_shard, weights, launch, m, biases, *, return_gathered=False, rows_per_rank=None):
        per_rank = rows_per_rank or -(-m // self.group.size)
        sizes = [max(0, min(per_rank, m - rank * per_rank)) for rank in range(self.group.size)]
        cut = DimShards((m, x_shard.shape[1]), 0, tuple(sizes))
        asked = GatherMatmul(x_shard, weights, biases, 0, m, return_gathered)
        return self.schedule.gather_matmul_copied(asked, cut, self.schedule.copy_schedule.engine, launch)


@contextlib.contextmanager
def arriving(group):
    """Make an `Arriving` whose copy engines stop at the end of the block."""
    with doubles("copy_engine"):
        made = Arriving(group)
        yield made
        dist.barrier(group)
        made.schedule.copy_schedule.engine.stop()


def both_ways(group, launch, m, ns, k, dtype, how):
    check(group, workspace_of(group, m, k, dtype), launch, m, ns, k, dtype, **how)
    with arriving(group) as made:
        for seed in range(4):  # from a channel's third call on, everything but the kernel runs as two graphs
            check(group, made, launch, m, ns, k, dtype, seed=seed, **how)


@pytest.mark.parametrize(
    ("world_size", "launch", "m", "ns", "k", "dtype", "how"),
    [
        (2, POINTERS, 35, (21, 5), 19, torch.bfloat16, {"return_gathered": True, "with_bias": True}),
        (3, TMA, 50, (37, 16), 24, torch.float16, {"return_gathered": True}),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (1, POINTERS, 19, (17,), 23, torch.bfloat16, {"return_gathered": True}),
                (2, TMA, 67, (41, 40), 24, torch.bfloat16, {"with_bias": True}),
                (2, POINTERS, 1, (16,), 7, torch.float16, {"return_gathered": True}),  # rank 1 has no rows
                (3, POINTERS, 50, (37,), 33, torch.float32, {"with_bias": True}),
                (3, TMA, 96, (32, 16, 16, 16, 8), 16, torch.bfloat16, {"return_gathered": True}),  # two launches
                (4, POINTERS, 70, (35, 3), 17, torch.float32, {"return_gathered": True}),
                (4, POINTERS, 5, (33,), 32, torch.bfloat16, {}),  # rows 2, 2, 1, none
            )
        ),
    ],
)
def test_equals_the_matmul_of_all_rows(world_size, launch, m, ns, k, dtype, how):
    interpreted_ranks(world_size, both_ways, launch, m, ns, k, dtype, how)


@interpreted(3)
def test_ranks_may_want_different_things_of_one_gather(group):
    """Rows per rank differ from ceil(M / W), ranks have different weights, and one rank has none."""
    rank, world = group.rank(), group.size()
    workspace = workspace_of(group, 60, 24, torch.bfloat16)
    x = seeded(37, 24, dtype=torch.bfloat16, seed=3)
    x_shard = x[rank * 18 : rank * 18 + 18]
    how = {"rows_per_rank": 18, "return_gathered": True}
    with arriving(group) as made:
        for direct, ns in itertools.product((False, True), ((20, 0), ())):
            weights = [seeded(n, 24, dtype=torch.bfloat16, seed=n) for n in (*ns, *(8,) * rank)]
            if direct:
                ys, gathered = all_gather_gemm(x_shard, weights, workspace=workspace, launch=POINTERS, rows=37, **how)
                assert workspace.expired_wait() is None
            else:
                ys, gathered = made(x_shard, weights, POINTERS, 37, [None] * len(weights), **how)
            assert torch.equal(gathered, x)
            assert [y.shape for y in ys] == [(37, weight.shape[0]) for weight in weights]
            for y, weight in zip(ys, weights, strict=True):
                assert_within_dtype_error(y, matmul64(x, weight), torch.bfloat16, reduced_over=24)
    assert world == 3 and int(workspace.state[0]) == 2


@interpreted(2)
def test_operands_of_any_strides(group):
    how = {"lay_out": lambda t: t.t().contiguous().t(), "return_gathered": True}
    both_ways(group, TMA, 33, (24, 16), 24, torch.float16, how)


@interpreted(1)
def test_rows_apart_of_one_rank(group):
    """Rows with gaps between them are copied first, although a single rank stages nothing for peers."""
    how = {"lay_out": lambda t: torch.cat([t, torch.full_like(t, torch.nan)], 1)[:, : t.shape[1]]}
    for launch in (TMA, POINTERS):
        both_ways(group, launch, 33, (24, 16), 24, torch.float16, how)


def late(group, late_rank):
    """Make consecutive calls whose sizes and memory change and recur, with delays on `late_rank`; check each result."""
    draw = random.Random(group.rank())
    sizes = [(67, (41,), 24), (5, (16, 8), 32), (67, (41,), 24), (37, (50,), 40)] * 3
    with arriving(group) as made:
        for seed, (m, ns, k) in enumerate(sizes):
            with delays(seed, on=group.rank() == late_rank):
                if group.rank() == late_rank and draw.random() < 0.5:
                    time.sleep(draw.random() * 0.05)
                check(
                    group,
                    made,
                    TMA if seed % 2 else POINTERS,
                    m,
                    ns,
                    k,
                    torch.bfloat16,
                    seed=seed,
                    return_gathered=seed % 3 == 0,
                )


@pytest.mark.parametrize(
    ("world_size", "late_rank"), [(2, 0), *(pytest.param(*one, marks=pytest.mark.full) for one in ((3, 2), (4, 1)))]
)
def test_calls_with_a_late_rank(world_size, late_rank):
    interpreted_ranks(world_size, late, late_rank)


def stuck_reader(group):
    """Rank 1 makes no call: in call 2 rank 0 must not overwrite data that rank 1 may not have read, and reports it."""
    workspace = workspace_of(group, 8, 8, torch.float32, timeout_seconds=0.3)
    ones = torch.ones(4, 8)
    if group.rank() == 0:
        stage = stage_launch(ones, workspace, 2)
        run_kernel(stage)
        run_kernel(stage_launch(2 * ones, workspace, 2))
        assert torch.equal(workspace.region(0, 4, 8, torch.float32), ones)
        assert workspace.expired_wait() is not None
        return str(workspace.expired_wait())
    return None


def test_a_region_is_not_overwritten_before_it_was_read():
    text, _ = interpreted_ranks(2, stuck_reader)
    assert text.startswith("all_gather_matmul, call 2: rank 0 waited for its beginning of rank 1")
