"""Ranks that die, stall, leave or are interrupted (tests/faults.py): a sample; `make soak` runs many more.

After a lost peer or a missed deadline a group is unusable and says so; the process and its other groups go on.
"""

from __future__ import annotations

import re
import sys

import pytest

from tests.beside import beside
from tests.faults import NOTICE_SECONDS, Trial, check_killed, op_names, trials

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks ranks, reads /proc and /dev/shm")

OP_TIMEOUT = 1.5


@beside(lambda count: trials("kill", "--count", str(count), "--seed", "1"))
@pytest.mark.parametrize("count", [4, pytest.param(len(op_names()), marks=pytest.mark.full)])
def test_a_killed_rank_is_noticed_by_all_others(outcome: list[Trial], count: int) -> None:
    assert len({trial.op for trial in outcome}) == count  # all ops, where that is their number
    for trial in outcome:
        check_killed(trial)


@pytest.mark.full
@beside(
    lambda schedule, count, options: trials(
        "kill", "--count", str(count), "--seed", "2", "--schedule", schedule, *options
    )
)
@pytest.mark.parametrize(
    ("schedule", "count", "options"),
    [("plain", 3, ()), ("pipelined", 8, ("--op", "all_gather_matmul")), ("pipelined", 8, ("--op", "ring_attention"))],
)
def test_a_killed_rank_is_noticed_without_shared_memory_too(
    outcome: list[Trial], schedule: str, count: int, options: tuple[str, ...]
) -> None:
    """The two ops of "pipelined" send and receive: a rank may wait for a survivor only, which must tell it."""
    assert len(outcome) == count
    for trial in outcome:
        check_killed(trial)


@beside(lambda schedule: trials("early", "--count", "2", "--seed", "6", "--schedule", schedule))
@pytest.mark.parametrize("schedule", ["one_sided", "plain"])
def test_a_rank_killed_before_its_first_call_is_noticed(outcome: list[Trial], schedule: str) -> None:
    for trial in outcome:
        assert len(trial.reports) == 2 and trial.left_in_dev_shm == [], trial
        for report in trial.reports:
            assert report.error == "PeerLostError" and not report.crash, trial
            # In the rendezvous a closed connection is looked at twice: its peer may live, and join.
            assert report.at - trial.at < (1.0 if schedule == "one_sided" else 0.0) + NOTICE_SECONDS, trial
            # Who notices second may find that the first has ended too.
            said = (
                rf"Rank .*\b{trial.victim}\b.* died, or left"
                if schedule == "one_sided"
                else f"lost rank {trial.victim}:"
            )
            assert re.search(said, report.message), trial


STALLS = ("stall", "--count", "2", "--seed", "3", "--schedule")


@beside(lambda schedule: trials(*STALLS, schedule, FUSED_TP_TIMEOUT=str(OP_TIMEOUT)))
@pytest.mark.parametrize("schedule", ["one_sided", "plain", "pipelined"])
def test_a_stalled_rank_is_a_timeout_that_names_it(outcome: list[Trial], schedule: str) -> None:
    for trial in outcome:
        named = 0
        for report in trial.reports:
            assert report.error == "CollectiveTimeoutError" and not report.crash, trial
            assert "group" in report.again and "is unusable since" in report.again, trial
            if report.rank == trial.victim:
                continue
            assert report.at - trial.at < OP_TIMEOUT + NOTICE_SECONDS, trial
            # Op, call, this rank, and who was missing. Who notices second may blame the rank that gave up first. A
            # survivor may be a call ahead of the other, which it then names too, and says where it was last heard of.
            assert "call " in report.message and f"rank {report.rank}" in report.message, trial
            named += bool(
                re.search(
                    rf"\(FUSED_TP_TIMEOUT\) for ranks? (\d \(last heard[^)]*\)(, | and ))*{trial.victim}"
                    r"( \(last heard[^)]*\))?(( and |, )\d \(last heard[^)]*\))*, which had not arrived",
                    report.message,
                )
            )
        assert named >= (1 if schedule == "one_sided" else 2), trial


@beside(lambda: trials("massacre", "--count", "3", "--seed", "4"))
def test_nothing_is_left_when_all_ranks_are_killed(outcome: list[Trial]) -> None:
    for trial in outcome:
        assert trial.left_in_dev_shm == [], trial


def test_a_rank_that_leaves_is_lost_to_those_who_wait() -> None:
    for trial in trials("leave", "--count", "2", "--seed", "5"):
        assert len(trial.reports) == 2
        for report in trial.reports:
            assert report.error == "PeerLostError" and not report.crash, trial
            assert report.at - trial.at < 1.0, "noticed only when the process was gone"


def test_ctrl_c_ends_a_wait() -> None:
    found = trials("interrupt", "--count", "4", "--seed", "3", "--op", "matmul_all_reduce")
    assert {report.again for trial in found for report in trial.reports} == {"op", "rendezvous"}
    for trial in found:
        (report,) = trial.reports
        assert report.error == "KeyboardInterrupt" and report.at - trial.at < NOTICE_SECONDS, trial


def test_a_forked_child_does_not_speak_for_its_rank() -> None:
    (trial,) = trials("fork", "--count", "1", "--op", "matmul_all_reduce")
    for report in trial.reports:
        assert report.survivors_work and not report.crash, trial
        assert f"a fork of rank {report.rank}" in report.message, trial
