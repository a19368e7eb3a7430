"""The calls of one group, numbered, and how they fail: soon, on all ranks, and with one reason.

A rank that can no longer take part says why on the group's noticeboard and leaves: whoever waits for it, now or later,
raises what it has said. This is what all transports of messages have in common; how one leaves (`_depart`), and
what it knows of peers that are gone (`closed_peers`), is its own.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from fused_tp.runtime import settings
from fused_tp.runtime.errors import (
    CollectiveTimeoutError,
    FusedTPError,
    PeerLostError,
    RankMismatchError,
    raised_half_way,
)
from fused_tp.runtime.group import Group, GroupSlot
from fused_tp.transport.store import ANSWER_SECONDS, BoundedStore

LOOK_SECONDS = 0.5  # how often a rank that waits looks whether a peer has given up
REASON_SECONDS = 0.5  # how long a rank that was left alone looks for a reason other than a peer's death


@dataclass(frozen=True)
class Call:
    """A movement that has been started: its op, its number in the group, and when (time.perf_counter)."""

    op: str
    number: int
    started: float


class GroupCalls:
    """What this rank has called in its group, and whether the group still works.

    Args:
        group: of the ranks; of torch.distributed.
        backend: what moves the bytes, as sentences name it.
        board: name of this group's notices in its store.

    Attributes:
        calls: how many have been started.
        broken: why the group is unusable, in a sentence; None while it is not.
    """

    def __init__(self, group: Group, backend: str, board: str) -> None:
        if group.process_group is None:
            raise ValueError("torch.distributed is not initialised: there is no group to communicate in.")
        self.group = group
        self.process_group = group.process_group
        self.rank = group.rank
        self.world_size = group.size
        self.backend = backend
        self.calls = 0
        self.broken: str | None = None
        self._ops: deque[str] = deque(maxlen=16)
        store = dist.distributed_c10d._get_process_group_store(group.process_group)
        self.board = Noticeboard(store, board, group.rank, group.size)
        _CALLS[group].append(self)

    # -- calls --------------------------------------------------------------------------------------------------------

    def begin(self, op: str) -> Call:
        """One more call.

        Raises:
            FusedTPError: the group is unusable.
        """
        if self.broken is not None:
            raise self.unusable()
        return self._count(op)

    def _count(self, op: str) -> Call:
        self.calls += 1
        self._ops.append(op)
        return Call(op, self.calls, time.perf_counter())

    @contextmanager
    def several(self, op: str) -> Iterator[None]:
        """Around all of an op that takes several exchanges: what is raised half-way gives the group up.

        Half-way is after the first exchange has been started. Peers have then had a part of the op, and cannot tell
        this rank's next call, or a second try, from what they wait for: they would take the one's data for the other's.
        So they are told at once and raise PeerLostError, which says what was raised here; here the error goes on as it
        is, and later calls say that the group is unusable. Before the first exchange nothing has happened: the error
        goes on, and the op may be called again. So it does with a RankMismatchError, which all ranks raise together.
        May be nested. On torch's own NCCL peers cannot be told: they raise at the deadline of its watchdog.

        Example:
            transport.check(op, dims, x.dtype, x.device)
            with transport.several(op):
                arriving = transport.shift(op, x, buffer, 1)
                partial = x @ w                                 # may raise, out of memory say
                return partial + arriving.wait() @ w
        """
        before, started = self._started(), time.perf_counter()
        try:
            yield
        except RankMismatchError:
            raise
        except BaseException as error:
            if self.broken is None and self._started() != before:
                self.raised_half_way(Call(op, self.calls, started), error)
            raise

    def _started(self) -> int:
        """Counts the exchanges that peers may have had a part of."""
        return self.calls

    # -- failing ------------------------------------------------------------------------------------------------------

    def raised_half_way(self, call: Call, error: BaseException) -> None:
        """Give the group up because of an error that is no peer's doing."""
        self.give_up(FusedTPError, call, f"{self.where(call)} {raised_half_way(error)}")

    def give_up(self, kind: type[FusedTPError], call: Call, sentence: str) -> FusedTPError:
        """The error to raise, and what peers are to raise too. From here on the group is unusable, and they know."""
        self.broken = sentence
        self.leave(call, error=kind.__name__, at=call.number, sentence=sentence)
        return kind(sentence)

    def end(self, why: str) -> None:
        """Leave the group for a reason outside of it. Without effect where it is broken."""
        if self.broken is None:
            call = Call("a call", self.calls, time.perf_counter())
            self.give_up(FusedTPError, call, f"{self.where(call)} failed: {why}")

    def followed(self, call: Call) -> FusedTPError:
        """What a peer has raised that gave the group up, as an error of this rank."""
        self.broken = f"{self.where(call)}: a peer has given the group up."
        self.leave(call)
        cause = who_gave_up(self.board.read())
        kind: type[FusedTPError] = PeerLostError
        if cause is not None:
            rank, notice = cause
            said = notice.sentence
            if notice.error == CollectiveTimeoutError.__name__:
                kind = CollectiveTimeoutError
                said += self.missing(notice.at, notice.op(notice.at) or "another op", rank)
            self.broken = f"{self.where(call)}: rank {rank} has given the group up. It said: {said}"
        return kind(self.broken)

    def said_by_peer(self) -> str | None:
        """What another rank has said that gave the group up, as a sentence; None where none has."""
        cause = who_gave_up(self.board.read())
        return (
            None
            if cause is None or cause[0] == self.rank
            else f"Rank {cause[0]} has given the group up. It said: {cause[1].sentence}"
        )

    def lost(self, call: Call, reason: str = "") -> FusedTPError:
        """A connection was closed: by a peer that died, or by one that gave up and says why, if not always before.

        Args:
            reason: what the backend says of it, if it does.
        """
        closed = self.closed_peers()  # before others close theirs too
        self.post(call, failed=True)
        notices = self.board.read_until(lambda found: who_gave_up(found) is not None, REASON_SECONDS)
        if who_gave_up(notices) is not None:
            return self.followed(call)
        dead = [rank for rank in closed if rank not in notices or not notices[rank].failed]
        who = f"rank{'s' if len(dead) > 1 else ''} {', '.join(map(str, dead))}" if dead else "a peer"
        sentence = f"{self.where(call)} lost {who}: died, or closed its connections.{self._says(reason)}"
        return self.give_up(PeerLostError, call, sentence)

    def timed_out(self, call: Call, reason: str = "") -> FusedTPError:
        """The deadline has passed. Names who was late, once the others have had the time to say where they are."""
        sentence = f"{self.where(call)} waited {self.how_long(call)}"
        failed = self.give_up(CollectiveTimeoutError, call, sentence)
        self.broken = f"{sentence}{self.missing(call.number, call.op)}{self._says(reason)}"
        return type(failed)(self.broken)

    def _says(self, reason: str) -> str:
        return reason and f" {self.backend} says: {reason}"

    def leave(self, call: Call, **how: Any) -> None:
        """Tell the peers that this rank's part of the group has ended, those too who cannot read its notice."""
        try:
            self.post(call, failed=True, **how)
        finally:
            self._depart()

    def post(self, call: Call, **how: Any) -> None:
        """Put up a notice of where this rank is."""
        waited = time.perf_counter() - call.started
        self.board.post(Notice(self.calls, list(self._ops), waited, **how))

    def missing(self, number: int, op: str, waiting: int | None = None) -> str:
        """Who was late for a call that rank `waiting`, by default this one, has waited for: the rest of a sentence."""
        ranks = [rank for rank in range(self.world_size) if rank != (self.rank if waiting is None else waiting)]
        # Who waits too is woken by the closed connections, or looks within LOOK_SECONDS, and then leaves its notice.
        notices = self.board.read_until(
            lambda found: all(rank in found and found[rank].failed for rank in ranks), 2 * LOOK_SECONDS
        )
        if not self.board.answers:
            return ", and some rank had not arrived; the group's store, which would tell which, does not answer."
        return missing(notices, ranks, number, op)

    def where(self, call: Call) -> str:
        return f"{call.op} (call {call.number} of group {self.group.name!r}) on rank {self.rank} of {self.world_size}"

    def how_long(self, call: Call) -> str:
        """The call's time, as the deadline where it was that."""
        waited, deadline = time.perf_counter() - call.started, settings.timeout_seconds()
        return f"{deadline:g} s (FUSED_TP_TIMEOUT)" if waited > 0.9 * deadline else f"{waited:.1f} s"

    def unusable(self) -> FusedTPError:
        return FusedTPError(
            f"Group {self.group.name!r} is unusable since an earlier failure: {self.broken} "
            "Destroy the process group and make a new one."
        )

    # -- of the transport ---------------------------------------------------------------------------------------------

    def _depart(self) -> None:
        """End all that is under way in the group, here and at the peers."""

    def closed_peers(self) -> list[int]:
        """Ranks known to have died, or to have left. Never waits."""
        return []


