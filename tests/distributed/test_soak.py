"""One short round of `make soak` each way, so that the soak itself keeps working."""

from __future__ import annotations

import sys

import pytest

from tests import faults, shm_soak, soak

pytestmark = [pytest.mark.full, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /dev/shm")]


def test_a_round_of_random_calls() -> None:
    assert "growth" in soak.soak_round(seed=1, calls=12)


def test_killed_ranks() -> None:
    assert "all others noticed" in faults.kill_many(1, seed=1)


def test_random_calls_over_overlapping_groups() -> None:
    assert "300 shared-memory calls" in shm_soak.soak(calls=300, seed=1)
