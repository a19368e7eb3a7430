"""All-to-all between sharding by sequence and sharding by heads, for Ulysses attention.

Each rank starts with some tokens of all heads, [B, S_r, H, D], and receives all tokens of some heads, [B, S, H_r, D],
in the order of the sequence. The reverse direction restores the token shards. If there are fewer key heads than ranks,
a key head is sent to several ranks; the reverse direction then sums these copies in fp32, in the order of the ranks.
(Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509.)
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from fused_tp.attention.layout import TokenRanges
from fused_tp.backends.cuda.device_schedule import DeviceSchedule
from fused_tp.backends.messages.torch_dist import TorchDist
from fused_tp.backends.schedule import Schedule
from fused_tp.backends.shared_memory.shared_memory import SharedMemorySchedule
from fused_tp.backends.shared_memory.shm import ShmTransport
from fused_tp.core.pending import accumulate_dtype

Ranges = tuple[range, ...]
Shape = tuple[int, ...]

# Rows in more ranges than this are copied by one indexed copy: on a GPU every slice copy is a kernel launch.
_MAX_RANGES = 16
_MESSAGE_ALIGNMENT_BYTES = 16  # alignment of each tensor in a message, in bytes
_MEMORY_ALIGNMENT_BYTES = 64  # alignment of each tensor in shared memory, in bytes: a cache line
_INPUTS_READABLE_STAGE = 1  # stage that a rank signals once its input tensors are in shared memory


@dataclass(frozen=True)
class TensorShare:
    """Distribution of one tensor: the rows and the heads of each rank.

    Attributes:
        row_ranges: for each rank, the ranges of global positions of its rows, ascending.
        heads: for each rank, the heads that it receives.
        num_heads: total number of heads.
    """

    row_ranges: tuple[Ranges, ...]
    heads: tuple[range, ...]
    num_heads: int

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Number of rows that each rank holds."""
        return tuple(sum(map(len, row_ranges)) for row_ranges in self.row_ranges)

    @cached_property
    def length(self) -> int:
        return sum(self.rows)

    def sequence_shard_size(self, rank: int) -> tuple[int, int]:
        """Return (rows, heads) of `rank` if the tensor is sharded along the sequence."""
        return self.rows[rank], self.num_heads

    def head_shard_size(self, rank: int) -> tuple[int, int]:
        return self.length, len(self.heads[rank])

    def block_size(self, holder: int, reader: int) -> tuple[int, int]:
        """Return (rows, heads) of the block with the rows of rank `holder` and the heads of rank `reader`."""
        return self.rows[holder], len(self.heads[reader])

    @cached_property
    def has_repeated_heads(self) -> bool:
        """True if several ranks receive the same head."""
        return sum(map(len, self.heads)) > self.num_heads

    @cached_property
    def is_even(self) -> bool:
        """True if all ranks hold equally many rows and no two ranks receive the same head."""
        return len(set(self.rows)) == 1 and not self.has_repeated_heads

    def exclusive_heads(self, rank: int) -> range:
        """Return the heads that only `rank` receives. They are contiguous, because each rank's heads are a range."""
        other_heads = {head for other_rank, heads in enumerate(self.heads) if other_rank != rank for head in heads}
        unshared_heads = [head for head in self.heads[rank] if head not in other_heads]
        return range(unshared_heads[0], unshared_heads[-1] + 1) if unshared_heads else range(0)


@lru_cache(maxsize=64)
def row_ranges_in_sequence(tokens: tuple[TokenRanges, ...]) -> tuple[Ranges, ...]:
    """Return `TensorShare.row_ranges` for `tokens`, the global tokens of each rank."""
    ranges_in_order = sorted(
        (r.start, rank, len(r)) for rank, rank_tokens in enumerate(tokens) for r in rank_tokens.ranges
    )
    row_ranges: list[list[range]] = [[] for _ in tokens]
    next_row = 0
    for _, rank, length in ranges_in_order:
        rank_ranges = row_ranges[rank]
        start = rank_ranges.pop().start if rank_ranges and rank_ranges[-1].stop == next_row else next_row
        rank_ranges.append(range(start, next_row + length))
        next_row += length
    return tuple(map(tuple, row_ranges))


