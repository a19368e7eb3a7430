"""CPU shared memory: ranks of one host read and write each other's workspaces in place.

`shm_transport(group)` makes the transport of a group at its first use (a rendezvous over the group's store, in which
all its ranks take part) and remembers it. A call of an op is a `Workspace`: every rank begins it with its own amount of
memory, signals stages of its work, waits for stages of others, reads their memory, and ends it. Up to 16 calls of a
group may be in flight; memory is recycled once every rank has ended the call.

Not reachable (another host, another container, another user, no native core): the group gets None, on every rank, and
the ops run plain collectives. `shm_availability` says why.
"""

from __future__ import annotations

import atexit
import math
import weakref
from collections.abc import Callable, Sequence
from importlib import import_module
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from fused_tp.runtime import settings, tracing
from fused_tp.runtime.availability import AVAILABLE, Availability, unavailable
from fused_tp.runtime.errors import FusedTPError, raised_midway
from fused_tp.runtime.group import Group, GroupSlot, on_destroy
from fused_tp.transport.store import exchange, first_reason, made_together

_core: Any = None
_why_no_core = ""
try:
    _core = import_module("fused_tp._core")
except ImportError as missing:
    _why_no_core = f"the native core is not built ({missing}); install a C++ compiler and reinstall fused_tp"

MAX_RANKS: int = getattr(_core, "MAX_RANKS", 64)  # kMaxRanks in csrc/shm/control.h
_MEETING = "the shared-memory rendezvous"

# The numbers of csrc/dtype.h. bool moves as bytes.
_DTYPE_NUMBERS = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float64: 3,
    torch.int8: 4,
    torch.uint8: 5,
    torch.bool: 5,
    torch.int16: 6,
    torch.int32: 7,
    torch.int64: 8,
}

_MOST_DESCRIBED = 1024


def dtype_number(dtype: torch.dtype) -> int:
    """The native core's number of `dtype`; TypeError where it has none."""
    try:
        return _DTYPE_NUMBERS[dtype]
    except KeyError:
        names = ", ".join(str(known).removeprefix("torch.") for known in _DTYPE_NUMBERS)
        raise TypeError(f"Shared-memory collectives take {names}, not {dtype}.") from None


class Workspace:
    """One call of an op in flight on this rank; a context manager that ends the call.

    Views that `buffer` gives must not outlive the call: its memory is recycled once every rank has ended it.

    Left by an exception, the call is abandoned: peers that wait for more of it raise, and the ranks are in step. Where
    peers may have come to the end of it they could take a second try for their next call: then the group is given up,
    unless the exception is one between ranks.

    Attributes:
        peers_may_end: without more of this rank. So they may once it has signalled; earlier where peers need nothing of
            it, which whoever makes the call sets.
    """

    __slots__ = ("__weakref__", "_call", "_core_group", "_memories", "peers_may_end")

    def __init__(self, call: Any, core_group: Any, op_began: int | None = None) -> None:
        self._call = call
        self._core_group = core_group
        self._memories: dict[int, Any] = {}
        # A later call of one op: peers are to find that this rank has left the group, before that it has left the call.
        self.peers_may_end = op_began is not None and call.number - 1 > op_began

    def buffer(self, rank: int, shape: Sequence[int], dtype: torch.dtype, offset: int = 0) -> Tensor:
        """A view of `rank`'s memory in this call, `offset` bytes in. Waits until that rank has begun the call."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        memory = self._memories.get(rank)
        if memory is None:
            memory = self._memories[rank] = self._call.workspace(rank, self._core_group)
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)

    def address(self, rank: int) -> int:
        """Where `rank`'s memory of this call starts in this process."""
        return self._call.workspace_address(rank)

    def signal(self, stage: int) -> None:
        """Publish all that this rank has written, as its `stage` (from 1, growing) of this call."""
        self.peers_may_end = True
        self._call.signal(stage)

    def wait(self, rank: int, stage: int) -> None:
        """Return once `rank` has signalled `stage` or a later one; raises errors between ranks (runtime.errors)."""
        self._call.wait(rank, stage)

    def wait_all(self, stage: int) -> None:
        """`wait` for every other rank."""
        self._call.wait_all(stage)

    def abandon(self) -> None:
        """End the call on this rank before its time: peers that wait for more of it see that this rank left."""
        self._call.abandon()

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self._call.end()
        else:
            if self.peers_may_end and error is not None and not isinstance(error, FusedTPError):
                self._core_group.give_up(f"call {self._call.number} {raised_midway(error)}")
            self.abandon()


