"""Failure handling of a group: after a failure, all ranks raise within seconds, with the same reason.

A rank that fails publishes its status and its error on the group's status board, which is in the group's store. Then
it leaves the group: it aborts its part of every call in which peers wait. A peer that waits for the failed rank
detects one of these events:

    event                                      raises
    a status with an error                     `abort_following_peer`: that rank's error
    a closed connection, an exited process     the same if there is such a status, else `abort_peer_lost`
    the deadline                               `abort_timed_out`: names the ranks that had not arrived

torch.distributed does not report which ranks a timed-out wait was missing. Therefore a rank that waits long publishes
its status too, and a timeout error names the ranks whose status is missing or shows an earlier call. Calls without a
long wait or a failure do not access the store: one round trip to it takes longer than many ops.
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
from fused_tp.core.store import ANSWER_SECONDS, BoundedStore, next_key_prefix

T = TypeVar("T")
_ErrorT = TypeVar("_ErrorT", bound=FusedTPError)

PEER_POLL_SECONDS = 0.5  # interval at which a waiting rank polls for failures of peers
REASON_SECONDS = 0.5  # after losing a peer, seconds to wait for another rank to publish the root cause
_POLL_SECONDS = 0.02
# A failed rank that had waited less than this arrived late: its peers had already failed, so its call failed at once,
# apart from scheduling delays. Durations are compared instead of time stamps, because clocks of hosts differ.
_MIN_WAIT_SECONDS = 0.5

_WHERE = "{op} (call {call} of group {group!r}) on rank {rank} of {size}"


# -- the status of ranks -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankStatus:
    """Progress of one rank."""

    call: int  # number of the last call that the rank has started
    ops: Sequence[str]  # ops of the rank's last calls; the last entry is the op of `call`
    waited: float  # seconds since the start of the call that waits or has failed
    failed: bool = False  # True: the rank has aborted the group; False: it waits
    error: FusedTPError | None = None  # the rank's own error; None if the rank only follows a failed peer

    def op(self, call: int) -> str | None:
        """Return the op that the rank started as call number `call`; None if unknown."""
        back = self.call - call
        return self.ops[-1 - back] if 0 <= back < len(self.ops) else None

    def to_json(self) -> str:
        return json.dumps({**vars(self), "error": self.error and self.error.as_dict()})

    @staticmethod
    def from_json(text: bytes) -> RankStatus:
        fields = json.loads(text)
        return RankStatus(**{**fields, "error": fields["error"] and FusedTPError.from_dict(fields["error"])})


class StatusBoard:
    """The statuses of the ranks of a group, kept in the group's store. No method raises."""

    def __init__(self, store: dist.Store, name: str, rank: int, world_size: int) -> None:
        self._store = BoundedStore(store)
        self._rank = rank
        self._world_size = world_size
        self.answers = True  # False: the store did not answer the last request, so all statuses are unknown
        self._prefix: str | None = None

        # Not repeated after a missing answer: the store may have counted the request, so a second one could yield a
        # prefix that differs from the peers'. Until an answer arrives, possibly late, this rank publishes nothing.
        def join(store: dist.Store) -> None:
            self._prefix = next_key_prefix(store, name, rank)

        self._ask(join, None)

    def post(self, status: RankStatus) -> None:
        """Publish this rank's status, replacing an earlier one."""

        def write(store: dist.Store) -> None:
            store.set(self._key(f"rank/{self._rank}"), status.to_json())
            if status.error is not None:
                store.set(self._key("failed"), "")

        self._ask(write, None)

    def has_failure(self) -> bool:
        """True if a rank has published an error of its own, not only that it follows a failed peer."""
        return self._ask(lambda store: store.check([self._key("failed")]), False)

    def read(self) -> dict[int, RankStatus]:
        """Return the published statuses by rank."""
        return self._ask(self._read, {})

    def read_until(self, enough: Callable[[Mapping[int, RankStatus]], bool], seconds: float) -> dict[int, RankStatus]:
        """Poll until `enough(statuses)`, for at most `seconds`; return the statuses."""
        deadline = time.perf_counter() + seconds
        while True:
            statuses = self.read()
            if enough(statuses) or time.perf_counter() > deadline or not self.answers:
                return statuses
            time.sleep(_POLL_SECONDS)  # polls, because a store cannot wait for any one of several keys

    def _read(self, store: dist.Store) -> dict[int, RankStatus]:
        keys = {rank: self._key(f"rank/{rank}") for rank in range(self._world_size)}
        return {rank: RankStatus.from_json(store.get(key)) for rank, key in keys.items() if store.check([key])}

    def _key(self, what: str) -> str:
        if self._prefix is None:
            raise RuntimeError("The store has not returned the key prefix of this group yet.")
        return f"{self._prefix}/{what}"

    def _ask(self, question: Callable[[dist.Store], T], unknown: T) -> T:
        try:
            answer = self._store.ask(question, ANSWER_SECONDS)
        except Exception:  # most likely the store's host is stopped or dead; the caller must still raise its own error
            self.answers = False
            return unknown
        self.answers = True
        return answer


