"""Which tokens of a sequence a rank holds.

"contiguous" cuts the sequence into W chunks (sizes as torch.tensor_split) and rank r holds chunk r. "zigzag" cuts it
into 2W and rank r holds chunks r and 2W-1-r: with a causal mask every rank then has the same amount to compute, which
is why it is the default (Zhu, "ring-flash-attention", 2024; the load-balanced order of Llama 3's context parallelism,
arXiv:2407.21783). "balanced" is for packed documents: see `balance`. All keep a rank's tokens in ascending order.

Inside of fused_tp a rank may stand for several, whose tokens it has together (`joint_layout`): "zigzag/4" is zigzag
over 4W, of which rank r holds what 4r to 4r + 3 would, and "zigzag%4" what r, r + W, r + 2W and r + 3W would.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from fused_tp.attention.balance import balanced_ranges
from fused_tp.attention.documents import merged
from fused_tp.attention.spec import Ints

LAYOUTS = ("zigzag", "contiguous", "balanced")


@dataclass(frozen=True)
class Tokens:
    """The tokens of one rank: ranges of indices in the whole sequence, ascending, not empty and apart."""

    ranges: tuple[range, ...]

    @cached_property
    def length(self) -> int:
        return sum(map(len, self.ranges))

    @cached_property
    def indices(self) -> Ints:
        """Of all tokens, ascending."""
        parts = [np.arange(r.start, r.stop, dtype=np.int64) for r in self.ranges]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    @cached_property
    def breaks(self) -> Ints:
        """Local rows at which a new range begins; the first is 0."""
        _, lengths = self._begins
        return np.cumsum(lengths) - lengths

    def rows_before(self, indices: Ints) -> Ints:
        """How many of these tokens come before each of `indices`, which are any numbers of the whole: the local row of
        those that are held. As a search in `self.indices` finds, but they need not be there and time is saved."""
        if len(self.ranges) <= 4:
            rows = np.zeros(len(indices), dtype=np.int64)
            for r in self.ranges:
                of_range = indices - r.start
                rows += np.clip(of_range, 0, len(r), out=of_range)
            return rows
        begins, lengths = self._begins
        of = np.maximum(np.searchsorted(begins, indices, side="right") - 1, 0)
        return self.breaks[of] + np.clip(indices - begins[of], 0, lengths[of])

    @cached_property
    def _begins(self) -> tuple[Ints, Ints]:
        """And lengths, of all ranges."""
        begins = np.asarray([r.start for r in self.ranges], dtype=np.int64)
        return begins, np.asarray([len(r) for r in self.ranges], dtype=np.int64)


def check_layout(layout: object, cu_seqlens: tuple[int, ...] = ()) -> None:
    """Raise ValueError unless `layout` is one of LAYOUTS, and has what it needs."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; it must be one of {', '.join(map(repr, LAYOUTS))}.")
    if layout == "balanced" and not cu_seqlens:
        raise ValueError(
            "layout 'balanced' shares out packed documents and needs their cu_seqlens; for one sequence 'zigzag' is "
            "balanced."
        )


def chunk_range(seq_len: int, chunks: int, index: int) -> range:
    """Tokens of chunk `index`, as torch.tensor_split cuts: the first seq_len % chunks ones are one longer."""
    size, longer = seq_len // chunks, seq_len % chunks
    start = index * size + min(index, longer)
    return range(start, start + size + (1 if index < longer else 0))


def local_length(seq_len: int, world_size: int, rank: int, layout: str) -> int:
    """How many tokens `rank` holds: a matter of arithmetic, also where documents decide which ones."""
    if layout != "zigzag":
        return _chunk_length(seq_len, world_size, rank)
    chunks = 2 * world_size
    return _chunk_length(seq_len, chunks, rank) + _chunk_length(seq_len, chunks, chunks - 1 - rank)


def _chunk_length(seq_len: int, chunks: int, index: int) -> int:
    return seq_len // chunks + (1 if index < seq_len % chunks else 0)


def joint_layout(layout: str, ranks: int, *, strided: bool = False) -> str:
    """Of ranks that each have the tokens of `ranks` ranks of `layout`: neighbours, or W apart."""
    return f"{layout}{'%' if strided else '/'}{ranks}"


def _joint(tokens: tuple[Tokens, ...], ranks: int, strided: bool) -> tuple[Tokens, ...]:
    count = len(tokens) // ranks
    held = [tokens[rank::count] if strided else tokens[rank * ranks : (rank + 1) * ranks] for rank in range(count)]
    return tuple(Tokens(merged(r for tokens_of_one in one for r in tokens_of_one.ranges)) for one in held)


@lru_cache(maxsize=16)
def all_tokens(seq_len: int, world_size: int, layout: str, cu_seqlens: tuple[int, ...] = ()) -> tuple[Tokens, ...]:
    """What each rank holds.

    >>> [tokens.ranges for tokens in all_tokens(10, 2, "contiguous")]
    [(range(0, 5),), (range(5, 10),)]
    """
    for separator in "/%":
        layout, joint, ranks = layout.partition(separator)
        if joint:
            tokens = all_tokens(seq_len, world_size * int(ranks), layout, cu_seqlens)
            return _joint(tokens, int(ranks), separator == "%")
    check_layout(layout, cu_seqlens)
    if layout == "balanced":
        return tuple(Tokens(ranges) for ranges in balanced_ranges(cu_seqlens, world_size))
    chunks = world_size if layout == "contiguous" else 2 * world_size
    held = []
    for rank in range(world_size):
        own = [rank] if layout == "contiguous" else [rank, chunks - 1 - rank]
        held.append(Tokens(merged(chunk_range(seq_len, chunks, index) for index in own)))
    return tuple(held)


def tokens_of(seq_len: int, world_size: int, rank: int, layout: str, cu_seqlens: tuple[int, ...] = ()) -> Tokens:
    """What `rank` holds."""
    return all_tokens(seq_len, world_size, layout, cu_seqlens)[rank]
