"""All-to-all between a part of the sequence of all heads, and all of it of some heads: what attention by heads needs.

Ranks that each hold some tokens of all heads, [B, S_r, H, D], get all tokens of some heads, [B, S, H_r, D], in the
order of the sequence, and the way back. Heads may go to several ranks, as those of keys do where there are more ranks
than of them; on the way back they are summed, in fp32 and in the order of the ranks.
(Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509.)
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from fused_tp.attention.layout import Tokens
from fused_tp.schedules.base import Schedule
from fused_tp.schedules.device import DeviceSchedule
from fused_tp.schedules.shared_memory import SharedMemory
from fused_tp.transport.base import Pending, accumulate_dtype
from fused_tp.transport.shm import ShmTransport
from fused_tp.transport.torch_dist import TorchDist

Places = tuple[range, ...]

_MOST_PIECES = 16  # rows that lie in more pieces move by index: on a device every copy is a launch
_MESSAGE_ALIGNMENT = 16  # of each tensor in a message, in bytes
_MEMORY_ALIGNMENT = 64  # of each tensor in shared memory: a cache line
_READABLE = 1  # a stage of a rank's shared memory


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


def _aligned_bytes(shape: Sequence[int], dtype: torch.dtype, alignment: int) -> int:
    return -(-math.prod(shape) * dtype.itemsize // alignment) * alignment


def _of_heads(x: Tensor, heads: range) -> Tensor:
    return x[:, :, heads.start : heads.stop]


class AllToAll(ABC):
    """How the parts get to their ranks. Results have memory of their own."""

    name: str

    @abstractmethod
    def to_heads(self, exchange: Exchange, xs: Sequence[Tensor]) -> list[Tensor]:
        """x [B, rows of this rank, all heads, D] -> [B, all rows, heads of this rank, D] for each of `xs`."""

    @abstractmethod
    def to_sequence(self, exchange: Exchange, xs: Sequence[Tensor]) -> list[Tensor]:
        """The way back; where heads are repeated, their sum over the ranks that have them."""


def all_to_all_by(schedule: Schedule) -> AllToAll:
    """The one that runs on what a schedule moves bytes with."""
    if isinstance(schedule, SharedMemory):
        return SharedMemoryAllToAll(schedule.transport)
    messages = MessageAllToAll(schedule.name, schedule.messages)
    return DeviceAllToAll(schedule, messages) if isinstance(schedule, DeviceSchedule) else messages


class MessageAllToAll(AllToAll):
    """By messages, on every torch.distributed group: what goes to a rank, of all tensors, is one message."""

    def __init__(self, name: str, transport: TorchDist) -> None:
        self.name = name
        self._transport = transport

    def to_heads(self, exchange: Exchange, xs: Sequence[Tensor]) -> list[Tensor]:
        op, rank = f"{exchange.op} to heads", exchange.rank
        send = _Packets(exchange, xs, lambda share, peer: (share.rows[rank], len(share.heads[peer])))
        recv = _Packets(exchange, xs, lambda share, peer: (share.rows[peer], len(share.heads[rank])))

        def pack(part: Tensor, x: Tensor, share: Share, peer: int) -> None:
            part.copy_(_of_heads(x, share.heads[peer]))

        with self._moving(op, exchange, xs, send, recv, pack) as moving:
            result = HeadsResult(exchange, xs)
            for index, (x, share) in enumerate(zip(xs, exchange.shares, strict=True)):
                result.put(index, rank, _of_heads(x, share.heads[rank]))
            received = moving.wait()
            for peer in exchange.peers:
                for index, part in enumerate(recv.parts(received, peer)):
                    result.put(index, peer, part)
        return result.outs

    def to_sequence(self, exchange: Exchange, xs: Sequence[Tensor]) -> list[Tensor]:
        op, rank = f"{exchange.op} to sequence", exchange.rank
        send = _Packets(exchange, xs, lambda share, peer: (share.rows[peer], len(share.heads[rank])))
        recv = _Packets(exchange, xs, lambda share, peer: (share.rows[rank], len(share.heads[peer])))

        def pack(part: Tensor, x: Tensor, share: Share, peer: int) -> None:
            take(x, share.places[peer], part)

        with self._moving(op, exchange, xs, send, recv, pack) as moving:
            result = SequenceResult(exchange, xs)
            received = moving.wait()
            for source in result.order:
                own = source == rank
                for index, x in enumerate(xs if own else recv.parts(received, source)):
                    (result.add if own else result.add_rows)(index, source, x)
        return result.outs

    @contextmanager
    def _moving(
        self,
        op: str,
        exchange: Exchange,
        xs: Sequence[Tensor],
        send: _Packets,
        recv: _Packets,
        pack: Callable[[Tensor, Tensor, Share, int], None],
    ) -> Iterator[Pending[Tensor]]:
        self.check(op, exchange, xs)
        with self._transport.abort_scope(op):
            flat = send.room(xs[0].device)
            for peer in exchange.peers:
                for part, x, share in zip(send.parts(flat, peer), xs, exchange.shares, strict=True):
                    pack(part, x, share, peer)
            yield self._transport.all_to_all(op, flat, send.sizes, recv.sizes)

    def check(self, op: str, exchange: Exchange, xs: Sequence[Tensor]) -> None:
        self._transport.check(op, exchange.dims, xs[0].dtype, xs[0].device)


class _Packets:
    """One packet for each peer, with a part of every tensor in it.

    Args:
        rows_and_heads: of a tensor's part in the packet of a rank.

    Attributes:
        sizes: in bytes, of each rank's packet; a rank's own is empty.
    """

    def __init__(
        self, exchange: Exchange, xs: Sequence[Tensor], rows_and_heads: Callable[[Share, int], tuple[int, int]]
    ) -> None:
        self._dtypes = [x.dtype for x in xs]
        self._shapes = [
            [(x.shape[0], *rows_and_heads(s, peer), x.shape[3]) for x, s in zip(xs, exchange.shares, strict=True)]
            for peer in range(exchange.ranks)
        ]
        self.sizes = [
            0
            if peer == exchange.rank
            else sum(
                _aligned_bytes(shape, dtype, _MESSAGE_ALIGNMENT)
                for shape, dtype in zip(shapes, self._dtypes, strict=True)
            )
            for peer, shapes in enumerate(self._shapes)
        ]
        self._starts = [0, *itertools.accumulate(self.sizes)]

    def room(self, device: torch.device) -> Tensor:
        return torch.empty(self._starts[-1], dtype=torch.uint8, device=device)

    def parts(self, flat: Tensor, peer: int) -> list[Tensor]:
        """The tensors in the packet of `peer`, one of those in `flat`."""
        found, at = [], self._starts[peer]
        for shape, dtype in zip(self._shapes[peer], self._dtypes, strict=True):
            found.append(flat[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape))
            at += _aligned_bytes(shape, dtype, _MESSAGE_ALIGNMENT)
        return found


class SharedMemoryAllToAll(AllToAll):
    """For CPU tensors of ranks on one host: every rank writes once what others want, and they read it straight to its
    place. Results lie in memory of the pool, whose pages are there already."""

    name = "one_sided"

    def __init__(self, transport: ShmTransport) -> None:
        self._transport = transport

    def to_heads(self, exchange: Exchange, xs: Sequence[Tensor]) -> list[Tensor]:
        rank, result = exchange.rank, HeadsResult(exchange, xs, self._transport.empty)

        def shape(x: Tensor, share: Share, of: int) -> tuple[int, ...]:
            return x.shape[0], share.rows[of], share.all_heads, x.shape[3]

        def write(mine: Tensor, x: Tensor, share: Share) -> None:
            own = share.only(rank)
            mine[:, :, : own.start].copy_(x[:, :, : own.start])
            mine[:, :, own.stop :].copy_(x[:, :, own.stop :])

        def read(index: int, source: int, theirs: Tensor) -> None:
            result.put(index, source, _of_heads(theirs, exchange.shares[index].heads[rank]))

        self._exchange("to heads", exchange, xs, [rank, *exchange.peers], shape, write, read)
        return result.outs

    def to_sequence(self, exchange: Exchange, xs: Sequence[Tensor]) -> list[Tensor]:
        rank, result = exchange.rank, SequenceResult(exchange, xs, self._transport.empty)

        def shape(x: Tensor, share: Share, of: int) -> tuple[int, ...]:
            return x.shape[0], share.length, len(share.heads[of]), x.shape[3]

        def write(mine: Tensor, x: Tensor, share: Share) -> None:
            _write_all_but(mine, x, share.places, rank)

        self._exchange("to sequence", exchange, xs, result.order, shape, write, result.add)
        return result.outs

    def _exchange(
        self,
        way: str,
        exchange: Exchange,
        xs: Sequence[Tensor],
        sources: Sequence[int],
        shape: Callable[[Tensor, Share, int], tuple[int, ...]],
        write: Callable[[Tensor, Tensor, Share], None],
        read: Callable[[int, int, Tensor], None],
    ) -> None:
        """`write` what others want; `read(index, source, tensor)` each source in turn. `shape` is that of what a rank
        writes of a tensor."""
        op, rank, shares = f"{exchange.op} {way}", exchange.rank, exchange.shares

        def regions(of: int) -> Iterator[tuple[tuple[int, ...], torch.dtype, int]]:
            offset = 0
            for x, share in zip(xs, shares, strict=True):
                yield shape(x, share, of), x.dtype, offset
                offset += _aligned_bytes(shape(x, share, of), x.dtype, _MEMORY_ALIGNMENT)

        nbytes = sum(_aligned_bytes(one, dtype, _MEMORY_ALIGNMENT) for one, dtype, _ in regions(rank))
        with self._transport.begin(op, exchange.dims, xs[0].dtype, nbytes) as workspace:
            for x, share, region in zip(xs, shares, regions(rank), strict=True):
                write(workspace.buffer(rank, *region), x, share)
            workspace.signal(_READABLE)
            for source in sources:
                if source != rank:
                    workspace.wait(source, _READABLE)
                for index, (x, region) in enumerate(zip(xs, regions(source), strict=True)):
                    read(index, source, x if source == rank else workspace.buffer(source, *region))


def _write_all_but(mine: Tensor, x: Tensor, places: Sequence[Places], rank: int) -> None:
    """What this rank takes of its own it need not write, but many small copies cost more than one large one."""
    others = [there for peer, own in enumerate(places) if peer != rank for _, there in pieces(own)]
    if by_index(len(others)):
        mine.copy_(x)
        return
    for there in others:
        mine[:, there].copy_(x[:, there])


class DeviceAllToAll(AllToAll):
    """For GPUs that reach each other's memory, by one device kernel that pulls the parts from their places there.

    The kernel moves equal parts and puts the ranks' rows one behind the other. Where the layout has another order, one
    pass sorts them; what is not even goes by messages.
    """

    def __init__(self, schedule: DeviceSchedule, messages: MessageAllToAll) -> None:
        self.name = schedule.name
        self._abort_scope = schedule.abort_scope
        self._device = schedule.device
        self._messages = messages

    def to_heads(self, exchange: Exchange, xs: Sequence[Tensor]) -> list[Tensor]:
        def move(x: Tensor, one: Exchange) -> Tensor:
            moved, (share,) = self._device.sequence_to_heads(x), one.shares
            if _in_order(share):
                return moved
            result = HeadsResult(one, [x])
            for source, part in enumerate(moved.split(list(share.rows), 1)):
                result.put(0, source, part)
            return result.outs[0]

        return self._by_kernel("to heads", exchange, xs, move, self._messages.to_heads)

    def to_sequence(self, exchange: Exchange, xs: Sequence[Tensor]) -> list[Tensor]:
        def move(x: Tensor, one: Exchange) -> Tensor:
            (share,), (dtype,) = one.shares, one.dtypes
            if not _in_order(share):
                whole, x = x, x.new_empty(x.shape)
                for places, part in zip(share.places, x.split(list(share.rows), 1), strict=True):
                    take(whole, places, part)
            return self._device.heads_to_sequence(x).to(dtype)

        return self._by_kernel("to sequence", exchange, xs, move, self._messages.to_sequence)

    def _by_kernel(
        self,
        way: str,
        exchange: Exchange,
        xs: Sequence[Tensor],
        move: Callable[[Tensor, Exchange], Tensor],
        by_messages: Callable[[Exchange, Sequence[Tensor]], list[Tensor]],
    ) -> list[Tensor]:
        """`move` for what is even, messages for the rest."""
        uneven = [i for i, share in enumerate(exchange.shares) if not share.even]
        found: dict[int, Tensor] = {}
        with self._abort_scope(exchange.op):
            if uneven:
                found.update(zip(uneven, by_messages(exchange.of(uneven), [xs[i] for i in uneven]), strict=True))
            else:
                self._messages.check(f"{exchange.op} {way}", exchange, xs)
            for i, x in enumerate(xs):
                if i not in found:
                    found[i] = move(x, exchange.of([i]))
        return [found[i] for i in range(len(xs))]


def _in_order(share: Share) -> bool:
    """Whether the ranks' rows lie one behind the other."""
    ends = [0, *(places[-1].stop if len(places) == 1 else -1 for places in share.places)]
    return all(len(places) == 1 and places[0].start == end for places, end in zip(share.places, ends, strict=False))
