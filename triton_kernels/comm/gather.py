"""Rows of all ranks, gathered: memory that peers read, the flags around it, and the kernels that hand shards over.

    x_shard [M_r, K] per rank -> gathered [M, K]: rank r has rows r*c to (r+1)*c; the last ranks may have fewer, or none

One call of a rank is several launches:

    1. stage    copies its shard into its region, where peers can read it, and says so
    2. either   the copy engine pulls peers' regions into `gathered` (`Puller`), each copy between two `relay`s
       or       a matmul loads peers' regions itself and says when it is done

Words of a rank's memory, W each, and who puts them:

    begun[s]    rank s: it has begun the call
    ready[s]    rank s: its shard is in its region, as rows in one piece
    pulled[s]   rank s: it has read this rank's region and will not again in this call
    arrived[p]  this rank: the p-th shard to arrive is in `gathered`; that of rank order[p]
    verdict[s]  this rank, between two of its own launches: whether rank s's shard came

The flags are those of `signals`, but lie at one address, not in two halves that calls use in turn: a CUDA graph keeps
the addresses that the host gives the copy engine, while calls are counted on the device. One address will do because a
rank stages call e+1 once all have pulled e, and they pull e+1 once it is staged; flags only grow, so nothing is zeroed.

`stage` advances the number of the call; its other launches read it (`signals.join`). They are ordered behind it, the
next `stage` behind them, by the stream, or by events between streams, so a CUDA graph may capture all of it.

Orders: `stage`'s programs meet at a counter (acq_rel) and the last one puts ready (release.sys). `relay` waits for it
(acquire.sys), and a copy behind it in the stream begins when `relay` has ended. The next launch of `relay` puts arrived
(release), for which the matmul waits (acquire). What a copy engine or an earlier kernel has written is in L2 or beyond,
which is where TMA reads. Loads by TMA are of another proxy than the wait, so a fence follows it (`ptx.async_fence`).

Deadlines are those of `signals`. A shard that did not arrive is NaN in `gathered`, and so is all that is made of it. A
rank that gave up does not write to its region again, which peers may still read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..language import rounded
from .ptx import all_reached
from .signals import (
    COUNTERS,
    EPOCH,
    Call,
    begin,
    flag_at,
    is_last,
    join,
    look,
    poll,
    put,
    put_all,
    record,
    unbroken,
    wait,
)
from .streams import own_streams
from .workspace import DATA_ALIGNMENT, OPS, Handle, Workspace

OP = tl.constexpr(OPS.index("all_gather_matmul"))

# Runs of W words in a rank's memory; begun words come first.
READY = tl.constexpr(1)
PULLED = tl.constexpr(2)
ARRIVED = tl.constexpr(3)
ORDER = tl.constexpr(4)
VERDICT = tl.constexpr(5)
RUNS = tl.constexpr(6)
ALIGNMENT = tl.constexpr(DATA_ALIGNMENT)

# Counters of `state`.
STAGED = tl.constexpr(0)  # programs of `stage` that have copied their share
COME = tl.constexpr(1)  # shards that have arrived
DONE = tl.constexpr(2)  # programs that have done with the peers' regions

NO_RANK = tl.constexpr(-1)

# More side streams than that gain nothing: a GPU has a few copy engines, and its links are shared by all of them.
MAX_STREAMS = 4

# What a program of 4 warps copies at a time.
BLOCK_ROWS = tl.constexpr(16)
BLOCK_COLUMNS = tl.constexpr(512)


@triton.jit
def begin_stage(ws, rank, WORLD: tl.constexpr, OP: tl.constexpr):
    """(call, whether all peers have read what this rank's region held in the call before)."""
    call = begin(ws, rank, WORLD)
    pulled = flag_at(call, rank, PULLED * WORLD)
    free = all_reached(pulled, call.epoch - 1, rank, WORLD) & (call.epoch > 0)
    if not free:
        free = True
        for distance in tl.range(1, WORLD):
            free = wait_pulled(call, (rank + distance) % WORLD, WORLD, OP) & free
    return call, free


@triton.jit
def end_stage(call, unneeded, WORLD: tl.constexpr):
    """Says that the region is ready, once all programs have copied their share, and advances the number of the call.

    Of ranks whose bits are set in `unneeded` nothing will be pulled.
    """
    if is_last(call, STAGED, tl.num_programs(0)):
        # All programs have read the call's number and, had one of them not been free to write, that is on record.
        good = unbroken(call)
        put_all(call, call.rank + READY * WORLD, good, WORLD)
        if unneeded != 0:
            for peer in tl.range(0, WORLD):
                if (unneeded >> tl.cast(peer, tl.int64)) & 1 != 0:
                    put(call, peer, PULLED * WORLD + call.rank, good)
        tl.atomic_xchg(call.ws.state + EPOCH, call.epoch, sem="relaxed", scope="gpu")


@triton.jit
def wait_ready(call, source, VERDICT: tl.constexpr, WORLD: tl.constexpr, OP: tl.constexpr):
    """Waits for `source`'s region, and keeps for the next relay of the chain whether it came."""
    good = wait(call, READY * WORLD + source, source, -1, WORLD, OP)
    tl.store(flag_at(call, call.rank, VERDICT * WORLD + source), tl.where(good, call.epoch, 0))


@triton.jit
def wait_pulled(call, peer, WORLD: tl.constexpr, OP: tl.constexpr):
    """True once `peer` has read what was in this rank's region in the call before; as `wait`."""
    epoch = tl.maximum(call.epoch - 1, 0)
    before = Call(call.ws, call.rank, epoch)
    index = PULLED * WORLD + peer
    seen = look(flag_at(call, call.rank, index))
    if seen < epoch:
        seen = poll(before, index, peer, seen)
        if seen < epoch:
            # On record as of this call: all programs of it must agree that it was not broken when it began.
            record(call, peer, -1, seen < 0, WORLD, OP)
    tl.debug_barrier()
    return (seen >= epoch) & (call.epoch > 0)


@triton.jit
def region_at(call, rank, ELEMENT: tl.constexpr, WORLD: tl.constexpr):
    """Pointer to `rank`'s shard, as rows in one piece."""
    offset: tl.constexpr = (RUNS * WORLD * 8 + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT  # as region_offset
    # An address out of a table carries no alignment; without it the compiler would move single elements.
    return tl.multiple_of((tl.load(call.ws.workspaces + rank) + offset).to(tl.pointer_type(ELEMENT)), 16)


@triton.jit
def fill_nan(ptr, count):
    """NaN in `count` elements from `ptr` on."""
    nan = rounded(tl.full((1024,), float("nan"), tl.float32), ptr.dtype.element_ty)
    for first in tl.range(0, tl.cast(count, tl.int64), 1024, num_stages=1):
        places = first + tl.arange(0, 1024)
        tl.store(ptr + places, nan, mask=places < count)


@triton.jit
def copy_rows(source, strides, target, rows, K, good):
    """Copies [rows, K] to rows in one piece, unless `good` is False; the programs of a launch share the work."""
    blocks_n = tl.cdiv(K, BLOCK_COLUMNS)
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK_ROWS) * blocks_n, tl.num_programs(0)):
        block_m = block // blocks_n
        row = block_m.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
        column = (block - block_m * blocks_n).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
        mask = (row < rows) & (column < K) & good
        values = tl.load(source + row * strides[0] + column * strides[1], mask=mask)
        tl.store(target + row * K + column, values, mask=mask)


