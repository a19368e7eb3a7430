"""Exclusively owned streams, as far as they can be tested without a GPU."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benchmarks.local_ranks import LocalRank, run_local
from fused_tp.backends.copy_engine.copy_engine import CopyEngine
from fused_tp.backends.triton.fused_kernel import FusedKernelSchedule
from fused_tp.triton_kernels.attention import ring_keys
from fused_tp.triton_kernels.comm import streams
from tests.native.doubles.libraries import double_knobs, gpu_double
from tests.native_build import use_driver

pytestmark = pytest.mark.full


class Owner:
    """An owner in a reference cycle, which only the garbage collector frees."""

    def __init__(self) -> None:
        self.itself = self


def test_streams_come_back_while_others_are_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(range(100))

    def create(index: int, has_high_priority: bool) -> int:
        gc.collect()
        return next(numbers)

    monkeypatch.setattr(streams, "_create_stream", create)
    monkeypatch.setattr(streams, "_free_streams", {})
    device = torch.device("cuda", 0)
    found: list[list[int]] = []

    def take() -> None:
        found.append(streams.own_streams(Owner(), device, 2))  # returned by a collection within the next call
        found.append(streams.own_streams(streams, device, 1))
        found.append(streams.own_streams(streams, device, 2))

    gc.disable()  # no collection before that call
    try:
        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive(), "it waits for itself"
    finally:
        gc.enable()
    assert found[0] == [0, 1] and found[1] == [2] and sorted(found[2]) == [0, 1]
    assert streams.own_streams(streams, device, 1, has_high_priority=True) == [
        3
    ]  # streams of another priority are not reused


@pytest.mark.parametrize(
    ("queues", "few"), [(None, False), ("1", True), ("7", True), ("8", False), ("32", False), ("many", False)]
)
def test_copies_come_first_where_streams_share_queues(
    monkeypatch: pytest.MonkeyPatch, queues: str | None, few: bool
) -> None:
    """A ring of three groups of heads would deadlock with CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron requires."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    if queues is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    assert streams.runs_copies_concurrently(torch.device("cpu")) is not few


class Driver:
    """The part of libcuda that creates streams; records their priorities."""

    def __init__(self) -> None:
        self.priorities: list[int] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if name == "cuCtxGetStreamPriorityRange":
                for pointer, value in zip(arguments, (0, -5), strict=True):
                    pointer._obj.value = value
            if name == "cuStreamCreateWithPriority":
                arguments[0]._obj.value = 7
                self.priorities.append(arguments[2])
            return 0

        return call


def test_what_a_kernel_waits_for_has_the_greatest_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    assert [streams.new_stream(driver, 0), streams.new_stream(driver, 0, has_high_priority=True)] == [7, 7]
    assert driver.priorities == [0, -5]

    def asked(owner: object, device: torch.device, count: int, *, has_high_priority: bool = False) -> None:
        raise LookupError(f"{count} streams, has_high_priority: {has_high_priority}")

    monkeypatch.setattr(ring_keys, "own_streams", asked)
    buffer, handle = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0)), SimpleNamespace(world_size=3)
    with pytest.raises(LookupError, match="2 streams, has_high_priority: True"):
        ring_keys.RingWorkspace(cast("Any", buffer), cast("Any", handle), timeout_seconds=1)


# ---- streams per GPU -------------------------------------------------------------------------------------------------

QUEUES = 32  # the most of a GPU (CUDA_DEVICE_MAX_CONNECTIONS); streams that share a queue wait for each other
RANKS = 4  # that share one GPU, as in tests/gpu and benchmarks.gpu


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Create streams with the driver's double; yield a function that returns how many were created."""
    use_driver(gpu_double())
    library, count = ctypes.CDLL(str(gpu_double())), double_knobs().cuda_double_streams_made
    before = count()

    def create(index: int, has_high_priority: bool) -> Any:
        return SimpleNamespace(cuda_stream=streams.new_stream(library, index, has_high_priority))

    def own_streams(rank: LocalRank, owner: object, count: int) -> Any:
        return streams.own_streams(owner, torch.device("cuda", 0), count, has_high_priority=True)

    rescue_stream = cached_property(lambda rank: rank.own_streams(rank, 1)[0])
    rescue_stream.__set_name__(LocalRank, "rescue_stream")
    monkeypatch.setattr(streams, "_create_stream", create)
    monkeypatch.setattr(streams, "_free_streams", {})
    monkeypatch.setattr(LocalRank, "own_streams", own_streams)
    monkeypatch.setattr(LocalRank, "rescue_stream", rescue_stream)
    yield lambda: count() - before
    gc.collect()  # finalizers return streams to this test's pool, before it is undone
    use_driver(None)


