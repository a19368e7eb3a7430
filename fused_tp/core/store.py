"""Access to a group's store with timeouts, and exchanges of one value per rank through the store.

An exchange sends each rank's value to all ranks, within a deadline, so that ranks can make the same decision. It needs
no communicator, works on any backend, and moves no tensors, so it may run during CUDA graph capture.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from threading import TIMEOUT_MAX, Thread
from typing import Any, TypeVar

import torch.distributed as dist

from fused_tp.core import settings, tracing
from fused_tp.core.availability import AVAILABLE, Availability, unavailable
from fused_tp.core.errors import CollectiveTimeoutError, FusedTPError, PeerLostError
from fused_tp.core.gloo import close_connections, closed_peers, uses_gloo_on_cpu
from fused_tp.core.group import Group, GroupSlot, on_destroy
from fused_tp.core.pending import start_thread

T = TypeVar("T")
_ErrorT = TypeVar("_ErrorT", bound=FusedTPError)

STORE_TIMEOUT_SECONDS = 2.0  # timeout of reads and writes while an error is handled
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.0001, 0.05  # between two polls of the store
_PAUSE_PER_RANK_SECONDS = 5e-5  # limits the polls by all ranks of a large group to 20,000 per second
_SLICE_SECONDS = 0.5  # longest wait between two checks for dead peers and Ctrl-C
_FIRST_SLICE_SECONDS = 0.1
_LOST_SECONDS = 0.4  # a rank whose connection has been closed for this long counts as dead or departed

_NEW_GROUP_ADVICE = "Destroy the process group and create a new one."
_OP_OF_GROUP = "{op} of group {group!r}"
_STORE_IS_GONE = (
    "The store of group {group!r} is gone, most likely because the process that hosted it has exited: rank {rank} "
    "cannot "
)


# -- requests with a timeout -------------------------------------------------------------------------------------------


_request_threads: weakref.WeakSet[Thread] = weakref.WeakSet()


@atexit.register
def _join_threads() -> None:
    """Join the requesting threads: a thread that calls torch during interpreter exit would abort the process."""
    deadline = time.perf_counter() + 1.0
    for thread in list(_request_threads):
        thread.join(max(0.0, deadline - time.perf_counter()))


class StoreTimeout(Exception):
    """The store did not answer in time. If the process that hosts the store has died, torch raises RuntimeError."""


class RequestThreadError(StoreTimeout):
    """The system could not start a thread for the request to the store; the message contains the reason."""


class StoreWithTimeout:
    """Requests to `store` with a timeout: `StoreWithTimeout(store).request(lambda store: store.get(key), seconds)`.

    torch's stores block forever if the process that hosts the store is stopped. So a thread makes the request, and is
    abandoned if the store does not answer in time. Until that thread returns, further requests raise StoreTimeout,
    because they would queue behind the first one.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._abandoned_thread: Thread | None = None  # the thread whose request was not answered in time

    def request(self, request: Callable[[dist.Store], T], seconds: float = STORE_TIMEOUT_SECONDS) -> T:
        """Return the result of `request(store)`, or raise its exception.

        Raises:
            StoreTimeout: there is no result within `seconds`, or an earlier request has not been answered yet.
            RequestThreadError: no thread could be started.
        """
        if self._abandoned_thread is not None and self._abandoned_thread.is_alive():
            raise StoreTimeout("The store has not answered an earlier request yet.")
        result: Future[T] = Future()

        def ask() -> None:
            try:
                result.set_result(request(self._store))
            except Exception as error:
                result.set_exception(error)

        thread = Thread(target=ask, name="fused_tp store", daemon=True)
        try:
            start_thread(thread)
        except RuntimeError as error:  # thread limit reached, or the interpreter is shutting down
            raise RequestThreadError(str(error)) from error
        _request_threads.add(thread)
        thread.join(min(seconds, TIMEOUT_MAX))
        if not result.done():
            self._abandoned_thread = thread
            raise StoreTimeout(f"The store did not answer within {seconds:g} s.")
        return result.result()


def _process_group(group: Group) -> dist.ProcessGroup:
    assert group.process_group is not None
    return group.process_group


def _make_store(group: Group) -> StoreWithTimeout:
    return StoreWithTimeout(dist.distributed_c10d._get_process_group_store(_process_group(group)))


GROUP_STORES: GroupSlot[StoreWithTimeout] = GroupSlot(_make_store)


# -- exchanges ---------------------------------------------------------------------------------------------------------


