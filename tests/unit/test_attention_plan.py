"""Masks, layouts and steps of attention over sharded sequences, against a dense mask from first principles."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fused_tp.attention import ring_fused
from fused_tp.attention.all_to_all import TensorShare, row_ranges_in_sequence
from fused_tp.attention.layout import DOCUMENT_LAYOUTS, LAYOUTS, TokenLayout, TokenRanges, local_length, tokens_by_rank
from fused_tp.attention.ring_fused import kv_chunks
from fused_tp.attention.ring_plan import RingPlan, RowRanges, Step, compact_index, expand_index, make_step
from fused_tp.attention.spec import AttentionMask, read_bounds
from tests.attention_reference import dense


@dataclass(frozen=True)
class Case:
    """A mask, and documents as (queries, keys) lengths; one sequence if not `packed`."""

    documents: tuple[tuple[int, int], ...]
    packed: bool
    causal: bool
    window: tuple[int, int]
    own_keys: bool = False  # queries and keys are the same tokens, and their bounds are given once

    @property
    def lengths(self) -> tuple[int, int]:
        return sum(q for q, _ in self.documents), sum(k for _, k in self.documents)

    def shareable(self, layout: str, world_size: int) -> Case:
        """Case with document lengths that ranks can share in `layout`."""
        if not layout.endswith("_documents"):
            return self
        return replace(self, documents=tuple((q * world_size, k * world_size) for q, k in self.documents))

    def mask(self) -> AttentionMask:
        bounds: list[tuple[int, ...]] = [(), ()]
        if self.packed:
            bounds = [tuple(accumulate((pair[i] for pair in self.documents), initial=0)) for i in (0, 1)]
        if self.own_keys:
            bounds[1] = ()
        return AttentionMask(*self.lengths, self.causal, self.window, *bounds)

    def dense(self) -> NDArray[np.bool_]:
        return dense(self.mask())[0].numpy()


lengths = st.one_of(st.integers(0, 12), st.sampled_from([0, 1, 1]))
windows = st.tuples(*[st.one_of(st.just(-1), st.integers(0, 6))] * 2)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    own_keys = draw(st.booleans())
    queries = draw(st.lists(lengths, min_size=1, max_size=5))
    keys = queries if own_keys else [draw(lengths) for _ in queries]
    pairs = tuple(zip(queries, keys, strict=True))
    return Case(pairs, draw(st.booleans()), draw(st.booleans()), draw(windows), own_keys)


layouts, world_sizes = st.sampled_from(LAYOUTS), st.integers(1, 5)


def plan_of(case: Case, world_size: int, layout: str) -> RingPlan:
    layout = layout if case.packed or layout not in DOCUMENT_LAYOUTS else "zigzag"
    return RingPlan(case.mask(), world_size, TokenLayout(layout))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_a_mask_is_an_interval_for_each_query(case: Case) -> None:
    dense = case.dense()
    places, starts, stops = case.mask().visible_intervals(np.arange(case.lengths[0]))
    keys = np.arange(case.lengths[1])
    assert np.array_equal((keys >= starts[:, None]) & (keys < stops[:, None]), dense)
    assert (np.diff(starts) >= 0).all() and (np.diff(stops) >= 0).all() and (starts <= stops).all()
    if case.own_keys:
        assert np.array_equal(places, np.arange(len(places)))
    if len(places):
        some = np.arange(0, len(places), 2)
        assert all(
            np.array_equal(a[some], b)
            for a, b in zip((places, starts, stops), case.mask().visible_intervals(some), strict=True)
        )


@settings(max_examples=100, deadline=None)
@given(st.lists(lengths, min_size=1, max_size=8), world_sizes, layouts)
def test_ranks_hold_every_token_once(documents: list[int], world_size: int, layout: str) -> None:
    scale = world_size if layout.endswith("_documents") else 1
    bounds = tuple(accumulate((length * scale for length in documents), initial=0))
    held = tokens_by_rank(bounds[-1], world_size, layout, bounds)
    assert sorted(np.concatenate([tokens.indices for tokens in held])) == list(range(bounds[-1]))
    for rank, tokens in enumerate(held):
        assert tokens.length == len(tokens.indices) == local_length(bounds[-1], world_size, rank, layout)
        jumps = [i for i in range(tokens.length) if i == 0 or tokens.indices[i] != tokens.indices[i - 1] + 1]
        assert tokens.breaks.tolist() == jumps
        anywhere = np.arange(-1, bounds[-1] + 2)
        assert np.array_equal(tokens.count_before(anywhere), np.searchsorted(tokens.indices, anywhere))


def seen_by(step: Step) -> NDArray[np.bool_]:
    keys = np.arange(step.num_keys)
    return (keys >= step.starts[:, None]) & (keys < step.stops[:, None])


def check_step(step: Step, queries: NDArray[np.int64], keys: NDArray[np.int64], dense: NDArray[np.bool_]) -> None:
    """Compare all properties of a step with the dense mask between these tokens of two ranks."""
    here = dense[np.ix_(queries, keys)]
    rows, columns = slice(step.q_start, step.q_stop), slice(step.k_start, step.k_stop)
    counted, inside = np.zeros_like(here), seen_by(step)
    counted[rows, columns] = inside
    assert np.array_equal(counted, here)
    assert step.is_empty == (not here.any())
    if step.is_empty:
        assert step.num_rows == step.num_keys == 0
    else:  # no row or column more than needed
        assert inside[0].any() and inside[-1].any() and inside[:, 0].any() and inside[:, -1].any()
    assert step.is_full == inside.all()
    assert np.array_equal(step.q_indices, queries[rows]) and np.array_equal(step.k_indices, keys[columns])
    for breaks, indices in ((step.q_breaks, step.q_indices), (step.k_breaks, step.k_indices)):
        assert breaks == tuple(int(i) + 1 for i in np.flatnonzero(np.diff(indices) != 1))
    first, last = step.queries_per_key
    i = np.arange(step.num_rows)[:, None]
    assert np.array_equal((i >= first) & (i < last), inside)
    assert first.dtype == last.dtype == step.starts.dtype == step.stops.dtype == np.int32
    on = step.index_tensors_on(torch.device("cpu"))
    for name in ("starts", "stops", "q_positions", "q_indices", "k_indices"):
        assert on[name].dtype == torch.int32 and np.array_equal(on[name], getattr(step, name))
    assert np.array_equal(on["query_stops"], last) and np.array_equal(on["query_starts"], first)
    assert step.index_tensors_on(torch.device("cpu")) is on


def check_compact(
    found: Step,
    rows: RowRanges,
    step: Step,
    queries: NDArray[np.int64],
    keys: NDArray[np.int64],
    dense: NDArray[np.bool_],
) -> None:
    """Check that `found` sees in these rows, stored without holes, the same keys as `step` in all rows."""
    if len(rows.ranges) < 2:
        assert found is step
        return
    before = rows.ranges[0].start  # rows before the view count, too
    assert [compact_index(rows, int(row)) for row in rows.indices] == list(range(before, before + rows.length))
    shown = np.concatenate([keys[:before], keys[rows.indices]])
    check_step(found, queries, shown, dense & np.isin(np.arange(dense.shape[1]), keys[rows.indices]))
    assert seen_by(found).sum() == seen_by(step).sum()
    parts = [expand_index(rows, range(before + i, before + i + 3)).indices for i in range(0, rows.length, 3)]
    assert np.array_equal(np.concatenate(parts), rows.indices)


@settings(max_examples=150, deadline=None)
@given(cases(), world_sizes, layouts)
@example(Case(((40, 40),), False, True, (2, 3)), 2, "zigzag")
@example(Case(((4, 2), (3, 5)), True, True, (-1, -1)), 3, "balanced")
@example(Case(((8, 8), (0, 0), (4, 4), (12, 12)), True, True, (5, -1)), 2, "zigzag_documents")
@example(Case(((0, 4), (5, 0), (1, 1)), True, False, (2, 0)), 2, "zigzag")
def test_steps_cover_the_mask_exactly_once(case: Case, world_size: int, layout: str) -> None:
    case = case.shareable(layout, world_size)
    plan, dense = plan_of(case, world_size, layout), case.dense()
    whole, places = np.zeros(dense.shape, dtype=int), case.mask().visible_intervals(np.arange(dense.shape[0]))[0]
    for rank in range(world_size):
        queries = plan.queries[rank].indices
        for t in range(world_size):
            source = plan.source_rank(rank, t)
            assert source == (rank - t) % world_size
            keys = plan.keys[source].indices
            needed = plan.needed_rows(rank, source)
            step = plan.step(rank, t)
            assert step is plan.step(rank, t)
            check_step(step, queries, keys, dense)
            assert np.array_equal(step.q_positions, places[step.q_indices])
            here = dense[np.ix_(queries, keys)]
            seen = np.flatnonzero(here.any(0))
            assert set(seen) <= set(needed.indices) and len(needed.ranges) <= max(1, len(plan.queries[rank].ranges))
            if case.own_keys:
                assert set(seen) == set(needed.indices)  # no key is sent in vain
            for rows in (needed, plan.shared_rows(source)) if source != rank else ():
                check_compact(plan.step(rank, t, rows), rows, step, queries, keys, dense)
            whole[np.ix_(step.q_indices, step.k_indices)] += seen_by(step)
    assert np.array_equal(whole, dense)


@settings(max_examples=100, deadline=None)
@given(cases(), st.data())
def test_a_part_of_a_step_is_a_part_of_its_mask(case: Case, data: st.DataObject) -> None:
    queries, keys = (TokenRanges((range(length),) if length else ()) for length in case.lengths)
    step = make_step(case.mask(), queries, keys)
    q_start, q_stop = sorted(data.draw(st.tuples(*[st.integers(0, step.num_rows)] * 2)))
    k_start, k_stop = sorted(data.draw(st.tuples(*[st.integers(0, step.num_keys)] * 2)))
    part = step.sub_step(q_start, q_stop, k_start, k_stop)
    assert np.array_equal(seen_by(part), case.dense()[np.ix_(part.q_indices, part.k_indices)])
    assert (part.q_start, part.q_stop) == (step.q_start + q_start, step.q_start + q_stop)


def test_a_window_does_not_go_round_the_ring() -> None:
    plan = RingPlan(AttentionMask(4096, 4096, causal=True, window=(63, 0)), 8, TokenLayout("contiguous"))
    assert [plan.needed_rows(3, source).length for source in range(8)] == [0, 0, 63, 512, 0, 0, 0, 0]
    assert [plan.step(3, t).is_empty for t in range(8)] == [False, False] + [True] * 6


def test_bounds_of_documents_end_with_the_sequence() -> None:
    for bounds in ((0, 3), (0, 5, 4), (0, 2, 5)):
        with pytest.raises(ValueError, match=r"cu_seqlens is \(.*\); it must begin with 0, .* must end with 4, "):
            read_bounds("cu_seqlens", torch.tensor(bounds), 4)
    assert read_bounds("cu_seqlens", torch.tensor([0, 0, 4, 4]), 4) == (0, 0, 4, 4)


def test_a_window_to_both_sides_leaves_holes() -> None:
    """Rank 0 of 2 needs the beginning and the end of its neighbour's shard, and nothing in between."""
    plan = RingPlan(AttentionMask(4096, 4096, window=(50, 30)), 2, TokenLayout("zigzag"))
    assert plan.needed_rows(0, 1).ranges == plan.shared_rows(1).ranges == (range(30), range(1998, 2048))
    assert sum(len(chunk.rows) for chunk in kv_chunks(plan, 0).peer_chunks) == kv_chunks(plan, 0).max_peer_rows == 80
    assert plan.needed_rows(1, 0).ranges == (range(974, 1054),)
    many = RingPlan(AttentionMask(4096, 4096, window=(3, 2)), 2, TokenLayout("zigzag", 32, strided=True))
    assert len(many.queries[0].ranges) > len(many.needed_rows(0, 1).ranges) == 8  # one range for many: few messages


