"""A short round of each mode of `make soak`, which tests the soak itself; and a sample of its faults."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest

from tests import shm_soak, soak
from tests.campaign import FAULTS, campaign

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /dev/shm"),
    pytest.mark.skipif(find_spec("fused_tp._core") is None, reason="needs the native core: pip install -e ."),
]


@pytest.mark.full
def test_faults_are_met_as_the_campaign_says() -> None:
    tally = campaign(25, seed=43)  # one batch with every fault
    assert not tally.wrong, "\n".join(tally.wrong)
    assert all(tally.counts[name]["injected"] for name in FAULTS)


@pytest.mark.full
def test_a_round_of_random_calls() -> None:
    assert "growth" in soak.soak_round(seed=1, calls=12)


@pytest.mark.full
def test_random_calls_over_overlapping_groups() -> None:
    assert "300 shared-memory calls" in shm_soak.soak(calls=300, seed=1)
