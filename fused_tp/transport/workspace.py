"""The memory that a group's fused kernels work in: made when first needed, grown when too small, one op at a time.

There is one workspace for each kind of op. Ops of one kind are serialized, as collectives of one NCCL communicator are,
and so are those of all groups of a device that are called on different streams: a kernel that waits for other ranks
needs all of its programs to get their turn on the GPU, on every rank.

CUDA graphs: a captured op keeps the workspace that it was captured with, so that has to be there and large enough
before: run the same ops once outside of the capture, as torch asks for anyway. A workspace that a graph may still use
is never freed, also when later ops outgrow it. Within a capture, and between replays and other ops, it is the caller
who orders: one op of a group at a time.
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

from fused_tp.runtime import settings
from fused_tp.runtime.errors import (
    CollectiveTimeoutError,
    FusedTPError,
    PeerLostError,
    RankMismatchError,
    raised_midway,
)
from fused_tp.transport.failure import GroupCalls
from fused_tp.transport.peer_watch import PeerWatch
from fused_tp.transport.symm_mem import KernelMemory, check_not_capturing, is_capturing

_LOG = logging.getLogger("fused_tp")
SlotT = TypeVar("SlotT")

_LEAST_BYTES = 1 << 20
LONGEST_SECONDS = 9e9  # kernels count nanoseconds in 63 bits
_ROUNDED_TO = 64 << 20  # above it a workspace is a multiple of it, below it a power of two


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
    done: torch.cuda.Event | None = None  # behind its last op; recorded anew each time, since making one costs


class GroupKernels(ABC, Generic[SlotT]):
    """What the kernels, or the copy engines, of one group on one device have in common: their memory, in slots by kind
    of op, and how they fail.

    A failure is found by a later call, in `raise_if_failed`, and by the thread that watches the peers' processes.
    Kernels and `messages` of the group, where it has any, fail together: peers that wait for either are notified at
    once. `what` names the kernels in errors.
    """

    def __init__(self, memory: KernelMemory, what: str, messages: GroupCalls | None) -> None:
        self._memory = memory
        self.rank, self.world_size, self.device = memory.rank, memory.world_size, memory.device
        self._what = what
        self._messages = messages
        self._slots: dict[str, SlotT] = {}
        self._outgrown: list[SlotT] = []  # those that a CUDA graph, or a call that has not ended, may still use
        self._lost: list[int] = []  # in the order in which they ended
        self._logged = False
        self._others: WeakSet[GroupKernels[Any]] = WeakSet()
        self.calls = 0  # that have begun and that peers have a part of
        self.broken: FusedTPError | None = None  # why they are unusable

    def watch(self) -> None:
        """Watch the peers' processes from now on."""
        self._watch = PeerWatch(self, self._memory.pids, type(self)._peer_lost, type(self)._look)

    def fail_with(self, others: GroupKernels[Any]) -> None:
        """From now on a failure of these, or of `others` of the same ranks, is one of both: a rank that gives up in the
        ones may be waited for in the others."""
        self._others.add(others)
        others._others.add(self)

    def abort(self, sentence: str) -> None:
        """No more calls, for a reason of the caller's; whatever of a peer's waits for one ends at once."""
        if self.broken is None:
            self._fail(self._error(FusedTPError, "{reason}", reason=sentence))

    def raise_if_failed(self) -> None:
        """Raises what an earlier call has failed with, or that a peer has ended; waits for nothing that still runs.

        Raises:
            CollectiveTimeoutError: a wait has expired.
            PeerLostError: a peer's process has ended.
            FusedTPError: that was so before, or a peer has failed.
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
        """Raises what a call has failed with, if any has."""
        failure = self._failure()
        if failure is None:
            return
        # A peer's death is the cause where both are there: others may have given up for want of it.
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
        """Raises where messages of the group have failed: its ranks may no longer mean the same launch."""
        if self._messages is not None and self._messages.broken is not None:
            raise self._messages.unusable()

    @contextmanager
    def abort_scope(self, op: str) -> Iterator[None]:
        """Scope of one op of several launches.

        Kernels do not compare what the ranks call. One rank that raises between two launches and goes on, with the next
        batch say, would have its next call taken for the one that its peers wait in, and the numbers of all would be
        wrong. So it aborts the group.
        """
        before, messages = self.calls, self._messages
        try:
            with nullcontext() if messages is None else messages.abort_scope(op):
                yield
        except RankMismatchError:  # which all ranks raise together
            raise
        except BaseException as error:
            # What is being captured has not run: no peer has had a part of it.
            if self.calls != before and not is_capturing(self.device):
                if messages is not None and messages.broken is None:
                    messages.abort_midway(messages.last_call(op), error)
                self.abort(f"{op} {raised_midway(error)}")
            elif messages is not None and messages.broken is not None:  # all of it went by messages
                self.abort(str(messages.broken))
            raise

    def _fail(self, error: FusedTPError) -> str | None:
        """They are unusable from now on, and peers know. Returns what a peer has said that failed before."""
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
        # A copy: the watch's thread looks at them while a call may make another.
        return [*self._slots.values(), *self._outgrown]

    def _keep(self, kind: str, slot: SlotT, outgrown: SlotT | None) -> SlotT:
        """`slot`, which is that of `kind` from now on; the one before it may still be used where that is `outgrown`."""
        if outgrown is not None:
            self._outgrown.append(outgrown)
        self._slots[kind] = slot
        for rank in self._lost:  # meanwhile; the watch has not seen this slot
            self._lose(slot, rank)
        return slot

    @contextmanager
    def _making(self, nbytes: int, op: str) -> Iterator[None]:
        """Scope in which all ranks make a workspace together."""
        try:
            yield
        except Exception as error:
            # Others may have got further; from here on the ranks would not mean the same by their calls.
            sentence = f"making a workspace of {nbytes} bytes for {op} failed ({type(error).__name__}: {{reason}})."
            self._fail(self._error(FusedTPError, sentence, reason=str(error)))
            raise

    # -- of the subclass ----------------------------------------------------------------------------------------------

    @abstractmethod
    def _failure(self) -> FusedTPError | None:
        """What a call has failed with, if any has, as an error of this rank."""

    @abstractmethod
    def _leave(self, slot: SlotT, why: str) -> None:
        """End the waits of peers for this rank in that memory."""

    @abstractmethod
    def _lose(self, slot: SlotT, rank: int) -> None:
        """End this rank's waits for that one, whose process has ended."""

    # -- called by the watch's thread ---------------------------------------------------------------------------------

    def _peer_lost(self, rank: int) -> None:
        self._lost.append(rank)
        for slot in self._all():
            self._lose(slot, rank)

    def _look(self) -> None:
        """Logs at once what the next call is going to raise: there may be none, and results are wrong already."""
        if self._logged or self.device.type == "cpu" or self.broken is not None:
            return
        if (failure := self._failure()) is not None:
            self._logged = True
            _LOG.error("%s Results of the group's %s that were under way are wrong.", failure, self._what)


