"""Streams of ranks that are threads of one process on one GPU."""

from __future__ import annotations

import time

import pytest
import torch

from benchmarks.local_ranks import LocalRank, run_local
from fused_tp.triton_kernels.comm import streams

pytestmark = pytest.mark.gpu

MILLISECOND = 2_000_000  # clock cycles of `torch.cuda._sleep`, about


@pytest.fixture(autouse=True)
def deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_TP_TIMEOUT", "30")


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
    """The ranks' streams and their side streams, as many as in a gather of four ranks, run several kernels each.

    If two streams shared a queue of the GPU, the second's first kernel would wait for the first's last but one.
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
