"""Steps of ring attention: the keys of each rank that a rank's queries see, and the key rows that are sent.

At step t rank r reads the keys of rank (r - t) mod W; step 0 reads its own keys. A step consists of the rows of queries
that see any of these keys, the rows of keys that are seen, and an interval [start, stop) of these keys for each query,
in local indices. Both ends of the intervals are ascending, so the queries that see a key form an interval, too.

If ranks hold several ranges of tokens, the key rows that a rank reads may be several ranges with holes between them.
For example, with a two-sided window a zigzag rank reads the beginning and the end of a neighbor's shard. Holes are not
sent. The step that reads the received rows has compact row indices, which do not count the holes (`compact_step`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fused_tp.attention.balance import merge_ranges
from fused_tp.attention.layout import Int64s, TokenLayout, TokenRanges
from fused_tp.attention.spec import AttentionMask

Int32s = np.ndarray[Any, np.dtype[np.int32]]
RowRanges: TypeAlias = TokenRanges  # ranges of rows of a rank's keys, in local indices
_MAX_RANGES = 8  # maximum ranges that a rank reads of another rank's keys: each range costs one copy
# Maximum chunks per step. With 8 chunks and bf16 inputs, the buffers (three of fp32 gradients and two of keys, each for
# one chunk) take as much memory as the K/V of one shard.
_MAX_CHUNKS = 8
_MIN_CHUNK_ROWS = 2048

# Position, start and stop of each query, as in `AttentionMask.visible_intervals`.
_VisibleIntervals = tuple[Int64s, Int64s, Int64s]


@dataclass(frozen=True, eq=False)
class Step:
    """Local queries [q_start, q_stop) against the source's keys [k_start, k_stop).

    Attributes:
        starts, stops: int32 [q_stop - q_start]; query q_start + i sees the keys k_start + [starts[i], stops[i]).
        q_positions: int64 [q_stop - q_start], positions of the queries on the axis of the keys; see `AttentionMask`.
        q_indices, k_indices: int64, global indices of these queries and keys.
        q_breaks, k_breaks: rows, relative to q_start and k_start, at which a new range of global indices begins;
            ascending, without 0.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    starts: Int32s
    stops: Int32s
    q_positions: Int64s
    q_indices: Int64s
    k_indices: Int64s
    q_breaks: tuple[int, ...]
    k_breaks: tuple[int, ...]

    @cached_property
    def num_rows(self) -> int:
        return self.q_stop - self.q_start

    @cached_property
    def num_keys(self) -> int:
        return self.k_stop - self.k_start

    @cached_property
    def is_empty(self) -> bool:
        return self.num_rows == 0

    @cached_property
    def is_full(self) -> bool:
        """True if every query of the step sees every key."""
        return bool((self.starts == 0).all() and (self.stops == self.num_keys).all())

    @cached_property
    def queries_per_key(self) -> tuple[Int32s, Int32s]:
        """Return int32 (query_starts, query_stops), both [keys].

        The queries q_start + [query_starts[j], query_stops[j]) see key k_start + j.
        """
        return _compute_queries_per_key(self.starts, self.stops, self.num_keys)

    def sub_step(self, q_start: int, q_stop: int, k_start: int, k_stop: int) -> Step:
        """Return the step of queries [q_start, q_stop) and keys [k_start, k_stop), relative to this step's; cached."""
        key = q_start, q_stop, k_start, k_stop
        if key not in self._sub_steps:
            self._sub_steps[key] = _make_sub_step(self, *key)
        return self._sub_steps[key]

    @cached_property
    def _sub_steps(self) -> dict[tuple[int, int, int, int], Step]:
        return {}

    @cached_property
    def native_vectors(self) -> dict[bool, Any]:
        """Cache of the addresses that the native kernels read, and of the tensors there; see `kernels.native`."""
        return {}

    @cached_property
    def _device_vectors(self) -> dict[torch.device, _DeviceVectors]:
        return {}

    def index_tensors_on(self, device: torch.device) -> dict[str, Tensor]:
        """Map names to int32 tensors on `device`: this step's vectors, and those of `queries_per_key`."""
        if device not in self._device_vectors:
            self._device_vectors[device] = _DeviceVectors(self, device)
        return self._device_vectors[device]


