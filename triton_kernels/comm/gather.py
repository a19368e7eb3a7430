"""Rows of all ranks that peers read: a rank's shard in its region, and the flags around it.

    x_shard [M_r, K] per rank -> gathered [M, K]: rank r has rows r*c to (r+1)*c; the last ranks may have fewer, or none

One call of a rank is several launches:

    1. stage    copies its shard into its region, where peers can read it, and says so
    2. a kernel that loads peers' regions itself, and says when it is done

Words of a rank's memory, W each, and who puts them:

    begun[s]    rank s: it has begun the call
    ready[s]    rank s: its shard is in its region, as rows in one piece
    pulled[s]   rank s: it has read this rank's region and will not again in this call

The flags are those of `signals`, but lie at one address, not in two halves that calls use in turn: a rank stages call
e+1 once all have pulled e, and they pull e+1 once it is staged. Flags only grow, so nothing is zeroed.

`stage` advances the number of the call; its other launches read it (`signals.join`). They are ordered behind it, and
the next `stage` behind them, by the stream, so a CUDA graph may capture all of it.

Orders: `stage`'s programs meet at a counter (acq_rel) and the last one puts ready (release.sys), for which the reader
waits (acquire.sys).

Deadlines are those of `signals`. A shard that did not arrive is NaN in `gathered`, and so is all that is made of it. A
rank that gave up does not write to its region again, which peers may still read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cache_keys import fix_cache_keys
from ..language import rounded
from .ptx import all_reached
from .signals import EPOCH, Call, begin, flag_at, is_last, look, poll, put, put_all, record, unbroken
from .workspace import DATA_ALIGNMENT, OPS, Handle, Workspace

OP = tl.constexpr(OPS.index("all_gather_matmul"))

# Runs of W words in a rank's memory; begun words come first.
READY = tl.constexpr(1)
PULLED = tl.constexpr(2)
RUNS = tl.constexpr(3)
ALIGNMENT = tl.constexpr(DATA_ALIGNMENT)

# Counters of `state`.
STAGED = tl.constexpr(0)  # programs of `stage` that have copied their share
DONE = tl.constexpr(1)  # programs that have done with the peers' regions

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


def region_offset(world_size: int) -> int:
    """Where a rank's shard begins in its memory, in bytes."""
    return -(-RUNS.value * world_size * 8 // DATA_ALIGNMENT) * DATA_ALIGNMENT


class GatherWorkspace(Workspace):
    """The memory of one rank's gathers, of one stream. As `Workspace`, but for gathers, which only this one does."""

    halves = 1  # see above

    def __init__(
        self, buffer: Tensor, handle: Handle, *, timeout_seconds: float, rescue: torch.cuda.Stream | None = None
    ) -> None:
        super().__init__(buffer, handle, timeout_seconds=timeout_seconds, counters=16, rescue=rescue)
        self.handle = handle
        # Where the buffer begins in what the handle's `get_buffer` gives, the same on all ranks.
        self.begin = buffer.data_ptr() - handle.get_buffer(self.rank, (1,), torch.uint8, 0).data_ptr()
        self.nbytes = buffer.nbytes
        self.loaded: set[Any] = set()  # calls whose kernels are on the device

    def require(self, needed: int) -> None:
        """Raises ValueError where it has fewer bytes."""
        if needed > self.nbytes:
            raise ValueError(f"The workspace has {self.nbytes} bytes; this call needs {needed}. Make it larger.")

    def region(self, rank: int, rows: int, k: int, dtype: torch.dtype) -> Tensor:
        """[rows, k] at the beginning of `rank`'s region."""
        offset = (self.begin + region_offset(self.world_size)) // dtype.itemsize
        return self.handle.get_buffer(rank, (rows, k), dtype, offset)


@dataclass(frozen=True)
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


fix_cache_keys(__name__)
