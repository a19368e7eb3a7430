"""A group's store: asked so that every question ends, and the ranks' exchange of values through it.

An exchange gives every rank a value of each, within a deadline: to agree on something. It works before anything else
does, on any backend, and moves no tensor, so a CUDA graph's capture does not mind.
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
from datetime import timedelta
from threading import TIMEOUT_MAX, Thread
from typing import Any, TypeVar

import torch.distributed as dist

from fused_tp.runtime import settings, tracing
from fused_tp.runtime.availability import AVAILABLE, Availability, unavailable
from fused_tp.runtime.errors import CollectiveTimeoutError, FusedTPError, PeerLostError
from fused_tp.runtime.group import Group, GroupSlot, on_destroy
from fused_tp.transport.base import start_thread
from fused_tp.transport.gloo import close_connections, closed_peers, serves_cpu

T = TypeVar("T")
_ErrorT = TypeVar("_ErrorT", bound=FusedTPError)

ANSWER_SECONDS = 2.0  # reads and writes on the way to an error wait no longer
_SLICE_SECONDS = 0.5  # a wait inside the store sees neither Ctrl-C nor the death of a peer
_FIRST_SLICE_SECONDS = 0.1
_LOST_SECONDS = 0.4  # a connection that has been closed for so long is that of a rank that has died, or left

_MAKE_A_NEW_ONE = "Destroy the process group and make a new one."
_WHERE = "{op} of group {group!r}"
_STORE_IS_GONE = (
    "The store of group {group!r} is gone, most likely with the process that hosted it: rank {rank} cannot "
)


# -- questions that end ------------------------------------------------------------------------------------------------


_threads: weakref.WeakSet[Thread] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """A thread that still calls torch while the interpreter goes away ends the process with an abort."""
    deadline = time.perf_counter() + 1.0
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.perf_counter()))


class NoAnswer(Exception):
    """The store has not answered in time. A store that has died with its host raises RuntimeError."""


class NoThread(NoAnswer):
    """There is no thread to ask the store; says why."""


class BoundedStore:
    """Asks `store`, as `BoundedStore(store).ask(lambda store: store.get(key), seconds)`.

    torch's own stores block for ever once the host of the store is stopped. So a thread asks, and is left behind where
    it has no answer in time. Until it has returned nothing else is asked: the others would only queue behind it.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._left: Thread | None = None  # the thread that had no answer in time

    def ask(self, question: Callable[[dist.Store], T], seconds: float = ANSWER_SECONDS) -> T:
        """What `question(store)` returns or raises.

        Raises:
            NoAnswer: it has not within `seconds`, or an earlier one has not yet.
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
        except RuntimeError as error:  # no more threads may be had, or the interpreter is shutting down
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
    """What a rank knows of its group's exchanges."""

    place: str | None = None  # where they are in the group's store
    counts: dict[str, int] = field(default_factory=dict)  # how many there have been, by what they were for
    agreed: dict[str, Availability] = field(default_factory=dict)  # what `agree` has found out
    failed: FusedTPError | None = None  # why the ranks cannot agree on anything any more


_EXCHANGES: GroupSlot[_Exchanges] = GroupSlot(lambda group: _Exchanges())


def exchange(group: Group, what: str, mine: Any = None, gone: Callable[[], list[int]] = list) -> list[Any]:
    """What every rank has given for `what`, by rank. A collective call.

    Args:
        mine: anything that JSON can carry; tuples arrive as lists.
        what: the same on all ranks; so it names a type of device, where one matters, and not the rank's own.
        gone: the ranks of which the caller knows that they have died or left, asked while some are waited for.

    Raises:
        CollectiveTimeoutError: some rank has given nothing within `FUSED_TP_TIMEOUT` seconds, here or at a peer; names
            which. Or the store has not answered.
        PeerLostError: one of those has died; where gloo moves the group's CPU tensors that is noticed within a second.
            Or the store had died with its host before this rank could give anything.
        FusedTPError: that was so before. The ranks no longer mean the same by their calls.
    """
    group.check_process()
    if (failed := _EXCHANGES[group].failed) is not None:
        raise FusedTPError(
            "Group {group!r} is unusable since its ranks failed to agree: {cause} " + _MAKE_A_NEW_ONE,
            group=group.name,
            cause=failed,
        )
    current = _Exchange(group, what, gone)
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
            if serves_cpu(process_group := _process_group(group)):  # peers hear nothing through the store
                close_connections(process_group)
        publish_failure(group, silent)
        raise silent from error
    except FusedTPError as error:
        publish_failure(group, error)
        raise


def agree(group: Group, what: str, here: Callable[[], Availability]) -> Availability:
    """Whether all ranks of `group` can do `what`, with the first reason where some cannot: the same answer everywhere,
    since ranks that judged for themselves would part ways. The first time, all ranks must ask together.

    Args:
        here: whether this rank can; asked the first time only.

    Raises:
        CollectiveTimeoutError: some rank did not ask within `FUSED_TP_TIMEOUT` seconds.
    """
    agreed = _EXCHANGES[group].agreed
    if what not in agreed:
        agreed[what] = first_reason(exchange(group, what, here().reason))
    return agreed[what]


