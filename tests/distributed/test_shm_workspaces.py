"""Calls in flight, their memory pool, and every failure to set up shared memory."""

from __future__ import annotations

import gc
import os
import re
import struct
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fused_tp.backends.shared_memory import shm
from fused_tp.backends.symmetric_memory.symm_mem import CpuSymmetricMemory
from fused_tp.core.errors import FusedTPError
from fused_tp.core.group import resolve_group
from tests.distributed.shm_tools import core_resources, new_tag, own_transport, transport_of, with_store
from tests.workers import fresh_ranks, run_ranks

LIMIT = 16
INLINE_BYTES = 64 * 1024  # larger workspaces come from the pool


def in_flight(group: Any, tag: str) -> str:
    """Maximum number of calls in flight, alternately small and large, ended in a different order on every rank."""
    transport = own_transport(group, tag)
    size, rank = transport.world_size, transport.rank
    for round_ in range(6):
        calls: list[tuple[int, int, Any]] = []
        for i in range(LIMIT):
            count = 10 + 30_000 * (i % 2)
            workspace = transport.begin("many", (round_, i), torch.float32, 4 * count)
            workspace.buffer(rank, (count,), torch.float32).fill_(1000 * rank + 100 * round_ + i)
            workspace.signal(1)
            calls.append((i, count, workspace))
        order = torch.randperm(LIMIT, generator=torch.Generator().manual_seed(10 * round_ + rank)).tolist()
        for i, count, workspace in (calls[j] for j in order):
            with workspace:
                for other in range(size):
                    if other != rank:
                        workspace.wait(other, 1)
                    found = workspace.buffer(other, (count,), torch.float32)
                    assert found.eq(1000 * other + 100 * round_ + i).all(), f"round {round_}, call {i}, rank {other}"
    limit = [transport.begin("limit", (i,), torch.float32, 8) for i in range(LIMIT)]
    with pytest.raises(FusedTPError) as refused:
        transport.begin("limit", (LIMIT,), torch.float32, 8)
    for begun in limit:
        with begun:
            pass
    transport.barrier()
    return str(refused.value)


@pytest.mark.parametrize("world_size", [1, 3])
def test_many_calls_in_flight_and_their_limit(world_size: int) -> None:
    for rank, sentence in enumerate(run_ranks(world_size, in_flight, new_tag())):
        assert f"16 calls of this group are in flight on rank {rank}, which is the limit; finish one" in sentence


def pool_use(group: Any, tag: str) -> tuple[int, int, int]:
    transport = own_transport(group, tag)
    marks = []
    for i in range(1000):
        with transport.begin("pool", (i,), torch.uint8, INLINE_BYTES + 1 + 4096 * (i % 7)) as workspace:
            workspace.signal(1)
            out = transport.empty((1000 + i % 5, 33), torch.float32)
            workspace.wait_all(1)
        assert transport.core_group.bytes_in_use > 0
        del out
        if i in (199, 999):
            for _ in range(LIMIT + 1):  # the most that ranks can be apart, so that all have ended earlier calls
                transport.barrier()
            marks.append(transport.core_group.high_water_bytes)
            in_use = transport.core_group.bytes_in_use
    return in_use, marks[0], marks[1]


def test_the_pool_reuses_memory() -> None:
    # Memory of 17 calls, the most that ranks can be apart, and of one output.
    most = 18 * (INLINE_BYTES + 8 * 4096) + 200_000
    for in_use, _, after in run_ranks(3, pool_use, new_tag()):
        assert in_use == 0, "memory of ended calls has not come back"
        assert after <= most, "the pool grew with the number of calls"


