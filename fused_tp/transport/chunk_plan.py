"""Which rows of which rank move in which exchange of a pipeline. Plain arithmetic on what all ranks know, so that the
plans of any two ranks match: what one sends in exchange i the other receives in its exchange i.

Rows are those of a tensor in rank-major order, `counts[r]` of them with rank r; some ranks may have none. In every
exchange rank r sends to ranks r + d and receives from ranks r - d, for distances d that are the same on all ranks: no
two ranks send to the same one at a time, as they would if all began with rank 0's rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from fused_tp.runtime.partition import shard_range


class Part(NamedTuple):
    """`rows` rows from `start` on, of those that rank `peer` sends or gets."""

    peer: int
    start: int
    rows: int


class Exchange(NamedTuple):
    """What moves at the same time. Parts without rows are left out, on both of their ends."""

    sends: tuple[Part, ...]
    receives: tuple[Part, ...]


class Plan(NamedTuple):
    """Each rank's rows are cut into `pieces`: piece i of a scatter's own rows is complete after
    `len(exchanges) / pieces * (i + 1)` exchanges."""

    counts: tuple[int, ...]  # rows of every rank
    exchanges: tuple[Exchange, ...]
    ranges: tuple[tuple[tuple[int, int], ...], ...]  # start and stop of what arrives, or is sent, in each exchange
    pieces: int


@lru_cache(maxsize=1024)
def gather_plan(counts: tuple[int, ...], rank: int, chunks: int) -> Plan:
    """Rows of all ranks in up to `chunks` exchanges: those of rank - 1 first, then those of rank - 2, ...

    Sends start in the own rows, receives in the rows of all ranks.
    """
    (pieces, groups), rows, found = _cut(counts, chunks), _rows(counts), []
    for group, piece in itertools.product(groups, range(pieces)):
        sends = [((rank + d) % len(counts), 0, counts[rank]) for d in group]
        receives = [rows[(rank - d) % len(counts)] for d in group]
        found.append(Exchange(_pieces(sends, piece, pieces), _pieces(receives, piece, pieces)))
    return Plan(counts, tuple(found), tuple(_joined(exchange.receives) for exchange in found), pieces)


@lru_cache(maxsize=1024)
def scatter_plan(counts: tuple[int, ...], rank: int, chunks: int) -> Plan:
    """Terms of all ranks' rows in up to `chunks` exchanges: those of the farthest owner first, the own ones stay.

    Piece after piece, so that the terms of the own rows' first piece are together early. Sends start in the rows of all
    ranks, receives in the own rows: the term of rank `peer` for them.
    """
    (pieces, groups), rows, found = _cut(counts, chunks), _rows(counts), []
    for piece, group in itertools.product(range(pieces), reversed(groups)):
        sends = [rows[(rank + d) % len(counts)] for d in reversed(group)]
        receives = [((rank - d) % len(counts), 0, counts[rank]) for d in reversed(group)]
        found.append(Exchange(_pieces(sends, piece, pieces), _pieces(receives, piece, pieces)))
    return Plan(counts, tuple(found), tuple(_joined(exchange.sends) for exchange in found), pieces)


def _cut(counts: Sequence[int], chunks: int) -> tuple[int, list[range]]:
    """(pieces of each rank's rows, distances of each group): an exchange is a piece of the rows of a group."""
    distances = len(counts) - 1
    if distances == 0:
        return 1, []
    length = -(-distances // chunks)  # 5 distances in up to 4 groups are 2 + 2 + 1: 3 groups
    groups = [range(d, min(d + length, distances + 1)) for d in range(1, distances + 1, length)]
    return max(1, min(chunks // distances, max(counts))), groups


def _rows(counts: Sequence[int]) -> list[Part]:
    """Those of each rank among the rows of all."""
    bounds = itertools.pairwise(itertools.accumulate(counts, initial=0))
    return [Part(rank, start, stop - start) for rank, (start, stop) in enumerate(bounds)]


def _pieces(parts: Iterable[tuple[int, int, int]], piece: int, pieces: int) -> tuple[Part, ...]:
    """Piece number `piece` of each (peer, start, rows), where it has rows."""
    cut = ((peer, start, shard_range(rows, pieces, piece)) for peer, start, rows in parts)
    return tuple(Part(peer, start + begin, end - begin) for peer, start, (begin, end) in cut if end > begin)


def _joined(parts: Sequence[Part]) -> tuple[tuple[int, int], ...]:
    """(start, stop) of the rows; those without gaps between them are one range, which one matmul can take."""
    found: list[tuple[int, int]] = []
    for part in sorted(parts, key=lambda part: part.start):
        if found and found[-1][1] == part.start:
            found[-1] = found[-1][0], part.start + part.rows
        else:
            found.append((part.start, part.start + part.rows))
    return tuple(found)
