"""Pipelines over NCCL: every op and gradient, equal bits, overlap; real ranks with test doubles of the libraries."""

from __future__ import annotations

import ctypes
import time
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fused_tp.backends.nccl.chunk_plan import gather_plan, scatter_plan
from fused_tp.backends.nccl.nccl import NcclDist, nccl_dist
from fused_tp.backends.nccl.nccl_pipeline import NcclPipeline
from fused_tp.core.group import resolve_group
from tests.distributed.schedule_cases import CPU, ranks_on, step
from tests.faults import NOTICE_SECONDS, failure_of
from tests.native.doubles.libraries import Stream, double_knobs, load_doubles
from tests.reference import seeded
from tests.workers import fresh_ranks, on_ranks

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_spec("fused_tp._core") is None, reason="needs the native core: pip install -e ."),
]


# -- exchanges ---------------------------------------------------------------------------------------------------------

nccl_ranks = partial(ranks_on, "nccl_pipeline")


def transport_of(group: Any) -> NcclDist:
    found = nccl_dist(resolve_group(group), CPU)
    assert isinstance(found, NcclDist), found
    return found


def test_chunks_suit_the_size() -> None:
    transport = mock.Mock(rank=0, world_size=2)
    assert [NcclPipeline(transport)._num_chunks(n << 20) for n in (0, 1, 4, 9, 1000)] == [1, 1, 1, 2, 8]
    assert NcclPipeline(transport, 3)._num_chunks(1 << 30) == 3
    with pytest.raises(ValueError, match=r"num_chunks must be at least 1, or None .*, got 0\."):
        NcclPipeline(transport, 0)


def movements_case(transport: Any) -> None:
    """Further operations of the transport: shift, all_to_all with different sizes, the maximum."""
    world_size, rank = transport.world_size, transport.rank
    blocks = [[seeded((3 * s + 2 * d) % 5, 3, seed=10 * s + d) for d in range(world_size)] for s in range(world_size)]
    sizes = [[len(block) for block in row] for row in blocks]
    moved = transport.all_to_all(
        "all_to_all", torch.cat(blocks[rank]), sizes[rank], [sizes[s][rank] for s in range(world_size)]
    )
    assert torch.equal(moved.wait(), torch.cat([blocks[s][rank] for s in range(world_size)]))
    for distance in range(1, world_size):
        out = torch.empty(rank, 2)
        source = (rank - distance) % world_size
        target = (rank + distance) % world_size
        arriving = transport.shift("shift", torch.full((target, 2), float(rank)), out, distance)
        assert torch.equal(arriving.wait(), torch.full((rank, 2), float(source)))


@on_ranks(2, 3, 4, run=nccl_ranks)
def test_movements(group: Any) -> None:
    movements_case(transport_of(group))


@on_ranks(2, 4, run=nccl_ranks)
def test_pipelines_can_be_captured(group: Any) -> None:
    """Emulate a CUDA graph: a replay transfers the current contents of the buffers."""
    transport, (driver, _), knobs = transport_of(group), load_doubles(), double_knobs()
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    counts, columns = (3, 2, 0, 4)[:world_size], 5
    own, gathered = torch.zeros(counts[rank], columns), torch.zeros(sum(counts), columns)
    partial, terms = torch.zeros(sum(counts), columns), torch.zeros(world_size, counts[rank], columns)
    stream = Stream()
    knobs.cuda_double_begin_capture(stream.handle)
    with mock.patch.object(transport, "stream", lambda: stream.handle):
        gather = transport.gather("all_gather", own, gathered, gather_plan(counts, rank, 4))
        gather.wait()
        plan = scatter_plan(counts, rank, 4)
        scatter = transport.scatter("reduce_scatter", partial, terms, plan)
        for i in range(len(plan.exchanges)):
            scatter.send()
            scatter.wait(i)
    graph = knobs.cuda_double_end_capture(stream.handle)
    assert gathered.abs().max() == 0
    for replay in range(1, 4):
        own.fill_(10.0 * replay + rank)
        partial.fill_(100.0 * replay + rank)
        knobs.cuda_double_replay(graph, stream.handle)
        assert driver.synchronize(transport.communicator.device, stream.handle, 10)
        for peer in range(world_size):
            rows = gathered[sum(counts[:peer]) :][: counts[peer]]
            assert peer == rank or torch.equal(rows, torch.full_like(rows, 10.0 * replay + peer))
            assert peer == rank or torch.equal(terms[peer], torch.full_like(terms[peer], 100.0 * replay + peer))
    knobs.cuda_double_free_graph(graph)
    torch.testing.assert_close(NcclPipeline(transport).all_reduce(torch.ones(3)), torch.full((3,), float(world_size)))


