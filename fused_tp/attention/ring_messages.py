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
    RING_OP,
    AttentionGradients,
    KVExchange,
    RingBackward,
    RingCall,
    RingForward,
    RingSaved,
    RingSchedule,
    SteppedRing,
    add_rows,
    fp32_accumulator,
)
from fused_tp.attention.ring_plan import Chunk, KVView, RowRanges
from fused_tp.backends.messages.torch_dist import TorchDist
from fused_tp.core import settings
from fused_tp.core.pending import Pending, PendingCall, PendingValue, accumulate_dtype

KVPair = tuple[Tensor, Tensor]
_MAX_GATHERED_BYTES = 64 << 20  # maximum size of the K/V gathered at a time, at least one key head


class MessageRing(SteppedRing):
    """Ring attention that sends K/V, and in backward their gradients, as messages between ranks."""

    name = "pipelined"
    kv_view = KVView.NEEDED

    def __init__(self, transport: TorchDist) -> None:
        self._transport = transport

    @contextmanager
    def _exchange_scope(
        self,
        op: str,
        call: RingCall,
        chunks: Sequence[Chunk],
        k: Tensor,
        v: Tensor,
        attend_own_keys: Callable[[], None],
    ) -> Iterator[KVExchange]:
        self._transport.check(op, call.dims, k.dtype, k.device)
        with self._transport.abort_scope(op):
            exchange = _MessageKVExchange(self._transport, chunks, k, v)
            attend_own_keys()
            yield exchange


class _BufferPairs:
    """`count` pairs of buffers [rows, B, H, D], for chunks of K and V or of their gradients, used in turn."""

    def __init__(self, k: Tensor, v: Tensor, rows: Iterable[int], dtype: torch.dtype, count: int) -> None:
        max_rows = max(rows, default=0)

        def allocate(template: Tensor) -> Tensor:
            return template.new_empty((max_rows, template.shape[0], *template.shape[2:]), dtype=dtype)

        self._pairs = [(allocate(k), allocate(v)) for _ in range(count)]

    def get(self, index: int, rows: int) -> KVPair:
        first, second = self._pairs[index % len(self._pairs)]
        return first[:rows], second[:rows]


class _MessageKVExchange(KVExchange):
    def __init__(self, transport: TorchDist, chunks: Sequence[Chunk], k: Tensor, v: Tensor) -> None:
        self._transport, self._chunks, self._own_kv = transport, chunks, (k, v)
        self._wire_dtype = k.dtype if settings.narrow_gradients() else accumulate_dtype(k.dtype)
        self._receive_counts = [len(chunk.recv_rows) for chunk in chunks]
        self._key_buffers = _BufferPairs(k, v, self._receive_counts, k.dtype, min(2, len(chunks)))
        self._pending_gradients: tuple[RowRanges, Pending[KVPair]] | None = None
        self._pending_keys = self._start_receiving_keys(0)

    def receive_keys(self, index: int) -> KVPair:
        received_kv = self._pending_keys.wait()
        self._pending_keys = self._start_receiving_keys(index + 1)
        return received_kv

    def _start_receiving_keys(self, index: int) -> Pending[KVPair]:
        """Start receiving the keys of chunk `index`, and sending this rank's keys to the rank that reads them.

        After the last chunk, do nothing and return this rank's keys as a placeholder.
        """
        if index == len(self._chunks):
            return PendingValue(self._own_kv)
        chunk = self._chunks[index]
        return _pending_pair(
            self._transport.shift(
                "ring_attention K/V", _pack_rows(own_tensor, chunk.send_rows), receive_buffer, chunk.t
            )
            for own_tensor, receive_buffer in zip(
                self._own_kv, self._key_buffers.get(index, self._receive_counts[index]), strict=True
            )
        )

    @cached_property
    def _gradient_send_buffers(self) -> _BufferPairs:
        """Buffers of partial gradients to send: one chunk is computed while the previous chunk is sent."""
        wide_dtype = accumulate_dtype(self._own_kv[0].dtype)
        return _BufferPairs(*self._own_kv, self._receive_counts, wide_dtype, min(2, len(self._chunks)))

    @cached_property
    def _gradient_receive_buffers(self) -> _BufferPairs:
        return _BufferPairs(*self._own_kv, (chunk.send_rows.length for chunk in self._chunks), self._wire_dtype, 1)

    def gradient_buffers(self, index: int) -> KVPair:
        first, second = self._gradient_send_buffers.get(index, self._receive_counts[index])
        return first.zero_().transpose(0, 1), second.zero_().transpose(0, 1)

    def send_gradients(self, index: int, own_gradients: Sequence[Tensor]) -> None:
        self.finish_gradients(own_gradients)
        chunk = self._chunks[index]
        partial_gradients, receive_buffers = (
            self._gradient_send_buffers.get(index, self._receive_counts[index]),
            self._gradient_receive_buffers.get(0, chunk.send_rows.length),
        )
        pending = _pending_pair(
            self._transport.shift("ring_attention dK/dV", term.to(self._wire_dtype), receive_buffer, -chunk.t)
            for term, receive_buffer in zip(partial_gradients, receive_buffers, strict=True)
        )
        self._pending_gradients = chunk.send_rows, pending

    def finish_gradients(self, own_gradients: Sequence[Tensor]) -> None:
        """Add the partial gradients that arrive for the last chunk, if any were sent, to `own_gradients`."""
        if self._pending_gradients is None:
            return
        rows, pending = self._pending_gradients
        for total, term in zip(own_gradients, pending.wait(), strict=True):
            add_rows(total, rows, term)
        self._pending_gradients = None


