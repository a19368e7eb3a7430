"""Benchmark cases: contestants that do the same work, their comparison with fused_tp, and checks of their results."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

FUSED_TP = "fused_tp"

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Relative to the largest number in the expected result. A sum of separately rounded terms differs by about one step of
# the dtype from a sum rounded once; the bound separates wrong results from other roundings, and does not test accuracy.
TOLERANCES = {torch.bfloat16: 0.03, torch.float32: 1e-4}


class Unavailable(Exception):
    """Raised if a contestant cannot run here; the message is a sentence with the reason."""


@dataclass
class Contestant:
    """One implementation of the work of a case.

    Attributes:
        run: does the work once. Its result is freed within the timed span, because freeing is part of the cost.
        check: raises AssertionError if run() computes a wrong result; None for a floor that does only part of the work.
        note: text for the `note` of its records.
        repeats: number of times that run() repeats the work that one time refers to.
        times_host: on a GPU, time how long the host is busy; run() must not fill the queues of the streams.
    """

    run: Callable[[], Any]
    check: Callable[[], None] | None = None
    note: str = ""
    repeats: int = 1
    times_host: bool = False


# Creates a contestant, on all ranks. Raises Unavailable, or ImportError if a package is missing.
Maker = Callable[[], Contestant]
Makers = dict[str, Maker]


class Context(Protocol):
    """Environment of a running case: a rank on the CPU (`ranks.RankContext`), or a GPU (`gpu_timing.GpuContext`)."""

    rechecks_results: bool  # check results again after the last round

    def exchange(self, value: Any) -> list[Any]:
        """Return `value` of every rank."""

    def synchronize(self) -> None:
        """Return once all launched work has ended, and raise its errors."""

    def start(self, case: BenchCase) -> None:
        """Prepare for `case`, whose contestants are created and timed next."""

    def warm_up(self, contestant: Contestant) -> tuple[float, int]:
        """Return (seconds of one call, calls to time together), equal on every rank."""

    def measure_seconds(self, contestant: Contestant, calls: int) -> float:
        """Time `calls` calls together; return the seconds per call on this rank."""


@dataclass(frozen=True)
class Quartiles:
    """Median and quartiles over the rounds of a measurement."""

    median: float
    q1: float
    q3: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Quartiles:
        """Quartiles by linear interpolation; a single value is its own quartiles.

        Raises:
            ValueError: there are no values.

        Example:
            >>> Quartiles.from_values([1.0, 2.0, 3.0])
            Quartiles(median=2.0, q1=1.5, q3=2.5)
        """
        if not values:
            raise ValueError("values is empty; a figure needs at least one round.")
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, q1, q3)


def slowest_rank_seconds(seconds_by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Return the time of the slowest rank in each round, from [rank][round] with equally many rounds on all ranks."""
    return [max(times) for times in zip(*seconds_by_rank, strict=True)]


def ratio_quartiles(numerator: Sequence[float], denominator: Sequence[float]) -> Quartiles:
    """Quartiles of the round-by-round ratio.

    A machine that slows down for a second slows down all contestants of a round. Ratios within a round therefore stay
    valid, while a ratio of two separate medians does not. The median ignores rounds that another program disturbed.

    Example:
        >>> ratio_quartiles([2.0, 4.0, 9.0], [1.0, 2.0, 3.0]).median
        2.0
    """
    return Quartiles.from_values([a / b for a, b in zip(numerator, denominator, strict=True)])


@dataclass(frozen=True)
class Measure:
    """Comparison of two contestants: `compare(fused_tp, rival, world_size)` takes their seconds of each round."""

    name: str
    lower_is_better: bool
    compare: Callable[[Sequence[float], Sequence[float], int], Quartiles]

    def meets(self, value: float, bar: float) -> bool:
        return value <= bar if self.lower_is_better else value >= bar

    def __reduce__(self) -> str:  # pickle the name: cases are sent to ranks, and lambdas cannot be pickled
        return self.name.upper().replace(" ", "_")


TIME_RATIO = Measure("time ratio", True, lambda ours, rival, size: ratio_quartiles(ours, rival))
SPEEDUP = Measure("speedup", False, lambda ours, rival, size: ratio_quartiles(rival, ours))
# The rival does on one rank the work that ours shards over W: at 1.0, W ranks are W times as fast.
EFFICIENCY = Measure("efficiency", False, lambda ours, rival, size: ratio_quartiles(rival, [size * s for s in ours]))
# Absolute time of ours. The rival only shows the time that the machine can reach.
MICROSECONDS = Measure("microseconds", True, lambda ours, rival, size: Quartiles.from_values([1e6 * s for s in ours]))
MEASURES = {measure.name: measure for measure in (TIME_RATIO, SPEEDUP, EFFICIENCY, MICROSECONDS)}


@dataclass(frozen=True)
class Rival:
    """Comparison of fused_tp with a contestant: `bar` is the required value of `measure`, `aim` the desired one."""

    measure: Measure
    bar: float | None = None
    aim: float | None = None


@dataclass(frozen=True)
class BenchCase:
    """A case: parameters, and a function that makes its contestants, each of which is a line of the table.

    Attributes:
        name: family/dtype/size, unique.
        make: called on each rank as make(context, **parameters); must be defined at the top level of a module.
        rivals: comparisons by contestant's name; contestants without one are shown with their times only.
        seconds: approximate time of all rounds together.
        flops, nbytes: totals over all ranks, for the rate in a record's note; 0 if it has no rate.
    """

    name: str
    make: Callable[..., Makers]
    parameters: Mapping[str, Any]
    rivals: Mapping[str, Rival] = field(default_factory=dict)
    seconds: float = 10.0
    flops: float = 0.0
    nbytes: float = 0.0

    @property
    def family(self) -> str:
        """First part of the name. Cases of one family run on the same ranks, one after the other."""
        return self.name.split("/")[0]

    def format_rate(self, ms: float) -> str:
        """Format the rate of a call of `ms` milliseconds in TFLOP/s or GB/s; without one, its time in microseconds."""
        if self.flops:
            return f"{self.flops / ms / 1e9:.0f} TFLOP/s"
        return f"{self.nbytes / ms / 1e6:.0f} GB/s" if self.nbytes else f"{1e3 * ms:.2f} us"


def select_cases(cases: Iterable[BenchCase], pattern: str, option: str) -> list[BenchCase]:
    """Select the cases whose name contains a match of `pattern`, the value of `option`.

    Raises:
        ValueError: `pattern` is not a regular expression, or matches no case.
    """
    try:
        selected_cases = [case for case in cases if re.search(pattern, case.name)]
    except re.error as error:
        raise ValueError(f"{option} {pattern!r} is not a regular expression ({error}).") from error
    if not selected_cases:
        raise ValueError(f"{option} {pattern!r} matches no case; --list prints their names.")
    return selected_cases


def checked_contestant(run: Callable[[], Tensor], expected: Tensor, note: str = "") -> Contestant:
    """Return a contestant whose result must be `expected`, up to rounding in its dtype."""

    def check() -> None:
        assert_close(run(), expected)

    return Contestant(run, check, note)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Raise AssertionError if `actual` differs from `expected` by more than rounding in its dtype explains."""
    assert actual.shape == expected.shape, (
        f"the result has shape {tuple(actual.shape)}; expected {tuple(expected.shape)}"
    )
    error = (actual.double() - expected.double()).abs().max().item()
    bound = TOLERANCES[actual.dtype] * expected.double().abs().max().item()
    assert error <= bound, f"the result is off by up to {error:.3g}; the bound is {bound:.3g}"
