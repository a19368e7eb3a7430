"""Times on a GPU: all contestants of a case in turn, round after round, each measured by events on its streams.

What is timed is queued while a gate holds all streams back, so the host's part of a launch does not count, nor does it
that ranks are launched one after the other. A time is that from the opening of the gate to the end of the last stream.
"""

from __future__ import annotations

import gc
import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from .case import OURS, Case, Contestant, Unavailable
from .race import Times

MIN_ROUNDS = 5
MIN_TIMED_SECONDS = 1e-3  # of what is timed at once: events are exact to about a microsecond
MAX_CALLS = 16
MAX_HOLD_SECONDS = 0.5
MAX_TRIES = 8
MOST_RANKS = 4
# Relative errors of a whole result, by norm: one rounding of bf16 is 1.7e-3, and terms that travel have another.
TOLERANCES = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
CHECKED_ROWS = 512


class Budget:
    """The minutes that a run may take, and whether what is next fits."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._begun = now()
        self._seconds = seconds
        self._planned = 0.0
        self._taken = 0.0

    def spent(self) -> float:
        return self._now() - self._begun

    def left(self) -> float:
        return self._seconds - self.spent()

    def learn(self, planned: float, taken: float) -> None:
        """Something has taken other than planned: so will what follows."""
        self._planned += planned
        self._taken += taken

    def fits(self, planned: float) -> bool:
        slowness = max(1.0, self._taken / self._planned) if self._planned else 1.0
        return planned * slowness <= self.left()


@dataclass
class GpuContext:
    """The GPU that cases are made on."""

    device: torch.device
    budget: Budget
    rounds: int

    @cached_property
    def properties(self) -> Any:
        return torch.cuda.get_device_properties(self.device)

    @property
    def arch(self) -> int:
        """As in sm_90."""
        return 10 * int(self.properties.major) + int(self.properties.minor)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    @property
    def sms(self) -> int:
        return int(self.properties.multi_processor_count)

    def input_sets(self, nbytes: int) -> int:
        """How many sets of inputs of `nbytes` to take in turn, so that none is found in L2: 3 times what that holds."""
        l2 = int(getattr(self.properties, "L2_cache_size", 0)) or 64 << 20
        return min(32, max(2, math.ceil(3 * l2 / max(nbytes, 1))))

    def streams(self, world_size: int) -> list[torch.cuda.Stream]:
        """The streams of so many ranks, the same ones each time."""
        if not 1 <= world_size <= MOST_RANKS:
            raise ValueError(f"world_size is {world_size}; there are streams for 1 to {MOST_RANKS} ranks.")
        return self._streams[1 : 1 + world_size]

    @property
    def gate(self) -> torch.cuda.Stream:
        return self._streams[0]

    @cached_property
    def _streams(self) -> list[torch.cuda.Stream]:
        # Nobody else's: of torch's pool one of them would be another's after 32 more, and would wait behind it.
        from fused_tp.triton_kernels.comm.streams import own_streams

        streams: list[torch.cuda.Stream] = own_streams(self, self.device, 1 + MOST_RANKS)
        return streams


@dataclass
class TimedContestant(Contestant):
    """One that is timed otherwise than call by call on the GPU.

    Attributes:
        repeats: how often run() does what one time is to be of.
        on_host: what counts is how long the host is busy; run() must leave room in the queues of the streams.
    """

    repeats: int = 1
    on_host: bool = False


class Stopwatch:
    """Times of calls that run on several streams."""

    def __init__(self, context: GpuContext, streams: Sequence[torch.cuda.Stream]) -> None:
        self._gate = context.gate
        self._streams = streams
        self._hold = 1e-3

    def seconds(self, run: Callable[[], object], calls: int) -> float:
        """Seconds of one of `calls` calls of run(), which queues its work on the streams."""
        for _ in range(MAX_TRIES):
            seconds, host_seconds, in_time = self._measure(run, calls)
            self._hold = min(MAX_HOLD_SECONDS, max(2e-4, (1.5 if in_time else 3.0) * host_seconds))
            if in_time:
                return seconds / calls
        raise RuntimeError(
            f"The host took over {MAX_HOLD_SECONDS} s to queue {calls} calls, {MAX_TRIES} times in a row."
        )

    def _measure(self, run: Callable[[], object], calls: int) -> tuple[float, float, bool]:
        """Seconds on the GPU, seconds of the host, and whether the gate stayed closed until all was queued."""
        opened = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._gate):
            torch.cuda._sleep(int(self._hold * 2e9))  # cycles; no clock is above 2 GHz by much
            opened.record()
        for stream in self._streams:
            stream.wait_event(opened)
        begun = time.perf_counter()
        for _ in range(calls):
            run()
        ends = [stream.record_event(torch.cuda.Event(enable_timing=True)) for stream in self._streams]
        in_time = not opened.query()
        host_seconds = time.perf_counter() - begun
        torch.cuda.synchronize()
        return max(opened.elapsed_time(end) for end in ends) / 1e3, host_seconds, in_time


def check_case(context: GpuContext, case: Case) -> tuple[dict[str, Contestant], dict[str, str]]:
    """Makes and checks the contestants of `case`; why others are not among them, as the end of a sentence.

    Raises:
        AssertionError: fused_tp computes something else; what else it raises, too. Rivals that fail are left out.
    """
    contestants: dict[str, Contestant] = {}
    left_out: dict[str, str] = {}
    for name, maker in case.make(context, **case.parameters).items():
        try:
            contestants[name] = maker()
        except Unavailable as error:
            left_out[name] = f"is left out: {error}"
        except Exception as error:
            left_out[name] = _failure(name, error)
    return contestants, left_out | _check(case, contestants)


def run_case(context: GpuContext, case: Case) -> Times:
    """Make, check, warm up and race the contestants of `case`, then check them once more. Raises as `check_case`."""
    contestants, left_out = check_case(context, case)
    stopwatch = Stopwatch(context, context.streams(case.parameters.get("world_size", 1)))
    calls = {}
    timed = {}
    for name, contestant in contestants.items():
        repeats, on_host = _how(contestant)
        measure = host_seconds if on_host else stopwatch.seconds
        estimate = min(measure(contestant.run, 1) for _ in range(3))
        calls[name] = min(MAX_CALLS, max(1, math.ceil(MIN_TIMED_SECONDS / max(estimate, 1e-6))))
        timed[name] = partial(_seconds_of_one, measure, contestant.run, calls[name], repeats)
        timed[name]()
    seconds = race(timed, context.rounds, lambda: context.budget.left() > 0)
    left_out |= _check(case, contestants)
    return Times(
        {name: seconds[name] for name in contestants},
        {name: calls[name] * _how(contestant)[0] for name, contestant in contestants.items()},
        {name: contestant.note for name, contestant in contestants.items()},
        left_out,
    )


def _how(contestant: Contestant) -> tuple[int, bool]:
    """Its repeats, and whether the host is timed."""
    return (contestant.repeats, contestant.on_host) if isinstance(contestant, TimedContestant) else (1, False)


def _seconds_of_one(
    measure: Callable[[Callable[[], object], int], float], run: Callable[[], object], calls: int, repeats: int
) -> float:
    return measure(run, calls) / repeats


def host_seconds(run: Callable[[], object], calls: int) -> float:
    """Seconds that the host takes for one of `calls` calls of run(); what these queue runs meanwhile."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(calls):
        run()
    seconds = time.perf_counter() - begun
    torch.cuda.synchronize()
    return seconds / calls