def folded(shape: Sequence[int]) -> tuple[int, ...]:
    """At most six dims that tell shapes apart: a signature has room for eight numbers."""
    return (math.prod(shape[:-5]), *shape[-5:]) if len(shape) > 6 else tuple(shape)


def _check_summable(dtype: torch.dtype) -> None:
    if dtype == torch.bool:
        raise TypeError("A sum of torch.bool is no torch.bool; convert tensor first.")


class ShmTransport:
    """What the ranks of one group share. Its collectives block, and are the native ones of csrc/shm.

    Sums over ranks accumulate in fp32 (fp64 for fp64, integers in their own type) in rank order. Tensors are contiguous
    and on the CPU, and of the dtypes and sizes that the ops have checked.
    """

    def __init__(self, core_group: Any) -> None:
        self.core_group = core_group
        self.rank: int = core_group.rank
        self.world_size: int = core_group.size
        self._held: list[tuple[int, Any]] = []  # memory of calls that this rank has left, by their numbers
        self._most_pooled_bytes = settings.shared_memory_reserve() // 2
        self._described: dict[Any, tuple[int, Any]] = {}
        self.op_began: int | None = None  # how many calls there had been, within an op of several

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor over this rank's reused pool: its pages exist already, as those of a fresh allocation do not.

        Where the pool is full it comes from the ordinary allocator: outputs may be kept for as long as a caller likes.
        """
        memory = self._pooled(math.prod(shape) * dtype.itemsize)
        if memory is None:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    def _pooled(self, nbytes: int) -> Any:
        """Memory of this rank's pool for a result; None for no bytes, and where results fill half of the pool.

        The other half is left to workspaces, without which no op could go on.
        """
        if nbytes == 0 or self.core_group.bytes_in_use + nbytes > self._most_pooled_bytes:
            return None
        try:
            return self.core_group.allocate(nbytes)
        except FusedTPError:  # there is room, but in pieces
            return None

    def begin(self, op: str, dims: Sequence[int], dtype: torch.dtype, nbytes: int, *, reuse: bool = False) -> Workspace:
        """Begin the group's next call. `op`, `dims`, `dtype` must agree on all ranks; `nbytes` of memory may differ.

        Args:
            reuse: wait for peers that are still in calls which this rank has ended, and use the memory of those again.
                For large ones; small ones have memory of their own. Without it memory grows by what ranks drift apart.
        """
        call = self.core_group.begin(op, dtype_number(dtype), dims, nbytes, reuse)
        return Workspace(call, self.core_group, self.op_began)

    @property
    def settled(self) -> bool:
        """Whether `begin` with `reuse` would have no rank to wait for."""
        settled: bool = self.core_group.settled()
        return settled

    def all_reduce_of(
        self,
        op: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        write: Callable[[Tensor], object],
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        """The sum over ranks of what `write(term)` writes to a tensor of `shape`, which is not empty.

        Term and result are one: it comes from the pool, as `empty`'s tensors do, and peers read it where it lies.

        Args:
            op: the op this is; it must agree on all ranks, as `shape` and `dtype` must.
            meanwhile: work to do once the term is there, while peers may still be busy with theirs.

        Example:
            y = transport.all_reduce_of("matmul_all_reduce", (m, n), x.dtype, lambda y: torch.mm(x, w.t(), out=y))
        """
        count = math.prod(shape)
        memory = self._pooled(count * dtype.itemsize)
        number, dims = dtype_number(dtype), folded(shape)
        if memory is not None:
            call = self.core_group.begin_in(op, number, dims, memory)
        else:
            call = self.core_group.begin(op, number, dims, count * dtype.itemsize)
        if self._held:  # by a rank that has begun this call, no memory of one that many calls before is read any more
            self._held = [one for one in self._held if one[0] + _core.MAX_CALLS_IN_FLIGHT > call.number]
        try:
            with Workspace(call, self.core_group, self.op_began) as workspace:
                term = (
                    workspace.buffer(self.rank, shape, dtype)
                    if memory is None
                    else torch.frombuffer(memory, dtype=dtype).view(shape)
                )
                write(term)
                if meanwhile is not None:
                    workspace.signal(1)
                    meanwhile()
                workspace.peers_may_end = True  # which signals
                _core.sum_workspaces(self.core_group, call, count, number)
                return term.clone() if memory is None else term
        except BaseException:  # Ctrl-C too: a peer may still be reading what goes back to the pool with the last tensor
            self._held.append((call.number, memory))
            raise

    def all_reduce(self, tensor: Tensor, out: Tensor | None = None, called: str = "all_reduce") -> Tensor:
        """The sum of `tensor` over the ranks, in `out` (default: a new tensor; may be `tensor` itself).

        Args:
            called: the op this is part of, which must agree on all ranks as the shape must.
        """
        described = self.described(called, tensor.dtype, tensor.shape)
        out = torch.empty_like(tensor) if out is None else out
        _core.all_reduce(self.core_group, tensor.data_ptr(), out.data_ptr(), *described)
        return out

    def described(self, called: str, dtype: torch.dtype, shape: torch.Size) -> tuple[int, Any]:
        """What the native all-reduce needs besides the address of a tensor: elements and signature."""
        key = (called, dtype, shape)
        known = self._described.get(key)
        if known is None:
            _check_summable(dtype)
            signature = _core.Signature(called, dtype_number(dtype), folded(shape))
            if len(self._described) >= _MOST_DESCRIBED:  # lengths that keep changing
                self._described.clear()
            known = self._described[key] = (math.prod(shape), signature)
        return known

    def reduce_scatter(self, tensor: Tensor, sizes: Sequence[int], called: Sequence[int] | None = None) -> Tensor:
        """This rank's rows of the sum of `tensor` over the ranks: `sizes[r]` rows of dim 0 belong to rank r.

        `called` (default: the shape of `tensor`) is what the op was called with; it must agree on all ranks.
        """
        _check_summable(tensor.dtype)
        row = math.prod(tensor.shape[1:])
        out = tensor.new_empty((sizes[self.rank], *tensor.shape[1:]))
        dims = folded(tensor.shape if called is None else called)
        _core.reduce_scatter(
            self.core_group,
            tensor.data_ptr(),
            out.data_ptr(),
            [size * row for size in sizes],
            _core.Signature("reduce_scatter", dtype_number(tensor.dtype), dims),
        )
        return out

    def all_to_all(self, tensor: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> Tensor:
        """Give rows of dim 0 to every rank (`send_sizes[r]` to rank r) and get `receive_sizes[r]` rows from each."""
        row = math.prod(tensor.shape[1:])
        out = tensor.new_empty((sum(receive_sizes), *tensor.shape[1:]))
        _core.all_to_all(
            self.core_group,
            tensor.data_ptr(),
            out.data_ptr(),
            [size * row for size in send_sizes],
            [size * row for size in receive_sizes],
            dtype_number(tensor.dtype),
        )
        return out

    def barrier(self) -> None:
        """Return once every rank has called it."""
        _core.barrier(self.core_group)

    def all_reduce_rms_norm(
        self, partial: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(normed, new_residual) of [..., columns] tensors; see `fused_tp.all_reduce_rms_norm`."""
        if not partial.is_floating_point():
            raise TypeError(f"partial is {partial.dtype}; RMSNorm needs a floating dtype.")
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