def _pack_rows(x: Tensor, rows: RowRanges) -> Tensor:
    """Return the rows `rows` of `x` [B, S, H, D] as contiguous [rows, B, H, D]; a view if B = 1 and one range."""
    parts = [x[:, r.start : r.stop].transpose(0, 1) for r in rows.ranges or (range(0),)]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


def _pending_pair(pending: Iterable[Pending[Tensor]]) -> Pending[KVPair]:
    first, second = pending

    def finish() -> KVPair:
        return first.wait().transpose(0, 1), second.wait().transpose(0, 1)

    return PendingCall(finish)


class AllGatherRing(RingSchedule):
    """Ring attention by collectives: all-gathers K/V, computes, and reduce-scatters dK/dV.

    Intended for short sequences, where latency dominates the cost of W - 1 messages. To limit memory, longer sequences
    are processed in groups of key heads. The keys of the next group are gathered while the current group is computed
    (Llama 3's context parallelism, arXiv:2407.21783, section 3.3.2).
    """

    name = "plain"

    def __init__(self, transport: TorchDist) -> None:
        self._transport = transport

    def forward(self, call: RingCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self._transport.check(RING_OP, call.dims, q.dtype, q.device)
        groups, results = _head_groups(call, q, k, v), []
        with self._transport.abort_scope(RING_OP):
            for heads, kv_heads, gathered_kv in self._gather_head_groups(call, groups, k, v):
                state = RingForward(call.select_heads(heads), q[:, :, heads], v[:, :, kv_heads])
                for t in range(call.plan.world_size):
                    state.attend(t, *_source_kv(call, gathered_kv, t, k))
                results.append(state.finalize())
        if len(results) == 1:
            return results[0]
        return torch.cat([out for out, _ in results], 2), torch.cat([lse for _, lse in results], 1)

    def backward(self, call: RingCall, saved: RingSaved) -> AttentionGradients:
        k, v = saved.k, saved.v
        self._transport.check(f"{RING_OP}_backward", call.dims, k.dtype, k.device)
        groups = _head_groups(call, saved.q, k, v)
        with self._transport.abort_scope(f"{RING_OP}_backward"):
            group_gradients = [
                self._compute_group_gradients(
                    call.select_heads(heads), saved.select_heads(heads, kv_heads), gathered_kv
                )
                for heads, kv_heads, gathered_kv in self._gather_head_groups(call, groups, k, v)
            ]
        return group_gradients[0] if len(group_gradients) == 1 else _concatenate_head_groups(group_gradients)

    def _gather_head_groups(
        self, call: RingCall, groups: list[tuple[slice, slice]], k: Tensor, v: Tensor
    ) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield (query heads, key heads, K/V of all ranks) of each group while the next group's K/V are gathered."""
        pending = self._start_gather(call, k, v, groups[0][1])
        for index, (heads, kv_heads) in enumerate(groups):
            gathered_kv = pending.wait()
            if index + 1 < len(groups):
                pending = self._start_gather(call, k, v, groups[index + 1][1])
            yield heads, kv_heads, gathered_kv

    def _compute_group_gradients(self, call: RingCall, saved: RingSaved, gathered_kv: Tensor) -> AttentionGradients:
        """Compute the gradients of one group of heads."""
        state, k = RingBackward(call, saved), saved.k
        sums = fp32_accumulator(gathered_kv)
        for t in range(call.plan.world_size):
            state.attend(t, *_source_kv(call, gathered_kv, t, k), *_source_kv(call, sums, t, k))
        # The partial gradients of this rank's own keys are reduce-scattered too, so that sums are in rank order.
        rows = gathered_kv.shape[1]
        own_gradients = self._transport.reduce_scatter(
            "ring_attention dK/dV", sums.flatten(0, 1), [rows] * call.plan.world_size
        ).wait()
        return state.finalize([x[:, : k.shape[1]] for x in _split_kv(own_gradients, k)])

    def _start_gather(self, call: RingCall, k: Tensor, v: Tensor, kv_heads: slice) -> Pending[Tensor]:
        """Start gathering the concatenated K and V of all ranks: [W, rows of the longest shard, B, heads, D + Dv]."""
        rows = max(tokens.length for tokens in call.plan.keys)
        own_kv = torch.cat([k[:, :, kv_heads], v[:, :, kv_heads]], dim=-1).transpose(0, 1)
        own_kv = pad(own_kv, (0, 0, 0, 0, 0, 0, 0, rows - own_kv.shape[0])).contiguous()
        pending_kv = self._transport.all_gather("ring_attention K/V", own_kv)

        def finish() -> Tensor:
            return pending_kv.wait().unflatten(0, (call.plan.world_size, rows))

        return PendingCall(finish)


def _head_groups(call: RingCall, q: Tensor, k: Tensor, v: Tensor) -> list[tuple[slice, slice]]:
    """Return (query heads, key heads) of each group that is gathered at a time; equal on all ranks."""
    kv_heads, heads_per_kv_head = k.shape[2], q.shape[2] // k.shape[2]
    row_bytes = k.shape[0] * (k.shape[3] + v.shape[3]) * accumulate_dtype(k.dtype).itemsize
    max_heads = max(1, _MAX_GATHERED_BYTES // max(1, call.plan.mask.seq_len_kv * row_bytes))
    num_groups = -(-kv_heads // max_heads)
    bounds = [kv_heads * index // num_groups for index in range(num_groups + 1)]
    kv_head_slices = [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
    return [(slice(s.start * heads_per_kv_head, s.stop * heads_per_kv_head), s) for s in kv_head_slices]


def _source_kv(call: RingCall, gathered_kv: Tensor, t: int, k: Tensor) -> tuple[Tensor, Tensor]:
    return _split_kv(gathered_kv[call.plan.source_rank(call.rank, t)], k)


def _split_kv(keys_and_values: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Split `keys_and_values` [rows, B, heads, D + Dv] into K [B, rows, heads, D] and V [B, rows, heads, Dv]."""
    keys_and_values = keys_and_values.transpose(0, 1)
    return keys_and_values[..., : k.shape[-1]], keys_and_values[..., k.shape[-1] :]


def _concatenate_head_groups(group_gradients: list[AttentionGradients]) -> AttentionGradients:
    dq, dk, dv, d_slopes, d_sinks = zip(*group_gradients, strict=True)
    gradients = (torch.cat(tensors, 2) for tensors in (dq, dk, dv))
    return AttentionGradients(
        *gradients, *(None if tensors[0] is None else torch.cat(tensors) for tensors in (d_slopes, d_sinks))
    )