@triton.jit(do_not_specialize=["rank", "rows"])
def stage_kernel(x_ptr, rows, K, strides, ws, rank, WORLD: tl.constexpr):
    """Begins a call: copies x [rows, K] to this rank's region, once all have read what was there."""
    call, free = begin_stage(ws, rank, WORLD, OP)
    copy_rows(x_ptr, strides, region_at(call, rank, x_ptr.dtype.element_ty, WORLD), rows, K, free)
    end_stage(call, tl.cast(0, tl.int64), WORLD)


@triton.jit(do_not_specialize=["rank", "copied", "first_row", "rows", "awaited"])
def relay_kernel(gathered_ptr, K, copied, first_row, rows, awaited, ws, rank, WORLD: tl.constexpr):
    """Between two copies, one program: tells that rank `copied`'s shard has arrived, and waits for `awaited`'s."""
    call = join(ws, rank)
    if copied != NO_RANK:
        good = tl.load(flag_at(call, rank, VERDICT * WORLD + copied)) == call.epoch
        if not good:
            fill_nan(gathered_ptr + tl.cast(first_row, tl.int64) * K, tl.cast(rows, tl.int64) * K)
        position = tl.atomic_add(ws.state + COUNTERS + COME, 1, sem="acq_rel", scope="gpu")
        if position == WORLD - 2:
            tl.atomic_xchg(ws.state + COUNTERS + COME, 0, sem="relaxed", scope="gpu")
        tl.store(flag_at(call, rank, ORDER * WORLD + position), tl.cast(copied, tl.int64))
        put(call, rank, ARRIVED * WORLD + position, True)
        put(call, copied, PULLED * WORLD + rank, good)
    if awaited != NO_RANK:
        wait_ready(call, awaited, VERDICT, WORLD, OP)


