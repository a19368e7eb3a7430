"""Ring attention over shared memory: peers read a rank's K/V in place.

Each rank writes the K/V rows that its peers read to its workspace once, and signals that they are readable. It then
reads the peers' rows in place, one peer per step in ring order, so that not all ranks read the same memory at once.

The backward runs in chunks n = 1, 2, ... (`RankPlan.chunks`). In chunk n a rank computes a term, partial sums of the
dK/dV of the source's keys, in its own workspace. The owner of the keys adds the term to its gradients. A rank signals
these stages:

    stage   meaning
    1       the K/V of this rank are readable
    2n      the term of chunk n is readable
    2n + 3  this rank has added the term that its consumer computed in chunk n

Terms are stored in two slots, used in turn. Chunk n overwrites the term of an earlier chunk m in the same slot: m is
n - 2, or less if this rank had no terms since then. Before that, the owner of the keys of chunk m must have reached
stage 2m + 3. It reaches this stage after its own chunk m + 1, so ranks may drift apart by one chunk without waiting,
and memory does not grow with W.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from fused_tp.attention.ring import KVExchange, RingCall, SteppedRing, add_rows
from fused_tp.attention.ring_plan import Chunk, KVView, RankPlan, RowRanges
from fused_tp.backends.shared_memory.shm import ShmCall, ShmTransport
from fused_tp.core.pending import accumulate_dtype

_ALIGNMENT_BYTES = 64  # a cache line, and the widest vector register
_KEYS_READABLE_STAGE = 1  # first row of the table of stages above
_NUM_SLOTS = 2
_MAX_CACHED_LAYOUTS = 32  # maximum number of cached layouts per plan and rank


class _Region(NamedTuple):
    """A tensor [rows, B, heads, dim] in a workspace, at byte `offset`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int


class _WorkspaceLayout(NamedTuple):
    """Memory layout of one rank's workspace. Every rank can compute the layouts of all ranks.

    Attributes:
        rows: rows of the rank's keys that any other rank reads; only these are written.
        kv_regions: regions of K and of V.
        gradient_regions: for each slot, the regions of the terms of dK and of dV.
        nbytes: size of the workspace.
    """

    rows: RowRanges
    kv_regions: tuple[_Region, _Region]
    gradient_regions: tuple[tuple[_Region, _Region], ...]
    nbytes: int


class SharedMemoryRing(SteppedRing):
    """Ring attention of CPU tensors between ranks on one host."""

    name = "one_sided"
    kv_view = KVView.UNION

    def __init__(self, transport: ShmTransport) -> None:
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
        """Open the workspace of one call and write this rank's K/V.

        If peers are still in the previous call, step 0 runs first. They do not need the new keys yet, and may still
        read the keys of the previous call; writing now would need additional memory for the new keys.

        A peer that reads no keys of this rank may finish the call as soon as this rank has begun it. So an error in
        step 0 must also be signaled to the peers: the workspace is opened before the error is raised.
        """
        layouts = _workspace_layouts(call.rank_plan, k, v, _NUM_SLOTS if op.endswith("backward") else 0)
        peers_are_done = self._transport.is_settled
        if not peers_are_done:
            try:
                attend_own_keys()
            except BaseException:
                with self._transport.begin(op, call.dims, k.dtype, 0) as workspace:
                    workspace.peers_may_end = True
                    raise  # the open workspace notifies the peers
        nbytes = layouts[call.rank].nbytes
        with self._transport.begin(op, call.dims, k.dtype, nbytes, may_reuse=True) as workspace:
            workspace.peers_may_end = True
            exchange = _SharedMemoryKVExchange(workspace, call.rank, layouts, chunks, k, v)
            if peers_are_done:
                attend_own_keys()
            yield exchange


def _workspace_layouts(rank_plan: RankPlan, k: Tensor, v: Tensor, max_slots: int) -> tuple[_WorkspaceLayout, ...]:
    """Return the layouts of all ranks, cached in `rank_plan`.

    The cache key omits the numbers of rows of k and v: they differ between ranks, and the plan determines them.
    """
    layouts, key = rank_plan.layouts, (k.dtype, k.shape[0], k.shape[2:], v.shape[2:], max_slots)
    if key not in layouts:
        if len(layouts) >= _MAX_CACHED_LAYOUTS:
            layouts.clear()
        ranks = range(rank_plan.plan.world_size)
        layouts[key] = tuple(
            _make_layout(rank_plan.plan.rank_plan(rank, rank_plan.kv_view), k, v, max_slots) for rank in ranks
        )
    result: tuple[_WorkspaceLayout, ...] = layouts[key]
    return result


