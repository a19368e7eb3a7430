"""What a ring needs on each rank: no more than one rank with as many tokens, and two chunks of K/V."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from benchmarks.attention_memory import WAYS, Setting, peak_mib
from fused_tp.attention import ring
from tests.workers import fresh_ranks

pytestmark = pytest.mark.full

TOKENS = 1024  # on a rank; wide and short, which computes little
SETTING = Setting(heads=16, head_dim=128)


def mib(_: Any, way: str, world_size: int) -> float:
    ring._FEWEST_ROWS_OF_A_CHUNK = 64  # in eight parts, as longer shards are
    return peak_mib(way, TOKENS * world_size, world_size, SETTING)


def peak(way: str, world_size: int) -> float:
    outcomes = fresh_ranks(world_size, mib, way, world_size, env={"FUSED_TP_SHM": WAYS[way]})
    return max(outcome.unwrap() for outcome in outcomes)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status, which only Linux has")
def test_memory_of_a_rank() -> None:
    ways = list(WAYS)
    alone = peak(ways[0], 1)
    # In sizes of q: q, k, v, the output and its gradient 5; sums of dq, dk, dv in fp32 6; one of them rounded 1; what
    # is packed of one head, sums of rows, code that is loaded: below 2.
    assert alone <= 14 * SETTING.chunk_mib(TOKENS) / 2
    for way in ways:
        assert peak(way, 4) <= alone + 2 * SETTING.chunk_mib(TOKENS), way
