"""Kernels of a group over symmetric memory: their failures, the schedules that launch them, and their workspaces.

There is one workspace for each kind of op, created at the first use and grown when it is too small. Ops of one kind
are serialized, like the collectives of one NCCL communicator. Ops of all groups of a device are serialized too, also if
they are called on different streams: a kernel that waits for other ranks needs all of its programs to be scheduled on
the GPU at the same time, on every rank.

CUDA graphs: a captured op uses the workspace of the capture, which must exist and be large enough before the capture.
Run the same ops once before, as torch requires anyway. A workspace that a graph may still use is never freed, even if
later ops outgrow it. Within a capture, and between replays and other ops, the caller must order the
calls: one op of a group at a time.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor

from fused_tp.backends.messages.plain import PlainSchedule
from fused_tp.backends.messages.torch_dist import TorchDist
from fused_tp.backends.schedule import RowSchedule
from fused_tp.backends.symmetric_memory.symm_mem import KernelMemory, check_not_capturing, is_capturing
from fused_tp.core import settings
from fused_tp.core.errors import (
    CollectiveTimeoutError,
    FusedTPError,
    PeerLostError,
    RankMismatchError,
    describe_midway_error,
)
from fused_tp.core.failure import GroupCalls
from fused_tp.core.peer_watch import PeerWatch

_LOG = logging.getLogger("fused_tp")
SlotT = TypeVar("SlotT")

MAX_TIMEOUT_SECONDS = 9e9  # kernels count nanoseconds in a signed 64-bit integer


@dataclass
class _Turn:
    """The last launched op of a set of serialized ops."""

    stream: torch.cuda.Stream | None = None
    done_event: torch.cuda.Event | None = None

    def is_running(self) -> bool:
        """True if the GPU has not finished the op."""
        return self.done_event is not None and not self.done_event.query()


@dataclass
class _Slot:
    workspace: Any
    nbytes: int
    is_on_gpu: bool
    is_captured: bool = False
    turn: _Turn = field(default_factory=_Turn)
    # Recorded after the last op; reused, because creating an event takes time.
    done_event: torch.cuda.Event | None = None


class GroupKernels(ABC, Generic[SlotT]):
    """Base of the kernels or copy engines of one group on one device: memory slots by kind of op, and failure handling.

    A failure is detected by `raise_if_failed` in a later call, and by the thread that watches the peers' processes.

    Args:
        kernels_name: name of the kernels in messages.
        messages: message transport of the group. If it or the kernels fail, both are aborted, so that peers that wait
            in either are notified.
    """

    def __init__(self, memory: KernelMemory, kernels_name: str, messages: GroupCalls | None) -> None:
        self._memory = memory
        self.rank, self.world_size, self.device = memory.rank, memory.world_size, memory.device
        self._kernels_name = kernels_name
        self._messages = messages
        self._slots: dict[str, SlotT] = {}
        self._outgrown_slots: list[SlotT] = []  # slots that a CUDA graph or an unfinished call may still use
        self._lost_ranks: list[int] = []  # ranks whose processes have exited, in this order
        self._has_logged = False
        self._linked_kernels: WeakSet[GroupKernels[Any]] = WeakSet()
        self.calls = 0  # number of started calls, in which peers may wait for this rank
        self.fatal_error: FusedTPError | None = None  # the failure that made the kernels unusable

    def watch(self) -> None:
        """Start the thread that watches the peers' processes."""
        self._watch = PeerWatch(self, self._memory.pids, type(self)._on_peer_lost, type(self)._poll)

    def link_failures(self, kernels: GroupKernels[Any]) -> None:
        """Abort these kernels if `kernels` of the same ranks fail, and vice versa.

        After a failure, peers may wait for this rank in either of them.
        """
        self._linked_kernels.add(kernels)
        kernels._linked_kernels.add(self)

    def abort(self, message: str) -> None:
        """Make the kernels unusable, with `message` as the reason, and abort all waits of peers for this rank."""
        if self.fatal_error is None:
            self._fail(self._error(FusedTPError, "{reason}", reason=message))

    def raise_if_failed(self) -> None:
        """Raise if an earlier call has failed or a peer's process has exited. Does not wait for running work.

        Raises:
            CollectiveTimeoutError: a wait has timed out.
            PeerLostError: a peer's process has exited.
            FusedTPError: one of these was raised before, or a peer has failed.
        """
        if self.fatal_error is not None:
            message = (
                f"The group's {self._kernels_name} are unusable because an earlier call failed: {{cause}} Destroy the "
                "process group and create a new one."
            )
            raise self._error(FusedTPError, message, cause=self.fatal_error)
        self.raise_if_call_failed()
        if self._lost_ranks:
            self._fail(self._loss_error())
            self._raise_fatal_error()

    def raise_if_call_failed(self) -> None:
        """Raise the failure of a call, if any has failed."""
        failure = self._failure()
        if failure is None:
            return
        # If a peer has died, its death is the cause: others may have given up because of it.
        self._fail(self._loss_error().copy(" {reason}", reason=str(failure)) if self._lost_ranks else failure)
        self._raise_fatal_error()

    def _raise_fatal_error(self) -> None:
        assert self.fatal_error is not None
        raise self.fatal_error.copy()

    def _error(self, error_class: type[FusedTPError], message: str, **fields: Any) -> FusedTPError:
        return error_class(message, rank=self.rank, size=self.world_size, **fields)

    def _loss_error(self) -> FusedTPError:
        lost_rank = {self._lost_ranks[0]: ""}
        return self._error(
            PeerLostError, "Rank {rank} of {size} lost {missing}: its process has exited.", missing=lost_rank
        )

    def raise_if_messages_failed(self) -> None:
        """Raise if the group's messages have failed, because the ranks' launches may then no longer match."""
        if self._messages is not None and self._messages.fatal_error is not None:
            raise self._messages.unusable_error()

    @contextmanager
    def abort_scope(self, op: str) -> Iterator[None]:
        """Context manager around an op with several launches, which aborts the group if the op raises between them.

        Kernels do not compare the ranks' calls. If a rank raised between two launches and continued, for example with
        the next batch, peers would match its next call with the call in which they wait, and all results would be
        wrong.
        """
        calls_before, messages = self.calls, self._messages
        try:
            with nullcontext() if messages is None else messages.abort_scope(op):
                yield
        except RankMismatchError:  # raised by all ranks together
            raise
        except BaseException as error:
            # Captured work has not run, so no peer has joined it.
            if self.calls != calls_before and not is_capturing(self.device):
                if messages is not None and messages.fatal_error is None:
                    messages.abort_midway(messages.call_for_error(op), error)
                self.abort(f"{op} {describe_midway_error(error)}")
            # No kernel of this op runs: the op has used only the message transport.
            elif messages is not None and messages.fatal_error is not None:
                self.abort(str(messages.fatal_error))
            raise

    def _fail(self, error: FusedTPError) -> str | None:
        """Make the kernels unusable and notify peers. Returns the description of a peer's earlier failure, if any."""
        self.fatal_error = error.copy()
        peer_failure = None
        try:
            if self._messages is not None:
                peer_failure = self._messages.peer_failure_message()
                self._messages.abort_because(str(error))
        finally:
            for slot in self._all_slots():
                self._leave(slot, str(error))
            for kernels in self._linked_kernels:
                kernels.abort(str(error))
        return peer_failure

    def _all_slots(self) -> list[SlotT]:
        # A copy, because the watch thread iterates over it while a call may add a slot.
        return [*self._slots.values(), *self._outgrown_slots]

    def _replace_slot(self, kind: str, slot: SlotT, outgrown_slot: SlotT | None) -> SlotT:
        """Make `slot` the slot of `kind`, and return it.

        Args:
            outgrown_slot: the previous slot if it may still be used, and must be kept; else None.
        """
        if outgrown_slot is not None:
            self._outgrown_slots.append(outgrown_slot)
        self._slots[kind] = slot
        for rank in self._lost_ranks:  # ranks lost in the meantime; the watch has not seen this slot
            self._abort_waits_for(slot, rank)
        return slot

    @contextmanager
    def _creation_scope(self, nbytes: int, op: str) -> Iterator[None]:
        """Context manager around the collective creation of a workspace; aborts the group if it fails."""
        try:
            yield
        except Exception as error:
            # Other ranks may have succeeded, so the ranks' next calls would not match.
            message = f"Creating a workspace of {nbytes} bytes for {op} failed ({type(error).__name__}: {{reason}})."
            self._fail(self._error(FusedTPError, message, reason=str(error)))
            raise

    # -- implemented by subclasses ------------------------------------------------------------------------------------

    @abstractmethod
    def _failure(self) -> FusedTPError | None:
        """Return the failure of a call as an error of this rank; None if no call has failed."""

    @abstractmethod
    def _leave(self, slot: SlotT, reason: str) -> None:
        """Abort the waits of peers for this rank in the memory of `slot`."""

    @abstractmethod
    def _abort_waits_for(self, slot: SlotT, rank: int) -> None:
        """Abort this rank's waits for `rank`, whose process has exited."""

    # -- called by the watch's thread ---------------------------------------------------------------------------------

    def _on_peer_lost(self, rank: int) -> None:
        self._lost_ranks.append(rank)
        for slot in self._all_slots():
            self._abort_waits_for(slot, rank)

    def _poll(self) -> None:
        """Log the error that the next call will raise, because results are wrong already and no call may follow."""
        if self._has_logged or self.device.type == "cpu" or self.fatal_error is not None:
            return
        if (failure := self._failure()) is not None:
            self._has_logged = True
            _LOG.error("%s Results of the group's %s that were in flight are wrong.", failure, self._kernels_name)


