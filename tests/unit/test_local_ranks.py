"""Ranks as threads of one process: values, deadlines, ranks that fail. On CPU; the GPU tests use them too."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from benchmarks.local_ranks import CPU_PROGRAMS, LocalGroup, LocalRank, run_local
from fused_tp.core.errors import CollectiveTimeoutError, PeerLostError, RankMismatchError
from fused_tp.triton_kernels.comm.signals import Workspace

pytestmark = pytest.mark.full

world_sizes = pytest.mark.parametrize("world_size", [1, 3])


@pytest.fixture(autouse=True)
def deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_TP_TIMEOUT", "20")


@world_sizes
def test_buffers_and_their_addresses(world_size: int) -> None:
    def fn(rank: LocalRank) -> list[int]:
        mine, memory = rank.allocate(30)
        assert (mine.shape, mine.dtype, memory.buffer_size) == ((30,), torch.uint8, 30)
        assert mine.data_ptr() == memory.buffer_ptrs[rank.rank] and mine.data_ptr() % 64 == 0
        mine.view(torch.bfloat16).fill_(rank.rank)
        memory.barrier()
        for peer in range(world_size):
            theirs = memory.get_buffer(peer, (2, 5), torch.bfloat16, storage_offset=5)
            assert theirs.data_ptr() == memory.buffer_ptrs[peer] + 10 and bool((theirs == peer).all())
        assert memory.get_buffer(0, (), torch.bfloat16, 14).shape == ()
        assert memory.get_buffer(0, (0, 4), torch.bfloat16, 15).numel() == 0
        return memory.buffer_ptrs

    answers = run_local(world_size, fn)
    assert answers == [answers[0]] * world_size and len(set(answers[0])) == world_size


def test_a_rank_is_memory_for_kernels() -> None:
    memory = LocalGroup(1).rank(0)
    buffer, handle = memory.allocate(1 << 14)
    assert (memory.arch, memory.sms, memory.rank, memory.world_size) == (0, CPU_PROGRAMS, 0, 1)
    with torch.device("meta"):  # the default device of new tensors
        workspace = Workspace(buffer, handle, timeout_seconds=1)
    assert workspace.expired_wait() is None and workspace.error.device == torch.device("cpu")


def test_bounds_and_ranks_are_checked() -> None:
    _, memory = LocalGroup(1).rank(0).allocate(60)
    for match, call in (
        ("end at byte 64; the buffer has 60 bytes", lambda: memory.get_buffer(0, (15,), torch.float32, 1)),
        ("the buffer has 60 bytes", lambda: memory.get_buffer(0, (1,), torch.float32, -1)),
        ("rank is 1; the group has ranks 0 to 0", lambda: memory.get_buffer(1, (1,), torch.float32)),
        ("world_size is 0", lambda: LocalGroup(0)),
        ("local ranks run on cpu or cuda", lambda: run_local(1, print, device="meta")),
    ):
        with pytest.raises(ValueError, match=match):
            call()
    with pytest.raises(RankMismatchError, match=r"rank \d requested \d+ bytes, rank \d requested"):
        run_local(2, lambda rank: rank.allocate(8 + 8 * rank.rank))


@world_sizes
def test_turns_do_not_overlap(world_size: int) -> None:
    inside: list[int] = []
    order: list[int] = []

    def fn(rank: LocalRank) -> None:
        for _ in range(5):
            with rank.in_turn():
                inside.append(rank.rank)
                time.sleep(0.001)  # time for other ranks to enter, if they could
                order.append(rank.rank)
                assert inside == [rank.rank]
                inside.clear()

    run_local(world_size, fn)
    assert order == list(range(world_size)) * 5


def test_ranks_that_do_not_come_are_named_and_nobody_waits_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_TP_TIMEOUT", "0.5")
    begun, stay = time.monotonic(), threading.Event()
    said = r"barrier \(meeting 1\): rank [02] waited 0\.5 seconds for ranks 1, 3\."
    try:
        with pytest.raises(CollectiveTimeoutError, match=said):
            run_local(4, lambda rank: (rank.rank in (1, 3) and stay.wait(10)) or rank.barrier(), timeout=2.0)
        with pytest.raises(CollectiveTimeoutError, match=r"rank 1 of 2 had not finished in 0\.1 seconds"):
            run_local(2, lambda rank: rank.rank == 1 and stay.wait(10), timeout=0.1)
    finally:
        stay.set()
    with pytest.raises(PeerLostError, match="rank 0 waited for rank 1, which returned without it"):
        run_local(2, lambda rank: rank.barrier() if rank.rank == 0 else None)
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("what", ["barrier", "turn", "allocate"])
def test_a_rank_that_fails_releases_the_others(what: str) -> None:
    errors: dict[int, BaseException] = {}

    def fn(rank: LocalRank) -> None:
        _, memory = rank.allocate(8)
        if rank.rank == 2:
            time.sleep(0.05)  # the others wait by then, most likely
            raise KeyError("a fault of its own")
        try:
            if what == "barrier":
                memory.barrier()
            elif what == "turn":
                with rank.in_turn():
                    pass
            else:
                rank.allocate(8)
        except PeerLostError as error:
            errors[rank.rank] = error
            raise

    with pytest.raises(KeyError, match="a fault of its own") as raised:
        run_local(3, fn)
    assert sorted(errors) == [0, 1]
    assert all("rank 2 failed with KeyError" in str(error) for error in errors.values())
    assert str(raised.value.__cause__).startswith("3 of 3 local ranks failed.\nRank 2:\nTraceback")