@settings(max_examples=60, deadline=None)
@given(cases(), world_sizes, layouts, st.tuples(st.sampled_from([4, 16]), st.sampled_from([4, 8])))
def test_chunks_of_a_launch_have_what_each_query_sees(
    case: Case, world_size: int, layout: str, size: tuple[int, int]
) -> None:
    """Each query finds each visible key once, within its tile's bounds; unmasked blocks are visible entirely."""
    case = case.shareable(layout, world_size)
    plan = plan_of(case, world_size, layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring_fused, "_MAX_CHUNK_ROWS", 7)
        for rank in range(world_size):
            everything = kv_chunks(plan, rank)
            tables = {name: t.numpy() for name, t in everything.tables_on(torch.device("cpu"), *size).items()}
            assert sum(len(chunk.rows) for chunk in everything.peer_chunks) <= everything.max_peer_rows
            _, starts, stops = plan.visible_intervals(rank)
            found: list[list[int]] = [[] for _ in range(plan.queries[rank].length)]
            covered = np.zeros(len(found), int)
            for (row, row_end), tile in zip(tables["tiles"], tables["bounds"], strict=True):
                covered[row:row_end] += 1
                for number, (begin, end, full_begin, full_end) in enumerate(tile):
                    indices = tables["k_indices"][tables["chunks"][number, 2] :]
                    for i in range(row, row_end):
                        first, last = tables["starts"][number, i], tables["stops"][number, i]
                        assert (full_end - full_begin) % size[1] == 0 and (full_begin - begin) % size[1] == 0
                        assert full_begin == full_end or (first <= full_begin and full_end <= last)
                        assert last <= first or begin <= first <= last <= end
                        found[i] += indices[first:last].tolist()
            assert (covered == 1).all()
            for i, keys in enumerate(found):
                assert sorted(keys) == list(range(starts[i], stops[i]))


def test_heads_that_only_one_rank_reads() -> None:
    """Heads of one reader need not be written to memory that other ranks read."""
    places = row_ranges_in_sequence(tuple(tokens_by_rank(10, 3, "zigzag")))
    share = TensorShare(places, (range(1), range(2), range(1, 2)), 2)
    assert [list(share.exclusive_heads(rank)) for rank in range(3)] == [[], [], []]
    assert share.has_repeated_heads and not share.is_even
    share = TensorShare(places, (range(2), range(2, 4), range(3, 5)), 5)
    assert [list(share.exclusive_heads(rank)) for rank in range(3)] == [[0, 1], [2], [4]]
