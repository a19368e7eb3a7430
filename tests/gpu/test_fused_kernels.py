"""Matmuls and rings fused with their communication, W ranks as threads on one GPU, each with its share of the SMs.

`fused_tp.selftest.kernels` has the cases of correct calls; here are deadlines, graphs, every config, and large tensors.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

from benchmarks.gpu_ranks import random_normal, set_all_flags
from benchmarks.local_ranks import LocalGroup, LocalRank, run_local
from fused_tp.selftest.kernel_calls import (
    DIRECT_GATHER_OPS,
    RING_OPS,
    SUM_OPS,
    RankCall,
    error_of,
    make_call,
    make_workspace,
    matmul64,
)
from fused_tp.selftest.kernels import CASES, GROUPS
from fused_tp.selftest.kernels import check as check_case
from fused_tp.triton_kernels.comm.gather import GatherWorkspace
from fused_tp.triton_kernels.comm.signals import Workspace
from fused_tp.triton_kernels.device import arch_of
from fused_tp.triton_kernels.gemm import all_gather_gemm as gathers
from fused_tp.triton_kernels.gemm import gemm_sum
from fused_tp.triton_kernels.gemm.tiles import Launch, fused_configs, launch_for
from tests.reference import assert_within_dtype_error

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_TP_TIMEOUT", "400")  # for the whole test with compilation; workspaces set their own


def check(call: RankCall, results: list[Tensor], name: str) -> None:
    problem = error_of(call, results)
    assert not problem, f"{name}: {problem}"


def right_or_nan(call: RankCall, results: list[Tensor], name: str) -> None:
    """Assert that missing data is NaN, never a number, and everything else is right."""
    assert any(bool(result.isnan().any()) for result in results if result.numel()), f"{name}: nothing is missing"
    known = zip(results, call.reference(), strict=True)
    check(call, [torch.where(result.isnan(), wanted.to(result.dtype), result) for result, wanted in known], name)


@pytest.mark.parametrize("group", GROUPS)
def test_cases_of_the_selftest(group: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    found = {case.name: check_case(case, device) for case in CASES if case.group == group}
    assert not any(found.values()), found


def without_one(rank: LocalRank, op: str, missing: int) -> str | None:
    good, bad = (make_call(rank, op, (300, 520, 200), torch.bfloat16, seed) for seed in (1, 2))
    workspace = make_workspace(rank, op, [good, bad], timeout_seconds=0.5)
    results = good.launch(workspace)
    rank.barrier()
    check(good, results, "the call before")
    assert workspace.expired_wait() is None
    if rank.rank == missing:
        rank.barrier()
        return None
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begun.record()
    results = bad.launch(workspace)
    ended.record()
    rank.synchronize()
    took = begun.elapsed_time(ended)
    rank.barrier()
    assert took < 5000, f"{took:.0f} ms"
    right_or_nan(bad, results, op)
    # The CUDA context remains usable.
    x = torch.arange(1000, device=rank.device, dtype=torch.float64)
    assert float((x * x).sum()) == 332833500.0
    return str(workspace.expired_wait())


@pytest.mark.parametrize(("world_size", "missing"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("op", [*SUM_OPS, *DIRECT_GATHER_OPS, *RING_OPS])
def test_a_missing_rank_is_named_within_the_deadline(op: str, world_size: int, missing: int) -> None:
    texts = run_local(world_size, without_one, op, missing, device="cuda")
    # Chance decides which wait expires first, and a rank may name a peer that gave up; one rank names the missing one.
    assert all(text != "None" for rank, text in enumerate(texts) if rank != missing), texts
    assert any(text is not None and f"rank {missing} had not begun the call" in text for text in texts), texts


def captured(rank: LocalRank, op: str) -> None:
    """Capture one call in a graph and replay it with changed inputs, between eager calls."""
    shape = (300, 520, 200)
    calls = [make_call(rank, op, shape, torch.bfloat16, seed) for seed in range(0, 50, 5)]  # a ring's share one mask
    workspace = make_workspace(rank, op, calls[:2])
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream()
    with rank.in_turn(), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        static = calls[0].launch(workspace)
    kept = [[torch.empty_like(result) for result in static] for _ in calls]
    # A capture begins by releasing torch's unused memory; allocate again for the results of eager calls.
    spare = [[torch.empty_like(result) for result in static] for _ in range(3)]
    rank.barrier()
    del spare
    for number, call in enumerate(calls):
        if number % 2:
            results = call.launch(workspace)
        else:
            graph.replay()
            results = static
        for target, result in zip(kept[number], results, strict=True):
            target.copy_(result)
    rank.synchronize()
    assert workspace.expired_wait() is None, str(workspace.expired_wait())
    for number, call in enumerate(calls):
        check(call if number % 2 else calls[0], kept[number], f"{op}, call {number}")
    rank.barrier()


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("op", [*SUM_OPS, *DIRECT_GATHER_OPS, *RING_OPS])
def test_a_graph_is_replayed_between_other_calls(op: str, world_size: int) -> None:
    run_local(world_size, captured, op, device="cuda")


@pytest.mark.parametrize("kind", ["bf16", "fp16", "tf32", "ieee"])
def test_every_config_and_layout(kind: str) -> None:
    """Runs on one rank, which waits for no peer, with every config; normally a launch picks one by size."""
    rank = LocalGroup(1, "cuda").rank(0)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(kind, torch.float32)
    sums = Workspace(*rank.allocate(32 << 20), timeout_seconds=20)
    shards = GatherWorkspace(*rank.allocate(16 << 20), timeout_seconds=20)
    for config in fused_configs(arch_of(rank.device), kind):
        precision = kind if dtype == torch.float32 else "ieee"
        launch = Launch(
            config.pointer_config.programs_per_sm * rank.sms,
            config.pointer_config,
            precision,
            tma_config=config.tma_config,
        )
        for m, n, k in ((520, 776, 1040), (520, 776, 1037), (1, 8, 8), (129, 257, 131)):  # TMA and pointer loads
            for x_swapped, w_swapped in itertools.product((False, True), repeat=2):
                x = random_normal(*((k, m) if x_swapped else (m, k)), dtype=dtype, device=rank.device, seed=1)
                w = random_normal(*((k, n) if w_swapped else (n, k)), dtype=dtype, device=rank.device, seed=2)
                x, w = x.t() if x_swapped else x, w.t() if w_swapped else w
                bias = random_normal(n, dtype=dtype, device=rank.device, seed=4)
                (y,), _ = gathers.all_gather_gemm(x, [w], workspace=shards, launch=launch, rows=m, biases=[bias])
                z = gemm_sum.gemm_reduce_scatter([(x, w)], workspace=sums, launch=launch, bias=bias)
                wanted = matmul64(x, w, bias)
                # About three times the rounding error by norm: 2^-9 for each of two roundings to bf16, 2^-11 for
                # operands in tf32, 2^-19 for fp32 sums of a thousand terms.
                for result in (y, z):
                    error = float((result.double() - wanted).norm() / wanted.norm())
                    assert error < {"tf32": 2e-3, "ieee": 1e-5}.get(kind, 7e-3), f"{config} {m}x{n}x{k}: {error:.3g}"


def test_more_than_2_to_the_31_elements() -> None:
    rank = LocalGroup(1, "cuda").rank(0)
    m, n, k = 70_000, 64, 32_768
    if torch.cuda.mem_get_info(rank.device)[0] < 12 * m * k:  # x twice in fp32, once in bf16, and some room
        pytest.skip("needs 28 GB of free GPU memory")
    x = random_normal(m, k, dtype=torch.bfloat16, device=rank.device, seed=1)
    w = random_normal(n, k, dtype=torch.bfloat16, device=rank.device, seed=2)
    workspace = GatherWorkspace(*rank.allocate(gathers.workspace_bytes(m, k, torch.bfloat16, 1)), timeout_seconds=20)
    launch = launch_for(torch.bfloat16, m, n, 1, arch=arch_of(rank.device), sms=rank.sms)
    (y,), _ = gathers.all_gather_gemm(x, [w], workspace=workspace, launch=launch, rows=m)
    assert_within_dtype_error(y[-256:], matmul64(x[-256:], w), torch.bfloat16, reduced_over=k, name="the last rows")


def one_rank_alone(rank: LocalRank, op: str, shape: tuple[int, int, int]) -> None:
    """A rank with all flags set runs alone, as in the benchmarks; its peers' terms are zeros."""
    call = make_call(rank, op, shape, torch.bfloat16, 1)
    workspace = make_workspace(rank, op, [call])
    if rank.rank == 0:
        set_all_flags(workspace)
        for _ in range(5):
            results = call.launch(workspace)
            assert not any(bool(result.isnan().any()) for result in results), "something did not arrive"
        rank.synchronize()
        assert workspace.expired_wait() is None, str(workspace.expired_wait())
    rank.barrier()


@pytest.mark.parametrize("op", [*SUM_OPS, *DIRECT_GATHER_OPS, *RING_OPS])
def test_a_rank_whose_flags_are_set_runs_alone(op: str) -> None:
    run_local(2, one_rank_alone, op, (300, 520, 200), device="cuda")
