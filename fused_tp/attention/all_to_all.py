"""All-to-all between a part of the sequence of all heads, and all of it of some heads: what attention by heads needs.

Ranks that each hold some tokens of all heads, [B, S_r, H, D], get all tokens of some heads, [B, S, H_r, D], in the
order of the sequence, and the way back. Heads may go to several ranks, as those of keys do where there are more ranks
than of them; on the way back they are summed, in fp32 and in the order of the ranks.
(Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Protocol

import torch
from torch import Tensor

from fused_tp.attention.layout import Tokens
from fused_tp.transport.base import accumulate_dtype

Places = tuple[range, ...]

_MOST_PIECES = 16  # rows that lie in more pieces move by index: on a device every copy is a launch


@dataclass(frozen=True)
class Share:
    """Who has what of one tensor.

    Attributes:
        places: for each rank, where its rows lie among those of all, ascending.
        heads: for each rank, the heads it gets.
        all_heads: how many there are.
    """

    places: tuple[Places, ...]
    heads: tuple[range, ...]
    all_heads: int

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """How many each rank holds."""
        return tuple(sum(map(len, places)) for places in self.places)

    @cached_property
    def length(self) -> int:
        return sum(self.rows)

    @cached_property
    def repeated(self) -> bool:
        """Whether a head goes to several ranks."""
        return sum(map(len, self.heads)) > self.all_heads

    @cached_property
    def even(self) -> bool:
        """Whether all ranks have equally many rows, and heads of their own."""
        return len(set(self.rows)) == 1 and not self.repeated

    def only(self, rank: int) -> range:
        """The heads that no other rank gets: neighbours, as those are that one does."""
        others = {head for other, heads in enumerate(self.heads) if other != rank for head in heads}
        own = [head for head in self.heads[rank] if head not in others]
        return range(own[0], own[-1] + 1) if own else range(0)


def shares(tokens: Sequence[Tokens], heads: tuple[range, ...], all_heads: int) -> Share:
    """What ranks have that hold these tokens, and get these heads."""
    return Share(_places(tuple(tokens)), heads, all_heads)


@lru_cache(maxsize=64)
def _places(tokens: tuple[Tokens, ...]) -> tuple[Places, ...]:
    pieces = sorted((r.start, rank, len(r)) for rank, one in enumerate(tokens) for r in one.ranges)
    found: list[list[range]] = [[] for _ in tokens]
    at = 0
    for _, rank, length in pieces:
        own = found[rank]
        start = own.pop().start if own and own[-1].stop == at else at
        own.append(range(start, at + length))
        at += length
    return tuple(map(tuple, found))


@dataclass(frozen=True)
class Exchange:
    """One all-to-all of several tensors on this rank.

    Attributes:
        op: name of the op that this is part of.
        dims: what all ranks must agree on.
        shares: of each tensor.
        dtypes: of each result.
    """

    op: str
    dims: tuple[int, ...]
    rank: int
    shares: tuple[Share, ...]
    dtypes: tuple[torch.dtype, ...]

    @property
    def ranks(self) -> int:
        return len(self.shares[0].places)

    @property
    def peers(self) -> list[int]:
        """The other ranks, in another order on each, so that not all read the same memory at once."""
        return [(self.rank + step) % self.ranks for step in range(1, self.ranks)]

    def of(self, which: Sequence[int]) -> Exchange:
        """The same for some of the tensors."""
        shares, dtypes = tuple(self.shares[i] for i in which), tuple(self.dtypes[i] for i in which)
        return replace(self, shares=shares, dtypes=dtypes)


class AllToAll(Protocol):
    """How the parts get to their ranks. Results have memory of their own."""

    name: str

    def to_heads(self, exchange: Exchange, xs: Sequence[Tensor]) -> list[Tensor]:
        """x [B, rows of this rank, all heads, D] -> [B, all rows, heads of this rank, D] for each of `xs`."""
        ...

    def to_sequence(self, exchange: Exchange, xs: Sequence[Tensor]) -> list[Tensor]:
        """The way back; where heads are repeated, their sum over the ranks that have them."""
        ...


Empty = Callable[[Sequence[int], torch.dtype], Tensor]


def _like(x: Tensor) -> Empty:
    return lambda shape, dtype: x.new_empty(tuple(shape), dtype=dtype)


class HeadsResult:
    """Results of `to_heads`, to be filled rank by rank; `empty` makes them."""

    def __init__(self, exchange: Exchange, xs: Sequence[Tensor], empty: Empty | None = None) -> None:
        empty = empty or _like(xs[0])
        self._exchange = exchange
        self.outs = [
            empty((x.shape[0], share.length, len(share.heads[exchange.rank]), x.shape[3]), dtype)
            for x, share, dtype in zip(xs, exchange.shares, exchange.dtypes, strict=True)
        ]

    def put(self, index: int, source: int, part: Tensor) -> None:
        """What `source` has of this rank's heads: [B, rows of `source`, heads, D]."""
        out, places = self.outs[index], self._exchange.shares[index].places[source]
        if by_index(len(places)):
            out.index_copy_(1, _indices(places, out.device), part.to(out.dtype))
            return
        for here, there in pieces(places):
            out[:, there].copy_(part[:, here])


