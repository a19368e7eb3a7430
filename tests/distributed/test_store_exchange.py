"""Agreement through the group's store if one rank does not arrive: the others need not wait for the deadline."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fused_tp
from fused_tp.core.errors import CollectiveTimeoutError, FusedTPError, PeerLostError
from fused_tp.core.gloo import closed_peers
from fused_tp.core.group import resolve_group
from fused_tp.core.store import exchange
from tests.beside import beside
from tests.distributed.shm_tools import with_store
from tests.faults import NOTICE_SECONDS
from tests.late import interrupted_after
from tests.workers import Outcome, fresh_ranks, on_ranks


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
        with pytest.raises(FusedTPError, match="unusable since an exchange between its ranks failed"):
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
        assert dead == PeerLostError.__name__ and "Rank 2 died or left the group before joining" in said_dead
        assert at_once < NOTICE_SECONDS, said_dead


@on_ranks(2)
def test_ctrl_c_ends_an_exchange(group: Any) -> None:
    alone, begun = with_store(resolve_group(group), dist.HashStore()), time.monotonic()
    with pytest.raises(KeyboardInterrupt), interrupted_after(0.3):
        exchange(alone, "names")
    assert time.monotonic() - begun < NOTICE_SECONDS


# ---- the rendezvous of shared memory ---------------------------------------------------------------------------------

ONE_SIDED = {"FUSED_TP_SCHEDULE": "one_sided", "FUSED_TP_TIMEOUT": "20"}


def join_alone(group: Any) -> list[str]:
    """Rank 0 joins alone, twice; the second attempt cannot succeed, and raises at once."""
    said = []
    for _ in range(2 if dist.get_rank(group) == 0 else 0):
        with pytest.raises(CollectiveTimeoutError) as error:
            fused_tp.all_reduce(torch.ones(2), group=group)
        said.append(str(error.value))
    return said


@beside(lambda: fresh_ranks(3, join_alone, env={**ONE_SIDED, "FUSED_TP_TIMEOUT": "1.5"}, expect_deaths=True))
def test_ranks_that_do_not_join_the_rendezvous_are_named(outcome: list[Outcome]) -> None:
    """The missing ranks are alive, so that only the deadline reveals them."""
    first, again = outcome[0].unwrap()
    said = "Ranks 1 and 2 did not take part in the first call of group '0' within 1.5 s"
    assert said in first and "is unusable since its first call failed" in again


def join_late(group: Any) -> float:
    begun = time.perf_counter()
    assert closed_peers(group) == [] and time.perf_counter() - begun < 1.0  # lazy connections are not probed
    if dist.get_rank(group) == 1:
        time.sleep(1.7)  # the others check three times whether it is alive
    total = fused_tp.all_reduce(torch.ones(2), group=group)
    dist.all_reduce(total, group=group)
    dist.barrier(group)
    return total[0].item()


@beside(lambda lazy: fresh_ranks(3, join_late, env={**ONE_SIDED, "TORCH_GLOO_LAZY_INIT": lazy}))
@pytest.mark.parametrize("lazy", ["0", "1"])
def test_a_rank_that_joins_the_rendezvous_late_is_waited_for(outcome: list[Outcome], lazy: str) -> None:
    """The late rank can join, and the receives that probed whether it is alive have no side effect."""
    assert [one.unwrap() for one in outcome] == [9.0] * 3


def join_after_a_receive_that_timed_out(group: Any) -> float:
    """Ranks join late after a timed-out receive, which closes gloo's connections on both sides; all ranks are alive."""
    rank = dist.get_rank(group)
    if rank == 0:
        receive = dist.irecv(torch.empty(1), group=group, group_src=1)
        assert receive is not None
        with pytest.raises(RuntimeError, match="Timed out"):
            receive.wait(timedelta(milliseconds=50))
        time.sleep(0.9)  # the peer notices it before any rank has begun to join
    elif rank == 1:
        time.sleep(3.0)  # later than rank 0 would wait for a peer that has closed its connection
    else:
        time.sleep(2.5)  # so that rank 0 waits for two missing ranks
    return fused_tp.all_reduce(torch.ones(2), group=group)[0].item()


@beside(lambda: fresh_ranks(3, join_after_a_receive_that_timed_out, env=ONE_SIDED))
def test_closed_connections_are_no_dead_ranks(outcome: list[Outcome]) -> None:
    assert [one.unwrap() for one in outcome] == [3.0] * 3


LATE = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
import fused_tp
time.sleep(0.8 * dist.get_rank())
assert fused_tp.all_reduce(torch.ones(2), group=dist.group.WORLD)[0] == 2
dist.destroy_process_group()
"""


@pytest.mark.full
def test_a_wait_writes_nothing(tmp_path: Path) -> None:
    """torch's TCPStore warns on stderr of each wait that ends without a value."""
    (tmp_path / "late.py").write_text(LATE)
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "late.py")
    ran = subprocess.run(
        launch, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert ran.returncode == 0 and "waitForInput" not in ran.stderr, ran.stderr