def _make_layout(rank_plan: RankPlan, k: Tensor, v: Tensor, max_slots: int) -> _WorkspaceLayout:
    """Compute the layout of one rank. `k` and `v` may be any rank's tensors: their numbers of rows are not read."""
    end = 0

    def add_region(template: Tensor, num_rows: int, dtype: torch.dtype) -> _Region:
        nonlocal end
        new_region = _Region((num_rows, template.shape[0], *template.shape[2:]), dtype, end)
        end += -(-math.prod(new_region.shape) * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return new_region

    rows, wide_dtype = rank_plan.plan.shared_rows(rank_plan.rank), accumulate_dtype(k.dtype)
    kv_regions = add_region(k, rows.length, k.dtype), add_region(v, rows.length, v.dtype)
    max_rows = max((len(chunk.recv_rows) for chunk in rank_plan.chunks), default=0)
    num_slots = min(max_slots, len(rank_plan.chunks))
    gradient_regions = tuple(
        (add_region(k, max_rows, wide_dtype), add_region(v, max_rows, wide_dtype)) for _ in range(num_slots)
    )
    return _WorkspaceLayout(rows, kv_regions, gradient_regions, end)


class _SharedMemoryKVExchange(KVExchange):
    """`KVExchange` of one call: keys and terms are views of the workspaces of all ranks."""

    def __init__(
        self,
        workspace: ShmCall,
        rank: int,
        layouts: Sequence[_WorkspaceLayout],
        chunks: Sequence[Chunk],
        k: Tensor,
        v: Tensor,
    ) -> None:
        self._workspace, self._rank, self._layouts, self._chunks = workspace, rank, layouts, chunks
        self._k, self._v = k, v
        self._chunk_in_slot: dict[int, int] = {}  # maps each slot to the chunk whose terms it holds
        own_layout, start = layouts[rank], 0
        shared_k, shared_v = self._region_views(rank, own_layout.kv_regions)
        for r in own_layout.rows.ranges:
            rows, shared_rows = slice(r.start, r.stop), slice(start, start + len(r))
            shared_k[:, shared_rows].copy_(k[:, rows])
            shared_v[:, shared_rows].copy_(v[:, rows])
            start += len(r)
        workspace.signal(_KEYS_READABLE_STAGE)

    def receive_keys(self, index: int) -> tuple[Tensor, Tensor]:
        chunk = self._chunks[index]
        rows = chunk.recv_rows
        if not rows:
            return self._k[:, :0], self._v[:, :0]
        self._workspace.wait(chunk.source, _KEYS_READABLE_STAGE)
        layout = self._layouts[chunk.source]
        first = layout.rows.ranges[0].start
        k, v = self._region_views(chunk.source, layout.kv_regions)
        return k[:, rows.start - first : rows.stop - first], v[:, rows.start - first : rows.stop - first]

    def gradient_buffers(self, index: int) -> tuple[Tensor, Tensor]:
        chunk_number, rows = index + 1, self._chunks[index].recv_rows
        if not rows:
            return self._k[:, :0], self._v[:, :0]
        if (slot_chunk_number := self._chunk_in_slot.get(chunk_number % _NUM_SLOTS)) is not None:
            self._workspace.wait(self._chunks[slot_chunk_number - 1].source, _stage_added(slot_chunk_number))
        self._chunk_in_slot[chunk_number % _NUM_SLOTS] = chunk_number
        dk, dv = self._term_views(self._rank, chunk_number, len(rows))
        return dk.zero_(), dv.zero_()

    def send_gradients(self, index: int, own_gradients: Sequence[Tensor]) -> None:
        chunk_number = index + 1
        self._workspace.signal(_stage_readable(chunk_number))
        if chunk_number > 1:
            self._add_term(chunk_number - 1, own_gradients)
            self._workspace.signal(_stage_added(chunk_number - 1))

    def finish_gradients(self, own_gradients: Sequence[Tensor]) -> None:
        self._add_term(len(self._chunks), own_gradients)

    def _add_term(self, chunk_number: int, own_gradients: Sequence[Tensor]) -> None:
        """Add the terms that the consumer of this rank's keys computed in a chunk to `own_gradients`."""
        chunk = self._chunks[chunk_number - 1]
        if chunk.send_rows.length:
            self._workspace.wait(chunk.consumer, _stage_readable(chunk_number))
            for total, term in zip(
                own_gradients, self._term_views(chunk.consumer, chunk_number, chunk.send_rows.length), strict=True
            ):
                add_rows(total, chunk.send_rows, term)

    def _term_views(self, rank: int, chunk_number: int, num_rows: int) -> tuple[Tensor, Tensor]:
        slots = self._layouts[rank].gradient_regions
        dk, dv = self._region_views(rank, slots[chunk_number % len(slots)])
        return dk[:, :num_rows], dv[:, :num_rows]

    def _region_views(self, rank: int, regions: tuple[_Region, _Region]) -> tuple[Tensor, Tensor]:
        """Return views [B, rows, heads, dim] of two regions in the workspace of `rank`."""
        k, v = regions
        return self._workspace.buffer(rank, *k).transpose(0, 1), self._workspace.buffer(rank, *v).transpose(0, 1)


def _stage_readable(chunk_number: int) -> int:
    return 2 * chunk_number


def _stage_added(chunk_number: int) -> int:
    return 2 * chunk_number + 3
