"""Ring attention by messages: at step t every rank gets from rank r - t the keys that it reads, and nothing else.

The keys of step t + 1 travel while those of step t are used, so at most three sets of K/V are on a rank: its own, those
in use, those arriving. The terms of dK/dV return while the next chunk computes. Buffers are allocated once a call and
used in turn: allocated chunk by chunk they would fragment the heap, which is memory too.

Not passed on from neighbour to neighbour, as a ring is named for: with a window or documents most ranks need a part of
most others' keys, or none, and would have to carry what they do not need. The bytes are the same where all need all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor

from fused_tp.attention.plan import Rows
from fused_tp.attention.ring import Chunk, KVExchange, KVView, RingCall, SteppedRing, add_to, from_wire, parts_of
from fused_tp.runtime import settings
from fused_tp.transport.base import After, Done, Pending, accumulate_dtype
from fused_tp.transport.torch_dist import TorchDist

Pair = tuple[Tensor, Tensor]


class MessageRing(SteppedRing):
    """Works on every torch.distributed group."""

    name = "pipelined"
    view = KVView.NEEDED

    def __init__(self, transport: TorchDist) -> None:
        self._transport = transport

    @contextmanager
    def _exchange(
        self, op: str, call: RingCall, chunks: Sequence[Chunk], k: Tensor, v: Tensor, attend_own: Callable[[], None]
    ) -> Iterator[KVExchange]:
        self._transport.check(op, call.dims, k.dtype, k.device)
        with self._transport.abort_scope(op):
            exchange = _Messages(self._transport, chunks, k, v)
            attend_own()
            yield exchange


class _Buffers:
    """Pairs [rows, B, H, D], for parts of K and V or of their gradients, that are used in turn."""

    def __init__(self, k: Tensor, v: Tensor, rows: Iterable[int], dtype: torch.dtype, count: int) -> None:
        most = max(rows, default=0)

        def room(like: Tensor) -> Tensor:
            return like.new_empty((most, like.shape[0], *like.shape[2:]), dtype=dtype)

        self._pairs = [(room(k), room(v)) for _ in range(count)]

    def at(self, number: int, rows: int) -> Pair:
        first, second = self._pairs[number % len(self._pairs)]
        return first[:rows], second[:rows]


class _Messages(KVExchange):
    def __init__(self, transport: TorchDist, chunks: Sequence[Chunk], k: Tensor, v: Tensor) -> None:
        self._transport, self._chunks, self._own = transport, chunks, (k, v)
        self._wire_dtype = k.dtype if settings.narrow_gradients() else accumulate_dtype(k.dtype)
        self._recv = [len(chunk.recv_rows) for chunk in chunks]
        self._keys = _Buffers(k, v, self._recv, k.dtype, min(2, len(chunks)))
        self._returning: tuple[Rows, Pending[Pair]] | None = None
        self._arriving = self._start(0)

    def keys(self, index: int) -> Pair:
        arrived = self._arriving.wait()
        self._arriving = self._start(index + 1)
        return arrived

    def _start(self, index: int) -> Pending[Pair]:
        """Start receiving the keys of a chunk, and sending ours to the rank that reads them; nothing after the last."""
        if index == len(self._chunks):
            return Done(self._own)
        chunk = self._chunks[index]
        return _both(
            self._transport.shift("ring_attention K/V", _to_wire(own, chunk.send_rows), room, chunk.t)
            for own, room in zip(self._own, self._keys.at(index, self._recv[index]), strict=True)
        )

    @cached_property
    def _found(self) -> _Buffers:
        """Terms: those of one chunk are computed while those of the one before are on their way."""
        wide = accumulate_dtype(self._own[0].dtype)
        return _Buffers(*self._own, self._recv, wide, min(2, len(self._chunks)))

    @cached_property
    def _returned(self) -> _Buffers:
        return _Buffers(*self._own, (chunk.send_rows.length for chunk in self._chunks), self._wire_dtype, 1)

    def terms(self, index: int) -> Pair:
        first, second = self._found.at(index, self._recv[index])
        return from_wire(first.zero_()), from_wire(second.zero_())

    def return_terms(self, index: int, own: Sequence[Tensor]) -> None:
        self.finish(own)
        chunk = self._chunks[index]
        found, rooms = self._found.at(index, self._recv[index]), self._returned.at(0, chunk.send_rows.length)
        moving = _both(
            self._transport.shift("ring_attention dK/dV", term.to(self._wire_dtype), room, -chunk.t)
            for term, room in zip(found, rooms, strict=True)
        )
        self._returning = chunk.send_rows, moving

    def finish(self, own: Sequence[Tensor]) -> None:
        """Add what came back for our keys in the chunk that was sent last, if any."""
        if self._returning is None:
            return
        rows, moving = self._returning
        for total, term in zip(own, moving.wait(), strict=True):
            add_to(total, rows, term)
        self._returning = None


def _to_wire(x: Tensor, rows: Rows) -> Tensor:
    """These tokens of x [B, S, H, D] as contiguous [rows, B, H, D]; of one range and for B = 1 it is x itself, not a
    copy."""
    parts = [part.transpose(0, 1) for part in parts_of(x, rows) or [x[:, :0]]]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


def _both(moving: Iterable[Pending[Tensor]]) -> Pending[Pair]:
    first, second = moving
    return After(lambda: (from_wire(first.wait()), from_wire(second.wait())))
