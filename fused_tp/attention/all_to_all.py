"""All-to-all between sharding by sequence and sharding by heads, for Ulysses attention.

Each rank starts with some tokens of all heads, [B, S_r, H, D], and receives all tokens of some heads, [B, S, H_r, D],
in the order of the sequence; the reverse direction undoes it. If there are fewer key heads than ranks, a key head is
sent to several ranks; the reverse direction then sums these copies in fp32, in the order of the ranks.
(Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509.)
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from fused_tp.attention.layout import Tokens
from fused_tp.backends.cuda.device_schedule import DeviceSchedule
from fused_tp.backends.messages.torch_dist import TorchDist
from fused_tp.backends.schedule import Schedule
from fused_tp.backends.shared_memory.shared_memory import SharedMemory
from fused_tp.backends.shared_memory.shm import ShmTransport
from fused_tp.core.pending import accumulate_dtype

Places = tuple[range, ...]
Shape = tuple[int, ...]

# Rows in more ranges than this are copied by one indexed copy: on a GPU every slice copy is a kernel launch.
_MOST_RANGES = 16
_MESSAGE_ALIGNMENT = 16  # alignment of each tensor in a message, in bytes
_MEMORY_ALIGNMENT = 64  # alignment of each tensor in shared memory, in bytes: a cache line
_READABLE = 1  # stage that a rank signals once its input tensors are in shared memory


@dataclass(frozen=True)
class TensorShare:
    """Distribution of one tensor: the rows and the heads of each rank.

    Attributes:
        places: for each rank, the ranges of global positions of its rows, ascending.
        heads: for each rank, the heads that it receives.
        all_heads: total number of heads.
    """

    places: tuple[Places, ...]
    heads: tuple[range, ...]
    all_heads: int

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Number of rows that each rank holds."""
        return tuple(sum(map(len, places)) for places in self.places)

    @cached_property
    def length(self) -> int:
        return sum(self.rows)

    def by_sequence(self, rank: int) -> tuple[int, int]:
        """(rows, heads) of `rank` if the tensor is sharded along the sequence."""
        return self.rows[rank], self.all_heads

    def by_heads(self, rank: int) -> tuple[int, int]:
        return self.length, len(self.heads[rank])

    def part(self, holder: int, reader: int) -> tuple[int, int]:
        """(rows, heads) of the block with the rows of rank `holder` and the heads of rank `reader`."""
        return self.rows[holder], len(self.heads[reader])

    @cached_property
    def repeated(self) -> bool:
        """True if several ranks receive the same head."""
        return sum(map(len, self.heads)) > self.all_heads

    @cached_property
    def even(self) -> bool:
        """True if all ranks hold equally many rows and no two ranks receive the same head."""
        return len(set(self.rows)) == 1 and not self.repeated

    def only(self, rank: int) -> range:
        """The heads that only `rank` receives. They are contiguous, because each rank's heads are a range."""
        others = {head for other, heads in enumerate(self.heads) if other != rank for head in heads}
        own = [head for head in self.heads[rank] if head not in others]
        return range(own[0], own[-1] + 1) if own else range(0)


@lru_cache(maxsize=64)
def places_of(tokens: tuple[Tokens, ...]) -> tuple[Places, ...]:
    """`TensorShare.places` for `tokens`, the global tokens of each rank."""
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
class Swap:
    """Description of one all-to-all of several tensors, on this rank.

    `op` is the op that it is part of, for error messages. `dims` must be equal on all ranks.
    """

    op: str
    dims: tuple[int, ...]
    rank: int
    shares: tuple[TensorShare, ...]
    dtypes: tuple[torch.dtype, ...]

    @property
    def ranks(self) -> int:
        return len(self.shares[0].places)

    @property
    def peers(self) -> list[int]:
        """All ranks but this one. The order differs per rank, so that they do not all read the same memory at once."""
        return [(self.rank + step) % self.ranks for step in range(1, self.ranks)]

    def of(self, which: Sequence[int]) -> Swap:
        """The exchange of only the tensors whose indices are in `which`."""
        shares, dtypes = tuple(self.shares[i] for i in which), tuple(self.dtypes[i] for i in which)
        return replace(self, shares=shares, dtypes=dtypes)


Empty = Callable[[Sequence[int], torch.dtype], Tensor]


