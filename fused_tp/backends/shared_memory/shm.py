"""CPU shared memory: ranks of one host read and write each other's workspaces in place.

`shm_transport(group)` creates the transport of a group at the first call, by a rendezvous over the group's store, and
caches it. A call of an op is a `ShmCall`: every rank begins it with its own amount of memory, signals the stages of its
work, waits for stages of its peers, reads their memory, and ends the call. Up to 16 calls of a group may be in flight.
Memory of a call is reused once every rank has ended the call.

If the ranks cannot share memory (different hosts, containers or users, or no native core), `shm_transport` returns None
on every rank, and the ops use plain collectives. `shm_availability` returns the reason.
"""

from __future__ import annotations

import atexit
import math
import weakref
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from fused_tp.core import settings, tracing
from fused_tp.core.availability import AVAILABLE, Availability, unavailable
from fused_tp.core.errors import FusedTPError, describe_midway_error
from fused_tp.core.group import Group, GroupSlot, on_destroy
from fused_tp.core.native import DTYPE_NUMBERS
from fused_tp.core.native import core as _core
from fused_tp.core.native import missing_reason as _core_missing_reason
from fused_tp.core.store import create_together, exchange, first_unavailability

MAX_RANKS: int = getattr(_core, "MAX_RANKS", 64)  # kMaxRanks in csrc/shm/control.h
_RENDEZVOUS_NAME = "the shared-memory rendezvous"

_MAX_CACHED_SIGNATURES = 1024


@cache
def dtype_number(dtype: torch.dtype) -> int:
    """Return the native core's number of `dtype`. Raises TypeError if the core does not support it."""
    try:
        return DTYPE_NUMBERS[dtype]
    except KeyError:
        names = ", ".join(str(dtype_name).removeprefix("torch.") for dtype_name in DTYPE_NUMBERS)
        raise TypeError(f"Shared-memory collectives support {names}, got {dtype}.") from None


class ShmCall:
    """Context manager of one call of an op on this rank; ends the call on exit.

    Views from `buffer` must not outlive the call, because its memory is reused once every rank has ended it.

    An exception inside abandons the call: peers that wait in it raise, and the group stays usable. But if peers may
    have completed the call, they would mistake a retry for their next call. Then the group is aborted, unless the
    exception is an error between ranks.

    Attributes:
        peers_may_end: True if peers can complete the call without more from this rank. `signal` sets it; an op in which
            peers need nothing from this rank sets it earlier.
    """

    __slots__ = ("__weakref__", "_call", "_core_group", "_memories", "peers_may_end")

    def __init__(self, call: Any, core_group: Any, calls_before_op: int | None = None) -> None:
        self._call = call
        self._core_group = core_group
        self._memories: dict[int, Any] = {}
        # In the second or a later call of an op, an exception must abort the group before it abandons the call.
        self.peers_may_end = calls_before_op is not None and call.number - 1 > calls_before_op

    def buffer(self, rank: int, shape: Sequence[int], dtype: torch.dtype, offset: int = 0) -> Tensor:
        """Return a view of `rank`'s memory of this call, at byte `offset`. Waits until that rank has begun the call."""
        num_elements = math.prod(shape)
        if num_elements == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        memory = self._memories.get(rank)
        if memory is None:
            memory = self._memories[rank] = self._call.workspace(rank, self._core_group)
        return torch.frombuffer(memory, dtype=dtype, count=num_elements, offset=offset).view(shape)

    def addresses(self, world_size: int, offset: int = 0) -> list[int]:
        """Return the addresses, in this process, of all ranks' memory of this call, plus `offset` bytes."""
        return [self._call.workspace_address(rank) + offset for rank in range(world_size)]

    def signal(self, stage: int) -> None:
        """Publish this rank's writes so far as stage `stage` of this call; stages start at 1 and increase."""
        self.peers_may_end = True
        self._call.signal(stage)

    def wait(self, rank: int, stage: int) -> None:
        """Wait until `rank` has signalled `stage` or a later one; raises errors between ranks (core.errors)."""
        self._call.wait(rank, stage)

    def wait_all(self, stage: int) -> None:
        """Wait until every other rank has signalled `stage` or a later one."""
        self._call.wait_all(stage)

    def abandon(self) -> None:
        """Leave the call before its end; peers that wait for this rank in the call raise."""
        self._call.abandon()

    def __enter__(self) -> ShmCall:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if error_class is None:
            self._call.end()
        else:
            if self.peers_may_end and error is not None and not isinstance(error, FusedTPError):
                self._core_group.give_up(f"call {self._call.number} {describe_midway_error(error)}")
            self.abandon()