def first_failure(statuses: Mapping[int, RankStatus]) -> FusedTPError | None:
    """Return the error of the lowest rank that published one, preferring PeerLostError; None if no rank did."""
    failures = [(rank, status.error) for rank, status in statuses.items() if status.error is not None]
    _, error = min(failures, key=lambda one: (not isinstance(one[1], PeerLostError), one[0]), default=(0, None))
    return error


def late_ranks(
    statuses: Mapping[int, RankStatus], ranks: Sequence[int], call: int, op: str, arrived: str = "arrived"
) -> tuple[dict[int, str], str]:
    """Return (late, rest): the ranks of `ranks` that were late for `call`, each with its last known call, and the end
    of a message that begins "... waited 3 s" and names the late ranks as `{missing}`.

    Example:
        >>> late_ranks({1: RankStatus(4, ["all_gather"], 9.0)}, [1, 2], 5, "all_reduce")
        ({1: 'last heard of at call 4, all_gather', 2: ''}, ' for {missing}, which had not arrived.')
    """
    late, different = {}, []
    for rank in ranks:
        status = statuses.get(rank)
        if status is None or (status.failed and status.waited < _MIN_WAIT_SECONDS):
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
        rest = f", though all ranks had {arrived}: the data did not arrive, or the ranks passed different shapes."
    if different:
        rest += f" But {listed(different)}: all ranks of a group must call the same ops in the same order."
    return late, rest


# -- the calls of a group ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartedCall:
    """A started transfer: its op, its number in the group, and its start time (time.perf_counter)."""

    op: str
    number: int
    started: float


