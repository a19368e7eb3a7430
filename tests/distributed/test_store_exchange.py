"""Ranks that agree through the group's store, one of which does not come: the others need not wait for the deadline."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from fused_tp.runtime.errors import CollectiveTimeoutError, FusedTPError, PeerLostError
from fused_tp.runtime.group import Group, resolve_group
from fused_tp.transport import shm
from fused_tp.transport.store import BoundedStore, exchange
from tests.distributed.shm_tools import with_store
from tests.workers import fresh_ranks, run_ranks

NOTICE_SECONDS = 4.0  # where many processes share a core; the deadline is 60 s


def one_is_late_and_one_dies(world: Any) -> list[tuple[str, str, float]]:
    rank, found = dist.get_rank(world), []
    for case in ("late", "dead"):
        group = resolve_group(dist.new_group([0, 1, 2]))
        assert exchange(group, "names", rank) == [0, 1, 2]
        dist.barrier(world)
        if rank == 2:
            if case == "dead":
                os._exit(7)
            dist.barrier(world)
            continue
        if case == "late" and rank == 0:
            os.environ["FUSED_TP_TIMEOUT"] = "0.5"
        begun = time.monotonic()
        with pytest.raises(FusedTPError) as caught:
            exchange(group, "names")
        found.append((type(caught.value).__name__, str(caught.value), time.monotonic() - begun))
        os.environ["FUSED_TP_TIMEOUT"] = "60"
        with pytest.raises(FusedTPError, match="unusable since its ranks failed to agree"):
            exchange(group, "names")
        if case == "late":
            dist.barrier(world)
    return found


def test_nobody_waits_for_a_rank_that_died_or_that_a_peer_waits_for_no_more() -> None:
    outcomes = fresh_ranks(3, one_is_late_and_one_dies, expect_deaths=True)
    assert outcomes[2].exit_code == 7
    for outcome in outcomes[:2]:
        (late, said_late, soon), (dead, said_dead, at_once) = outcome.unwrap()
        assert late == CollectiveTimeoutError.__name__ and "Rank 2 did not take part in names of group" in said_late
        assert "within 0.5 s" in said_late and soon < NOTICE_SECONDS, said_late
        assert dead == PeerLostError.__name__ and "Rank 2 died, or left the group, before it took part" in said_dead
        assert at_once < NOTICE_SECONDS, said_dead


MEETINGS: tuple[Callable[[Group], object], ...] = (lambda group: exchange(group, "names", "mine"), shm._rendezvous)


class DyingStore(dist.HashStore):
    """Its host dies once it has taken what this rank gives."""

    def _gone(self, *_: Any) -> Any:
        raise RuntimeError("Connection reset by peer")

    wait = get = check = _gone


def meet_over(group: Any, store: type[dist.HashStore], kind: type[FusedTPError]) -> list[str]:
    """What the meetings say over such a store; they raise that kind of error."""
    said = []
    for meet in MEETINGS:
        described = with_store(resolve_group(group), store())
        with pytest.raises(kind) as caught:
            meet(described)
        said.append(str(caught.value))
        if kind is PeerLostError:
            with pytest.raises(FusedTPError, match="unusable since its ranks failed to agree: The store of group"):
                exchange(described, "names", "mine")
    return said


def test_a_store_that_has_died_is_no_fault_of_a_rank() -> None:
    (said,) = run_ranks(1, meet_over, DyingStore, CollectiveTimeoutError, env={"FUSED_TP_TIMEOUT": "0.3"})
    for sentence in said:
        assert sentence.startswith("The store of group '") and "is gone" in sentence, sentence
        assert "did not" not in sentence


class DeadStore(DyingStore):
    """Its host is dead already."""

    set = add = DyingStore._gone


def test_a_store_that_is_dead_when_it_is_first_written_to() -> None:
    (said,) = run_ranks(1, meet_over, DeadStore, PeerLostError)
    for sentence, what in zip(said, ("names", "the shared-memory rendezvous"), strict=True):
        assert sentence.startswith("The store of group '") and f"peers anything in {what}. It says: Con" in sentence


def test_a_deadline_longer_than_a_thread_can_wait() -> None:
    assert BoundedStore(dist.HashStore()).ask(lambda store: store.add("count", 1), 1e12) == 1
