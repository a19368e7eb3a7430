"""Ranks as threads of one process: values, signals, deadlines, ranks that fail. On CPU; the GPU tests use them too."""

from __future__ import annotations

import ctypes
import threading
import time

import pytest
import torch

from benchmarks.local_ranks import CPU_PROGRAMS, LocalGroup, LocalRank, run_local
from fused_tp.runtime.errors import CollectiveTimeoutError, PeerLostError, RankMismatchError
from fused_tp.transport.symm_mem import CHANNELS
from fused_tp.triton_kernels.comm.workspace import Workspace

pytestmark = pytest.mark.full

world_sizes = pytest.mark.parametrize("world_size", [1, 3])


@pytest.fixture(autouse=True)
def deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_TP_TIMEOUT", "20")


@world_sizes
def test_exchange_gives_everybody_everything_in_rank_order(world_size: int) -> None:
    def fn(rank: LocalRank, factor: int) -> list[list[int]]:
        answers = []
        for call in range(200):
            if (call + rank.rank) % 37 == 0:
                time.sleep(0.001)
            answers.append(rank.exchange(factor * call + rank.rank))
        return answers

    expected = [[1000 * call + r for r in range(world_size)] for call in range(200)]
    assert run_local(world_size, fn, 1000) == [expected] * world_size


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
    def fn(rank: LocalRank) -> None:
        _, memory = rank.symmetric_empty(8)
        _, other = rank.symmetric_empty(8)
        if rank.rank == 0:
            memory.put_signal(1, channel=0)
            memory.put_signal(1, channel=0)
        else:
            memory.wait_signal(0, channel=0)
            memory.wait_signal(0, channel=0)
            for late, channel in ((memory, 0), (memory, 1), (other, 0)):
                with pytest.raises(CollectiveTimeoutError, match=r"rank 1 waited 0\.02 seconds for rank 0"):
                    late.wait_signal(0, channel=channel, timeout_ms=20)
        rank.barrier()

    run_local(2, fn)


@world_sizes
def test_buffers_and_their_addresses(world_size: int) -> None:
    def table(address: int) -> list[int]:
        words = bytearray(ctypes.string_at(address, 8 * world_size))
        return torch.frombuffer(words, dtype=torch.int64).tolist()

    def fn(rank: LocalRank) -> list[int]:
        mine, memory = rank.symmetric_empty((3, 5), torch.bfloat16)
        assert (mine.shape, mine.dtype, memory.buffer_size) == ((3, 5), torch.bfloat16, 30)
        assert mine.data_ptr() == memory.buffer_ptrs[rank.rank] and mine.data_ptr() % 64 == 0
        mine.fill_(rank.rank)
        memory.barrier()
        for peer in range(world_size):
            theirs = memory.get_buffer(peer, (2, 5), torch.bfloat16, storage_offset=5)
            assert theirs.data_ptr() == memory.buffer_ptrs[peer] + 10 and bool((theirs == peer).all())
        assert memory.get_buffer(0, (), torch.bfloat16, 14).shape == ()
        assert memory.get_buffer(0, (0, 4), torch.bfloat16, 15).numel() == 0
        assert memory.get_signal_pad(rank.rank).shape == (CHANNELS, world_size)
        assert table(memory.buffer_ptrs_dev) == memory.buffer_ptrs
        assert table(memory.signal_pad_ptrs_dev) == memory.signal_pad_ptrs
        return memory.buffer_ptrs + memory.signal_pad_ptrs

    answers = run_local(world_size, fn)
    assert answers == [answers[0]] * world_size and len(set(answers[0])) == 2 * world_size


def test_a_rank_is_memory_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workspace, "_check_device", lambda self, buffer: None)
    memory = LocalGroup(1).rank(0)
    buffer, handle = memory.allocate(1 << 14)
    assert (memory.arch, memory.sms, memory.rank, memory.world_size) == (0, CPU_PROGRAMS, 0, 1)
    assert buffer.shape == (1 << 14,) and buffer.data_ptr() == handle.buffer_ptrs[0]
    with torch.device("meta"):  # where tensors are made that nothing is said of
        workspace = Workspace(buffer, handle, timeout_seconds=1)
    assert workspace.expired() is None and workspace.error.device == torch.device("cpu")


def test_bounds_ranks_and_channels_are_checked() -> None:
    _, memory = LocalGroup(1).rank(0).symmetric_empty((3, 5), torch.float32)
    for match, call in (
        ("end at byte 64; the buffer has 60 bytes", lambda: memory.get_buffer(0, (15,), torch.float32, 1)),
        ("the buffer has 60 bytes", lambda: memory.get_buffer(0, (1,), torch.float32, -1)),
        ("rank is 1; the group has ranks 0 to 0", lambda: memory.get_buffer(1, (1,), torch.float32)),
        (f"channel is {CHANNELS}", lambda: memory.put_signal(0, channel=CHANNELS)),
        ("rank is -1", lambda: memory.wait_signal(-1)),
        ("world_size is 0", lambda: LocalGroup(0)),
        ("local ranks run on cpu or cuda", lambda: run_local(1, print, device="meta")),
    ):
        with pytest.raises(ValueError, match=match):
            call()
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


def test_ranks_that_do_not_come_are_named_and_nobody_waits_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_TP_TIMEOUT", "0.2")
    begun, stay = time.monotonic(), threading.Event()
    said = r"barrier \(meeting 1\): rank [02] waited 0\.2 seconds for ranks 1, 3\."
    try:
        with pytest.raises(CollectiveTimeoutError, match=said):
            run_local(4, lambda rank: (rank.rank in (1, 3) and stay.wait(10)) or rank.barrier(), timeout=2.0)
        with pytest.raises(CollectiveTimeoutError, match=r"rank 1 of 2 had not finished in 0\.1 seconds"):
            run_local(2, lambda rank: rank.rank == 1 and stay.wait(10), timeout=0.1)
    finally:
        stay.set()
    with pytest.raises(PeerLostError, match="rank 0 waited for rank 1, which returned without coming"):
        run_local(2, lambda rank: rank.barrier() if rank.rank == 0 else None)
    assert time.monotonic() - begun < 10


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

    with pytest.raises(KeyError, match="a fault of its own") as raised:
        run_local(3, fn)
    assert sorted(errors) == [0, 1]
    assert all("rank 2 failed with KeyError" in str(error) for error in errors.values())
    assert str(raised.value.__cause__).startswith("3 of 3 local ranks failed.\nRank 2:\nTraceback")


def test_what_a_rank_put_before_it_returned_is_still_there() -> None:
    def fn(rank: LocalRank) -> None:
        _, memory = rank.symmetric_empty(8)
        if rank.rank == 0:
            memory.put_signal(1)
        else:
            time.sleep(0.05)  # rank 0 has returned by then, most likely
            memory.wait_signal(0)

    run_local(2, fn)
