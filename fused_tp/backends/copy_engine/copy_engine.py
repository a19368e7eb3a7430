"""Gathers and scatters by the GPU's copy engines over symmetric memory: no multiprocessor is spent on moving bytes.

All work is enqueued on the engine's own streams, and nothing waits on the host. Flags are words of memory that streams
write and wait for; csrc/copy_engine/steps.h has the protocol. Only constants are written, so calls can be captured.

Gathers pull and scatters push, so that each moves its bytes once (csrc/copy_engine/workspace.h). The direction that a
link prefers was not measured; NVIDIA's nvbandwidth reports it, as device to device read and write by copy engine.

Deadlines: a watchdog thread of the native core (csrc/copy_engine/watchdog.h) ends waits of streams for a peer after
`FUSED_TP_TIMEOUT`, or soon after the peer's death. The results of a call that did not end become NaN (0xFF bytes) on
every rank, and the group is unusable.

CUDA graphs: as in `symmetric_memory.workspace`, the memory must exist and be large enough before the capture. Within a
capture, and between replays and other calls, the caller must order the calls: one op of a group at a time, in the same
order on all ranks.

A test double of the CUDA driver may move host memory (`LIBRARIES`). Then CPU tensors run through this code unchanged;
an operation that waits in a stream blocks instead, and raises at once.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from fused_tp.backends.symmetric_memory.symm_mem import KernelMemory, check_not_capturing, is_capturing
from fused_tp.backends.symmetric_memory.workspace import GroupKernels, rounded
from fused_tp.core import settings
from fused_tp.core.availability import AVAILABLE, Availability, unavailable
from fused_tp.core.errors import CollectiveTimeoutError, FusedTPError, PeerLostError
from fused_tp.core.failure import GroupCalls
from fused_tp.core.pending import current_stream

# As in csrc/copy_engine/watchdog.h.
OPS = ("all_gather", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "reduce_scatter")

# Rounding of the size of a message's memory: up to _ROUNDED_TO a power of two, above it a multiple of it.
_LEAST_BYTES = 1 << 16
_ROUNDED_TO = 16 << 20

# Streams that fetch shards. More bring no gain: a GPU has a few copy engines, which share its links.
# Four ranks of one GPU, with all kinds of workspaces, must leave a queue of the GPU to each of their streams.
_MOST_FETCHES, _MOST_FETCHES_OF_ONE_GPU = 4, 2

# `Failure` in csrc/copy_engine/watchdog.h.
_NONE, _TIMEOUT, _LOST, _ABORTED = range(4)

# The driver's library, by device type.
LIBRARIES = {"cuda": "libcuda.so.1"}


def copy_engine_available(device: torch.device) -> Availability:
    """Availability of copies by copy engines to tensors on `device`, for any group."""
    if find_spec("fused_tp._core") is None:
        return unavailable("this installation has no native core")
    if device.type not in LIBRARIES:
        return unavailable(f"copy engines are those of NVIDIA GPUs; this is {device.type}")
    try:
        driver = import_module("fused_tp._core").Driver(LIBRARIES[device.type])
        if not driver.has_stream_memory_ops(device.index or 0):
            return unavailable("streams of this device cannot wait for a word of memory")
    except RuntimeError as error:
        return unavailable(str(error).splitlines()[0].rstrip("."))
    return AVAILABLE


@dataclass
class _NativeSlot:
    """A workspace of the native core, and its memory."""

    core: Any
    buffer: Tensor
    gather_bytes: int
    scatter_bytes: int
    streams: _Streams | None  # None: the core made its own
    captured: bool = False
    pending: int = 0  # calls that have begun and not ended


@dataclass(frozen=True)
class Offered:
    """Words of this rank's memory that notify a kernel of arrived shards; `comm.arrivals` of the kernels explains them.

    Attributes:
        arrived: int64 [W]: 1 once the shard of that rank has arrived.
        order: int64 [W]: for the kernel's own use, 0 at its start.
        expired: address of an int64 of the host, which the kernel sets when its wait expires.
    """

    arrived: Tensor
    order: Tensor
    expired: int


class CopyCall:
    """One call of an op, from its first message to `finish`. An exception inside aborts the group.

    The caller must not touch memory passed to it until `finish`. Ranks call the same methods in the same order.
    """

    def __init__(self, engine: CopyEngine, slot: _NativeSlot, op: str) -> None:
        self.op = op
        self._engine = engine
        self._slot = slot
        self._core = slot.core
        self._written: list[Tensor] = []  # destinations of the engine's streams, until `finish`
        self._call = slot.core.begin(OPS.index(op), engine.stream(), settings.timeout_seconds())
        slot.pending += 1

    def __enter__(self) -> CopyCall:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:  # peers wait for data that will not arrive
            self._engine.abort(f"{self.op} failed on rank {self._engine.rank} ({type(error).__name__}: {error}).")

    def __del__(self) -> None:
        # For a call without `finish`: the engine's streams, which run on after an abort too, may still write to these.
        if self._written:
            self._engine.abandoned += self._written

    def gather(self, shard: Tensor, places: Sequence[Tensor]) -> None:
        """Start gathering every rank's `shard` into `places`, one per rank; this rank's own place is not written.

        All are contiguous, and each place has as many bytes as its rank's shard.
        """
        self._written += places
        self._core.gather(self._call, self._engine.stream(), _range(shard), [_range(place) for place in places])

    def offer(self, shard: Tensor, places: Sequence[Tensor]) -> Offered:
        """Start a `gather` for a kernel that itself waits for shards, the next in the current stream. Not in captures.

        `places` has an entry for this rank too, or an empty tensor if its shard is not wanted there.
        """
        self._written += places
        op, places_at = OPS.index(self.op), [_range(place) for place in places]
        channel = self._core.offer(self._call, self._engine.stream(), op, _range(shard), places_at)
        first, words = (self._core.arrived(channel), self._core.order(channel)), self._slot.buffer.view(torch.int64)
        arrived, order = (words[word : word + self._engine.world_size] for word in first)
        return Offered(arrived, order, self._core.expired)

    def wait_for(self, peer: int) -> None:
        """Make the current stream wait until the shard of `peer` of the last `gather` has arrived."""
        self._core.wait_for(self._call, self._engine.stream(), peer)

    def scatter(self) -> Scatter:
        """Start sending blocks to the ranks that sum them.

        Raises:
            RuntimeError: two earlier scatters have not been received yet, in this call or one around it.
        """
        return Scatter(self, self._slot)

    def finish(self, *results: Tensor) -> None:
        """End the call. `results`, contiguous, become NaN on ranks where the call fails.

        On a CPU it raises the errors of `GroupKernels.raise_failure`.
        """
        self._slot.pending -= 1
        self._slot.captured |= is_capturing(self._engine.device)
        self._core.finish(self._call, self._engine.stream(), [_range(result) for result in results])
        self._written.clear()  # not reached if that raised: the engines may still write
        if self._engine.device.type == "cpu":
            self._engine.raise_failure()


class Scatter:
    """Blocks from every rank to every other: `push` for each peer, then `receive`, use of `terms`, `release`."""

    def __init__(self, call: CopyCall, slot: _NativeSlot) -> None:
        self._call = call
        self._engine = call._engine
        self._core = slot.core
        self._buffer = slot.buffer
        self.number: int = slot.core.scatter()

    def terms(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Blocks [W, *shape] by rank. The caller fills this rank's; the others are valid once received."""
        world = self._engine.world_size
        first, per_rank = self._core.slot(self.number, 0) // dtype.itemsize, self._core.slot_bytes // dtype.itemsize
        slots = self._buffer.view(dtype)[first : first + world * per_rank].view(world, per_rank)
        return slots[:, : torch.Size(shape).numel()].unflatten(1, tuple(shape))

    def push(self, peer: int, block: Tensor) -> None:
        """Send `block`, contiguous, once the current stream has computed it."""
        self._core.push(self._call._call, self._engine.stream(), self.number, peer, _range(block))

    def receive(self) -> None:
        """Make the current stream wait until all blocks for this rank have arrived."""
        self._core.receive(self._call._call, self._engine.stream(), self.number)

    def release(self) -> None:
        """Mark the last use of `terms` in the current stream."""
        self._core.release(self._engine.stream(), self.number)