class KernelSchedule(RowSchedule):
    """Base of the schedules that use kernels or copy engines; ops without one fall back to plain collectives.

    Args:
        kernels: kernels of the group.
        plain: plain schedule of the group, on the messages that fail together with the kernels; None if the ranks are
            threads, which have no messages.
        no_fallback_message: message of the error for ops without a kernel if the ranks are threads.
    """

    def __init__(self, kernels: GroupKernels[Any], plain: PlainSchedule | None, no_fallback_message: str) -> None:
        self.rank, self.world_size = kernels.rank, kernels.world_size
        self._kernels = kernels
        self._plain = plain
        self._transport = None if plain is None else plain.transport
        self._no_fallback_message = no_fallback_message

    @property
    def fallback(self) -> PlainSchedule:
        """The plain schedule, which runs the calls that have no kernel.

        Raises:
            ValueError: the ranks are threads.
        """
        if self._plain is None:
            raise ValueError(self._no_fallback_message)
        return self._plain

    @property
    def messages(self) -> TorchDist:
        return self.fallback.transport

    def abort_scope(self, op: str) -> AbstractContextManager[object]:
        return self._kernels.abort_scope(op)

    def _sum_partial(self, partial: Tensor) -> Tensor:
        return self.fallback._sum_partial(partial)

    def check(self, op: str, dims: Sequence[float], x: Tensor) -> None:
        """Raise if the group's messages have failed, because the ranks' launches may no longer match. Then compare."""
        if self._transport is not None:
            self._kernels.raise_if_messages_failed()
            self._transport.check(op, dims, x.dtype, x.device)


