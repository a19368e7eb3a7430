"""Bounded access to a group's store, and the ranks' exchange of values through it.

An exchange sends one value of each rank to every rank, within a deadline, so that ranks can agree. It requires no other
communication to be set up, works on any backend, and moves no tensor, so it may run while a CUDA graph is captured.
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
from fused_tp.core.gloo import close_connections, closed_peers, serves_cpu
from fused_tp.core.group import Group, GroupSlot, on_destroy
from fused_tp.core.pending import start_thread

T = TypeVar("T")
_ErrorT = TypeVar("_ErrorT", bound=FusedTPError)

ANSWER_SECONDS = 2.0  # limit for reads and writes while an error is handled
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.0001, 0.05  # between two polls of the store
_PAUSE_PER_RANK_SECONDS = 5e-5  # so that all ranks of a large group together send it at most 20,000 polls a second
_SLICE_SECONDS = 0.5  # a wait inside the store notices neither Ctrl-C nor the death of a peer
_FIRST_SLICE_SECONDS = 0.1
_LOST_SECONDS = 0.4  # a rank whose connection has been closed for this long has died, or left

_MAKE_A_NEW_ONE = "Destroy the process group and make a new one."
_WHERE = "{op} of group {group!r}"
_STORE_IS_GONE = (
    "The store of group {group!r} is gone, most likely with the process that hosted it: rank {rank} cannot "
)


# -- bounded questions -------------------------------------------------------------------------------------------------


_threads: weakref.WeakSet[Thread] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Join the asking threads: one that calls torch while the interpreter exits would abort the process."""
    deadline = time.perf_counter() + 1.0
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.perf_counter()))


class NoAnswer(Exception):
    """The store has not answered in time. A store that died with its host raises RuntimeError instead."""


class NoThread(NoAnswer):
    """No thread could be started to ask the store; the message has the reason."""


class BoundedStore:
    """Bounded access to `store`: `BoundedStore(store).ask(lambda store: store.get(key), seconds)`.

    torch's own stores block for ever once the host of the store is stopped. So a thread asks, and is left behind if it
    gets no answer in time. Until that thread returns, nothing else is asked: it would only queue behind it.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._left: Thread | None = None  # the thread that got no answer in time

    def ask(self, question: Callable[[dist.Store], T], seconds: float = ANSWER_SECONDS) -> T:
        """Return the result of `question(store)`, or raise its exception.

        Raises:
            NoAnswer: there is no result within `seconds`, or an earlier question is still open.
        """
        if self._left is not None and self._left.is_alive():
            raise NoAnswer("An earlier question has not been answered yet.")
        answer: Future[T] = Future()

        def ask() -> None:
            try:
                answer.set_result(question(self._store))
            except Exception as error:
                answer.set_exception(error)

        thread = Thread(target=ask, name="fused_tp store", daemon=True)
        try:
            start_thread(thread)
        except RuntimeError as error:  # thread limit reached, or the interpreter is shutting down
            raise NoThread(str(error)) from error
        _threads.add(thread)
        thread.join(min(seconds, TIMEOUT_MAX))
        if not answer.done():
            self._left = thread
            raise NoAnswer(f"No answer within {seconds:g} s.")
        return answer.result()


def _process_group(group: Group) -> dist.ProcessGroup:
    assert group.process_group is not None
    return group.process_group


def _store_of(group: Group) -> BoundedStore:
    return BoundedStore(dist.distributed_c10d._get_process_group_store(_process_group(group)))


STORES: GroupSlot[BoundedStore] = GroupSlot(_store_of)


# -- exchanges ---------------------------------------------------------------------------------------------------------


@dataclass
class _Exchanges:
    """State of a rank's exchanges in its group."""

    place: str | None = None  # prefix of their keys in the group's store
    counts: dict[str, int] = field(default_factory=dict)  # number of exchanges, by name
    agreed: dict[str, Availability] = field(default_factory=dict)  # results of `agree`
    failed: FusedTPError | None = None  # why the ranks cannot agree any more


_EXCHANGES: GroupSlot[_Exchanges] = GroupSlot(lambda group: _Exchanges())


