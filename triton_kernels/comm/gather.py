"""Regions of memory from which peers read a rank's shard, and the flags that guard them.

    x_shard [M_r, K] per rank -> gathered [M, K]: rank r has rows r*c to (r+1)*c; the last ranks may have fewer, or none

One call of a rank is several launches:

    1. stage    copies the shard into this rank's region, where peers can read it, and signals ready
    2. a kernel that loads from the peers' regions, and signals pulled when it is done

Words in a rank's memory, W each, set by rank s:

    begun[s]    rank s has begun the call
    ready[s]    rank s's shard is in its region, as contiguous rows
    pulled[s]   rank s has read this rank's region and will not read it again in this call

The flags are those of `signals`, but all calls use the same address instead of alternating halves: a rank stages call
e+1 once all peers have pulled e, and they pull e+1 once it is staged. Flags only grow, so nothing is zeroed.

`stage` advances the call number; the call's other launches read it (`signals.current_call`). The stream orders them
after `stage` and before the next `stage`, so a CUDA graph may capture all of it.

Memory order: the programs of `stage` increment a counter (acq_rel), the last one signals ready (release.sys), and the
reader waits for ready (acquire.sys).

Deadlines are those of `signals`. A shard that did not arrive is NaN in `gathered`, as are all results of it. A rank
that gave up does not write to its region again, since peers may still read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cache_keys import fix_cache_keys
from ..language import all_reached, rounded
from .signals import (
    DATA_ALIGNMENT,
    EPOCH,
    OPS,
    Handle,
    SignalledCall,
    Workspace,
    begin,
    flag_at,
    is_last,
    is_unbroken,
    poll,
    read_flag,
    record_expired_wait,
    signal,
    signal_all,
)

OP = tl.constexpr(OPS.index("all_gather_matmul"))

# Runs of W words in a rank's memory; the begun words are the first run.
READY = tl.constexpr(1)
PULLED = tl.constexpr(2)
RUNS = tl.constexpr(3)
ALIGNMENT = tl.constexpr(DATA_ALIGNMENT)

# Indices of counters in `state`.
STAGED = tl.constexpr(0)  # programs of `stage` that have copied their share
DONE = tl.constexpr(1)  # programs that no longer read the peers' regions

# Size of the block that a program of 4 warps copies at a time.
BLOCK_ROWS = tl.constexpr(16)
BLOCK_COLUMNS = tl.constexpr(512)


@triton.jit
def begin_stage(ws, rank, WORLD: tl.constexpr, OP: tl.constexpr):
    """Begin a call; return (call, True if all peers have read this rank's region of the previous call)."""
    call = begin(ws, rank, WORLD)
    pulled_flags = flag_at(call, rank, PULLED * WORLD)
    is_free = all_reached(pulled_flags, call.epoch - 1, rank, WORLD) & (call.epoch > 0)
    if not is_free:
        is_free = True
        for distance in tl.range(1, WORLD):
            is_free = wait_pulled(call, (rank + distance) % WORLD, WORLD, OP) & is_free
    return call, is_free


@triton.jit
def end_stage(call, unneeded_ranks, WORLD: tl.constexpr):
    """Signal ready once all programs have copied their share, and advance the call number.

    `unneeded_ranks` has a bit for each rank from which this rank will pull nothing.
    """
    if is_last(call, STAGED, tl.num_programs(0)):
        # By now all programs have read the call number, and a program that may not write has recorded its expired wait.
        is_valid = is_unbroken(call)
        signal_all(call, call.rank + READY * WORLD, is_valid, WORLD)
        if unneeded_ranks != 0:
            for peer in tl.range(0, WORLD):
                if (unneeded_ranks >> tl.cast(peer, tl.int64)) & 1 != 0:
                    signal(call, peer, PULLED * WORLD + call.rank, is_valid)
        tl.atomic_xchg(call.ws.state + EPOCH, call.epoch, sem="relaxed", scope="gpu")


@triton.jit
def wait_pulled(call, peer, WORLD: tl.constexpr, OP: tl.constexpr):
    """True once `peer` has read this rank's region of the previous call; otherwise as `wait`."""
    epoch = tl.maximum(call.epoch - 1, 0)
    previous_call = SignalledCall(call.ws, call.rank, epoch)
    index = PULLED * WORLD + peer
    value = read_flag(flag_at(call, call.rank, index))
    if value < epoch:
        value = poll(previous_call, index, peer, value)
        if value < epoch:
            # Recorded under this call: all its programs must agree that no wait had expired when it began.
            record_expired_wait(call, peer, -1, value < 0, WORLD, OP)
    tl.debug_barrier()
    return (value >= epoch) & (call.epoch > 0)


@triton.jit
def shard_pointer(call, rank, ELEMENT: tl.constexpr, WORLD: tl.constexpr):
    """Return the pointer to `rank`'s shard, in contiguous rows."""
    offset: tl.constexpr = (RUNS * WORLD * 8 + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT  # as region_offset
    # The compiler cannot know the alignment of an address from a table, and would move single elements.
    return tl.multiple_of((tl.load(call.ws.workspaces + rank) + offset).to(tl.pointer_type(ELEMENT)), 16)


@triton.jit
def fill_nan(ptr, count):
    """Store NaN in `count` elements from `ptr` on."""
    nan = rounded(tl.full((1024,), float("nan"), tl.float32), ptr.dtype.element_ty)
    for start in tl.range(0, tl.cast(count, tl.int64), 1024, num_stages=1):
        offsets = start + tl.arange(0, 1024)
        tl.store(ptr + offsets, nan, mask=offsets < count)


@triton.jit
def copy_rows(source, strides, target, rows, K, is_valid):
    """Copy [rows, K] to contiguous rows, unless `is_valid` is False; the programs of a launch share the work."""
    num_column_blocks = tl.cdiv(K, BLOCK_COLUMNS)
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK_ROWS) * num_column_blocks, tl.num_programs(0)):
        row_block = block // num_column_blocks
        column_block = block - row_block * num_column_blocks
        row = row_block.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
        column = column_block.to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
        mask = (row < rows) & (column < K) & is_valid
        values = tl.load(source + row * strides[0] + column * strides[1], mask=mask)
        tl.store(target + row * K + column, values, mask=mask)


