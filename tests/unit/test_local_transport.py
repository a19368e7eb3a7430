"""Ranks as threads of one process: values, signals, deadlines, ranks that fail. On CPU; the GPU tests use them too."""

from __future__ import annotations

import ctypes
import re
import threading
import time

import pytest
import torch

from benchmarks.local_ranks import CPU_PROGRAMS, LocalGroup, LocalRank, run_local
from fused_tp.runtime.errors import CollectiveTimeoutError, FusedTPError, PeerLostError, RankMismatchError
from fused_tp.transport.symm_mem import CHANNELS
from fused_tp.triton_kernels.comm.workspace import Workspace

pytestmark = pytest.mark.full

world_sizes = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


@pytest.fixture(autouse=True)
def deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_TP_TIMEOUT", "20")


@world_sizes
def test_results_are_in_the_order_of_the_ranks(world_size: int) -> None:
    def fn(rank: LocalRank, factor: int) -> tuple[int, int, str]:
        time.sleep(0.01 * (world_size - rank.rank))  # the last rank is the first to end
        return factor * rank.rank, rank.world_size, threading.current_thread().name

    assert run_local(world_size, fn, 10) == [(10 * r, world_size, f"rank {r}") for r in range(world_size)]


@world_sizes
def test_exchange_gives_everybody_everything_again_and_again(world_size: int) -> None:
    def fn(rank: LocalRank) -> list[list[int]]:
        answers = []
        for call in range(200):
            if (call + rank.rank) % 37 == 0:
                time.sleep(0.001)
            answers.append(rank.exchange(1000 * call + rank.rank))
        return answers

    expected = [[1000 * call + r for r in range(world_size)] for call in range(200)]
    assert run_local(world_size, fn) == [expected] * world_size


@world_sizes
def test_nobody_leaves_a_barrier_before_all_have_come(world_size: int) -> None:
    def fn(rank: LocalRank) -> list[tuple[float, float]]:
        _, memory = rank.symmetric_empty(8)
        times = []
        for late in range(2 * world_size):
            if late % world_size == rank.rank:
                time.sleep(0.02)  # the others would have left by then
            came = time.monotonic()
            memory.barrier(channel=late % 3) if late >= world_size else rank.barrier()
            times.append((came, time.monotonic()))
        return times

    for of_one_barrier in zip(*run_local(world_size, fn), strict=True):
        assert max(came for came, _ in of_one_barrier) <= min(left for _, left in of_one_barrier)


@world_sizes
def test_peers_see_what_was_written_before_the_signal(world_size: int) -> None:
    """A ring: each call hands a tensor to the next rank and takes one from the last, with no barrier between calls."""

    def fn(rank: LocalRank) -> None:
        calls, r = 50, rank.rank
        right, left = (r + 1) % world_size, (r - 1) % world_size
        _, memory = rank.symmetric_empty((calls, 16), torch.float32)
        for call in range(calls):
            memory.get_buffer(right, (16,), torch.float32, 16 * call).fill_(100.0 * call + r)
            memory.put_signal(right, channel=1)
            memory.wait_signal(left, channel=1)
            got = memory.get_buffer(r, (16,), torch.float32, 16 * call)
            assert torch.equal(got, torch.full((16,), 100.0 * call + left))

    run_local(world_size, fn)


def test_signals_count_and_channels_are_apart() -> None:
    def fn(rank: LocalRank) -> str:
        _, memory = rank.symmetric_empty(8)
        _, other = rank.symmetric_empty(8)
        if rank.rank == 0:
            memory.put_signal(1, channel=0)
            memory.put_signal(1, channel=0)
            rank.barrier()
            return ""
        memory.wait_signal(0, channel=0)
        memory.wait_signal(0, channel=0)
        for late, channel in ((memory, 0), (memory, 1), (other, 0)):
            with pytest.raises(CollectiveTimeoutError):
                late.wait_signal(0, channel=channel, timeout_ms=20)
        rank.barrier()
        return "done"

    assert run_local(2, fn) == ["", "done"]