class Workspaces(GroupKernels[_Slot]):
    """The workspaces of one group on one device, by kind of op. `kinds[kind]` makes one of a buffer, a handle,
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
        """A workspace of at least `nbytes` for what is launched in the scope. `exclusive=False` where that leaves room
        for any other op beside it.

        Raises:
            RuntimeError: the workspace would have to grow while a CUDA graph is being captured.
            Also what `raise_if_failed` raises, and on a CPU, on leaving, what this op has failed with.
        """
        self.raise_if_failed()
        slot = self._slot(kind, nbytes, op)
        slot.workspace.timeout_ns = int(_timeout_seconds() * 1e9)
        self.calls += 1
        return UseOnGpu(self, slot, exclusive) if slot.on_gpu else Use(self, slot)

    def in_turn(self) -> AbstractContextManager[Any]:
        """Scope of launches that wait for other ranks in other memory than workspaces, in turn with those that do."""
        return UseOnGpu(self, self._elsewhere, exclusive=True) if self._elsewhere.on_gpu else nullcontext()

    def reserve(self, kind: str, nbytes: int, op: str) -> None:
        """Makes room for an op that may come later, as `use` would. A collective call."""
        self.raise_if_failed()  # else it would wait for peers that have left
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
        # A rank notified by a peer that gave up, or that has ended, did not wait until the deadline.
        late = "" if expired.gave_up or self._lost else f", in {settings.timeout_seconds():g} s (FUSED_TP_TIMEOUT)"
        return self._error(CollectiveTimeoutError, f"{{reason}}{late}.", reason=str(expired))

    def _expired(self) -> Any:
        """A `triton_kernels.comm.workspace.Expired`, or None."""
        return next(filter(None, (slot.workspace.expired() for slot in self._all())), None)

    def _leave(self, slot: _Slot, why: str) -> None:
        # Also of a loss, of which all ranks know by themselves: the lost rank may have done its part of a call in which
        # a peer waits for this one.
        try:
            with UseOnGpu(self, slot, exclusive=False) if slot.on_gpu else nullcontext():
                slot.workspace.leave(self._lost)
        except Exception as error:  # of a device that has failed; why this rank gives up is being raised already
            _LOG.warning("Rank %d could not tell its peers: they wait until their deadline (%s).", self.rank, error)

    def _lose(self, slot: _Slot, rank: int) -> None:
        slot.workspace.stop_waiting(rank)

    def _peer_lost(self, rank: int) -> None:
        super()._peer_lost(rank)  # all slots first: to ask for an event may raise, while another thread captures
        # At the end of a program ranks end one after the other, and nothing is under way any more.
        if any(slot.turn.under_way() for slot in self._all()):
            _LOG.error("Rank %d lost rank %d, which has ended. Results it had a part in are wrong.", self.rank, rank)

    def _slot(self, kind: str, nbytes: int, op: str) -> _Slot:
        old = self._slots.get(kind)
        if old is not None and old.nbytes >= nbytes:
            return old
        have = f"of {old.nbytes} bytes" if old is not None else "that is not there yet"
        check_not_capturing(self.device, f"{op} needs a workspace of {nbytes} bytes and the group has one {have}")
        size = rounded(nbytes, _LEAST_BYTES, _ROUNDED_TO)
        # No rank frees what another may still write to: each waits for its own kernels, then making the new workspace
        # waits for all ranks. For its stream only: where ranks are threads, other streams wait for this rank.
        if old is not None and old.turn.done is not None:
            old.turn.done.synchronize()
        with self._making(size, op):
            buffer, handle = self._memory.allocate(size)
            how = {"timeout_seconds": _timeout_seconds(), "rescue": self._memory.rescue}
            workspace = self._kinds[kind](buffer, handle, **how)
        slot = _Slot(workspace, size, workspace.state.is_cuda)
        return self._keep(kind, slot, old if old is not None and old.captured else None)


class Use:
    """One op's use of a workspace, from `Workspaces.use`. A class: a generator costs as much as a launch."""

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
    """In turn with other ops, on the device of the workspace."""

    __slots__ = ("_before", "_capturing", "_turns")

    def __init__(self, workspaces: Workspaces, slot: _Slot, exclusive: bool) -> None:
        super().__init__(workspaces, slot)
        self._turns = (slot.turn, workspaces._turn) if exclusive else (slot.turn,)

    def __enter__(self) -> Any:
        index = self._workspaces._memory.device.index
        self._before = torch.cuda._exchange_device(index)
        self._capturing = torch.cuda.is_current_stream_capturing()
        self._slot.captured |= self._capturing
        if not self._capturing:  # there to wait for something outside is not allowed
            stream = torch.cuda.current_stream(index)
            for turn in self._turns:
                if turn.done is not None and turn.stream != stream:
                    stream.wait_event(turn.done)
        return self._slot.workspace

    def __exit__(self, *_: object) -> bool | None:
        # Also where something behind a launch has failed: the kernel runs.
        index = self._workspaces._memory.device.index
        if not self._capturing:
            stream = torch.cuda.current_stream(index)
            done = self._slot.done
            if done is None:
                done = self._slot.done = torch.cuda.Event()
            done.record(stream)
            for turn in self._turns:
                turn.stream, turn.done = stream, done
        # Not set_device: it would make a context on a GPU that this process only has as its default.
        torch.cuda._maybe_exchange_device(self._before)
        return None


def rounded(nbytes: int, least: int, step: int) -> int:
    """How much to make where `nbytes` are needed: up to `step` a power of two, above it a multiple of that."""
    size = max(least, 1 << max(0, nbytes - 1).bit_length())
    return size if size <= step else -(-nbytes // step) * step


def _timeout_seconds() -> float:
    return min(settings.timeout_seconds(), LONGEST_SECONDS)


# Of ops that wait for other ranks, on two streams, two could fill two GPUs with kernels that each wait for one which
# finds no room. So those of all groups of a device are serialized.
_turns: WeakValueDictionary[Hashable, _Turn] = WeakValueDictionary()
