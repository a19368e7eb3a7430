"""Ranks that die or stall in the middle of a pipeline over NCCL: the others raise in time, and go on without them."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fused_tp.runtime.errors import CollectiveTimeoutError, FusedTPError, PeerLostError
from fused_tp.schedules import nccl_pipeline
from fused_tp.schedules.nccl_pipeline import NcclPipeline
from fused_tp.transport import nccl
from fused_tp.transport.nccl import gather_plan
from tests.beside import beside
from tests.distributed.nccl_tools import fresh_nccl_ranks, nccl_ranks, transport_of
from tests.distributed.schedule_cases import step
from tests.late import give_up, wait_for_those_who_gave_up
from tests.native.doubles.libraries import Stream, cuda_knobs, load_doubles
from tests.workers import Outcome

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_spec("fused_tp._core") is None, reason="needs the native core: pip install -e ."),
    pytest.mark.skipif(sys.platform != "linux", reason="watches and stops processes"),
]

NOTICE_SECONDS = 4.0  # how long after a loss, or a deadline, a rank may take to raise where many processes share a core
OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
Work = Callable[[], None]


def until_error(schedule: NcclPipeline, op: str) -> tuple[FusedTPError, float]:
    """What an endless loop of the op raises, and how long its last call has taken."""
    while True:
        begun = time.monotonic()
        try:
            step(schedule, op)
        except FusedTPError as error:
            return error, time.monotonic() - begun


def in_the_middle(work: Work) -> Any:
    """Runs `work` at the second matmul from now on: with exchanges before and behind it."""
    product, calls = nccl_pipeline.sum_of_products, 0

    def multiply(*args: Any, **keywords: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            work()
        return product(*args, **keywords)

    return mock.patch.object(nccl_pipeline, "sum_of_products", multiply)


def group_of(ranks: list[int]) -> Any:
    return dist.new_group(ranks, use_local_synchronization=True)


def check_unusable(schedule: NcclPipeline, op: str) -> None:
    with pytest.raises(FusedTPError, match="is unusable since an earlier failure"):
        step(schedule, op)


# -- killed ------------------------------------------------------------------------------------------------------------

KILLED_IN = ("all_gather_matmul", "matmul_all_reduce")


@mock.patch.object(nccl_pipeline, "ONE_SHOT_BYTES", 0)
def killed_case(group: Any) -> list[tuple[str, str, float]]:
    """One op after the other loses its last rank; who is left goes on in a group of its own."""
    rank, living = dist.get_rank(group), list(range(dist.get_world_size(group)))
    found = []
    for op in KILLED_IN:
        schedule = NcclPipeline(transport_of(group), 4)
        step(schedule, op)
        victim = living.pop()
        if rank == victim:
            with in_the_middle(lambda: os.kill(os.getpid(), signal.SIGKILL)):
                until_error(schedule, op)
        error, seconds = until_error(schedule, op)
        check_unusable(schedule, op)
        found.append((type(error).__name__, str(error), seconds))
        group = group_of(living)
        dist.barrier(group)  # before another one dies all have heard of this one
    return found


@beside(lambda: fresh_nccl_ranks(3, killed_case, expect_deaths=True, FUSED_TP_TIMEOUT="30"))
def test_a_killed_rank_is_lost_to_all_others_and_they_go_on(outcome: list[Outcome]) -> None:
    assert [one.died for one in outcome] == [False, True, True]
    found = outcome[0].unwrap()
    for (kind, message, seconds), victim, op in zip(found, (2, 1), KILLED_IN, strict=True):
        assert kind == PeerLostError.__name__, message
        assert f"lost rank {victim}" in message and op in message and "rank 0 of" in message
        assert seconds < NOTICE_SECONDS


def own_world(case: Callable[..., Any]) -> list[Any]:
    """What `case(group)` returns on two ranks that are the whole world: in the pool two of four would make groups."""
    return [outcome.unwrap() for outcome in fresh_nccl_ranks(2, case)]


def ended_case(group: Any) -> tuple[str, float]:
    """At the end of a program ranks end one after the other: what they have sent arrives all the same."""
    rank = dist.get_rank(group)
    transport = transport_of(dist.new_group([0, 1]))
    schedule = NcclPipeline(transport, 2)
    step(schedule, "all_gather_matmul")
    arriving = schedule.all_gather(torch.full((2,), float(rank)), gather_dim=0, gather_size=None)
    transport._peer_lost(1 - rank)
    time.sleep(0.1)  # what has been lost changes nothing
    assert arriving.wait().tolist() == [0.0, 0.0, 1.0, 1.0]
    if rank == 1:
        dist.barrier(group)
        return "", 0.0
    error, seconds = until_error(schedule, "all_gather_matmul")
    dist.barrier(group)
    return str(error), seconds


def test_what_a_rank_has_sent_before_it_ended_arrives() -> None:
    (message, seconds), _ = own_world(ended_case)
    assert "lost rank 1: the process has ended" in message and seconds < NOTICE_SECONDS


def behind_case(group: Any) -> list[float]:
    """Rank 0's computation comes to the exchange long after rank 1 has sent its part and ended: it arrives."""
    driver, _ = load_doubles()
    transport = transport_of(dist.new_group([0, 1]))
    own, gathered = torch.full((2, 3), 1.0 + transport.rank), torch.zeros(4, 3)
    stream, word = Stream(), torch.zeros(1, dtype=torch.int64)
    if transport.rank == 0:
        stream.wait_for(word)
    with mock.patch.object(transport, "stream", lambda: stream.handle):
        moving = transport.gather("all_gather", own, gathered, gather_plan((2, 2), transport.rank, 1))
        if transport.rank == 0:
            transport._peer_lost(1)
            time.sleep(1.5)  # longer than it takes to notice that rank 1 is lost
            word.fill_(1)
        moving.wait()
    assert driver.synchronize(0, stream.handle, 10)
    dist.barrier(group)
    return gathered[:, 0].tolist()


