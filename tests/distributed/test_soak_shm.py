"""A short run of what `make soak` does to shared memory."""

from __future__ import annotations

import pytest

from tests import shm_soak

pytestmark = pytest.mark.full


def test_random_calls_over_overlapping_groups() -> None:
    assert "300 shared-memory calls" in shm_soak.soak(calls=300, seed=1)
