"""Gathers and scatters by the GPU's copy engines over symmetric memory, which occupy no multiprocessor.

All work is enqueued on the engine's own streams, so the host never waits. Ranks signal each other by flags, which are
memory words that streams write and wait for; csrc/copy_engine/steps.h describes the protocol. The flags' values are
constants, so calls can be captured in CUDA graphs.

Gathers read from peers and scatters write to peers, so that each byte is moved once (csrc/copy_engine/workspace.h). It
was not measured whether reads or writes are faster; NVIDIA's nvbandwidth reports both for copy engines.

Deadlines: a watchdog thread of the native core (csrc/copy_engine/watchdog.h) aborts a stream's wait for a peer after
`FUSED_TP_TIMEOUT`, or soon after the peer's process has exited. The results of an aborted call become NaN (0xFF bytes)
on every rank, and the group is unusable.

CUDA graphs: the memory must exist and be large enough before the capture (see `symmetric_memory.group_kernels`). Within
a capture, and between replays and other calls, the caller must order the calls: one op of a group at a time, in the
same order on all ranks.

Tests replace the CUDA driver by a test double that moves host memory (`DRIVER_LIBRARIES`). CPU tensors then run through
this code unchanged. An operation that would wait in a stream blocks the host instead, and raises errors immediately.
"""

from __future__ import annotations

import atexit
import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from fused_tp.backends.symmetric_memory.group_kernels import GroupKernels, round_up_bytes
from fused_tp.backends.symmetric_memory.symm_mem import KernelMemory, check_not_capturing, is_capturing
from fused_tp.core import settings
from fused_tp.core.availability import AVAILABLE, Availability, unavailable
from fused_tp.core.errors import CollectiveTimeoutError, FusedTPError, PeerLostError
from fused_tp.core.failure import GroupCalls
from fused_tp.core.pending import current_stream

# Ops in the order of csrc/copy_engine/watchdog.h, which identifies them by index.
ENGINE_OPS = ("all_gather", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "reduce_scatter")

# Memory sizes are rounded up: to a power of two below _ROUNDING_BYTES, and to a multiple of _ROUNDING_BYTES above it.
_MIN_WORKSPACE_BYTES = 1 << 16
_ROUNDING_BYTES = 16 << 20

# Largest number of streams that fetch shards. More are not faster, because a GPU has few copy engines, which share its
# links. Ranks that share a GPU use fewer streams: the GPU's hardware queues must suffice for all streams of four ranks
# with all kinds of workspaces, because in a shared queue a waiting stream would block the stream that it waits for.
_MAX_FETCH_STREAMS, _MAX_FETCH_STREAMS_ON_SHARED_GPU = 4, 2

# Values of the enum `Failure` in csrc/copy_engine/watchdog.h.
_NO_FAILURE, _TIMEOUT, _PEER_LOST, _ABORTED = range(4)

# File name of the driver's library, by device type; tests add a test double for "cpu".
DRIVER_LIBRARIES = {"cuda": "libcuda.so.1"}


def copy_engine_available(device: torch.device) -> Availability:
    """Return whether copy engines can be used for tensors on `device`, regardless of the group."""
    if find_spec("fused_tp._core") is None:
        return unavailable("this installation has no native core")
    if device.type not in DRIVER_LIBRARIES:
        return unavailable(f"copy engines are supported on NVIDIA GPUs only, not on {device.type}")
    try:
        driver = import_module("fused_tp._core").Driver(DRIVER_LIBRARIES[device.type])
        if not driver.has_stream_memory_ops(device.index or 0):
            return unavailable("this device does not support stream memory operations (waiting for a memory word)")
    except RuntimeError as error:
        return unavailable(str(error).splitlines()[0].rstrip("."))
    return AVAILABLE


@dataclass
class _NativeSlot:
    """A workspace of the native core and its memory."""

    core: Any
    buffer: Tensor
    gather_bytes: int
    scatter_bytes: int
    streams: _WorkspaceStreams | None  # None: the core has created its own streams
    expired_flag: Tensor  # int64 [1] in the core's pinned memory
    is_captured: bool = False  # True: a CUDA graph contains a call on this workspace
    num_unfinished_calls: int = 0  # calls that have begun and are not finished


