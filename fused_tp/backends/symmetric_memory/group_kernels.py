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

from fused_tp.backends.messages.plain import Plain
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

LONGEST_SECONDS = 9e9  # kernels count nanoseconds in a signed 64-bit integer


@dataclass
class _Turn:
    """The last launched op of a set of serialized ops."""

    stream: torch.cuda.Stream | None = None
    done: torch.cuda.Event | None = None

    def under_way(self) -> bool:
        return self.done is not None and not self.done.query()


@dataclass
class _Slot:
    workspace: Any
    nbytes: int
    on_gpu: bool
    captured: bool = False
    turn: _Turn = field(default_factory=_Turn)
    done: torch.cuda.Event | None = None  # recorded after the last op; reused, because creating an event takes time


class GroupKernels(ABC, Generic[SlotT]):
    """Base of the kernels or copy engines of one group on one device: memory slots by kind of op, and failure handling.

    A failure is detected by `raise_if_failed` in a later call, and by the thread that watches the peers' processes.

    Args:
        what: name of the kernels in messages.
        messages: message transport of the group. If it or the kernels fail, both are aborted, so that peers that wait
            in either are notified.
    """

    def __init__(self, memory: KernelMemory, what: str, messages: GroupCalls | None) -> None:
        self._memory = memory
        self.rank, self.world_size, self.device = memory.rank, memory.world_size, memory.device
        self._what = what
        self._messages = messages
        self._slots: dict[str, SlotT] = {}
        self._outgrown: list[SlotT] = []  # slots that a CUDA graph or an unfinished call may still use
        self._lost: list[int] = []  # ranks whose processes have exited, in this order
        self._logged = False
        self._others: WeakSet[GroupKernels[Any]] = WeakSet()
        self.calls = 0  # number of started calls, which peers join
        self.fatal_error: FusedTPError | None = None  # why the kernels are unusable

    def watch(self) -> None:
        """Start the thread that watches the peers' processes."""
        self._watch = PeerWatch(self, self._memory.pids, type(self)._on_peer_lost, type(self)._poll)

    def fail_with(self, others: GroupKernels[Any]) -> None:
        """Abort these kernels if `others`, of the same ranks, fail, and vice versa: peers may wait for a failed rank in
        either of them."""
        self._others.add(others)
        others._others.add(self)

    def abort(self, sentence: str) -> None:
        """Make the kernels unusable, with `sentence` as the reason, and abort all waits of peers for this rank."""
        if self.fatal_error is None:
            self._fail(self._error(FusedTPError, "{reason}", reason=sentence))

    def raise_if_failed(self) -> None:
        """Raise if an earlier call has failed or a peer's process has exited. Does not wait for running work.

        Raises:
            CollectiveTimeoutError: a wait has timed out.
            PeerLostError: a peer's process has exited.
            FusedTPError: one of these was raised before, or a peer has failed.
        """
        if self.fatal_error is not None:
            sentence = (
                f"The group's {self._what} are unusable since an earlier failure: {{cause}} Destroy the process group "
                "and create a new one."
            )
            raise self._error(FusedTPError, sentence, cause=self.fatal_error)
        self.raise_failure()
        if self._lost:
            self._fail(self._loss())
            self._raise_broken()

    def raise_failure(self) -> None:
        """Raise the failure of a call, if any has failed."""
        failure = self._failure()
        if failure is None:
            return
        # If a peer has died, its death is the cause: others may have given up because of it.
        self._fail(self._loss().copy(" {reason}", reason=str(failure)) if self._lost else failure)
        self._raise_broken()

    def _raise_broken(self) -> None:
        assert self.fatal_error is not None
        raise self.fatal_error.copy()

    def _error(self, kind: type[FusedTPError], sentence: str, **fields: Any) -> FusedTPError:
        return kind(sentence, rank=self.rank, size=self.world_size, **fields)

    def _loss(self) -> FusedTPError:
        lost = {self._lost[0]: ""}
        return self._error(PeerLostError, "Rank {rank} of {size} lost {missing}: its process has exited.", missing=lost)

    def check_usable(self) -> None:
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
        before, messages = self.calls, self._messages
        try:
            with nullcontext() if messages is None else messages.abort_scope(op):
                yield
        except RankMismatchError:  # raised by all ranks together
            raise
        except BaseException as error:
            # Captured work has not run, so no peer has joined it.
            if self.calls != before and not is_capturing(self.device):
                if messages is not None and messages.fatal_error is None:
                    messages.abort_midway(messages.last_call(op), error)
                self.abort(f"{op} {describe_midway_error(error)}")
            elif messages is not None and messages.fatal_error is not None:  # the op only sent messages
                self.abort(str(messages.fatal_error))
            raise

    def _fail(self, error: FusedTPError) -> str | None:
        """Make the kernels unusable and notify peers. Returns the description of a peer's earlier failure, if any."""
        self.fatal_error = error.copy()
        said = None
        try:
            if self._messages is not None:
                said = self._messages.peer_failure_message()
                self._messages.abort_because(str(error))
        finally:
            for slot in self._all_slots():
                self._leave(slot, str(error))
            for others in self._others:
                others.abort(str(error))
        return said

    def _all_slots(self) -> list[SlotT]:
        # A copy, because the watch thread iterates over it while a call may add a slot.
        return [*self._slots.values(), *self._outgrown]

    def _keep(self, kind: str, slot: SlotT, outgrown: SlotT | None) -> SlotT:
        """Make `slot` the slot of `kind`, and return it; keep the previous one, `outgrown`, if it may still be used."""
        if outgrown is not None:
            self._outgrown.append(outgrown)
        self._slots[kind] = slot
        for rank in self._lost:  # ranks lost in the meantime; the watch has not seen this slot
            self._lose(slot, rank)
        return slot

    @contextmanager
    def _creation_scope(self, nbytes: int, op: str) -> Iterator[None]:
        """Context manager around the collective creation of a workspace; aborts the group if it fails."""
        try:
            yield
        except Exception as error:
            # Other ranks may have succeeded, so the ranks' next calls would not match.
            sentence = f"creating a workspace of {nbytes} bytes for {op} failed ({type(error).__name__}: {{reason}})."
            self._fail(self._error(FusedTPError, sentence, reason=str(error)))
            raise

    # -- implemented by subclasses ------------------------------------------------------------------------------------

    @abstractmethod
    def _failure(self) -> FusedTPError | None:
        """Return the failure of a call as an error of this rank; None if no call has failed."""

    @abstractmethod
    def _leave(self, slot: SlotT, why: str) -> None:
        """Abort the waits of peers for this rank in the memory of `slot`."""

    @abstractmethod
    def _lose(self, slot: SlotT, rank: int) -> None:
        """Abort this rank's waits for `rank`, whose process has exited."""

    # -- called by the watch's thread ---------------------------------------------------------------------------------

    def _on_peer_lost(self, rank: int) -> None:
        self._lost.append(rank)
        for slot in self._all_slots():
            self._lose(slot, rank)

    def _poll(self) -> None:
        """Log the error that the next call will raise, because results are wrong already and no call may follow."""
        if self._logged or self.device.type == "cpu" or self.fatal_error is not None:
            return
        if (failure := self._failure()) is not None:
            self._logged = True
            _LOG.error("%s Results of the group's %s that were in flight are wrong.", failure, self._what)