class _DeviceVectors(dict[str, Tensor]):
    """Vectors of a step on one device. A vector is copied at its first use: they are large, and few calls use all."""

    def __init__(self, step: Step, device: torch.device) -> None:
        self._device, self._num_keys = device, step.num_keys
        names = ("starts", "stops", "q_positions", "q_indices", "k_indices")
        self._arrays: dict[str, np.ndarray[Any, Any]] = {name: getattr(step, name) for name in names}

    def __missing__(self, name: str) -> Tensor:
        if name in ("query_starts", "query_stops"):
            queries_per_key = _compute_queries_per_key(self._arrays["starts"], self._arrays["stops"], self._num_keys)
            self._arrays.update(zip(("query_starts", "query_stops"), queries_per_key, strict=True))
        self[name] = torch.from_numpy(self._arrays[name].astype(np.int32, copy=False)).to(self._device)
        return self[name]


class KVView(Enum):
    """Rows of another rank's keys that a rank can access."""

    FULL = "all rows"
    UNION = "rows that any other rank reads"
    NEEDED = "rows that this rank reads"


class RingPlan:
    """The steps of all ranks for one mask, layout and group size."""

    def __init__(self, mask: AttentionMask, world_size: int, layout: TokenLayout) -> None:
        self.mask = mask
        self.world_size = world_size
        self.layout = layout
        self.queries = layout.tokens(mask.seq_len, world_size, mask.cu_seqlens)
        self.keys = layout.tokens(mask.seq_len_kv, world_size, mask.cu_seqlens_kv)
        self._steps: dict[tuple[int, int], Step] = {}
        self._compact_steps: dict[tuple[int, int, RowRanges], Step] = {}
        self._extents: dict[tuple[int, int], tuple[range, RowRanges]] = {}
        self._shared_rows: dict[int, RowRanges] = {}
        self._rank_plans: dict[tuple[int, KVView], RankPlan] = {}
        self._last_visible_intervals: tuple[int, _VisibleIntervals] | None = None
        self.kv_chunks: dict[int, Any] = {}  # by rank; see `ring_fused`

    def source_rank(self, rank: int, t: int) -> int:
        """Return the rank whose keys `rank` reads at step t."""
        return (rank - t) % self.world_size

    def step(self, rank: int, t: int, view: RowRanges | None = None) -> Step:
        """Return the step that `rank` computes at t.

        If only the rows `view` of the source's keys are present, and they have holes, return the compact step.
        """
        if view is not None and len(view.ranges) > 1:
            key = rank, t, view
            if key not in self._compact_steps:
                self._compact_steps[key] = compact_step(self.step(rank, t), view)
            return self._compact_steps[key]
        source = self.source_rank(rank, t)
        if (rank, source) not in self._steps:
            rows, _ = self._extent(rank, source)
            self._steps[rank, source] = _make_step(
                self.visible_intervals(rank), rows, self.queries[rank], self.keys[source]
            )
        return self._steps[rank, source]

    def rank_plan(self, rank: int, view: KVView = KVView.FULL) -> RankPlan:
        """Return the steps and transfers of `rank` if it can access the rows `view` of other ranks' keys."""
        if (rank, view) not in self._rank_plans:
            self._rank_plans[rank, view] = RankPlan(self, rank, view)
        return self._rank_plans[rank, view]

    def visible_intervals(self, rank: int) -> tuple[Int64s, Int64s, Int64s]:
        """Return (position, start, stop) of each query of `rank`, as in `AttentionMask.visible_intervals`."""
        # Only the last rank is cached: a process usually computes the steps of one rank.
        cached_intervals = self._last_visible_intervals  # read once: another thread may replace it
        if cached_intervals is None or cached_intervals[0] != rank:
            cached_intervals = self._last_visible_intervals = (
                rank,
                self.mask.visible_intervals(self.queries[rank].indices),
            )
        return cached_intervals[1]

    def needed_rows(self, rank: int, source: int) -> RowRanges:
        """Return the rows of the keys of `source` that `rank` reads; computed without building the step."""
        return self._extent(rank, source)[1]

    def shared_rows(self, source: int) -> RowRanges:
        """Return the rows of the keys of `source` that any other rank reads."""
        if source not in self._shared_rows:
            read_ranges = (self.needed_rows(rank, source).ranges for rank in range(self.world_size) if rank != source)
            self._shared_rows[source] = RowRanges(merge_ranges(itertools.chain.from_iterable(read_ranges)))
        return self._shared_rows[source]

    def _extent(self, rank: int, source: int) -> tuple[range, RowRanges]:
        if (rank, source) not in self._extents:
            self._extents[rank, source] = _compute_extent(self.mask, self.queries[rank], self.keys[source])
        return self._extents[rank, source]