@dataclass(frozen=True)
class OfferedShards:
    """Memory words by which the engine notifies a kernel of arrived shards; see `triton_kernels/comm/arrivals.py`.

    Attributes:
        arrival_flags: int64 [W]: 1 once the shard of that rank has arrived.
        order_scratch: int64 [W]: scratch memory of the kernel, 0 at its start.
        expired_flag: int64 [1] in pinned host memory, which the kernel sets if its wait times out.
    """

    arrival_flags: Tensor
    order_scratch: Tensor
    expired_flag: Tensor


class CopyCall:
    """Context manager of one call of an op, from its first message to `finish`. An exception inside aborts the group.

    Until `finish`, the caller must not access or free the memory that it has passed to a method. All ranks must call
    the same methods in the same order.
    """

    def __init__(self, engine: CopyEngine, slot: _NativeSlot, op: str) -> None:
        self.op = op
        self._engine = engine
        self._slot = slot
        self._core = slot.core
        self._destinations: list[Tensor] = []  # destinations that the engine's streams may write until `finish`
        self._call = slot.core.begin(ENGINE_OPS.index(op), engine.stream(), settings.timeout_seconds())
        slot.num_unfinished_calls += 1

    def __enter__(self) -> CopyCall:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:  # peers wait for data that will not arrive
            self._engine.abort(f"{self.op} failed on rank {self._engine.rank} ({type(error).__name__}: {error}).")

    def __del__(self) -> None:
        # The call was not finished. The engine's streams may still write to these tensors, also after an abort.
        if self._destinations:
            self._engine.abandoned_tensors += self._destinations

    def gather(self, shard: Tensor, destinations: Sequence[Tensor]) -> None:
        """Start gathering the ranks' `shard` into `destinations`, one tensor per rank. This rank's entry is not used.

        All tensors are contiguous, and each entry of `destinations` has as many bytes as the shard of its rank.
        """
        self._destinations += destinations
        self._core.gather(
            self._call,
            self._engine.stream(),
            _address_and_bytes(shard),
            [_address_and_bytes(destination) for destination in destinations],
        )

    def offer(self, shard: Tensor, destinations: Sequence[Tensor]) -> OfferedShards:
        """Start a gather. The next kernel of the current stream waits for the shards itself, by polling the result.

        Not supported during CUDA graph capture. `destinations` also has an entry for this rank; if that entry is an
        empty tensor, this rank's shard is not copied.
        """
        self._destinations += destinations
        op, destination_ranges = (
            ENGINE_OPS.index(self.op),
            [_address_and_bytes(destination) for destination in destinations],
        )
        channel = self._core.offer(self._call, self._engine.stream(), op, _address_and_bytes(shard), destination_ranges)
        first_word_indices, words = (
            (self._core.arrived(channel), self._core.order(channel)),
            self._slot.buffer.view(torch.int64),
        )
        arrival_flags, order_scratch = (words[word : word + self._engine.world_size] for word in first_word_indices)
        return OfferedShards(arrival_flags, order_scratch, self._slot.expired_flag)

    def wait_for(self, peer: int) -> None:
        """Make the current stream wait until the shard of rank `peer` has arrived, in the last `gather`."""
        self._core.wait_for(self._call, self._engine.stream(), peer)

    def scatter(self) -> BlockScatter:
        """Start sending blocks to the ranks that sum them.

        Raises:
            RuntimeError: two earlier scatters, of this call or of a call that encloses it, have not been received yet.
        """
        return BlockScatter(self, self._slot)

    def finish(self, *results: Tensor) -> None:
        """Finish the call. If the call fails, its contiguous `results` become NaN.

        For CPU tensors (tests) this raises the errors of `GroupKernels.raise_if_call_failed`.
        """
        self._slot.num_unfinished_calls -= 1
        self._slot.is_captured |= is_capturing(self._engine.device)
        self._core.finish(self._call, self._engine.stream(), [_address_and_bytes(result) for result in results])
        self._destinations.clear()  # not reached if the native call raised, because the engine may then still write
        if self._engine.device.type == "cpu":
            self._engine.raise_if_call_failed()