def calls_of(group: Group) -> list[GroupCalls]:
    """The transports that count their calls of `group`."""
    return list(_CALLS[group])


_CALLS: GroupSlot[list[GroupCalls]] = GroupSlot(lambda group: [])


# ---------------------------------------------------------------------------------------------------------------------
# What the ranks of a group tell each other through its store once a movement does not end: how far each has come.
#
# torch.distributed does not say which ranks a wait was in vain for. So a rank that waits long, or fails, leaves a
# notice;
# who raises reads the notices of all, and names the ranks that have left none or are at an earlier call. Nothing is
# written while all goes well, since a round trip to the store costs more than many an op.
#
# Asking the store can itself block for ever (its host may be stopped), so it is asked with a deadline
# (`bounded_store`).

T = TypeVar("T")

_POLL_SECONDS = 0.02
# A rank that had been in the call for less than this when it failed came only after the others had given up: its call
# ended at once, but a busy machine may have taken long to get there. Clocks of several hosts would compare no better.
_LATE_SECONDS = 0.5


@dataclass(frozen=True)
class Notice:
    """Where one rank is.

    Attributes:
        call: the last call that it has started.
        ops: the ops of the last calls it has started, up to that one.
        waited: seconds since it had started the call that it waits for, or that failed.
        failed: its part of the group has ended; else it only waits.
        error: the class of the error it raises, where it gave up by itself and not because of others.
        at: the call that error is about.
        sentence: what the error says.
    """

    call: int
    ops: Sequence[str]
    waited: float
    failed: bool = False
    error: str = ""
    at: int = 0
    sentence: str = ""

    def op(self, call: int) -> str | None:
        """The op it started as `call`; None where that is unknown."""
        back = self.call - call
        return self.ops[-1 - back] if 0 <= back < len(self.ops) else None


