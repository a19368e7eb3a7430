"""Ranks that die, stall, leave or are interrupted (tests/faults.py): a sample; `make soak` runs many more.

After a lost peer or a missed deadline a group is unusable and says so; the process and its other groups go on.
"""

from __future__ import annotations

import sys

import pytest

from tests.faults import NOTICE_SECONDS, check_killed, op_names, trials

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks ranks, reads /proc and /dev/shm")

OP_TIMEOUT = 1.5


def test_a_killed_rank_is_noticed_by_all_others() -> None:
    found = trials("kill", "--count", str(len(op_names())), "--seed", "1")
    assert {trial.op for trial in found} == set(op_names())
    for trial in found:
        check_killed(trial)


@pytest.mark.parametrize("schedule", ["plain", "pipelined"])
def test_a_killed_rank_is_noticed_without_shared_memory_too(schedule: str) -> None:
    for trial in trials("kill", "--count", "3", "--seed", "2", "--schedule", schedule, FUSED_TP_TIMEOUT="5"):
        check_killed(trial)


def test_a_stalled_rank_is_a_timeout_that_names_it() -> None:
    for trial in trials("stall", "--count", "2", "--seed", "3", FUSED_TP_TIMEOUT=str(OP_TIMEOUT)):
        named = 0
        for report in trial.reports:
            assert report.error == "CollectiveTimeoutError" and not report.crash, trial
            assert report.again.startswith("CollectiveTimeoutError: this group is unusable"), trial
            if report.rank == trial.victim:
                continue
            assert report.at - trial.at < OP_TIMEOUT + NOTICE_SECONDS, trial
            # Op, call, this rank, and who was missing. Who notices second may blame the rank that gave up first.
            assert ", call " in report.message and f"rank {report.rank}" in report.message, trial
            named += f"(FUSED_TP_TIMEOUT) for rank {trial.victim}, which had not arrived" in report.message
        assert named >= 1, trial


def test_nothing_is_left_when_all_ranks_are_killed() -> None:
    for trial in trials("massacre", "--count", "3", "--seed", "4"):
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
