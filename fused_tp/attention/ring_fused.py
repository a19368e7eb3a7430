"""Ring attention in one Triton launch over memory that all ranks can access; see `attention/ring_forward.py`.

Each rank stores its K/V in memory that its peers can read. The copy engine copies the keys that a rank reads, chunk by
chunk, while the kernel computes with the chunks that have arrived. Supported are GPUs that can write into each other's
memory, ranks that are threads on one GPU, and processes of one host under Triton's interpreter. The backward runs step
by step, over messages.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fused_tp.attention.kernels.base import KernelRequest
from fused_tp.attention.kernels.select import forced_kernel
from fused_tp.attention.kernels.triton import TRITON_KERNEL, to_kernel_terms, triton_availability
from fused_tp.attention.ring import RING_OP, AttentionGradients, RingCall, RingSaved, RingSchedule
from fused_tp.attention.ring_messages import MessageRing
from fused_tp.attention.ring_plan import KVView, RingPlan, restrict_to_keys
from fused_tp.backends.triton.fused_kernel import FusedKernelSchedule
from fused_tp.core import settings
from fused_tp.core.availability import Availability, unavailable
from fused_tp.core.group import Group, GroupSlot
from fused_tp.core.store import agree_on_availability
from fused_tp.core.tracing import span

# Values of FUSED_TP_ATTENTION that a group has used, in order of first use.
_FORCED_KERNELS: GroupSlot[list[str | None]] = GroupSlot(lambda group: [])
_RESERVED_SMS = 1  # multiprocessors left to the small kernels that run between the copies
_MAX_CHUNK_ROWS = 16384  # maximum rows per chunk, unless this results in more than _MAX_CHUNKS chunks
_MAX_CHUNKS = 63  # maximum chunks per call


class FusedRing(RingSchedule):
    """Ring attention by the Triton kernel, over the memory of a `FusedKernelSchedule`."""

    name = "fused_kernel"
    kv_view = KVView.NEEDED  # used by backward only, which exchanges K/V with send/recv

    def __init__(self, schedule: FusedKernelSchedule) -> None:
        self._schedule = schedule

    def forward(self, call: RingCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        from fused_tp.triton_kernels.attention.ring_forward import ring_forward

        schedule, chunks = self._schedule, kv_chunks(call.plan, call.rank)
        schedule.check(RING_OP, call.dims, q)
        layout = make_keys_layout(call.plan, call.rank, k, v)
        with (
            span("ring_attention launch"),
            schedule.abort_scope(
                RING_OP
            ),  # from the first launch on, peers wait for this rank: an error must abort them
            schedule.workspaces.use("ring", layout.nbytes(schedule.world_size), RING_OP) as workspace,
        ):
            result: tuple[Tensor, Tensor] = ring_forward(
                q,
                k,
                v,
                chunks,
                to_kernel_terms(call.score_parameters),
                layout,
                workspace=workspace,
                programs=self._num_programs(),
                sinks=call.score_parameters.sinks,
            )
        return result

    def backward(self, call: RingCall, saved: RingSaved) -> AttentionGradients:
        return MessageRing(self._schedule.messages).backward(call, saved)

    def _num_programs(self) -> int:
        memory = self._schedule.memory
        if not memory.arch:  # Triton's interpreter
            return memory.sms
        return max(1, memory.sms - max(settings.sm_margin(), _RESERVED_SMS))


def fused_ring_available(request: KernelRequest) -> Availability:
    """Available if this rank can run a forward of schedule `fused_kernel` as one launch; else it uses messages."""
    forced_name = forced_kernel()
    if forced_name not in (None, TRITON_KERNEL.name):
        return unavailable(f"FUSED_TP_ATTENTION={forced_name} selects other kernels")
    return triton_availability(request)


def fused_ring_available_on_all_ranks(group: Group, request: KernelRequest) -> Availability:
    """Available if `fused_ring_available` holds on all ranks of `group`: devices and environments may differ.

    The first call for a request is collective: all ranks must make it together.

    Raises:
        CollectiveTimeoutError: some rank did not call, for example because FUSED_TP_ATTENTION was changed on
            some ranks only.
    """
    # The agreement's name must be equal on all ranks, but values of FUSED_TP_ATTENTION may differ: so it contains the
    # index of the value in the order of use.
    forced_kernels = _FORCED_KERNELS[group]
    forced_name = forced_kernel()
    if forced_name not in forced_kernels:
        forced_kernels.append(forced_name)
    feature = (
        f"{RING_OP} in one launch (on {request.device.type}, {request.dtype}, head dims {request.head_dim} and "
        f"{request.v_head_dim}, value {forced_kernels.index(forced_name) + 1} of FUSED_TP_ATTENTION)"
    )
    group_availability = agree_on_availability(
        group, feature, lambda: fused_ring_available(replace(request, has_positive_scale=True))
    )
    return fused_ring_available(request) if group_availability else group_availability


def make_keys_layout(plan: RingPlan, rank: int, k: Tensor, v: Tensor) -> Any:
    """Return the memory layout of a call's keys on all ranks, a `triton_kernels.attention.ring_keys.KeysLayout`."""
    from fused_tp.triton_kernels.attention import ring_keys

    rows = tuple(tokens.length for tokens in plan.keys)
    num_pairs = k.shape[0] * k.shape[2]
    shard_bytes = max(rows) * num_pairs * (k.shape[3] + v.shape[3]) * k.dtype.itemsize
    return ring_keys.KeysLayout(
        rank=rank,
        rows=rows,
        chunks=tuple(
            ring_keys.KeyChunk(source, rows.start, len(rows)) for _, source, rows in kv_chunks(plan, rank).peer_chunks
        ),
        max_chunk_rows=kv_chunks(plan, rank).max_peer_rows,
        num_pairs=num_pairs,
        num_groups=ring_keys.group_count(num_pairs, shard_bytes),
        head_dim=k.shape[3],
        v_head_dim=v.shape[3],
        dtype=k.dtype,
    )