class Move:
    """One direction of an exchange: the input tensors of this rank, and the results, filled block by block.

    Args:
        to_heads: True: x [B, rows of this rank, all heads, D] -> [B, all rows, heads of this rank, D]. False: the
            reverse direction, which sums the copies of a head that several ranks hold.
        empty: allocator of the results. None: allocate on the devices of `xs`.
    """

    def __init__(self, to_heads: bool, exchange: Swap, xs: Sequence[Tensor], empty: Empty | None = None) -> None:
        self.to_heads, self.exchange, self.xs, self.shares = to_heads, exchange, xs, exchange.shares
        self.op = f"{exchange.op} to {'heads' if to_heads else 'sequence'}"
        self._summed = [share.repeated and not to_heads for share in exchange.shares]
        self._outs = [self._result(index, empty) for index in range(len(xs))]

    def _result(self, index: int, empty: Empty | None) -> Tensor:
        x, share, rank = self.xs[index], self.shares[index], self.exchange.rank
        shape = self._shape(index, share.by_heads(rank) if self.to_heads else share.by_sequence(rank))
        if self._summed[index]:
            return x.new_zeros(shape, dtype=accumulate_dtype(x.dtype))
        dtype = self.exchange.dtypes[index]
        return x.new_empty(shape, dtype=dtype) if empty is None else empty(shape, dtype)

    def _shape(self, index: int, rows_and_heads: tuple[int, int]) -> Shape:
        x = self.xs[index]
        return x.shape[0], *rows_and_heads, x.shape[3]

    @property
    def order(self) -> list[int]:
        """The order in which the ranks' blocks are read: this rank first, unless a sum must be in rank order."""
        exchange = self.exchange
        return list(range(exchange.ranks)) if any(self._summed) else [exchange.rank, *exchange.peers]

    def shape(self, index: int, rank: int) -> Shape:
        """Shape of input tensor number `index` on `rank`."""
        share = self.shares[index]
        return self._shape(index, share.by_sequence(rank) if self.to_heads else share.by_heads(rank))

    def part_shape(self, index: int, source: int, target: int) -> Shape:
        """Shape of the block of tensor number `index` that rank `source` sends to rank `target`."""
        share = self.shares[index]
        return self._shape(index, share.part(source, target) if self.to_heads else share.part(target, source))

    def pack(self, index: int, target: int, out: Tensor) -> None:
        """Copy the block of tensor number `index` that rank `target` receives to `out`."""
        x, share = self.xs[index], self.shares[index]
        if self.to_heads:
            out.copy_(_of_heads(x, share.heads[target]))
        else:
            _take(x, share.places[target], out)

    def write(self, index: int, out: Tensor) -> None:
        """Copy the blocks that other ranks read to `out`, which has the shape of the input, at the same indices."""
        x, share, exchange = self.xs[index], self.shares[index], self.exchange
        if self.to_heads:
            own = share.only(exchange.rank)
            out[:, :, : own.start].copy_(x[:, :, : own.start])
            out[:, :, own.stop :].copy_(x[:, :, own.stop :])
            return
        # No peer reads this rank's own rows, but copying them too is faster than many small copies around them.
        others = [there for peer in exchange.peers for _, there in _pieces(share.places[peer])]
        for there in [slice(None)] if len(others) > _MOST_RANGES else others:
            out[:, there].copy_(x[:, there])

    def put(self, index: int, source: int, part: Tensor) -> None:
        """Write `part`, the block that rank `source` sends to this rank, into the result, or add it to a sum."""
        out, share = self._outs[index], self.shares[index]
        if not self.to_heads:
            out = _of_heads(out, share.heads[source])
            out.add_(part) if self._summed[index] else out.copy_(part)
            return
        places = share.places[source]
        if len(places) > _MOST_RANGES:
            out.index_copy_(1, _indices(places, out.device), part.to(out.dtype))
            return
        for here, there in _pieces(places):
            out[:, there].copy_(part[:, here])

    def put_from(self, index: int, source: int, whole: Tensor) -> None:
        """`put` this rank's block of `whole`, the full input tensor of rank `source`."""
        share, rank = self.shares[index], self.exchange.rank
        if self.to_heads:
            self.put(index, source, _of_heads(whole, share.heads[rank]))
        else:
            out = _of_heads(self._outs[index], share.heads[source])
            _take(whole, share.places[rank], out, add=self._summed[index])

    def results(self) -> list[Tensor]:
        return [out.to(dtype) for out, dtype in zip(self._outs, self.exchange.dtypes, strict=True)]


