"""A value of each rank to all of its group, through the group's store and within a deadline: to agree on something.

It works before anything else does, on any backend, and moves no tensor, so a CUDA graph's capture does not mind.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from fused_tp.runtime import settings
from fused_tp.runtime.errors import CollectiveTimeoutError, FusedTPError, PeerLostError
from fused_tp.runtime.group import Group
from fused_tp.transport.gloo_connections import Departures

_GAVE_UP = "gave up"
_SLICE_SECONDS = 0.5  # a wait inside the store sees neither Ctrl-C nor the death of a peer
_FIRST_SLICE_SECONDS = 0.1


def exchange(group: Group, what: str, mine: bytes) -> list[bytes]:
    """What every rank has given for `what`, by rank. All ranks call it alike, as often as each other.

    Args:
        what: the same on all ranks; so it names a type of device, where one matters, and not the rank's own.

    Raises:
        CollectiveTimeoutError: some rank has given nothing within `FUSED_TP_TIMEOUT` seconds, here or at a peer; names
            which.
        PeerLostError: one of those has died; where gloo moves the group's CPU tensors that is noticed within a second.
        FusedTPError: that was so before. The ranks no longer mean the same by their calls.
    """
    if "exchange failed" in group.memo:
        raise FusedTPError(
            f"Group {group.name!r} is unusable since its ranks failed to agree: {group.memo['exchange failed']} "
            "Destroy the process group and make a new one."
        )
    store, place = _place(group)
    count = group.memo["exchange", what] = group.memo.get(("exchange", what), 0) + 1
    key = f"{place}/{what}/{count}"
    store.set(f"{key}/{group.rank}", mine)  # type: ignore[arg-type]  # takes bytes, whatever its stub says
    assert group.process_group is not None
    waiting = _Waiting(store, place, key, what, group, Departures(group.process_group))
    try:
        return [waiting.get(rank) for rank in range(group.size)]
    except FusedTPError as error:
        give_up(group, error)
        raise


def give_up(group: Group, error: FusedTPError) -> None:
    """The ranks can agree on nothing any more: peers that wait for this one, now or later, need wait no longer."""
    if "exchange failed" in group.memo:
        return
    group.memo["exchange failed"] = str(error)
    with contextlib.suppress(RuntimeError):  # of a store that has died with its host
        store, place = _place(group)
        said = f"{type(error).__name__}: {error}"
        store.set(f"{place}/{_GAVE_UP}", said.encode())  # type: ignore[arg-type]  # as above


def _place(group: Group) -> tuple[dist.Store, str]:
    """The group's store, and where in it its exchanges are."""
    assert group.process_group is not None
    store = dist.distributed_c10d._get_process_group_store(group.process_group)
    if "exchange generation" not in group.memo:
        # A store may outlive its group and serve another of the same name: each rank counts its groups there.
        group.memo["exchange generation"] = store.add(f"fused_tp/exchange/generation/{group.rank}", 1)
    return store, f"fused_tp/exchange/{group.memo['exchange generation']}"


def agree(group: Group, what: str, problem: Callable[[], str | None]) -> str | None:
    """Why not all ranks of `group` can do `what`, or None where all can. The first time, all ranks must ask together.

    Args:
        problem: why this rank cannot; asked the first time only.

    Raises:
        CollectiveTimeoutError: some rank did not ask within `FUSED_TP_TIMEOUT` seconds.
    """
    key = ("agreed", what)
    if key not in group.memo:
        answers = [text.decode() for text in exchange(group, what, (problem() or "").encode())]
        # One reason, the same everywhere: ranks that judged for themselves would part ways.
        group.memo[key] = next((f"rank {rank}: {text}" for rank, text in enumerate(answers) if text), None)
    reason: str | None = group.memo[key]
    return reason


class _Waiting:
    """For what the ranks give in one exchange, within the deadline."""

    def __init__(
        self, store: dist.Store, place: str, key: str, what: str, group: Group, departures: Departures
    ) -> None:
        self._store, self._place, self._key, self._what, self._group = store, place, key, what, group
        self._departures = departures
        self._deadline = time.monotonic() + settings.timeout_seconds()
        # Who died before needs not a whole slice to be noticed.
        self._slice = _FIRST_SLICE_SECONDS

    def get(self, rank: int) -> bytes:
        key = f"{self._key}/{rank}"
        while True:
            left = self._deadline - time.monotonic()
            try:
                self._store.wait([key], timedelta(seconds=max(min(left, self._slice), 0.01)))
                return self._store.get(key)
            except RuntimeError as error:  # DistStoreError from most stores, a plain one from FileStore
                if (failure := self._failure(rank, left <= self._slice)) is not None:
                    raise failure from error
                self._slice = _FIRST_SLICE_SECONDS if self._departures.suspected else _SLICE_SECONDS
                time.sleep(0.01)  # a store that has died raises at once

    def _failure(self, rank: int, expired: bool) -> FusedTPError | None:
        group, absent = self._group, self._absent()
        here = f"{self._what} of group {group.name!r}"
        if absent == []:  # it has come just now
            return None
        said = self._said()
        if said is not None:
            kind = PeerLostError if said.startswith(PeerLostError.__name__) else CollectiveTimeoutError
            return kind(f"{here} on rank {group.rank}: a peer gave up. It said: {said.partition(': ')[2]}")
        if lost := self._departures.look(absent):
            return PeerLostError(
                f"Rank {', '.join(map(str, lost))} died, or left the group, before it took part in {here}. "
                f"This is rank {group.rank}."
            )
        if not expired:
            return None
        return CollectiveTimeoutError(
            f"Rank {', '.join(map(str, absent or [rank]))} did not take part in {here} within "
            f"{settings.timeout_seconds():g} s (FUSED_TP_TIMEOUT); all ranks of a group must call its ops. "
            f"This is rank {group.rank}."
        )

    def _said(self) -> str | None:
        key = f"{self._place}/{_GAVE_UP}"
        try:
            return self._store.get(key).decode() if self._store.check([key]) else None
        except RuntimeError:  # the store has died with its host
            return None

    def _absent(self) -> list[int] | None:
        """Ranks that have given nothing; None where the store has died with its host."""
        try:
            return [rank for rank in range(self._group.size) if not self._store.check([f"{self._key}/{rank}"])]
        except RuntimeError:
            return None
