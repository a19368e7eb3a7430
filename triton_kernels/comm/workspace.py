"""Host side of `signals`: the memory of a workspace, the bytes that a launch needs, and reports of expired waits."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from . import protocol
from .protocol import BUFFER_ALIGNMENT, DATA_ALIGNMENT, FLAG_SHARE, OPS
from .streams import own_streams

# Default limit on the rows of tiles that a launch may count.
COUNTERS = 4096


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of DATA_ALIGNMENT."""
    return -(-nbytes // DATA_ALIGNMENT) * DATA_ALIGNMENT


def flag_bytes(half_bytes: int) -> int:
    """Bytes at the front of a half that hold only begun words and flags, in every launch.

    If a launch with fewer flags stored data there, its bytes would look like set flags to a later launch with more
    flags: about half of all numbers are >= any epoch.
    """
    return half_bytes // (FLAG_SHARE * DATA_ALIGNMENT) * DATA_ALIGNMENT


def needed_bytes(world_size: int, slot_bytes: Sequence[tuple[int, int]]) -> int:
    """Bytes of the smallest workspace (both halves) in which `layout(slot_bytes)` fits."""
    flags = aligned(8 * (world_size + sum(count for count, _ in slot_bytes)))
    data = sum(aligned(count * nbytes) for count, nbytes in slot_bytes)
    return 2 * max(FLAG_SHARE * flags, aligned(-(-data * FLAG_SHARE // (FLAG_SHARE - 1))))


class WorkspaceArguments(NamedTuple):
    """The argument `ws` of kernels, which describes a workspace."""

    workspaces: Any  # int64 [W]: addresses of the ranks' workspaces
    state: Any  # int64, words of `protocol`
    error: Any  # int64, the error record
    half_bytes: Any
    timeout_ns: Any


class Handle(Protocol):
    """The interface of a symmetric memory handle, ours or torch's, that a workspace uses."""

    rank: int
    world_size: int
    buffer_ptrs: list[int]

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None: ...

    def get_buffer(
        self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int | None = 0
    ) -> Tensor: ...


@dataclass(frozen=True)
class Expired:
    """A wait that lasted longer than the deadline."""

    op: str
    call: int
    rank: int  # the rank that waited
    tile: int | None  # None: it waited for the call to begin
    source: int  # the rank that it waited for
    absent: tuple[int, ...]  # ranks that had not begun the call
    gave_up: bool  # `source` gave up, because it waited for another rank in vain or raised an error

    def __str__(self) -> str:
        what = "its beginning" if self.tile is None else f"tile {self.tile}"
        if self.gave_up:
            why = f"rank {self.source} gave up, since it raised an error or waited for a rank that did not come in time"
        elif not self.absent:
            why = f"rank {self.source} began the call but did not deliver in time"
        else:
            why = ""
        if self.absent:
            ranks = f"rank{'s' * (len(self.absent) > 1)} {', '.join(str(rank) for rank in self.absent)}"
            why += f"{' and ' * bool(why)}{ranks} had not begun the call"
        return f"{self.op}, call {self.call}: rank {self.rank} waited for {what} of rank {self.source}; {why}"


class Workspace:
    """Memory for one rank's calls on one stream: two halves of `buffer`, private state, and an error record.

    Args:
        buffer: this rank's symmetric memory, any dtype, the same size on all ranks; it is zeroed here, on the current
            stream, and all launches must be ordered after that.
        handle: maps the peers' buffers. All ranks create their workspaces at the same time (there is a barrier).
        timeout_seconds: longest wait for a peer.
        counters: limit on the rows of tiles that a launch may count.
        rescue: a GPU stream in which no work waits, which workspaces may share; None: a stream of its own.

    Attributes:
        halves: number of halves of the buffer, used by alternate calls; 1: all calls use the same memory.
        multicast_address: address at which one store writes `buffer` of all ranks; 0 without NVLink SHARP.

    CUDA graphs may use it: create it before the capture, with room for the largest call (`needed_bytes`); `signals`
    lists the other conditions. Per call, the host allocates nothing, copies nothing and waits for nothing.

    Raises:
        ValueError: `buffer` is not the memory of `handle`, or not at a multiple of 64 bytes on every rank.
    """

    halves = 2

    def __init__(
        self,
        buffer: Tensor,
        handle: Handle,
        *,
        timeout_seconds: float,
        counters: int = COUNTERS,
        rescue: torch.cuda.Stream | None = None,
    ) -> None:
        self.rank = handle.rank
        self.world_size = handle.world_size
        offset = _checked_offset(buffer, handle)
        addresses = [address + offset for address in handle.buffer_ptrs]
        multicast = getattr(handle, "multicast_ptr", 0) or 0
        self.multicast_address: int = multicast and multicast + offset
        self.timeout_ns = int(timeout_seconds * 1e9)
        self.half_bytes = buffer.nbytes // 2 // DATA_ALIGNMENT * DATA_ALIGNMENT if self.halves == 2 else 0
        self.counters = counters
        device = buffer.device
        self.buffer, self._handle = buffer, handle  # keeps the memory alive, the peers' too where ranks are threads
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.state = torch.zeros(protocol.COUNTERS + counters, dtype=torch.int64, device=device)
        # Host memory that the GPU maps, so that reading it waits for no kernel.
        self.error = torch.zeros(protocol.ERROR_WORDS, dtype=torch.int64, device="cpu", pin_memory=buffer.is_cuda)
        self._error_set = ctypes.c_int64.from_address(self.error.data_ptr() + 8 * protocol.ERROR_SET)
        self._stopped = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=buffer.is_cuda)
        if rescue is None and buffer.is_cuda:
            rescue = own_streams(self, device, 1, urgent=True)[0]
        self._rescue = rescue
        self._expire(0)  # loads a kernel that `leave` needs: loaded there, it might wait for a kernel that waits itself
        if buffer.is_cuda:
            self._load_begin()
        buffer.zero_()
        handle.barrier(0, int(timeout_seconds * 1000))

    def arguments(self, timeout_ns: int | None = None) -> dict[str, Any]:
        """The arguments `ws` and `rank` of a kernel; `timeout_ns` overrides the workspace's deadline."""
        timeout_ns = self.timeout_ns if timeout_ns is None else timeout_ns
        ws = WorkspaceArguments(self.addresses, self.state, self.error, self.half_bytes, timeout_ns)
        return {"ws": ws, "rank": self.rank}

    def layout(self, slot_bytes: Sequence[tuple[int, int]], counters: int = 0) -> list[int]:
        """Byte offsets in a half of runs of slots, given as (number, bytes of each), after all flags.

        Raises:
            ValueError: the workspace is too small; the message states the bytes that the launch needs.
        """
        needed = needed_bytes(self.world_size, slot_bytes)
        if needed > 2 * self.half_bytes:
            raise ValueError(
                f"The workspace has {2 * self.half_bytes} bytes; this call needs {needed}. Make it larger."
            )
        if counters > self.counters:
            raise ValueError(
                f"The workspace counts {self.counters} rows of tiles; this call has {counters}. Make it with more."
            )
        offsets = []
        offset = flag_bytes(self.half_bytes)
        for count, nbytes in slot_bytes:
            offsets.append(offset)
            offset += aligned(count * nbytes)
        return offsets

    def leave(self, ended: Sequence[int] = ()) -> None:
        """End all waits of peers for this rank, now and later, for a host that will launch nothing more.

        This is one more call, queued behind those already launched, in which this rank gives up at once. It does not
        touch the memory of ranks that have `ended`, which may be gone.
        """
        self._expire(protocol.LEFT)
        for rank in ended:  # in place, after all calls: native kernels and graphs hold the address of the table
            self.addresses[rank : rank + 1].copy_(self.addresses[self.rank : self.rank + 1])
        self._begin()

    def _expire(self, value: int) -> None:
        self.state[protocol.EXPIRED : protocol.EXPIRED + 1].fill_(value)

    def _begin(self) -> None:
        from .signals import begin_kernel

        begin_kernel[(1,)](**self._begin_arguments())

    def _load_begin(self) -> None:
        from .signals import begin_kernel

        with torch.cuda.device(self.buffer.device):
            begin_kernel.warmup(**self._begin_arguments(), grid=(1,))[1, 1, 1]

    def _begin_arguments(self) -> dict[str, Any]:
        # The kernel waits for nothing. A fixed deadline keeps its variant: Triton compiles one per kind of deadline.
        return self.arguments(timeout_ns=0) | {"WORLD": self.world_size}

    def stop_waiting(self, rank: int | None = None) -> None:
        """End every wait of this rank's kernels for `rank` (None: all), now and later, as if its deadline had passed.

        For a host that knows that a peer has ended. Any thread may call it, not only the one that launches.
        """
        self._stopped |= -1 if rank is None else 1 << rank
        word = self.state[protocol.STOP : protocol.STOP + 1]
        if self._rescue is None:
            word.copy_(self._stopped)
        else:
            # A copy from host memory, not a kernel: waiting kernels may leave no SM free.
            with torch.cuda.stream(self._rescue):
                word.copy_(self._stopped, non_blocking=True)

    def expired(self) -> Expired | None:
        """The first wait to expire, or None. Never blocks, even while kernels run.

        Once a wait has expired, calls of this workspace return wrong results on some ranks: do not use it again.
        """
        if not self._error_set.value:  # checked in every call, and reading a tensor's element takes microseconds
            return None
        words = [int(word) for word in self.error.tolist()]  # complete: the word above was written last
        tile = words[protocol.ERROR_TILE]
        absent = words[protocol.ERROR_ABSENT]
        return Expired(
            op=OPS[words[protocol.ERROR_OP]],
            call=words[protocol.ERROR_CALL],
            rank=words[protocol.ERROR_RANK],
            tile=None if tile < 0 else tile,
            source=words[protocol.ERROR_SOURCE],
            absent=tuple(rank for rank in range(self.world_size) if absent >> rank & 1),
            gave_up=bool(words[protocol.ERROR_GAVE_UP]),
        )


def _checked_offset(buffer: Tensor, handle: Handle) -> int:
    """Byte offset of `buffer` in `handle`'s memory, the same on all ranks, checked as `Workspace` requires."""
    # torch's handle holds the address of an allocation; tensors of a memory pool begin at an offset in it.
    offset = buffer.data_ptr() - handle.buffer_ptrs[handle.rank]
    if offset not in (0, getattr(handle, "offset", 0)):
        raise ValueError(
            f"buffer must be the memory that handle reaches, at {handle.buffer_ptrs[handle.rank]:#x} on this rank; "
            f"it is at {buffer.data_ptr():#x}."
        )
    for rank, address in enumerate(handle.buffer_ptrs):
        if (address + offset) % BUFFER_ALIGNMENT:
            raise ValueError(
                f"buffer must begin at a multiple of {BUFFER_ALIGNMENT} bytes on every rank; on rank {rank} it is at "
                f"{address + offset:#x}."
            )
    return offset
