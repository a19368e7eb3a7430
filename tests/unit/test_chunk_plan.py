"""Which rows move in which exchange: the plans of all ranks together, for every way to cut them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from fused_tp.transport.chunk_plan import Plan, gather_plan, scatter_plan

Make = Callable[[tuple[int, ...], int, int], Plan]
COUNTS = [
    *([n] * w for w in (1, 2, 3, 4, 5, 8) for n in (0, 1, 2, 7)),
    [3, 3, 1],
    [3, 3, 1, 0],
    [1, 0],
    [0, 0, 5],
    [2, 0, 7, 0, 1],
    [5, 5, 5, 5, 5, 5, 5, 2],
]


def offsets(counts: list[int]) -> list[int]:
    return [0, *itertools.accumulate(counts)][:-1]


def plans(make: Make, counts: list[int], chunks: int) -> list[Plan]:
    return [make(tuple(counts), rank, chunks) for rank in range(len(counts))]


def check_gather(counts: list[int], chunks: int) -> None:
    """Every row comes once, from its owner."""
    made = plans(gather_plan, counts, chunks)
    for rank, plan in enumerate(made):
        have = set(range(offsets(counts)[rank], offsets(counts)[rank] + counts[rank]))
        for i in range(len(plan.exchanges)):
            for peer, start, rows in plan.exchanges[i].receives:
                # What it gets is what the peer sends it in its exchange of the same number.
                sent = [(at, n) for to, at, n in made[peer].exchanges[i].sends if to == rank]
                assert sent == [(start - offsets(counts)[peer], rows)]
                new = set(range(start, start + rows))
                assert rows > 0 and not new & have
                have |= new
        assert have == set(range(sum(counts)))


def check_scatter(counts: list[int], chunks: int) -> None:
    """Every term comes to its owner once."""
    made = plans(scatter_plan, counts, chunks)
    for rank, plan in enumerate(made):
        have: set[tuple[int, int]] = {(rank, row) for row in range(counts[rank])}
        complete = 0
        for i in range(len(plan.exchanges)):
            for peer, start, rows in plan.exchanges[i].receives:
                sent = [(at, n) for to, at, n in made[peer].exchanges[i].sends if to == rank]
                assert sent == [(offsets(counts)[rank] + start, rows)]
                new = {(peer, row) for row in range(start, start + rows)}
                assert rows > 0 and not new & have
                have |= new
            if (i + 1) % (len(plan.exchanges) // plan.pieces) == 0:  # one more piece of the own rows is complete
                complete += 1
                length = -(-counts[rank] // plan.pieces)
                wanted = range(min(complete * length, counts[rank]))
                assert all((peer, row) in have for peer in range(len(counts)) for row in wanted)
        assert have == set(itertools.product(range(len(counts)), range(counts[rank])))


def check_targets(make: Make, counts: list[int], chunks: int) -> None:
    """No two ranks send to the same one at a time."""
    made = plans(make, counts, chunks)
    world = len(counts)
    assert len({len(plan.exchanges) for plan in made}) == 1 and len({plan.pieces for plan in made}) == 1
    assert len(made[0].exchanges) <= max(chunks, 1) and (len(made[0].exchanges) >= 1 or world == 1)
    for i in range(len(made[0].exchanges)):
        assert all(
            peer != rank
            for rank, plan in enumerate(made)
            for peer, _, _ in plan.exchanges[i].sends + plan.exchanges[i].receives
        )
        if len(made[0].exchanges) < world - 1:
            continue  # several distances at once
        targets = [peer for plan in made for peer, _, _ in plan.exchanges[i].sends]
        assert len(set(targets)) == len(targets)


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 5, 7, 16, 100])
def test_plans_of_all_ranks_match(chunks: int) -> None:
    for counts in COUNTS:
        check_gather(counts, chunks)
        check_scatter(counts, chunks)
        for make in (gather_plan, scatter_plan):
            check_targets(make, counts, chunks)


def test_the_order_of_ranks() -> None:
    gather, scatter = gather_plan((2,) * 4, 1, 3), scatter_plan((2,) * 4, 1, 3)
    assert [gather.exchanges[i].receives[0][0] for i in range(3)] == [0, 3, 2]  # rank - 1 first
    assert [scatter.exchanges[i].sends[0][0] for i in range(3)] == [0, 3, 2]  # the farthest owner, rank + 3, first


def test_more_chunks_than_peers_cut_the_rows() -> None:
    plan = gather_plan((5, 5, 5), 0, 5)
    assert (len(plan.exchanges), plan.pieces) == (4, 2)
    assert plan.ranges == (((10, 13),), ((13, 15),), ((5, 8),), ((8, 10),))


def test_rows_side_by_side_are_one_range() -> None:
    plan = gather_plan((3,) * 5, 1, 1)
    assert plan.ranges[0] == ((0, 3), (6, 15))
    plan = scatter_plan((3, 3, 3, 0), 3, 1)
    assert plan.ranges[0] == ((0, 9),)