class KernelSchedule(RowSchedule):
    """Base of the schedules that use kernels or copy engines; ops without one fall back to plain collectives.

    Args:
        kernels: kernels of the group.
        plain: plain schedule of the group, on the messages that fail together with the kernels; None if the ranks are
            threads, which have no messages.
        without: message of the error for ops without a kernel if the ranks are threads.
    """

    def __init__(self, kernels: GroupKernels[Any], plain: Plain | None, without: str) -> None:
        self.rank, self.world_size = kernels.rank, kernels.world_size
        self._kernels = kernels
        self._plain = plain
        self._transport = None if plain is None else plain.transport
        self._without = without

    @property
    def fallback(self) -> Plain:
        """The plain schedule, which runs the calls that have no kernel.

        Raises:
            ValueError: the ranks are threads.
        """
        if self._plain is None:
            raise ValueError(self._without)
        return self._plain

    @property
    def messages(self) -> TorchDist:
        return self.fallback.transport

    def abort_scope(self, op: str) -> AbstractContextManager[object]:
        return self._kernels.abort_scope(op)

    def _sum_partial(self, partial: Tensor) -> Tensor:
        return self.fallback._sum_partial(partial)

    def check(self, op: str, dims: Sequence[float], x: Tensor) -> None:
        """Raise if messages of the group have failed, after which ranks may mean different launches; then compare."""
        if self._transport is not None:
            self._kernels.check_usable()
            self._transport.check(op, dims, x.dtype, x.device)


