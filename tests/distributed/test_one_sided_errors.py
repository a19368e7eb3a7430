"""An error of one rank inside an op on shared memory ends the op on all ranks at once, with the reason."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fused_tp
from fused_tp.attention import ring
from fused_tp.backends.shared_memory.shared_memory import SharedMemorySchedule
from fused_tp.backends.shared_memory.shm import ShmCall, ShmTransport, shm_transport
from fused_tp.core.errors import FusedTPError, RankMismatchError
from fused_tp.core.group import resolve_group
from tests.late import interrupted_after
from tests.workers import fresh_ranks, run_ranks

SOON = 5.0  # seconds; the deadline is 60


def gather(group: dist.ProcessGroup, x: torch.Tensor) -> torch.Tensor:
    transport = shm_transport(resolve_group(group))
    assert transport is not None
    return SharedMemorySchedule(transport).all_gather(x, gather_dim=0, gather_size=None).wait()


OPS: dict[str, Callable[[dist.ProcessGroup, torch.Tensor], Any]] = {
    "all_gather": gather,
    "all_gather_matmul": lambda group, x: fused_tp.all_gather_matmul(x, x, group=group),
}


def fail_to_copy_in(group: dist.ProcessGroup, op: str) -> str:
    """Fail the last rank's access to its own workspace; return each rank's error. Afterwards the group works again."""
    x = torch.ones(3, 5)
    OPS[op](group, x)
    odd = dist.get_rank(group) == dist.get_world_size(group) - 1
    begun = time.perf_counter()
    # `error` keeps the frames of its traceback alive, but the call must have ended nevertheless.
    if odd:
        broken = mock.patch.object(ShmCall, "buffer", side_effect=MemoryError("no room to copy"))
        with broken, pytest.raises(MemoryError) as error:
            OPS[op](group, x)
    else:
        with pytest.raises(FusedTPError) as error:
            OPS[op](group, x)
    assert time.perf_counter() - begun < SOON
    for _ in range(40):  # more calls than the group has slots: the failed call released its slot
        assert gather(group, x).shape == (3 * dist.get_world_size(group), 5)
    return str(error.value)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("op", list(OPS))
def test_a_rank_that_cannot_copy_in(op: str, world_size: int) -> None:
    *peers, odd = run_ranks(world_size, fail_to_copy_in, op, env={"FUSED_TP_SCHEDULE": "one_sided"})
    assert odd == "no room to copy"
    for said in peers:
        assert said.startswith(f"rank {world_size - 1} left {op}({3 * world_size}, 5, 0; float32), call ")
        assert said.endswith("because it raised an error")


def fail_in_step_0(world: dist.ProcessGroup) -> list[str]:
    """Rank 1 raises in step 0, before or after its keys are readable; a call of rank 0 that has all keys completes."""
    rank, q, said = dist.get_rank(world), torch.ones(1, 4, 2, 4), []
    for settled, causal in itertools.product((False, True), repeat=2):
        group = dist.new_group([0, 1])

        def run(group: Any = group, causal: bool = causal) -> None:
            fused_tp.ring_attention(q, q, q, group=group, causal=causal, layout="contiguous")

        run()
        begun = time.perf_counter()
        if rank == 1:
            where = mock.patch.object(ShmTransport, "is_settled", settled)
            broken = mock.patch.object(ring.RingForward, "attend", side_effect=MemoryError("no room for scores"))
            with where, broken, pytest.raises(MemoryError):
                run()
        elif causal or settled:
            run()
        with pytest.raises(FusedTPError) as error:
            run()
        assert time.perf_counter() - begun < SOON
        said.append(str(error.value))
        dist.destroy_process_group(group)
    return said


def test_a_ring_that_fails_in_step_0_is_not_tried_again() -> None:
    # A world of two: in the pool, new groups of two ranks would be numbered differently from those of the others.
    outcomes = fresh_ranks(2, fail_in_step_0, env={"FUSED_TP_SCHEDULE": "one_sided"})
    others, own = (outcome.unwrap() for outcome in outcomes)
    assert all("raised MemoryError (no room for scores) midway" in said for said in own), own
    assert all("rank 1 has left the group" in said for said in others), others


NATIVE: dict[str, Callable[[ShmTransport], Any]] = {
    "all_reduce": lambda transport: transport.all_reduce(torch.ones(4)),
    "reduce_scatter": lambda transport: transport.reduce_scatter(torch.ones(4, 4), [2, 2]),
    "barrier": lambda transport: transport.barrier(),
}


def interrupt_a_wait(world: dist.ProcessGroup, op: str) -> str:
    """A signal handler of rank 0 raises in its wait for rank 1, which then finds all data that it needs from rank 0."""
    group = dist.new_group([0, 1])
    transport = shm_transport(resolve_group(group))
    assert transport is not None
    NATIVE[op](transport)
    if transport.rank == 0:
        with pytest.raises(KeyboardInterrupt), interrupted_after(0.3):
            NATIVE[op](transport)
        dist.barrier(world)
    else:
        dist.barrier(world)
        NATIVE[op](transport)
    with pytest.raises(FusedTPError) as error:
        NATIVE[op](transport)
    dist.destroy_process_group(group)
    return str(error.value)


@pytest.mark.parametrize("op", list(NATIVE))
def test_a_second_try_of_a_wait_that_was_interrupted_is_not_taken_for_the_next_call(op: str) -> None:
    own, others = (outcome.unwrap() for outcome in fresh_ranks(2, interrupt_a_wait, op))
    assert "call 2 was interrupted after peers had joined it" in own
    assert "rank 0 has left the group" in others


def disagree_between_two_calls(group: dist.ProcessGroup) -> str:
    transport = shm_transport(resolve_group(group))
    assert transport is not None
    schedule, x = SharedMemorySchedule(transport), torch.ones(3, 5)
    with pytest.raises(RankMismatchError) as error, schedule.abort_scope("op"):  # `error` keeps `gathering`
        gathering = schedule.all_gather(x, gather_dim=0, gather_size=None)
        schedule.all_reduce(torch.ones(1 + transport.rank))
        gathering.wait()
    for _ in range(40):
        assert gather(group, x).shape == (3 * transport.world_size, 5)
    return str(error.value)


def test_what_an_error_has_interrupted_has_ended_though_the_error_is_kept() -> None:
    for said in run_ranks(2, disagree_between_two_calls):
        assert said.startswith("ranks disagree about call ")
