"""Failures of a group of ranks: raised soon, on all ranks, and with one reason.

A rank that fails publishes its status with the error on the group's status board, which is in the group's store. Then
it leaves: it ends its part of every call that its peers wait in. A rank that waits for it notices one of these:

    notices                                 raises
    a status with an error                  `abort_following_peer`: that rank's error
    a closed connection, an ended process   the same if there is such a status, else `abort_peer_lost`
    nothing, until the deadline             `abort_timed_out`: names the ranks that had not arrived

torch.distributed does not report the ranks that a wait is missing. So a rank that waits long publishes its status too,
and an error names the ranks without a status, or with an earlier call. Nothing is written without a long wait or a
failure: a round trip to the store takes longer than many ops.
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

from fused_tp.core import settings
from fused_tp.core.errors import (
    CollectiveTimeoutError,
    FusedTPError,
    PeerLostError,
    RankMismatchError,
    listed,
    raised_midway,
)
from fused_tp.core.group import Group, GroupSlot
from fused_tp.core.store import ANSWER_SECONDS, BoundedStore, own_place

T = TypeVar("T")
_ErrorT = TypeVar("_ErrorT", bound=FusedTPError)

LOOK_SECONDS = 0.5  # interval at which a waiting rank polls for failures of peers
REASON_SECONDS = 0.5  # time that a rank that lost a peer waits for a published reason other than the peer's death
_POLL_SECONDS = 0.02
# A rank that had been in the call for less than this when it failed arrived only after the others had failed: its call
# ended at once, but a busy machine may have delayed it. Clocks of several hosts would be no more accurate.
_LATE_SECONDS = 0.5

_WHERE = "{op} (call {call} of group {group!r}) on rank {rank} of {size}"


# -- the status of ranks -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankStatus:
    """Progress of one rank."""

    call: int  # number of the last call it has started
    ops: Sequence[str]  # ops of its last calls, up to that one
    waited: float  # seconds since the start of the call that it waits for, or that failed
    failed: bool = False  # True: its part of the group has ended; False: it waits
    error: FusedTPError | None = None  # its error, if it failed by itself instead of following a peer

    def op(self, call: int) -> str | None:
        """The op that it started as `call`; None if unknown."""
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
        self.answers = True  # the store answered the last question; if not, nothing is known
        self._prefix: str | None = None

        # Once only: if this rank is unsure whether that was counted, it publishes nothing. An answer may come late.
        def join(store: dist.Store) -> None:
            self._prefix = own_place(store, name, rank)

        self._ask(join, None)

    def post(self, status: RankStatus) -> None:
        """Publish this rank's status, replacing an earlier one."""

        def write(store: dist.Store) -> None:
            store.set(self._key(f"rank/{self._rank}"), status.to_json())
            if status.error is not None:
                store.set(self._key("failed"), "")

        self._ask(write, None)

    def has_failure(self) -> bool:
        """True if some rank has failed by itself."""
        return self._ask(lambda store: store.check([self._key("failed")]), False)

    def read(self) -> dict[int, RankStatus]:
        """The published statuses, by rank."""
        return self._ask(self._read, {})

    def read_until(self, enough: Callable[[Mapping[int, RankStatus]], bool], seconds: float) -> dict[int, RankStatus]:
        """Poll until `enough(statuses)`, for at most `seconds`; return the statuses."""
        deadline = time.perf_counter() + seconds
        while True:
            statuses = self.read()
            if enough(statuses) or time.perf_counter() > deadline or not self.answers:
                return statuses
            time.sleep(_POLL_SECONDS)  # a store has no wait for the next of several keys

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
        except Exception:  # most likely its host is stopped or dead; the error being handled must still be raised
            self.answers = False
            return unknown
        self.answers = True
        return answer


def first_failure(statuses: Mapping[int, RankStatus]) -> FusedTPError | None:
    """The error of a rank that failed by itself; losing a peer takes precedence over a timeout."""
    failures = [(rank, status.error) for rank, status in statuses.items() if status.error is not None]
    _, error = min(failures, key=lambda one: (not isinstance(one[1], PeerLostError), one[0]), default=(0, None))
    return error


