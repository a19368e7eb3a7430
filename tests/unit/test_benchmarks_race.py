"""One small case from end to end, in ranks of its own, and what becomes of ranks that fail."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.barrier import SpinBarrier
from benchmarks.case import OURS, Case, Contestant, Maker, Rival, Unavailable, checked
from benchmarks.ranks import RankContext, RankFailure, Ranks
from benchmarks.ratios import TIME_RATIO
from benchmarks.suite import run

pytestmark = pytest.mark.full


def small_case(context: RankContext, elements: int) -> dict[str, Maker]:
    ones = torch.ones(elements)

    def summed() -> torch.Tensor:
        total = ones.clone()
        dist.all_reduce(total)
        return total

    def late() -> None:
        time.sleep(0.003 * (1 + context.rank))  # the slowest rank takes 6 ms

    def absent() -> Contestant:
        if context.rank == 1:  # on one rank only, and still nobody may run it
            raise Unavailable("Rank 1 lacks it.")
        return checked(summed, ones)

    return {
        OURS: lambda: checked(summed, ones * context.world_size, note="as noted"),
        "late": lambda: Contestant(late),
        "absent": absent,
    }


def wrong_case(context: RankContext) -> dict[str, Maker]:
    return {OURS: lambda: checked(lambda: torch.zeros(3), torch.ones(3))}


def cores_of_rank(context: RankContext) -> list[int]:
    return sorted(os.sched_getaffinity(0))


def raise_on_one(context: RankContext) -> None:
    if context.rank == 1:
        raise LookupError("only here")
    context.barrier.wait()


def die_on_one(context: RankContext) -> None:
    if context.rank == 0:
        os._exit(7)
    context.barrier.wait()


def test_a_case_from_end_to_end() -> None:
    case = Case("small/fp32", small_case, {"elements": 64}, {"late": Rival(TIME_RATIO, bar=1.0)})
    wrong = Case("small/wrong", wrong_case, {})
    said: list[str] = []
    (ran, records), (failed, none) = run([case, wrong], rounds=3, say=said.append)
    assert (ran, failed) == (case, wrong)
    ours, late = records
    assert (ours.contestant, late.contestant) == (OURS, "late")
    assert ours.note == "as noted"
    assert ours.rounds == late.rounds == 3
    assert late.ms.q1 >= 6.0
    assert late.comparison is not None
    assert 0 < late.comparison.value.median < 1
    assert none == []
    assert len(said) == 2
    assert "absent is left out. Rank 1 lacks it." in said[0]
    assert "computes something else: off by up to 1" in said[1]


def test_ranks_are_pinned_and_a_failing_one_ends_all() -> None:
    usable = sorted(os.sched_getaffinity(0))
    with Ranks(2) as ranks:
        assert ranks.call(cores_of_rank, seconds=10) == [[usable[0]], [usable[1 % len(usable)]]]
        start = time.monotonic()
        with pytest.raises(RankFailure, match="only here"):
            ranks.call(raise_on_one, seconds=60)
        assert time.monotonic() - start < 30  # rank 0, in the barrier, is not waited for


def test_a_rank_that_dies_or_is_stuck_is_reported() -> None:
    with Ranks(2) as ranks, pytest.raises(RankFailure, match="exit status 7"):
        ranks.call(die_on_one, seconds=60)


def test_barrier_names_who_is_late(tmp_path: Path) -> None:
    barrier = SpinBarrier(tmp_path / "barrier", 2, 0, timeout_seconds=0.05)
    with barrier, pytest.raises(TimeoutError, match=r"Ranks \[1\] did not reach"):
        barrier.wait()
