"""How a group of ranks fails: soon, on all ranks, and with one reason.

A rank that fails publishes its status with the error on the group's status board, which is in the group's store, and
leaves: it ends its part of whatever its peers wait in. A rank that waits for it notices one of these:

    what it notices                         what it raises
    a status with an error                  `abort_following_peer`: what that rank has said
    a closed connection, an ended process   the same where there is such a status, else `abort_peer_lost`
    nothing, until the deadline             `abort_timed_out`: names the ranks that had not arrived

torch.distributed does not say which ranks a wait is missing. So a rank that waits long publishes its status too,
and an error names the ranks without one, or with an earlier call. Nothing is written while all goes well: a round trip
to the store costs more than many an op.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from fused_tp.runtime import settings
from fused_tp.runtime.errors import (
    CollectiveTimeoutError,
    FusedTPError,
    PeerLostError,
    RankMismatchError,
    listed,
    raised_midway,
)
from fused_tp.runtime.group import Group, GroupSlot
from fused_tp.transport.store import ANSWER_SECONDS, BoundedStore, own_place

T = TypeVar("T")
_ErrorT = TypeVar("_ErrorT", bound=FusedTPError)

LOOK_SECONDS = 0.5  # how often a rank that waits looks whether a peer has failed
REASON_SECONDS = 0.5  # how long a rank that was left alone looks for a reason other than a peer's death
_POLL_SECONDS = 0.02
# A rank that had been in the call for less than this when it failed came only after the others had failed: its call
# ended at once, but a busy machine may have taken long to get there. Clocks of several hosts would compare no better.
_LATE_SECONDS = 0.5

_WHERE = "{op} (call {call} of group {group!r}) on rank {rank} of {size}"


# -- the status of ranks -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankStatus:
    """Where one rank is."""

    call: int  # the last one that it has started
    ops: Sequence[str]  # of the last calls it has started, up to that one
    waited: float  # seconds since it had started the call that it waits for, or that failed
    failed: bool = False  # its part of the group has ended; else it only waits
    error: FusedTPError | None = None  # what it raises, where it has failed by itself and does not follow a peer

    def op(self, call: int) -> str | None:
        """The op it started as `call`; None where that is unknown."""
        back = self.call - call
        return self.ops[-1 - back] if 0 <= back < len(self.ops) else None

    def to_json(self) -> str:
        return json.dumps({**vars(self), "error": self.error and self.error.as_dict()})

    @staticmethod
    def from_json(text: bytes) -> RankStatus:
        told = json.loads(text)
        return RankStatus(**{**told, "error": told["error"] and FusedTPError.from_dict(told["error"])})


class StatusBoard:
    """The statuses of one group's ranks, in its store. No method raises."""

    def __init__(self, store: dist.Store, name: str, rank: int, world_size: int) -> None:
        self._store = BoundedStore(store)
        self._rank = rank
        self._world_size = world_size
        self.answers = True  # the store has answered what it was asked last; else nothing is known
        self._prefix: str | None = None

        # Once: where it is not known whether that was counted, this rank publishes nothing. An answer may come late.
        def join(store: dist.Store) -> None:
            self._prefix = own_place(store, name, rank)

        self._ask(join, None)

    def post(self, status: RankStatus) -> None:
        """Publish this rank's status, in place of an earlier one."""

        def write(store: dist.Store) -> None:
            store.set(self._key(f"rank/{self._rank}"), status.to_json())
            if status.error is not None:
                store.set(self._key("failed"), "")

        self._ask(write, None)

    def has_failure(self) -> bool:
        """Whether some rank has failed by itself."""
        return self._ask(lambda store: store.check([self._key("failed")]), False)

    def read(self) -> dict[int, RankStatus]:
        """The statuses there are, by rank."""
        return self._ask(self._read, {})

    def read_until(self, enough: Callable[[Mapping[int, RankStatus]], bool], seconds: float) -> dict[int, RankStatus]:
        """The statuses once they are enough, or those there are after `seconds`."""
        deadline = time.perf_counter() + seconds
        while True:
            statuses = self.read()
            if enough(statuses) or time.perf_counter() > deadline or not self.answers:
                return statuses
            time.sleep(_POLL_SECONDS)  # a store has no wait for whichever status comes next

    def _read(self, store: dist.Store) -> dict[int, RankStatus]:
        keys = {rank: self._key(f"rank/{rank}") for rank in range(self._world_size)}
        return {rank: RankStatus.from_json(store.get(key)) for rank, key in keys.items() if store.check([key])}

    def _key(self, what: str) -> str:
        if self._prefix is None:
            raise RuntimeError("This rank does not know which of the store's groups of this name is its own.")
        return f"{self._prefix}/{what}"

    def _ask(self, question: Callable[[dist.Store], T], unknown: T) -> T:
        try:
            answer = self._store.ask(question, ANSWER_SECONDS)
        except Exception:  # most likely its host is stopped, or has died; the error at hand is raised all the same
            self.answers = False
            return unknown
        self.answers = True
        return answer