class Workspaces(GroupKernels[_Slot]):
    """The workspaces of one group on one device, by kind of op.

    Args:
        kinds: for each kind, the constructor of its workspace, called with a buffer, its handle, `timeout_seconds` and
            the stream `rescue`, which all kinds share.
    """

    def __init__(
        self,
        memory: KernelMemory,
        kinds: Mapping[str, Callable[..., Any]],
        messages: GroupCalls | None = None,
    ) -> None:
        super().__init__(memory, "kernels", messages)
        self._kinds = dict(kinds)
        self._turn = _turns.setdefault(memory.serialized_by, _Turn())
        self._outside_slot = _Slot(None, 0, self.device.type == "cuda")
        self.watch()

    def use(self, kind: str, nbytes: int, op: str, *, exclusive: bool = True) -> Use:
        """Return a context manager that yields a workspace of at least `nbytes` for launches inside.

        Args:
            exclusive: serialize the op with all ops of the device. If False, other ops may run at the same time, and
                the op must leave multiprocessors free for them.

        Raises:
            RuntimeError: the workspace would have to grow during CUDA graph capture.
            Also the errors of `raise_if_failed`; and on a CPU, on leaving the scope, the failure of this op.
        """
        self.raise_if_failed()
        slot = self._slot(kind, nbytes, op)
        slot.workspace.timeout_ns = int(_timeout_seconds() * 1e9)
        self.calls += 1
        return UseOnGpu(self, slot, exclusive) if slot.on_gpu else Use(self, slot)

    def in_turn(self) -> AbstractContextManager[Any]:
        """Context manager of launches that wait for other ranks without a workspace; serialized with all other ops."""
        return UseOnGpu(self, self._outside_slot, exclusive=True) if self._outside_slot.on_gpu else nullcontext()

    def reserve(self, kind: str, nbytes: int, op: str) -> None:
        """Allocate the workspace that a later `use` with these arguments needs. A collective call."""
        self.raise_if_failed()  # otherwise the allocation would wait for peers that have left
        self._slot(kind, nbytes, op)

    def raise_failure(self) -> None:
        expired = self._expired()
        if expired is None:
            return
        if not expired.gave_up or self._lost:
            super().raise_failure()
        if said := self._fail(self._error(CollectiveTimeoutError, "{reason}.", reason=str(expired))):
            self.fatal_error = self._error(PeerLostError, "{reason}", reason=f"{expired}. {said}")
        self._raise_broken()

    def _failure(self) -> FusedTPError | None:
        expired = self._expired()
        if expired is None:
            return None
        # A rank that was notified of a peer's failure or exit did not wait until the deadline.
        late = "" if expired.gave_up or self._lost else f", in {settings.timeout_seconds():g} s (FUSED_TP_TIMEOUT)"
        return self._error(CollectiveTimeoutError, f"{{reason}}{late}.", reason=str(expired))

    def _expired(self) -> Any:
        """Return the `triton_kernels.comm.signals.Expired` of a timed-out wait, or None."""
        return next(filter(None, (slot.workspace.expired() for slot in self._all_slots())), None)

    def _leave(self, slot: _Slot, why: str) -> None:
        # Also after the loss of a peer, although every rank detects it: a peer may wait for this rank in a call whose
        # data from the lost rank has arrived.
        try:
            with UseOnGpu(self, slot, exclusive=False) if slot.on_gpu else nullcontext():
                slot.workspace.leave(self._lost)
        except Exception as error:  # the device has failed; the caller already raises the original error
            _LOG.warning(
                "Rank %d could not notify its peers, which will wait until their deadline (%s).", self.rank, error
            )

    def _lose(self, slot: _Slot, rank: int) -> None:
        slot.workspace.stop_waiting(rank)

    def _on_peer_lost(self, rank: int) -> None:
        super()._on_peer_lost(rank)  # first, because querying an event below may raise while another thread captures
        # Not an error at the end of a program, when ranks exit one after the other with no work in flight.
        if any(slot.turn.under_way() for slot in self._all_slots()):
            _LOG.error(
                "Rank %d lost rank %d, whose process has exited. Results of the calls in flight are wrong.",
                self.rank,
                rank,
            )

    def _slot(self, kind: str, nbytes: int, op: str) -> _Slot:
        old = self._slots.get(kind)
        if old is not None and old.nbytes >= nbytes:
            return old
        have = f"of {old.nbytes} bytes" if old is not None else "that is not there yet"
        check_not_capturing(self.device, f"{op} needs a workspace of {nbytes} bytes and the group has one {have}")
        size = rounded(nbytes)
        # A rank must not free memory to which a peer may still write. So each rank waits for its own kernels, and then
        # creates the new workspace, which waits for all ranks. It waits for this slot's last op only, because if ranks
        # are threads, other streams of the GPU may wait for this rank.
        if old is not None and old.turn.done is not None:
            old.turn.done.synchronize()
        with self._creation_scope(size, op):
            buffer, handle = self._memory.allocate(size)
            options = {"timeout_seconds": _timeout_seconds(), "rescue": self._memory.rescue}
            workspace = self._kinds[kind](buffer, handle, **options)
        slot = _Slot(workspace, size, workspace.state.is_cuda)
        return self._keep(kind, slot, old if old is not None and old.captured else None)


