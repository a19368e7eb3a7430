"""Workspaces of a group's fused kernels: made when first needed, grown when too small, used by one op at a time.

There is one workspace for each kind of op. Ops of one kind are serialized, as collectives of one NCCL communicator are.
So are ops of all groups of a device that are called on different streams: a kernel that waits for other ranks requires
that all of its programs get scheduled on the GPU, on every rank.

CUDA graphs: a captured op keeps the workspace that it was captured with, which must exist and be large enough before:
run the same ops once outside of the capture, as torch requires anyway. A workspace that a graph may still use is never
freed, even if later ops outgrow it. Within a capture, and between replays and other ops, the caller must order the
calls: one op of a group at a time.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import WeakSet, WeakValueDictionary

import torch

from fused_tp.backends.symmetric_memory.symm_mem import KernelMemory, check_not_capturing, is_capturing
from fused_tp.core import settings
from fused_tp.core.errors import (
    CollectiveTimeoutError,
    FusedTPError,
    PeerLostError,
    RankMismatchError,
    raised_midway,
)
from fused_tp.core.failure import GroupCalls
from fused_tp.core.peer_watch import PeerWatch

_LOG = logging.getLogger("fused_tp")
SlotT = TypeVar("SlotT")

_LEAST_BYTES = 1 << 20
LONGEST_SECONDS = 9e9  # kernels count nanoseconds in 63 bits
_ROUNDED_TO = 64 << 20  # a larger workspace is a multiple of it, a smaller one a power of two


@dataclass
class _Turn:
    """The most recently launched op among those that are serialized."""

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
    done: torch.cuda.Event | None = None  # behind its last op; recorded again each time, to save making one


class GroupKernels(ABC, Generic[SlotT]):
    """Base of the kernels, or the copy engines, of one group on one device: their memory, in slots by kind of op, and
    their failures.

    A failure is detected by a later call, in `raise_if_failed`, and by the thread that watches the peers' processes.
    Kernels and `messages` of the group, if it has any, fail together: peers that wait for either are notified at once.
    `what` names the kernels in errors.
    """

    def __init__(self, memory: KernelMemory, what: str, messages: GroupCalls | None) -> None:
        self._memory = memory
        self.rank, self.world_size, self.device = memory.rank, memory.world_size, memory.device
        self._what = what
        self._messages = messages
        self._slots: dict[str, SlotT] = {}
        self._outgrown: list[SlotT] = []  # slots that a CUDA graph, or a call that has not ended, may still use
        self._lost: list[int] = []  # ranks in the order in which they ended
        self._logged = False
        self._others: WeakSet[GroupKernels[Any]] = WeakSet()
        self.calls = 0  # calls that have begun and that peers take part in
        self.broken: FusedTPError | None = None  # why the kernels are unusable

    def watch(self) -> None:
        """Watch the peers' processes from now on."""
        self._watch = PeerWatch(self, self._memory.pids, type(self)._peer_lost, type(self)._look)

    def fail_with(self, others: GroupKernels[Any]) -> None:
        """Make these kernels and `others`, of the same ranks, fail together from now on: a rank that gives up in one of
        them may be waited for in the other."""
        self._others.add(others)
        others._others.add(self)

    def abort(self, sentence: str) -> None:
        """Refuse further calls, for a reason of the caller's; all waits of peers for this rank end at once."""
        if self.broken is None:
            self._fail(self._error(FusedTPError, "{reason}", reason=sentence))

    def raise_if_failed(self) -> None:
        """Raise the failure of an earlier call, or an error if a peer has ended; does not wait for running work.

        Raises:
            CollectiveTimeoutError: a wait has expired.
            PeerLostError: a peer's process has ended.
            FusedTPError: one of these was raised before, or a peer has failed.
        """
        if self.broken is not None:
            sentence = (
                f"The group's {self._what} are unusable since an earlier failure: {{cause}} Destroy the process group "
                "and make a new one."
            )
            raise self._error(FusedTPError, sentence, cause=self.broken)
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
        assert self.broken is not None
        raise self.broken.copy()

    def _error(self, kind: type[FusedTPError], sentence: str, **fields: Any) -> FusedTPError:
        return kind(sentence, rank=self.rank, size=self.world_size, **fields)

    def _loss(self) -> FusedTPError:
        lost = {self._lost[0]: ""}
        return self._error(PeerLostError, "Rank {rank} of {size} lost {missing}: it has ended.", missing=lost)

    def check_usable(self) -> None:
        """Raise if messages of the group have failed: its ranks may no longer mean the same launch."""
        if self._messages is not None and self._messages.broken is not None:
            raise self._messages.unusable()

    @contextmanager
    def abort_scope(self, op: str) -> Iterator[None]:
        """Scope of one op of several launches.

        Kernels do not compare the ranks' calls. If one rank raised between two launches and continued, with the next
        batch for example, its next call would be taken for the one that its peers wait in, and all results would be
        wrong. So the group is aborted.
        """
        before, messages = self.calls, self._messages
        try:
            with nullcontext() if messages is None else messages.abort_scope(op):
                yield
        except RankMismatchError:  # raised by all ranks together
            raise
        except BaseException as error:
            # Work that is being captured has not run, so no peer has taken part in it.
            if self.calls != before and not is_capturing(self.device):
                if messages is not None and messages.broken is None:
                    messages.abort_midway(messages.last_call(op), error)
                self.abort(f"{op} {raised_midway(error)}")
            elif messages is not None and messages.broken is not None:  # the whole op ran by messages
                self.abort(str(messages.broken))
            raise

    def _fail(self, error: FusedTPError) -> str | None:
        """Make the kernels unusable and notify peers. Returns the description of a peer's earlier failure, if any."""
        self.broken = error.copy()
        said = None
        try:
            if self._messages is not None:
                said = self._messages.peer_failure()
                self._messages.abort_because(str(error))
        finally:
            for slot in self._all():
                self._leave(slot, str(error))
            for others in self._others:
                others.abort(str(error))
        return said

    def _all(self) -> list[SlotT]:
        # A copy, because the watch's thread iterates over the slots while a call may make another.
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
    def _making(self, nbytes: int, op: str) -> Iterator[None]:
        """Scope in which all ranks together make a workspace."""
        try:
            yield
        except Exception as error:
            # Other ranks may have got further; from here on the ranks' calls would not match.
            sentence = f"making a workspace of {nbytes} bytes for {op} failed ({type(error).__name__}: {{reason}})."
            self._fail(self._error(FusedTPError, sentence, reason=str(error)))
            raise

    # -- implemented by subclasses ------------------------------------------------------------------------------------

    @abstractmethod
    def _failure(self) -> FusedTPError | None:
        """The failure of a call as an error of this rank, or None."""

    @abstractmethod
    def _leave(self, slot: SlotT, why: str) -> None:
        """End the waits of peers for this rank in the memory of `slot`."""

    @abstractmethod
    def _lose(self, slot: SlotT, rank: int) -> None:
        """End this rank's waits for `rank`, whose process has ended."""

    # -- called by the watch's thread ---------------------------------------------------------------------------------

    def _peer_lost(self, rank: int) -> None:
        self._lost.append(rank)
        for slot in self._all():
            self._lose(slot, rank)

    def _look(self) -> None:
        """Log now the error that the next call will raise: there may be no next call, and results are already wrong."""
        if self._logged or self.device.type == "cpu" or self.broken is not None:
            return
        if (failure := self._failure()) is not None:
            self._logged = True
            _LOG.error("%s Results of the group's %s that were under way are wrong.", failure, self._what)