class BlockScatter:
    """Exchange of one block between every pair of ranks: `push` to each peer, `receive`, read `terms`, `release`."""

    def __init__(self, call: CopyCall, slot: _NativeSlot) -> None:
        self._call = call
        self._engine = call._engine
        self._core = slot.core
        self._buffer = slot.buffer
        self.scatter_id: int = slot.core.scatter()

    def terms(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the blocks [W, *shape] by source rank. The caller writes its own; `receive` waits for the others."""
        world_size = self._engine.world_size
        start, slot_elements = (
            self._core.slot(self.scatter_id, 0) // dtype.itemsize,
            self._core.slot_bytes // dtype.itemsize,
        )
        slot_rows = self._buffer.view(dtype)[start : start + world_size * slot_elements].view(world_size, slot_elements)
        return slot_rows[:, : torch.Size(shape).numel()].unflatten(1, tuple(shape))

    def push(self, peer: int, block: Tensor) -> None:
        """Send the contiguous `block` to rank `peer`, after the work enqueued on the current stream so far."""
        self._core.push(self._call._call, self._engine.stream(), self.scatter_id, peer, _address_and_bytes(block))

    def receive(self) -> None:
        """Make the current stream wait until all blocks for this rank have arrived."""
        self._core.receive(self._call._call, self._engine.stream(), self.scatter_id)

    def release(self) -> None:
        """Allow the next scatter to overwrite `terms`, after the work enqueued on the current stream so far."""
        self._core.release(self._engine.stream(), self.scatter_id)


class _WorkspaceStreams:
    """Streams of one workspace of the native core, which keeps this object alive; freeing it frees the streams."""

    def __init__(self, memory: KernelMemory) -> None:
        self._memory = memory  # keeps its `rescue_stream` alive
        max_streams = _MAX_FETCH_STREAMS_ON_SHARED_GPU if memory.shares_gpu else _MAX_FETCH_STREAMS
        copy_streams = memory.own_streams(self, 1 + min(memory.world_size - 1, max_streams))
        assert memory.rescue_stream is not None
        self.handles = [memory.rescue_stream.cuda_stream, *(stream.cuda_stream for stream in copy_streams)]


class CopyEngine(GroupKernels[_NativeSlot]):
    """Gathers and scatters of one group on one device.

    Example:
        with engine.begin_call("all_gather", gather_bytes=shard.nbytes) as call:
            call.gather(shard, list(gathered))
            gathered[engine.rank].copy_(shard)
            call.finish(gathered)
    """

    def __init__(self, memory: KernelMemory, messages: GroupCalls | None = None) -> None:
        super().__init__(memory, "copy engines", messages)
        self.abandoned_tensors: list[Tensor] = []  # destinations of unfinished calls, kept alive forever
        self.watch()
        _live_engines.add(self)

    def stream(self) -> int:
        """Return the handle of the current stream."""
        return current_stream(self.device)

    def begin_call(self, op: str, *, gather_bytes: int = 0, scatter_bytes: int = 0) -> CopyCall:
        """Begin a call of `op`, one of ENGINE_OPS.

        Args:
            gather_bytes: size of the longest shard that any rank passes to `CopyCall.gather`.
            scatter_bytes: size of the longest block that any rank passes to `BlockScatter.push`.

        Raises:
            RuntimeError: the workspace would have to grow during CUDA graph capture.
            FusedTPError: the group has failed (see `raise_if_failed`).
        """
        self.raise_if_failed()
        slot = self._slots.get("")
        if slot is None or slot.gather_bytes < gather_bytes or slot.scatter_bytes < scatter_bytes:
            slot = self._grow_workspace(op, gather_bytes, scatter_bytes)
        self.calls += 1
        return CopyCall(self, slot, op)

    def stop(self) -> None:
        """Stop the native threads; called when the process exits."""
        for slot in self._all_slots():
            slot.core.stop()

    def _failure(self) -> FusedTPError | None:
        failed_core = next((slot.core for slot in self._all_slots() if slot.core.failure != _NO_FAILURE), None)
        if failed_core is None:
            return None
        error_class = {_TIMEOUT: CollectiveTimeoutError, _PEER_LOST: PeerLostError}.get(
            failed_core.failure, FusedTPError
        )
        timeout_text = ""
        if failed_core.failure == _TIMEOUT and not self._lost_ranks:
            timeout_text = f" FUSED_TP_TIMEOUT is {settings.timeout_seconds():g} s."
        return self._error(error_class, f"{{reason}}{timeout_text}", reason=failed_core.message)

    def _leave(self, slot: _NativeSlot, reason: str) -> None:
        slot.core.abort(reason)

    def _abort_waits_for(self, slot: _NativeSlot, rank: int) -> None:
        slot.core.lose(rank)

    def _grow_workspace(self, op: str, gather_bytes: int, scatter_bytes: int) -> _NativeSlot:
        old_slot = self._slots.get("")
        check_not_capturing(
            self.device,
            f"{op} needs memory for shards of {gather_bytes} and blocks of {scatter_bytes} bytes, and the group has "
            f"{'none yet' if old_slot is None else 'less'}",
        )
        if old_slot is not None:
            gather_bytes, scatter_bytes = (
                max(gather_bytes, old_slot.gather_bytes),
                max(scatter_bytes, old_slot.scatter_bytes),
            )
        gather_bytes, scatter_bytes = (
            round_up_bytes(nbytes, _MIN_WORKSPACE_BYTES, _ROUNDING_BYTES) for nbytes in (gather_bytes, scatter_bytes)
        )
        workspace_class = import_module("fused_tp._core").CopyEngineWorkspace
        nbytes = workspace_class.bytes(self.world_size, gather_bytes, scatter_bytes)
        with self._creation_scope(nbytes, op):
            # A rank must not free memory to which a peer may still write. So each rank waits for its own streams, and
            # then allocates the new memory, which waits for all ranks. Twice the timeout suffices, because the
            # watchdog aborts every wait of a stream after the timeout.
            if old_slot is not None and not old_slot.core.wait_idle(2 * settings.timeout_seconds()):
                raise CollectiveTimeoutError("Earlier calls did not finish within twice FUSED_TP_TIMEOUT.")
            buffer, handle = self._memory.allocate(nbytes)
            if buffer.is_cuda:
                # The default stream zeroes the buffer, and the engine's streams do not wait for the default stream.
                torch.cuda.default_stream(self.device).synchronize()
            offset = buffer.data_ptr() - handle.buffer_ptrs[self.rank]
            addresses = [address + offset for address in handle.buffer_ptrs]
            device_index = self.device.index or 0
            library = DRIVER_LIBRARIES[self.device.type]
            outgrown_slot = (
                old_slot if old_slot is not None and (old_slot.is_captured or old_slot.num_unfinished_calls) else None
            )
            streams = None
            if old_slot is not None and outgrown_slot is None:
                streams = old_slot.streams
            elif self._memory.rescue_stream is not None:
                streams = _WorkspaceStreams(self._memory)
            handles = [] if streams is None else streams.handles
            workspace = workspace_class(
                library, device_index, self.rank, addresses, gather_bytes, scatter_bytes, handles, streams
            )
            handle.barrier(0, int(settings.timeout_seconds() * 1000))
        if old_slot is not None and outgrown_slot is None:
            # The new workspace reuses the streams, and the old watchdog would mistake the work in them for its own.
            old_slot.core.stop()
        return self._replace_slot(
            "",
            _NativeSlot(workspace, buffer, gather_bytes, scatter_bytes, streams, _int64_at(workspace.expired)),
            outgrown_slot,
        )


_live_engines: weakref.WeakSet[CopyEngine] = weakref.WeakSet()


@atexit.register
def _stop_engines() -> None:
    for engine in list(_live_engines):
        engine.stop()


def _address_and_bytes(t: Tensor) -> tuple[int, int]:
    assert t.is_contiguous()
    return t.data_ptr(), t.nbytes


def _int64_at(address: int) -> Tensor:
    """Return a tensor [1] of the int64 at `address`, so that kernels take a pointer whatever the address is.

    Triton passes small integers, and some builds of Python have small heap addresses, with 32 bits.
    """
    return torch.frombuffer((ctypes.c_int64 * 1).from_address(address), dtype=torch.int64)
