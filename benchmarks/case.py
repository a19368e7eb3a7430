"""What a case is: contestants that do the same work, how fused_tp is compared with each, how answers are checked."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

OURS = "fused_tp"

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Of the largest number in the expected answer. A sum of terms rounded apart differs by about one step of the dtype from
# one rounded once; the bound is what tells a wrong answer from another rounding, not a test of accuracy.
TOLERANCES = {torch.bfloat16: 0.03, torch.float32: 1e-4}


class Unavailable(Exception):
    """A contestant cannot run here; the message says why in a sentence."""


@dataclass
class Contestant:
    """One way of doing the work of a case.

    Attributes:
        run: does it once. What it returns is dropped within the timed span, as freeing is part of the cost.
        check: raises AssertionError if what run() computes is wrong; None for a floor that computes only a part.
        note: goes into the record.
        repeats: how often run() does what one time is to be of.
        on_host: on a GPU, time how long the host is busy; run() must leave room in the queues of the streams.
    """

    run: Callable[[], Any]
    check: Callable[[], None] | None = None
    note: str = ""
    repeats: int = 1
    on_host: bool = False


# Makes a contestant, on all ranks. Raises Unavailable, or ImportError where a package is missing.
Maker = Callable[[], Contestant]
Makers = dict[str, Maker]


class Context(Protocol):
    """Where a case runs: a rank of CPU processes (`ranks.RankContext`), or a GPU (`gpu_timing.GpuContext`)."""

    checks_again: bool  # answers, also after the last round

    def exchange(self, mine: Any) -> list[Any]:
        """`mine` of every rank."""

    def synchronize(self) -> None:
        """Return once what was launched has ended; raises what it raised."""

    def start(self, case: Case) -> None:
        """The contestants that are made and timed next are those of `case`."""

    def warm_up(self, contestant: Contestant) -> tuple[float, int]:
        """(seconds of one call, calls to time at once), the same numbers on every rank."""

    def seconds(self, contestant: Contestant, calls: int) -> float:
        """Seconds of one of so many calls, timed together, on this rank."""


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
    """The time of the slowest rank in each round. Takes [rank][round], all ranks with the same rounds."""
    return [max(times) for times in zip(*seconds_by_rank, strict=True)]


def paired(numerator: Sequence[float], denominator: Sequence[float]) -> Quartiles:
    """Quartiles of the round-by-round ratio.

    A machine that slows down for a second slows down all contestants of a round, so ratios within a round stay
    true where a ratio of two separate medians does not. The median forgives a round that another program disturbed.

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

    def __reduce__(self) -> str:  # cases travel to ranks, functions without a name do not
        return self.name.upper().replace(" ", "_")


TIME_RATIO = Measure("time ratio", True, lambda ours, rival, size: paired(ours, rival))
SPEEDUP = Measure("speedup", False, lambda ours, rival, size: paired(rival, ours))
# The rival does on one rank what ours spreads over W: 1.0 is W ranks being W times as fast.
EFFICIENCY = Measure("efficiency", False, lambda ours, rival, size: paired(rival, [size * s for s in ours]))
# Of ours alone: what is judged by the clock. Its rival says what the machine can do.
MICROSECONDS = Measure("microseconds", True, lambda ours, rival, size: Quartiles.of([1e6 * s for s in ours]))
MEASURES = {measure.name: measure for measure in (TIME_RATIO, SPEEDUP, EFFICIENCY, MICROSECONDS)}


@dataclass(frozen=True)
class Rival:
    """Who fused_tp is compared with, and how; `bar` and `aim` are values of `measure`."""

    measure: Measure
    bar: float | None = None
    aim: float | None = None


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
        name: family/dtype/size, unique.
        make: called on each rank as make(context, **parameters); must be of the top level of a module.
        rivals: by contestant's name; contestants that are not here are shown with their times only.
        seconds: about how long all rounds together should take.
        flops, nbytes: of all ranks together, for the rate in a record's note; 0 where there is none to tell.
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
        """Cases of one family share their ranks, one after the other."""
        return self.name.split("/")[0]

    def rate(self, ms: float) -> str:
        """What a call of so many milliseconds multiplies or moves in a second, else its microseconds."""
        if self.flops:
            return f"{self.flops / ms / 1e9:.0f} TFLOP/s"
        return f"{self.nbytes / ms / 1e6:.0f} GB/s" if self.nbytes else f"{1e3 * ms:.2f} us"


def select(cases: Iterable[Case], pattern: str, option: str) -> list[Case]:
    """Those whose name contains a match of `pattern`, which came with `option`.

    Raises:
        ValueError: it is not a regular expression or matches none; a sentence.
    """
    try:
        chosen = [case for case in cases if re.search(pattern, case.name)]
    except re.error as error:
        raise ValueError(f"{option} {pattern!r} is not a regular expression ({error}).") from error
    if not chosen:
        raise ValueError(f"{option} {pattern!r} matches none of the cases; --list names them.")
    return chosen


def checked(run: Callable[[], Tensor], expected: Tensor, note: str = "") -> Contestant:
    """A contestant whose answer must be `expected`, to within the rounding of its dtype."""

    def check() -> None:
        assert_close(run(), expected)

    return Contestant(run, check, note)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Raises AssertionError where `actual` is further from `expected` than rounding in its dtype explains."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    error = (actual.double() - expected.double()).abs().max().item()
    bound = TOLERANCES[actual.dtype] * expected.double().abs().max().item()
    assert error <= bound, f"off by up to {error:.3g}, where {bound:.3g} is allowed"