class Chunk(NamedTuple):
    """Part of step t, with its transfers.

    Attributes:
        source: rank whose keys this rank reads.
        consumer: rank that reads this rank's keys.
        recv_rows: rows of the keys of `source` that this rank reads, as indices in its view of these keys.
        send_rows: rows of this rank's keys that `consumer` reads.
    """

    t: int
    source: int
    consumer: int
    recv_rows: range
    send_rows: RowRanges


class RankPlan:
    """The steps and transfers of one rank in `plan`; computed at first use and kept."""

    def __init__(self, plan: RingPlan, rank: int, kv_view: KVView) -> None:
        self.plan = plan
        self.rank = rank
        self.kv_view = kv_view
        self.layouts: dict[Any, Any] = {}  # memory layouts by shapes of k and v; see `ring_shared_memory`

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The step at each t; key indices are relative to this rank's view of the keys."""
        sources = [self.plan.source_rank(self.rank, t) for t in range(self.plan.world_size)]
        return tuple(
            self.plan.step(self.rank, t, self._view_rows(self.rank, source) if t else None)
            for t, source in enumerate(sources)
        )

    @cached_property
    def unsplit_steps(self) -> tuple[Chunk, ...]:
        """The steps after step 0, each as one chunk."""
        return self._split_steps(1, max(tokens.length for tokens in self.plan.keys))

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """The steps after step 0, split into chunks. Every rank has the same number of chunks."""
        max_rows = max(tokens.length for tokens in self.plan.keys)
        chunk_rows = max(_MIN_CHUNK_ROWS, -(-max_rows // _MAX_CHUNKS))
        return self._split_steps(max(1, -(-max_rows // chunk_rows)), chunk_rows)

    def _split_steps(self, chunks_per_step: int, chunk_rows: int) -> tuple[Chunk, ...]:
        """Split the steps after step 0 into `chunks_per_step` chunks each, of up to `chunk_rows` rows."""
        chunks, world_size = [], self.plan.world_size
        for t in range(1, world_size):
            source, consumer = self.plan.source_rank(self.rank, t), (self.rank + t) % world_size
            recv_range, send_range = self._read_range(self.rank, source), self._read_range(consumer, self.rank)
            view_rows = self._view_rows(consumer, self.rank)
            for index in range(chunks_per_step):
                recv_rows, send_indices = (
                    _chunk_rows(recv_range, index, chunk_rows),
                    _chunk_rows(send_range, index, chunk_rows),
                )
                send_rows = (
                    RowRanges((send_indices,) if send_indices else ())
                    if view_rows is None
                    else expand_index(view_rows, send_indices)
                )
                chunks.append(Chunk(t, source, consumer, recv_rows, send_rows))
        return tuple(chunks)

    def _read_range(self, reader: int, source: int) -> range:
        """Return the range from the first to the last key of `source` that rank `reader` reads, in its view."""
        needed_ranges, view = self.plan.needed_rows(reader, source).ranges, self._view_rows(reader, source)
        if not needed_ranges or view is None:
            return range(needed_ranges[0].start, needed_ranges[-1].stop) if needed_ranges else range(0)
        return range(compact_index(view, needed_ranges[0].start), compact_index(view, needed_ranges[-1].stop))

    def _view_rows(self, reader: int, source: int) -> RowRanges | None:
        """Return the rows of the keys of `source` that rank `reader` can access; None: all rows."""
        if self.kv_view is KVView.FULL:
            return None
        return self.plan.shared_rows(source) if self.kv_view is KVView.UNION else self.plan.needed_rows(reader, source)


def _chunk_rows(rows: range, index: int, chunk_rows: int) -> range:
    start = min(rows.start + index * chunk_rows, rows.stop)
    return range(start, min(start + chunk_rows, rows.stop))


def make_step(mask: AttentionMask, queries: TokenRanges, keys: TokenRanges) -> Step:
    """Build the step of the queries `queries` and the keys `keys` under `mask`."""
    rows, _ = _compute_extent(mask, queries, keys)
    return _make_step(mask.visible_intervals(queries.indices), rows, queries, keys)


def _make_step(intervals: _VisibleIntervals, rows: range, queries: TokenRanges, keys: TokenRanges) -> Step:
    """Build a step. `intervals` has an entry for each of `queries`; only queries in `rows` see any of `keys`."""
    q_positions, starts, stops = (vector[rows.start : rows.stop] for vector in intervals)
    starts, stops = keys.count_before(starts), keys.count_before(stops)
    sees_any = stops > starts
    if not sees_any.any():
        no_positions = np.empty(0, dtype=np.int64)
        no_intervals = no_positions.astype(np.int32)
        return Step(0, 0, 0, 0, no_intervals, no_intervals, no_positions, no_positions, no_positions, (), ())
    start, stop = int(sees_any.argmax()), len(sees_any) - int(sees_any[::-1].argmax())
    k_start, k_stop = int(starts[start]), int(stops[stop - 1])
    q_start, q_stop = rows.start + start, rows.start + stop
    return Step(
        q_start,
        q_stop,
        k_start,
        k_stop,
        (starts[start:stop] - k_start).astype(np.int32),
        (stops[start:stop] - k_start).astype(np.int32),
        q_positions[start:stop],
        queries.indices[q_start:q_stop],
        keys.indices[k_start:k_stop],
        _breaks_inside(queries.breaks, q_start, q_stop),
        _breaks_inside(keys.breaks, k_start, k_stop),
    )


def _compute_queries_per_key(starts: Int32s, stops: Int32s, num_keys: int) -> tuple[Int32s, Int32s]:
    query_starts, query_stops = _count_ends(stops, num_keys), _count_ends(starts, num_keys)
    return query_starts, np.maximum(query_starts, query_stops)


def _count_ends(ends: Int32s, num_keys: int) -> Int32s:
    """Return the number of `ends` <= j for each key j, int32; like np.searchsorted in ascending `ends`, but faster."""
    return np.cumsum(np.bincount(ends, minlength=num_keys + 1)[:num_keys], dtype=np.int32)


def _breaks_inside(breaks: Int64s, start: int, stop: int) -> tuple[int, ...]:
    return tuple(int(b) - start for b in breaks if start < b < stop)


def _compute_extent(mask: AttentionMask, queries: TokenRanges, keys: TokenRanges) -> tuple[range, RowRanges]:
    """Return (rows of the queries that see any of `keys`, without gaps; rows of `keys` that any query sees).

    Each range of key rows extends from the first to the last key that one range of queries sees. The ends of the
    intervals ascend within a range of queries, so only its first and last query are evaluated.
    """
    ends = np.asarray([end for r in queries.ranges for end in (r.start, r.stop - 1)], dtype=np.int64)
    _, starts, stops = mask.visible_intervals(ends)
    key_starts, key_stops = keys.count_before(starts[0::2]), keys.count_before(stops[1::2])
    nonempty_ranges = np.flatnonzero(key_stops > key_starts)
    if not len(nonempty_ranges):
        return range(0), RowRanges(())
    first_range, last_range = int(nonempty_ranges[0]), int(nonempty_ranges[-1])
    rows = range(int(queries.breaks[first_range]), int(queries.breaks[last_range]) + len(queries.ranges[last_range]))
    key_starts, key_stops = key_starts[nonempty_ranges], np.maximum.accumulate(key_stops[nonempty_ranges])
    # Keep only the widest holes, which limits the number of ranges if there are many short documents.
    holes = key_starts[1:] - key_stops[:-1]
    widest_holes = np.argsort(-holes, kind="stable")[: _MAX_RANGES - 1]
    kept_holes = np.sort(widest_holes[holes[widest_holes] > 0])
    begins, ends = key_starts[np.concatenate(([0], kept_holes + 1))], key_stops[np.concatenate((kept_holes, [-1]))]
    return rows, RowRanges(tuple(range(int(a), int(b)) for a, b in zip(begins, ends, strict=True)))


def compact_index(view: RowRanges, row: int) -> int:
    """Return the index of `row` (or of the stop of a range) among the rows of `view`; the first row keeps its index."""
    return view.ranges[0].start + int(view.count_before(np.asarray([row]))[0]) if view.ranges else 0


def expand_index(view: RowRanges, indices: range) -> RowRanges:
    """Return the rows of `view` at the compact indices `indices`: the inverse of `compact_index`."""
    rows, index = [], view.ranges[0].start if view.ranges else 0
    for r in view.ranges:
        start, stop = max(indices.start, index), min(indices.stop, index + len(r))
        if start < stop:
            rows.append(range(r.start + start - index, r.start + stop - index))
        index += len(r)
    return RowRanges(tuple(rows))


def compact_step(step: Step, view: RowRanges) -> Step:
    """Convert `step` to the row indices of keys of which only the rows `view` are present.

    `view` must contain all rows that the step's queries see.
    """
    if step.is_empty:
        return step
    present_ranges = (range(max(r.start, step.k_start), min(r.stop, step.k_stop)) for r in view.ranges)
    k_start = compact_index(view, step.k_start)
    offset = view.ranges[0].start - k_start
    starts, stops = (
        (view.count_before(ends.astype(np.int64) + step.k_start) + offset).astype(np.int32)
        for ends in (step.starts, step.stops)
    )
    k_indices = np.concatenate(
        [step.k_indices[r.start - step.k_start : r.stop - step.k_start] for r in present_ranges if r]
    )
    return replace(
        step,
        k_start=k_start,
        k_stop=k_start + len(k_indices),
        starts=starts,
        stops=stops,
        k_indices=k_indices,
        k_breaks=tuple(int(i) + 1 for i in np.flatnonzero(np.diff(k_indices) != 1)),
    )


@lru_cache(maxsize=8)
def ring_plan(mask: AttentionMask, world_size: int, layout: TokenLayout) -> RingPlan:
    """Return the plan for a mask, group size and layout; cached.

    Few plans are kept: a plan takes some bytes per token and step, and every batch of documents needs another plan.
    """
    return RingPlan(mask, world_size, layout)


def _make_sub_step(step: Step, q_start: int, q_stop: int, k_start: int, k_stop: int) -> Step:
    rows, keys = slice(q_start, q_stop), slice(k_start, k_stop)
    return Step(
        step.q_start + q_start,
        step.q_start + q_stop,
        step.k_start + k_start,
        step.k_start + k_stop,
        np.clip(step.starts[rows], k_start, k_stop) - np.int32(k_start),
        np.clip(step.stops[rows], k_start, k_stop) - np.int32(k_start),
        step.q_positions[rows],
        step.q_indices[rows],
        step.k_indices[keys],
        tuple(b - q_start for b in step.q_breaks if q_start < b < q_stop),
        tuple(b - k_start for b in step.k_breaks if k_start < b < k_stop),
    )


def restrict_to_keys(step: Step, k_start: int, k_stop: int, *, cache_result: bool) -> Step:
    """Restrict `step` to the keys [k_start, k_stop), indexed like `Step.k_start`, and the queries that see any of them.

    `cache_result`: cache the result in `step`. The cached parts of a long sequence take more memory than its keys.
    """
    start, stop = max(k_start, step.k_start) - step.k_start, min(k_stop, step.k_stop) - step.k_start
    if stop - start == step.num_keys:
        return step
    visible_rows = np.flatnonzero((step.stops > start) & (step.starts < stop) & (step.stops > step.starts))
    bounds = (
        (0, 0, 0, 0)
        if stop <= start or not len(visible_rows)
        else (int(visible_rows[0]), int(visible_rows[-1]) + 1, start, stop)
    )
    return step.sub_step(*bounds) if cache_result else _make_sub_step(step, *bounds)