def region_offset(world_size: int) -> int:
    """Where a rank's shard begins in its memory, in bytes."""
    return -(-RUNS.value * world_size * 8 // DATA_ALIGNMENT) * DATA_ALIGNMENT


class GatherWorkspace(Workspace):
    """The memory of one rank's gathers, of one stream. As `Workspace`, but for gathers, which only this one does."""

    def __init__(self, buffer: Tensor, handle: Handle, *, timeout_seconds: float) -> None:
        # Before the barrier at the end of what follows: behind it a peer's kernel may run and wait for this rank, and
        # nothing says that the driver makes streams meanwhile.
        self.streams: list[torch.cuda.Stream] = []
        if buffer.is_cuda:
            self.streams = own_streams(self, buffer.device, min(handle.world_size - 1, MAX_STREAMS), urgent=True)
        super().__init__(buffer, handle, timeout_seconds=timeout_seconds, counters=16)
        self.handle = handle
        # Where the buffer begins in what the handle's `get_buffer` gives, the same on all ranks.
        self.begin = buffer.data_ptr() - handle.get_buffer(self.rank, (1,), torch.uint8, 0).data_ptr()
        self.nbytes = buffer.nbytes
        self.half_bytes = 0  # both halves are one: see above
        self.loaded: set[Any] = set()  # calls whose kernels are on the device

    def require(self, needed: int) -> None:
        """Raises ValueError where it has fewer bytes."""
        if needed > self.nbytes:
            raise ValueError(f"The workspace has {self.nbytes} bytes; this call needs {needed}. Make it larger.")

    def region(self, rank: int, rows: int, k: int, dtype: torch.dtype) -> Tensor:
        """[rows, k] at the beginning of `rank`'s region."""
        offset = (self.begin + region_offset(self.world_size)) // dtype.itemsize
        return self.handle.get_buffer(rank, (rows, k), dtype, offset)


@dataclasses.dataclass(frozen=True)
class Shards:
    """Which rows of [M, K] which rank has."""

    rows: int
    rows_per_rank: int
    k: int

    def range(self, rank: int) -> tuple[int, int]:
        """(first row, how many) of `rank`."""
        first = min(rank * self.rows_per_rank, self.rows)
        return first, min(self.rows_per_rank, self.rows - first)


# (kernel, grid, arguments by name): a launch that has not taken place yet.
LaunchOf = tuple[Any, tuple[int], dict[str, Any]]


def stage_launch(x_shard: Tensor, workspace: GatherWorkspace, programs: int) -> LaunchOf:
    """What begins a call, with `programs` programs at most."""
    rows, k = x_shard.shape
    blocks = -(-rows // BLOCK_ROWS.value) * -(-k // BLOCK_COLUMNS.value)
    arguments = {
        "x_ptr": x_shard,
        "rows": rows,
        "K": k,
        "strides": x_shard.stride(),
        "WORLD": workspace.world_size,
    }
    return stage_kernel, (max(1, min(blocks, programs)),), arguments | workspace.arguments()


class CopyChains(ABC):
    """Copies by the copy engine on the side streams of a workspace, each of which is a chain: relay, copy, relay, copy,
    ..., relay. A relay is one warp, but needs an SM that can take it while others compute: leave at least one free."""

    def __init__(self, workspace: GatherWorkspace, most_streams: int) -> None:
        self.workspace = workspace
        self.streams = workspace.streams[:most_streams]

    @abstractmethod
    def relay_launch(self, before: Any, behind: Any) -> LaunchOf:
        """What tells of the copy before it and waits for what that behind it needs; None: of none, for none."""

    @abstractmethod
    def copy(self, what: Any) -> None: ...

    def start(
        self,
        staged: torch.cuda.Event | None,
        chain: Callable[[int, int], Sequence[Any]],
        last: Callable[[], None] | None = None,
    ) -> None:
        """Puts `chain(i, count)` into side stream i, behind `staged`, and `last` behind one of them; the current stream
        goes on once everything has been copied. None: on a CPU, where all is copied now, as one chain."""
        if staged is None:
            self.run(chain(0, 1))
        for i, stream in enumerate(self.streams):
            assert staged is not None
            stream.wait_event(staged)
            with torch.cuda.stream(stream):
                self.run(chain(i, len(self.streams)))
        if last is not None:
            with torch.cuda.stream(self.streams[-1]) if self.streams else contextlib.nullcontext():
                last()
        for stream in self.streams:
            torch.cuda.current_stream(self.workspace.buffer.device).wait_stream(stream)

    def run(self, chain: Sequence[Any]) -> None:
        """On the current stream, or, interpreted, now."""
        before = None
        for what in chain:
            run(self.relay_launch(before, what))
            self.copy(what)
            before = what
        if before is not None:
            run(self.relay_launch(before, None))


class Puller(CopyChains):
    """Pulls peers' shards into `gathered` [M, K], while the current stream goes on with other work.

    Sources are spread over the side streams in order of distance, so no two ranks read from the same peer first. Where
    `gathered` is kept, its own rows are copied last, behind all that somebody waits for.
    """

    def __init__(self, gathered: Tensor, keep: bool, shards: Shards, workspace: GatherWorkspace) -> None:
        super().__init__(workspace, MAX_STREAMS)
        self.gathered = gathered
        self.keep = keep
        self.shards = shards

    def relay_launch(self, before: int | None, behind: int | None) -> LaunchOf:
        first, rows = self.shards.range(before or 0)
        arguments = {
            "gathered_ptr": self.gathered,
            "K": self.shards.k,
            "copied": NO_RANK.value if before is None else before,
            "first_row": first,
            "rows": rows,
            "awaited": NO_RANK.value if behind is None else behind,
            "WORLD": self.workspace.world_size,
            "num_warps": 1,
        }
        return relay_kernel, (1,), arguments | self.workspace.arguments()

    def pull(self, staged: torch.cuda.Event | None) -> None:
        """Pulls all of it, as `start` says."""
        rank, world = self.workspace.rank, self.workspace.world_size
        peers = [(rank + distance) % world for distance in range(1, world)]
        self.start(staged, lambda i, count: peers[i::count], (lambda: self.copy(rank)) if self.keep else None)

    def copy(self, what: int) -> None:
        first, rows = self.shards.range(what)
        if rows:
            theirs = self.workspace.region(what, rows, self.shards.k, self.gathered.dtype)
            self.gathered[first : first + rows].copy_(theirs, non_blocking=True)


def runs_at_once(x: Tensor) -> bool:
    """Whether a kernel and the copies it waits for run at once where x is; if not, the copies must come first.

    Nothing promises that of branches of a CUDA graph, nor where every launch is waited for.
    """
    blocking = os.environ.get("CUDA_LAUNCH_BLOCKING", "0") == "1"
    return x.is_cuda and not blocking and not torch.cuda.is_current_stream_capturing()


def staged_on(x: Tensor) -> torch.cuda.Event | None:
    """The end of what is in the current stream; None on a CPU."""
    return torch.cuda.current_stream(x.device).record_event() if x.is_cuda else None


def run(launch: LaunchOf) -> None:
    """Launches a kernel on the current stream."""
    kernel, grid, arguments = launch
    kernel[grid](**arguments)


def load(launch: LaunchOf) -> None:
    """Compiles a kernel and loads it onto the device, without launching it.

    Loading may wait for the kernels that run, and these may wait for a launch that is yet to come.
    """
    kernel, _, arguments = launch
    compiled = kernel.warmup(grid=(1,), **arguments)
    compiled[1, 1, 1]  # asking for a launcher loads it
