"""Matmuls fused with their collective, W ranks as threads on one GPU, each with its share of the SMs, against fp64.

Calls of a test follow each other without a reset or a barrier, their kernels are late at random, and all ranks must
hold the same bits where they hold the same thing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

from benchmarks.gpu_ranks import RankMemory, normal, prepare
from benchmarks.local_ranks import LocalRank, run_local
from fused_tp.runtime.partition import shard_range
from tests.reference import assert_within_dtype_error, matmul64, rms_norm64

pytestmark = pytest.mark.gpu

MILLISECOND = 2_000_000  # clock cycles of `torch.cuda._sleep`, about
EPS = 1e-5
SUMS = ["one_shot", "two_shot", "one_shot_norm", "two_shot_norm", "reduce_scatter"]
GATHERS = ["copy_engine", "direct"]
# Odd ones, fewer rows than ranks, fewer tiles than ranks, rows that TMA cannot load, several tiles of each program.
SHAPES = [(300, 520, 200), (1, 256, 512), (3, 72, 64), (129, 392, 1000), (257, 131, 77), (1024, 1536, 512)]
FEW_SHAPES = [(1024, 1536, 512), (257, 131, 77), (3, 72, 64)]  # each shape and dtype has kernels to compile


@pytest.fixture(autouse=True)
def deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_TP_TIMEOUT", "400")  # of a whole test: kernels are compiled in it, and have their own


@dataclass
class Call:
    """One call of one rank: how to launch it in a workspace, and what must come out."""

    launch: Callable[[Any], list[Tensor]]
    wanted: list[Tensor]  # fp64
    terms: int
    dtype: torch.dtype
    everywhere: bool  # the same bits on all ranks
    nbytes: int

    def check(self, results: list[Tensor], name: str) -> None:
        for result, wanted in zip(results, self.wanted, strict=True):
            # Terms travel in dtype: one rounding each, of random sign, and one of the sum. The norm adds one.
            assert_within_dtype_error(result, wanted, self.dtype, reduced_over=self.terms, roundings=3, name=name)


def make_call(rank: LocalRank, op: str, shape: tuple[int, int, int], dtype: torch.dtype, seed: int) -> Call:
    return (gather_call if op in GATHERS else sum_call)(rank, op, shape, dtype, seed)


def sum_call(rank: LocalRank, op: str, shape: tuple[int, int, int], dtype: torch.dtype, seed: int) -> Call:
    from fused_tp.triton_kernels.device import arch_of
    from fused_tp.triton_kernels.gemm import gemm_all_reduce as reduces
    from fused_tp.triton_kernels.gemm import gemm_reduce_scatter as scatters
    from fused_tp.triton_kernels.gemm.launch import launch_for

    m, n, k = shape
    world, device = rank.world_size, rank.device
    xs = [normal(m, k, dtype=dtype, device=device, seed=100 * seed + r) for r in range(world)]
    ws = [normal(n, k, dtype=dtype, device=device, seed=100 * seed + 50 + r) for r in range(world)]
    bias = normal(n, dtype=dtype, device=device, seed=seed + 7)
    residual = normal(m, n, dtype=dtype, device=device, seed=seed + 8, scale=10.0)
    norm_weight = normal(n, dtype=dtype, device=device, seed=seed + 9)
    total = sum((matmul64(x, w) for x, w in zip(xs, ws, strict=True)), start=bias.double())
    launch = launch_for(dtype, m, n, world, arch=arch_of(rank.device), sms=rank.sms)
    product = [(xs[rank.rank], ws[rank.rank])]
    if op == "reduce_scatter":
        start, stop = shard_range(m, world, rank.rank)
        nbytes = scatters.workspace_bytes(m, n, dtype, world, launch)

        def scatter(workspace: Any) -> list[Tensor]:
            return [scatters.gemm_reduce_scatter(product, workspace=workspace, launch=launch, bias=bias)]

        return Call(scatter, [total[start:stop]], world * k, dtype, False, nbytes)
    two_shot = op.startswith("two_shot")
    nbytes = reduces.workspace_bytes(m, n, dtype, world, launch, two_shot=two_shot)
    tail = {"residual": residual, "norm_weight": norm_weight, "eps": EPS} if op.endswith("norm") else {}
    wanted = [total + residual.double()] if tail else [total]
    if tail:
        wanted.append(rms_norm64(wanted[0], norm_weight, EPS))

    def reduce(workspace: Any) -> list[Tensor]:
        results = reduces.gemm_all_reduce(
            product, workspace=workspace, launch=launch, two_shot=two_shot, bias=bias, **tail
        )
        return [result for result in results if result is not None]

    return Call(reduce, wanted, world * k, dtype, True, nbytes)


def gather_call(rank: LocalRank, op: str, shape: tuple[int, int, int], dtype: torch.dtype, seed: int) -> Call:
    from fused_tp.triton_kernels.device import arch_of
    from fused_tp.triton_kernels.gemm.all_gather_gemm import all_gather_gemm, workspace_bytes
    from fused_tp.triton_kernels.gemm.launch import launch_for

    m, n, k = shape
    world, device = rank.world_size, rank.device
    x = normal(m, k, dtype=dtype, device=device, seed=100 * seed)
    ws = [normal(n + 8 * i, k, dtype=dtype, device=device, seed=100 * seed + 10 * i + rank.rank) for i in (1, 2)]
    biases = [normal(w.shape[0], dtype=dtype, device=device, seed=seed + 7) for w in ws]
    start, stop = shard_range(m, world, rank.rank)
    # What hands shards over needs an SM that the matmul leaves free.
    launch = launch_for(dtype, m, n, world, arch=arch_of(rank.device), sms=rank.sms, sm_margin=2)

    def gather(workspace: Any) -> list[Tensor]:
        outs, gathered = all_gather_gemm(
            x[start:stop],
            ws,
            workspace=workspace,
            launch=launch,
            rows=m,
            biases=biases,
            gathered=op == "copy_engine",
            direct=op == "direct",
        )
        return [*outs, *([] if gathered is None else [gathered])]

    wanted = [matmul64(x, w, bias) for w, bias in zip(ws, biases, strict=True)]
    if op == "copy_engine":
        wanted.append(x.double())
    return Call(gather, wanted, k, dtype, False, workspace_bytes(-(-m // world), k, dtype, world))


def workspace_kind(op: str) -> Any:
    if op not in GATHERS:
        return None
    from fused_tp.triton_kernels.comm.gather import GatherWorkspace

    return GatherWorkspace


def prepared(rank: LocalRank, op: str, calls: list[Call], timeout_seconds: float = 20.0) -> RankMemory:
    def rehearse(workspace: Any) -> None:
        if rank.device.type == "cuda":
            torch.cuda._sleep(1)  # a kernel too, and loaded when first launched
        kept = [call.launch(workspace) for call in calls]  # as much memory as all results take is there afterwards
        rank.synchronize()
        del kept

    nbytes = max(max(rank.exchange(call.nbytes)) for call in calls)
    return prepare(rank, nbytes, rehearse, timeout_seconds=timeout_seconds, kind=workspace_kind(op))


def check_calls(rank: LocalRank, op: str, calls: list[Call], results: list[list[Tensor]], workspace: Any) -> None:
    rank.synchronize()
    assert workspace.expired() is None, str(workspace.expired())
    for number, (call, tensors) in enumerate(zip(calls, results, strict=True)):
        call.check(tensors, f"{op}, call {number}")
    everyone = rank.exchange(results)
    for number, call in enumerate(calls):
        if call.everywhere:
            for theirs in everyone:
                for mine, other in zip(results[number], theirs[number], strict=True):
                    assert torch.equal(mine, other), f"{op}, call {number}: ranks hold different bits"
    if op == "copy_engine":
        for number, call in enumerate(calls):
            assert torch.equal(results[number][-1].double(), call.wanted[-1]), f"call {number}: x gathered"


def in_a_row(
    rank: LocalRank,
    op: str,
    dtype: torch.dtype,
    shapes: list[tuple[int, int, int]],
    late: tuple[int, ...] = (),
    repeats: int = 1,
) -> None:
    """Calls of these shapes, with ranks that are late at random; a repeated call must give the same bits."""
    draw = random.Random(rank.rank)
    calls = [make_call(rank, op, shape, dtype, seed) for seed, shape in enumerate(shapes)] * repeats
    memory = prepared(rank, op, calls)
    results = []
    for call in calls:
        if rank.rank in late and draw.random() < 0.6:
            torch.cuda._sleep(int(draw.random() * 2 * MILLISECOND))
        results.append(call.launch(memory.workspace))
    check_calls(rank, op, calls, results, memory.workspace)
    for number, tensors in enumerate(results):
        for first, other in zip(results[number % len(shapes)], tensors, strict=True):
            assert torch.equal(first, other), "the same call gave other bits"


BF16 = torch.bfloat16
IN_A_ROW: dict[str, tuple[Any, ...]] = {
    "every shape": (2, BF16, SHAPES),
    "one rank": (1, BF16, FEW_SHAPES),
    "three ranks": (3, BF16, FEW_SHAPES),
    "four ranks": (4, BF16, FEW_SHAPES),
    "float16": (2, torch.float16, FEW_SHAPES),
    "float32": (2, torch.float32, FEW_SHAPES),
    "the first is late": (2, BF16, (SHAPES * 4)[:20], (0,)),
    "the last is late": (2, BF16, (SHAPES * 4)[:20], (1,)),
    "one of four is late": (4, BF16, (FEW_SHAPES * 7)[:20], (2,)),
    "all are late": (4, BF16, (FEW_SHAPES * 7)[:20], (0, 1, 2, 3)),
    "the same call": (4, BF16, [(513, 776, 1024)], (), 10),
}


@pytest.mark.parametrize("case", IN_A_ROW)
@pytest.mark.parametrize("op", [*SUMS, *GATHERS])
def test_calls_in_a_row(op: str, case: str) -> None:
    world_size, *args = IN_A_ROW[case]
    run_local(world_size, in_a_row, op, *args, device="cuda")


def without_one(rank: LocalRank, op: str, missing: int) -> str | None:
    good, bad = (make_call(rank, op, (300, 520, 200), torch.bfloat16, seed) for seed in (1, 2))
    memory = prepared(rank, op, [good, bad], timeout_seconds=0.5)
    workspace = memory.workspace
    results = good.launch(workspace)
    rank.barrier()
    good.check(results, "the call before")
    assert workspace.expired() is None
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
    # What did not arrive is NaN, never a number; and the context goes on.
    assert any(bool(result.isnan().any()) for result in results if result.numel()), "a wrong result looks right"
    x = torch.arange(1000, device=rank.device, dtype=torch.float64)
    assert float((x * x).sum()) == 332833500.0
    return str(workspace.expired())


@pytest.mark.parametrize(("world_size", "missing"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("op", [*SUMS, *GATHERS])
def test_a_missing_rank_is_named_within_the_deadline(op: str, world_size: int, missing: int) -> None:
    texts = run_local(world_size, without_one, op, missing, device="cuda")
    # Which wait expires first is chance, and a rank may hear of it from one that gave up; together they name it.
    assert all(text != "None" for rank, text in enumerate(texts) if rank != missing), texts
    assert any(text is not None and f"rank {missing} had not begun the call" in text for text in texts), texts


def captured(rank: LocalRank, op: str) -> None:
    """A graph of one call, replayed between calls outside of it; its inputs change under it."""
    shape = (300, 520, 200)
    calls = [make_call(rank, op, shape, torch.bfloat16, seed) for seed in range(10)]
    memory = prepared(rank, op, calls[:2])
    workspace = memory.workspace
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream()
    with rank.in_turn(), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        static = calls[0].launch(workspace)
    kept = [[torch.empty_like(result) for result in static] for _ in calls]
    # A capture begins by handing unused memory back; this is for the results of the calls outside of it.
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
    assert workspace.expired() is None, str(workspace.expired())
    for number, call in enumerate(calls):
        (call if number % 2 else calls[0]).check(kept[number], f"{op}, call {number}")
    rank.barrier()


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("op", [*SUMS, *GATHERS])
def test_a_graph_is_replayed_between_other_calls(op: str, world_size: int) -> None:
    run_local(world_size, captured, op, device="cuda")


def several_products(rank: LocalRank) -> None:
    """dX of q, k and v: a sum over products as well as over ranks."""
    from fused_tp.triton_kernels.device import arch_of
    from fused_tp.triton_kernels.gemm.gemm_reduce_scatter import gemm_reduce_scatter, workspace_bytes
    from fused_tp.triton_kernels.gemm.launch import launch_for

    m, n, ks = 260, 392, (128, 40, 77)
    pairs = [
        [
            (
                normal(m, k, dtype=torch.bfloat16, device=rank.device, seed=10 * i + r),
                normal(n, k, dtype=torch.bfloat16, device=rank.device, seed=500 + 10 * i + r),
            )
            for i, k in enumerate(ks)
        ]
        for r in range(rank.world_size)
    ]
    total = torch.stack([matmul64(x, w) for of_rank in pairs for x, w in of_rank]).sum(0)
    launch = launch_for(torch.bfloat16, m, n, rank.world_size, arch=arch_of(rank.device), sms=rank.sms)
    start, stop = shard_range(m, rank.world_size, rank.rank)

    def scatter(workspace: Any) -> list[Tensor]:
        return [gemm_reduce_scatter(pairs[rank.rank], workspace=workspace, launch=launch)]

    nbytes = workspace_bytes(m, n, torch.bfloat16, rank.world_size, launch)
    call = Call(scatter, [total[start:stop]], rank.world_size * sum(ks), torch.bfloat16, False, nbytes)
    memory = prepared(rank, "reduce_scatter", [call])
    check_calls(rank, "reduce_scatter", [call], [scatter(memory.workspace)], memory.workspace)


def test_products_are_summed_too() -> None:
    run_local(3, several_products, device="cuda")


def one_rank_alone(rank: LocalRank, op: str, shape: tuple[int, int, int]) -> None:
    """With all flags set a rank runs alone, as the benchmarks time it; its peers' terms are zeros."""
    from benchmarks.gpu_ranks import set_flags

    call = make_call(rank, op, shape, torch.bfloat16, 1)
    memory = prepared(rank, op, [call])
    if rank.rank == 0:
        set_flags(memory.workspace)
        for _ in range(5):
            results = call.launch(memory.workspace)
            assert not any(bool(result.isnan().any()) for result in results), "something did not arrive"
        rank.synchronize()
        assert memory.workspace.expired() is None, str(memory.workspace.expired())
    rank.barrier()


@pytest.mark.parametrize("op", [*SUMS, *GATHERS])
def test_a_rank_whose_flags_are_set_runs_alone(op: str) -> None:
    run_local(2, one_rank_alone, op, (300, 520, 200), device="cuda")