def exchange(group: Group, what: str, mine: Any = None, gone: Callable[[], list[int]] = list) -> list[Any]:
    """Return every rank's value for `what`, by rank. A collective call.

    Args:
        mine: this rank's value, of any JSON type; tuples arrive as lists.
        what: name of the exchange, the same on all ranks: it may contain a device type, but not a rank's own device.
        gone: returns the ranks that the caller knows to have died or left; called while some are waited for.

    Raises:
        CollectiveTimeoutError: some rank sent nothing within `FUSED_TP_TIMEOUT` seconds, here or at a peer; names that
            rank. Or the store has not answered.
        PeerLostError: a rank that sent nothing has died; noticed within a second if gloo moves the group's CPU tensors.
            Or the store died with its host before this rank could send anything.
        FusedTPError: an earlier exchange failed, so the ranks' calls no longer match.
    """
    group.check_process()
    if (failed := _EXCHANGES[group].failed) is not None:
        raise FusedTPError(
            "Group {group!r} is unusable since its ranks failed to agree: {cause} " + _MAKE_A_NEW_ONE,
            group=group.name,
            cause=failed,
        )
    current = _StoreExchange(group, what, gone)
    try:
        with tracing.waiting(f"exchange of {what}, group {group.name}"):
            current.give(json.dumps(mine).encode())
            return [json.loads(current.get(rank)) for rank in range(group.size)]
    except NoAnswer as error:
        silent: FusedTPError = current.error(
            CollectiveTimeoutError,
            f"{_WHERE} on rank {{rank}}: the group's store has not answered within {_deadline()}; the process that "
            "hosts it may be stopped.",
        )
        if isinstance(error, NoThread):
            silent = current.error(FusedTPError, f"{_WHERE} failed on rank {{rank}}. {{reason}}", reason=str(error))
            if serves_cpu(process_group := _process_group(group)):  # the store cannot notify peers
                close_connections(process_group)
        publish_failure(group, silent)
        raise silent from error
    except FusedTPError as error:
        publish_failure(group, error)
        raise


def agree(group: Group, what: str, here: Callable[[], Availability]) -> Availability:
    """Availability of `what` to all ranks of `group`, with the first reason if some lack it. All ranks get the same
    answer; ranks that judged alone could differ. All ranks must make the first call together.

    Args:
        here: availability to this rank; called the first time only.

    Raises:
        CollectiveTimeoutError: some rank did not call within `FUSED_TP_TIMEOUT` seconds.
    """
    agreed = _EXCHANGES[group].agreed
    if what not in agreed:
        agreed[what] = first_reason(exchange(group, what, here().reason))
    return agreed[what]


def first_reason(reasons: Iterable[str]) -> Availability:
    """The first reason among the ranks' reasons why not, with its rank; AVAILABLE if no rank has one."""
    return next((unavailable(f"rank {rank}: {reason}") for rank, reason in enumerate(reasons) if reason), AVAILABLE)


def publish_failure(group: Group, error: FusedTPError) -> None:
    """Record and publish that the ranks cannot agree any more, so that peers do not wait for this one, now or later."""
    if _EXCHANGES[group].failed is not None:
        return
    _EXCHANGES[group].failed = error.copy()
    told = json.dumps(error.as_dict())
    with contextlib.suppress(RuntimeError, NoAnswer):  # the store's host may have died, or not answer
        STORES[group].ask(lambda store: _set(store, f"{_place(group, store)}/failed", told.encode()))


def made_together(slot: GroupSlot[T | FusedTPError], group: Group, make: Callable[[Group], T]) -> T:
    """Return the value of `slot` for `group`. The first call makes it, and must be made by all ranks together.

    If that fails, peers are notified and later calls raise the error again: the ranks no longer agree on the number of
    attempts, so a second one could not succeed.
    """
    found = slot.get(group)
    if found is None:
        try:
            found = slot[group] = make(group)
        except FusedTPError as error:
            publish_failure(group, error)
            sentence = "Group {group!r} is unusable since its first call failed: {cause} " + _MAKE_A_NEW_ONE
            slot[group] = type(error)(sentence, group=group.name, cause=error.copy())
            raise
    if isinstance(found, FusedTPError):
        raise found.copy()
    return found


def own_place(store: dist.Store, name: str, rank: int) -> str:
    """Return the key prefix in `store` for this group's use of `name`.

    A store may outlive its group and serve another one of the same name, so each rank counts its groups there.
    """
    return f"{name}/{store.add(f'{name}/generation/{rank}', 1)}"


def _place(group: Group, store: dist.Store) -> str:
    """Key prefix of the group's exchanges in its store."""
    exchanges = _EXCHANGES[group]
    if exchanges.place is None:
        exchanges.place = own_place(store, "fused_tp/exchange", group.rank)
    return exchanges.place


@on_destroy
def _leave(group: Group) -> None:
    """Notify peers that wait for this rank in an exchange, now or later, that it has destroyed the group."""
    if group in STORES and group.size > 1:  # otherwise it has made no exchange, and its store is no longer accessible
        with contextlib.suppress(RuntimeError, NoAnswer):  # as in `publish_failure`
            STORES[group].ask(lambda store: _set(store, f"{_place(group, store)}/left/{group.rank}", b""))


def _set(store: dist.Store, key: str, value: bytes) -> None:
    store.set(key, value)  # type: ignore[arg-type]  # accepts bytes, although its stub does not


def _deadline() -> str:
    return f"{settings.timeout_seconds():g} s (FUSED_TP_TIMEOUT)"


