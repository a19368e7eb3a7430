"""The test harness: results, errors, deaths and hangs of ranks are reported, and the pool survives them."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

import fused_tp
from tests import workers
from tests.workers import RanksFailed, RanksTimedOut, device_mesh, error_of, fresh_ranks, on_ranks, run_ranks

pytestmark = pytest.mark.full


def add_up(group: dist.ProcessGroup, scale: float) -> tuple[int, list[float], str | None, int, int]:
    total = torch.full((3,), scale * (dist.get_rank(group) + 1))
    dist.all_reduce(total, group=group)
    variable = os.environ.get("FUSED_TP_EXAMPLE")
    return dist.get_rank(group), total.tolist(), variable, device_mesh(group).size(), dist.get_world_size()


class Unpicklable(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__("cannot be rebuilt from one argument")


def raise_on(group: dist.ProcessGroup, ranks: list[int], spoil: bool) -> None:
    if dist.get_rank(group) in ranks:
        raise ValueError(f"bad input on rank {dist.get_rank(group)}")
    if spoil:
        dist.barrier(group)


def raise_unpicklable(group: dist.ProcessGroup) -> None:
    raise Unpicklable(1, 2)


def die_on(group: dist.ProcessGroup, victim: int) -> str:
    if dist.get_rank(group) == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def sleep_on(group: dist.ProcessGroup, victim: int) -> None:
    if dist.get_rank(group) == victim:
        time.sleep(1000)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_back_in_rank_order(world_size: int) -> None:
    """The environment is restored after the call, too."""
    total = [world_size * (world_size + 1.0)] * 3
    for variable in ("1", None):
        found = run_ranks(world_size, add_up, 2.0, env={"FUSED_TP_EXAMPLE": "1"} if variable else None)
        assert found == [(rank, total, variable, world_size, workers.POOL_SIZE) for rank in range(world_size)]


def test_workers_are_reused_and_get_module_level_functions() -> None:
    before = run_ranks(2, pid)
    with pytest.raises(TypeError, match="module-level"):
        run_ranks(2, lambda group: None)
    assert run_ranks(2, pid) == before


def pid(group: dist.ProcessGroup) -> int:
    return os.getpid()


@pytest.mark.xfail(strict=True, raises=ValueError)
@on_ranks(2)
def test_error_of_a_test_on_ranks(group: dist.ProcessGroup) -> None:
    raise ValueError


def test_an_error_is_raised_with_the_tracebacks_of_all_ranks() -> None:
    with pytest.raises(ValueError, match="bad input on rank") as caught:
        run_ranks(3, raise_on, [0, 2], False)
    everyone = str(caught.value.__cause__)
    assert "rank 0 raised" in everyone and "rank 1 finished" in everyone and "rank 2 raised" in everyone
    assert run_ranks(3, add_up, 1.0)[0][1][0] == 6


def sum_over_mesh(group: dist.ProcessGroup, fail: bool) -> float:
    """Sum over a mesh with DTensor, whose caches outlive a mesh: they hold how shards were redistributed over ranks."""
    from torch.distributed.tensor import DTensor, Replicate, Shard  # slow to import in every new worker

    x = DTensor.from_local(torch.ones(2, 3), device_mesh(group), [Shard(0)])
    total = x.redistribute(placements=[Replicate()]).sum().to_local().item()
    if fail:
        raise ValueError("after DTensor has learnt the group's name")
    return total


def test_a_failure_leaves_nothing_to_the_next_call() -> None:
    assert run_ranks(2, sum_over_mesh, False) == [12.0, 12.0]
    before = run_ranks(4, pid)
    with pytest.raises(ValueError, match="DTensor has learnt"):
        run_ranks(2, sum_over_mesh, True)
    assert run_ranks(2, sum_over_mesh, False) == [12.0, 12.0]
    assert run_ranks(4, pid) == before


def make_groups(group: dist.ProcessGroup, fail: bool) -> None:
    """Make a mesh and redistribute shards over it, and a group for which fused_tp allocates shared memory."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    from torch.distributed.tensor import DTensor, Replicate, Shard

    DTensor.from_local(torch.ones(2, 3), mesh["tp"], [Shard(0)]).redistribute(placements=[Replicate()]).sum().item()
    fused_tp.all_reduce(torch.ones(3), group=dist.new_group([0, 1, 2, 3]))
    if fail:
        raise ValueError("with groups of its own")


def threads(group: dist.ProcessGroup) -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_groups_end_with_the_call_that_made_them() -> None:
    counts = []
    for fail in (False, True, False, True, False):
        assert isinstance(error_of(run_ranks, 4, make_groups, fail), ValueError) == fail
        counts.append(run_ranks(4, threads))
    assert counts[2:] == [counts[1]] * 3  # DTensor may keep the last group


def test_an_unpicklable_error_still_tells() -> None:
    with pytest.raises(RanksFailed, match="cannot be rebuilt"):
        run_ranks(1, raise_unpicklable)


def test_a_stuck_rank_shows_its_stack_and_the_pool_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(2, pid)  # so that the workers have imported this file
    with pytest.raises(RanksTimedOut, match=r"(?s)ranks \[1\].*in sleep_on"):
        run_ranks(2, sleep_on, 1, timeout=1)
    assert run_ranks(2, add_up, 1.0)[1][1][0] == 3


def test_a_rank_left_waiting_does_not_hold_up_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "GRACE_SECONDS", 1)
    run_ranks(2, pid)
    with pytest.raises(RanksTimedOut, match=r"(?s)bad input on rank 0.*in raise_on"):
        run_ranks(2, raise_on, [0], True)


def test_fresh_ranks_report_deaths() -> None:
    outcomes = fresh_ranks(2, die_on, 1, expect_deaths=True)
    assert outcomes[0].unwrap() == "alive"
    assert outcomes[1].died and outcomes[1].exit_code == -signal.SIGKILL
    with pytest.raises(RanksFailed, match="SIGKILL"):
        outcomes[1].unwrap()


def test_fresh_ranks_have_a_world_of_their_own() -> None:
    assert [one.unwrap()[-1] for one in fresh_ranks(2, add_up, 1.0)] == [2, 2]
    with pytest.raises(RanksFailed, match="SIGKILL"):
        fresh_ranks(1, die_on, 0)
