"""Signals between ranks, interpreted, W processes over CPU shared memory: ranks that give up, and memory requirements.

test_calls tests that data arrives before its flag, call after call.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton", reason="needs Triton")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fused_tp.triton_kernels.comm.signals import (
    ExpiredWait,
    Workspace,
    WorkspaceArguments,
    begin,
    begin_kernel,
    end,
    flag_bytes,
    is_last,
    needed_bytes,
    signal,
    wait,
)
from fused_tp.triton_kernels.gemm.gemm_sum import slot_pointers, store_slot
from tests.kernels.ranks import interpreted, interpreted_ranks, workspace_of

OP = tl.constexpr(1)
TILE = 16  # elements along each side


@triton.jit
def ring_kernel(x_ptr, out_ptr, ws, rank, offset, WORLD: tl.constexpr):
    """Each program sends one tile of x to the next rank and stores the tile it receives in out."""
    call = begin(ws, rank, WORLD)
    tile = tl.program_id(0)
    places = tile * 256 + tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    store_slot(call, (rank + 1) % WORLD, tile, tl.load(x_ptr + places), offset, tl.float32)
    signal(call, (rank + 1) % WORLD, WORLD + tile, True)
    wait(call, WORLD + tile, (rank + WORLD - 1) % WORLD, tile, WORLD, OP)
    tl.store(out_ptr + places, tl.load(slot_pointers(call, rank, tile, offset, tl.float32, 16, 16)))
    end(call, WORLD, OP)


@triton.jit(do_not_specialize=["rank"])
def barrier_kernel(ws, rank, WORLD: tl.constexpr):
    """A call without data: ends once all ranks have begun it."""
    end(begin(ws, rank, WORLD), WORLD, 0)


def barrier(workspace):
    barrier_kernel[(1,)](**workspace.arguments(), WORLD=workspace.world_size)


def ring(workspace, x):
    out = torch.empty_like(x)
    tiles = x.numel() // TILE**2
    (offset,) = workspace.slot_offsets([(tiles, TILE**2 * 4)])
    ring_kernel[(tiles,)](x, out, **workspace.arguments(), offset=offset, WORLD=workspace.world_size)
    return out


@triton.jit
def give_up_kernel(ws, rank, good, WORLD: tl.constexpr):
    call = begin(ws, rank, WORLD)
    signal(call, (rank + 1) % WORLD, WORLD, good != 0)
    wait(call, WORLD, (rank + WORLD - 1) % WORLD, 5, WORLD, OP)
    end(call, WORLD, OP)


def give_up(group, quitter):
    workspace = workspace_of(group, timeout_seconds=20)
    begun = time.monotonic()
    give_up_kernel[(1,)](**workspace.arguments(), good=int(group.rank() != quitter), WORLD=group.size())
    assert time.monotonic() - begun < 15
    return workspace.expired_wait()


def test_who_gave_up_is_not_waited_for():
    answers = interpreted_ranks(3, give_up, 1)
    assert answers[:2] == [None, None]
    expired = replace(answers[2], absent_ranks=())  # rank 0 may or may not have begun by then
    assert expired == ExpiredWait("matmul_all_reduce", 1, 2, 5, source=1, absent_ranks=(), gave_up=True)
    assert "rank 1 gave up" in str(expired)


def goes_on_after_giving_up(group):
    """Rank 0 gives up in call 2 and makes three more before rank 1, late and with a long deadline, begins call 2."""
    rank = group.rank()
    workspace = workspace_of(group, timeout_seconds=(0.2, 20)[rank])
    barrier(workspace)
    begun = time.monotonic()
    if rank == 1:
        dist.barrier(group)
    outs = [ring(workspace, torch.full((2, TILE, TILE), 10.0 * call + rank)) for call in range(2, 6)]
    if rank == 0:
        dist.barrier(group)
    dist.barrier(group)  # keep memory that the peer may still write to until it is done
    assert time.monotonic() - begun < 15
    return [out.unique().tolist() for out in outs], workspace.expired_wait()


def test_who_has_given_up_touches_nothing_of_its_peers_in_later_calls():
    (_, expired0), (outs, expired1) = interpreted_ranks(2, goes_on_after_giving_up)
    assert expired0 == ExpiredWait("matmul_all_reduce", 2, 0, 0, source=1, absent_ranks=(1,), gave_up=False)
    # Rank 0 delivered its part of call 2 before it gave up; later calls, from call 4 on, use the same half.
    assert outs[0] == [20.0]
    # At the end of call 2 rank 1 learns at once that rank 0 is lost, and does not wait 20 s for it.
    assert expired1 == ExpiredWait("matmul_all_reduce", 2, 1, None, source=0, absent_ranks=(), gave_up=True)
    assert str(expired1).endswith(
        "waited for its beginning of rank 0; "
        "rank 0 gave up: it raised an error or waited for a rank that did not arrive in time"
    )


@triton.jit
def count_kernel(out_ptr, ws, rank, WORLD: tl.constexpr):
    call = begin(ws, rank, WORLD)
    tl.store(out_ptr + tl.program_id(0), is_last(call, 2, tl.num_programs(0)).to(tl.int32))
    end(call, WORLD, OP)


@interpreted(2)
def test_one_program_is_the_last_and_the_counter_is_left_at_zero(group):
    workspace = workspace_of(group)
    for programs in (3, 1, 4):
        out = torch.full((programs,), -1, dtype=torch.int32)
        count_kernel[(programs,)](out, **workspace.arguments(), WORLD=group.size())
        assert out.sum() == 1
    assert not workspace.state[16:].any()


@interpreted(2)
def test_a_workspace_that_is_too_small_says_what_is_needed(group):
    workspace = workspace_of(group, nbytes=2 * 8192)
    # Flags and begun words come first, with room for 16; then each run of slots, aligned to a cache line.
    assert workspace.slot_offsets([(2, 64), (1, 32)]) == [128, 256]
    assert workspace.slot_offsets([(14, 512)]) == [128]
    with pytest.raises(ValueError, match=r"has 16384 bytes; this call needs 32768\. Create a larger one"):
        workspace.slot_offsets([(15, 512)])
    with pytest.raises(ValueError, match=r"has 16384 bytes; this call needs 16896\. Create a larger one"):
        workspace.slot_offsets([(1, 8192)])
    with pytest.raises(ValueError, match=r"has 64 counters of tile rows; this call needs 65"):
        workspace.slot_offsets([(1, 64)], counters=65)
    dist.barrier(group)


@dataclass
class FakeHandle:
    buffer_ptrs: list[int]
    rank: int = 0
    offset: int = 0

    @property
    def world_size(self) -> int:
        return len(self.buffer_ptrs)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        pass


@interpreted(1)
def test_memory_that_kernels_cannot_use_is_refused(group):
    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 64 :]
    address = memory.data_ptr()

    def refused(message, buffer, handle):
        with pytest.raises(ValueError, match=message):
            Workspace(buffer, handle, timeout_seconds=1)

    refused("buffer must be the memory that handle reaches, at 0x", memory[64:], FakeHandle([address]))
    refused("multiple of 64 bytes on every rank; on rank 1 it is", memory, FakeHandle([address, address + 8]))
    within = Workspace(memory[64:], FakeHandle([address, address + 256], offset=64), timeout_seconds=1)
    assert within.addresses.tolist() == [address + 64, address + 320]
    assert within.multicast_address == 0


KINDS = {"ws": WorkspaceArguments("*i64", "*i64", "*i64", "i64", "i64"), "rank": "i32", "WORLD": "constexpr"}


def test_a_barrier_compiles_to_releases_and_acquires():
    """Waits are inlined: a loop over 63 ranks unrolled 63 times would take minutes to compile."""
    source = ASTSource(fn=barrier_kernel, signature=KINDS, constexprs={"WORLD": 63})
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    ptx = re.sub(r"\n\s*\.loc[^\n]*", "", ptx)  # Triton 3.9 records the line of every instruction
    assert len(ptx) < 200_000
    # The protocol requires that a release sets the flag and an acquire reads it, both with system scope.
    assert ptx.count("st.release.sys.global.b64") == 1
    assert re.search(r"(ld\.global\.sys\.acquire|atom\.global\.sys\.acquire\.add)\.[bu]64", ptx)
    # All ranks' flags are polled at once; after the barrier all threads have seen them.
    assert re.search(r"ld\.acquire\.sys\.global\.b64[^\n]*\n(?!.*ld\.)[^\n]*\n\s*bar\.red\.and\.pred", ptx)
    assert not re.search(r"atom\S*\.sys\.release", ptx), "links need not carry atomic operations"
    # The error record: fields, then a system-scope fence, then the word that publishes it.
    fence = ptx.rindex("atom.global.sys.acq_rel.exch.b64")
    assert ptx[fence:].count("st.global.b64") == 1
    # The call in which a rank gives up: it writes its number to all peers and waits for none.
    source = ASTSource(fn=begin_kernel, signature=KINDS, constexprs={"WORLD": 8})
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert "st.release.sys.global.b64" in ptx and "acquire" not in ptx


@pytest.mark.parametrize("slots", [[(1, 0)], [(1, 512)], [(7, 96), (3, 5000)], [(900, 8192)], [(5000, 16)]])
def test_as_much_as_is_needed_is_enough(slots):
    half = needed_bytes(4, slots) // 2
    assert flag_bytes(half) >= 8 * (4 + sum(count for count, _ in slots))
    assert half - flag_bytes(half) >= sum(count * nbytes for count, nbytes in slots)