def _take(whole: Tensor, places: Places, out: Tensor, *, add: bool = False) -> None:
    """Copy the rows of `whole` at positions `places` to `out`; with `add`, add them to `out`."""
    if len(places) > _MOST_RANGES:
        rows = whole.index_select(1, _indices(places, whole.device))
        out.add_(rows) if add else out.copy_(rows)
        return
    for here, there in _pieces(places):
        out[:, here].add_(whole[:, there]) if add else out[:, here].copy_(whole[:, there])


def _pieces(places: Places) -> Iterator[tuple[slice, slice]]:
    """Yield (local rows, their global positions) for each range of a rank's `places`."""
    at = 0
    for place in places:
        yield slice(at, at + len(place)), slice(place.start, place.stop)
        at += len(place)


def _indices(places: Places, device: torch.device) -> Tensor:
    return torch.cat([torch.arange(r.start, r.stop, device="cpu") for r in places]).to(device)


def _of_heads(x: Tensor, heads: range) -> Tensor:
    return x[:, :, heads.start : heads.stop]


class AllToAll(ABC):
    """Transport of an exchange: transfers each rank's blocks. Results do not share memory with the inputs."""

    name: str

    @abstractmethod
    def move(self, to_heads: bool, exchange: Swap, xs: Sequence[Tensor]) -> list[Tensor]:
        """Return the results of a `Move` of `xs`."""


def all_to_all_by(schedule: Schedule) -> AllToAll:
    """Return the all-to-all that uses the transport of `schedule`."""
    if isinstance(schedule, SharedMemory):
        return SharedMemoryAllToAll(schedule.transport)
    messages = MessageAllToAll(schedule.name, schedule.messages)
    return DeviceAllToAll(schedule, messages) if isinstance(schedule, DeviceSchedule) else messages


class MessageAllToAll(AllToAll):
    """All-to-all by messages, on any torch.distributed group. One message holds a rank's blocks of all tensors."""

    def __init__(self, name: str, transport: TorchDist) -> None:
        self.name = name
        self._transport = transport

    def move(self, to_heads: bool, exchange: Swap, xs: Sequence[Tensor]) -> list[Tensor]:
        move, rank = Move(to_heads, exchange, xs), exchange.rank
        self.check(move.op, exchange, xs)
        with self._transport.abort_scope(move.op):
            send = _Packets(move, lambda index, peer: move.part_shape(index, rank, peer))
            recv = _Packets(move, lambda index, peer: move.part_shape(index, peer, rank))
            flat = torch.empty(sum(send.sizes), dtype=torch.uint8, device=xs[0].device)
            for peer in exchange.peers:
                for index, part in enumerate(send.parts(flat, peer)):
                    move.pack(index, peer, part)
            moving = self._transport.all_to_all(move.op, flat, send.sizes, recv.sizes)
            received: Tensor | None = None
            for source in move.order:
                if source == rank:
                    for index, x in enumerate(xs):
                        move.put_from(index, rank, x)
                    continue
                if received is None:
                    received = moving.wait()
                for index, part in enumerate(recv.parts(received, source)):
                    move.put(index, source, part)
        return move.results()

    def check(self, op: str, exchange: Swap, xs: Sequence[Tensor]) -> None:
        self._transport.check(op, exchange.dims, xs[0].dtype, xs[0].device)


