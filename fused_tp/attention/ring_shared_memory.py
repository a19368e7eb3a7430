"""Ring attention over shared memory: peers read a rank's K/V in place.

Each rank writes the K/V rows that others read into its workspace once, signals it, and reads its peers' rows in place,
one peer per step in the order of the ring, so that not all ranks read the same memory at once.

The backward runs in chunks n = 1, 2, ... (`RingCall.chunks`). A rank signals these stages:

    1       its K/V are readable
    2n      its term of chunk n is readable
    2n + 3  it has added the term that its consumer computed for it in chunk n

Terms of dK/dV are stored in two slots, used in turn. Before chunk n overwrites the terms that chunk m < n left in its
slot, the owner of the keys of m must have reached stage 2m + 3. m is n - 2, or an earlier chunk if this rank had no
terms in between; then its owner is another rank. An owner reaches that stage after its own chunk m + 1, so ranks may
drift apart by a chunk before any of them waits, and memory does not grow with W.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fused_tp.attention.ring import Chunk, KVExchange, KVView, RingCall, SteppedRing, add_to, from_wire, parts_of
from fused_tp.backends.shared_memory.shm import ShmCall, ShmTransport
from fused_tp.core.pending import accumulate_dtype

_ALIGNMENT = 64  # a cache line, and the widest vector
_KEYS_READABLE = 1
_SLOTS = 2

_Region = tuple[Sequence[int], torch.dtype, int]


class SharedMemoryRing(SteppedRing):
    """Serves the CPU tensors of ranks on one host."""

    name = "one_sided"
    view = KVView.UNION

    def __init__(self, transport: ShmTransport) -> None:
        self._transport = transport

    @contextmanager
    def _exchange(
        self, op: str, call: RingCall, chunks: Sequence[Chunk], k: Tensor, v: Tensor, attend_own: Callable[[], None]
    ) -> Iterator[KVExchange]:
        """Run step 0 first if peers are still in the previous call: they do not need these keys yet, and may still read
        the keys of that call, beside which these would have to be stored.

        A peer whose mask hides all of this rank's keys ends the call as soon as this rank has begun it, so an error
        before the first signal is already one in the middle of the op.
        """
        slots = _SLOTS if op.endswith("backward") else 0
        nbytes = _Regions(call, call.rank, k, v, slots).nbytes
        early = self._transport.settled
        if not early:
            try:
                attend_own()
            except BaseException:
                with self._transport.begin(op, call.dims, k.dtype, 0) as workspace:
                    workspace.peers_may_end = True
                    raise  # the open workspace notifies the peers
        with self._transport.begin(op, call.dims, k.dtype, nbytes, reuse=True) as workspace:
            workspace.peers_may_end = True
            exchange = _InPlace(workspace, call, chunks, k, v, slots)
            if early:
                attend_own()
            yield exchange


class _Regions:
    """Memory layout of one rank's workspace, which every rank can compute."""

    def __init__(self, call: RingCall, rank: int, k: Tensor, v: Tensor, slots: int) -> None:
        plan = call.plan
        self._offset = 0
        self.rows = plan.given(rank)  # rows without a reader are not written
        self.keys = [self._region(x, self.rows.length, x.dtype) for x in (k, v)]
        others = [other for other in range(plan.world_size) if other != rank]
        most = min(call.chunk_rows, max((len(call.local_index(rank, other)) for other in others), default=0))
        self._slots = [
            [self._region(x, most, accumulate_dtype(x.dtype)) for x in (k, v)]
            for _ in range(min(slots, len(call.chunks)))
        ]
        self.nbytes = self._offset

    def terms(self, number: int) -> list[_Region]:
        return self._slots[number % len(self._slots)]

    def _region(self, like: Tensor, rows: int, dtype: torch.dtype) -> _Region:
        shape = (rows, like.shape[0], *like.shape[2:])
        region = (shape, dtype, self._offset)
        self._offset += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        return region


class _InPlace(KVExchange):
    """Views of the workspaces of all ranks in one call, as keys and as terms of their gradients."""

    def __init__(
        self, workspace: ShmCall, call: RingCall, chunks: Sequence[Chunk], k: Tensor, v: Tensor, slots: int
    ) -> None:
        self._workspace, self._call, self._chunks, self._k, self._v = workspace, call, chunks, k, v
        self._slots = slots
        self._known: dict[int, _Regions] = {}
        self._written: dict[int, int] = {}  # the chunk whose terms each slot holds
        mine = self._regions(call.rank)
        for region, own in zip(mine.keys, (k, v), strict=True):
            room = self._view(call.rank, region).split([len(r) for r in mine.rows.ranges], 1)
            for part, of_own in zip(room, parts_of(own, mine.rows), strict=True):
                part.copy_(of_own)
        workspace.signal(_KEYS_READABLE)

    def keys(self, index: int) -> tuple[Tensor, Tensor]:
        t, rows, _ = self._chunks[index]
        if not rows:
            return self._k[:, :0], self._v[:, :0]
        source = self._call.plan.source(self._call.rank, t)
        self._workspace.wait(source, _KEYS_READABLE)
        regions = self._regions(source)
        first = regions.rows.ranges[0].start
        k, v = (self._view(source, region)[:, rows.start - first : rows.stop - first] for region in regions.keys)
        return k, v

    def terms(self, index: int) -> tuple[Tensor, Tensor]:
        n, rows = index + 1, self._chunks[index].recv_rows
        if not rows:
            return self._k[:, :0], self._v[:, :0]
        if (m := self._written.get(n % _SLOTS)) is not None:
            owner = self._call.plan.source(self._call.rank, self._chunks[m - 1].t)
            self._workspace.wait(owner, _stage_added(m))
        self._written[n % _SLOTS] = n
        dk, dv = self._terms_of(self._call.rank, n, len(rows))
        return dk.zero_(), dv.zero_()

    def return_terms(self, index: int, own: Sequence[Tensor]) -> None:
        n = index + 1
        self._workspace.signal(_stage_found(n))
        if n > 1:
            self._add(n - 1, own)
            self._workspace.signal(_stage_added(n - 1))

    def finish(self, own: Sequence[Tensor]) -> None:
        self._add(len(self._chunks), own)

    def _add(self, n: int, own: Sequence[Tensor]) -> None:
        """Add the terms that the consumer of our keys computed in chunk n."""
        t, _, rows = self._chunks[n - 1]
        if rows.length:
            consumer = self._call.consumer(t)
            self._workspace.wait(consumer, _stage_found(n))
            for total, term in zip(own, self._terms_of(consumer, n, rows.length), strict=True):
                add_to(total, rows, term)

    def _terms_of(self, rank: int, n: int, rows: int) -> tuple[Tensor, Tensor]:
        dk, dv = (self._view(rank, region)[:, :rows] for region in self._regions(rank).terms(n))
        return dk, dv

    def _regions(self, rank: int) -> _Regions:
        if rank not in self._known:
            self._known[rank] = _Regions(self._call, rank, self._k, self._v, self._slots)
        return self._known[rank]

    def _view(self, rank: int, region: _Region) -> Tensor:
        shape, dtype, offset = region
        return from_wire(self._workspace.buffer(rank, shape, dtype, offset))


def _stage_found(n: int) -> int:
    return 2 * n


def _stage_added(n: int) -> int:
    return 2 * n + 3