@dataclass
class _ExchangeState:
    """State of a rank's exchanges in its group."""

    key_prefix: str | None = None  # prefix of the keys in the group's store
    exchange_counts: dict[str, int] = field(default_factory=dict)  # number of exchanges, by name
    agreements: dict[str, Availability] = field(default_factory=dict)  # results of `agree_on_availability`
    failure: FusedTPError | None = None  # the error of a failed exchange, after which no exchange is possible


_EXCHANGE_STATES: GroupSlot[_ExchangeState] = GroupSlot(lambda group: _ExchangeState())


def exchange(group: Group, name: str, value: Any = None, find_lost_ranks: Callable[[], list[int]] = list) -> list[Any]:
    """Send `value` to all ranks, and return the values of all ranks, by rank. A collective call.

    Args:
        name: name of the exchange, equal on all ranks. It may contain a device type, but no device index.
        value: this rank's value, of any JSON type; tuples arrive as lists.
        find_lost_ranks: returns the ranks that the caller knows to have died or left; called while this rank waits.

    Raises:
        CollectiveTimeoutError: a rank sent no value within `FUSED_TP_TIMEOUT` seconds, on this rank or a peer; the
            message names the missing rank. Or the store did not answer.
        PeerLostError: a rank died before it sent its value, which is detected within a second if gloo is the group's
            CPU backend. Or the process that hosts the store died before this rank could send its value.
        FusedTPError: an earlier exchange failed, so the ranks' calls no longer match.
    """
    group.check_process()
    if (earlier_failure := _EXCHANGE_STATES[group].failure) is not None:
        raise FusedTPError(
            "Group {group!r} is unusable since an exchange between its ranks failed: {cause} " + _NEW_GROUP_ADVICE,
            group=group.name,
            cause=earlier_failure,
        )
    store_exchange = _StoreExchange(group, name, find_lost_ranks)
    try:
        with tracing.wait_span(f"exchange of {name}, group {group.name}"):
            store_exchange.send(json.dumps(value).encode())
            return [json.loads(store_exchange.receive(rank)) for rank in range(group.size)]
    except StoreTimeout as error:
        timeout_error: FusedTPError = store_exchange.make_error(
            CollectiveTimeoutError,
            f"{_OP_OF_GROUP} on rank {{rank}}: the group's store has not answered within {_describe_timeout()}; the "
            "process that hosts it may be stopped.",
        )
        if isinstance(error, RequestThreadError):
            timeout_error = store_exchange.make_error(
                FusedTPError, f"{_OP_OF_GROUP} failed on rank {{rank}}. {{reason}}", reason=str(error)
            )
            # Without a thread the store cannot notify peers; closed connections notify them.
            if uses_gloo_on_cpu(process_group := _process_group(group)):
                close_connections(process_group)
        publish_failure(group, timeout_error)
        raise timeout_error from error
    except FusedTPError as error:
        publish_failure(group, error)
        raise


def agree_on_availability(group: Group, feature: str, check_here: Callable[[], Availability]) -> Availability:
    """Return whether `feature` is available on all ranks of `group`, with the first reason if it is not.

    All ranks get the same answer, whereas local checks could differ between ranks. All ranks must make the first call
    together.

    Args:
        check_here: returns the availability on this rank; called the first time only.

    Raises:
        CollectiveTimeoutError: a rank did not call within `FUSED_TP_TIMEOUT` seconds.
    """
    agreements = _EXCHANGE_STATES[group].agreements
    if feature not in agreements:
        agreements[feature] = first_unavailability(exchange(group, feature, check_here().reason))
    return agreements[feature]


def first_unavailability(reasons: Iterable[str]) -> Availability:
    """Return the first non-empty one of `reasons` (one per rank) as unavailability; AVAILABLE if all are empty."""
    return next((unavailable(f"rank {rank}: {reason}") for rank, reason in enumerate(reasons) if reason), AVAILABLE)


def publish_failure(group: Group, error: FusedTPError) -> None:
    """Record and publish `error`, so that current and later exchanges of peers raise instead of waiting."""
    if _EXCHANGE_STATES[group].failure is not None:
        return
    _EXCHANGE_STATES[group].failure = error.copy()
    content = json.dumps(error.as_dict())
    # The process that hosts the store may have died, or may be stopped.
    with contextlib.suppress(RuntimeError, StoreTimeout):
        GROUP_STORES[group].request(
            lambda store: _set_bytes(store, f"{_key_prefix(group, store)}/failed", content.encode())
        )


