"""Plans of the rows that each exchange moves: all ranks together, for every way to divide the rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from fused_tp.backends.nccl.chunk_plan import ChunkPlan, gather_plan, scatter_plan

Make = Callable[[tuple[int, ...], int, int], ChunkPlan]
COUNTS = [
    *([n] * w for w in (1, 2, 3, 4, 5, 8) for n in (0, 1, 2, 7)),
    [3, 3, 1],
    [3, 3, 1, 0],
    [1, 0],
    [0, 0, 5],
    [2, 0, 7, 0, 1],
    [5, 5, 5, 5, 5, 5, 5, 2],
]


def check(make: Make, counts: list[int], chunks: int) -> None:
    """Check that a gather receives every row once, from its owner, and a scatter every term once, at its owner.

    No two ranks send to the same rank at a time.
    """
    world, gathers, offsets = len(counts), make is gather_plan, [0, *itertools.accumulate(counts)]
    made = [make(tuple(counts), rank, chunks) for rank in range(world)]
    exchanges, pieces = len(made[0].exchanges), made[0].chunks_per_rank
    assert all(len(plan.exchanges) == exchanges and plan.chunks_per_rank == pieces for plan in made)
    assert exchanges <= max(chunks, 1) and (exchanges >= 1 or world == 1)
    for rank, plan in enumerate(made):
        have = {(rank, row) for row in range(counts[rank])}
        for i, exchange in enumerate(plan.exchanges):
            for peer, start, rows in exchange.receives:
                # The peer sends these rows in its exchange of the same number. A gather receives into whole tensors,
                # and a scatter sends from them.
                first = start - offsets[peer] if gathers else start
                sent = [(at, n) for to, at, n in made[peer].exchanges[i].sends if to == rank]
                assert sent == [(first if gathers else offsets[rank] + first, rows)]
                new = {(peer, row) for row in range(first, first + rows)}
                assert peer != rank and rows > 0 and not new & have
                have |= new
            if not gathers and (i + 1) % (exchanges // pieces) == 0:  # one more piece of the own rows is complete
                complete = min((i + 1) // (exchanges // pieces) * -(-counts[rank] // pieces), counts[rank])
                assert have >= set(itertools.product(range(world), range(complete)))
        assert have == {(peer, row) for peer in range(world) for row in range(counts[peer if gathers else rank])}
    for i in range(exchanges):
        targets = [peer for plan in made for peer, _, _ in plan.exchanges[i].sends]
        assert len(targets) == sum(len(plan.exchanges[i].receives) for plan in made)  # all of them are received
        assert len(set(targets)) == len(targets) or exchanges < world - 1  # else one exchange has several distances


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 5, 7, 16, 100])
def test_plans_of_all_ranks_match(chunks: int) -> None:
    for make, counts in itertools.product((gather_plan, scatter_plan), COUNTS):
        check(make, counts, chunks)


def test_the_order_of_ranks() -> None:
    gather, scatter = gather_plan((2,) * 4, 1, 3), scatter_plan((2,) * 4, 1, 3)
    assert [gather.exchanges[i].receives[0][0] for i in range(3)] == [0, 3, 2]  # rank - 1 first
    assert [scatter.exchanges[i].sends[0][0] for i in range(3)] == [0, 3, 2]  # the farthest owner, rank + 3, first


def test_more_chunks_than_peers_cut_the_rows() -> None:
    plan = gather_plan((5, 5, 5), 0, 5)
    assert (len(plan.exchanges), plan.chunks_per_rank) == (4, 2)
    assert plan.row_ranges == (((10, 13),), ((13, 15),), ((5, 8),), ((8, 10),))


def test_rows_side_by_side_are_one_range() -> None:
    plan = gather_plan((3,) * 5, 1, 1)
    assert plan.row_ranges[0] == ((0, 3), (6, 15))
    plan = scatter_plan((3, 3, 3, 0), 3, 1)
    assert plan.row_ranges[0] == ((0, 9),)
