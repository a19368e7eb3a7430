"""Memory of a ring on each rank: at most that of one rank with equally many tokens, plus two chunks of K/V."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from benchmarks.attention_memory import SHM_BY_CONFIG, RunSetting, measure_peak_mib
from fused_tp.attention import ring_plan as plan
from tests.workers import fresh_ranks

pytestmark = pytest.mark.full

TOKENS = 1024  # per rank; few tokens with many features need little compute
SETTING = RunSetting(heads=16, head_dim=128)


def mib(_: Any, way: str, world_size: int) -> float:
    plan._MIN_CHUNK_ROWS = 64  # eight parts, as with longer shards
    return measure_peak_mib(way, TOKENS * world_size, world_size, SETTING)


def peak(way: str, world_size: int) -> float:
    outcomes = fresh_ranks(world_size, mib, way, world_size, env={"FUSED_TP_SHM": SHM_BY_CONFIG[way]})
    return max(outcome.unwrap() for outcome in outcomes)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status, which only Linux has")
def test_memory_of_a_rank() -> None:
    ways = list(SHM_BY_CONFIG)
    alone = peak(ways[0], 1)
    # In sizes of q: q, k, v, the output and its gradient take 5; sums of dq, dk, dv in fp32 take 6; one of them rounded
    # takes 1; packed data of one head, sums of rows and loaded code take below 2.
    assert alone <= 14 * SETTING.kv_mib(TOKENS) / 2
    for way in ways:
        assert peak(way, 4) <= alone + 2 * SETTING.kv_mib(TOKENS), way