@triton.jit(do_not_specialize=["rank", "rows"])
def stage_kernel(x_ptr, rows, K, strides, ws, rank, WORLD: tl.constexpr):
    """Begin a call: copy x [rows, K] to this rank's region, once all peers have read its previous content."""
    call, is_free = begin_stage(ws, rank, WORLD, OP)
    copy_rows(x_ptr, strides, shard_pointer(call, rank, x_ptr.dtype.element_ty, WORLD), rows, K, is_free)
    end_stage(call, tl.cast(0, tl.int64), WORLD)


def region_offset(world_size: int) -> int:
    """Return the byte offset of a rank's shard in its memory."""
    return -(-RUNS.value * world_size * 8 // DATA_ALIGNMENT) * DATA_ALIGNMENT


class GatherWorkspace(Workspace):
    """Memory for one rank's gathers on one stream: a `Workspace` that serves gathers only."""

    half_count = 1  # all calls use the same memory; see the module docstring

    def __init__(
        self, buffer: Tensor, handle: Handle, *, timeout_seconds: float, rescue_stream: torch.cuda.Stream | None = None
    ) -> None:
        super().__init__(buffer, handle, timeout_seconds=timeout_seconds, counters=16, rescue_stream=rescue_stream)
        self.handle = handle
        # Offset of the buffer in the memory that `handle.get_buffer` returns, the same on all ranks.
        self.buffer_offset = buffer.data_ptr() - handle.get_buffer(self.rank, (1,), torch.uint8, 0).data_ptr()
        self.nbytes = buffer.nbytes
        self.loaded_keys: set[Any] = set()  # keys of calls whose kernels are on the device

    def require_bytes(self, needed_bytes: int) -> None:
        """Raise ValueError if the workspace has fewer than `needed_bytes` bytes."""
        if needed_bytes > self.nbytes:
            raise ValueError(
                f"The workspace has {self.nbytes} bytes; this call needs {needed_bytes}. Create a larger one."
            )

    def region(self, rank: int, rows: int, k: int, dtype: torch.dtype) -> Tensor:
        """Return the tensor [rows, k] at the beginning of `rank`'s region."""
        offset = (self.buffer_offset + region_offset(self.world_size)) // dtype.itemsize
        return self.handle.get_buffer(rank, (rows, k), dtype, offset)


@dataclass(frozen=True)
class Shards:
    """Distribution of the rows of [M, K] over ranks."""

    rows: int
    rows_per_rank: int
    k: int

    def rank_rows(self, rank: int) -> tuple[int, int]:
        """Return (first row, number of rows) of `rank`."""
        first_row = min(rank * self.rows_per_rank, self.rows)
        return first_row, min(self.rows_per_rank, self.rows - first_row)


# (kernel, grid, arguments by name) of a launch that has not been issued yet.
KernelLaunch = tuple[Any, tuple[int], dict[str, Any]]


def stage_launch(x_shard: Tensor, workspace: GatherWorkspace, programs: int) -> KernelLaunch:
    """Return the launch that begins a call, with at most `programs` programs."""
    rows, k = x_shard.shape
    num_blocks = -(-rows // BLOCK_ROWS.value) * -(-k // BLOCK_COLUMNS.value)
    arguments = {
        "x_ptr": x_shard,
        "rows": rows,
        "K": k,
        "strides": x_shard.stride(),
        "WORLD": workspace.world_size,
    }
    return stage_kernel, (max(1, min(num_blocks, programs)),), arguments | workspace.arguments()


def run_kernel(launch: KernelLaunch) -> None:
    """Launch a kernel on the current stream."""
    kernel, grid, arguments = launch
    kernel[grid](**arguments)


def load_kernel(launch: KernelLaunch) -> None:
    """Compile a kernel and load it onto the device, without launching it.

    Loading may wait for running kernels, which may themselves wait for a launch that has not been issued yet.
    """
    kernel, _, arguments = launch
    compiled = kernel.warmup(grid=(1,), **arguments)
    compiled[1, 1, 1]  # asking for a launcher loads it


fix_cache_keys(__name__)
