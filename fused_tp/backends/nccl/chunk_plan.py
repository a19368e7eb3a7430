"""Plans of pipelined exchanges: the rows that each rank sends and receives in each exchange. They depend only on
values that all ranks know, so that the plans of any two ranks match: in exchange i one receives what the other sends.

Rows are those of a tensor in rank-major order, `counts[r]` of them on rank r; some ranks may have none. In every
exchange rank r sends to ranks r + d and receives from ranks r - d, for distances d that are the same on all ranks. So
no two ranks send to the same one at a time, as they would if all began with rank 0's rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from fused_tp.core.partition import shard_range


class RowPart(NamedTuple):
    """`rows` rows from `start` on, of the rows exchanged with rank `peer`."""

    peer: int
    start: int
    rows: int


class ChunkExchange(NamedTuple):
    """Transfers that run at the same time. Parts without rows are left out on both sides."""

    sends: tuple[RowPart, ...]
    receives: tuple[RowPart, ...]


class ChunkPlan(NamedTuple):
    """A rank's exchanges. Each rank's rows are split into `pieces`: piece i of a scatter's own rows is complete after
    `len(exchanges) / pieces * (i + 1)` exchanges."""

    counts: tuple[int, ...]  # rows of every rank
    exchanges: tuple[ChunkExchange, ...]
    ranges: tuple[tuple[tuple[int, int], ...], ...]  # (start, stop) of rows that a gather receives or a scatter sends
    pieces: int


@lru_cache(maxsize=1024)
def gather_plan(counts: tuple[int, ...], rank: int, chunks: int) -> ChunkPlan:
    """Gather the rows of all ranks in up to `chunks` exchanges: those of rank - 1 first, then those of rank - 2, ...

    Sends start in the own rows, receives start in the rows of all ranks.
    """
    (pieces, groups), rows, found = _cut(counts, chunks), _rows(counts), []
    for group, piece in itertools.product(groups, range(pieces)):
        sends = [((rank + d) % len(counts), 0, counts[rank]) for d in group]
        receives = [rows[(rank - d) % len(counts)] for d in group]
        found.append(ChunkExchange(_pieces(sends, piece, pieces), _pieces(receives, piece, pieces)))
    return ChunkPlan(counts, tuple(found), tuple(_joined(exchange.receives) for exchange in found), pieces)


@lru_cache(maxsize=1024)
def scatter_plan(counts: tuple[int, ...], rank: int, chunks: int) -> ChunkPlan:
    """Scatter terms of all ranks' rows in up to `chunks` exchanges: the farthest owner's first; the own ones stay.

    It works piece by piece, so that all terms of the own rows' first piece arrive early. Sends start in the rows of all
    ranks, receives start in the own rows: rank `peer`'s terms of them.
    """
    (pieces, groups), rows, found = _cut(counts, chunks), _rows(counts), []
    for piece, group in itertools.product(range(pieces), reversed(groups)):
        sends = [rows[(rank + d) % len(counts)] for d in reversed(group)]
        receives = [((rank - d) % len(counts), 0, counts[rank]) for d in reversed(group)]
        found.append(ChunkExchange(_pieces(sends, piece, pieces), _pieces(receives, piece, pieces)))
    return ChunkPlan(counts, tuple(found), tuple(_joined(exchange.sends) for exchange in found), pieces)


def _cut(counts: Sequence[int], chunks: int) -> tuple[int, list[range]]:
    """(pieces of each rank's rows, distances of each group): one exchange moves one piece of the rows of a group."""
    distances = len(counts) - 1
    if distances == 0:
        return 1, []
    length = -(-distances // chunks)  # 5 distances in up to 4 groups are 2 + 2 + 1: 3 groups
    groups = [range(d, min(d + length, distances + 1)) for d in range(1, distances + 1, length)]
    return max(1, min(chunks // distances, max(counts))), groups


def _rows(counts: Sequence[int]) -> list[RowPart]:
    """The range of each rank's rows within the rows of all ranks."""
    bounds = itertools.pairwise(itertools.accumulate(counts, initial=0))
    return [RowPart(rank, start, stop - start) for rank, (start, stop) in enumerate(bounds)]


def _pieces(parts: Iterable[tuple[int, int, int]], piece: int, pieces: int) -> tuple[RowPart, ...]:
    """Piece number `piece` of each (peer, start, rows), if it has rows."""
    dim_shards = ((peer, start, shard_range(rows, pieces, piece)) for peer, start, rows in parts)
    return tuple(RowPart(peer, start + begin, end - begin) for peer, start, (begin, end) in dim_shards if end > begin)


def _joined(parts: Sequence[RowPart]) -> tuple[tuple[int, int], ...]:
    """(start, stop) of the rows. Adjacent parts are merged into one range, for one matmul."""
    found: list[tuple[int, int]] = []
    for part in sorted(parts, key=lambda part: part.start):
        if found and found[-1][1] == part.start:
            found[-1] = found[-1][0], part.start + part.rows
        else:
            found.append((part.start, part.start + part.rows))
    return tuple(found)
