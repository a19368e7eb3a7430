"""Sets of times as disjoint intervals."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate


class Intervals:
    """Set of times as ordered intervals that neither overlap nor touch.

    Args:
        intervals: pairs (start, stop) in any order; they may overlap.

    Attributes:
        length: total length of all intervals.

    Example:
        >>> list(Intervals([(0, 2), (1, 3), (5, 6)]).without(Intervals([(1, 2)])))
        [(0, 1), (2, 3), (5, 6)]
    """

    def __init__(self, intervals: Iterable[tuple[float, float]]) -> None:
        self._starts: list[float] = []
        self._stops: list[float] = []
        for start, stop in sorted(intervals):
            if self._stops and start <= self._stops[-1]:
                self._stops[-1] = max(self._stops[-1], stop)
            elif start < stop:
                self._starts.append(start)
                self._stops.append(stop)
        self._lengths = [0.0, *accumulate(stop - start for start, stop in self)]
        self.length = self._lengths[-1]

    def __iter__(self) -> Iterator[tuple[float, float]]:
        return zip(self._starts, self._stops, strict=True)

    def covered_length(self, start: float, stop: float) -> float:
        """Return the length of the intersection of the set with [start, stop]."""
        return self._length_before(stop) - self._length_before(start)

    def _length_before(self, time: float) -> float:
        count = bisect_right(self._starts, time)
        return self._lengths[count] - max(0.0, self._stops[count - 1] - time) if count else 0.0

    def without(self, other: Intervals) -> Intervals:
        """Return the set difference: times of this set that are not in `other`."""
        difference = []
        for start, stop in self:
            for index in range(bisect_right(other._stops, start), len(other._starts)):
                if other._starts[index] >= stop:
                    break
                difference.append((start, other._starts[index]))
                start = other._stops[index]
            difference.append((start, stop))
        return Intervals(difference)
