"""Token layouts: the tokens of a sequence that each rank holds.

- "contiguous" splits the sequence into W chunks (with the sizes of torch.tensor_split); rank r holds chunk r.
- "zigzag" splits the sequence into 2W chunks; rank r holds chunks r and 2W-1-r. With a causal mask all ranks then have
  equal work, so it is the default (Zhu, "ring-flash-attention", 2024; the load-balanced order of Llama 3's context
  parallelism, arXiv:2407.21783).
- "balanced" is for packed documents: see `balance`.
- "zigzag_documents" and "contiguous_documents" shard each document separately, in that layout, as ring-flash-attention,
  Transformer Engine and Megatron-Core ("thd") do for packed sequences. Every document then needs a ring over all ranks.

All layouts keep a rank's tokens in ascending order.

A growing cache of keys and values has a block-cyclic layout: when the cache grows, no cached token changes its rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fused_tp.attention.balance import balanced_ranges, chunk_range, merge_ranges, zigzag_ranges

Int64s = NDArray[np.int64]

# Maps layouts that shard each document separately to the layout used within one document.
_LAYOUT_WITHIN_DOCUMENT = {"zigzag_documents": "zigzag", "contiguous_documents": "contiguous"}
DOCUMENT_LAYOUTS = ("balanced", *_LAYOUT_WITHIN_DOCUMENT)
LAYOUTS = ("zigzag", "contiguous", *DOCUMENT_LAYOUTS)
DEFAULT_BLOCK = 64  # default number of consecutive tokens of a cache on one rank


@dataclass(frozen=True)
class TokenRanges:
    """The tokens of one rank: ascending, non-empty, disjoint ranges of global indices."""

    ranges: tuple[range, ...]

    @cached_property
    def length(self) -> int:
        return sum(map(len, self.ranges))

    @cached_property
    def indices(self) -> Int64s:
        """Global positions of this rank's tokens, ascending."""
        range_indices = [np.arange(r.start, r.stop, dtype=np.int64) for r in self.ranges]
        return np.concatenate(range_indices) if range_indices else np.empty(0, dtype=np.int64)

    @cached_property
    def breaks(self) -> Int64s:
        """Local rows at which a new range begins; the first is 0."""
        _, lengths = self._range_starts_and_lengths
        return np.cumsum(lengths) - lengths

    def count_before(self, indices: Int64s) -> Int64s:
        """Return the number of these tokens before each of `indices`, which are any global indices.

        For a token that this rank holds, the result is its local row. Equals np.searchsorted(self.indices, indices),
        but is faster and does not build `self.indices`.
        """
        if len(self.ranges) <= 4:
            rows = np.zeros(len(indices), dtype=np.int64)
            for r in self.ranges:
                range_offsets = indices - r.start
                rows += np.clip(range_offsets, 0, len(r), out=range_offsets)
            return rows
        range_starts, lengths = self._range_starts_and_lengths
        range_index = np.maximum(np.searchsorted(range_starts, indices, side="right") - 1, 0)
        return self.breaks[range_index] + np.clip(indices - range_starts[range_index], 0, lengths[range_index])

    @cached_property
    def _range_starts_and_lengths(self) -> tuple[Int64s, Int64s]:
        """Starts and lengths of all ranges."""
        starts = np.asarray([r.start for r in self.ranges], dtype=np.int64)
        return starts, np.asarray([len(r) for r in self.ranges], dtype=np.int64)