@dataclass(frozen=True)
class Swap:
    """Description of one all-to-all of several tensors, on this rank.

    Attributes:
        op: name of the enclosing op, for error messages.
        dims: numbers that must be equal on all ranks.
        dtypes: dtypes of the results.
    """

    op: str
    dims: tuple[int, ...]
    rank: int
    shares: tuple[TensorShare, ...]
    dtypes: tuple[torch.dtype, ...]

    @property
    def world_size(self) -> int:
        return len(self.shares[0].row_ranges)

    @property
    def peers(self) -> list[int]:
        """All other ranks, starting with rank + 1: no two ranks read the same memory at the same time."""
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    def subset(self, indices: Sequence[int]) -> Swap:
        """Return the description of an all-to-all of only the tensors with these indices."""
        shares, dtypes = tuple(self.shares[i] for i in indices), tuple(self.dtypes[i] for i in indices)
        return replace(self, shares=shares, dtypes=dtypes)


Allocator = Callable[[Sequence[int], torch.dtype], Tensor]


class SwapDirection:
    """One direction of a swap: the input tensors of this rank, and the results, filled block by block.

    Args:
        is_to_heads: True: x [B, rows of this rank, all heads, D] -> [B, all rows, heads of this rank, D]. False: the
            reverse direction, which sums the copies of a head that several ranks hold.
        allocate: allocates the results. None: allocate them on the devices of `inputs`.
    """

    def __init__(
        self, is_to_heads: bool, swap: Swap, inputs: Sequence[Tensor], allocate: Allocator | None = None
    ) -> None:
        self.is_to_heads, self.swap, self.inputs, self.shares = is_to_heads, swap, inputs, swap.shares
        self.op = f"{swap.op} to {'heads' if is_to_heads else 'sequence'}"
        self._is_summed = [share.has_repeated_heads and not is_to_heads for share in swap.shares]
        self._results = [self._allocate_result(index, allocate) for index in range(len(inputs))]

    def _allocate_result(self, index: int, allocate: Allocator | None) -> Tensor:
        x, share, rank = self.inputs[index], self.shares[index], self.swap.rank
        shape = self._tensor_shape(
            index, share.head_shard_size(rank) if self.is_to_heads else share.sequence_shard_size(rank)
        )
        if self._is_summed[index]:
            return x.new_zeros(shape, dtype=accumulate_dtype(x.dtype))
        dtype = self.swap.dtypes[index]
        return x.new_empty(shape, dtype=dtype) if allocate is None else allocate(shape, dtype)

    def _tensor_shape(self, index: int, rows_and_heads: tuple[int, int]) -> Shape:
        x = self.inputs[index]
        return x.shape[0], *rows_and_heads, x.shape[3]

    @property
    def read_order(self) -> list[int]:
        """The order in which the ranks' blocks are read: this rank first, unless a sum must be in rank order."""
        swap = self.swap
        return list(range(swap.world_size)) if any(self._is_summed) else [swap.rank, *swap.peers]

    def input_shape(self, index: int, rank: int) -> Shape:
        """Return the shape of input tensor `index` on `rank`."""
        share = self.shares[index]
        return self._tensor_shape(
            index, share.sequence_shard_size(rank) if self.is_to_heads else share.head_shard_size(rank)
        )

    def block_shape(self, index: int, source: int, target: int) -> Shape:
        """Return the shape of the block of tensor `index` that rank `source` sends to rank `target`."""
        share = self.shares[index]
        return self._tensor_shape(
            index, share.block_size(source, target) if self.is_to_heads else share.block_size(target, source)
        )

    def pack_block(self, index: int, target: int, out: Tensor) -> None:
        """Copy the block of tensor `index` that rank `target` receives to `out`."""
        x, share = self.inputs[index], self.shares[index]
        if self.is_to_heads:
            out.copy_(_select_heads(x, share.heads[target]))
        else:
            _copy_rows(x, share.row_ranges[target], out)

    def write_inputs(self, index: int, out: Tensor) -> None:
        """Copy the blocks that other ranks read to `out`, which has the shape of the input, at the same positions."""
        x, share, swap = self.inputs[index], self.shares[index], self.swap
        if self.is_to_heads:
            own_heads = share.exclusive_heads(swap.rank)
            out[:, :, : own_heads.start].copy_(x[:, :, : own_heads.start])
            out[:, :, own_heads.stop :].copy_(x[:, :, own_heads.stop :])
            return
        # No peer reads this rank's own rows, but copying them too is faster than many small copies around them.
        peer_rows = [rows for peer in swap.peers for _, rows in _local_and_global_rows(share.row_ranges[peer])]
        for rows in [slice(None)] if len(peer_rows) > _MAX_RANGES else peer_rows:
            out[:, rows].copy_(x[:, rows])

    def put_block(self, index: int, source: int, block: Tensor) -> None:
        """Write `block`, which rank `source` sends to this rank, into the result, or add it to a sum."""
        out, share = self._results[index], self.shares[index]
        if not self.is_to_heads:
            out = _select_heads(out, share.heads[source])
            out.add_(block) if self._is_summed[index] else out.copy_(block)
            return
        row_ranges = share.row_ranges[source]
        if len(row_ranges) > _MAX_RANGES:
            out.index_copy_(1, _range_indices(row_ranges, out.device), block.to(out.dtype))
            return
        for local_rows, global_rows in _local_and_global_rows(row_ranges):
            out[:, global_rows].copy_(block[:, local_rows])

    def put_block_from_input(self, index: int, source: int, source_input: Tensor) -> None:
        """Write this rank's block of `source_input`, the input of rank `source`, into the result, or add it."""
        share, rank = self.shares[index], self.swap.rank
        if self.is_to_heads:
            self.put_block(index, source, _select_heads(source_input, share.heads[rank]))
        else:
            out = _select_heads(self._results[index], share.heads[source])
            _copy_rows(source_input, share.row_ranges[rank], out, accumulates=self._is_summed[index])

    def results(self) -> list[Tensor]:
        return [out.to(dtype) for out, dtype in zip(self._results, self.swap.dtypes, strict=True)]


