"""Failure handling of a group: after a failure, all ranks raise within seconds, with the same reason.

A rank that fails publishes its status and its error on the group's status board, which is in the group's store. Then
it leaves the group: it aborts its part of every call in which peers wait. A peer that waits for the failed rank
detects one of these events:

    event                                      raises
    a status with an error                     `abort_following_peer`: that rank's error
    a closed connection, an exited process     the same if there is such a status, else `abort_peer_lost`
    the deadline                               `abort_timed_out`: names the ranks that had not arrived

torch.distributed does not report the ranks for which a timed-out wait has waited. Therefore a rank that waits long
publishes its status too, and a timeout error names the ranks whose status is missing or shows an earlier call. Calls
without a long wait or a failure do not access the store: one round trip to it takes longer than many ops.
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
    describe_midway_error,
    join_words,
)
from fused_tp.core.group import Group, GroupSlot
from fused_tp.core.store import STORE_TIMEOUT_SECONDS, StoreWithTimeout, next_key_prefix

T = TypeVar("T")
_ErrorT = TypeVar("_ErrorT", bound=FusedTPError)

PEER_POLL_SECONDS = 0.5  # interval at which a waiting rank polls for failures of peers
ROOT_CAUSE_SECONDS = 0.5  # after losing a peer, seconds to wait for another rank to publish the root cause
_BOARD_POLL_SECONDS = 0.02
# A failed rank that had waited less than this arrived late: its peers had already failed, so its call failed at once,
# apart from scheduling delays. Durations are compared instead of time stamps, because clocks of hosts differ.
_MIN_WAIT_SECONDS = 0.5

_CALL_DESCRIPTION = "{op} (call {call} of group {group!r}) on rank {rank} of {size}"


# -- the status of ranks -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankStatus:
    """Progress of one rank."""

    call: int  # number of the last call that the rank has started
    ops: Sequence[str]  # ops of the rank's last calls; the last entry is the op of `call`
    wait_seconds: float  # seconds since the start of the call that waits or has failed
    has_failed: bool = False  # True: the rank has aborted the group; False: it waits
    error: FusedTPError | None = None  # the rank's own error; None if the rank only follows a failed peer

    def op_of_call(self, call: int) -> str | None:
        """Return the op that the rank started as call number `call`; None if unknown."""
        calls_before_last = self.call - call
        return self.ops[-1 - calls_before_last] if 0 <= calls_before_last < len(self.ops) else None

    def to_json(self) -> str:
        return json.dumps({**vars(self), "error": self.error and self.error.as_dict()})

    @staticmethod
    def from_json(text: bytes) -> RankStatus:
        fields = json.loads(text)
        return RankStatus(**{**fields, "error": fields["error"] and FusedTPError.from_dict(fields["error"])})


class StatusBoard:
    """The statuses of the ranks of a group, kept in the group's store. No method raises."""

    def __init__(self, store: dist.Store, name: str, rank: int, world_size: int) -> None:
        self._store = StoreWithTimeout(store)
        self._rank = rank
        self._world_size = world_size
        self.is_answering = True  # False: the store did not answer the last request, so all statuses are unknown
        self._prefix: str | None = None

        # Not repeated if no answer arrives in time: the store may have counted the request, and then a second one would
        # yield a prefix that differs from the peers'. Until the answer arrives, this rank publishes nothing.
        def join(store: dist.Store) -> None:
            self._prefix = next_key_prefix(store, name, rank)

        self._request_or_default(join, None)

    def post(self, status: RankStatus) -> None:
        """Publish this rank's status, replacing an earlier one."""

        def write(store: dist.Store) -> None:
            store.set(self._key(f"rank/{self._rank}"), status.to_json())
            if status.error is not None:
                store.set(self._key("failed"), "")

        self._request_or_default(write, None)

    def has_failure(self) -> bool:
        """True if a rank has published an error of its own, not only that it follows a failed peer."""
        return self._request_or_default(lambda store: store.check([self._key("failed")]), False)

    def read(self) -> dict[int, RankStatus]:
        """Return the published statuses by rank."""
        return self._request_or_default(self._read, {})

    def read_until(
        self, is_enough: Callable[[Mapping[int, RankStatus]], bool], seconds: float
    ) -> dict[int, RankStatus]:
        """Poll until `is_enough(statuses)`, for at most `seconds`; return the statuses."""
        deadline = time.perf_counter() + seconds
        while True:
            statuses = self.read()
            if is_enough(statuses) or time.perf_counter() > deadline or not self.is_answering:
                return statuses
            time.sleep(_BOARD_POLL_SECONDS)  # polls, because a store cannot wait for any one of several keys

    def _read(self, store: dist.Store) -> dict[int, RankStatus]:
        keys = {rank: self._key(f"rank/{rank}") for rank in range(self._world_size)}
        return {rank: RankStatus.from_json(store.get(key)) for rank, key in keys.items() if store.check([key])}

    def _key(self, name: str) -> str:
        if self._prefix is None:
            raise RuntimeError("The store has not returned the key prefix of this group yet.")
        return f"{self._prefix}/{name}"

    def _request_or_default(self, request: Callable[[dist.Store], T], default: T) -> T:
        try:
            answer = self._store.request(request, STORE_TIMEOUT_SECONDS)
        except Exception:  # most likely the store's host is stopped or dead; the caller must still raise its own error
            self.is_answering = False
            return default
        self.is_answering = True
        return answer


