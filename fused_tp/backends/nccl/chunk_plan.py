"""Plans of pipelined exchanges: the rows that a rank sends and receives in each exchange.

Plans depend only on values that are equal on all ranks. So the plans of two ranks match: in exchange i, one rank
receives exactly the rows that the other sends.

Tensors are in rank-major order, with `counts[r]` rows of rank r, which may be 0. In every exchange, rank r sends to
ranks r + d and receives from ranks r - d, for distances d that are the same on all ranks. So no two ranks send to the
same rank at a time, as they would if all started with rank 0's rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from fused_tp.core.partition import shard_range


class RowRange(NamedTuple):
    """Range of `num_rows` rows, starting at row `start`, that is exchanged with rank `peer`."""

    peer: int
    start: int
    num_rows: int


class ChunkExchange(NamedTuple):
    """Transfers that run at the same time. Transfers without rows are omitted on both sides."""

    sends: tuple[RowRange, ...]
    receives: tuple[RowRange, ...]


class ChunkPlan(NamedTuple):
    """Exchanges of one rank. Each rank's rows are split into `chunks_per_rank` chunks.

    In a scatter, all terms of chunk i of this rank's rows have arrived after the first
    `len(exchanges) / chunks_per_rank * (i + 1)` exchanges.
    """

    counts: tuple[int, ...]  # rows of every rank
    exchanges: tuple[ChunkExchange, ...]
    # For each exchange, (start, stop) of the rows that a gather receives or a scatter sends.
    row_ranges: tuple[tuple[tuple[int, int], ...], ...]
    chunks_per_rank: int


@lru_cache(maxsize=1024)
def gather_plan(counts: tuple[int, ...], rank: int, num_chunks: int) -> ChunkPlan:
    """Return the plan to gather all ranks' rows in up to `num_chunks` exchanges, from rank - 1, then rank - 2, ...

    `start` of a send is a row of this rank's tensor; `start` of a receive is a row of the gathered tensor.
    """
    (chunks_per_rank, groups), row_ranges, exchanges = _chunks_and_groups(counts, num_chunks), _row_ranges(counts), []
    for group, chunk in itertools.product(groups, range(chunks_per_rank)):
        sends = [RowRange((rank + distance) % len(counts), 0, counts[rank]) for distance in group]
        receives = [row_ranges[(rank - distance) % len(counts)] for distance in group]
        exchanges.append(
            ChunkExchange(_select_chunk(sends, chunk, chunks_per_rank), _select_chunk(receives, chunk, chunks_per_rank))
        )
    return ChunkPlan(
        counts, tuple(exchanges), tuple(_merged_ranges(exchange.receives) for exchange in exchanges), chunks_per_rank
    )


@lru_cache(maxsize=1024)
def scatter_plan(counts: tuple[int, ...], rank: int, num_chunks: int) -> ChunkPlan:
    """Return the plan to send terms of all rows to their owners, farthest first, in up to `num_chunks` exchanges.

    The first chunk of all ranks' rows is exchanged first, so that its sums can start early. `start` of a send is a row
    of the full tensor; `start` of a receive is a row among this rank's own rows, for which rank `peer` sends its terms.
    """
    (chunks_per_rank, groups), row_ranges, exchanges = _chunks_and_groups(counts, num_chunks), _row_ranges(counts), []
    for chunk, group in itertools.product(range(chunks_per_rank), reversed(groups)):
        sends = [row_ranges[(rank + distance) % len(counts)] for distance in reversed(group)]
        receives = [RowRange((rank - distance) % len(counts), 0, counts[rank]) for distance in reversed(group)]
        exchanges.append(
            ChunkExchange(_select_chunk(sends, chunk, chunks_per_rank), _select_chunk(receives, chunk, chunks_per_rank))
        )
    return ChunkPlan(
        counts, tuple(exchanges), tuple(_merged_ranges(exchange.sends) for exchange in exchanges), chunks_per_rank
    )


def _chunks_and_groups(counts: Sequence[int], num_chunks: int) -> tuple[int, list[range]]:
    """Return (chunks per rank, groups of distances); one exchange moves one chunk of the ranks of one group."""
    num_distances = len(counts) - 1
    if num_distances == 0:
        return 1, []
    group_size = -(-num_distances // num_chunks)  # e.g. 5 distances and 4 chunks: 3 groups, of 2, 2 and 1
    groups = [range(d, min(d + group_size, num_distances + 1)) for d in range(1, num_distances + 1, group_size)]
    return max(1, min(num_chunks // num_distances, max(counts))), groups


def _row_ranges(counts: Sequence[int]) -> list[RowRange]:
    """Return the range of each rank's rows in the full tensor."""
    bounds = itertools.pairwise(itertools.accumulate(counts, initial=0))
    return [RowRange(rank, start, stop - start) for rank, (start, stop) in enumerate(bounds)]


def _select_chunk(row_ranges: Iterable[RowRange], chunk_index: int, num_chunks: int) -> tuple[RowRange, ...]:
    """Return chunk `chunk_index` of each range; empty chunks are omitted."""
    chunk_ranges = (
        (peer, start, shard_range(num_rows, num_chunks, chunk_index)) for peer, start, num_rows in row_ranges
    )
    return tuple(
        RowRange(peer, start + begin, end - begin) for peer, start, (begin, end) in chunk_ranges if end > begin
    )


def _merged_ranges(row_ranges: Sequence[RowRange]) -> tuple[tuple[int, int], ...]:
    """Return the (start, stop) of `row_ranges`. Adjacent ranges are merged, so that one matmul computes them."""
    merged: list[tuple[int, int]] = []
    for next_range in sorted(row_ranges, key=lambda next_range: next_range.start):
        if merged and merged[-1][1] == next_range.start:
            merged[-1] = merged[-1][0], next_range.start + next_range.num_rows
        else:
            merged.append((next_range.start, next_range.start + next_range.num_rows))
    return tuple(merged)