def behind(group: Any, tag: str) -> list[tuple[bool, int]]:
    """Rank 0 starts a call, with and without `reuse`, while rank 1 is still in the previous one."""
    transport, found = own_transport(group, tag), []
    for reuse in (True, False):
        with transport.begin("first", (), torch.uint8, 16 * INLINE_BYTES) as workspace:
            workspace.wait_all(0)
            if transport.rank == 1:
                dist.barrier(group)
                time.sleep(0.1)  # most likely, rank 0 waits for this call if it has to
        settled = transport.is_settled
        if transport.rank == 0 and reuse:  # it would wait for rank 1
            dist.barrier(group)
        with transport.begin("second", (), torch.uint8, 16 * INLINE_BYTES, may_reuse=reuse) as workspace:
            if transport.rank == 0 and not reuse:
                dist.barrier(group)
            workspace.wait_all(0)
        found.append((settled, transport.core_group.high_water_bytes // (16 * INLINE_BYTES)))
        for _ in range(LIMIT + 1):  # until all have ended earlier calls
            transport.barrier()
        assert transport.is_settled
    return found


def test_a_workspace_takes_the_place_of_the_one_before() -> None:
    assert run_ranks(2, behind, new_tag())[0] == [(False, 1), (False, 2)]


def outlive(group: Any, tag: str) -> None:
    before = core_resources()
    transport = own_transport(group, tag)
    kept = transport.empty((1000, 50), torch.float32).fill_(transport.rank)
    with transport.begin("views", (), torch.float32, 400_000) as workspace:
        peer = (transport.rank + 1) % transport.world_size
        workspace.buffer(transport.rank, (100_000,), torch.float32).fill_(7)
        workspace.signal(1)
        workspace.wait_all(1)
        view = workspace.buffer(peer, (100_000,), torch.float32)
    del transport, workspace
    gc.collect()
    torch.distributed.barrier(group)
    assert kept.eq(kept[0, 0]).all() and view.eq(7).all()
    kept.add_(1)
    del kept, view
    assert core_resources() == before


def test_tensors_outlive_their_group() -> None:
    run_ranks(2, outlive, new_tag())


def wrong_address(group: Any, tag: str, how: str) -> str:
    """Rank 1 publishes a wrong address, which looks to its peers like that of a rank on another host."""
    real = shm._core

    class Stranger:
        """The core's group with a changed address."""

        def __init__(self, *arguments: Any) -> None:
            self._group = real.Group(*arguments)

        @property
        def address(self) -> bytes:
            address = bytearray(self._group.address)
            if how == "token":
                address[-1] ^= 1
            elif how == "pid":
                address[0:4] = (2**22 + 1).to_bytes(4, "little")  # above the highest pid there can be
            elif how == "fd":
                address[4:8] = os.open("/dev/null", os.O_RDWR).to_bytes(4, "little")
            elif how == "version":
                del address[-1]
            return bytes(address)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._group, name)

    class Core:
        Group = Stranger

    described = resolve_group(group)
    before = core_resources()
    store = torch.distributed.PrefixStore(tag, torch.distributed.distributed_c10d._get_process_group_store(group))
    try:
        if described.rank == 1:
            shm._core = None if how == "no core" else Core
            shm._core_missing_reason = "the native core is not built (for this test)"
        answer = shm._create_transport(with_store(described, store))
    finally:
        shm._core = real
    assert not answer, answer
    assert core_resources() == before, "what was mapped for nothing is still mapped"
    return answer.reason


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("token", "has another token; the ranks are likely on different hosts"),
        ("pid", "cannot open the shared memory of process 4194305: No such file"),
        ("fd", "is not its shared memory; the ranks are likely on different hosts"),
        ("version", "an address of shared memory has 32 bytes, not 31"),
        ("no core", "rank 1: the native core is not built (for this test)"),
    ],
)
def test_unreachable_peers_give_all_ranks_the_same_reason(how: str, said: str) -> None:
    reasons = run_ranks(3, wrong_address, new_tag(), how)
    assert len(set(reasons)) == 1 and said in reasons[0], reasons