class Workspaces(GroupKernels[_Slot]):
    """The workspaces of one group on one device, by kind of op.

    Args:
        constructors: constructor of the workspace of each kind of op. It is called with a buffer, its handle,
            `timeout_seconds` and `rescue_stream`, which all kinds share.
    """

    def __init__(
        self,
        memory: KernelMemory,
        constructors: Mapping[str, Callable[..., Any]],
        messages: GroupCalls | None = None,
    ) -> None:
        super().__init__(memory, "kernels", messages)
        self._constructors = dict(constructors)
        self._turn = _device_turns.setdefault(memory.serialized_by, _Turn())
        self._outside_slot = _Slot(None, 0, self.device.type == "cuda")
        self.watch()

    def use(self, kind: str, nbytes: int, op: str, *, is_exclusive: bool = True) -> WorkspaceScope:
        """Return a context manager that yields a workspace of at least `nbytes` for launches inside.

        Args:
            is_exclusive: serialize the op with all ops of the device. If False, other ops may run at the same time, and
                the op must leave multiprocessors free for them.

        Raises:
            RuntimeError: the workspace would have to grow during CUDA graph capture.
            Also the errors of `raise_if_failed`; and on a CPU, on leaving the scope, the failure of this op.
        """
        self.raise_if_failed()
        slot = self._slot(kind, nbytes, op)
        slot.workspace.timeout_ns = int(_timeout_seconds() * 1e9)
        self.calls += 1
        return GpuWorkspaceScope(self, slot, is_exclusive) if slot.is_on_gpu else WorkspaceScope(self, slot)

    def in_turn(self) -> AbstractContextManager[Any]:
        """Context manager of launches that wait for other ranks without a workspace; serialized with all other ops."""
        return (
            GpuWorkspaceScope(self, self._outside_slot, is_exclusive=True)
            if self._outside_slot.is_on_gpu
            else nullcontext()
        )

    def reserve(self, kind: str, nbytes: int, op: str) -> None:
        """Allocate the workspace that a later `use` with these arguments needs. A collective call."""
        self.raise_if_failed()  # otherwise the allocation would wait for peers that have left
        self._slot(kind, nbytes, op)

    def raise_if_call_failed(self) -> None:
        expired_wait = self._expired_wait()
        if expired_wait is None:
            return
        if not expired_wait.gave_up or self._lost_ranks:
            super().raise_if_call_failed()
        if peer_failure := self._fail(self._error(CollectiveTimeoutError, "{reason}.", reason=str(expired_wait))):
            self.fatal_error = self._error(PeerLostError, "{reason}", reason=f"{expired_wait}. {peer_failure}")
        self._raise_fatal_error()

    def _failure(self) -> FusedTPError | None:
        expired_wait = self._expired_wait()
        if expired_wait is None:
            return None
        # Omit the timeout if this rank gave up because a peer failed or exited: it did not wait that long.
        timeout_text = (
            ""
            if expired_wait.gave_up or self._lost_ranks
            else f", in {settings.timeout_seconds():g} s (FUSED_TP_TIMEOUT)"
        )
        return self._error(CollectiveTimeoutError, f"{{reason}}{timeout_text}.", reason=str(expired_wait))

    def _expired_wait(self) -> Any:
        """Return the `triton_kernels.comm.signals.ExpiredWait` of a timed-out wait, or None."""
        return next(filter(None, (slot.workspace.expired_wait() for slot in self._all_slots())), None)

    def _leave(self, slot: _Slot, reason: str) -> None:
        # Also after the loss of a peer, although every rank detects it: a peer may wait for this rank in a call whose
        # data from the lost rank has arrived.
        try:
            with GpuWorkspaceScope(self, slot, is_exclusive=False) if slot.is_on_gpu else nullcontext():
                slot.workspace.leave(self._lost_ranks)
        except Exception as error:  # the device has failed; the caller already raises the original error
            _LOG.warning(
                "Rank %d could not notify its peers, which will wait until their deadline (%s).", self.rank, error
            )

    def _abort_waits_for(self, slot: _Slot, rank: int) -> None:
        slot.workspace.stop_waiting(rank)

    def _on_peer_lost(self, rank: int) -> None:
        super()._on_peer_lost(rank)  # first, because querying an event below may raise while another thread captures
        # Not an error at the end of a program, when ranks exit one after the other with no work in flight.
        if any(slot.turn.is_running() for slot in self._all_slots()):
            _LOG.error(
                "Rank %d lost rank %d, whose process has exited. Results of the calls in flight are wrong.",
                self.rank,
                rank,
            )

    def _slot(self, kind: str, nbytes: int, op: str) -> _Slot:
        old_slot = self._slots.get(kind)
        if old_slot is not None and old_slot.nbytes >= nbytes:
            return old_slot
        existing_description = f"only one of {old_slot.nbytes} bytes" if old_slot is not None else "none yet"
        check_not_capturing(
            self.device, f"{op} needs a workspace of {nbytes} bytes, and the group has {existing_description}"
        )
        size = round_up_bytes(nbytes)
        # A rank must not free memory to which a peer may still write. So each rank waits for its own kernels, and then
        # creates the new workspace, which waits for all ranks. It waits for this slot's last op only, because if ranks
        # are threads, other streams of the GPU may wait for this rank.
        if old_slot is not None and old_slot.turn.done_event is not None:
            old_slot.turn.done_event.synchronize()
        with self._creation_scope(size, op):
            buffer, handle = self._memory.allocate(size)
            options = {"timeout_seconds": _timeout_seconds(), "rescue_stream": self._memory.rescue_stream}
            workspace = self._constructors[kind](buffer, handle, **options)
        slot = _Slot(workspace, size, workspace.state.is_cuda)
        return self._replace_slot(kind, slot, old_slot if old_slot is not None and old_slot.is_captured else None)