def create_together(slot: GroupSlot[T | FusedTPError], group: Group, make: Callable[[Group], T]) -> T:
    """Return the value of `slot` for `group`; the first call creates it by `make` and is collective.

    If `make` fails, peers are notified and later calls raise the error again. A retry could not succeed, because ranks
    may have made different numbers of attempts.
    """
    value = slot.get(group)
    if value is None:
        try:
            value = slot[group] = make(group)
        except FusedTPError as error:
            publish_failure(group, error)
            message = "Group {group!r} is unusable since its first call failed: {cause} " + _NEW_GROUP_ADVICE
            slot[group] = type(error)(message, group=group.name, cause=error.copy())
            raise
    if isinstance(value, FusedTPError):
        raise value.copy()
    return value


def next_key_prefix(store: dist.Store, name: str, rank: int) -> str:
    """Return a new key prefix in `store`, equal on all ranks: `name` and the number of this rank's calls for it.

    A store may outlive its group and be reused by a later group of the same name, so each rank counts its groups.
    """
    return f"{name}/{store.add(f'{name}/generation/{rank}', 1)}"


def _key_prefix(group: Group, store: dist.Store) -> str:
    """Return the key prefix of the group's exchanges in its store."""
    exchanges = _EXCHANGE_STATES[group]
    if exchanges.key_prefix is None:
        exchanges.key_prefix = next_key_prefix(store, "fused_tp/exchange", group.rank)
    return exchanges.key_prefix


@on_destroy
def _publish_departure(group: Group) -> None:
    """Publish that this rank has destroyed the group, for peers that wait for it in an exchange, now or later."""
    # A group without exchanges has no entry, and torch has freed its store.
    if group in GROUP_STORES and group.size > 1:
        with contextlib.suppress(RuntimeError, StoreTimeout):  # the process that hosts the store may have exited
            GROUP_STORES[group].request(
                lambda store: _set_bytes(store, f"{_key_prefix(group, store)}/left/{group.rank}", b"")
            )


def _set_bytes(store: dist.Store, key: str, value: bytes) -> None:
    store.set(key, value)  # type: ignore[arg-type]  # accepts bytes, although its stub does not


def _describe_timeout() -> str:
    return f"{settings.timeout_seconds():g} s (FUSED_TP_TIMEOUT)"