class SequenceResult:
    """Results of `to_sequence`; where heads are repeated, parts must come in the order of the ranks."""

    def __init__(self, exchange: Exchange, xs: Sequence[Tensor], empty: Empty | None = None) -> None:
        empty = empty or _like(xs[0])
        self._exchange = exchange
        self._sums = []
        for x, share, dtype in zip(xs, exchange.shares, exchange.dtypes, strict=True):
            shape = (x.shape[0], share.rows[exchange.rank], share.all_heads, x.shape[3])
            repeated = share.repeated
            self._sums.append(x.new_zeros(shape, dtype=accumulate_dtype(x.dtype)) if repeated else empty(shape, dtype))

    @property
    def order(self) -> list[int]:
        """In which the ranks' parts may come."""
        if any(share.repeated for share in self._exchange.shares):
            return list(range(self._exchange.ranks))
        return [self._exchange.rank, *self._exchange.peers]

    def add(self, index: int, source: int, whole: Tensor) -> None:
        """This rank's rows of what `source` has: [B, all rows, heads of `source`, D]."""
        share = self._exchange.shares[index]
        out = self._of_heads(index, source)
        take(whole, share.places[self._exchange.rank], out, add=share.repeated)

    def add_rows(self, index: int, source: int, part: Tensor) -> None:
        """The same where only this rank's rows have come."""
        out = self._of_heads(index, source)
        out.add_(part) if self._exchange.shares[index].repeated else out.copy_(part)

    def _of_heads(self, index: int, source: int) -> Tensor:
        heads = self._exchange.shares[index].heads[source]
        return self._sums[index][:, :, heads.start : heads.stop]

    @property
    def outs(self) -> list[Tensor]:
        return [total.to(dtype) for total, dtype in zip(self._sums, self._exchange.dtypes, strict=True)]


def take(whole: Tensor, places: Places, out: Tensor, *, add: bool = False) -> None:
    """out = the rows of `whole` at these places, or out += them."""
    if by_index(len(places)):
        rows = whole.index_select(1, _indices(places, whole.device))
        out.add_(rows) if add else out.copy_(rows)
        return
    for here, there in pieces(places):
        out[:, here].add_(whole[:, there]) if add else out[:, here].copy_(whole[:, there])


def by_index(count: int) -> bool:
    """Whether rows in so many pieces move by index."""
    return count > _MOST_PIECES


def pieces(places: Places) -> Iterator[tuple[slice, slice]]:
    """(rows of a rank, where they lie) for each piece."""
    at = 0
    for place in places:
        yield slice(at, at + len(place)), slice(place.start, place.stop)
        at += len(place)


def _indices(places: Places, device: torch.device) -> Tensor:
    return torch.cat([torch.arange(r.start, r.stop) for r in places]).to(device)