class WorkspaceScope:
    """Context manager returned by `Workspaces.use`. A class, because a generator takes as long as a launch."""

    __slots__ = ("_slot", "_workspaces")

    def __init__(self, workspaces: Workspaces, slot: _Slot) -> None:
        self._workspaces = workspaces
        self._slot = slot

    def __enter__(self) -> Any:
        return self._slot.workspace

    def __exit__(self, error: object, *details: object) -> bool | None:
        if error is None:
            self._workspaces.raise_if_call_failed()
        return None


class GpuWorkspaceScope(WorkspaceScope):
    """`WorkspaceScope` on a GPU, which also serializes the op with other ops and sets the current device."""

    __slots__ = ("_is_capturing", "_previous_device", "_turns")

    def __init__(self, workspaces: Workspaces, slot: _Slot, is_exclusive: bool) -> None:
        super().__init__(workspaces, slot)
        self._turns = (slot.turn, workspaces._turn) if is_exclusive else (slot.turn,)

    def __enter__(self) -> Any:
        index = self._workspaces._memory.device.index
        self._previous_device = torch.cuda._exchange_device(index)
        self._is_capturing = torch.cuda.is_current_stream_capturing()
        self._slot.is_captured |= self._is_capturing
        if not self._is_capturing:  # a capture cannot wait for events recorded outside of it
            stream = torch.cuda.current_stream(index)
            for turn in self._turns:
                if turn.done_event is not None and turn.stream != stream:
                    stream.wait_event(turn.done_event)
        return self._slot.workspace

    def __exit__(self, *_: object) -> bool | None:
        # Also after an exception, because a kernel that was launched before the exception still runs.
        index = self._workspaces._memory.device.index
        if not self._is_capturing:
            stream = torch.cuda.current_stream(index)
            done_event = self._slot.done_event
            if done_event is None:
                done_event = self._slot.done_event = torch.cuda.Event()
            done_event.record(stream)
            for turn in self._turns:
                turn.stream, turn.done_event = stream, done_event
        # Not set_device, which would create a context on a GPU that is only this process's default.
        torch.cuda._maybe_exchange_device(self._previous_device)
        return None


def round_up_bytes(nbytes: int, min_bytes: int = 1 << 20, step_bytes: int = 64 << 20) -> int:
    """Round `nbytes` up to a power of two, at least `min_bytes`. Above `step_bytes`, round to its next multiple."""
    size = max(min_bytes, 1 << max(0, nbytes - 1).bit_length())
    return size if size <= step_bytes else -(-nbytes // step_bytes) * step_bytes


def _timeout_seconds() -> float:
    return min(settings.timeout_seconds(), MAX_TIMEOUT_SECONDS)


# Ops of all groups of a device are serialized. Otherwise two ops on two streams could deadlock: each fills one GPU with
# kernels that wait for a kernel on another GPU, which has no free multiprocessors left.
_device_turns: WeakValueDictionary[Hashable, _Turn] = WeakValueDictionary()
