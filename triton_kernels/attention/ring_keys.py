"""Keys and values of all ranks for a kernel of ring attention: pulled chunk by chunk, each announced by a flag.

A rank's queries look at rows of other ranks' keys: its chunks, each of one source. Heads go by groups, so that what is
held of other ranks is two groups' heads (SLOTS), not all, and the second group travels while the first is computed
with. Memory of a rank, [rows, heads of a group, D + Dv], K next to V so that a chunk of a group is one piece:

    own keys         group by group, all rows of this rank; what peers read
    slots            group g's chunks, one behind the other, in slot g % SLOTS

`stage` copies own keys there and says so (module `gather` has that part of the protocol, and its words begun, ready and
pulled, of W each); between two copies of the copy engine `relay`, one program, announces the one and waits for what the
other needs. More words:

    verdict[s]       this rank, between two of its own launches: whether rank s's keys came
    arrived[g][c]    this rank: chunk c of group g is in its slot
    done[g]          this rank: all of group g has been computed with, so its slot may be written again

Between calls a slot is free, since copies are behind `stage`, which is behind the kernel of the call before. Own keys
are free once all ranks have pulled: each puts pulled in each call, at once where it needs nothing of that source, so
calls whose masks skip different steps do not pass each other.

A wait that expires is on record before anything is overwritten or missed because of it: the reader of the chunks checks
the record when it ends (`signals.unbroken`), and writes NaN.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cache_keys import fix_cache_keys
from ..comm.gather import PULLED, READY, GatherWorkspace, LaunchOf, begin_stage, end_stage, run
from ..comm.signals import flag_at, join, put, wait
from ..comm.streams import own_streams, queues_are_few
from ..comm.workspace import DATA_ALIGNMENT, OPS, Handle
from .blocks import Rows, load_block, rows_of, store_block
from .configs import padded
from .launch import heads_of

OP = tl.constexpr(OPS.index("ring_attention"))

VERDICT = tl.constexpr(3)  # run of W words, behind begun, ready and pulled
FLAGS = tl.constexpr(4)  # runs before the flags of chunks and groups
MAX_CHUNKS = tl.constexpr(64)  # of a rank in one call
MAX_GROUPS = tl.constexpr(8)
GROUP_DONE = tl.constexpr(2)  # first of the counters of programs that have done with a group
NONE = tl.constexpr(-1)

_LONGEST_NS = (1 << 63) - 1  # kernels count nanoseconds in 63 bits

SLOTS = 2  # groups whose chunks are held at a time
MAX_STREAMS = 2  # one copies while the other's relay runs; more would let a later chunk slow an earlier one down
LEAST_GROUP_BYTES = 1 << 20  # of a shard's keys and values: a smaller copy takes less time than its relay
ROWS = tl.constexpr(32)  # that a program of `stage` copies at a time


@triton.jit
def arrived_flag(group, chunk, WORLD: tl.constexpr):
    """Number of the flag that tells of a chunk (0 is the first behind a rank's own keys)."""
    return FLAGS * WORLD + group * MAX_CHUNKS + chunk


@triton.jit
def done_flag(group, WORLD: tl.constexpr):
    """Number of the flag that tells that a group's slot is free."""
    return FLAGS * WORLD + MAX_GROUPS * MAX_CHUNKS + group


_STAGE_ODD = ("rank", "rows", "heads", "per_group", "unneeded")
_RELAY_ODD = ("rank", "group", "chunk", "source", "last", "awaited", "freed")


@triton.jit(do_not_specialize=_STAGE_ODD)
def stage_kernel(
    k, v, own,
    rows, heads, pairs, per_group, unneeded,
    ws, rank, WORLD: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, PADDED_D: tl.constexpr, PADDED_DV: tl.constexpr,
):  # fmt: skip
    """Begins a call: copies k and v [B, rows, heads, D or DV] to own [groups, rows, per_group, D + DV], once all have
    read what was there. Bit s of `unneeded` says that nothing of rank s's keys will be pulled."""
    call, free = begin_stage(ws, rank, WORLD, OP)
    width = per_group * (D + DV)
    for block in tl.range(tl.program_id(0), pairs * tl.cdiv(rows, ROWS), tl.num_programs(0)):
        pair = block % pairs
        row = block // pairs * ROWS
        end = tl.where(free, rows, row)
        keys = load_block(rows_of(k, pair // heads, pair % heads), row, end, D, ROWS, PADDED_D)
        values = load_block(rows_of(v, pair // heads, pair % heads), row, end, DV, ROWS, PADDED_DV)
        target = own + tl.cast(pair // per_group, tl.int64) * rows * width + pair % per_group * (D + DV)
        store_block(Rows(target, width), keys, row, end, D)
        store_block(Rows(target + D, width), values, row, end, DV)
    end_stage(call, unneeded, WORLD)


@triton.jit(do_not_specialize=_RELAY_ODD)
def relay_kernel(group, chunk, source, last, awaited, freed, ws, rank, WORLD: tl.constexpr):
    """Between two copies, one program: tells that a chunk of `source` has arrived, the last of its chunks or not, and
    waits for rank `awaited`'s keys, or until group `freed` has been computed with. NONE: of none, for none."""
    call = join(ws, rank)
    if source != NONE:
        good = tl.load(flag_at(call, rank, VERDICT * WORLD + source)) == call.epoch
        put(call, rank, arrived_flag(group, chunk, WORLD), good)
        if last != 0:
            put(call, source, PULLED * WORLD + rank, good)
    if freed != NONE:
        wait(call, done_flag(freed, WORLD), rank, -1, WORLD, OP)
    if awaited != NONE:
        good = wait(call, READY * WORLD + awaited, awaited, -1, WORLD, OP)
        tl.store(flag_at(call, rank, VERDICT * WORLD + awaited), tl.where(good, call.epoch, 0))


class Chunk(NamedTuple):
    """Rows [first, first + rows) of the keys of rank `source`."""

    source: int
    first: int
    rows: int


@dataclasses.dataclass(frozen=True)
class KeysLayout:
    """Where the keys of one call lie in the memory of all ranks.

    Attributes:
        rows: of keys that each rank has.
        chunks: of this rank, in the order in which it computes with them; not its own keys.
        most: rows of the chunks of the rank that has most of them; the same on all ranks, like all below.
        pairs: of a batch row and a head of keys.
        groups: that these are cut into; divides them.
    """

    rank: int
    rows: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    most: int
    pairs: int
    groups: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype

    @property
    def per_group(self) -> int:
        return self.pairs // self.groups

    @property
    def own_rows(self) -> int:
        return self.rows[self.rank]

    @property
    def slots(self) -> int:
        return min(SLOTS, self.groups)

    @property
    def slots_row(self) -> int:
        """Where slots begin, in rows."""
        return self.groups * max(self.rows)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each chunk begins in its slot, in rows; and where the last ends."""
        found = [0]
        for chunk in self.chunks:
            found.append(found[-1] + chunk.rows)
        return tuple(found)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a rank's memory: rows, heads, elements."""
        return self.slots_row + self.slots * self.most, self.per_group, self.head_dim + self.v_head_dim

    def nbytes(self, world_size: int) -> int:
        """The smallest workspace for it; the same on all ranks."""
        return data_offset(world_size) + prod(self.shape) * self.dtype.itemsize

    def own(self, rank: int, group: int, first: int, rows: int) -> tuple[int, int]:
        """Rows [start, stop) of `rank`'s memory that hold these of its keys, in heads of `group`."""
        start = group * self.rows[rank] + first
        return start, start + rows

    def pulled(self, group: int, chunk: int) -> tuple[int, int]:
        """Rows [start, stop) of this rank's memory for a chunk, in heads of `group`."""
        slot = self.slots_row + group % self.slots * self.most
        return slot + self.offsets[chunk], slot + self.offsets[chunk + 1]


def data_offset(world_size: int) -> int:
    """Where keys begin in a rank's memory, in bytes, behind all words."""
    words = FLAGS.value * world_size + MAX_GROUPS.value * (MAX_CHUNKS.value + 1)
    return -(-words * 8 // DATA_ALIGNMENT) * DATA_ALIGNMENT


def groups_of(pairs: int, shard_bytes: int) -> int:
    """Into how many groups heads are cut, where the longest shard's keys and values have that many bytes.

    >>> groups_of(16, 64 << 20), groups_of(6, 3 << 20), groups_of(7, 0)
    (8, 3, 1)
    """
    most = max(1, min(MAX_GROUPS.value, shard_bytes // LEAST_GROUP_BYTES))
    return max(count for count in range(1, most + 1) if pairs % count == 0)


def longer(timeout_ns: int, times: int) -> int:
    """That many times the deadline, or for ever.

    >>> longer(5, 3), longer(1 << 62, 3) == (1 << 63) - 1
    (15, True)
    """
    return min(times * timeout_ns, _LONGEST_NS)


class RingWorkspace(GatherWorkspace):
    """The memory of one rank's calls of ring attention, which only they use; of at least `KeysLayout.nbytes` bytes."""

    def __init__(
        self, buffer: Tensor, handle: Handle, *, timeout_seconds: float, rescue: torch.cuda.Stream | None = None
    ) -> None:
        # Before the barrier at the end of what follows: behind it a peer's kernel may run and wait for this rank, and
        # nothing says that the driver makes streams meanwhile.
        self.streams: list[torch.cuda.Stream] = []
        if buffer.is_cuda:
            self.streams = own_streams(self, buffer.device, min(handle.world_size - 1, MAX_STREAMS), urgent=True)
        super().__init__(buffer, handle, timeout_seconds=timeout_seconds, rescue=rescue)

    def keys(self, rank: int, layout: KeysLayout) -> Tensor:
        """The memory of `rank`, in the shape of `layout`.

        Raises:
            ValueError: it is too small.
        """
        self.require(layout.nbytes(self.world_size))
        offset = (self.begin + data_offset(self.world_size)) // layout.dtype.itemsize
        return self.handle.get_buffer(rank, layout.shape, layout.dtype, offset)


def stage_launch(k: Tensor, v: Tensor, layout: KeysLayout, workspace: RingWorkspace, programs: int) -> LaunchOf:
    """What begins a call, with `programs` programs at most."""
    needed = {chunk.source for chunk in layout.chunks}
    unneeded = sum(1 << rank for rank in range(workspace.world_size) if rank not in needed)
    arguments = {
        "k": heads_of(k),
        "v": heads_of(v),
        "own": workspace.keys(workspace.rank, layout),
        "rows": layout.own_rows,
        "heads": k.shape[2],
        "pairs": layout.pairs,
        "per_group": layout.per_group,
        "unneeded": unneeded,
        "WORLD": workspace.world_size,
        "D": layout.head_dim,
        "DV": layout.v_head_dim,
        "PADDED_D": padded(layout.head_dim),
        "PADDED_DV": padded(layout.v_head_dim),
        "maxnreg": 168,  # left alone ptxas takes 72, and spills
    }
    blocks = layout.pairs * -(-layout.own_rows // ROWS.value)
    return stage_kernel, (max(1, min(blocks, programs)),), arguments | workspace.arguments()


class _Pull(NamedTuple):
    """One copy: chunk number `chunk` in heads of `group`."""

    group: int
    chunk: int


class KeysPuller:
    """Pulls the chunks of a call into this rank's slots, in the order in which they are used; sources are dealt to the
    side streams of the workspace in turn.

    Each stream is a chain of relay, copy, relay, copy, ..., relay. A relay is one warp, but needs an SM that can take
    it while others compute: leave at least one free.
    """

    def __init__(self, layout: KeysLayout, workspace: RingWorkspace) -> None:
        self.workspace = workspace
        self.layout = layout
        self._memory = [workspace.keys(rank, layout) for rank in range(workspace.world_size)]
        self._sources = list(dict.fromkeys(chunk.source for chunk in layout.chunks))
        self._last = {chunk.source: number for number, chunk in enumerate(layout.chunks)}
        self._first = {chunk.source: number for number, chunk in reversed(list(enumerate(layout.chunks)))}

    def relay_launch(self, before: _Pull | None, behind: _Pull | None) -> LaunchOf:
        """What tells of the copy before it and waits for what that behind it needs; None: of none, for none."""
        layout, chunks = self.layout, self.layout.chunks
        told = {"group": 0, "chunk": 0, "source": NONE.value, "last": 0}
        if before is not None:
            source = chunks[before.chunk].source
            last = before.chunk == self._last[source] and before.group == layout.groups - 1
            told = {"group": before.group, "chunk": before.chunk, "source": source, "last": int(last)}
        awaited = freed = NONE.value
        if behind is not None:
            source = chunks[behind.chunk].source
            if behind.group >= layout.slots:
                freed = behind.group - layout.slots
            elif behind.group == 0 and behind.chunk == self._first[source]:
                awaited = source
        arguments = told | {"awaited": awaited, "freed": freed, "WORLD": self.workspace.world_size, "num_warps": 1}
        # The kernel that frees a group waits for other chunks meanwhile: the wait for a peer must expire first.
        arguments |= self.workspace.arguments(longer(self.workspace.timeout_ns, 1 if freed == NONE.value else 3))
        return relay_kernel, (1,), arguments

    def relays_to_load(self) -> list[LaunchOf]:
        """One of each kind: deadlines of more than 32 bits are another kind."""
        kinds = [self.relay_launch(None, None)]
        if self.layout.chunks and self.layout.groups > self.layout.slots:
            kinds.append(self.relay_launch(None, _Pull(self.layout.slots, 0)))
        return kinds

    def pull(self, staged: torch.cuda.Event | None, groups: range) -> None:
        """Pulls the chunks of these groups, behind `staged`; the current stream goes on once all have been copied.
        None: on a CPU, where all is copied now, as one chain."""
        streams = self.workspace.streams
        if staged is None:
            self._run(groups, self._sources)
        for i, stream in enumerate(streams):
            assert staged is not None
            stream.wait_event(staged)
            with torch.cuda.stream(stream):
                self._run(groups, self._sources[i :: len(streams)])
        for stream in streams:
            torch.cuda.current_stream(self.workspace.buffer.device).wait_stream(stream)

    def _run(self, groups: range, sources: Sequence[int]) -> None:
        before = None
        for group in groups:
            for number, chunk in enumerate(self.layout.chunks):
                if chunk.source in sources:
                    pulled = _Pull(group, number)
                    run(self.relay_launch(before, pulled))
                    self.copy(pulled)
                    before = pulled
        if before is not None:
            run(self.relay_launch(before, None))

    def copy(self, what: _Pull) -> None:
        layout = self.layout
        chunk = layout.chunks[what.chunk]
        start, stop = layout.own(chunk.source, what.group, chunk.first, chunk.rows)
        to, end = layout.pulled(what.group, what.chunk)
        self._memory[layout.rank][to:end].copy_(self._memory[chunk.source][start:stop], non_blocking=True)


def runs_at_once(x: Tensor) -> bool:
    """Whether a kernel and the copies it waits for run at once where x is; if not, the copies must come first.

    Nothing promises that of branches of a CUDA graph, nor where streams share queues or every launch is waited for.
    """
    blocking = os.environ.get("CUDA_LAUNCH_BLOCKING", "0") == "1"
    return x.is_cuda and not blocking and not queues_are_few() and not torch.cuda.is_current_stream_capturing()


def staged_on(x: Tensor) -> torch.cuda.Event | None:
    """The end of what is in the current stream; None on a CPU."""
    return torch.cuda.current_stream(x.device).record_event() if x.is_cuda else None


fix_cache_keys(__name__)
