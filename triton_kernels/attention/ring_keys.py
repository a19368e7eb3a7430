"""Keys and values of all ranks for a kernel of ring attention: pulled chunk by chunk, each signalled by a flag.

A rank's queries see rows of other ranks' keys: its chunks, each of one source. Heads are processed in groups, so that a
rank holds two groups' heads (SLOTS) of other ranks, not all, and the second group is copied while the first is used.
Memory of a rank, [rows, heads of a group, D + Dv], with K next to V so that a chunk of a group is contiguous:

    own keys         group by group, all rows of this rank; peers read them
    slots            group g's chunks, one after the other, in slot g % SLOTS

`stage` copies own keys there and signals ready (module `gather` describes that part of the protocol, and its words
begun, ready and pulled, W each). Between two copies of the copy engine runs `relay`, one program, which sets the flag
of the first and waits for the conditions of the second. More words, all set by this rank:

    verdict[s]       the epoch if rank s's keys arrived, else 0; passed from one relay to a later one
    arrived[g][c]    chunk c of group g is in its slot
    done[g]          all of group g has been used, so its slot may be written again

Between calls a slot is free, since copies are ordered after `stage`, which is ordered after the kernel of the previous
call. Own keys are free once all ranks have pulled: each rank signals pulled in each call, at once if it needs nothing
of that source, so calls whose masks skip different steps do not overtake each other.

A wait that expires is recorded before anything is overwritten or missed because of it: the kernel that reads the chunks
checks the record at its end (`signals.is_unbroken`), and writes NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cache_keys import fix_cache_keys
from ..comm.gather import PULLED, READY, GatherWorkspace, KernelLaunch, begin_stage, end_stage, run_kernel
from ..comm.signals import DATA_ALIGNMENT, OPS, Handle, current_call, flag_at, signal, wait
from ..comm.streams import own_streams
from .blocks import HeadRows, head_rows, load_block, store_block
from .configs import padded_head_dim
from .launch import heads_tensor

OP = tl.constexpr(OPS.index("ring_attention"))

VERDICT = tl.constexpr(3)  # index of the run of W words that follows begun, ready and pulled
FLAGS = tl.constexpr(4)  # number of runs of W words before the flags of chunks and groups
MAX_CHUNKS = tl.constexpr(64)  # most chunks of a rank in one call, its own keys included
MAX_GROUPS = tl.constexpr(8)
GROUP_DONE = tl.constexpr(2)  # first of the counters, one per group, of programs that have finished the group
NONE = tl.constexpr(-1)

_LONGEST_NS = (1 << 63) - 1  # kernels count nanoseconds in 63 bits

SLOTS = 2  # number of groups whose chunks are in memory at a time
MAX_STREAMS = 2  # one copies while the relay of the other runs; with more, later chunks would slow earlier ones
LEAST_GROUP_BYTES = 1 << 20  # bytes of a shard per group; copying fewer takes less time than the relay
ROWS = tl.constexpr(32)  # rows that a program of `stage` copies at a time


@triton.jit
def arrived_flag(group, chunk, WORLD: tl.constexpr):
    """Return the index of the flag of a chunk's arrival (chunk 0 is the first after a rank's own keys)."""
    return FLAGS * WORLD + group * MAX_CHUNKS + chunk


@triton.jit
def done_flag(group, WORLD: tl.constexpr):
    """Return the index of the flag that is set once a group's slot is free."""
    return FLAGS * WORLD + MAX_GROUPS * MAX_CHUNKS + group


_STAGE_UNSPECIALIZED = ("rank", "rows", "heads", "pairs_per_group", "unneeded_ranks")
_RELAY_UNSPECIALIZED = ("rank", "group", "chunk", "source", "is_last_chunk", "awaited_rank", "freed_group")