def first_failure(statuses: Mapping[int, RankStatus]) -> FusedTPError | None:
    """Return the error of the lowest rank that published one, preferring PeerLostError; None if no rank did."""
    failures = [(rank, status.error) for rank, status in statuses.items() if status.error is not None]
    _, error = min(failures, key=lambda item: (not isinstance(item[1], PeerLostError), item[0]), default=(0, None))
    return error


def describe_late_ranks(
    statuses: Mapping[int, RankStatus], ranks: Sequence[int], call: int, op: str, arrival_verb: str = "arrived"
) -> tuple[dict[int, str], str]:
    """Return (late_ranks, message_end) for a timeout of call number `call`, an `op`.

    `late_ranks` maps each of `ranks` that was late to its last known call. `message_end` is the end of a message that
    begins "... waited 3 s"; it names the late ranks as `{missing}`.

    Example:
        >>> describe_late_ranks({1: RankStatus(4, ["all_gather"], 9.0)}, [1, 2], 5, "all_reduce")
        ({1: 'last heard of at call 4, all_gather', 2: ''}, ' for {missing}, which had not arrived.')
    """
    late_ranks, mismatches = {}, []
    for rank in ranks:
        status = statuses.get(rank)
        if status is None or (status.has_failed and status.wait_seconds < _MIN_WAIT_SECONDS):
            late_ranks[rank] = ""
        elif status.call < call:
            late_ranks[rank] = f"last heard of at call {status.call}, {status.ops[-1]}"
        elif status.op_of_call(call) not in (None, op):
            mismatches.append(f"rank {rank}'s call {call} is {status.op_of_call(call)}, not {op}")
    if late_ranks:
        message_end = " for {missing}, which had not arrived."
    elif mismatches:
        message_end = f", though all ranks had {arrival_verb}."
    else:
        message_end = (
            f", though all ranks had {arrival_verb}: the data did not arrive, or the ranks passed different shapes."
        )
    if mismatches:
        message_end += f" But {join_words(mismatches)}: all ranks of a group must call the same ops in the same order."
    return late_ranks, message_end


# -- the calls of a group ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartedCall:
    """A started transfer: its op, its number in the group, and its start time (time.perf_counter)."""

    op: str
    call_number: int
    start_time: float


