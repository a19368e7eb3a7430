"""All steps of a rank at once: its chunks of other ranks' keys, and what its queries see of each."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fused_tp.attention.plan import RingPlan, of_keys

_ROWS_OF_A_CHUNK = 16384  # at most, where that does not make too many of them
_MOST_CHUNKS = 63


class Chunk(NamedTuple):
    """Rows of the keys of the source of step t."""

    t: int
    source: int
    rows: range


class Chunks:
    """What one rank looks at, in this order: its own keys, then source by source as the steps have them.

    It is what `triton_kernels.attention.ring_forward` wants to know of a mask.

    Attributes:
        others: the chunks of other ranks' keys.
    """

    def __init__(self, plan: RingPlan, rank: int) -> None:
        self._plan, self._rank = plan, rank
        own = Chunk(0, rank, range(plan.keys[rank].length))
        self.others = tuple(chunks_of_others(plan, rank))
        self._chunks = (own, *self.others)
        self._tables: dict[Any, dict[str, Tensor]] = {}

    def on(self, device: torch.device, rows: int, block: int) -> dict[str, Tensor]:
        """The tables for that device and tiles of that size, made once."""
        from fused_tp.triton_kernels.attention.tiles import tiles_of_chunks

        if (device, rows, block) not in self._tables:
            vectors = self._tables.get(device)
            if vectors is None:
                vectors = self._tables[device] = {name: _moved(x, device) for name, x in self._vectors.items()}
            starts, stops = self._vectors["starts"], self._vectors["stops"]
            tiles, bounds = tiles_of_chunks(
                self._plan.seen(self._rank)[1:],
                [int(b) for b in self._plan.queries[self._rank].breaks if b],
                starts,
                stops,
                rows,
                block,
            )
            tables = {"tiles": _moved(tiles, device), "bounds": _moved(bounds, device)}
            self._tables[device, rows, block] = vectors | tables
        return self._tables[device, rows, block]

    @cached_property
    def _vectors(self) -> dict[str, np.ndarray[Any, Any]]:
        plan, rank, chunks = self._plan, self._rank, self._chunks
        queries = plan.queries[rank]
        starts = np.zeros((len(chunks), queries.length), dtype=np.int32)
        stops = np.zeros_like(starts)
        for number, (t, _, rows) in enumerate(chunks):
            step = of_keys(plan.step(rank, t), rows.start, rows.stop, keep=False)
            if not step.empty:
                seeing = slice(step.q_start, step.q_stop)
                starts[number, seeing] = step.starts + np.int32(step.k_start - rows.start)
                stops[number, seeing] = step.stops + np.int32(step.k_start - rows.start)
        lengths = [len(rows) for _, _, rows in chunks]
        begins = np.cumsum(lengths) - lengths
        # Own keys and those of others lie in different places, each from 0 on.
        places = np.where(np.arange(len(chunks)) > 0, begins - lengths[0], 0)
        return {
            "starts": starts,
            "stops": stops,
            "chunks": np.stack(([source for _, source, _ in chunks], places, begins), 1),
            "places": plan.seen(rank)[0],
            "q_indices": queries.indices,
            "k_indices": np.concatenate([plan.keys[s].indices[rows.start : rows.stop] for _, s, rows in chunks]),
        }


def chunks_of_others(plan: RingPlan, rank: int) -> list[Chunk]:
    """The rows of others' keys that `rank` looks at, step by step; long ones in several parts."""
    sources = [(t, plan.source(rank, t)) for t in range(1, plan.world_size)]
    seen = [Chunk(t, s, rows) for t, s in sources for rows in plan.needed(rank, s).ranges]
    parts = [
        Chunk(t, source, rows[first : first + _ROWS_OF_A_CHUNK])
        for t, source, rows in seen
        for first in range(0, len(rows), _ROWS_OF_A_CHUNK)
    ]
    if len(parts) <= _MOST_CHUNKS:
        return parts
    if len(seen) <= _MOST_CHUNKS:
        return seen
    whole = [(t, s, plan.needed(rank, s).ranges) for t, s in sources]
    return [Chunk(t, s, range(rows[0].start, rows[-1].stop)) for t, s, rows in whole if rows]


def chunks_of(plan: RingPlan, rank: int) -> Chunks:
    """The chunks of a rank, made once for a plan."""
    known: Chunks | None = plan.memo.get(("chunks", rank))
    if known is None:
        known = plan.memo["chunks", rank] = Chunks(plan, rank)
    return known


def most_rows(plan: RingPlan) -> int:
    """Rows of others' keys that the rank which needs most of them looks at."""
    known: int | None = plan.memo.get("most rows")
    if known is None:
        needs = [sum(len(chunk.rows) for chunk in chunks_of_others(plan, r)) for r in range(plan.world_size)]
        known = plan.memo["most rows"] = max(needs)
    return known


def _moved(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32)).to(device)