def small_reserve(group: Any) -> list[str]:
    """Pool of 1 MiB: a call that cannot fit raises on all ranks; a call that has to wait for earlier ones waits."""
    transport = transport_of(group)
    said = []
    for late in range(transport.world_size):  # too large on one rank: the others raise, too, instead of waiting
        try:
            with transport.begin("too_large", (), torch.uint8, 2 << 20 if transport.rank == late else 8) as workspace:
                workspace.signal(1)
                workspace.wait_all(1)
        except FusedTPError as error:
            said.append(str(error))
        transport.barrier()
    taken = transport.core_group.allocate(1 << 19) if transport.rank == 0 else None
    try:
        CpuSymmetricMemory(transport, (1 << 19) + 64)
    except FusedTPError as error:
        said.append(str(error))
    del taken
    transport.barrier()
    for i in range(50):  # four of them fill the pool; this rank may be ahead of its peers by more
        with transport.begin("waits", (i,), torch.uint8, 250_000) as workspace:
            workspace.signal(1)
            if transport.rank and i % 10 == 0:
                workspace.wait(0, 1)
    # Users may keep outputs for any time: when the pool is full, outputs are allocated elsewhere.
    kept = [transport.empty((100_000,), torch.float32).fill_(i) for i in range(8)]
    assert all(t.eq(i).all() for i, t in enumerate(kept))
    kept.clear()
    assert transport.all_reduce(torch.ones(300_000)).eq(transport.world_size).all()
    return said


def test_a_pool_that_is_too_small() -> None:
    outcomes = fresh_ranks(2, small_reserve, env={"FUSED_TP_SHM_RESERVE": str(1 << 20)})
    for rank, outcome in enumerate(outcomes):
        said = outcome.unwrap()
        full = "the shared-memory pool of this rank is full: 2097152 bytes requested"
        assert full in said[rank] and "raise FUSED_TP_SHM_RESERVE" in said[rank]
        left = f"rank {1 - rank} left too_large(; uint8), call"
        assert left in said[1 - rank] and "because it raised an error" in said[1 - rank]
        assert ("rank 0 left symmetric_memory(" if rank else "the shared-memory pool of this rank is full") in said[2]


def bad_reserve(group: Any, text: str) -> str:
    os.environ["FUSED_TP_SHM_RESERVE"] = text
    try:
        return str(shm.shm_transport(resolve_group(group)) or shm.shm_availability(resolve_group(group)).reason)
    except ValueError as error:
        return f"ValueError: {error}"


def test_a_reserve_that_cannot_be() -> None:
    for text in ("lots", str(2**64 - 4096)):  # the second overflows with the memory before the reserve
        (outcome,) = fresh_ranks(1, bad_reserve, text)
        wanted = f"ValueError: FUSED_TP_SHM_RESERVE is '{text}'; set it to a positive number of bytes, at most 2**56."
        assert outcome.unwrap() == wanted
    for outcome in fresh_ranks(2, bad_reserve, str(1 << 55)):
        assert re.search(r"rank 0: cannot (reserve|map) \d+ bytes of shared memory", outcome.unwrap())
    from fused_tp import _core

    for bytes_ in (2**64 - 4096, 2**64 - (1 << 21), 2**57):
        with pytest.raises(FusedTPError, match=f"FUSED_TP_SHM_RESERVE is {bytes_} bytes; it must be at most"):
            _core.Group(0, 1, bytes_, lambda: 1.0)


def test_segments_that_could_shrink_or_are_too_small_are_refused() -> None:
    from fused_tp import _core

    mine, theirs = (_core.Group(rank, 2, 1 << 20, lambda: 1.0) for rank in range(2))
    address = bytearray(theirs.address)
    pid, fd, size = struct.unpack_from("iiQ", address)
    with pytest.raises(OSError), open(f"/proc/{pid}/fd/{fd}", "r+b") as file:
        file.truncate(0)
    open_fd = os.memfd_create("another")
    os.truncate(open_fd, size)
    for offset, kind, value, said in (
        (8, "Q", 4096, "has 4096 bytes, too few"),
        (4, "i", open_fd, "may shrink"),
    ):
        other = bytearray(address)
        struct.pack_into(kind, other, offset, value)
        with pytest.raises(FusedTPError, match=said):
            mine.connect([mine.address, bytes(other)])
    os.close(open_fd)