class Noticeboard:
    """The notices of one group. No method raises.

    Attributes:
        answers: the store has answered what it was asked last. Else nothing is known.
    """

    def __init__(self, store: dist.Store, name: str, rank: int, world_size: int) -> None:
        self._store = BoundedStore(store)
        self._rank = rank
        self._world_size = world_size
        self.answers = True
        self._prefix: str | None = None

        # A store may outlive its group and serve another of the same name: each rank counts its groups there.
        # Once: where it is not known whether that was counted, this board stays blank. Late is well.
        def join(store: dist.Store) -> None:
            self._prefix = f"{name}/{store.add(f'{name}/generation/{rank}', 1)}"

        self._ask(join, None)

    def post(self, notice: Notice) -> None:
        """Put up this rank's notice, in place of an earlier one."""
        text = json.dumps(asdict(notice))

        def write(store: dist.Store) -> None:
            store.set(self._key(f"rank/{self._rank}"), text)
            if notice.error:
                store.set(self._key("given_up"), "")

        self._ask(write, None)

    def given_up(self) -> bool:
        """Whether some rank has given the group up."""
        return self._ask(lambda store: store.check([self._key("given_up")]), False)

    def read(self) -> dict[int, Notice]:
        """The notices there are, by rank."""
        return self._ask(self._read, {})

    def read_until(self, enough: Callable[[Mapping[int, Notice]], bool], seconds: float) -> dict[int, Notice]:
        """The notices once they are enough, or those there are after `seconds`."""
        deadline = time.perf_counter() + seconds
        while True:
            notices = self.read()
            if enough(notices) or time.perf_counter() > deadline or not self.answers:
                return notices
            time.sleep(_POLL_SECONDS)  # a store has no wait for whichever notice comes next

    def _read(self, store: dist.Store) -> dict[int, Notice]:
        found = {}
        for rank in range(self._world_size):
            key = self._key(f"rank/{rank}")
            if store.check([key]):
                found[rank] = Notice(**json.loads(store.get(key)))
        return found

    def _key(self, what: str) -> str:
        if self._prefix is None:
            raise RuntimeError("This rank does not know which of the store's groups of this name is its own.")
        return f"{self._prefix}/{what}"

    def _ask(self, question: Callable[[dist.Store], T], unknown: T) -> T:
        try:
            answer = self._store.ask(question, ANSWER_SECONDS)
        except Exception:  # most likely its host is stopped, or has died; no reason not to raise what is being told
            self.answers = False
            return unknown
        self.answers = True
        return answer