def check_layout(layout: object, *, has_documents: bool = False) -> None:
    """Raise ValueError unless `layout` is one of LAYOUTS; one of DOCUMENT_LAYOUTS also requires `has_documents`."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; it must be one of {', '.join(map(repr, LAYOUTS))}.")
    if layout in DOCUMENT_LAYOUTS and not has_documents:
        raise ValueError(
            f"layout {layout!r} is for packed documents and needs their cu_seqlens, which were not passed. Pass "
            "cu_seqlens, or use 'zigzag' for a single sequence."
        )


def local_length(seq_len: int, world_size: int, rank: int, layout: str) -> int:
    """Return the number of tokens that `rank` holds. Documents do not change it, but decide which tokens these are."""
    if layout != "zigzag":
        return _chunk_length(seq_len, world_size, rank)
    chunks = 2 * world_size
    return _chunk_length(seq_len, chunks, rank) + _chunk_length(seq_len, chunks, chunks - 1 - rank)


def _chunk_length(seq_len: int, chunks: int, index: int) -> int:
    return seq_len // chunks + (1 if index < seq_len % chunks else 0)


@lru_cache(maxsize=16)
def tokens_by_rank(
    seq_len: int, world_size: int, layout: str, cu_seqlens: tuple[int, ...] = ()
) -> tuple[TokenRanges, ...]:
    """Return the tokens that each rank holds.

    >>> [tokens.ranges for tokens in tokens_by_rank(10, 2, "contiguous")]
    [(range(0, 5),), (range(5, 10),)]
    """
    check_layout(layout, has_documents=bool(cu_seqlens))
    if layout == "balanced":
        ranges = balanced_ranges(cu_seqlens, world_size)
    elif layout in _LAYOUT_WITHIN_DOCUMENT:
        ranges = _document_ranges(cu_seqlens, world_size, _LAYOUT_WITHIN_DOCUMENT[layout])
    else:
        ranges = _layout_ranges(seq_len, world_size, layout)
    return tuple(map(TokenRanges, ranges))


def _layout_ranges(seq_len: int, world_size: int, layout: str) -> list[tuple[range, ...]]:
    if layout == "zigzag":
        return zigzag_ranges(seq_len, world_size)
    return [merge_ranges([chunk_range(seq_len, world_size, rank)]) for rank in range(world_size)]


def _document_ranges(cu_seqlens: tuple[int, ...], world_size: int, layout: str) -> list[tuple[range, ...]]:
    """Return the token ranges of each rank if every document is sharded by `layout`.

    Shards of a document must be equal, so that the number of tokens of a rank follows from the total length alone.
    """
    ranges_by_rank: list[list[range]] = [[] for _ in range(world_size)]
    for document, (start, stop) in enumerate(pairwise(cu_seqlens)):
        if (stop - start) % world_size:
            raise ValueError(
                f"document {document} has {stop - start} tokens; for layout '{layout}_documents' the length must be a "
                f"multiple of the {world_size} ranks. Pad documents to a multiple of {world_size}, or use layout "
                "'balanced'."
            )
        for tokens, ranges in zip(ranges_by_rank, _layout_ranges(stop - start, world_size, layout), strict=True):
            tokens += [range(start + r.start, start + r.stop) for r in ranges]
    return list(map(merge_ranges, ranges_by_rank))


@dataclass(frozen=True)
class TokenLayout:
    """Layout `name`, one of LAYOUTS, over n * W virtual ranks, of which each of the W ranks has n = `num_joined_ranks`.

    Rank r holds the tokens of virtual ranks n * r, n * r + 1, ...; with `strided`, of virtual ranks r, r + W, ...

    >>> [tokens.ranges for tokens in TokenLayout("contiguous", 2, strided=True).tokens(8, 2)]
    [(range(0, 2), range(4, 6)), (range(2, 4), range(6, 8))]
    """

    name: str
    num_joined_ranks: int = 1
    strided: bool = False

    def tokens(self, seq_len: int, world_size: int, cu_seqlens: tuple[int, ...] = ()) -> tuple[TokenRanges, ...]:
        """Return the tokens that each of `world_size` ranks holds."""
        tokens = tokens_by_rank(seq_len, world_size * self.num_joined_ranks, self.name, cu_seqlens)
        return (
            tokens if self.num_joined_ranks == 1 else _join_virtual_ranks(tokens, self.num_joined_ranks, self.strided)
        )

    def __str__(self) -> str:
        if self.num_joined_ranks == 1:
            return self.name
        return f"{self.name} over {self.num_joined_ranks} times the ranks{', strided' if self.strided else ''}"


@lru_cache(maxsize=16)
def _join_virtual_ranks(
    tokens: tuple[TokenRanges, ...], num_joined_ranks: int, strided: bool
) -> tuple[TokenRanges, ...]:
    num_ranks = len(tokens) // num_joined_ranks
    joined_tokens = [
        tokens[rank::num_ranks] if strided else tokens[rank * num_joined_ranks : (rank + 1) * num_joined_ranks]
        for rank in range(num_ranks)
    ]
    return tuple(
        TokenRanges(merge_ranges(r for token_ranges in virtual_ranks for r in token_ranges.ranges))
        for virtual_ranks in joined_tokens
    )


@dataclass(frozen=True)
class BlockCyclicLayout:
    """Block-cyclic layout of a growing cache: the tokens that `rank` of `world_size` holds, in ascending order.

    Token i is stored on rank (i // b) % W, in row (i // (b * W)) * b + i % b, b = `block_size`. The token counts of two
    ranks differ by at most one block. The lengths of the sequences determine the layout, so it needs no communication.

    >>> BlockCyclicLayout(world_size=2, rank=1, block_size=2).count_before(7)  # tokens 2, 3 and 6
    3
    """

    world_size: int
    rank: int
    block_size: int

    def count_before(self, length: int) -> int:
        """Return the number of tokens below index `length` on this rank: the row of token `length`, if it is here."""
        rounds, remainder = divmod(length, self.block_size * self.world_size)
        return rounds * self.block_size + min(max(remainder - self.rank * self.block_size, 0), self.block_size)

    def indices(self, start: int, stop: int) -> Int64s:
        """Return the token indices of the rows [start, stop), ascending."""
        rows = np.arange(start, stop, dtype=np.int64)
        return (rows // self.block_size * self.world_size + self.rank) * self.block_size + rows % self.block_size

    def tokens(self, start: int, stop: int) -> TokenRanges:
        """Return the tokens in the rows [start, stop)."""
        ranges = []
        while start < stop:
            end = min(stop, (start // self.block_size + 1) * self.block_size)
            first = (start // self.block_size * self.world_size + self.rank) * self.block_size + start % self.block_size
            ranges.append(range(first, first + end - start))
            start = end
        return TokenRanges(tuple(ranges))

    def rows(self, tokens: Int64s) -> Int64s:
        """Return the row of each of `tokens` on the rank that holds it."""
        return tokens // (self.block_size * self.world_size) * self.block_size + tokens % self.block_size

    def owners(self, tokens: Int64s) -> Int64s:
        """Return the rank that holds each of `tokens`."""
        return tokens // self.block_size % self.world_size