@lru_cache(maxsize=1024)
def fold_dims(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Fold `shape` to at most six dims, because a call's signature has room for eight numbers."""
    return (math.prod(shape[:-5]), *shape[-5:]) if len(shape) > 6 else tuple(shape)


def _check_summable(dtype: torch.dtype) -> None:
    if dtype == torch.bool:
        raise TypeError("Sums of torch.bool are not supported; convert the tensor to an integer dtype first.")


class ShmTransport:
    """Shared memory of the ranks of one group, with the blocking collectives of csrc/shm.

    Sums over ranks accumulate in fp32 (fp64 for fp64, integers in their own type) in rank order. Tensors are
    contiguous, on the CPU, and their dtypes and sizes have been checked by the ops.
    """

    def __init__(self, core_group: Any) -> None:
        self.core_group = core_group
        self.rank: int = core_group.rank
        self.world_size: int = core_group.size
        # (number, memory) of calls that this rank has left by an exception.
        self._retained_memory: list[tuple[int, Any]] = []
        self._max_pooled_bytes = settings.shared_memory_reserve() // 2
        self._signatures: dict[Any, tuple[int, Any]] = {}
        self.calls_before_op: int | None = None  # within an op of several calls, the number of calls before it

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor from this rank's pool, whose pages are mapped already.

        If the pool is full, torch's allocator provides the tensor. The pool can fill up, because callers may keep
        outputs for any time.
        """
        memory = self._allocate_pooled(math.prod(shape) * dtype.itemsize)
        if memory is None:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    def _allocate_pooled(self, nbytes: int) -> Any:
        """Return pool memory for a result; None if `nbytes` is 0 or results would fill more than half of the pool.

        The other half is reserved for workspaces, without which no op could run.
        """
        if nbytes == 0 or self.core_group.bytes_in_use + nbytes > self._max_pooled_bytes:
            return None
        try:
            return self.core_group.allocate(nbytes)
        except FusedTPError:  # the free memory is fragmented
            return None

    def begin(
        self, op: str, dims: Sequence[int], dtype: torch.dtype, nbytes: int, *, may_reuse: bool = False
    ) -> ShmCall:
        """Begin the group's next call. `op`, `dims`, `dtype` must agree on all ranks; `nbytes` may differ.

        Args:
            may_reuse: first wait for peers that are still in calls that this rank has ended, and reuse the memory of
                these calls. For large calls, whose memory use would otherwise grow if one rank is ahead of the others.
        """
        call = self.core_group.begin(op, dtype_number(dtype), dims, nbytes, may_reuse)
        return ShmCall(call, self.core_group, self.calls_before_op)

    @property
    def is_settled(self) -> bool:
        """True if `begin` with `may_reuse` would not wait."""
        is_settled: bool = self.core_group.is_settled()
        return is_settled

    def write_and_all_reduce(
        self,
        op: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        write: Callable[[Tensor], object],
        overlapped_work: Callable[[], None] | None = None,
    ) -> Tensor:
        """Return the sum over ranks of each rank's term, a non-empty tensor of `shape` that `write(term)` fills.

        The term and the result share pool memory, which peers read in place. If the pool is full, the result is a
        copy.

        Args:
            op: name of the op; must agree on all ranks, as must `shape` and `dtype`.
            overlapped_work: called once the term is written, while peers may still compute their terms.

        Example:
            y = transport.write_and_all_reduce(
                "matmul_all_reduce", (m, n), x.dtype, lambda term: torch.mm(x, w.t(), out=term)
            )
        """
        num_elements = math.prod(shape)
        memory = self._allocate_pooled(num_elements * dtype.itemsize)
        dtype_index, dims = dtype_number(dtype), fold_dims(tuple(shape))
        if memory is not None:
            call = self.core_group.begin_in(op, dtype_index, dims, memory)
        else:
            call = self.core_group.begin(op, dtype_index, dims, num_elements * dtype.itemsize)
        if self._retained_memory:  # peers read no memory of calls further back than MAX_CALLS_IN_FLIGHT
            self._retained_memory = [
                retained for retained in self._retained_memory if retained[0] + _core.MAX_CALLS_IN_FLIGHT > call.number
            ]
        try:
            with ShmCall(call, self.core_group, self.calls_before_op) as workspace:
                term = (
                    workspace.buffer(self.rank, shape, dtype)
                    if memory is None
                    else torch.frombuffer(memory, dtype=dtype).view(shape)
                )
                write(term)
                if overlapped_work is not None:
                    workspace.signal(1)
                    overlapped_work()
                workspace.peers_may_end = True  # before the sum, which signals the peers even if it then fails here
                _core.sum_workspaces(self.core_group, call, num_elements, dtype_index)
                return term.clone() if memory is None else term
        except BaseException:  # including Ctrl-C: keep the memory, because peers may still read it
            self._retained_memory.append((call.number, memory))
            raise

    def all_reduce(self, tensor: Tensor, out: Tensor | None = None, op_name: str = "all_reduce") -> Tensor:
        """Return the sum of `tensor` over the ranks, in `out` (default: a new tensor; may be `tensor` itself).

        Args:
            op_name: name of the op that this call is part of; it and the shape must be equal on all ranks.
        """
        signature = self.call_signature(op_name, tensor.dtype, tensor.shape)
        out = torch.empty_like(tensor) if out is None else out
        _core.all_reduce(self.core_group, tensor.data_ptr(), out.data_ptr(), *signature)
        return out

    def call_signature(self, op_name: str, dtype: torch.dtype, shape: torch.Size) -> tuple[int, Any]:
        """Return (number of elements, signature): the arguments of the native all-reduce except addresses."""
        key = (op_name, dtype, shape)
        cached_signature = self._signatures.get(key)
        if cached_signature is None:
            _check_summable(dtype)
            signature = _core.Signature(op_name, dtype_number(dtype), fold_dims(shape))
            if len(self._signatures) >= _MAX_CACHED_SIGNATURES:  # reached if sequence lengths keep changing
                self._signatures.clear()
            cached_signature = self._signatures[key] = (math.prod(shape), signature)
        return cached_signature

    def reduce_scatter(self, tensor: Tensor, sizes: Sequence[int], op_dims: Sequence[int] | None = None) -> Tensor:
        """Return this rank's rows of the sum of `tensor` over ranks; `sizes[r]` rows of dim 0 belong to rank r.

        `op_dims` (default: the shape of `tensor`): dims of the op's call; they must agree on all ranks.
        """
        _check_summable(tensor.dtype)
        row_elements = math.prod(tensor.shape[1:])
        out = tensor.new_empty((sizes[self.rank], *tensor.shape[1:]))
        dims = fold_dims(tensor.shape if op_dims is None else tuple(op_dims))
        _core.reduce_scatter(
            self.core_group,
            tensor.data_ptr(),
            out.data_ptr(),
            [size * row_elements for size in sizes],
            _core.Signature("reduce_scatter", dtype_number(tensor.dtype), dims),
        )
        return out

    def all_to_all(self, tensor: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> Tensor:
        """Send `send_sizes[r]` rows of dim 0 to each rank r, and return `receive_sizes[r]` rows from each."""
        row_elements = math.prod(tensor.shape[1:])
        out = tensor.new_empty((sum(receive_sizes), *tensor.shape[1:]))
        _core.all_to_all(
            self.core_group,
            tensor.data_ptr(),
            out.data_ptr(),
            [size * row_elements for size in send_sizes],
            [size * row_elements for size in receive_sizes],
            dtype_number(tensor.dtype),
        )
        return out

    def gather(self, tensor: Tensor, root: int, dim: int) -> Tensor | None:
        """Return the equally shaped tensors of all ranks, concatenated along `dim`, on rank `root`; None elsewhere.

        Raises ValueError if there is no such rank or dim.
        """
        if not (0 <= root < self.world_size and -tensor.dim() <= dim < tensor.dim()):
            raise ValueError(
                f"gather: root {root} and dim {dim} must be a rank of the {self.world_size} and a dim of the tensor, "
                f"whose shape is {list(tensor.shape)}."
            )
        dim %= tensor.dim()
        nbytes = 0 if self.rank == root else tensor.nbytes
        dims = (*fold_dims(tuple(tensor.shape)), dim, root)
        with self.begin("gather", dims, tensor.dtype, nbytes) as call:
            if self.rank != root:
                call.buffer(self.rank, tensor.shape, tensor.dtype).copy_(tensor)
                call.signal(1)
                return None
            call.peers_may_end = True
            length = tensor.shape[dim]
            out = tensor.new_empty((*tensor.shape[:dim], length * self.world_size, *tensor.shape[dim + 1 :]))
            for rank in range(self.world_size):
                if rank != root:
                    call.wait(rank, 1)
                source = tensor if rank == root else call.buffer(rank, tensor.shape, tensor.dtype)
                out.narrow(dim, rank * length, length).copy_(source)
            return out

    def barrier(self) -> None:
        """Wait until every rank has called it."""
        _core.barrier(self.core_group)

    def all_reduce_rms_norm(
        self, partial: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return (normed, new_residual) of [..., columns] tensors; see `fused_tp.all_reduce_rms_norm`."""
        if not partial.is_floating_point():
            raise TypeError(f"partial must have a floating-point dtype, got {partial.dtype}.")
        normed, new_residual = torch.empty_like(partial), torch.empty_like(partial)
        _core.all_reduce_rms_norm(
            self.core_group,
            partial.data_ptr(),
            residual.data_ptr(),
            norm_weight.data_ptr(),
            normed.data_ptr(),
            new_residual.data_ptr(),
            math.prod(partial.shape[:-1]),
            partial.shape[-1],
            eps,
            dtype_number(partial.dtype),
        )
        return normed, new_residual


# For each group: the transport, the reason why there is none, or the error of the rendezvous.
_TRANSPORTS: GroupSlot[ShmTransport | Availability | FusedTPError] = GroupSlot()


def shm_transport(group: Group) -> ShmTransport | None:
    """Return the shared-memory transport of `group`, or None if it is unavailable, equally on all ranks.

    The first call for a group is a rendezvous: every rank of the group must make it.

    Raises:
        PeerLostError: a rank died in the rendezvous or before it. Detected within two seconds if gloo is the group's
            CPU backend. Without gloo, or with TORCH_GLOO_LAZY_INIT, a rank that died before it had joined cannot be
            detected: the others raise CollectiveTimeoutError at the deadline.
        CollectiveTimeoutError: a rank did not join the rendezvous before the deadline; the error names it.
    """
    if group.process_group is None or not settings.shared_memory_allowed():
        return None
    transport = create_together(_TRANSPORTS, group, _create_transport)
    return transport if isinstance(transport, ShmTransport) else None


def known_shm_transport(group: Group) -> ShmTransport | None:
    """Return the transport that `shm_transport` has created for `group`, or None. Never waits for other ranks."""
    transport = _TRANSPORTS.get(group)
    return transport if isinstance(transport, ShmTransport) else None


def shm_supports_size(size: int) -> Availability:
    """Return whether groups of `size` ranks can use shared memory, regardless of the ranks' hosts."""
    if not settings.shared_memory_allowed():
        return unavailable("FUSED_TP_SHM=0 turns shared memory off")
    if size > MAX_RANKS:
        return unavailable(f"the group has {size} ranks; shared memory supports at most {MAX_RANKS}")
    return AVAILABLE


def shm_availability(group: Group) -> Availability:
    """Return the availability of `shm_transport(group)` as far as known. Never waits for other ranks."""
    if not (size_availability := shm_supports_size(group.size)):
        return size_availability
    if _core is None:
        return unavailable(_core_missing_reason)
    if group.process_group is None:
        return unavailable("torch.distributed is not initialised")
    transport = _TRANSPORTS.get(group)
    return transport if isinstance(transport, Availability) else AVAILABLE


def _create_transport(group: Group) -> ShmTransport | Availability:
    if not (size_availability := shm_supports_size(group.size)):
        return size_availability
    # Read settings first: an invalid one must raise before this rank is counted. The core reads FUSED_TP_ISA itself.
    reserve_bytes, _ = settings.shared_memory_reserve(), settings.isa()
    core_group, problem = None, ""

    def find_dead_ranks() -> list[int]:
        dead_rank = core_group.dead_peer() if core_group is not None else -1
        return [dead_rank] if dead_rank >= 0 else []

    try:
        if _core is None:
            raise RuntimeError(_core_missing_reason)
        core_group = _core.Group(group.rank, group.size, reserve_bytes, settings.timeout_seconds)
    except RuntimeError as error:
        problem = str(error)
    own_answer = core_group.address.hex() if core_group is not None else "", settings.host_name()
    answers = exchange(group, _RENDEZVOUS_NAME, own_answer, find_dead_ranks)
    if len(hosts := {host for _, host in answers}) > 1:
        return unavailable(f"FUSED_TP_HOST assigns the group's ranks to {len(hosts)} different hosts")
    addresses = [bytes.fromhex(address) for address, _ in answers]
    if core_group is not None and all(addresses):
        try:
            core_group.connect(addresses)
        except (RuntimeError, ValueError) as error:  # ValueError: an address in the format of another version
            problem = str(error)
    # All ranks must make the same decision, because a rank that cannot connect would keep its peers waiting.
    if not (availability := first_unavailability(exchange(group, _RENDEZVOUS_NAME, problem, find_dead_ranks))):
        return availability
    transport = ShmTransport(core_group)
    tracing.add_wait_source(core_group, lambda core: core.waited_seconds)
    _open_groups.add(core_group)
    return transport


@on_destroy
def _leave_group(group: Group) -> None:
    if (transport := known_shm_transport(group)) is not None:
        transport.core_group.give_up("its process group was destroyed")


_open_groups: weakref.WeakSet[Any] = weakref.WeakSet()


@atexit.register
def _close_groups() -> None:
    """Close all groups at exit, which notifies waiting peers earlier than the operating system would."""
    for core_group in list(_open_groups):
        core_group.close()
