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
from fused_tp.runtime.errors import CollectiveTimeoutError, FusedTPError
from fused_tp.runtime.group import Group

_GAVE_UP = "gave up"
_SLICE_SECONDS = 0.5  # a wait inside the store does not see Ctrl-C


def exchange(group: Group, what: str, mine: bytes) -> list[bytes]:
    """What every rank has given for `what`, by rank. All ranks call it alike, as often as each other.

    Args:
        what: the same on all ranks; so it names a type of device, where one matters, and not the rank's own.

    Raises:
        CollectiveTimeoutError: some rank has given nothing within `FUSED_TP_TIMEOUT` seconds, here or at a peer; names
            which.
        FusedTPError: that was so before. The ranks no longer mean the same by their calls.
    """
    if "exchange failed" in group.memo:
        raise FusedTPError(
            f"Group {group.name!r} is unusable since its ranks failed to agree: {group.memo['exchange failed']} "
            "Destroy the process group and make a new one."
        )
    assert group.process_group is not None
    store = dist.distributed_c10d._get_process_group_store(group.process_group)
    if "exchange generation" not in group.memo:
        # A store may outlive its group and serve another of the same name: each rank counts its groups there.
        group.memo["exchange generation"] = store.add(f"fused_tp/exchange/generation/{group.rank}", 1)
    place = f"fused_tp/exchange/{group.memo['exchange generation']}"
    count = group.memo["exchange", what] = group.memo.get(("exchange", what), 0) + 1
    key = f"{place}/{what}/{count}"
    store.set(f"{key}/{group.rank}", mine)  # type: ignore[arg-type]  # takes bytes, whatever its stub says
    deadline = time.monotonic() + settings.timeout_seconds()
    try:
        return [_get(store, key, rank, group, what, deadline) for rank in range(group.size)]
    except CollectiveTimeoutError as error:
        group.memo["exchange failed"] = str(error)
        with contextlib.suppress(RuntimeError):  # peers that wait for this rank, now or later, need wait no longer
            store.set(f"{place}/{_GAVE_UP}", str(error).encode())  # type: ignore[arg-type]  # as above
        raise


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


def _get(store: dist.Store, key: str, rank: int, group: Group, what: str, deadline: float) -> bytes:
    gave_up = f"{key.rsplit('/', 2)[0]}/{_GAVE_UP}"
    while True:
        left = deadline - time.monotonic()
        try:
            store.wait([f"{key}/{rank}"], timedelta(seconds=max(min(left, _SLICE_SECONDS), 0.01)))
            return store.get(f"{key}/{rank}")
        except RuntimeError as error:  # DistStoreError from most stores, a plain one from FileStore
            if left > _SLICE_SECONDS:
                said = _said(store, gave_up)
                if said is not None:
                    raise CollectiveTimeoutError(
                        f"{what} of group {group.name!r} on rank {group.rank}: a peer gave up. It said: {said}"
                    ) from error
                time.sleep(0.01)  # a store that has died raises at once
                continue
            raise CollectiveTimeoutError(
                f"Rank {', '.join(map(str, _absent(store, key, group.size) or [rank]))} did not take part in {what} of "
                f"group {group.name!r} within {settings.timeout_seconds():g} s (FUSED_TP_TIMEOUT); all ranks of a "
                f"group must call its ops. This is rank {group.rank}."
            ) from error


def _said(store: dist.Store, key: str) -> str | None:
    try:
        return store.get(key).decode() if store.check([key]) else None
    except RuntimeError:  # the store has died with its host
        return None


def _absent(store: dist.Store, key: str, size: int) -> list[int]:
    try:
        return [rank for rank in range(size) if not store.check([f"{key}/{rank}"])]
    except RuntimeError:  # the store has died with its host
        return []
