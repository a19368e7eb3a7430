"""Memory that every rank of a group maps, with signals between pairs of ranks: one interface for CPU and CUDA.

The interface is that of torch's own handle (`torch.distributed._symmetric_memory`), so a schedule or a Triton kernel
that is written against it runs on both: on CUDA `rendezvous` gives torch's handle itself, on CPU ours, over csrc/shm.
Signals differ in one respect that no caller of put/wait pairs can see: ours count up for ever, torch's flip between 0
and 1. A kernel that uses a signal pad directly must therefore use channels of its own.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fused_tp.runtime.group import GroupLike, resolve_group
from fused_tp.transport.shm import ShmTransport, shm_transport, shm_unavailable_reason

# Words of 32 bits, as many as torch's default pad has for groups of up to 64 ranks.
CHANNELS = 32


class SymmetricMemory(Protocol):
    """What schedules may use of a handle. Ranks are those of the group; sizes in elements, `storage_offset` too."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def buffer_ptrs(self) -> list[int]: ...

    @property
    def buffer_ptrs_dev(self) -> int: ...

    @property
    def signal_pad_ptrs_dev(self) -> int: ...

    def get_buffer(
        self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int | None = 0
    ) -> Tensor: ...

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None: ...

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None: ...

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None: ...


class CpuSymmetricMemory:
    """A tensor of equal size on every rank of one host, and a signal pad beside it."""

    def __init__(self, transport: ShmTransport, nbytes: int) -> None:
        self._transport = transport
        self._nbytes = nbytes
        self.rank = transport.rank
        self.world_size = transport.world_size
        pad_bytes = CHANNELS * self.world_size * 4
        self._pad_begin = -(-nbytes // 64) * 64
        with transport.begin("symmetric_memory", (nbytes,), torch.uint8, 8) as workspace:
            # Inside of the call: where one rank's pool is full, the others are told.
            own = transport.core_group.allocate(self._pad_begin + pad_bytes)
            torch.frombuffer(own, dtype=torch.uint8)[self._pad_begin :].zero_()
            workspace.buffer(self.rank, (8,), torch.uint8).copy_(_as_bytes(own.offset))
            workspace.signal(1)
            workspace.wait_all(1)
            offsets = [_as_int(workspace.buffer(r, (8,), torch.uint8)) for r in range(self.world_size)]
        total = self._pad_begin + pad_bytes
        # `own` is what keeps the range from being handed out again; views of peers do not.
        self._memories = [
            own if r == self.rank else transport.core_group.at(r, offset, total) for r, offset in enumerate(offsets)
        ]
        self.buffer_ptrs = [memory.address for memory in self._memories]
        self.signal_pad_ptrs = [address + self._pad_begin for address in self.buffer_ptrs]
        self._buffer_table = torch.tensor(self.buffer_ptrs, dtype=torch.int64)
        self._pad_table = torch.tensor(self.signal_pad_ptrs, dtype=torch.int64)
        self._waited = [[0] * self.world_size for _ in range(CHANNELS)]

    @property
    def buffer_ptrs_dev(self) -> int:
        """Address of an array of the ranks' buffer addresses."""
        return self._buffer_table.data_ptr()

    @property
    def signal_pad_ptrs_dev(self) -> int:
        """Address of an array of the ranks' signal pad addresses; a pad is uint32[CHANNELS, world_size]."""
        return self._pad_table.data_ptr()

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int | None = 0) -> Tensor:
        """A view of `rank`'s buffer, `storage_offset` elements in."""
        begin = (storage_offset or 0) * dtype.itemsize
        end = begin + math.prod(sizes) * dtype.itemsize
        if not 0 <= begin <= end <= self._nbytes:
            raise ValueError(
                f"sizes {tuple(sizes)} of {dtype} at element {storage_offset} end at byte {end}; "
                f"the buffer has {self._nbytes} bytes."
            )
        return _view(self._memories[self._checked(rank)], sizes, dtype, begin)

    def get_signal_pad(
        self,
        rank: int,
        sizes: Sequence[int] = (),
        dtype: torch.dtype = torch.uint32,
        storage_offset: int = 0,
    ) -> Tensor:
        """A view of `rank`'s signal pad; without sizes all of it, [CHANNELS, world_size]."""
        sizes = sizes or (CHANNELS, self.world_size)
        return _view(
            self._memories[self._checked(rank)], sizes, dtype, self._pad_begin + storage_offset * dtype.itemsize
        )

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Release: what this rank has written becomes visible to `dst_rank` once its wait_signal returns.

        Never blocks (signals count), so `timeout_ms` has nothing to bound.
        """
        self._transport.core_group.put_signal(self._word(self._checked(dst_rank), channel, self.rank))

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Acquire: return once `src_rank` has put one signal more than this rank has waited for.

        `timeout_ms` 0 means `FUSED_TP_TIMEOUT`.
        """
        word = self._word(self.rank, channel, self._checked(src_rank))
        target = (self._waited[channel][src_rank] + 1) & 0xFFFFFFFF
        self._transport.core_group.wait_signal(word, target, src_rank, timeout_ms / 1000)
        self._waited[channel][src_rank] = target

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Return once every rank has called it on this channel."""
        peers = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        for peer in peers:
            self.put_signal(peer, channel)
        for peer in peers:
            self.wait_signal(peer, channel, timeout_ms)

    def _word(self, owner: int, channel: int, source: int) -> int:
        if not 0 <= channel < CHANNELS:
            raise ValueError(f"channel is {channel}; there are {CHANNELS}, numbered from 0.")
        address: int = self.signal_pad_ptrs[owner] + 4 * (channel * self.world_size + source)
        return address

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank is {rank}; the group has ranks 0 to {self.world_size - 1}.")
        return rank


def symmetric_empty(
    sizes: Sequence[int], dtype: torch.dtype, *, group: GroupLike = None, device: torch.device | str = "cpu"
) -> tuple[Tensor, SymmetricMemory]:
    """A tensor that every rank of `group` maps, and the handle to reach the others'. All ranks call it alike.

    Args:
        sizes: shape, the same on all ranks.
        device: "cpu" (ranks of one host) or a CUDA device (ranks with peer access).

    Raises:
        ValueError: the ranks cannot share memory; says why.

    Example:
        mine, memory = symmetric_empty((4096,), torch.float32, group=group)
        mine.fill_(memory.rank)
        memory.barrier()
        theirs = memory.get_buffer((memory.rank + 1) % memory.world_size, (4096,), torch.float32)
    """
    device = torch.device(device)
    described = resolve_group(group)
    if device.type == "cuda":
        if described.process_group is None:
            raise ValueError("Symmetric memory on CUDA needs torch.distributed to be initialised.")
        from torch.distributed import _symmetric_memory as torch_symmetric_memory

        tensor = torch_symmetric_memory.empty(*sizes, dtype=dtype, device=device)
        handle: Any = torch_symmetric_memory.rendezvous(tensor, described.process_group)
        return tensor, handle
    if device.type != "cpu":
        raise ValueError(f"device is {device}; symmetric memory is there for cpu and cuda.")
    transport = shm_transport(described)
    if transport is None:
        raise ValueError(f"The ranks cannot share memory: {shm_unavailable_reason(described)}.")
    memory = CpuSymmetricMemory(transport, math.prod(sizes) * dtype.itemsize)
    return memory.get_buffer(memory.rank, sizes, dtype), memory


def _view(memory: Any, sizes: Sequence[int], dtype: torch.dtype, begin: int) -> Tensor:
    count = math.prod(sizes)
    if count == 0:
        return torch.empty(tuple(sizes), dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=begin).view(tuple(sizes))


def _as_bytes(value: int) -> Tensor:
    return torch.frombuffer(bytearray(struct.pack("<Q", value)), dtype=torch.uint8)


def _as_int(words: Tensor) -> int:
    value: int = struct.unpack("<Q", bytes(words.tolist()))[0]
    return value