class _Packets:
    """Byte layout of one packet per peer, which holds a block of every tensor.

    Args:
        part_shape: maps (index, peer) to the shape of tensor number `index` in the packet of rank `peer`.

    Attributes:
        sizes: bytes of each rank's packet; 0 for this rank.
    """

    def __init__(self, move: Move, part_shape: Callable[[int, int], Shape]) -> None:
        self._dtypes = [x.dtype for x in move.xs]
        self._shapes = [
            [part_shape(index, peer) for index in range(len(move.xs))] for peer in range(move.exchange.ranks)
        ]
        self.sizes = [
            0 if peer == move.exchange.rank else sum(map(_message_bytes, shapes, self._dtypes))
            for peer, shapes in enumerate(self._shapes)
        ]
        self._starts = [0, *itertools.accumulate(self.sizes)]

    def parts(self, flat: Tensor, peer: int) -> Iterator[Tensor]:
        """Yield views of the tensors in the packet of `peer`; `flat` holds the packets of all ranks."""
        at = self._starts[peer]
        for shape, dtype in zip(self._shapes[peer], self._dtypes, strict=True):
            yield flat[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            at += _message_bytes(shape, dtype)


def _message_bytes(shape: Shape, dtype: torch.dtype) -> int:
    return _aligned_bytes(shape, dtype, _MESSAGE_ALIGNMENT)


def _aligned_bytes(shape: Shape, dtype: torch.dtype, alignment: int) -> int:
    return -(-math.prod(shape) * dtype.itemsize // alignment) * alignment


class SharedMemoryAllToAll(AllToAll):
    """All-to-all of CPU tensors between ranks on one host.

    Each rank writes the blocks that its peers read to shared memory once, and the peers copy them into their results.
    The results are allocated from the transport's pool, whose pages are already mapped.
    """

    name = "one_sided"

    def __init__(self, transport: ShmTransport) -> None:
        self._transport = transport

    def move(self, to_heads: bool, exchange: Swap, xs: Sequence[Tensor]) -> list[Tensor]:
        move, rank = Move(to_heads, exchange, xs, self._transport.empty), exchange.rank

        def regions(of: int) -> Iterator[tuple[Shape, torch.dtype, int]]:
            """Yield (shape, dtype, offset) of each tensor in the shared memory of rank `of`."""
            offset = 0
            for index, x in enumerate(xs):
                shape = move.shape(index, of)
                yield shape, x.dtype, offset
                offset += _aligned_bytes(shape, x.dtype, _MEMORY_ALIGNMENT)

        nbytes = sum(_aligned_bytes(shape, dtype, _MEMORY_ALIGNMENT) for shape, dtype, _ in regions(rank))
        with self._transport.begin(move.op, exchange.dims, xs[0].dtype, nbytes) as workspace:
            for index, region in enumerate(regions(rank)):
                move.write(index, workspace.buffer(rank, *region))
            workspace.signal(_READABLE)
            for source in move.order:
                if source != rank:
                    workspace.wait(source, _READABLE)
                for index, (x, region) in enumerate(zip(xs, regions(source), strict=True)):
                    move.put_from(index, source, x if source == rank else workspace.buffer(source, *region))
        return move.results()


class DeviceAllToAll(AllToAll):
    """All-to-all of GPUs that can access each other's memory: one device kernel reads the blocks from the peers.

    The kernel supports only blocks of equal size, and concatenates the ranks' rows. If the layout is not in rank order,
    one more pass reorders the rows. Tensors with blocks of unequal sizes are sent by messages.
    """

    def __init__(self, schedule: DeviceSchedule, messages: MessageAllToAll) -> None:
        self.name = schedule.name
        self._abort_scope = schedule.abort_scope
        self._device = schedule.device
        self._messages = messages

    def move(self, to_heads: bool, exchange: Swap, xs: Sequence[Tensor]) -> list[Tensor]:
        uneven = [i for i, share in enumerate(exchange.shares) if not share.even]
        found: dict[int, Tensor] = {}
        with self._abort_scope(exchange.op):
            if uneven:
                moved = self._messages.move(to_heads, exchange.of(uneven), [xs[i] for i in uneven])
                found.update(zip(uneven, moved, strict=True))
            else:
                way = "heads" if to_heads else "sequence"
                self._messages.check(f"{exchange.op} to {way}", exchange, xs)
            for i, x in enumerate(xs):
                if i not in found:
                    found[i] = self._by_kernel(to_heads, exchange.of([i]), x)
        return [found[i] for i in range(len(xs))]

    def _by_kernel(self, to_heads: bool, exchange: Swap, x: Tensor) -> Tensor:
        (share,), (dtype,) = exchange.shares, exchange.dtypes
        runs = [places[0] for places in share.places if len(places) == 1]
        in_order = len(runs) == exchange.ranks and all(a.stop == b.start for a, b in itertools.pairwise(runs))
        if not to_heads:
            if not in_order:
                whole, x = x, x.new_empty(x.shape)
                for places, part in zip(share.places, x.split(list(share.rows), 1), strict=True):
                    _take(whole, places, part)
            return self._device.heads_to_sequence(x).to(dtype)
        moved = self._device.sequence_to_heads(x)
        if in_order:
            return moved
        move = Move(True, exchange, [x])
        for source, part in enumerate(moved.split(list(share.rows), 1)):
            move.put(0, source, part)
        return move.results()[0]
