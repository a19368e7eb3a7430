"""Measure one case: create, check and warm up its contestants, then time them in turns, round after round."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from .case import FUSED_TP, BenchCase, Contestant, Context, Unavailable

T = TypeVar("T")

MIN_ROUNDS, MAX_ROUNDS = 3, 101


@dataclass
class CaseTimes:
    """Measurements of a case on one rank: seconds of one call, by contestant and round."""

    seconds: dict[str, list[float]]
    calls: dict[str, int]
    notes: dict[str, str]
    skip_reasons: dict[str, str]  # by contestant that did not run: the reason, as the end of a sentence


def run_case(
    context: Context,
    case: BenchCase,
    rounds: int | None = None,
    scale: float = 1.0,
    has_time: Callable[[int], bool] = lambda num_done: True,
) -> CaseTimes:
    """Measure the contestants of `case`; runs on every rank.

    Args:
        rounds: number of rounds; None for as many as fit `case.seconds`, times `scale`.
        has_time: called before each round with the number of finished rounds; False ends the measurement.

    Raises:
        AssertionError: fused_tp computes a wrong result. Its other exceptions propagate; failed rivals are skipped.
    """
    contestants, skip_reasons = check_case(context, case)
    estimates, calls = {}, {}
    for name, contestant in contestants.items():
        estimates[name], calls[name] = context.warm_up(contestant)
    if rounds is None:
        round_seconds = sum(estimates[name] * calls[name] for name in contestants)
        rounds = min(max(int(scale * case.seconds / max(round_seconds, 1e-3)), MIN_ROUNDS), MAX_ROUNDS)
    seconds = take_turns(
        {name: partial(context.measure_seconds, contestants[name], calls[name]) for name in calls}, rounds, has_time
    )
    if context.rechecks_results:
        skip_reasons |= _drop_wrong_contestants(context, case, contestants)
    return CaseTimes(
        {name: seconds[name] for name in contestants},
        {name: calls[name] * contestant.repeats for name, contestant in contestants.items()},
        {name: contestant.note for name, contestant in contestants.items()},
        skip_reasons,
    )


def check_case(context: Context, case: BenchCase) -> tuple[dict[str, Contestant], dict[str, str]]:
    """Return the contestants of `case` with correct results, and why others are left out; raises as `run_case`."""
    context.start(case)
    contestants: dict[str, Contestant] = {}
    skip_reasons: dict[str, str] = {}
    for name, make_contestant in case.make(context, **case.parameters).items():
        contestant, reason = _run_on_all_ranks(context, name, make_contestant)
        if contestant is None:
            skip_reasons[name] = reason
        else:
            contestants[name] = contestant
    return contestants, skip_reasons | _drop_wrong_contestants(context, case, contestants)


def take_turns(
    timers: dict[str, Callable[[], float]], rounds: int, has_time: Callable[[int], bool] = lambda num_done: True
) -> dict[str, list[float]]:
    """Time the contestants in turns; return seconds by contestant and round."""
    seconds: dict[str, list[float]] = {name: [] for name in timers}
    names = list(timers)
    gc.collect()
    gc.disable()  # a collection would count for the contestant that runs
    try:
        for round_index in range(rounds):
            if not has_time(round_index):
                break
            # Rotate which contestant runs first, so that none always follows the same one and inherits its cache state.
            first_index = round_index % max(len(names), 1)
            for name in names[first_index:] + names[:first_index]:
                seconds[name].append(timers[name]())
    finally:
        gc.enable()
    return seconds


def _drop_wrong_contestants(context: Context, case: BenchCase, contestants: dict[str, Contestant]) -> dict[str, str]:
    """Remove contestants with wrong results, and return the reasons."""
    reasons = {}
    for name, contestant in list(contestants.items()):
        if contestant.check is not None:
            _, reason = _run_on_all_ranks(
                context, name, contestant.check, f"{case.name}: {name} computes a wrong result: "
            )
            if reason:
                reasons[name] = reason
                del contestants[name]
    return reasons


def _run_on_all_ranks(
    context: Context, name: str, step: Callable[[], T], message_prefix: str = ""
) -> tuple[T | None, str]:
    """Run `step` and return (its result, ""), or (None, reason) if it fails on any rank: no rank may continue alone, as
    it would wait for its peers."""
    result, reason = None, ""
    raised_error: Exception | None = None
    try:
        result = step()
        context.synchronize()
    except (Unavailable, ImportError) as error:
        reason = f"is left out: {error}"
    except AssertionError as error:
        raised_error = AssertionError(f"{message_prefix}{str(error) or 'an assertion without a message failed'}")
        raised_error.__cause__ = error
        reason = f"failed. AssertionError: {next(iter(str(raised_error).splitlines()))}"
    except Exception as error:
        raised_error, reason = error, f"failed. {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    reasons = [text for text in context.exchange(reason) if text]
    if name == FUSED_TP and reasons and "failed. " in reasons[0]:
        raise raised_error or AssertionError(reasons[0])
    if raised_error is not None:
        traceback.print_exception(raised_error)
    return (None, reasons[0]) if reasons else (result, "")
