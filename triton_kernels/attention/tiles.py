"""Tiles of attention: the rows of each tile, and the blocks of the other side that it has to visit.

Query i sees the keys [starts[i], stops[i]); the queries [query_starts[j], query_stops[j]) see key j. All four never
decrease. So a tile of rows sees nothing outside the interval from its lowest start to its highest stop, those of its
first and its last row, and all of its rows see the interval from its highest start to its lowest stop. Blocks inside
the latter need no mask, blocks outside the former are not visited. These bounds are computed here, on the host and for
all tiles at once, so that a kernel has loops with bounds and no branches.

A tile ends early where its rows do not belong together: at a break of the layout (a rank's second zigzag chunk), where
a long document begins, and where two neighbouring rows both do not see the keys between them. Thus a tile never loads
keys that none of its rows sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

COLUMNS = 6  # columns of a tile: row, end of rows, begin, end, begin and end of the blocks without a mask


class StepMask(Protocol):
    """Mask of `rows` queries over `keys` keys, such as those of one step of a ring.

    `starts`, `stops` and `queries_per_key` (query_starts, query_stops) are int32 arrays; the breaks are rows before
    which tokens of the whole sequence are missing. `index_tensors_on` returns int32 tensors on a device by name:
    starts, stops, query_starts, query_stops, q_positions, q_indices and k_indices; the tiles are cached in that dict.
    """

    rows: int
    keys: int
    q_breaks: tuple[int, ...]
    k_breaks: tuple[int, ...]
    starts: Any
    stops: Any
    queries_per_key: tuple[Any, Any]

    def index_tensors_on(self, device: torch.device) -> dict[str, Tensor]: ...


def query_tiles(step: StepMask, rows: int, block_size: int, device: torch.device) -> Tensor:
    """Return the tiles of `rows` queries against blocks of `block_size` keys: int32 [tiles, COLUMNS], computed once."""
    name = f"query tiles {rows}x{block_size}"
    return _cached_tiles(step, name, device, step.starts, step.stops, step.q_breaks, rows, block_size)


def key_tiles(step: StepMask, rows: int, block_size: int, device: torch.device) -> Tensor:
    """Return the tiles of `rows` keys against blocks of `block_size` queries, as `query_tiles`."""
    name = f"key tiles {rows}x{block_size}"
    return _cached_tiles(step, name, device, *step.queries_per_key, step.k_breaks, rows, block_size)


def _cached_tiles(step: StepMask, name: str, device: torch.device, *arguments: Any) -> Tensor:
    vectors = step.index_tensors_on(device)
    if name not in vectors:
        vectors[name] = torch.from_numpy(tiles_of(*arguments)).to(device)
    return vectors[name]


def tiles_of(starts: Any, stops: Any, breaks: Sequence[int], rows: int, block_size: int) -> Any:
    """Return int32 [tiles, COLUMNS], tiles with most work first: (row, end of rows, begin, end, full begin, full end).

    Blocks begin at begin, begin + block_size, ...; all rows of the tile see all blocks in [full begin, full end).

    >>> tiles_of(np.zeros(4, int), np.arange(1, 5), (), 2, 2).tolist()  # causal
    [[2, 4, 0, 4, 0, 2], [0, 2, 0, 2, 0, 0]]
    """
    first_rows, end_rows = _rows_of_tiles(starts, stops, breaks, rows)
    begin, end = starts[first_rows].astype(np.int64), stops[end_rows - 1].astype(np.int64)
    end = np.maximum(begin, end)
    full_begin, full_end = _whole_blocks(begin, end, starts[end_rows - 1], stops[first_rows], block_size)
    table = np.stack((first_rows, end_rows, begin, end, full_begin, full_end), 1)
    return np.ascontiguousarray(table[np.argsort(begin - end, kind="stable")].astype(np.int32))


def tiles_of_chunks(
    visible_intervals: tuple[Any, Any], breaks: Sequence[int], starts: Any, stops: Any, rows: int, block_size: int
) -> tuple[Any, Any]:
    """Return `tiles_of` for keys in chunks: int32 tiles [tiles, 2], bounds [tiles, chunks, 4]; most work first.

    A tile is (row, end of rows), its bounds are (begin, end, full begin, full end) in each chunk.

    Args:
        visible_intervals: starts and stops [queries] over all keys, which determine the rows of the tiles.
        starts, stops: [chunks, queries], in each chunk; a query sees no key of a chunk if stop <= start.

    >>> starts, stops = np.zeros((2, 4), int), np.array([[1, 2, 3, 4], [0, 0, 2, 2]])
    >>> tiles, bounds = tiles_of_chunks((starts[0], stops[0]), (), starts, stops, 2, 2)
    >>> tiles.tolist(), bounds.tolist()
    ([[2, 4], [0, 2]], [[[0, 4, 0, 2], [0, 2, 0, 2]], [[0, 2, 0, 0], [0, 0, 0, 0]]])
    """
    first_rows, end_rows = _rows_of_tiles(*visible_intervals, breaks, rows)
    sees_nothing = stops <= starts
    int32_max = np.iinfo(np.int32).max
    low, high = np.where(sees_nothing, int32_max, starts), np.where(sees_nothing, 0, stops)
    begin, end = np.minimum.reduceat(low, first_rows, 1), np.maximum.reduceat(high, first_rows, 1)
    full_begin, full_end = np.maximum.reduceat(low, first_rows, 1), np.minimum.reduceat(high, first_rows, 1)
    begin = np.minimum(begin, end)
    full_begin, full_end = _whole_blocks(begin, end, full_begin.astype(np.int64), full_end, block_size)
    order = np.argsort((begin - end).sum(0), kind="stable")
    bounds = np.stack((begin, end, full_begin, full_end), -1).transpose(1, 0, 2)[order]
    tiles = np.stack((first_rows, end_rows), 1)[order]
    return np.ascontiguousarray(tiles.astype(np.int32)), np.ascontiguousarray(bounds.astype(np.int32))


def _whole_blocks(begin: Any, end: Any, latest_start: Any, earliest_stop: Any, block_size: int) -> tuple[Any, Any]:
    """Return (begin, end) of the blocks that all rows of a tile see; (begin, begin) if there are none."""
    full_begin = begin + -(-(latest_start - begin) // block_size) * block_size
    full_end = begin + (np.minimum(earliest_stop, end) - begin) // block_size * block_size
    has_blocks = full_end > full_begin
    return np.where(has_blocks, full_begin, begin), np.where(has_blocks, full_end, begin)


def _rows_of_tiles(starts: Any, stops: Any, breaks: Sequence[int], rows: int) -> tuple[Any, Any]:
    """Return (first row, end of rows) of each tile of up to `rows` rows."""
    segments = _segments(starts, stops, breaks, rows)
    tiles_per_segment = -(-np.diff(segments) // rows)
    segment_indices = np.repeat(np.arange(len(tiles_per_segment)), tiles_per_segment)
    first_tiles = np.repeat(np.cumsum(tiles_per_segment) - tiles_per_segment, tiles_per_segment)
    first_rows = segments[segment_indices] + (np.arange(len(segment_indices)) - first_tiles) * rows
    return first_rows, np.minimum(first_rows + rows, segments[segment_indices + 1])


def _segments(starts: Any, stops: Any, breaks: Sequence[int], rows: int) -> Any:
    """Return the ends of the runs of rows that tiles may not straddle: 0, ..., the number of rows."""
    # Neighbours that see no common key belong to two documents. Short documents share a tile.
    bounds = np.concatenate(([0], np.flatnonzero(starts[1:] >= stops[:-1]) + 1, [len(starts)]))
    is_long = np.diff(bounds) >= rows
    documents = bounds[1:-1][is_long[:-1] | is_long[1:]]
    gaps = np.flatnonzero(starts[1:] > stops[:-1]) + 1
    return np.unique(np.concatenate(([0], documents, gaps, np.asarray(breaks, dtype=np.int64), [len(starts)])))
