"""Ranks as threads of one process on one GPU: their streams, and signals that order them."""

from __future__ import annotations

import time

import pytest
import torch

from benchmarks.local_ranks import LocalRank, run_local
from fused_tp.runtime.errors import CollectiveTimeoutError
from fused_tp.triton_kernels.comm import streams

pytestmark = pytest.mark.gpu

MILLISECOND = 2_000_000  # clock cycles of `torch.cuda._sleep`, about


@pytest.fixture(autouse=True)
def deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_TP_TIMEOUT", "30")


def ring(rank: LocalRank, calls: int) -> None:
    world, r = rank.world_size, rank.rank
    _, memory = rank.symmetric_empty((calls, 1 << 16), torch.float32)
    results = []
    for call in range(calls):
        if (call + r) % 3 == 0:
            torch.cuda._sleep(2 * MILLISECOND)  # the stream is late, and its host is not
        memory.get_buffer((r + 1) % world, (1 << 16,), torch.float32, call << 16).fill_(100.0 * call + r)
        memory.put_signal((r + 1) % world)
        memory.wait_signal((r - 1) % world)
        results.append(memory.get_buffer(r, (1 << 16,), torch.float32, call << 16).clone())
    for call, result in enumerate(results):
        assert bool((result == 100.0 * call + (r - 1) % world).all()), call


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_signals_order_streams(world_size: int) -> None:
    run_local(world_size, ring, 12, device="cuda")


def late_barrier(rank: LocalRank) -> None:
    mine, memory = rank.symmetric_empty((1 << 16,), torch.float32)
    for call in range(1, 6):
        if call % rank.world_size == rank.rank:
            torch.cuda._sleep(5 * MILLISECOND)
        mine.fill_(10.0 * call + rank.rank)
        memory.barrier()
        seen = torch.stack([memory.get_buffer(r, (1 << 16,), torch.float32) for r in range(rank.world_size)])
        memory.barrier()
        assert [row.unique().tolist() for row in seen] == [[10.0 * call + r] for r in range(rank.world_size)]


def test_a_barrier_orders_streams() -> None:
    run_local(3, late_barrier, device="cuda")


def test_every_rank_has_a_stream_of_its_own_behind_the_callers() -> None:
    x = torch.zeros(1 << 16, device="cuda")
    torch.cuda._sleep(20 * MILLISECOND)
    x.fill_(3.0)

    def fn(rank: LocalRank) -> tuple[int, torch.Tensor]:
        assert rank.arch >= 70 and rank.sms >= 1
        return torch.cuda.current_stream().cuda_stream, x + rank.rank

    answers = run_local(4, fn, device="cuda")
    assert len({stream for stream, _ in answers} | {torch.cuda.current_stream().cuda_stream}) == 5
    for rank, (_, y) in enumerate(answers):
        assert bool((y == 3.0 + rank).all())


def test_streams_run_at_the_same_time() -> None:
    """Those of ranks and those beside them, as many as a gather of four ranks has, with several kernels in each.

    Of two streams that share a queue of the GPU, the second's first kernel comes behind the first's last but one.
    """
    kernels, beside = 6, 4

    def fn(rank: LocalRank) -> None:
        side = streams.own_streams(rank, rank.device, beside)
        for stream in (torch.cuda.current_stream(), *side):
            with torch.cuda.stream(stream):
                for _ in range(kernels):
                    torch.cuda._sleep(10 * MILLISECOND)
        for stream in side:
            stream.synchronize()

    run_local(4, fn, device="cuda")
    times = []
    for world_size in (1, 4):
        begun = time.perf_counter()
        run_local(world_size, fn, device="cuda")
        times.append(time.perf_counter() - begun)
    assert times[1] < 1.5 * times[0], f"{times}: streams share queues (CUDA_DEVICE_MAX_CONNECTIONS)"


def test_a_missing_signal_is_named() -> None:
    def fn(rank: LocalRank) -> None:
        _, memory = rank.symmetric_empty(64)
        if rank.rank == 0:
            memory.wait_signal(1, channel=2, timeout_ms=100)
        else:
            rank.barrier()

    with pytest.raises(CollectiveTimeoutError, match=r"rank 0 waited 0\.1 seconds for rank 1"):
        run_local(2, fn, device="cuda")
    assert torch.ones(8, device="cuda").sum().item() == 8


def test_signals_are_not_captured() -> None:
    def fn(rank: LocalRank) -> None:
        _, memory = rank.symmetric_empty(64)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            with pytest.raises(ValueError, match="cannot capture them"):
                memory.put_signal(0)
            torch.zeros(8, device="cuda").add_(1)

    run_local(1, fn, device="cuda")
