"""Run cases and turn what their ranks measured into records."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone

from . import all_reduce_cases, block_cases, matmul_cases, ring_cases
from .case import OURS, Case
from .machine import this_machine, versions
from .race import Times, run_case
from .ranks import RankFailure, Ranks
from .ratios import Quartiles, slowest
from .records import Comparison, Record

# For a case to start in: DeepSpeed's extension is compiled in the first that needs it.
STARTING_SECONDS = 300.0


def cpu_cases() -> list[Case]:
    """The CPU suite in the order of its table."""
    return [*matmul_cases.cases(), *all_reduce_cases.cases(), *ring_cases.cases(), *block_cases.cases()]


def run(
    cases: Iterable[Case],
    *,
    world_size: int = 2,
    rounds: int | None = None,
    scale: float = 1.0,
    say: Callable[[str], None] = print,
) -> Iterator[tuple[Case, list[Record]]]:
    """Run cases one after the other; yields each with its records, none where it failed.

    Args:
        rounds: of every case; None for as many as fit the case's time.
        scale: multiplies the time of every case.
        say: is told in a sentence what is skipped or has failed, and why.
    """
    for _, family in itertools.groupby(cases, key=lambda case: case.family):
        ranks: Ranks | None = None
        try:
            for case in family:
                try:
                    # New ranks for each family, and after a failure, which takes the ranks with it.
                    ranks = ranks or Ranks(world_size)
                    deadline = STARTING_SECONDS + 4 * scale * case.seconds
                    times = ranks.call(run_case, case, rounds, scale, seconds=deadline)
                except RankFailure as error:
                    ranks = None
                    say(f"{case.name} failed. {error}")
                    yield case, []
                    continue
                for name, reason in times[0].skipped.items():
                    say(f"{case.name}: {name} is left out. {reason}")
                yield case, records_of(case, times, world_size)
        finally:
            if ranks is not None:
                ranks.close()


def records_of(case: Case, times: list[Times], world_size: int) -> list[Record]:
    """The records of a case, from what each rank measured; each is compared with fused_tp if that has run."""
    seconds = {name: slowest([t.seconds[name] for t in times]) for name in times[0].seconds}
    machine, found, date = this_machine(), versions(), datetime.now(timezone.utc).isoformat(timespec="seconds")
    records = []
    for name, taken in seconds.items():
        rival = case.rivals.get(name)
        comparison = None
        if rival is not None and OURS in seconds:
            value = rival.measure.of(seconds[OURS], taken, world_size)
            comparison = Comparison(rival.measure.name, value, rival.bar, rival.aim)
        records.append(
            Record(
                case=case.name,
                contestant=name,
                ms=Quartiles.of([1e3 * second for second in taken]),
                rounds=len(taken),
                calls=times[0].calls[name],
                comparison=comparison,
                world_size=world_size,
                note=times[0].notes[name],
                machine=machine,
                versions=found,
                date=date,
            )
        )
    return records
