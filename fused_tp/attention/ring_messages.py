"""Ring attention over torch.distributed, on any group: by messages (`MessageRing`) or collectives (`AllGatherRing`).

At step t, rank r receives from rank r - t only the keys that it reads.

The keys of step t + 1 are transferred while step t is computed, so a rank holds at most three sets of K/V: its own, the
set in use, and the set arriving. Partial sums of dK/dV are returned while the next chunk is computed. Buffers are
allocated once per call and reused in turn: allocating them per chunk would fragment the heap and use more memory.

Rejected: passing keys from neighbor to neighbor around the ring. With a window or documents, a rank reads only some or
none of the keys of most other ranks, and would have to forward keys that it does not read. If every rank reads all
keys, both variants send the same number of bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from fused_tp.attention.ring import (
    OP,
    Backward,
    Forward,
    Gradients,
    KVExchange,
    Ring,
    RingCall,
    RingSaved,
    SteppedRing,
    add_to,
    fp32_accumulator,
)
from fused_tp.attention.ring_plan import Chunk, KVView, Rows
from fused_tp.backends.messages.torch_dist import TorchDist
from fused_tp.core import settings
from fused_tp.core.pending import Pending, PendingCall, PendingValue, accumulate_dtype

Pair = tuple[Tensor, Tensor]
_MAX_GATHERED_BYTES = 64 << 20  # maximum size of the K/V gathered at a time, at least one key head


class MessageRing(SteppedRing):
    """Ring attention step by step, by messages."""

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
            exchange = _RingMessages(self._transport, chunks, k, v)
            attend_own()
            yield exchange


class _Buffers:
    """`count` pairs of buffers [rows, B, H, D], for chunks of K and V or of their gradients, used in turn."""

    def __init__(self, k: Tensor, v: Tensor, rows: Iterable[int], dtype: torch.dtype, count: int) -> None:
        most = max(rows, default=0)

        def buffer(like: Tensor) -> Tensor:
            return like.new_empty((most, like.shape[0], *like.shape[2:]), dtype=dtype)

        self._pairs = [(buffer(k), buffer(v)) for _ in range(count)]

    def at(self, number: int, rows: int) -> Pair:
        first, second = self._pairs[number % len(self._pairs)]
        return first[:rows], second[:rows]


class _RingMessages(KVExchange):
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
        """Start receiving the keys of chunk `index`, and sending this rank's keys to the rank that reads them.

        After the last chunk, does nothing and returns this rank's keys as a placeholder.
        """
        if index == len(self._chunks):
            return PendingValue(self._own)
        chunk = self._chunks[index]
        return _both(
            self._transport.shift("ring_attention K/V", _to_wire(own, chunk.send_rows), room, chunk.t)
            for own, room in zip(self._own, self._keys.at(index, self._recv[index]), strict=True)
        )

    @cached_property
    def _found(self) -> _Buffers:
        """Buffers of partial gradients to send: one chunk is computed while the previous chunk is sent."""
        wide = accumulate_dtype(self._own[0].dtype)
        return _Buffers(*self._own, self._recv, wide, min(2, len(self._chunks)))

    @cached_property
    def _returned(self) -> _Buffers:
        return _Buffers(*self._own, (chunk.send_rows.length for chunk in self._chunks), self._wire_dtype, 1)

    def terms(self, index: int) -> Pair:
        first, second = self._found.at(index, self._recv[index])
        return first.zero_().transpose(0, 1), second.zero_().transpose(0, 1)

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
        """Add the partial gradients that arrive for the last chunk whose gradients were sent, if any, to `own`."""
        if self._returning is None:
            return
        rows, moving = self._returning
        for total, term in zip(own, moving.wait(), strict=True):
            add_to(total, rows, term)
        self._returning = None


def _to_wire(x: Tensor, rows: Rows) -> Tensor:
    """Return the rows `rows` of `x` [B, S, H, D] as contiguous [rows, B, H, D]; a view if B = 1 and one range."""
    parts = [x[:, r.start : r.stop].transpose(0, 1) for r in rows.ranges or (range(0),)]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


def _both(moving: Iterable[Pending[Tensor]]) -> Pending[Pair]:
    first, second = moving

    def finish() -> Pair:
        return first.wait().transpose(0, 1), second.wait().transpose(0, 1)

    return PendingCall(finish)


class AllGatherRing(Ring):
    """Ring attention by collectives: all-gathers K/V, computes, and reduce-scatters dK/dV.

    Intended for short sequences, where latency dominates the cost of W - 1 messages. To limit memory, longer sequences
    are processed in groups of key heads. The keys of the next group are gathered while the current group is computed
    (Llama 3's context parallelism, arXiv:2407.21783, section 3.3.2).
    """

    name = "plain"

    def __init__(self, transport: TorchDist) -> None:
        self._transport = transport

    def forward(self, call: RingCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self._transport.check(OP, call.dims, q.dtype, q.device)
        groups, results = _head_groups(call, q, k, v), []
        with self._transport.abort_scope(OP):
            for heads, kv_heads, everyone in self._gathered(call, groups, k, v):
                state = Forward(call.of_heads(heads), q[:, :, heads], v[:, :, kv_heads])
                for t in range(call.plan.world_size):
                    state.attend(t, *_keys_of(call, everyone, t, k))
                results.append(state.result())
        if len(results) == 1:
            return results[0]
        return torch.cat([out for out, _ in results], 2), torch.cat([lse for _, lse in results], 1)

    def backward(self, call: RingCall, saved: RingSaved) -> Gradients:
        k, v = saved.k, saved.v
        self._transport.check(f"{OP}_backward", call.dims, k.dtype, k.device)
        groups = _head_groups(call, saved.q, k, v)
        with self._transport.abort_scope(f"{OP}_backward"):
            parts = [
                self._gradients(call.of_heads(heads), saved.of_heads(heads, kv_heads), everyone)
                for heads, kv_heads, everyone in self._gathered(call, groups, k, v)
            ]
        return parts[0] if len(parts) == 1 else _joined(parts)

    def _gathered(
        self, call: RingCall, groups: list[tuple[slice, slice]], k: Tensor, v: Tensor
    ) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield (query heads, key heads, K/V of all ranks) of each group while the next group's K/V are gathered."""
        arriving = self._gather(call, k, v, groups[0][1])
        for index, (heads, kv_heads) in enumerate(groups):
            everyone = arriving.wait()
            if index + 1 < len(groups):
                arriving = self._gather(call, k, v, groups[index + 1][1])
            yield heads, kv_heads, everyone

    def _gradients(self, call: RingCall, saved: RingSaved, everyone: Tensor) -> Gradients:
        """Compute the gradients of one group of heads."""
        state, k = Backward(call, saved), saved.k
        sums = fp32_accumulator(everyone)
        for t in range(call.plan.world_size):
            state.attend(t, *_keys_of(call, everyone, t, k), *_keys_of(call, sums, t, k))
        # The partial gradients of this rank's own keys are reduce-scattered too, so that sums are in rank order.
        rows = everyone.shape[1]
        own = self._transport.reduce_scatter(
            "ring_attention dK/dV", sums.flatten(0, 1), [rows] * call.plan.world_size
        ).wait()
        return state.result([x[:, : k.shape[1]] for x in _split(own, k)])

    def _gather(self, call: RingCall, k: Tensor, v: Tensor, kv_heads: slice) -> Pending[Tensor]:
        """Start gathering the concatenated K and V of all ranks: [W, rows of the longest shard, B, heads, D + Dv]."""
        rows = max(tokens.length for tokens in call.plan.keys)
        mine = torch.cat([k[:, :, kv_heads], v[:, :, kv_heads]], dim=-1).transpose(0, 1)
        mine = pad(mine, (0, 0, 0, 0, 0, 0, 0, rows - mine.shape[0])).contiguous()
        gathered = self._transport.all_gather("ring_attention K/V", mine)

        def finish() -> Tensor:
            return gathered.wait().unflatten(0, (call.plan.world_size, rows))

        return PendingCall(finish)


def _head_groups(call: RingCall, q: Tensor, k: Tensor, v: Tensor) -> list[tuple[slice, slice]]:
    """Return (query heads, key heads) of each group that is gathered at a time; equal on all ranks."""
    kv_heads, per_kv_head = k.shape[2], q.shape[2] // k.shape[2]
    row = k.shape[0] * (k.shape[3] + v.shape[3]) * accumulate_dtype(k.dtype).itemsize
    most = max(1, _MAX_GATHERED_BYTES // max(1, call.plan.mask.seq_len_kv * row))
    count = -(-kv_heads // most)
    bounds = [kv_heads * index // count for index in range(count + 1)]
    spans = [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
    return [(slice(s.start * per_kv_head, s.stop * per_kv_head), s) for s in spans]


def _keys_of(call: RingCall, everyone: Tensor, t: int, k: Tensor) -> tuple[Tensor, Tensor]:
    return _split(everyone[call.plan.source(call.rank, t)], k)


def _split(both: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Split `both` [rows, B, heads, D + Dv] into K [B, rows, heads, D] and V [B, rows, heads, Dv]."""
    both = both.transpose(0, 1)
    return both[..., : k.shape[-1]], both[..., k.shape[-1] :]


def _joined(parts: list[Gradients]) -> Gradients:
    dq, dk, dv, d_slopes, d_sinks = zip(*parts, strict=True)
    of_heads = (torch.cat(found, 2) for found in (dq, dk, dv))
    return Gradients(*of_heads, *(None if found[0] is None else torch.cat(found) for found in (d_slopes, d_sinks)))
