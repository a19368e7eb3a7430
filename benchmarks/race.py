"""The race: all contestants of a case in turn, round after round, on every rank."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from .case import Case, Contestant, Unavailable
from .ranks import RankContext

MIN_ROUNDS = 3
MAX_ROUNDS = 101
MIN_TIMED_SECONDS = 2e-3  # of what is timed at once: far above what leaving the barrier and reading the clock take
_WARM_UP_CALLS = 3  # the first builds and allocates, the second still faults pages in
_WARM_UP_SECONDS = 0.5  # enough of it, where calls are long


@dataclass
class Times:
    """What one rank measured of a case: seconds of one call, by contestant and round."""

    seconds: dict[str, list[float]]
    calls: dict[str, int]
    notes: dict[str, str]
    skipped: dict[str, str]  # why a contestant did not run, by its name


def run_case(context: RankContext, case: Case, rounds: int | None, scale: float) -> Times:
    """Make, check, warm up and race the contestants of `case`. Runs on every rank.

    Args:
        rounds: how many; None for as many as fit `case.seconds`.
        scale: multiplies `case.seconds`.
    """
    contestants, skipped = _make(context, case)
    for name, contestant in contestants.items():
        # All ranks check before any of them goes on: one that fails must not leave its peers in a collective.
        problem = _problem(contestant.check) if contestant.check else ""
        problems = [text for text in _exchange(context, problem) if text]
        if problems:
            raise AssertionError(f"{case.name}: {name} computes something else: {problems[0]}")
    estimates = {name: _warm_up(context, contestant) for name, contestant in contestants.items()}
    calls = {name: max(1, math.ceil(MIN_TIMED_SECONDS / max(t, 1e-7))) for name, t in estimates.items()}
    if rounds is None:
        round_seconds = sum(estimates[name] * calls[name] for name in contestants)
        rounds = int(scale * case.seconds / max(round_seconds, 1e-3))
        rounds = min(max(rounds, MIN_ROUNDS), MAX_ROUNDS)
    seconds = _race(context, contestants, calls, rounds)
    notes = {name: contestant.note for name, contestant in contestants.items()}
    return Times(seconds, calls, notes, skipped)


def _race(
    context: RankContext, contestants: dict[str, Contestant], calls: dict[str, int], rounds: int
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    gc.collect()
    gc.disable()  # a collection falls on whoever happens to run
    try:
        for number in range(rounds):
            # Who starts changes from round to round: no contestant always finds the caches as the same other left them.
            first = number % max(len(names), 1)
            for name in names[first:] + names[:first]:
                seconds[name].append(_timed(context, contestants[name].run, calls[name]))
    finally:
        gc.enable()
    return seconds


def _timed(context: RankContext, run: Callable[[], Any], calls: int) -> float:
    context.barrier.wait()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def _warm_up(context: RankContext, contestant: Contestant) -> float:
    """Seconds of one call, the same number on every rank."""
    times: list[float] = []
    while len(times) < _WARM_UP_CALLS and sum(times) < _WARM_UP_SECONDS:
        times.append(max(_exchange(context, _timed(context, contestant.run, 1))))
    return min(times)


def _make(context: RankContext, case: Case) -> tuple[dict[str, Contestant], dict[str, str]]:
    contestants: dict[str, Contestant] = {}
    skipped: dict[str, str] = {}
    for name, maker in case.makers(context).items():
        contestant, reason = None, ""
        try:
            contestant = maker()
        except (Unavailable, ImportError) as error:
            reason = str(error)
        # All or none: a contestant that runs on some ranks only would wait for the others.
        reasons = [text for text in _exchange(context, reason) if text]
        if contestant is None or reasons:
            skipped[name] = reasons[0]
        else:
            contestants[name] = contestant
    return contestants, skipped


def _problem(check: Callable[[], None]) -> str:
    try:
        check()
    except AssertionError as error:
        return str(error) or "an assertion without a message failed"
    return ""


def _exchange(context: RankContext, mine: Any) -> list[Any]:
    answers: list[Any] = [None] * context.world_size
    dist.all_gather_object(answers, mine)
    return answers