def test_what_has_been_sent_arrives_however_late_one_comes_to_it() -> None:
    assert own_world(behind_case) == [[1.0, 1.0, 2.0, 2.0]] * 2


def graph_case(group: Any) -> str:
    """A peer ends while a graph waits for it: no call is made, and the group is known to be broken all the same."""
    driver, _ = load_doubles()
    knobs, transport = cuda_knobs(), transport_of(dist.new_group([0, 1]))
    step(NcclPipeline(transport, 2), "all_gather_matmul")
    stream = Stream()
    own, gathered = torch.ones(2, 3), torch.zeros(4, 3)
    knobs.cuda_double_begin_capture(stream.handle)
    with mock.patch.object(transport, "stream", lambda: stream.handle):
        moving = transport.gather("all_gather", own, gathered, gather_plan((2, 2), transport.rank, 1))
        moving.wait()
    graph = ctypes.c_void_p(knobs.cuda_double_end_capture(stream.handle, transport.communicator.stream))
    if transport.rank == 0:
        knobs.cuda_double_replay(graph, stream.handle)
        transport._peer_lost(1)
        deadline = time.monotonic() + 10
        while transport.broken is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert driver.synchronize(0, stream.handle, 10)
    dist.barrier(group)
    return str(transport.broken or "")


def test_a_loop_that_only_replays_graphs_is_told() -> None:
    first, _ = own_world(graph_case)
    assert "on rank 0 of 2 lost rank 1: the process has ended" in first


# -- stalled -----------------------------------------------------------------------------------------------------------

DEADLINE = 1.5


@mock.patch.object(nccl_pipeline, "ONE_SHOT_BYTES", 0)
def stalled_case(group: Any) -> list[tuple[str, str, float]]:
    """A rank computes for longer than the deadline, in the middle of one op after the other, each in a new group."""
    rank, found = dist.get_rank(group), []
    for op in OPS:
        pipelines = group_of([0, 1, 2])
        schedule = NcclPipeline(transport_of(pipelines), 4)
        step(schedule, op)
        if rank == 1:
            with in_the_middle(lambda op=op: wait_for_those_who_gave_up(op, (0, 2))):
                error, seconds = until_error(schedule, op)
        else:
            error, seconds = until_error(schedule, op)
        give_up(op)
        check_unusable(schedule, op)
        found.append((type(error).__name__, str(error), seconds))
        dist.barrier(group)
        fresh = NcclPipeline(transport_of(group_of([0, 1, 2])), 4)
        assert torch.equal(step(fresh, "matmul_all_reduce"), torch.full((24, 5), 18.0))
    return found


@beside(lambda: fresh_nccl_ranks(3, stalled_case, FUSED_TP_TIMEOUT=str(DEADLINE)))
def test_a_rank_that_stalls_is_a_timeout_that_names_it(outcome: list[Outcome]) -> None:
    for one in outcome:
        for (kind, message, seconds), op in zip(one.unwrap(), OPS, strict=True):
            assert kind == CollectiveTimeoutError.__name__, message
            assert op in message and f"rank {one.rank} of 3" in message and "(FUSED_TP_TIMEOUT)" in message
            if one.rank != 1:
                assert seconds < DEADLINE + NOTICE_SECONDS, message
                assert re.search(
                    r"for ranks? (\d \(last[^)]*\) and )?1( \(last[^)]*\))?.* which had not arrived", message
                )


# -- an op that raises half-way --------------------------------------------------------------------------------------


class OutOfMemory(Exception):
    """Of one rank alone, in its second matmul."""