class KVChunk(NamedTuple):
    """Rows `rows` of the keys of rank `source`, which are read in step `t`."""

    t: int
    source: int
    rows: range


class KVChunks:
    """Chunks of the keys that one rank reads: first its own keys, then the keys of each source in step order.

    Describes the mask of a call for `triton_kernels.attention.ring_forward`.

    Attributes:
        peer_chunks: the chunks of other ranks' keys.
    """

    def __init__(self, plan: RingPlan, rank: int) -> None:
        self._plan, self._rank = plan, rank
        own_chunk = KVChunk(0, rank, range(plan.keys[rank].length))
        self.peer_chunks = tuple(_peer_chunks(plan, rank))
        self._chunks = (own_chunk, *self.peer_chunks)
        self._tables: dict[Any, dict[str, Tensor]] = {}

    def tables_on(self, device: torch.device, rows: int, block_size: int) -> dict[str, Tensor]:
        """Return the kernel's tables on `device` for tiles of `rows` queries and `block_size` keys; cached."""
        from fused_tp.triton_kernels.attention.tiles import tiles_of_chunks

        if (device, rows, block_size) not in self._tables:
            vectors = self._tables.get(device)
            if vectors is None:
                vectors = self._tables[device] = {
                    name: _int32_on_device(x, device) for name, x in self._host_vectors.items()
                }
            starts, stops = self._host_vectors["starts"], self._host_vectors["stops"]
            tiles, bounds = tiles_of_chunks(
                self._plan.visible_intervals(self._rank)[1:],
                [int(b) for b in self._plan.queries[self._rank].breaks if b],
                starts,
                stops,
                rows,
                block_size,
            )
            tables = {"tiles": _int32_on_device(tiles, device), "bounds": _int32_on_device(bounds, device)}
            self._tables[device, rows, block_size] = vectors | tables
        return self._tables[device, rows, block_size]

    @cached_property
    def max_peer_rows(self) -> int:
        """The largest number of rows of other ranks' keys that any rank reads."""
        ranks = range(self._plan.world_size)
        return max(sum(len(chunk.rows) for chunk in _peer_chunks(self._plan, rank)) for rank in ranks)

    @cached_property
    def _host_vectors(self) -> dict[str, np.ndarray[Any, Any]]:
        plan, rank, chunks = self._plan, self._rank, self._chunks
        queries = plan.queries[rank]
        starts = np.zeros((len(chunks), queries.length), dtype=np.int32)
        stops = np.zeros_like(starts)
        for index, (t, _, rows) in enumerate(chunks):
            step = restrict_to_keys(plan.step(rank, t), rows.start, rows.stop, cache_result=False)
            if not step.is_empty:
                visible_rows = slice(step.q_start, step.q_stop)
                starts[index, visible_rows] = step.starts + np.int32(step.k_start - rows.start)
                stops[index, visible_rows] = step.stops + np.int32(step.k_start - rows.start)
        lengths = [len(rows) for _, _, rows in chunks]
        chunk_starts = np.cumsum(lengths) - lengths
        # This rank's keys are stored in one buffer, the keys of all other ranks in another; both begin at row 0.
        buffer_rows = np.where(np.arange(len(chunks)) > 0, chunk_starts - lengths[0], 0)
        return {
            "starts": starts,
            "stops": stops,
            "chunks": np.stack(([source for _, source, _ in chunks], buffer_rows, chunk_starts), 1),
            "q_positions": plan.visible_intervals(rank)[0],
            "q_indices": queries.indices,
            "k_indices": np.concatenate([plan.keys[s].indices[rows.start : rows.stop] for _, s, rows in chunks]),
        }


def _peer_chunks(plan: RingPlan, rank: int) -> list[KVChunk]:
    """Return the chunks of other ranks' keys that `rank` reads, in step order. Long ranges are split."""
    sources = [(t, plan.source_rank(rank, t)) for t in range(1, plan.world_size)]
    needed_chunks = [KVChunk(t, s, rows) for t, s in sources for rows in plan.needed_rows(rank, s).ranges]
    split_chunks = [
        KVChunk(t, source, rows[first : first + _MAX_CHUNK_ROWS])
        for t, source, rows in needed_chunks
        for first in range(0, len(rows), _MAX_CHUNK_ROWS)
    ]
    if len(split_chunks) <= _MAX_CHUNKS:
        return split_chunks
    if len(needed_chunks) <= _MAX_CHUNKS:
        return needed_chunks
    source_ranges = [(t, s, plan.needed_rows(rank, s).ranges) for t, s in sources]
    return [KVChunk(t, s, range(rows[0].start, rows[-1].stop)) for t, s, rows in source_ranges if rows]


def kv_chunks(plan: RingPlan, rank: int) -> KVChunks:
    """Return the chunks that `rank` reads; cached in `plan`."""
    chunks: KVChunks | None = plan.kv_chunks.get(rank)
    if chunks is None:
        chunks = plan.kv_chunks[rank] = KVChunks(plan, rank)
    return chunks


def _int32_on_device(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32)).to(device)