@world_sizes
def test_buffers_and_their_addresses(world_size: int) -> None:
    def fn(rank: LocalRank) -> tuple[list[int], list[int], list[int]]:
        mine, memory = rank.symmetric_empty((3, 5), torch.bfloat16)
        assert (memory.rank, memory.world_size) == (rank.rank, world_size)
        assert (mine.shape, mine.dtype, memory.multicast_ptr) == ((3, 5), torch.bfloat16, 0)
        assert mine.data_ptr() == memory.buffer_ptrs[rank.rank] and memory.buffer_size == 30
        mine.fill_(rank.rank)
        memory.barrier()
        for peer in range(world_size):
            theirs = memory.get_buffer(peer, (2, 5), torch.bfloat16, storage_offset=5)
            assert theirs.data_ptr() == memory.buffer_ptrs[peer] + 10
            assert bool((theirs == peer).all())
        assert memory.get_buffer(0, (), torch.bfloat16, 14).shape == ()
        assert memory.get_buffer(0, (0, 4), torch.bfloat16, 15).numel() == 0
        pad = memory.get_signal_pad(rank.rank)
        assert pad.shape == (CHANNELS, world_size) and not pad.any() and pad.nbytes == memory.signal_pad_size
        tables = [
            torch.frombuffer((ctypes_words(address, world_size)), dtype=torch.int64).tolist()
            for address in (memory.buffer_ptrs_dev, memory.signal_pad_ptrs_dev)
        ]
        assert tables == [memory.buffer_ptrs, memory.signal_pad_ptrs]
        return memory.buffer_ptrs, memory.signal_pad_ptrs, [mine.data_ptr() % 64]

    answers = run_local(world_size, fn)
    assert answers == [answers[0]] * world_size
    assert len({*answers[0][0], *answers[0][1]}) == 2 * world_size
    assert answers[0][2] == [0]  # what a kernel's workspace asks for


def test_a_rank_is_memory_for_kernels() -> None:
    memory = LocalGroup(1).rank(0)
    buffer, handle = memory.allocate(96)
    assert (memory.arch, memory.sms, memory.rank, memory.world_size) == (0, CPU_PROGRAMS, 0, 1)
    assert buffer.shape == (96,) and buffer.data_ptr() == handle.buffer_ptrs[0]


def test_what_a_kernel_reports_is_in_the_hosts_memory_whatever_the_default_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Workspace, "_check_device", lambda self, buffer: None)
    buffer, handle = LocalGroup(1).rank(0).allocate(1 << 14)
    with torch.device("meta"):  # where tensors are made that nothing is said of
        workspace = Workspace(buffer, handle, timeout_seconds=1)
    assert workspace.expired() is None and workspace.error.device == torch.device("cpu")


def ctypes_words(address: int, count: int) -> bytearray:
    return bytearray(ctypes.string_at(address, 8 * count))


def test_bounds_ranks_and_channels_are_checked() -> None:
    _, memory = LocalGroup(1).rank(0).symmetric_empty((3, 5), torch.float32)
    with pytest.raises(ValueError, match=r"end at byte 64; the buffer has 60 bytes"):
        memory.get_buffer(0, (15,), torch.float32, 1)
    with pytest.raises(ValueError, match="the buffer has 60 bytes"):
        memory.get_buffer(0, (1,), torch.float32, -1)
    with pytest.raises(ValueError, match="rank is 1; the group has ranks 0 to 0"):
        memory.get_buffer(1, (1,), torch.float32)
    with pytest.raises(ValueError, match=f"channel is {CHANNELS}"):
        memory.put_signal(0, channel=CHANNELS)
    with pytest.raises(ValueError, match="rank is -1"):
        memory.wait_signal(-1)
    with pytest.raises(ValueError, match="world_size is 0"):
        LocalGroup(0)
    with pytest.raises(ValueError, match="local ranks run on cpu or cuda"):
        run_local(1, print, device="meta")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_refused_with_a_sentence() -> None:
    with pytest.raises(ValueError, match="no NVIDIA GPU"):
        run_local(1, print, device="cuda")


def test_ranks_that_ask_for_different_memory_are_told() -> None:
    with pytest.raises(RankMismatchError, match=r"rank \d asked for \(1?\d,\) of torch.uint8, rank \d for"):
        run_local(2, lambda rank: rank.symmetric_empty(8 + 8 * rank.rank))


@world_sizes
def test_turns_do_not_overlap(world_size: int) -> None:
    inside: list[int] = []
    order: list[int] = []

    def fn(rank: LocalRank) -> None:
        for _ in range(5):
            with rank.in_turn():
                inside.append(rank.rank)
                time.sleep(0.001)  # time for others to come in, were they let
                order.append(rank.rank)
                assert inside == [rank.rank]
                inside.clear()

    run_local(world_size, fn)
    assert order == list(range(world_size)) * 5


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_TP_TIMEOUT", "0.2")
    stay = threading.Event()

    def fn(rank: LocalRank) -> None:
        if rank.rank in (1, 3):
            stay.wait(10)
        rank.barrier()

    begun = time.monotonic()
    with pytest.raises(
        CollectiveTimeoutError, match=r"barrier \(meeting 1\): rank [02] waited 0\.2 seconds for ranks 1, 3\."
    ):
        try:
            run_local(4, fn, timeout=2.0)
        finally:
            stay.set()
    assert time.monotonic() - begun < 5