def _copy_rows(source: Tensor, ranges: Ranges, out: Tensor, *, accumulates: bool = False) -> None:
    """Copy the rows of `source` at positions `ranges` to `out`; with `accumulates`, add them to `out`."""
    if len(ranges) > _MAX_RANGES:
        rows = source.index_select(1, _range_indices(ranges, source.device))
        out.add_(rows) if accumulates else out.copy_(rows)
        return
    for local_rows, global_rows in _local_and_global_rows(ranges):
        part = out[:, local_rows]
        part.add_(source[:, global_rows]) if accumulates else part.copy_(source[:, global_rows])


def _local_and_global_rows(ranges: Ranges) -> Iterator[tuple[slice, slice]]:
    """Yield (local rows, global positions) of each range; `ranges` are the global positions of one rank's rows."""
    next_row = 0
    for row_range in ranges:
        yield slice(next_row, next_row + len(row_range)), slice(row_range.start, row_range.stop)
        next_row += len(row_range)


def _range_indices(ranges: Ranges, device: torch.device) -> Tensor:
    return torch.cat([torch.arange(r.start, r.stop, device="cpu") for r in ranges]).to(device)


def _select_heads(x: Tensor, heads: range) -> Tensor:
    return x[:, :, heads.start : heads.stop]


class AllToAll(ABC):
    """Transport of a swap: transfers each rank's blocks. Results do not share memory with the inputs."""

    name: str

    @abstractmethod
    def run(self, is_to_heads: bool, swap: Swap, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Swap `inputs` in the direction given by `is_to_heads`, and return the results."""


def all_to_all_for(schedule: Schedule) -> AllToAll:
    """Return the all-to-all that uses the transport of `schedule`."""
    if isinstance(schedule, SharedMemorySchedule):
        return SharedMemoryAllToAll(schedule.transport)
    messages = MessageAllToAll(schedule.name, schedule.messages)
    return DeviceAllToAll(schedule, messages) if isinstance(schedule, DeviceSchedule) else messages


class MessageAllToAll(AllToAll):
    """All-to-all by messages, on any torch.distributed group. One message holds a rank's blocks of all tensors."""

    def __init__(self, name: str, transport: TorchDist) -> None:
        self.name = name
        self._transport = transport

    def run(self, is_to_heads: bool, swap: Swap, inputs: Sequence[Tensor]) -> list[Tensor]:
        direction, rank = SwapDirection(is_to_heads, swap, inputs), swap.rank
        self.check(direction.op, swap, inputs)
        with self._transport.abort_scope(direction.op):
            send_layout = _PacketLayout(direction, lambda index, peer: direction.block_shape(index, rank, peer))
            recv_layout = _PacketLayout(direction, lambda index, peer: direction.block_shape(index, peer, rank))
            send_buffer = torch.empty(sum(send_layout.sizes), dtype=torch.uint8, device=inputs[0].device)
            for peer in swap.peers:
                for index, block in enumerate(send_layout.blocks(send_buffer, peer)):
                    direction.pack_block(index, peer, block)
            pending = self._transport.all_to_all(direction.op, send_buffer, send_layout.sizes, recv_layout.sizes)
            received_buffer: Tensor | None = None
            for source in direction.read_order:
                if source == rank:
                    for index, x in enumerate(inputs):
                        direction.put_block_from_input(index, rank, x)
                    continue
                if received_buffer is None:
                    received_buffer = pending.wait()
                for index, block in enumerate(recv_layout.blocks(received_buffer, source)):
                    direction.put_block(index, source, block)
        return direction.results()

    def check(self, op: str, swap: Swap, inputs: Sequence[Tensor]) -> None:
        self._transport.check(op, swap.dims, inputs[0].dtype, inputs[0].device)


class _PacketLayout:
    """Byte layout of one packet per peer, which holds a block of every tensor.

    Args:
        block_shape: maps (index, peer) to the shape of tensor `index` in the packet of rank `peer`.

    Attributes:
        sizes: bytes of each rank's packet; 0 for this rank.
    """

    def __init__(self, direction: SwapDirection, block_shape: Callable[[int, int], Shape]) -> None:
        self._dtypes = [x.dtype for x in direction.inputs]
        self._shapes = [
            [block_shape(index, peer) for index in range(len(direction.inputs))]
            for peer in range(direction.swap.world_size)
        ]
        self.sizes = [
            0 if peer == direction.swap.rank else sum(map(_packed_bytes, shapes, self._dtypes))
            for peer, shapes in enumerate(self._shapes)
        ]
        self._starts = [0, *itertools.accumulate(self.sizes)]

    def blocks(self, packets: Tensor, peer: int) -> Iterator[Tensor]:
        """Yield views of the tensors in the packet of `peer`; `packets` holds the packets of all ranks."""
        offset = self._starts[peer]
        for shape, dtype in zip(self._shapes[peer], self._dtypes, strict=True):
            yield packets[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            offset += _packed_bytes(shape, dtype)


def _packed_bytes(shape: Shape, dtype: torch.dtype) -> int:
    return _aligned_bytes(shape, dtype, _MESSAGE_ALIGNMENT_BYTES)


def _aligned_bytes(shape: Shape, dtype: torch.dtype, alignment: int) -> int:
    return -(-math.prod(shape) * dtype.itemsize // alignment) * alignment


class SharedMemoryAllToAll(AllToAll):
    """All-to-all of CPU tensors between ranks on one host.

    Each rank writes the blocks that its peers read to shared memory once. The peers copy them from there into their
    results, which are allocated from the transport's pool: its pages are already mapped.
    """

    name = "one_sided"

    def __init__(self, transport: ShmTransport) -> None:
        self._transport = transport

    def run(self, is_to_heads: bool, swap: Swap, inputs: Sequence[Tensor]) -> list[Tensor]:
        direction, rank = SwapDirection(is_to_heads, swap, inputs, self._transport.empty), swap.rank

        def regions(owner: int) -> Iterator[tuple[Shape, torch.dtype, int]]:
            """Yield (shape, dtype, offset) of each tensor in the shared memory of rank `owner`."""
            offset = 0
            for index, x in enumerate(inputs):
                shape = direction.input_shape(index, owner)
                yield shape, x.dtype, offset
                offset += _aligned_bytes(shape, x.dtype, _MEMORY_ALIGNMENT_BYTES)

        nbytes = sum(_aligned_bytes(shape, dtype, _MEMORY_ALIGNMENT_BYTES) for shape, dtype, _ in regions(rank))
        with self._transport.begin(direction.op, swap.dims, inputs[0].dtype, nbytes) as workspace:
            for index, region in enumerate(regions(rank)):
                direction.write_inputs(index, workspace.buffer(rank, *region))
            workspace.signal(_INPUTS_READABLE_STAGE)
            for source in direction.read_order:
                if source != rank:
                    workspace.wait(source, _INPUTS_READABLE_STAGE)
                for index, (x, region) in enumerate(zip(inputs, regions(source), strict=True)):
                    direction.put_block_from_input(
                        index, source, x if source == rank else workspace.buffer(source, *region)
                    )
        return direction.results()


class DeviceAllToAll(AllToAll):
    """All-to-all of GPUs that can access each other's memory: one device kernel reads the blocks from the peers.

    The kernel supports only blocks of equal size, and concatenates the ranks' rows. If the layout is not in rank order,
    one more pass reorders the rows. Tensors with blocks of unequal sizes are sent by messages.
    """

    def __init__(self, schedule: DeviceSchedule, messages: MessageAllToAll) -> None:
        self.name = schedule.name
        self._abort_scope = schedule.abort_scope
        self._device = schedule.collectives
        self._messages = messages

    def run(self, is_to_heads: bool, swap: Swap, inputs: Sequence[Tensor]) -> list[Tensor]:
        uneven_indices = [i for i, share in enumerate(swap.shares) if not share.is_even]
        results: dict[int, Tensor] = {}
        with self._abort_scope(swap.op):
            if uneven_indices:
                uneven_results = self._messages.run(
                    is_to_heads, swap.subset(uneven_indices), [inputs[i] for i in uneven_indices]
                )
                results.update(zip(uneven_indices, uneven_results, strict=True))
            else:
                direction_name = "heads" if is_to_heads else "sequence"
                self._messages.check(f"{swap.op} to {direction_name}", swap, inputs)
            for i, x in enumerate(inputs):
                if i not in results:
                    results[i] = self._run_kernel(is_to_heads, swap.subset([i]), x)
        return [results[i] for i in range(len(inputs))]

    def _run_kernel(self, is_to_heads: bool, swap: Swap, x: Tensor) -> Tensor:
        (share,), (dtype,) = swap.shares, swap.dtypes
        rank_ranges = [row_ranges[0] for row_ranges in share.row_ranges if len(row_ranges) == 1]
        is_in_rank_order = len(rank_ranges) == swap.world_size and all(
            a.stop == b.start for a, b in itertools.pairwise(rank_ranges)
        )
        if not is_to_heads:
            if not is_in_rank_order:
                x_in_sequence_order, x = x, x.new_empty(x.shape)
                for row_ranges, part in zip(share.row_ranges, x.split(list(share.rows), 1), strict=True):
                    _copy_rows(x_in_sequence_order, row_ranges, part)
            return self._device.heads_to_sequence(x).to(dtype)
        gathered_x = self._device.sequence_to_heads(x)
        if is_in_rank_order:
            return gathered_x
        direction = SwapDirection(True, swap, [x])
        for source, part in enumerate(gathered_x.split(list(share.rows), 1)):
            direction.put_block(0, source, part)
        return direction.results()[0]
