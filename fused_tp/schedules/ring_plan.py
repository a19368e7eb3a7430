"""Who attends to what in ring attention: which tokens a rank holds, and what of a peer's keys its queries see.

Layouts. "contiguous" cuts the sequence into W chunks (sizes as torch.tensor_split) and rank r holds chunk r. "zigzag"
cuts it into 2W and rank r holds chunks r and 2W-1-r: with a causal mask every rank then has the same amount to compute,
which is why it is the default (Zhu, "ring-flash-attention", 2024; the load-balanced order of Llama 3's context
parallelism, arXiv:2407.21783). Both keep a rank's tokens in ascending order of position.

Steps. At step t rank r looks at the keys of rank (r - t) mod W. With these layouts what it sees is always a suffix of
its queries against a prefix of the keys, without any mask, except for its own keys, where the plain lower triangle over
local indices is right. So a step is two numbers and a flag, and no kernel ever needs positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

LAYOUTS = ("zigzag", "contiguous")


@dataclass(frozen=True)
class Step:
    """Local queries [q_start:] attend to the source's keys [:kv_stop], below the diagonal only where `causal`."""

    q_start: int
    kv_stop: int
    causal: bool = False

    @property
    def empty(self) -> bool:
        return self.kv_stop == 0


def check_layout(layout: object) -> None:
    """Raise ValueError unless `layout` is one of LAYOUTS."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; it must be one of {', '.join(map(repr, LAYOUTS))}.")


def chunk_range(seq_len: int, chunks: int, index: int) -> range:
    """Positions of chunk `index`, as torch.tensor_split cuts: the first seq_len % chunks ones are one longer."""
    size, longer = seq_len // chunks, seq_len % chunks
    start = index * size + min(index, longer)
    return range(start, start + size + (1 if index < longer else 0))


def position_ranges(seq_len: int, world_size: int, rank: int, layout: str) -> tuple[range, ...]:
    """Global positions that `rank` holds, ascending.

    >>> position_ranges(10, 2, 1, "zigzag")
    (range(3, 6), range(6, 8))
    """
    if layout == "contiguous":
        return (chunk_range(seq_len, world_size, rank),)
    chunks = 2 * world_size
    return chunk_range(seq_len, chunks, rank), chunk_range(seq_len, chunks, chunks - 1 - rank)


def local_length(seq_len: int, world_size: int, rank: int, layout: str) -> int:
    """How many tokens `rank` holds."""
    return sum(len(positions) for positions in position_ranges(seq_len, world_size, rank, layout))


class RingPlan:
    """The steps of all ranks for one sequence length, group size, layout and mask."""

    def __init__(self, seq_len: int, world_size: int, layout: str, causal: bool) -> None:
        self.seq_len = seq_len
        self.world_size = world_size
        self.layout = layout
        self.causal = causal
        self.lengths = [local_length(seq_len, world_size, rank, layout) for rank in range(world_size)]
        self._first_chunk = [len(position_ranges(seq_len, world_size, rank, layout)[0]) for rank in range(world_size)]
        self._travels: dict[int, tuple[int, int]] = {}

    def source(self, rank: int, t: int) -> int:
        """Whose keys `rank` looks at in step t; step 0 is its own."""
        return (rank - t) % self.world_size

    def step(self, rank: int, t: int) -> Step:
        """What `rank` computes in step t."""
        source = self.source(rank, t)
        q_start, kv_stop = 0, self.lengths[source]
        if self.causal and source != rank:
            if self.layout == "zigzag":
                if source < rank:  # its first chunk lies before all of ours, its second after all of ours
                    kv_stop = self._first_chunk[source]
                else:  # our first chunk lies before all of its, our second after all of its
                    q_start = self._first_chunk[rank]
            elif source > rank:
                kv_stop = 0
        if q_start == self.lengths[rank] or kv_stop == 0:
            return Step(self.lengths[rank], 0)
        return Step(q_start, kv_stop, self.causal and source == rank)

    def rows_sent(self, source: int) -> int:
        """How many of its keys `source` has to give away: the most that any other rank looks at."""
        return self._travel(source)[0]

    def last_step(self, source: int) -> int:
        """The last step in which some rank looks at the keys of `source`; 0 when no other rank does."""
        return self._travel(source)[1]

    def _travel(self, source: int) -> tuple[int, int]:
        known = self._travels.get(source)
        if known is None:
            stops = [self.step((source + t) % self.world_size, t).kv_stop for t in range(1, self.world_size)]
            last = max((t for t, stop in enumerate(stops, start=1) if stop), default=0)
            known = self._travels[source] = (max(stops, default=0), last)
        return known


@lru_cache(maxsize=64)
def ring_plan(seq_len: int, world_size: int, layout: str, causal: bool) -> RingPlan:
    """The plan, made once per shape."""
    return RingPlan(seq_len, world_size, layout, causal)
