"""The steps of ring attention: what a rank's queries see of each rank's keys, and which rows travel for it.

At step t rank r looks at the keys of rank (r - t) mod W; step 0 is its own. A step is the rows of queries that see
something, the rows of keys that are seen, and between these an interval [start, stop) of keys for each query, in local
numbers. Both ends are ascending, so the queries that see a key are an interval too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fused_tp.schedules.attention.layouts import Tokens, all_tokens
from fused_tp.schedules.attention.masks import AttentionMask, Ints


@dataclass(frozen=True, eq=False)
class Step:
    """Local queries [q_start, q_stop) against the source's keys [k_start, k_stop).

    Attributes:
        starts, stops: int32 [q_stop - q_start]: query q_start + i sees the keys k_start + [starts[i], stops[i]).
        places: int64 [q_stop - q_start], where the queries stand on the axis of the keys.
        q_indices, k_indices: int64, which tokens of the whole these queries and keys are.
        q_breaks, k_breaks: rows, counted from q_start and k_start, behind which indices jump; ascending, inside.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    starts: np.ndarray[Any, np.dtype[np.int32]]
    stops: np.ndarray[Any, np.dtype[np.int32]]
    places: Ints
    q_indices: Ints
    k_indices: Ints
    q_breaks: tuple[int, ...]
    k_breaks: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.q_stop - self.q_start

    @property
    def keys(self) -> int:
        return self.k_stop - self.k_start

    @property
    def empty(self) -> bool:
        return self.rows == 0

    @cached_property
    def is_full(self) -> bool:
        """Whether all of these queries see all of these keys."""
        return bool((self.starts == 0).all() and (self.stops == self.keys).all())

    @cached_property
    def is_triangle(self) -> bool:
        """Whether query i sees keys 0 to i, and there are as many queries as keys."""
        rows = np.arange(1, self.rows + 1)
        return self.rows == self.keys and bool((self.starts == 0).all() and (self.stops == rows).all())

    @cached_property
    def work(self) -> int:
        """How many pairs of a query and a key there are."""
        return int((self.stops.astype(np.int64) - self.starts).sum())

    @cached_property
    def seen_by(self) -> tuple[np.ndarray[Any, np.dtype[np.int32]], np.ndarray[Any, np.dtype[np.int32]]]:
        """int32 [keys] each: key k_start + j is seen by the queries q_start + [first[j], last[j])."""
        keys = np.arange(self.keys)
        first = np.searchsorted(self.stops, keys, side="right")
        last = np.maximum(first, np.searchsorted(self.starts, keys, side="right"))
        return first.astype(np.int32), last.astype(np.int32)

    @cached_property
    def _on_devices(self) -> dict[torch.device, dict[str, Tensor]]:
        return {}

    def on(self, device: torch.device) -> dict[str, Tensor]:
        """starts, stops, places, q_indices, k_indices, first, last as int32 tensors there; made once."""
        known = self._on_devices.get(device)
        if known is None:
            first, last = self.seen_by
            arrays: dict[str, np.ndarray[Any, Any]] = {
                "starts": self.starts,
                "stops": self.stops,
                "places": self.places,
                "q_indices": self.q_indices,
                "k_indices": self.k_indices,
                "first": first,
                "last": last,
            }
            known = self._on_devices[device] = {
                name: torch.from_numpy(array.astype(np.int32)).to(device) for name, array in arrays.items()
            }
        return known


class RingPlan:
    """The steps of all ranks for one mask, layout and group size."""

    def __init__(self, mask: AttentionMask, world_size: int, layout: str) -> None:
        self.mask = mask
        self.world_size = world_size
        self.layout = layout
        self.queries = all_tokens(mask.seq_len, world_size, layout, mask.cu_seqlens)
        self.keys = all_tokens(mask.seq_len_kv, world_size, layout, mask.cu_seqlens_kv or mask.cu_seqlens)
        self._steps: dict[tuple[int, int], Step] = {}
        self._extents: dict[tuple[int, int], range] = {}

    def source(self, rank: int, t: int) -> int:
        """Whose keys `rank` looks at in step t."""
        return (rank - t) % self.world_size

    def step(self, rank: int, t: int) -> Step:
        """What `rank` computes in step t."""
        source = self.source(rank, t)
        known = self._steps.get((rank, source))
        if known is None:
            known = self._steps[rank, source] = make_step(self.mask, self.queries[rank], self.keys[source])
        return known

    def needed(self, rank: int, source: int) -> range:
        """Which rows of its keys `source` has to give `rank`; found without making the step."""
        known = self._extents.get((rank, source))
        if known is None:
            known = self._extents[rank, source] = _extent(self.mask, self.queries[rank], self.keys[source])
        return known


def make_step(mask: AttentionMask, queries: Tokens, keys: Tokens) -> Step:
    """What these queries see of these keys."""
    q_indices, k_indices = queries.indices, keys.indices
    places, starts, stops = mask.seen(q_indices)
    starts, stops = np.searchsorted(k_indices, starts), np.searchsorted(k_indices, stops)
    seeing = np.flatnonzero(stops > starts)
    q_start, q_stop = (int(seeing[0]), int(seeing[-1]) + 1) if len(seeing) else (0, 0)
    rows = slice(q_start, q_stop)
    k_start, k_stop = (int(starts[q_start]), int(stops[q_stop - 1])) if len(seeing) else (0, 0)
    return Step(
        q_start,
        q_stop,
        k_start,
        k_stop,
        (starts[rows] - k_start).astype(np.int32),
        (stops[rows] - k_start).astype(np.int32),
        places[rows],
        q_indices[rows],
        k_indices[k_start:k_stop],
        _inside(queries.breaks, q_start, q_stop),
        _inside(keys.breaks, k_start, k_stop),
    )


def _inside(breaks: Ints, start: int, stop: int) -> tuple[int, ...]:
    return tuple(int(b) - start for b in breaks if start < b < stop)


def _extent(mask: AttentionMask, queries: Tokens, keys: Tokens) -> range:
    """The rows of keys from the first that is seen to the last. Between the ends of one range of queries the ends of
    their intervals do not go back, so the first and the last row of each range tell."""
    ends = np.asarray([end for r in queries.ranges for end in (r.start, r.stop - 1)], dtype=np.int64)
    if not len(ends):
        return range(0)
    _, starts, stops = mask.seen(ends)
    first = np.searchsorted(keys.indices, starts[0::2])
    last = np.searchsorted(keys.indices, stops[1::2])
    some = last > first
    return range(int(first[some].min()), int(last[some].max())) if some.any() else range(0)


@lru_cache(maxsize=16)
def ring_plan(mask: AttentionMask, world_size: int, layout: str) -> RingPlan:
    """The plan, made once per mask, layout and group size."""
    return RingPlan(mask, world_size, layout)


def part_of_step(step: Step, q_start: int, q_stop: int, k_start: int, k_stop: int) -> Step:
    """What queries [q_start, q_stop) of a step see of its keys [k_start, k_stop), both counted from the step's own."""
    rows, keys = slice(q_start, q_stop), slice(k_start, k_stop)
    return Step(
        step.q_start + q_start,
        step.q_start + q_stop,
        step.k_start + k_start,
        step.k_start + k_stop,
        np.clip(step.starts[rows], k_start, k_stop) - np.int32(k_start),
        np.clip(step.stops[rows], k_start, k_stop) - np.int32(k_start),
        step.places[rows],
        step.q_indices[rows],
        step.k_indices[keys],
        tuple(b - q_start for b in step.q_breaks if q_start < b < q_stop),
        tuple(b - k_start for b in step.k_breaks if k_start < b < k_stop),
    )