class _Streams:
    """Streams of one workspace of the native core. The workspace keeps this object, and its end frees the streams."""

    def __init__(self, memory: KernelMemory) -> None:
        self._memory = memory  # keeps its `rescue` stream alive
        most = _MOST_FETCHES_OF_ONE_GPU if memory.shares_gpu else _MOST_FETCHES
        own = memory.own_streams(self, 1 + min(memory.world_size - 1, most))
        assert memory.rescue is not None
        self.handles = [memory.rescue.cuda_stream, *(stream.cuda_stream for stream in own)]


class CopyEngine(GroupKernels[_NativeSlot]):
    """The copy engines of one group on one device.

    Example:
        with engine.call("all_gather", gather_bytes=shard.nbytes) as call:
            call.gather(shard, list(gathered))
            gathered[engine.rank].copy_(shard)
            call.finish(gathered)
    """

    def __init__(self, memory: KernelMemory, messages: GroupCalls | None = None) -> None:
        super().__init__(memory, "copy engines", messages)
        self.abandoned: list[Tensor] = []  # memory of calls without `finish`, never freed
        self.watch()
        _engines.add(self)

    def stream(self) -> int:
        """Handle of the caller's stream."""
        return current_stream(self.device)

    def call(self, op: str, *, gather_bytes: int = 0, scatter_bytes: int = 0) -> CopyCall:
        """Begin a call of `op`, one of OPS.

        Args:
            gather_bytes: size of the longest shard that any rank passes to `CopyCall.gather`.
            scatter_bytes: size of the longest block that any rank passes to `Scatter.push`.

        Raises:
            RuntimeError: the workspace would have to grow while a CUDA graph is being captured.
            Also the errors of `raise_if_failed`.
        """
        self.raise_if_failed()
        slot = self._slots.get("")
        if slot is None or slot.gather_bytes < gather_bytes or slot.scatter_bytes < scatter_bytes:
            slot = self._grow(op, gather_bytes, scatter_bytes)
        self.calls += 1
        return CopyCall(self, slot, op)

    def stop(self) -> None:
        """End the native threads, when the program exits."""
        for slot in self._all():
            slot.core.stop()

    def _failure(self) -> FusedTPError | None:
        failed = next((slot.core for slot in self._all() if slot.core.failure != _NONE), None)
        if failed is None:
            return None
        kind = {_TIMEOUT: CollectiveTimeoutError, _LOST: PeerLostError}.get(failed.failure, FusedTPError)
        late = ""
        if failed.failure == _TIMEOUT and not self._lost:
            late = f" FUSED_TP_TIMEOUT is {settings.timeout_seconds():g} s."
        return self._error(kind, f"{{reason}}{late}", reason=failed.sentence)

    def _leave(self, slot: _NativeSlot, why: str) -> None:
        slot.core.abort(why)

    def _lose(self, slot: _NativeSlot, rank: int) -> None:
        slot.core.lose(rank)

    def _grow(self, op: str, gather_bytes: int, scatter_bytes: int) -> _NativeSlot:
        old = self._slots.get("")
        check_not_capturing(
            self.device,
            f"{op} needs room for shards of {gather_bytes} and blocks of {scatter_bytes} bytes, and the group has "
            f"{'none yet' if old is None else 'less'}",
        )
        if old is not None:
            gather_bytes, scatter_bytes = max(gather_bytes, old.gather_bytes), max(scatter_bytes, old.scatter_bytes)
        gather_bytes, scatter_bytes = (
            rounded(nbytes, _LEAST_BYTES, _ROUNDED_TO) for nbytes in (gather_bytes, scatter_bytes)
        )
        core = import_module("fused_tp._core").CopyEngineWorkspace
        nbytes = core.bytes(self.world_size, gather_bytes, scatter_bytes)
        with self._making(nbytes, op):
            # No rank may free memory that another may still write to: each waits for its own streams, and making the
            # new memory waits for all ranks. Every stream's wait ends within the deadline.
            if old is not None and not old.core.quiet(2 * settings.timeout_seconds()):
                raise CollectiveTimeoutError("earlier calls did not end")
            buffer, handle = self._memory.allocate(nbytes)
            if buffer.is_cuda:  # this stream may still be zeroing it, and the engine's streams do not wait for this one
                torch.cuda.default_stream(self.device).synchronize()
            offset = buffer.data_ptr() - handle.buffer_ptrs[self.rank]
            addresses = [address + offset for address in handle.buffer_ptrs]
            index = self.device.index or 0
            library = LIBRARIES[self.device.type]
            outgrown = old if old is not None and (old.captured or old.pending) else None
            streams = None
            if old is not None and outgrown is None:
                streams = old.streams
            elif self._memory.rescue is not None:
                streams = _Streams(self._memory)
            handles = [] if streams is None else streams.handles
            made = core(library, index, self.rank, addresses, gather_bytes, scatter_bytes, handles, streams)
            handle.barrier(0, int(settings.timeout_seconds() * 1000))
        if old is not None and outgrown is None:
            old.core.stop()  # its streams now run other work, which its watchdog would take for its own
        return self._keep("", _NativeSlot(made, buffer, gather_bytes, scatter_bytes, streams), outgrown)


_engines: weakref.WeakSet[CopyEngine] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for engine in list(_engines):
        engine.stop()


def _range(t: Tensor) -> tuple[int, int]:
    assert t.is_contiguous()
    return t.data_ptr(), t.nbytes