class _StoreExchange:
    """One exchange: sends this rank's value and waits for the peers' values until the deadline."""

    def __init__(self, group: Group, name: str, find_lost_ranks: Callable[[], list[int]]) -> None:
        self._group, self._name, self._find_lost_ranks = group, name, find_lost_ranks
        exchange_counts = _EXCHANGE_STATES[group].exchange_counts
        self._number = exchange_counts[name] = exchange_counts.get(name, 0) + 1
        self._deadline = time.monotonic() + settings.timeout_seconds()
        # The first slice is short, so that a peer that died before the exchange is detected soon.
        self._slice_seconds = _FIRST_SLICE_SECONDS
        self._closed_since: dict[int, float] = {}  # when gloo's connections were first seen closed, by rank

    def make_error(self, error_class: type[_ErrorT], message: str, **fields: Any) -> _ErrorT:
        group = self._group
        return error_class(message, op=self._name, group=group.name, rank=group.rank, size=group.size, **fields)

    def send(self, value: bytes) -> None:
        try:
            self._request(lambda store: _set_bytes(store, self._key(store, self._group.rank), value))
        except RuntimeError as error:
            message = _STORE_IS_GONE + "send its value in {op}. Error of the store: {reason}"
            raise self.make_error(PeerLostError, message, reason=str(error).splitlines()[0][:300]) from error

    def receive(self, rank: int) -> bytes:
        while True:
            seconds_left = self._deadline - time.monotonic()
            try:
                value = self._request(
                    partial(self._poll_value, rank, max(min(seconds_left, self._slice_seconds), 0.01))
                )
            except RuntimeError as error:
                cause: RuntimeError | None = error
                time.sleep(0.01)  # requests to a dead store raise immediately, so this loop would spin
            else:
                if value is not None:
                    return value
                cause = None
            if (failure := self._find_failure(seconds_left <= self._slice_seconds)) is not None:
                raise failure from cause
            self._slice_seconds = _FIRST_SLICE_SECONDS if self._closed_since else _SLICE_SECONDS

    def _poll_value(self, rank: int, seconds: float, store: dist.Store) -> bytes | None:
        """Return the value of `rank`, or None if it has not arrived within `seconds`."""
        # not `store.wait`: at each timeout torch writes two warnings to stderr
        key, end_time, pause = self._key(store, rank), time.monotonic() + seconds, _FIRST_PAUSE_SECONDS
        longest_pause = max(_MAX_PAUSE_SECONDS, _PAUSE_PER_RANK_SECONDS * self._group.size)
        while not store.check([key]):
            if time.monotonic() >= end_time:
                return None
            time.sleep(pause)  # polls: torch's store can only wait by the calls that write these warnings
            pause = min(1.5 * pause, longest_pause)  # grows by half, so the result is late by at most half of the wait
        return store.get(key)

    def _request(self, request: Callable[[dist.Store], T]) -> T:
        # A slow store may answer until the deadline.
        return GROUP_STORES[self._group].request(request, max(STORE_TIMEOUT_SECONDS, self._deadline - time.monotonic()))

    def _key(self, store: dist.Store, rank: int) -> str:
        return f"{_key_prefix(self._group, store)}/{self._name}/{self._number}/{rank}"

    def _find_failure(self, is_expired: bool) -> FusedTPError | None:
        absent_ranks = self._find_absent_ranks()
        if absent_ranks == []:  # the last value has arrived since the poll
            return None
        if (cause := self._read_published_error()) is not None:
            error_class = PeerLostError if isinstance(cause, PeerLostError) else CollectiveTimeoutError
            return self.make_error(
                error_class, f"{_OP_OF_GROUP} on rank {{rank}}: a peer failed. Its error: {{cause}}", cause=cause
            )
        if lost_ranks := self._find_departed_ranks(absent_ranks) or self._find_lost_ranks():
            message = f"{{Missing}} died or left the group before joining {_OP_OF_GROUP}. This is rank {{rank}}."
            return self.make_error(PeerLostError, message, missing=dict.fromkeys(lost_ranks, ""))
        if not is_expired:
            return None
        if absent_ranks is None:
            message = (
                _STORE_IS_GONE + f"receive the values of its peers in {{op}}. It has waited {_describe_timeout()}."
            )
            return self.make_error(CollectiveTimeoutError, message)
        message = (
            f"{{Missing}} did not take part in {_OP_OF_GROUP} within {_describe_timeout()}; all ranks of a group must "
            "call its ops. This is rank {rank}."
        )
        return self.make_error(CollectiveTimeoutError, message, missing=dict.fromkeys(absent_ranks, ""))

    def _find_departed_ranks(self, absent_ranks: Sequence[int] | None) -> list[int]:
        """Return the ranks that have died or left; only ranks in `absent_ranks`, if these are known.

        Deaths are detected only with gloo. A closed connection counts after `_LOST_SECONDS`, because a rank whose own
        receive timed out has also closed its connections, and may still join.
        """
        process_group, now = _process_group(self._group), time.monotonic()
        if uses_gloo_on_cpu(process_group):
            for rank in closed_peers(process_group):
                self._closed_since.setdefault(rank, now)
        closed_ranks = [rank for rank, since in sorted(self._closed_since.items()) if now - since >= _LOST_SECONDS]

        def find_left_ranks(store: dist.Store) -> list[int]:
            prefix = _key_prefix(self._group, store)
            return [rank for rank in absent_ranks or () if store.check([f"{prefix}/left/{rank}"])]

        return self._request_or_none_if_host_died(find_left_ranks) or [
            rank for rank in closed_ranks if absent_ranks is None or rank in absent_ranks
        ]

    def _read_published_error(self) -> FusedTPError | None:
        """Return the error that a peer has published; None if there is none."""

        def request(store: dist.Store) -> FusedTPError | None:
            key = f"{_key_prefix(self._group, store)}/failed"
            return FusedTPError.from_dict(json.loads(store.get(key))) if store.check([key]) else None

        return self._request_or_none_if_host_died(request)

    def _find_absent_ranks(self) -> list[int] | None:
        """Return the ranks whose values are missing; None if the process that hosts the store has died."""
        return self._request_or_none_if_host_died(
            lambda store: [rank for rank in range(self._group.size) if not store.check([self._key(store, rank)])]
        )

    def _request_or_none_if_host_died(self, request: Callable[[dist.Store], T]) -> T | None:
        """Return the result of `request(store)`; None if the process that hosts the store has died."""
        try:
            return self._request(request)
        except RuntimeError:
            return None