def first_failure(statuses: Mapping[int, RankStatus]) -> FusedTPError | None:
    """The error of the rank that failed by itself; one that lost a peer comes before one that timed out."""
    failures = [(rank, status.error) for rank, status in statuses.items() if status.error is not None]
    _, error = min(failures, key=lambda one: (not isinstance(one[1], PeerLostError), one[0]), default=(0, None))
    return error


def late_ranks(
    statuses: Mapping[int, RankStatus], ranks: Sequence[int], call: int, op: str, arrived: str = "arrived"
) -> tuple[dict[int, str], str]:
    """Which of `ranks` were late for `call`, with what was last heard of them, and the rest of a sentence "... waited
    3 s", which names them as `{missing}`.

    Example:
        >>> late_ranks({1: RankStatus(4, ["all_gather"], 9.0)}, [1, 2], 5, "all_reduce")
        ({1: 'last heard of at call 4, all_gather', 2: ''}, ' for {missing}, which had not arrived.')
    """
    late, different = {}, []
    for rank in ranks:
        status = statuses.get(rank)
        if status is None or (status.failed and status.waited < _LATE_SECONDS):
            late[rank] = ""
        elif status.call < call:
            late[rank] = f"last heard of at call {status.call}, {status.ops[-1]}"
        elif status.op(call) not in (None, op):
            different.append(f"rank {rank}'s call {call} is {status.op(call)}, not {op}")
    if late:
        rest = " for {missing}, which had not arrived."
    elif different:
        rest = f", though all ranks had {arrived}."
    else:
        rest = f", though all ranks had {arrived}: the data did not come, or not all ranks agree on their shapes."
    if different:
        rest += f" But {listed(different)}: all ranks of a group must call the same ops in the same order."
    return late, rest


# -- the calls of a group ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A movement that has been started: its op, its number in the group, and when (time.perf_counter)."""

    op: str
    number: int
    started: float