def raise_out_of_memory() -> None:
    raise OutOfMemory


@mock.patch.object(nccl_pipeline, "ONE_SHOT_BYTES", 0)
def half_way_case(group: Any) -> list[tuple[str, float]]:
    """Rank 0 tries again, which would pair its first chunk with the others' second one, or with those of their next op.

    With one chunk it raises behind its last exchange, of its own rows.
    """
    rank, found = dist.get_rank(group), []
    for op, chunks in (("matmul_reduce_scatter", 4), ("matmul_all_reduce", 4), ("matmul_reduce_scatter", 1)):
        schedule = NcclPipeline(transport_of(group_of([0, 1, 2])), chunks)
        step(schedule, op)
        if rank == 0:
            with in_the_middle(raise_out_of_memory), pytest.raises(OutOfMemory):
                step(schedule, op)
            check_unusable(schedule, op)
            found.append((str(schedule.transport.broken), 0.0))
        else:
            error, seconds = until_error(schedule, op)
            found.append((str(error), seconds))
        check_unusable(schedule, op)
    dist.barrier(group)
    return found


@beside(lambda: fresh_nccl_ranks(3, half_way_case, FUSED_TP_TIMEOUT="30"))
def test_an_op_that_raises_half_way_gives_the_group_up(outcome: list[Outcome]) -> None:
    for rank, one in enumerate(outcome):
        for message, seconds in one.unwrap():
            assert "on rank 0 of 3 raised OutOfMemory half-way" in message
            assert rank == 0 or "rank 0 has given the group up" in message
            assert seconds < NOTICE_SECONDS


def nothing_sent_case(group: Any) -> bool:
    """What raises before the first exchange leaves the ranks in step."""
    schedule = NcclPipeline(transport_of(group), 1)
    step(schedule, "matmul_reduce_scatter")
    product = mock.patch.object(nccl_pipeline, "sum_of_products", side_effect=OutOfMemory)
    if schedule.rank == 0:
        with product, pytest.raises(OutOfMemory):
            step(schedule, "matmul_reduce_scatter")
    return bool(step(schedule, "matmul_reduce_scatter").eq(6.0 * schedule.world_size).all())


def test_an_op_that_raises_before_its_exchanges_does_not() -> None:
    assert nccl_ranks(2, nothing_sent_case) == [True, True]


# -- what reaches ranks of other hosts ---------------------------------------------------------------------------------


@mock.patch.object(nccl, "watchable", lambda processes: {})
def told_case(group: Any) -> tuple[str, str, float]:
    """Rank 0 gives up early, and rank 1 waits for rank 2 still: only the store can tell it."""
    rank = dist.get_rank(group)
    schedule = NcclPipeline(transport_of(group), 4)
    step(schedule, "all_gather_matmul")
    if rank == 0:
        os.environ["FUSED_TP_TIMEOUT"] = "1"
    if rank == 2:
        with in_the_middle(lambda: wait_for_those_who_gave_up("told", (0, 1))):
            error, seconds = until_error(schedule, "matmul_reduce_scatter")
    else:
        error, seconds = until_error(schedule, "matmul_reduce_scatter")
    give_up("told")
    dist.barrier(group)  # the store's answers are wanted until the last has raised
    return type(error).__name__, str(error), seconds


@beside(lambda: fresh_nccl_ranks(3, told_case, FUSED_TP_TIMEOUT="30"))
def test_a_rank_that_gives_up_tells_the_others(outcome: list[Outcome]) -> None:
    first, *others = (one.unwrap() for one in outcome)
    assert first[0] == CollectiveTimeoutError.__name__ and first[2] < 1 + NOTICE_SECONDS
    for kind, message, seconds in others:
        assert kind == CollectiveTimeoutError.__name__, message
        assert "rank 0 has given the group up. It said: matmul_reduce_scatter" in message
        assert seconds < 6 + NOTICE_SECONDS


# -- forks -------------------------------------------------------------------------------------------------------------


def fork_case(group: Any) -> tuple[int, bool]:
    """A child, as data loaders fork them, may not speak for its rank, nor does its end end anything."""
    schedule = NcclPipeline(transport_of(group), 2)
    step(schedule, "matmul_all_reduce")
    child = os.fork()
    if child == 0:
        try:
            step(schedule, "matmul_all_reduce")
        except FusedTPError as error:
            os._exit(7 if f"a fork of rank {schedule.rank}" in str(error) else 8)
        os._exit(9)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    dist.barrier(group)
    return code, bool(step(schedule, "matmul_all_reduce").eq(6.0 * schedule.world_size).all())


def test_a_forked_child_is_refused() -> None:
    assert nccl_ranks(2, fork_case) == [(7, True)] * 2