# A transport, or why there is none, or how the rendezvous failed.
_TRANSPORTS: GroupSlot[ShmTransport | Availability | FusedTPError] = GroupSlot()


def shm_transport(group: Group) -> ShmTransport | None:
    """The shared-memory transport of `group`, or None where it cannot be had; the same answer on all its ranks.

    The first call for a group is a rendezvous: every rank of the group must make it.

    Raises:
        PeerLostError: a rank died in the rendezvous or before it. Noticed within two seconds where gloo serves the
            group's CPU tensors. Without gloo, or with TORCH_GLOO_LAZY_INIT, nothing tells of a rank that died before it
            had joined: the others get CollectiveTimeoutError at the deadline.
        CollectiveTimeoutError: a rank, which is named, did not join the rendezvous before the deadline.
    """
    if group.process_group is None or not settings.shared_memory_allowed():
        return None
    found = made_together(_TRANSPORTS, group, _rendezvous)
    return found if isinstance(found, ShmTransport) else None


def known_shm_transport(group: Group) -> ShmTransport | None:
    """What `shm_transport` has made for `group`. Never waits for other ranks."""
    found = _TRANSPORTS.get(group)
    return found if isinstance(found, ShmTransport) else None


def shm_serves(size: int) -> Availability:
    """Whether groups of `size` ranks may share memory, wherever the ranks are."""
    if not settings.shared_memory_allowed():
        return unavailable("FUSED_TP_SHM=0 turns shared memory off")
    if size > MAX_RANKS:
        return unavailable(f"the group has {size} ranks; shared memory serves at most {MAX_RANKS}")
    return AVAILABLE