class Workspaces(GroupKernels[_Slot]):
    """The workspaces of one group on one device, by kind of op. `kinds[kind]` makes one from a buffer, a handle,
    `timeout_seconds` and `rescue`, a stream that all kinds share.
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
        self._elsewhere = _Slot(None, 0, self.device.type == "cuda")
        self.watch()

    def use(self, kind: str, nbytes: int, op: str, *, exclusive: bool = True) -> Use:
        """A workspace of at least `nbytes` for launches inside the scope. With `exclusive=False` other ops may run at
        the same time; the op must leave them multiprocessors.

        Raises:
            RuntimeError: the workspace would have to grow while a CUDA graph is being captured.
            Also the errors of `raise_if_failed`; and on a CPU, on leaving the scope, the failure of this op.
        """
        self.raise_if_failed()
        slot = self._slot(kind, nbytes, op)
        slot.workspace.timeout_ns = int(_timeout_seconds() * 1e9)
        self.calls += 1
        return UseOnGpu(self, slot, exclusive) if slot.on_gpu else Use(self, slot)

    def in_turn(self) -> AbstractContextManager[Any]:
        """Scope of launches that wait for other ranks outside of workspaces; serialized with ops that use them."""
        return UseOnGpu(self, self._elsewhere, exclusive=True) if self._elsewhere.on_gpu else nullcontext()

    def reserve(self, kind: str, nbytes: int, op: str) -> None:
        """Allocate memory for an op that may follow, as `use` would. A collective call."""
        self.raise_if_failed()  # otherwise the allocation would wait for peers that have left
        self._slot(kind, nbytes, op)

    def raise_failure(self) -> None:
        expired = self._expired()
        if expired is None:
            return
        if not expired.gave_up or self._lost:
            super().raise_failure()
        if said := self._fail(self._error(CollectiveTimeoutError, "{reason}.", reason=str(expired))):
            self.broken = self._error(PeerLostError, "{reason}", reason=f"{expired}. {said}")
        self._raise_broken()

    def _failure(self) -> FusedTPError | None:
        expired = self._expired()
        if expired is None:
            return None
        # A rank that a peer's failure or end has notified did not wait until the deadline.
        late = "" if expired.gave_up or self._lost else f", in {settings.timeout_seconds():g} s (FUSED_TP_TIMEOUT)"
        return self._error(CollectiveTimeoutError, f"{{reason}}{late}.", reason=str(expired))

    def _expired(self) -> Any:
        """A `triton_kernels.comm.workspace.Expired`, or None."""
        return next(filter(None, (slot.workspace.expired() for slot in self._all())), None)

    def _leave(self, slot: _Slot, why: str) -> None:
        # After a loss too, which every rank notices by itself: the lost rank may have done its part of a call in which
        # a peer waits for this rank.
        try:
            with UseOnGpu(self, slot, exclusive=False) if slot.on_gpu else nullcontext():
                slot.workspace.leave(self._lost)
        except Exception as error:  # the device has failed; the reason why this rank gives up is being raised already
            _LOG.warning("Rank %d could not tell its peers: they wait until their deadline (%s).", self.rank, error)

    def _lose(self, slot: _Slot, rank: int) -> None:
        slot.workspace.stop_waiting(rank)

    def _peer_lost(self, rank: int) -> None:
        super()._peer_lost(rank)  # first for all slots, as querying an event may raise while another thread captures
        # At the end of a program ranks end one after the other, with nothing under way.
        if any(slot.turn.under_way() for slot in self._all()):
            _LOG.error("Rank %d lost rank %d, which has ended. Results it had a part in are wrong.", self.rank, rank)

    def _slot(self, kind: str, nbytes: int, op: str) -> _Slot:
        old = self._slots.get(kind)
        if old is not None and old.nbytes >= nbytes:
            return old
        have = f"of {old.nbytes} bytes" if old is not None else "that is not there yet"
        check_not_capturing(self.device, f"{op} needs a workspace of {nbytes} bytes and the group has one {have}")
        size = rounded(nbytes, _LEAST_BYTES, _ROUNDED_TO)
        # No rank may free memory that another may still write to: each waits for its own kernels, and making the new
        # workspace waits for all ranks. Waits for one stream only: if ranks are threads, others wait for this rank.
        if old is not None and old.turn.done is not None:
            old.turn.done.synchronize()
        with self._making(size, op):
            buffer, handle = self._memory.allocate(size)
            how = {"timeout_seconds": _timeout_seconds(), "rescue": self._memory.rescue}
            workspace = self._kinds[kind](buffer, handle, **how)
        slot = _Slot(workspace, size, workspace.state.is_cuda)
        return self._keep(kind, slot, old if old is not None and old.captured else None)


class Use:
    """One op's use of a workspace, from `Workspaces.use`. A class, because a generator costs as much as a launch."""

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
    """`Use` on a GPU: serialized with other ops there, on the device of the workspace."""

    __slots__ = ("_before", "_capturing", "_turns")

    def __init__(self, workspaces: Workspaces, slot: _Slot, exclusive: bool) -> None:
        super().__init__(workspaces, slot)
        self._turns = (slot.turn, workspaces._turn) if exclusive else (slot.turn,)

    def __enter__(self) -> Any:
        index = self._workspaces._memory.device.index
        self._before = torch.cuda._exchange_device(index)
        self._capturing = torch.cuda.is_current_stream_capturing()
        self._slot.captured |= self._capturing
        if not self._capturing:  # a capture may not wait for outside events
            stream = torch.cuda.current_stream(index)
            for turn in self._turns:
                if turn.done is not None and turn.stream != stream:
                    stream.wait_event(turn.done)
        return self._slot.workspace

    def __exit__(self, *_: object) -> bool | None:
        # Also after an exception behind a launch: the kernel runs.
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


def rounded(nbytes: int, least: int, step: int) -> int:
    """Size to allocate for `nbytes`: up to `step` a power of two, above it a multiple of `step`."""
    size = max(least, 1 << max(0, nbytes - 1).bit_length())
    return size if size <= step else -(-nbytes // step) * step


def _timeout_seconds() -> float:
    return min(settings.timeout_seconds(), LONGEST_SECONDS)


# Two ops on two streams that wait for other ranks could fill two GPUs with kernels that each wait for one without room.
# So such ops of all groups of a device are serialized.
_turns: WeakValueDictionary[Hashable, _Turn] = WeakValueDictionary()