def test_a_signal_that_does_not_come_names_its_source() -> None:
    def fn(rank: LocalRank) -> None:
        _, memory = rank.symmetric_empty(8)
        if rank.rank == 1:
            memory.wait_signal(2, channel=4, timeout_ms=50)
        elif rank.rank == 2:
            with pytest.raises(PeerLostError, match="rank 1 failed with CollectiveTimeoutError"):
                memory.wait_signal(1)

    with pytest.raises(CollectiveTimeoutError, match=r"channel 4: rank 1 waited 0\.05 seconds for rank 2"):
        run_local(3, fn)


def test_the_whole_run_has_a_deadline() -> None:
    stay = threading.Event()
    begun = time.monotonic()
    with pytest.raises(CollectiveTimeoutError, match=r"rank 1 of 2 had not finished in 0\.1 seconds"):
        try:
            run_local(2, lambda rank: rank.rank == 1 and stay.wait(10), timeout=0.1)
        finally:
            stay.set()
    assert time.monotonic() - begun < 5


def test_who_waits_when_the_run_is_over_is_released() -> None:
    seen: list[BaseException] = []
    stay, released = threading.Event(), threading.Event()

    def fn(rank: LocalRank) -> None:
        if rank.rank == 1:
            stay.wait(10)
            return
        try:
            rank.barrier()
        except PeerLostError as error:
            seen.append(error)
            released.set()

    with pytest.raises(CollectiveTimeoutError, match=r"ranks 0, 1 of 2 had not finished"):
        run_local(2, fn, timeout=0.1)
    assert released.wait(5) and "the run is over" in str(seen[0])
    stay.set()


@pytest.mark.parametrize("what", ["barrier", "signal", "turn", "allocate"])
def test_a_rank_that_fails_releases_the_others(what: str) -> None:
    errors: dict[int, BaseException] = {}

    def fn(rank: LocalRank) -> None:
        _, memory = rank.symmetric_empty(8)
        if rank.rank == 2:
            time.sleep(0.05)  # the others wait by then, most likely
            raise KeyError("a fault of its own")
        try:
            if what == "barrier":
                memory.barrier()
            elif what == "signal":
                memory.wait_signal(1 - rank.rank)
            elif what == "turn":
                with rank.in_turn():
                    pass
            else:
                rank.symmetric_empty(8)
        except PeerLostError as error:
            errors[rank.rank] = error
            raise

    begun = time.monotonic()
    with pytest.raises(KeyError, match="a fault of its own") as raised:
        run_local(3, fn)
    assert time.monotonic() - begun < 5
    assert sorted(errors) == [0, 1]
    assert all("rank 2 failed with KeyError" in str(error) for error in errors.values())
    cause = raised.value.__cause__
    assert isinstance(cause, FusedTPError)
    text = str(cause)
    assert text.startswith("3 of 3 local ranks failed.\nRank 2:\nTraceback")
    assert len(re.findall(r"^Rank \d:$", text, re.MULTILINE)) == 3 and "fn" in text


def test_a_rank_that_returned_is_not_waited_for() -> None:
    begun = time.monotonic()
    with pytest.raises(PeerLostError, match="rank 0 waited for rank 1, which returned without coming"):
        run_local(2, lambda rank: rank.barrier() if rank.rank == 0 else None)
    assert time.monotonic() - begun < 5


def test_what_a_rank_put_before_it_returned_is_still_there() -> None:
    def fn(rank: LocalRank) -> None:
        _, memory = rank.symmetric_empty(8)
        if rank.rank == 0:
            memory.put_signal(1)
        else:
            time.sleep(0.05)  # rank 0 has returned by then, most likely
            memory.wait_signal(0)

    run_local(2, fn)


def test_groups_in_one_process_do_not_meet() -> None:
    """Runs beside and inside each other, as tests that run in threads would."""

    def inner(rank: LocalRank, outer: int) -> int:
        return sum(rank.exchange(outer * 10 + rank.rank))

    def fn(rank: LocalRank) -> list[int]:
        return run_local(2, inner, rank.rank)

    assert run_local(3, fn) == [[1, 1], [21, 21], [41, 41]]