class GroupCalls:
    """Base class of message transports: counts this rank's calls in its group and handles the group's failure.

    A transport overrides `_depart`, which leaves the group, and `closed_peers`, which returns the peers that have left.

    Args:
        backend: name of the backend in messages.
        board: name of the status board in the group's store.
    """

    arrived = "arrived"  # verb in messages for a rank that has started a call

    def __init__(self, group: Group, backend: str, board: str) -> None:
        if group.process_group is None:
            raise ValueError(
                "torch.distributed is not initialised, so the group has no peers to communicate with. Call "
                "torch.distributed.init_process_group() first."
            )
        self.group = group
        self.process_group = group.process_group
        self.rank = group.rank
        self.world_size = group.size
        self.backend = backend
        self.calls = 0  # number of calls started
        self.broken: FusedTPError | None = None  # why the group is unusable
        self.also_depart: Callable[[], None] = lambda: None  # called after `_depart`, to abort dependent resources
        self._ops: deque[str] = deque(maxlen=16)
        store = dist.distributed_c10d._get_process_group_store(group.process_group)
        self.board = StatusBoard(store, board, group.rank, group.size)
        _CALLS[group].append(self)

    def begin(self, op: str) -> StartedCall:
        """Count a new call of `op` and return it; raise FusedTPError if the group is unusable."""
        if self.broken is not None:
            raise self.unusable()
        return self._count(op)

    def _count(self, op: str) -> StartedCall:
        self.calls += 1
        self._ops.append(op)
        return StartedCall(op, self.calls, time.perf_counter())

    def last_call(self, op: str) -> StartedCall:
        """Return a call of `op` that starts now and has the number of the last call."""
        return StartedCall(op, self.calls, time.perf_counter())

    @contextmanager
    def abort_scope(self, op: str) -> Iterator[None]:
        """Context manager around an op with several exchanges, which aborts the group if the op raises between them.

        After the first exchange has started, peers wait in this op and would mistake this rank's next call for its
        continuation. So the group is aborted: peers raise PeerLostError with this rank's error, later calls raise that
        the group is unusable, and the exception itself propagates unchanged on this rank. If the op raises before its
        first exchange, or raises RankMismatchError, which all ranks raise together, the group stays usable. Scopes may
        be nested. With torch's own NCCL peers cannot be notified; they raise at the deadline of torch's watchdog.

        Example:
            transport.check(op, dims, x.dtype, x.device)
            with transport.abort_scope(op):
                arriving = transport.shift(op, x, buffer, 1)
                partial = x @ w                                 # may raise, for example out of memory
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
        """Return the number of exchanges that peers may have joined."""
        return self.calls

    # -- aborting -----------------------------------------------------------------------------------------------------

    def error(self, kind: type[_ErrorT], call: StartedCall, what: str, **fields: Any) -> _ErrorT:
        """Create an error of `call`; `what` ends the message "<op> (call <n> of group <name>) on rank <r> of <W>"."""
        fields |= {"op": call.op, "call": call.number, "group": self.group.name}
        return kind(_WHERE + what, rank=self.rank, size=self.world_size, **fields)

    def abort(self, call: StartedCall, error: _ErrorT) -> _ErrorT:
        """Make the group unusable and notify peers, which raise `error` too. Return `error` for the caller to raise."""
        self.broken = error.copy()
        self.publish_abort(call, self.broken)
        return error

    def abort_midway(self, call: StartedCall, error: BaseException) -> None:
        """Abort because of an exception on this rank that no peer has caused."""
        self.abort(call, self.error(FusedTPError, call, " {reason}", reason=raised_midway(error)))

    def abort_because(self, reason: str) -> None:
        """Abort for `reason`, which no call of the group caused. No effect if the group is unusable already."""
        if self.broken is None:
            call = self.last_call("a call")
            self.abort(call, self.error(FusedTPError, call, " failed: {reason}", reason=reason))

    def abort_following_peer(self, call: StartedCall) -> FusedTPError:
        """Abort because a peer has published an error; return that error as an error of this rank."""
        self.broken = self.error(PeerLostError, call, ": a peer has aborted the group.")
        self.publish_abort(call)
        if (cause := first_failure(self.board.read())) is not None:
            kind: type[FusedTPError] = PeerLostError
            if isinstance(cause, CollectiveTimeoutError):
                kind, cause = CollectiveTimeoutError, self.with_late_ranks(cause)
            what = ": rank {cause.rank} has aborted the group. Its error: {cause}"
            self.broken = self.error(kind, call, what, cause=cause)
        return self.broken.copy()

    def abort_peer_lost(self, call: StartedCall, reason: str = "", cause: FusedTPError | None = None) -> FusedTPError:
        """Abort because a peer has closed its connection: it has died, or has failed and is about to publish its error.

        Args:
            reason: message of the backend, if any.
            cause: error of a subgroup, if the connection was one of its own.
        """
        # Read first: peers that notice the failure close their connections too, and would be taken for dead ones.
        closed = {*self.closed_peers(), *(cause.missing if cause is not None else ())}
        self.post_status(call, failed=True)
        statuses = self.statuses_within(REASON_SECONDS)
        if first_failure(statuses) is not None:
            return self.abort_following_peer(call)
        dead = {rank: "" for rank in sorted(closed) if rank not in statuses or not statuses[rank].failed}
        what = " lost {missing}: died, or closed its connections." + self._backend_message(reason)
        if cause is not None and not dead:
            what += " Cause: {cause}"
        return self.abort(call, self.error(PeerLostError, call, what, missing=dead, reason=reason, cause=cause))

    def abort_timed_out(self, call: StartedCall, reason: str = "") -> FusedTPError:
        """Abort at the deadline. Waits briefly for the ranks to publish their statuses, and names the late ranks."""
        error = self.abort(call, self.error(CollectiveTimeoutError, call, f" waited {self.how_long(call)}"))
        self.broken = self.with_late_ranks(error).copy(self._backend_message(reason), reason=reason)
        return self.broken.copy()

    def with_late_ranks(self, error: CollectiveTimeoutError) -> CollectiveTimeoutError:
        """Return the timeout `error` of any rank of the group, extended by the ranks that were late for its call."""
        ranks = [rank for rank in range(self.world_size) if rank != error.rank]
        # Other waiting ranks notice the failure at a closed connection, or at their next poll after at most
        # PEER_POLL_SECONDS, and then publish a status.
        statuses = self.board.read_until(
            lambda found: all(rank in found and found[rank].failed for rank in ranks), 2 * PEER_POLL_SECONDS
        )
        if not self.board.answers:
            return error.copy(". The late ranks are unknown, because the group's store does not answer.")
        late, rest = late_ranks(statuses, ranks, error.call, error.op, self.arrived)
        return error.copy(rest, missing=late)

    def statuses_within(self, seconds: float) -> dict[int, RankStatus]:
        """Return the published statuses as soon as one of them has an error, or after `seconds`."""
        return self.board.read_until(lambda found: first_failure(found) is not None, seconds)

    def publish_abort(self, call: StartedCall, error: FusedTPError | None = None) -> None:
        """Publish that this rank has aborted, then leave the group, which notifies peers without a status board."""
        try:
            self.post_status(call, failed=True, error=error)
        finally:
            self._depart()
            self.also_depart()

    def post_status(self, call: StartedCall, failed: bool = False, error: FusedTPError | None = None) -> None:
        """Publish this rank's status: its progress and, with `failed`, that it has aborted the group."""
        waited = time.perf_counter() - call.started
        self.board.post(RankStatus(self.calls, list(self._ops), waited, failed, error))

    def peer_failure(self) -> str | None:
        """Return a message about the published error of another rank; None if there is none."""
        cause = first_failure(self.board.read())
        if cause is None or cause.rank == self.rank:
            return None
        return f"Rank {cause.rank} has aborted the group. Its error: {cause}"

    def how_long(self, call: StartedCall) -> str:
        """Describe how long the call has waited: the timeout setting if the deadline has passed, else the seconds."""
        waited, deadline = time.perf_counter() - call.started, settings.timeout_seconds()
        return f"{deadline:g} s (FUSED_TP_TIMEOUT)" if waited > 0.9 * deadline else f"{waited:.1f} s"

    def unusable(self) -> FusedTPError:
        """Return the error that calls raise after a failure of the group."""
        return FusedTPError(
            "Group {group!r} is unusable since an earlier failure: {cause} Destroy the process group and create a new "
            "one.",
            group=self.group.name,
            cause=self.broken,
        )

    def _backend_message(self, reason: str) -> str:
        return f" Message of {self.backend}: {{reason}}" if reason else ""

    # -- implemented by transports ------------------------------------------------------------------------------------

    def _depart(self) -> None:
        """Abort all in-flight transfers of the group, on this rank and its peers."""

    def closed_peers(self) -> list[int]:
        """Return the ranks known to have died or left the group. Never waits."""
        return []


# All transports of each group.
_CALLS: GroupSlot[list[GroupCalls]] = GroupSlot(lambda group: [])


def _break_groups_after_fork() -> None:
    """Make all groups unusable in a forked child: it shares its parent's connections and would act as its rank."""
    for calls in (one for made in _CALLS.values() for one in made):
        if calls.broken is None:
            call = calls.last_call("a call")
            calls.broken = calls.error(FusedTPError, call, ": this process is a fork of that rank.")


os.register_at_fork(after_in_child=_break_groups_after_fork)


def calls_of(group: Group) -> list[GroupCalls]:
    """Return all transports of `group` that count their calls."""
    return list(_CALLS[group])