class GroupCalls:
    """What this rank has called in its group, and whether the group still works: what all transports of messages have
    in common. How one leaves (`_depart`), and which peers it knows to have left (`closed_peers`), is its own.

    `backend` is what moves the bytes, as sentences name it; `board` the name of the status board in the group's store.
    """

    arrived = "arrived"  # what a rank has done that has started a call, as sentences say it

    def __init__(self, group: Group, backend: str, board: str) -> None:
        if group.process_group is None:
            raise ValueError("torch.distributed is not initialised: there is no group to communicate in.")
        self.group = group
        self.process_group = group.process_group
        self.rank = group.rank
        self.world_size = group.size
        self.backend = backend
        self.calls = 0  # that have been started
        self.broken: FusedTPError | None = None  # why the group is unusable
        self.also_depart: Callable[[], None] = lambda: None  # from what else this rank leaves with the group
        self._ops: deque[str] = deque(maxlen=16)
        store = dist.distributed_c10d._get_process_group_store(group.process_group)
        self.board = StatusBoard(store, board, group.rank, group.size)
        _CALLS[group].append(self)

    def begin(self, op: str) -> Call:
        """One more call, where the group is usable."""
        if self.broken is not None:
            raise self.unusable()
        return self._count(op)

    def _count(self, op: str) -> Call:
        self.calls += 1
        self._ops.append(op)
        return Call(op, self.calls, time.perf_counter())

    def last_call(self, op: str) -> Call:
        """The last call, as one of `op` that starts now."""
        return Call(op, self.calls, time.perf_counter())

    @contextmanager
    def abort_scope(self, op: str) -> Iterator[None]:
        """Scope of one op of several exchanges. An exception raised inside, after the first exchange has been started,
        aborts the group and notifies peers, which could not tell this rank's next call from the one they wait for.

        Peers raise PeerLostError, which says what was raised here; here the exception goes on as it is, and later calls
        say that the group is unusable. Before the first exchange nothing has happened, and the op may be called again;
        so it may after a RankMismatchError, which all ranks raise together. May be nested. On torch's own NCCL peers
        cannot be notified: they raise at the deadline of its watchdog.

        Example:
            transport.check(op, dims, x.dtype, x.device)
            with transport.abort_scope(op):
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
                self.abort_midway(Call(op, self.calls, started), error)
            raise

    def _started(self) -> int:
        """Counts the exchanges that peers may have had a part of."""
        return self.calls

    # -- aborting -----------------------------------------------------------------------------------------------------

    def error(self, kind: type[_ErrorT], call: Call, what: str, **fields: Any) -> _ErrorT:
        """An error of `call`. `what` goes on after "<op> (call <n> of group <name>) on rank <r> of <W>"."""
        fields |= {"op": call.op, "call": call.number, "group": self.group.name}
        return kind(_WHERE + what, rank=self.rank, size=self.world_size, **fields)

    def abort(self, call: Call, error: _ErrorT) -> _ErrorT:
        """`error`, to be raised here and by the peers. From here on the group is unusable, and they know."""
        self.broken = error.copy()
        self.publish_abort(call, self.broken)
        return error

    def abort_midway(self, call: Call, error: BaseException) -> None:
        """Abort because of an error that is no peer's doing."""
        self.abort(call, self.error(FusedTPError, call, " {reason}", reason=raised_midway(error)))

    def abort_because(self, reason: str) -> None:
        """Abort for a reason outside of the group's messages. Without effect where it is broken."""
        if self.broken is None:
            call = self.last_call("a call")
            self.abort(call, self.error(FusedTPError, call, " failed: {reason}", reason=reason))

    def abort_following_peer(self, call: Call) -> FusedTPError:
        """What a peer has raised that failed by itself, as an error of this rank."""
        self.broken = self.error(PeerLostError, call, ": a peer has given the group up.")
        self.publish_abort(call)
        if (cause := first_failure(self.board.read())) is not None:
            kind: type[FusedTPError] = PeerLostError
            if isinstance(cause, CollectiveTimeoutError):
                kind, cause = CollectiveTimeoutError, self.with_late_ranks(cause)
            said = ": rank {cause.rank} has given the group up. It said: {cause}"
            self.broken = self.error(kind, call, said, cause=cause)
        return self.broken.copy()

    def abort_peer_lost(self, call: Call, reason: str = "", cause: FusedTPError | None = None) -> FusedTPError:
        """A connection was closed: by a peer that died, or by one that failed and says why, if not always before. The
        backend may give a reason, a part of this group its error as `cause`."""
        closed = {*self.closed_peers(), *(cause.missing if cause is not None else ())}  # before others close theirs
        self.post_status(call, failed=True)
        statuses = self.statuses_within(REASON_SECONDS)
        if first_failure(statuses) is not None:
            return self.abort_following_peer(call)
        dead = {rank: "" for rank in sorted(closed) if rank not in statuses or not statuses[rank].failed}
        what = " lost {missing}: died, or closed its connections." + self._says(reason)
        if cause is not None and not dead:
            what += " What failed: {cause}"
        return self.abort(call, self.error(PeerLostError, call, what, missing=dead, reason=reason, cause=cause))

    def abort_timed_out(self, call: Call, reason: str = "") -> FusedTPError:
        """The deadline has passed. Names who was late, once the others have had the time to say where they are."""
        error = self.abort(call, self.error(CollectiveTimeoutError, call, f" waited {self.how_long(call)}"))
        self.broken = self.with_late_ranks(error).copy(self._says(reason), reason=reason)
        return self.broken.copy()

    def with_late_ranks(self, error: CollectiveTimeoutError) -> CollectiveTimeoutError:
        """`error`, of whatever rank of the group, with the ranks that were missing there."""
        ranks = [rank for rank in range(self.world_size) if rank != error.rank]
        # Who waits too is woken by the closed connections, or looks within LOOK_SECONDS, and then publishes its status.
        statuses = self.board.read_until(
            lambda found: all(rank in found and found[rank].failed for rank in ranks), 2 * LOOK_SECONDS
        )
        if not self.board.answers:
            return error.copy(
                ", and some rank had not arrived; the group's store, which would tell which, does not answer."
            )
        late, rest = late_ranks(statuses, ranks, error.call, error.op, self.arrived)
        return error.copy(rest, missing=late)

    def statuses_within(self, seconds: float) -> dict[int, RankStatus]:
        """What the ranks have published, once one of them says that it has failed by itself, or after that long."""
        return self.board.read_until(lambda found: first_failure(found) is not None, seconds)

    def publish_abort(self, call: Call, error: FusedTPError | None = None) -> None:
        """Tell the peers that this rank's part of the group has ended, those too who cannot read its status."""
        try:
            self.post_status(call, failed=True, error=error)
        finally:
            self._depart()
            self.also_depart()

    def post_status(self, call: Call, failed: bool = False, error: FusedTPError | None = None) -> None:
        """Publish where this rank is."""
        waited = time.perf_counter() - call.started
        self.board.post(RankStatus(self.calls, list(self._ops), waited, failed, error))

    def peer_failure(self) -> str | None:
        """What another rank has said that failed by itself, as a sentence; None where none has."""
        cause = first_failure(self.board.read())
        if cause is None or cause.rank == self.rank:
            return None
        return f"Rank {cause.rank} has given the group up. It said: {cause}"

    def how_long(self, call: Call) -> str:
        """The call's time, as the deadline where it was that."""
        waited, deadline = time.perf_counter() - call.started, settings.timeout_seconds()
        return f"{deadline:g} s (FUSED_TP_TIMEOUT)" if waited > 0.9 * deadline else f"{waited:.1f} s"

    def unusable(self) -> FusedTPError:
        """What every later call raises."""
        return FusedTPError(
            "Group {group!r} is unusable since an earlier failure: {cause} Destroy the process group and make a new "
            "one.",
            group=self.group.name,
            cause=self.broken,
        )

    def _says(self, reason: str) -> str:
        return f" {self.backend} says: {{reason}}" if reason else ""

    # -- of the transport ---------------------------------------------------------------------------------------------

    def _depart(self) -> None:
        """End all that is under way in the group, here and at the peers."""

    def closed_peers(self) -> list[int]:
        """Ranks known to have died, or to have left. Never waits."""
        return []


# The transports that count their calls of a group.
_CALLS: GroupSlot[list[GroupCalls]] = GroupSlot(lambda group: [])


def _forked() -> None:
    """A child has its parent's connections, and would speak for its rank: what it may hold of a group refuses."""
    for calls in (one for made in _CALLS.values() for one in made):
        if calls.broken is None:
            calls.broken = calls.error(FusedTPError, calls.last_call("a call"), ": this process is a fork of it.")


os.register_at_fork(after_in_child=_forked)


def calls_of(group: Group) -> list[GroupCalls]:
    """The transports that count their calls of `group`."""
    return list(_CALLS[group])