class GroupCalls:
    """Base class of message transports: counts this rank's calls in its group and handles the group's failure.

    A transport overrides `_depart`, which leaves the group, and `closed_peers`, which returns the peers that have left.

    Args:
        backend: name of the backend in messages.
        board_name: name of the status board in the group's store.
    """

    arrival_verb = "arrived"  # verb in messages for a rank that has started a call

    def __init__(self, group: Group, backend: str, board_name: str) -> None:
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
        self.fatal_error: FusedTPError | None = None  # the failure that made the group unusable
        # Called after `_depart`, to abort dependent resources.
        self.depart_dependents: Callable[[], None] = lambda: None
        self._ops: deque[str] = deque(maxlen=16)
        store = dist.distributed_c10d._get_process_group_store(group.process_group)
        self.board = StatusBoard(store, board_name, group.rank, group.size)
        _TRANSPORTS[group].append(self)

    def begin(self, op: str) -> StartedCall:
        """Count a new call of `op` and return it; raise FusedTPError if the group is unusable."""
        if self.fatal_error is not None:
            raise self.unusable_error()
        return self._count_call(op)

    def _count_call(self, op: str) -> StartedCall:
        self.calls += 1
        self._ops.append(op)
        return StartedCall(op, self.calls, time.perf_counter())

    def call_for_error(self, op: str) -> StartedCall:
        """Return a StartedCall for an error in `op`: number of the last counted call, current time. Counts no call."""
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
        calls_before, start_time = self._count_started(), time.perf_counter()
        try:
            yield
        except RankMismatchError:
            raise
        except BaseException as error:
            if self.fatal_error is None and self._count_started() != calls_before:
                self.abort_midway(StartedCall(op, self.calls, start_time), error)
            raise

    def _count_started(self) -> int:
        """Return the number of exchanges that peers may have joined."""
        return self.calls

    # -- aborting -----------------------------------------------------------------------------------------------------

    def error(self, error_class: type[_ErrorT], call: StartedCall, message_end: str, **fields: Any) -> _ErrorT:
        """Create an error of `call`: "<op> (call <n> of group <name>) on rank <r> of <W>", then `message_end`."""
        fields |= {"op": call.op, "call": call.call_number, "group": self.group.name}
        return error_class(_CALL_DESCRIPTION + message_end, rank=self.rank, size=self.world_size, **fields)

    def abort(self, call: StartedCall, error: _ErrorT) -> _ErrorT:
        """Make the group unusable and notify peers, which raise `error` too. Return `error` for the caller to raise."""
        self.fatal_error = error.copy()
        self.publish_abort(call, self.fatal_error)
        return error

    def abort_midway(self, call: StartedCall, error: BaseException) -> None:
        """Abort because of an exception on this rank that no peer has caused."""
        self.abort(call, self.error(FusedTPError, call, " {reason}", reason=describe_midway_error(error)))

    def abort_because(self, reason: str) -> None:
        """Abort for `reason`, which no call of the group caused. No effect if the group is unusable already."""
        if self.fatal_error is None:
            call = self.call_for_error("a call")
            self.abort(call, self.error(FusedTPError, call, " failed: {reason}", reason=reason))

    def abort_following_peer(self, call: StartedCall) -> FusedTPError:
        """Abort because a peer has published an error; return that error as an error of this rank."""
        self.fatal_error = self.error(PeerLostError, call, ": a peer has aborted the group.")
        self.publish_abort(call)
        if (cause := first_failure(self.board.read())) is not None:
            error_class: type[FusedTPError] = PeerLostError
            if isinstance(cause, CollectiveTimeoutError):
                error_class, cause = CollectiveTimeoutError, self.add_late_ranks(cause)
            message_end = ": rank {cause.rank} has aborted the group. Its error: {cause}"
            self.fatal_error = self.error(error_class, call, message_end, cause=cause)
        return self.fatal_error.copy()

    def abort_peer_lost(self, call: StartedCall, reason: str = "", cause: FusedTPError | None = None) -> FusedTPError:
        """Abort because a peer has closed its connection: the peer has died, or has failed and will publish its error.

        Args:
            reason: message of the backend, if any.
            cause: error of a subgroup, if the connection was in that subgroup.
        """
        # Read before this rank waits below: peers that notice the failure also close their connections, and would be
        # mistaken for dead ones.
        closed_ranks = {*self.closed_peers(), *(cause.missing if cause is not None else ())}
        self.post_status(call, has_failed=True)
        statuses = self.read_statuses_within(ROOT_CAUSE_SECONDS)
        if first_failure(statuses) is not None:
            return self.abort_following_peer(call)
        lost_ranks = {
            rank: "" for rank in sorted(closed_ranks) if rank not in statuses or not statuses[rank].has_failed
        }
        message_end = " lost {missing}, which died or closed its connections." + self._backend_message(reason)
        if cause is not None and not lost_ranks:
            message_end += " Cause: {cause}"
        return self.abort(
            call, self.error(PeerLostError, call, message_end, missing=lost_ranks, reason=reason, cause=cause)
        )

    def abort_timed_out(self, call: StartedCall, reason: str = "") -> FusedTPError:
        """Abort at the deadline. Waits briefly for the ranks to publish their statuses, and names the late ranks."""
        error = self.abort(call, self.error(CollectiveTimeoutError, call, f" waited {self.describe_wait(call)}"))
        self.fatal_error = self.add_late_ranks(error).copy(self._backend_message(reason), reason=reason)
        return self.fatal_error.copy()

    def add_late_ranks(self, error: CollectiveTimeoutError) -> CollectiveTimeoutError:
        """Return the timeout `error` of any rank of the group, extended by the ranks that were late for its call."""
        ranks = [rank for rank in range(self.world_size) if rank != error.rank]
        # Other waiting ranks notice the failure at a closed connection, or at their next poll after at most
        # PEER_POLL_SECONDS, and then publish a status.
        statuses = self.board.read_until(
            lambda published: all(rank in published and published[rank].has_failed for rank in ranks),
            2 * PEER_POLL_SECONDS,
        )
        if not self.board.is_answering:
            return error.copy(". The late ranks are unknown, because the group's store does not answer.")
        late_ranks, message_end = describe_late_ranks(statuses, ranks, error.call, error.op, self.arrival_verb)
        return error.copy(message_end, missing=late_ranks)

    def read_statuses_within(self, seconds: float) -> dict[int, RankStatus]:
        """Return the published statuses as soon as one of them has an error, or after `seconds`."""
        return self.board.read_until(lambda published: first_failure(published) is not None, seconds)

    def publish_abort(self, call: StartedCall, error: FusedTPError | None = None) -> None:
        """Publish that this rank has aborted, then leave the group, which notifies peers without a status board."""
        try:
            self.post_status(call, has_failed=True, error=error)
        finally:
            self._depart()
            self.depart_dependents()

    def post_status(self, call: StartedCall, has_failed: bool = False, error: FusedTPError | None = None) -> None:
        """Publish this rank's status: its progress and, with `has_failed`, that it has aborted the group."""
        wait_seconds = time.perf_counter() - call.start_time
        self.board.post(RankStatus(self.calls, list(self._ops), wait_seconds, has_failed, error))

    def peer_failure_message(self) -> str | None:
        """Return a message about the published error of another rank; None if there is none."""
        cause = first_failure(self.board.read())
        if cause is None or cause.rank == self.rank:
            return None
        return f"Rank {cause.rank} has aborted the group. Its error: {cause}"

    def describe_wait(self, call: StartedCall) -> str:
        """Describe how long the call has waited: the timeout setting if the deadline has passed, else the seconds."""
        wait_seconds, deadline = time.perf_counter() - call.start_time, settings.timeout_seconds()
        return f"{deadline:g} s (FUSED_TP_TIMEOUT)" if wait_seconds > 0.9 * deadline else f"{wait_seconds:.1f} s"

    def unusable_error(self) -> FusedTPError:
        """Return the error that calls raise after a failure of the group."""
        return FusedTPError(
            "Group {group!r} is unusable because an earlier call failed: {cause} Destroy the process group and "
            "create a new one.",
            group=self.group.name,
            cause=self.fatal_error,
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
_TRANSPORTS: GroupSlot[list[GroupCalls]] = GroupSlot(lambda group: [])


def _break_groups_after_fork() -> None:
    """Make all groups unusable in a forked child: it shares its parent's connections and would act as its rank."""
    for transport in (transport for transports in _TRANSPORTS.values() for transport in transports):
        if transport.fatal_error is None:
            call = transport.call_for_error("a call")
            transport.fatal_error = transport.error(
                FusedTPError, call, ": this process is a fork of rank {rank} and cannot use its groups."
            )


os.register_at_fork(after_in_child=_break_groups_after_fork)


def group_transports(group: Group) -> list[GroupCalls]:
    """Return all transports of `group` that count their calls."""
    return list(_TRANSPORTS[group])