# -- a peer that ends --------------------------------------------------------------------------------------------------


def sent_before_it_ended(group: Any) -> tuple[str, float]:
    """Ranks exit one after the other at the end of a program: messages that they have sent must still arrive."""
    rank = dist.get_rank(group)
    transport = transport_of(dist.new_group([0, 1]))
    schedule = NcclPipeline(transport, 2)
    step(schedule, "all_gather_matmul")
    arriving = schedule.all_gather(torch.full((2,), float(rank)), gather_dim=0, gather_size=None)
    transport._on_peer_lost(1 - rank)
    time.sleep(0.1)  # the loss must not affect this exchange
    assert arriving.wait().tolist() == [0.0, 0.0, 1.0, 1.0]
    if rank == 1:
        dist.barrier(group)
        return "", 0.0
    failure = failure_of(lambda lost: step(schedule, "all_gather_matmul"))
    dist.barrier(group)
    return failure.message, failure.seconds


def sent_long_before(group: Any) -> list[float]:
    """Rank 0's stream reaches the exchange long after rank 1 has sent its shard and exited: the shard must arrive."""
    driver, _ = load_doubles()
    transport = transport_of(dist.new_group([0, 1]))
    own, gathered = torch.full((2, 3), 1.0 + transport.rank), torch.zeros(4, 3)
    stream, word = Stream(), torch.zeros(1, dtype=torch.int64)
    if transport.rank == 0:
        stream.wait_for(word)
    with mock.patch.object(transport, "stream", lambda: stream.handle):
        moving = transport.gather("all_gather", own, gathered, gather_plan((2, 2), transport.rank, 1))
        if transport.rank == 0:
            transport._on_peer_lost(1)
            time.sleep(1.5)  # longer than it takes to notice that rank 1 is lost
            word.fill_(1)
        moving.wait()
    assert driver.synchronize(0, stream.handle, 10)
    dist.barrier(group)
    return gathered[:, 0].tolist()


def lost_in_a_graph(group: Any) -> str:
    """A peer exits while a graph waits for it: the group is marked as broken without a further call."""
    driver, _ = load_doubles()
    knobs, transport = double_knobs(), transport_of(dist.new_group([0, 1]))
    step(NcclPipeline(transport, 2), "all_gather_matmul")
    stream = Stream()
    own, gathered = torch.ones(2, 3), torch.zeros(4, 3)
    knobs.cuda_double_begin_capture(stream.handle)
    with mock.patch.object(transport, "stream", lambda: stream.handle):
        moving = transport.gather("all_gather", own, gathered, gather_plan((2, 2), transport.rank, 1))
        moving.wait()
    graph = ctypes.c_void_p(knobs.cuda_double_end_capture(stream.handle))
    if transport.rank == 0:
        knobs.cuda_double_replay(graph, stream.handle)
        transport._on_peer_lost(1)
        deadline = time.monotonic() + 10
        while transport.fatal_error is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert driver.synchronize(0, stream.handle, 10)
    dist.barrier(group)
    return str(transport.fatal_error or "")


def peers_that_end(group: Any) -> tuple[Any, ...]:
    return sent_before_it_ended(group), sent_long_before(group), lost_in_a_graph(group)


def test_peer_that_ends_is_lost_and_what_it_has_sent_arrives() -> None:
    # A world of two, as in the pool only two of four ranks would create groups.
    first, second = (outcome.unwrap() for outcome in nccl_ranks(2, peers_that_end, run=fresh_ranks))
    message, seconds = first[0]
    assert "lost rank 1: its process has exited" in message and seconds < NOTICE_SECONDS
    assert first[1] == second[1] == [1.0, 1.0, 2.0, 2.0]
    assert "on rank 0 of 2 lost rank 1: its process has exited" in first[2]