def late_ranks(
    statuses: Mapping[int, RankStatus], ranks: Sequence[int], call: int, op: str, arrived: str = "arrived"
) -> tuple[dict[int, str], str]:
    """Return those of `ranks` that were late for `call`, each with its last known call, and the rest of a sentence
    "... waited 3 s", which names them as `{missing}`.

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
class StartedCall:
    """A transfer that has been started: its op, its number in the group, and its start (time.perf_counter)."""

    op: str
    number: int
    started: float


class GroupCalls:
    """Calls of this rank in its group, and the group's failure: the base of all transports of messages. A transport
    implements how it leaves (`_depart`), and which peers it knows to have left (`closed_peers`).

    `backend` names the backend in sentences; `board` is the name of the status board in the group's store.
    """

    arrived = "arrived"  # in sentences: a rank that has started a call has done this

    def __init__(self, group: Group, backend: str, board: str) -> None:
        if group.process_group is None:
            raise ValueError("torch.distributed is not initialised: there is no group to communicate in.")
        self.group = group
        self.process_group = group.process_group
        self.rank = group.rank
        self.world_size = group.size
        self.backend = backend
        self.calls = 0  # number of calls started
        self.broken: FusedTPError | None = None  # why the group is unusable
        self.also_depart: Callable[[], None] = lambda: None  # leaves whatever else fails with the group
        self._ops: deque[str] = deque(maxlen=16)
        store = dist.distributed_c10d._get_process_group_store(group.process_group)
        self.board = StatusBoard(store, board, group.rank, group.size)
        _CALLS[group].append(self)

    def begin(self, op: str) -> StartedCall:
        """Count one more call; raises if the group is unusable."""
        if self.broken is not None:
            raise self.unusable()
        return self._count(op)

    def _count(self, op: str) -> StartedCall:
        self.calls += 1
        self._ops.append(op)
        return StartedCall(op, self.calls, time.perf_counter())

    def last_call(self, op: str) -> StartedCall:
        """The last call, restated as a call of `op` that starts now."""
        return StartedCall(op, self.calls, time.perf_counter())

    @contextmanager
    def abort_scope(self, op: str) -> Iterator[None]:
        """Scope of one op of several exchanges. An exception raised inside, after the first exchange has been started,
        aborts the group and notifies peers, which could not tell this rank's next call from the one they wait in.

        Peers raise PeerLostError with the error raised here; here the exception passes through unchanged, and later
        calls raise that the group is unusable. Before the first exchange, and after a RankMismatchError, which all
        ranks raise together, the op may be called again. Scopes may be nested. On torch's own NCCL peers cannot be
        notified: they raise at the deadline of its watchdog.

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
                self.abort_midway(StartedCall(op, self.calls, started), error)
            raise

    def _started(self) -> int:
        """Number of exchanges in which peers may have taken part."""
        return self.calls

    # -- aborting -----------------------------------------------------------------------------------------------------

    def error(self, kind: type[_ErrorT], call: StartedCall, what: str, **fields: Any) -> _ErrorT:
        """An error of `call`. `what` continues "<op> (call <n> of group <name>) on rank <r> of <W>"."""
        fields |= {"op": call.op, "call": call.number, "group": self.group.name}
        return kind(_WHERE + what, rank=self.rank, size=self.world_size, **fields)

    def abort(self, call: StartedCall, error: _ErrorT) -> _ErrorT:
        """Make the group unusable and notify peers. Returns `error`, to be raised here; peers raise it too."""
        self.broken = error.copy()
        self.publish_abort(call, self.broken)
        return error

    def abort_midway(self, call: StartedCall, error: BaseException) -> None:
        """Abort because of an exception that no peer has caused."""
        self.abort(call, self.error(FusedTPError, call, " {reason}", reason=raised_midway(error)))

    def abort_because(self, reason: str) -> None:
        """Abort for a reason outside of the group's messages. No effect if the group is broken already."""
        if self.broken is None:
            call = self.last_call("a call")
            self.abort(call, self.error(FusedTPError, call, " failed: {reason}", reason=reason))

    def abort_following_peer(self, call: StartedCall) -> FusedTPError:
        """Abort after a peer that failed by itself; return its error as an error of this rank."""
        self.broken = self.error(PeerLostError, call, ": a peer has given the group up.")
        self.publish_abort(call)
        if (cause := first_failure(self.board.read())) is not None:
            kind: type[FusedTPError] = PeerLostError
            if isinstance(cause, CollectiveTimeoutError):
                kind, cause = CollectiveTimeoutError, self.with_late_ranks(cause)
            said = ": rank {cause.rank} has given the group up. It said: {cause}"
            self.broken = self.error(kind, call, said, cause=cause)
        return self.broken.copy()

    def abort_peer_lost(self, call: StartedCall, reason: str = "", cause: FusedTPError | None = None) -> FusedTPError:
        """Abort after a connection was closed, by a peer that died or by one that failed, which may publish the reason
        late. The backend may give a `reason`, a subgroup its error as `cause`."""
        closed = {*self.closed_peers(), *(cause.missing if cause is not None else ())}  # before peers close theirs
        self.post_status(call, failed=True)
        statuses = self.statuses_within(REASON_SECONDS)
        if first_failure(statuses) is not None:
            return self.abort_following_peer(call)
        dead = {rank: "" for rank in sorted(closed) if rank not in statuses or not statuses[rank].failed}
        what = " lost {missing}: died, or closed its connections." + self._says(reason)
        if cause is not None and not dead:
            what += " What failed: {cause}"
        return self.abort(call, self.error(PeerLostError, call, what, missing=dead, reason=reason, cause=cause))

    def abort_timed_out(self, call: StartedCall, reason: str = "") -> FusedTPError:
        """Abort at the deadline. The error names the late ranks, once the others have had time to publish statuses."""
        error = self.abort(call, self.error(CollectiveTimeoutError, call, f" waited {self.how_long(call)}"))
        self.broken = self.with_late_ranks(error).copy(self._says(reason), reason=reason)
        return self.broken.copy()

    def with_late_ranks(self, error: CollectiveTimeoutError) -> CollectiveTimeoutError:
        """`error`, of any rank of the group, extended by the ranks that were missing there."""
        ranks = [rank for rank in range(self.world_size) if rank != error.rank]
        # Closed connections wake the other waiting ranks, or they poll within LOOK_SECONDS; then they publish a status.
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
        """The published statuses, once one of them has a rank's own failure, or after `seconds`."""
        return self.board.read_until(lambda found: first_failure(found) is not None, seconds)

    def publish_abort(self, call: StartedCall, error: FusedTPError | None = None) -> None:
        """Notify peers, also those that cannot read this rank's status, that its part of the group has ended."""
        try:
            self.post_status(call, failed=True, error=error)
        finally:
            self._depart()
            self.also_depart()

    def post_status(self, call: StartedCall, failed: bool = False, error: FusedTPError | None = None) -> None:
        """Publish this rank's progress."""
        waited = time.perf_counter() - call.started
        self.board.post(RankStatus(self.calls, list(self._ops), waited, failed, error))

    def peer_failure(self) -> str | None:
        """Description of the failure of another rank that failed by itself; None if there is none."""
        cause = first_failure(self.board.read())
        if cause is None or cause.rank == self.rank:
            return None
        return f"Rank {cause.rank} has given the group up. It said: {cause}"

    def how_long(self, call: StartedCall) -> str:
        """Duration of the call in words; the deadline's length if it ended by the deadline."""
        waited, deadline = time.perf_counter() - call.started, settings.timeout_seconds()
        return f"{deadline:g} s (FUSED_TP_TIMEOUT)" if waited > 0.9 * deadline else f"{waited:.1f} s"

    def unusable(self) -> FusedTPError:
        """The error that every later call raises."""
        return FusedTPError(
            "Group {group!r} is unusable since an earlier failure: {cause} Destroy the process group and make a new "
            "one.",
            group=self.group.name,
            cause=self.broken,
        )

    def _says(self, reason: str) -> str:
        return f" {self.backend} says: {{reason}}" if reason else ""

    # -- implemented by transports ------------------------------------------------------------------------------------

    def _depart(self) -> None:
        """End all transfers under way in the group, here and at the peers."""

    def closed_peers(self) -> list[int]:
        """Ranks known to have died, or to have left. Never waits."""
        return []


# The transports that count their calls of a group.
_CALLS: GroupSlot[list[GroupCalls]] = GroupSlot(lambda group: [])


def _forked() -> None:
    """Break all groups in a forked child: it has its parent's connections, and would act as its parent's rank."""
    for calls in (one for made in _CALLS.values() for one in made):
        if calls.broken is None:
            calls.broken = calls.error(FusedTPError, calls.last_call("a call"), ": this process is a fork of it.")


os.register_at_fork(after_in_child=_forked)


def calls_of(group: Group) -> list[GroupCalls]:
    """The transports that count their calls of `group`."""
    return list(_CALLS[group])