def gather(engine: CopyEngine, rank: LocalRank, length: int, number: int, offered: bool) -> None:
    """One gather by copy engines; a kernel (if `offered`) or the caller's stream waits for it."""
    shard, gathered = torch.full((length,), 10.0 * number + rank.rank), torch.zeros(RANKS, length)
    with engine.begin_call("all_gather_matmul", gather_bytes=shard.nbytes) as call:
        if offered:
            words = call.offer(shard, list(gathered)).arrival_flags
            until = time.monotonic() + 30
            while not all(words[peer] for peer in range(RANKS) if peer != rank.rank):
                assert time.monotonic() < until
                time.sleep(1e-4)
        else:
            call.gather(shard, list(gathered))
            gathered[rank.rank].copy_(shard)
            for peer in range(RANKS):
                call.wait_for(peer)
        assert torch.equal(gathered, (10.0 * number + torch.arange(RANKS))[:, None].expand(RANKS, length))
        call.finish(gathered)


@pytest.mark.skipif(find_spec("fused_tp._core") is None, reason="needs the native core: pip install -e .")
def test_each_stream_of_four_ranks_has_a_queue_of_its_own(
    driver: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait that shares a queue with the operation it waits for never ends. All kinds of workspaces exist at once."""
    pytest.importorskip("triton", reason="needs Triton")
    monkeypatch.setattr(ring_keys.GatherWorkspace, "__init__", lambda self, *_, **__: None)  # the ring's own are made

    def ranks(rank: LocalRank) -> object:
        def make(buffer: Any, handle: Any, *, timeout_seconds: float, rescue_stream: Any) -> Any:
            assert rescue_stream is rank.rescue_stream
            return SimpleNamespace(state=torch.empty(0), expired_wait=lambda: None, buffer=buffer)

        def make_ring(buffer: Any, handle: Any, **how: Any) -> Any:
            on_gpu: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
            ring = ring_keys.RingWorkspace(on_gpu, handle, **how)
            assert len(ring.streams) == ring_keys.MAX_STREAMS
            made = make(buffer, handle, **how)
            made.ring = ring
            return made

        main = streams.own_streams(rank, torch.device("cuda", 0), 1)
        engine, kernels = CopyEngine(rank), FusedKernelSchedule(rank, None).workspaces
        kinds = {*kernels._constructors, "device", "overlapped gather"}
        assert kinds == {"sum", "gather", "ring", "device", "overlapped gather"}, "a kind that this does not know"
        kernels._constructors = {kind: make_ring if kind == "ring" else make for kind in kinds}
        for kind in sorted(kinds):
            kernels.reserve(kind, 1 << 20, "op")
        for length in (100, 1 << 16):  # the second length makes the workspace grow
            for number in range(6):
                gather(engine, rank, length, number, offered=number != 3)
        rank.barrier()
        engine.stop()
        return main, engine, kernels

    kept = run_local(RANKS, ranks, timeout=120)
    assert driver() == RANKS * 7  # main, rescue, two for rings, one that sends and two that fetch
    assert driver() <= QUEUES - 4  # leaves room for the default stream and those of torch and of a benchmark
    del kept


@pytest.mark.skipif(find_spec("fused_tp._core") is None, reason="needs the native core: pip install -e .")
def test_streams_of_an_outgrown_workspace_go_on_with_the_next(driver: Callable[[], int]) -> None:
    """Streams return to the pool once the last workspace ends; a workspace that a graph may use keeps its own."""

    def ranks(rank: LocalRank) -> list[int]:
        engine, counts = CopyEngine(rank), []
        for length in (100, 1 << 16, 1 << 18):
            for number in range(5):
                gather(engine, rank, length, number, offered=True)
            rank.barrier()
            counts.append(driver())
            rank.barrier()
            engine._slots[""].is_captured = length == 1 << 16
        engine.stop()
        return counts

    per_rank = 4
    assert run_local(RANKS, ranks, timeout=120) == [[RANKS * n for n in (per_rank, per_rank, 2 * per_rank - 1)]] * RANKS
    gc.collect()
    assert len(streams._free_streams[0, True]) == driver() == RANKS * (2 * per_rank - 1)