def who_gave_up(notices: Mapping[int, Notice]) -> tuple[int, Notice] | None:
    """The rank that ended the group by itself, and its notice; one that lost a peer before one that timed out."""
    causes = [(rank, notice) for rank, notice in notices.items() if notice.error]
    return min(causes, key=lambda cause: (cause[1].error != "PeerLostError", cause[0]), default=None)


def missing(notices: Mapping[int, Notice], ranks: Sequence[int], call: int, op: str) -> str:
    """Which of `ranks` were late for `call`, or what else they did: the rest of a sentence "... waited 3 s".

    Example:
        >>> missing({1: Notice(4, ["all_gather"], 9.0)}, [1, 2], 5, "all_reduce")
        ' for ranks 1 (last heard of at call 4, all_gather) and 2, which had not arrived.'
    """
    late, different = [], []
    for rank in ranks:
        notice = notices.get(rank)
        if notice is None or (notice.failed and notice.waited < _LATE_SECONDS):
            late.append(f"{rank}")
        elif notice.call < call:
            late.append(f"{rank} (last heard of at call {notice.call}, {notice.ops[-1]})")
        elif notice.op(call) not in (None, op):
            different.append(f"rank {rank}'s call {call} is {notice.op(call)}, not {op}")
    if late:
        said = f" for rank{'s' if len(late) > 1 else ''} {_listed(late)}, which had not arrived."
    elif different:
        said = ", though all ranks had arrived."
    else:
        said = ", though all ranks had arrived: the data did not come, or not all ranks agree on their shapes."
    if different:
        said += f" But {_listed(different)}: all ranks of a group must call the same ops in the same order."
    return said


def _listed(words: Sequence[Any]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


# ---------------------------------------------------------------------------------------------------------------------
# Notices when a process on this host ends, however it ends, within milliseconds.
#
# A kernel that waits for a peer cannot know that the peer is gone, and would wait for its deadline. A thread of this
# process watches the peers instead, through descriptors that the kernel of the operating system makes readable when the
# process ends (pidfd_open, Linux 5.3).

_TICK_SECONDS = 0.2


def own_process() -> tuple[str, int]:
    """Names this process to others: the namespace that its number counts in, and that number."""
    try:
        return os.readlink("/proc/self/ns/pid"), os.getpid()
    except OSError:
        return "", os.getpid()


def watchable(processes: Mapping[int, tuple[str, int]]) -> dict[int, int]:
    """Of processes by rank, as `own_process` names them, the numbers of those that can be watched from here."""
    namespace, own = own_process()
    if not namespace or not hasattr(os, "pidfd_open"):
        return {}
    return {
        rank: pid
        for rank, (where, pid) in processes.items()
        if where == namespace and pid != own and Path(f"/proc/{pid}").exists()
    }


_exiting = threading.Event()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """A thread that still calls torch while the interpreter goes away ends the process with an abort."""
    _exiting.set()
    for thread in list(_threads):
        thread.join(5 * _TICK_SECONDS)


class PeerWatch:
    """A thread that calls back when a peer has ended, and regularly besides; it ends with its owner.

    Args:
        owner: while it is alive, the watch runs. The callbacks get it, and must not keep it themselves.
        pids: process numbers by rank.
        lost: `lost(owner, rank)`, once for each peer that has ended.
        tick: `tick(owner)`, about five times a second.
    """

    def __init__(
        self,
        owner: object,
        pids: Mapping[int, int],
        lost: Callable[..., None],
        tick: Callable[..., None],
    ) -> None:
        self._owner = weakref.ref(owner)
        self._lost, self._tick = lost, tick
        self._ranks: dict[int, int] = {}
        for rank, pid in pids.items():
            try:
                self._ranks[os.pidfd_open(pid)] = rank
            except OSError:  # gone already, or not ours to watch
                if not Path(f"/proc/{pid}").exists():
                    lost(owner, rank)
        thread = threading.Thread(target=self._run, name="fused_tp peer watch", daemon=True)
        _threads.add(thread)
        thread.start()

    def _run(self) -> None:
        poll = select.poll()
        for descriptor in self._ranks:
            poll.register(descriptor, select.POLLIN)
        while True:
            ended = poll.poll(_TICK_SECONDS * 1000)
            owner = self._owner()
            if owner is None or _exiting.is_set():
                break
            for descriptor, _ in ended:
                poll.unregister(descriptor)
                self._lost(owner, self._ranks.pop(descriptor))
                os.close(descriptor)
            self._tick(owner)
            del owner
        for descriptor in self._ranks:
            with contextlib.suppress(OSError):
                os.close(descriptor)
