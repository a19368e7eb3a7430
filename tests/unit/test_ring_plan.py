"""The plan of ring attention: the steps of all ranks together are the mask, each pair once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fused_tp.schedules.ring_plan import LAYOUTS, RingPlan, check_layout, local_length, position_ranges

seq_lens, world_sizes, layouts = st.integers(0, 40), st.integers(1, 7), st.sampled_from(LAYOUTS)


def positions(seq_len: int, world_size: int, rank: int, layout: str) -> torch.Tensor:
    return torch.tensor([p for r in position_ranges(seq_len, world_size, rank, layout) for p in r], dtype=torch.long)


@given(seq_lens, world_sizes, layouts)
def test_ranks_hold_every_position_once_and_in_order(seq_len: int, world_size: int, layout: str) -> None:
    held = [positions(seq_len, world_size, rank, layout) for rank in range(world_size)]
    assert all(bool((p.diff() > 0).all()) for p in held)
    assert [len(p) for p in held] == [local_length(seq_len, world_size, rank, layout) for rank in range(world_size)]
    assert torch.cat(held).sort().values.tolist() == list(range(seq_len))
    assert max(map(len, held)) - min(map(len, held)) <= 2


@given(seq_lens, world_sizes, layouts, st.booleans())
def test_steps_cover_the_mask_exactly_once(seq_len: int, world_size: int, layout: str, causal: bool) -> None:
    plan = RingPlan(seq_len, world_size, layout, causal)
    seen = torch.zeros(seq_len, seq_len, dtype=torch.int)
    for rank in range(world_size):
        q_positions = positions(seq_len, world_size, rank, layout)
        for t in range(world_size):
            step, source = plan.step(rank, t), plan.source(rank, t)
            q, k = q_positions[step.q_start :], positions(seq_len, world_size, source, layout)[: step.kv_stop]
            assert step.empty == (len(q) == 0 or len(k) == 0)
            visible = torch.ones(len(q), len(k), dtype=torch.int)
            seen[q[:, None], k] += visible.tril() if step.causal else visible
    expected = torch.ones(seq_len, seq_len, dtype=torch.int)
    assert torch.equal(seen, expected.tril() if causal else expected)


@given(seq_lens, world_sizes, layouts, st.booleans())
def test_keys_travel_as_far_as_they_are_looked_at(seq_len: int, world_size: int, layout: str, causal: bool) -> None:
    plan = RingPlan(seq_len, world_size, layout, causal)
    for source in range(world_size):
        stops = {t: plan.step((source + t) % world_size, t).kv_stop for t in range(1, world_size)}
        assert plan.rows_sent(source) == max(stops.values(), default=0)
        assert plan.last_step(source) == max((t for t, stop in stops.items() if stop), default=0)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_zigzag_gives_all_ranks_the_same_causal_work(world_size: int) -> None:
    seq_len = 2 * world_size * 16
    plan = RingPlan(seq_len, world_size, "zigzag", causal=True)
    work = set()
    for rank in range(world_size):
        pairs = 0
        for t in range(world_size):
            step = plan.step(rank, t)
            rows = plan.lengths[rank] - step.q_start
            pairs += rows * (rows + 1) // 2 if step.causal else rows * step.kv_stop
        work.add(pairs)
    assert work == {seq_len * (seq_len + 1) // 2 // world_size}


def test_equal_shards_need_no_seq_len() -> None:
    for layout in LAYOUTS:
        for world_size in range(1, 6):
            for length in range(6):
                held = {local_length(length * world_size, world_size, rank, layout) for rank in range(world_size)}
                assert held == {length}


def test_unknown_layout() -> None:
    with pytest.raises(ValueError, match="layout is 'stripe'; it must be one of 'zigzag', 'contiguous'"):
        check_layout("stripe")