class Use:
    """Context manager returned by `Workspaces.use`. A class, because a generator takes as long as a launch."""

    __slots__ = ("_slot", "_workspaces")

    def __init__(self, workspaces: Workspaces, slot: _Slot) -> None:
        self._workspaces = workspaces
        self._slot = slot

    def __enter__(self) -> Any:
        return self._slot.workspace

    def __exit__(self, error: object, *details: object) -> bool | None:
        if error is None:
            self._workspaces.raise_failure()
        return None


class UseOnGpu(Use):
    """`Use` on a GPU, which also serializes the op with other ops and sets the current device."""

    __slots__ = ("_before", "_capturing", "_turns")

    def __init__(self, workspaces: Workspaces, slot: _Slot, exclusive: bool) -> None:
        super().__init__(workspaces, slot)
        self._turns = (slot.turn, workspaces._turn) if exclusive else (slot.turn,)

    def __enter__(self) -> Any:
        index = self._workspaces._memory.device.index
        self._before = torch.cuda._exchange_device(index)
        self._capturing = torch.cuda.is_current_stream_capturing()
        self._slot.captured |= self._capturing
        if not self._capturing:  # a capture cannot wait for events recorded outside of it
            stream = torch.cuda.current_stream(index)
            for turn in self._turns:
                if turn.done is not None and turn.stream != stream:
                    stream.wait_event(turn.done)
        return self._slot.workspace

    def __exit__(self, *_: object) -> bool | None:
        # Also after an exception, because a kernel that was launched before it runs.
        index = self._workspaces._memory.device.index
        if not self._capturing:
            stream = torch.cuda.current_stream(index)
            done = self._slot.done
            if done is None:
                done = self._slot.done = torch.cuda.Event()
            done.record(stream)
            for turn in self._turns:
                turn.stream, turn.done = stream, done
        # Not set_device, which would create a context on a GPU that is only this process's default.
        torch.cuda._maybe_exchange_device(self._before)
        return None


def rounded(nbytes: int, least: int = 1 << 20, step: int = 64 << 20) -> int:
    """Round `nbytes` up to a power of two (at least `least`), or above `step` to a multiple of `step`."""
    size = max(least, 1 << max(0, nbytes - 1).bit_length())
    return size if size <= step else -(-nbytes // step) * step


def _timeout_seconds() -> float:
    return min(settings.timeout_seconds(), LONGEST_SECONDS)


# Ops of all groups of a device are serialized. Otherwise two ops on two streams could deadlock: each fills one GPU with
# kernels that wait for a kernel on another GPU, which has no free multiprocessors left.
_turns: WeakValueDictionary[Hashable, _Turn] = WeakValueDictionary()