def shm_availability(group: Group) -> Availability:
    """Whether `shm_transport(group)` is there, as far as is known. Never waits for other ranks."""
    if not (serves := shm_serves(group.size)):
        return serves
    if _core is None:
        return unavailable(_why_no_core)
    if group.process_group is None:
        return unavailable("torch.distributed is not initialised")
    found = _TRANSPORTS.get(group)
    return found if isinstance(found, Availability) else AVAILABLE


def _rendezvous(group: Group) -> ShmTransport | Availability:
    if not (serves := shm_serves(group.size)):
        return serves
    # May raise, and must do so before this rank is counted. The core reads the second by itself.
    reserve_bytes, _ = settings.shared_memory_reserve(), settings.isa()
    core_group, problem = None, ""

    def gone() -> list[int]:
        dead = core_group.dead_peer() if core_group is not None else -1
        return [dead] if dead >= 0 else []

    try:
        if _core is None:
            raise RuntimeError(_why_no_core)
        core_group = _core.Group(group.rank, group.size, reserve_bytes, settings.timeout_seconds)
    except RuntimeError as error:
        problem = str(error)
    own = core_group.address.hex() if core_group is not None else "", settings.host_name()
    found = exchange(group, _MEETING, own, gone)
    if len(hosts := {host for _, host in found}) > 1:
        return unavailable(f"FUSED_TP_HOST gives its ranks {len(hosts)} hosts")
    addresses = [bytes.fromhex(address) for address, _ in found]
    if core_group is not None and all(addresses):
        try:
            core_group.connect(addresses)
        except (RuntimeError, ValueError) as error:  # ValueError: an address in the format of another version
            problem = str(error)
    # All or none: a rank that cannot reach a peer must keep the others from waiting for it.
    if not (reached := first_reason(exchange(group, _MEETING, problem, gone))):
        return reached
    transport = ShmTransport(core_group)
    tracing.add_wait_source(core_group, lambda core: core.waited_seconds)
    _open.add(core_group)
    return transport


@on_destroy
def _leave(group: Group) -> None:
    if (transport := known_shm_transport(group)) is not None:
        transport.core_group.give_up("its process group was destroyed")


_open: weakref.WeakSet[Any] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A rank that leaves says so; peers that still wait for it then need not wait for the system to notice."""
    for core_group in list(_open):
        core_group.close()