class _StoreExchange:
    """One exchange: sends this rank's value, and waits for the others' values, within the deadline."""

    def __init__(self, group: Group, what: str, gone: Callable[[], list[int]]) -> None:
        self._group, self._what, self._gone = group, what, gone
        counts = _EXCHANGES[group].counts
        self._count = counts[what] = counts.get(what, 0) + 1
        self._deadline = time.monotonic() + settings.timeout_seconds()
        # Short at first, so that a peer that died earlier is noticed soon.
        self._slice = _FIRST_SLICE_SECONDS
        self._closed_since: dict[int, float] = {}  # when gloo's connections were first seen closed, by rank

    def error(self, kind: type[_ErrorT], sentence: str, **fields: Any) -> _ErrorT:
        group = self._group
        return kind(sentence, op=self._what, group=group.name, rank=group.rank, size=group.size, **fields)

    def give(self, mine: bytes) -> None:
        try:
            self._ask(lambda store: _set(store, self._key(store, self._group.rank), mine))
        except RuntimeError as error:
            sentence = _STORE_IS_GONE + "tell its peers anything in {op}. It says: {reason}"
            raise self.error(PeerLostError, sentence, reason=str(error).splitlines()[0][:300]) from error

    def get(self, rank: int) -> bytes:
        while True:
            left = self._deadline - time.monotonic()
            try:
                value = self._ask(partial(self._polled, rank, max(min(left, self._slice), 0.01)))
            except RuntimeError as error:
                cause: RuntimeError | None = error
                time.sleep(0.01)  # a store that has died raises at once
            else:
                if value is not None:
                    return value
                cause = None
            if (failure := self._failure(left <= self._slice)) is not None:
                raise failure from cause
            self._slice = _FIRST_SLICE_SECONDS if self._closed_since else _SLICE_SECONDS

    def _polled(self, rank: int, seconds: float, store: dist.Store) -> bytes | None:
        """Return the value of `rank`, or None if it has not arrived within `seconds`."""
        # Not `store.wait`: torch writes two warnings to stderr each time one ends without a value.
        key, end, pause = self._key(store, rank), time.monotonic() + seconds, _FIRST_PAUSE_SECONDS
        longest = max(_LONGEST_PAUSE_SECONDS, _PAUSE_PER_RANK_SECONDS * self._group.size)
        while not store.check([key]):
            if time.monotonic() >= end:
                return None
            time.sleep(pause)
            pause = min(1.5 * pause, longest)  # delays the result by about half of the wait at most
        return store.get(key)

    def _ask(self, question: Callable[[dist.Store], T]) -> T:
        # A store that is merely slow has until the deadline.
        return STORES[self._group].ask(question, max(ANSWER_SECONDS, self._deadline - time.monotonic()))

    def _key(self, store: dist.Store, rank: int) -> str:
        return f"{_place(self._group, store)}/{self._what}/{self._count}/{rank}"

    def _failure(self, expired: bool) -> FusedTPError | None:
        absent = self._absent()
        if absent == []:  # it has arrived just now
            return None
        if (cause := self._published()) is not None:
            kind = PeerLostError if isinstance(cause, PeerLostError) else CollectiveTimeoutError
            return self.error(kind, f"{_WHERE} on rank {{rank}}: a peer gave up. It said: {{cause}}", cause=cause)
        if lost := self._departed(absent) or self._gone():
            sentence = f"{{Missing}} died, or left the group, before it took part in {_WHERE}. This is rank {{rank}}."
            return self.error(PeerLostError, sentence, missing=dict.fromkeys(lost, ""))
        if not expired:
            return None
        if absent is None:
            sentence = _STORE_IS_GONE + f"hear of its peers in {{op}}, and has waited {_deadline()}."
            return self.error(CollectiveTimeoutError, sentence)
        sentence = (
            f"{{Missing}} did not take part in {_WHERE} within {_deadline()}; all ranks of a group must call its ops. "
            "This is rank {rank}."
        )
        return self.error(CollectiveTimeoutError, sentence, missing=dict.fromkeys(absent, ""))

    def _departed(self, absent: Sequence[int] | None) -> list[int]:
        """Ranks that have died (if gloo moves CPU tensors) or left, of the `absent` ones if these are known.

        A rank is not reported when first seen closed: it may still join, because a timeout of its own receive closes
        the connection too.
        """
        process_group, now = _process_group(self._group), time.monotonic()
        if serves_cpu(process_group):
            for rank in closed_peers(process_group):
                self._closed_since.setdefault(rank, now)
        closed = [rank for rank, since in sorted(self._closed_since.items()) if now - since >= _LOST_SECONDS]

        def left(store: dist.Store) -> list[int]:
            place = _place(self._group, store)
            return [rank for rank in absent or () if store.check([f"{place}/left/{rank}"])]

        return self._known(left) or [rank for rank in closed if absent is None or rank in absent]

    def _published(self) -> FusedTPError | None:
        """The error that a peer has published, or None."""

        def question(store: dist.Store) -> FusedTPError | None:
            key = f"{_place(self._group, store)}/failed"
            return FusedTPError.from_dict(json.loads(store.get(key))) if store.check([key]) else None

        return self._known(question)

    def _absent(self) -> list[int] | None:
        """Ranks that have sent nothing; None if the store has died with its host."""
        return self._known(
            lambda store: [rank for rank in range(self._group.size) if not store.check([self._key(store, rank)])]
        )

    def _known(self, question: Callable[[dist.Store], T]) -> T | None:
        """The store's answer; None if it has died with its host."""
        try:
            return self._ask(question)
        except RuntimeError:
            return None
