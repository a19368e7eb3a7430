"""A step cut into tiles that kernels without general masks can compute: rectangles, triangles, and the rest.

Where the ends of the intervals stand still or go up by one from row to row, n rows of a band are

    upper triangle of n - 1, rectangle, lower triangle of n          (sliding window: both ends go up)
    rectangle, lower triangle of n                                   (causal: the end goes up)

and an upper triangle is a lower one of queries and keys in reverse order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from weakref import WeakKeyDictionary

import numpy as np

from fused_tp.attention.plan import Step

# Fewer rows are not worth calls of their own; with their neighbours they are one masked tile.
_FEWEST_ROWS = 64
_MOST_ROWS = 2048  # of a band whose both ends go up: its triangles are half wasted by kernels that cannot skip


class Shape(Enum):
    """What of a tile is seen: all; by row i the keys up to i; by row i the keys from i on; any."""

    FULL = "full"
    LOWER = "lower"
    UPPER = "upper"
    MASKED = "masked"


@dataclass(frozen=True)
class Tile:
    """Queries [q_start, q_stop) against keys [k_start, k_stop) of a step."""

    shape: Shape
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int

    @property
    def rows(self) -> slice:
        return slice(self.q_start, self.q_stop)

    @property
    def keys(self) -> slice:
        return slice(self.k_start, self.k_stop)


_known: WeakKeyDictionary[Step, tuple[Tile, ...]] = WeakKeyDictionary()


def tiles(step: Step) -> tuple[Tile, ...]:
    """Disjoint, and together all that is seen; made once."""
    found = _known.get(step)
    if found is None:
        found = _known[step] = tuple(_tiles(step))
    return found


def _tiles(step: Step) -> Iterator[Tile]:
    if step.is_full:
        yield Tile(Shape.FULL, 0, step.rows, 0, step.keys)
        return
    waiting = 0  # the first row of short runs that are not served yet
    for start, stop in _runs(step):
        if stop - start < _FEWEST_ROWS:
            continue
        yield from _masked(step, waiting, start)
        yield from _band(step, start, stop)
        waiting = stop
    yield from _masked(step, waiting, step.rows)


def _runs(step: Step) -> Iterator[tuple[int, int]]:
    """Maximal runs of rows whose interval ends both advance by 0 or by 1 per row."""
    slopes = np.stack([np.diff(step.starts), np.diff(step.stops)])
    regular = ((slopes == 0) | (slopes == 1)).all(0)
    # Behind a step that is not regular a run begins; where a regular one is followed by another, the row between them
    # still belongs to the run before.
    changed = (slopes[:, 1:] != slopes[:, :-1]).any(0) & regular[:-1]
    begins = np.union1d(np.flatnonzero(~regular) + 1, np.flatnonzero(changed) + 2)
    bounds = [0, *map(int, begins), step.rows]
    yield from itertools.pairwise(bounds)


def _band(step: Step, start: int, stop: int) -> Iterator[Tile]:
    starts, stops = step.starts, step.stops
    width = int((stops[start:stop] - starts[start:stop]).min())
    rising = bool(starts[stop - 1] > starts[start])
    if width <= 0 or (rising and width < _FEWEST_ROWS):
        yield from _masked(step, start, stop)
        return
    rows = min(width, _MOST_ROWS) if rising else stop - start
    for first in range(start, stop, rows):
        yield from _trapezoid(step, first, min(first + rows, stop))


def _trapezoid(step: Step, start: int, stop: int) -> Iterator[Tile]:
    low, lowest_end = int(step.starts[stop - 1]), int(step.stops[start])
    if step.starts[start] < low:
        yield Tile(Shape.UPPER, start, stop - 1, int(step.starts[start]), low)
    if step.stops[stop - 1] > lowest_end:
        lowest_end -= 1
        yield Tile(Shape.LOWER, start, stop, lowest_end, int(step.stops[stop - 1]))
    if lowest_end > low:
        yield Tile(Shape.FULL, start, stop, low, lowest_end)


def _masked(step: Step, start: int, stop: int) -> Iterator[Tile]:
    seeing = np.flatnonzero(step.stops[start:stop] > step.starts[start:stop])
    if len(seeing):
        first, last = start + int(seeing[0]), start + int(seeing[-1])
        yield Tile(Shape.MASKED, first, last + 1, int(step.starts[first]), int(step.stops[last]))