@triton.jit(do_not_specialize=_STAGE_UNSPECIALIZED)
def stage_kernel(
    k, v, own_keys,
    rows, heads, num_pairs, pairs_per_group, unneeded_ranks,
    ws, rank, WORLD: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, PADDED_D: tl.constexpr, PADDED_DV: tl.constexpr,
):  # fmt: skip
    """Begin a call: copy k and v to `own_keys`, once all peers have read its previous content.

    k and v are [B, rows, heads, D or DV], own_keys is [groups, rows, pairs_per_group, D + DV]. Bit s of
    `unneeded_ranks` is set if none of rank s's keys will be pulled.
    """
    call, is_free = begin_stage(ws, rank, WORLD, OP)
    width = pairs_per_group * (D + DV)
    for block in tl.range(tl.program_id(0), num_pairs * tl.cdiv(rows, ROWS), tl.num_programs(0)):
        pair = block % num_pairs
        row = block // num_pairs * ROWS
        end = tl.where(is_free, rows, row)
        keys = load_block(head_rows(k, pair // heads, pair % heads), row, end, D, ROWS, PADDED_D)
        values = load_block(head_rows(v, pair // heads, pair % heads), row, end, DV, ROWS, PADDED_DV)
        group = tl.cast(pair // pairs_per_group, tl.int64)
        target = own_keys + group * rows * width + pair % pairs_per_group * (D + DV)
        store_block(HeadRows(target, width), keys, row, end, D)
        store_block(HeadRows(target + D, width), values, row, end, DV)
    end_stage(call, unneeded_ranks, WORLD)


@triton.jit(do_not_specialize=_RELAY_UNSPECIALIZED)
def relay_kernel(group, chunk, source, is_last_chunk, awaited_rank, freed_group, ws, rank, WORLD: tl.constexpr):
    """Run one program between two copies: set the flag of a chunk of `source`, then wait until the next copy may run.

    Also set pulled if it is the last chunk of `source`. The wait is for the keys of `awaited_rank`, or until
    `freed_group` has been used. NONE: no such chunk or wait.
    """
    call = current_call(ws, rank)
    if source != NONE:
        is_valid = tl.load(flag_at(call, rank, VERDICT * WORLD + source)) == call.epoch
        signal(call, rank, arrived_flag(group, chunk, WORLD), is_valid)
        if is_last_chunk != 0:
            signal(call, source, PULLED * WORLD + rank, is_valid)
    if freed_group != NONE:
        wait(call, done_flag(freed_group, WORLD), rank, -1, WORLD, OP)
    if awaited_rank != NONE:
        is_valid = wait(call, READY * WORLD + awaited_rank, awaited_rank, -1, WORLD, OP)
        tl.store(flag_at(call, rank, VERDICT * WORLD + awaited_rank), tl.where(is_valid, call.epoch, 0))


class KeyChunk(NamedTuple):
    """Rows [first_row, first_row + num_rows) of the keys of rank `source`."""

    source: int
    first_row: int
    num_rows: int


@dataclasses.dataclass(frozen=True)
class KeysLayout:
    """Layout of the keys of one call in the memory of all ranks.

    Attributes:
        rows: number of keys of each rank.
        chunks: chunks of this rank, in the order of their use; without its own keys.
        max_chunk_rows: largest number of rows in a rank's chunks; the same on all ranks, like all below.
        num_pairs: number of pairs of a batch row and a key head.
        num_groups: number of groups that the pairs are divided into; divides `num_pairs`.
    """

    rank: int
    rows: tuple[int, ...]
    chunks: tuple[KeyChunk, ...]
    max_chunk_rows: int
    num_pairs: int
    num_groups: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype

    @property
    def pairs_per_group(self) -> int:
        return self.num_pairs // self.num_groups

    @property
    def own_rows(self) -> int:
        return self.rows[self.rank]

    @property
    def num_slots(self) -> int:
        return min(SLOTS, self.num_groups)

    @property
    def first_slot_row(self) -> int:
        """First row of the slots."""
        return self.num_groups * max(self.rows)

    @cached_property
    def chunk_offsets(self) -> tuple[int, ...]:
        """First row of each chunk in its slot, and after these the end of the last chunk."""
        offsets = [0]
        for chunk in self.chunks:
            offsets.append(offsets[-1] + chunk.num_rows)
        return tuple(offsets)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of a rank's memory: rows, heads, elements."""
        return (
            self.first_slot_row + self.num_slots * self.max_chunk_rows,
            self.pairs_per_group,
            self.head_dim + self.v_head_dim,
        )

    def nbytes(self, world_size: int) -> int:
        """Return the bytes of the smallest workspace for this layout; the same on all ranks."""
        return data_offset(world_size) + prod(self.shape) * self.dtype.itemsize

    def own_row_range(self, rank: int, group: int, first_row: int, num_rows: int) -> tuple[int, int]:
        """Return the rows [start, stop) of `rank`'s memory for `num_rows` of its keys, in heads of `group`."""
        start = group * self.rows[rank] + first_row
        return start, start + num_rows

    def chunk_row_range(self, group: int, chunk: int) -> tuple[int, int]:
        """Return the rows [start, stop) of this rank's memory for a chunk, in heads of `group`."""
        slot = self.first_slot_row + group % self.num_slots * self.max_chunk_rows
        return slot + self.chunk_offsets[chunk], slot + self.chunk_offsets[chunk + 1]


def data_offset(world_size: int) -> int:
    """Return the byte offset of the keys in a rank's memory, after all words."""
    words = FLAGS.value * world_size + MAX_GROUPS.value * (MAX_CHUNKS.value + 1)
    return -(-words * 8 // DATA_ALIGNMENT) * DATA_ALIGNMENT


def group_count(num_pairs: int, shard_bytes: int) -> int:
    """Return the number of groups of the heads, if the longest shard's keys and values have `shard_bytes` bytes.

    >>> group_count(16, 64 << 20), group_count(6, 3 << 20), group_count(7, 0)
    (8, 3, 1)
    """
    max_groups = max(1, min(MAX_GROUPS.value, shard_bytes // LEAST_GROUP_BYTES))
    return max(count for count in range(1, max_groups + 1) if num_pairs % count == 0)


def scaled_timeout(timeout_ns: int, factor: int) -> int:
    """Return `factor` times the deadline, limited to the longest one that kernels can count.

    >>> scaled_timeout(5, 3), scaled_timeout(1 << 62, 3) == (1 << 63) - 1
    (15, True)
    """
    return min(factor * timeout_ns, _LONGEST_NS)


class RingWorkspace(GatherWorkspace):
    """Memory for one rank's calls of ring attention only; at least `KeysLayout.nbytes` bytes."""

    def __init__(
        self, buffer: Tensor, handle: Handle, *, timeout_seconds: float, rescue_stream: torch.cuda.Stream | None = None
    ) -> None:
        # Created before the barrier at the end of super().__init__: after the barrier a peer's kernel may run and wait
        # for this rank, and while a kernel runs the driver may not create streams.
        self.streams: list[torch.cuda.Stream] = []
        if buffer.is_cuda:
            self.streams = own_streams(
                self, buffer.device, min(handle.world_size - 1, MAX_STREAMS), has_high_priority=True
            )
        super().__init__(buffer, handle, timeout_seconds=timeout_seconds, rescue_stream=rescue_stream)

    def keys(self, rank: int, layout: KeysLayout) -> Tensor:
        """Return the memory of `rank`, in the shape of `layout`.

        Raises:
            ValueError: the workspace is too small.
        """
        self.require_bytes(layout.nbytes(self.world_size))
        offset = (self.buffer_offset + data_offset(self.world_size)) // layout.dtype.itemsize
        return self.handle.get_buffer(rank, layout.shape, layout.dtype, offset)


def stage_launch(k: Tensor, v: Tensor, layout: KeysLayout, workspace: RingWorkspace, programs: int) -> KernelLaunch:
    """Return the launch that begins a call, with at most `programs` programs."""
    needed_ranks = {chunk.source for chunk in layout.chunks}
    unneeded_ranks = sum(1 << rank for rank in range(workspace.world_size) if rank not in needed_ranks)
    arguments = {
        "k": heads_tensor(k),
        "v": heads_tensor(v),
        "own_keys": workspace.keys(workspace.rank, layout),
        "rows": layout.own_rows,
        "heads": k.shape[2],
        "num_pairs": layout.num_pairs,
        "pairs_per_group": layout.pairs_per_group,
        "unneeded_ranks": unneeded_ranks,
        "WORLD": workspace.world_size,
        "D": layout.head_dim,
        "DV": layout.v_head_dim,
        "PADDED_D": padded_head_dim(layout.head_dim),
        "PADDED_DV": padded_head_dim(layout.v_head_dim),
        "maxnreg": 168,  # without it ptxas uses 72 registers and spills
    }
    num_blocks = layout.num_pairs * -(-layout.own_rows // ROWS.value)
    return stage_kernel, (max(1, min(num_blocks, programs)),), arguments | workspace.arguments()


class _Pull(NamedTuple):
    """One copy: the chunk with index `chunk`, in heads of `group`."""

    group: int
    chunk: int


class KeysPuller:
    """Pulls the chunks of a call into this rank's slots, in the order of their use, on the workspace's streams.

    Sources are distributed over the streams in turn. Each stream is a chain of relay, copy, relay, copy, ..., relay. A
    relay is one warp, but needs an SM with room for it while others compute: leave at least one free.
    """

    def __init__(self, layout: KeysLayout, workspace: RingWorkspace) -> None:
        self.workspace = workspace
        self.layout = layout
        self._memory = [workspace.keys(rank, layout) for rank in range(workspace.world_size)]
        self._sources = list(dict.fromkeys(chunk.source for chunk in layout.chunks))
        self._last_chunks = {chunk.source: index for index, chunk in enumerate(layout.chunks)}
        self._first_chunks = {chunk.source: index for index, chunk in reversed(list(enumerate(layout.chunks)))}

    def relay_launch(self, previous: _Pull | None, following: _Pull | None) -> KernelLaunch:
        """Return the relay between two copies: it signals the end of `previous` and waits until `following` may run."""
        layout, chunks = self.layout, self.layout.chunks
        signal_arguments = {"group": 0, "chunk": 0, "source": NONE.value, "is_last_chunk": 0}
        if previous is not None:
            source = chunks[previous.chunk].source
            is_last = previous.chunk == self._last_chunks[source] and previous.group == layout.num_groups - 1
            signal_arguments = {
                "group": previous.group,
                "chunk": previous.chunk,
                "source": source,
                "is_last_chunk": int(is_last),
            }
        awaited_rank = freed_group = NONE.value
        if following is not None:
            source = chunks[following.chunk].source
            if following.group >= layout.num_slots:
                freed_group = following.group - layout.num_slots
            elif following.group == 0 and following.chunk == self._first_chunks[source]:
                awaited_rank = source
        arguments = signal_arguments | {
            "awaited_rank": awaited_rank,
            "freed_group": freed_group,
            "WORLD": self.workspace.world_size,
            "num_warps": 1,
        }
        # The kernel that frees the group waits for chunks of peers first, and those waits must expire before this one.
        timeout_ns = scaled_timeout(self.workspace.timeout_ns, 1 if freed_group == NONE.value else 3)
        arguments |= self.workspace.arguments(timeout_ns)
        return relay_kernel, (1,), arguments

    def relays_to_load(self) -> list[KernelLaunch]:
        """Return a launch of each compiled variant of the relay.

        A relay that frees slots waits three times as long, and a timeout that exceeds 32 bits has another variant.
        """
        launches = [self.relay_launch(None, None)]
        if self.layout.chunks and self.layout.num_groups > self.layout.num_slots:
            launches.append(self.relay_launch(None, _Pull(self.layout.num_slots, 0)))
        return launches

    def pull(self, staged_event: torch.cuda.Event | None, groups: range) -> None:
        """Pull the chunks of these groups after `staged_event`; the current stream continues once all have been copied.

        `staged_event` None: on a CPU, where all chunks are copied now, as one chain.
        """
        streams = self.workspace.streams
        if staged_event is None:
            self._pull_chain(groups, self._sources)
        for i, stream in enumerate(streams):
            assert staged_event is not None
            stream.wait_event(staged_event)
            with torch.cuda.stream(stream):
                self._pull_chain(groups, self._sources[i :: len(streams)])
        for stream in streams:
            torch.cuda.current_stream(self.workspace.buffer.device).wait_stream(stream)

    def _pull_chain(self, groups: range, sources: Sequence[int]) -> None:
        previous = None
        for group in groups:
            for index, chunk in enumerate(self.layout.chunks):
                if chunk.source in sources:
                    pull = _Pull(group, index)
                    run_kernel(self.relay_launch(previous, pull))
                    self._copy_chunk(pull)
                    previous = pull
        if previous is not None:
            run_kernel(self.relay_launch(previous, None))

    def _copy_chunk(self, pull: _Pull) -> None:
        layout = self.layout
        chunk = layout.chunks[pull.chunk]
        source_start, source_stop = layout.own_row_range(chunk.source, pull.group, chunk.first_row, chunk.num_rows)
        target_start, target_stop = layout.chunk_row_range(pull.group, pull.chunk)
        source = self._memory[chunk.source][source_start:source_stop]
        self._memory[layout.rank][target_start:target_stop].copy_(source, non_blocking=True)


def staging_event(x: Tensor) -> torch.cuda.Event | None:
    """Return the event at the end of the current stream's work; None on a CPU."""
    return torch.cuda.current_stream(x.device).record_event() if x.is_cuda else None


fix_cache_keys(__name__)
