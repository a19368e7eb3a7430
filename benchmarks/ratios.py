"""The statistics: quartiles of paired ratios.

A machine that slows down for a second slows down all contestants of a round alike, so ratios within a round stay true
where a ratio of two separate medians does not. The median forgives a round that somebody else's program disturbed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Quartiles:
    """Median and quartiles of some rounds."""

    median: float
    q1: float
    q3: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        """Quartiles by linear interpolation; a single value is its own quartiles.

        Raises:
            ValueError: there are no values.

        Example:
            >>> Quartiles.of([1.0, 2.0, 3.0])
            Quartiles(median=2.0, q1=1.5, q3=2.5)
        """
        if not values:
            raise ValueError("values is empty; a figure needs at least one round.")
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, q1, q3)


def slowest(seconds_by_rank: Sequence[Sequence[float]]) -> list[float]:
    """What each round took: the time of its slowest rank. Takes [rank][round], all ranks with the same rounds."""
    return [max(times) for times in zip(*seconds_by_rank, strict=True)]


def paired(numerator: Sequence[float], denominator: Sequence[float]) -> Quartiles:
    """Quartiles of the round-by-round ratio.

    Example:
        >>> paired([2.0, 4.0, 9.0], [1.0, 2.0, 3.0]).median
        2.0
    """
    return Quartiles.of([a / b for a, b in zip(numerator, denominator, strict=True)])


@dataclass(frozen=True)
class Measure:
    """How two contestants are compared: `of(ours, rival, world_size)`, and whether less is better."""

    name: str
    lower_is_better: bool
    of: Callable[[Sequence[float], Sequence[float], int], Quartiles]

    def meets(self, value: float, bar: float) -> bool:
        return value <= bar if self.lower_is_better else value >= bar


def _time_ratio(ours: Sequence[float], rival: Sequence[float], world_size: int) -> Quartiles:
    return paired(ours, rival)


def _speedup(ours: Sequence[float], rival: Sequence[float], world_size: int) -> Quartiles:
    return paired(rival, ours)


def _efficiency(ours: Sequence[float], rival: Sequence[float], world_size: int) -> Quartiles:
    return paired(rival, [world_size * seconds for seconds in ours])


def _microseconds(ours: Sequence[float], rival: Sequence[float], world_size: int) -> Quartiles:
    return Quartiles.of([1e6 * seconds for seconds in ours])


TIME_RATIO = Measure("time ratio", True, _time_ratio)
SPEEDUP = Measure("speedup", False, _speedup)
# The rival does on one rank what ours spreads over W: 1.0 is W ranks being W times as fast.
EFFICIENCY = Measure("efficiency", False, _efficiency)

# Of ours alone: what is judged by the clock. The rival beside it says what the machine can do.
MICROSECONDS = Measure("microseconds", True, _microseconds)

MEASURES = {measure.name: measure for measure in (TIME_RATIO, SPEEDUP, EFFICIENCY, MICROSECONDS)}