def first_reason(reasons: Iterable[str]) -> Availability:
    """The first of the ranks' reasons why not, with its rank; AVAILABLE where no rank has one."""
    return next((unavailable(f"rank {rank}: {reason}") for rank, reason in enumerate(reasons) if reason), AVAILABLE)


def publish_failure(group: Group, error: FusedTPError) -> None:
    """The ranks can agree on nothing any more: peers that wait for this one, now or later, need wait no longer."""
    if _EXCHANGES[group].failed is not None:
        return
    _EXCHANGES[group].failed = error.copy()
    told = json.dumps(error.as_dict())
    with contextlib.suppress(RuntimeError, NoAnswer):  # of a store whose host has died, or does not answer
        STORES[group].ask(lambda store: _set(store, f"{_place(group, store)}/failed", told.encode()))


def made_together(slot: GroupSlot[T | FusedTPError], group: Group, make: Callable[[Group], T]) -> T:
    """What `slot` has for `group`. The first call, which all ranks make together, makes it.

    Where that fails, peers are notified and later calls raise it again: the ranks no longer agree on how often they
    have tried, and a second try could not succeed.
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
    """Where in `store` this group has the keys that all its groups of this name have under `name`.

    A store may outlive its group and serve another of the same name: each rank counts its groups there.
    """
    return f"{name}/{store.add(f'{name}/generation/{rank}', 1)}"


def _place(group: Group, store: dist.Store) -> str:
    """Where in the group's store its exchanges are."""
    exchanges = _EXCHANGES[group]
    if exchanges.place is None:
        exchanges.place = own_place(store, "fused_tp/exchange", group.rank)
    return exchanges.place


@on_destroy
def _leave(group: Group) -> None:
    """Peers that wait for this rank in an exchange, now or later, hear that it has destroyed the group."""
    if group in STORES and group.size > 1:  # else this rank has told them nothing, and its store cannot be had any more
        with contextlib.suppress(RuntimeError, NoAnswer):  # as in `publish_failure`
            STORES[group].ask(lambda store: _set(store, f"{_place(group, store)}/left/{group.rank}", b""))


def _set(store: dist.Store, key: str, value: bytes) -> None:
    store.set(key, value)  # type: ignore[arg-type]  # takes bytes, whatever its stub says


def _deadline() -> str:
    return f"{settings.timeout_seconds():g} s (FUSED_TP_TIMEOUT)"


class _Exchange:
    """One exchange: what this rank gives, and waiting for what the others give, within the deadline."""

    def __init__(self, group: Group, what: str, gone: Callable[[], list[int]]) -> None:
        self._group, self._what, self._gone = group, what, gone
        counts = _EXCHANGES[group].counts
        self._count = counts[what] = counts.get(what, 0) + 1
        self._deadline = time.monotonic() + settings.timeout_seconds()
        # Who died before needs not a whole slice to be noticed.
        self._slice = _FIRST_SLICE_SECONDS
        self._closed_since: dict[int, float] = {}  # connections of gloo, by rank

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
            seconds = timedelta(seconds=max(min(left, self._slice), 0.01))

            def wait(store: dist.Store, seconds: timedelta = seconds) -> bytes:
                key = self._key(store, rank)
                store.wait([key], seconds)
                return store.get(key)

            try:
                return self._ask(wait)
            except RuntimeError as error:  # DistStoreError from most stores, a plain one from FileStore
                if (failure := self._failure(left <= self._slice)) is not None:
                    raise failure from error
                self._slice = _FIRST_SLICE_SECONDS if self._closed_since else _SLICE_SECONDS
                time.sleep(0.01)  # a store that has died raises at once

    def _ask(self, question: Callable[[dist.Store], T]) -> T:
        # A store that is only slow has until the deadline.
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
        """Ranks that have died or left, of the `absent` ones where those are known, where gloo moves CPU tensors.

        Not at the first look: a peer may join although its connection is closed, as a receive of its own that timed out
        closes it too.
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
        """What a peer has failed with."""

        def question(store: dist.Store) -> FusedTPError | None:
            key = f"{_place(self._group, store)}/failed"
            return FusedTPError.from_dict(json.loads(store.get(key))) if store.check([key]) else None

        return self._known(question)

    def _absent(self) -> list[int] | None:
        """Ranks that have given nothing; None where the store has died with its host."""
        return self._known(
            lambda store: [rank for rank in range(self._group.size) if not store.check([self._key(store, rank)])]
        )

    def _known(self, question: Callable[[dist.Store], T]) -> T | None:
        """What the store answers; None where it has died with its host."""
        try:
            return self._ask(question)
        except RuntimeError:
            return None