def race(
    timed: Mapping[str, Callable[[], float]], rounds: int, goes_on: Callable[[], bool] = lambda: True
) -> dict[str, list[float]]:
    """Times by contestant and round; who starts changes from round to round.

    Ends after `rounds`, or after MIN_ROUNDS once `goes_on` says no.
    """
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    names = list(timed)
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            if number >= MIN_ROUNDS and not goes_on():
                break
            first = number % max(len(names), 1)
            for name in names[first:] + names[:first]:
                seconds[name].append(timed[name]())
    finally:
        gc.enable()
    return seconds


def _check(case: Case, contestants: dict[str, Contestant]) -> dict[str, str]:
    """Takes out those whose answers are wrong, and says so; raises where that is fused_tp."""
    wrong = {}
    for name, contestant in list(contestants.items()):
        if contestant.check is None:
            continue
        try:
            contestant.check()
            torch.cuda.synchronize()
        except AssertionError as error:
            why = AssertionError(f"{case.name}: {name} computes something else: {error}")
            why.__cause__ = error
            wrong[name] = _failure(name, why)
        except Exception as error:
            wrong[name] = _failure(name, error)
        if name in wrong:
            del contestants[name]
    return wrong


def _failure(name: str, error: Exception) -> str:
    """What is said of a rival that fails; fused_tp's own errors are raised."""
    if name == OURS:
        raise error
    traceback.print_exception(error)
    first_line = next(iter(str(error).splitlines()), "")
    return f"failed. {type(error).__name__}: {first_line}"


def checked_rows(rows: int) -> slice:
    """Rows that are compared with fp64: about CHECKED_ROWS, in all parts of a result, the last one among them."""
    step = max(1, rows // CHECKED_ROWS)
    return slice((rows - 1) % step if rows else 0, None, step)


def assert_near(actual: Tensor, expected64: Tensor, what: str = "the result") -> None:
    """Raises AssertionError where `actual` is further from fp64, by norm, than its dtype explains; NaN always is."""
    assert actual.shape == expected64.shape, f"{what} is {tuple(actual.shape)}, not {tuple(expected64.shape)}"
    norm = float(expected64.norm())
    error = float((actual.double() - expected64).norm()) / norm if norm else float(actual.double().norm())
    bound = TOLERANCES[actual.dtype]
    assert error <= bound, f"{what} is off by {error:.3g} of its norm, where {bound:.3g} is allowed"
