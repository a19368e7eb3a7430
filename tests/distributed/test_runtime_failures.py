"""What happens over torch.distributed when ranks disagree, do not come, or die: which error, saying what, on whom."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fused_tp
from tests.workers import fresh_ranks, run_ranks

PLAIN = {"FUSED_TP_SCHEDULE": "plain", "FUSED_TP_SHM": "0"}


def disagree(group: Any, how: str) -> str:
    rank = dist.get_rank(group)
    x, w = torch.ones(4, 6), torch.ones(3, 6)
    try:
        if how == "op":
            fused_tp.matmul_all_reduce(x, w, group=group) if rank else fused_tp.all_reduce(x, group=group)
        elif how == "shape":
            fused_tp.matmul_all_reduce(x[: 4 - rank], w, group=group)
        elif how == "dtype":
            dtype = torch.bfloat16 if rank else torch.float32
            fused_tp.matmul_reduce_scatter(x.to(dtype), w.to(dtype), group=group)
        elif how == "shards":
            fused_tp.all_gather_matmul(x[: 4 - rank], w, group=group)
        else:
            raise AssertionError(how)
    except fused_tp.RankMismatchError as error:
        # Nothing was sent: the group can go on.
        assert fused_tp.all_reduce(torch.ones(1), group=group).item() == dist.get_world_size(group)
        return str(error)
    return "no error"


@pytest.mark.parametrize("schedule", ["plain", "pipelined"])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("op", "rank 0 calls all_reduce(dims=[4, 6], dtype=torch.float32), rank 1 calls matmul_all_reduce(dims=[4, 3]"),
        ("shape", "rank 0 calls matmul_all_reduce(dims=[4, 3], dtype=torch.float32), rank 1 calls matmul_all_reduce("),
        ("dtype", "dtype=torch.float32), rank 1 calls matmul_reduce_scatter(dims=[4, 3, 0], dtype=torch.bfloat16)."),
        ("shards", "(dims=[12, 6, 0], dtype=torch.float32), rank 1 calls all_gather"),
    ],
)
def test_checked_ranks_that_disagree(how: str, said: str, schedule: str) -> None:
    env = {"FUSED_TP_SCHEDULE": schedule, "FUSED_TP_SHM": "0", "FUSED_TP_CHECK": "1"}
    messages = run_ranks(3, disagree, how, env=env)
    assert len(set(messages)) == 1, "every rank must say the same"
    assert said in messages[0]


def stay_away(group: Any) -> tuple[str, str, float]:
    """Rank 1 does not come; then rank 0 tries again."""
    fused_tp.all_reduce(torch.ones(2), group=group)
    if dist.get_rank(group) == 1:
        time.sleep(4.0)
        return "", "", 0.0
    begun = time.perf_counter()
    with pytest.raises(fused_tp.CollectiveTimeoutError) as first:
        fused_tp.matmul_all_reduce(torch.ones(4, 6), torch.ones(3, 6), group=group)
    seconds = time.perf_counter() - begun
    with pytest.raises(fused_tp.FusedTPError) as second:
        fused_tp.all_reduce(torch.ones(2), group=group)
    return str(first.value), str(second.value), seconds


@pytest.mark.parametrize("schedule", ["plain", "pipelined"])
def test_a_rank_that_does_not_come(schedule: str) -> None:
    env = {**PLAIN, "FUSED_TP_SCHEDULE": schedule, "FUSED_TP_TIMEOUT": "1"}
    outcome = fresh_ranks(2, stay_away, env=env, expect_deaths=True)[0]
    first, second, seconds = outcome.unwrap()
    assert first.startswith("matmul_all_reduce (call 2 of group '0') on rank 0 of 2 waited 1 s (FUSED_TP_TIMEOUT)")
    assert "unusable since an earlier failure: matmul_all_reduce (call 2" in second
    assert 0.9 < seconds < 3.5


def die(group: Any) -> tuple[str, float]:
    fused_tp.all_reduce(torch.ones(2), group=group)
    if dist.get_rank(group) == 1:
        os._exit(7)
    begun = time.perf_counter()
    with pytest.raises(fused_tp.PeerLostError) as error:
        fused_tp.matmul_all_reduce(torch.ones(4, 6), torch.ones(3, 6), group=group)
    return str(error.value), time.perf_counter() - begun


def test_a_rank_that_dies() -> None:
    survivor, dead = fresh_ranks(2, die, env=PLAIN, expect_deaths=True)
    assert dead.exit_code == 7
    message, seconds = survivor.unwrap()
    assert message.startswith("matmul_all_reduce (call 2 of group '0') on rank 0 of 2 lost a peer:")
    assert seconds < 60.0  # the deadline is 600 s


def forced(group: Any) -> str:
    with pytest.raises(ValueError) as error:
        fused_tp.all_reduce(torch.ones(2), group=group)
    return str(error.value)


def test_forced_schedules_that_cannot_serve() -> None:
    for message in run_ranks(2, forced, env={"FUSED_TP_SCHEDULE": "fastest"}):
        assert message == "FUSED_TP_SCHEDULE names schedule 'fastest'; there are plain, pipelined, one_sided."
    for message in run_ranks(2, forced, env={"FUSED_TP_SCHEDULE": "one_sided", "FUSED_TP_SHM": "0"}):
        assert message == "Schedule 'one_sided' cannot serve this group: FUSED_TP_SHM=0 turns it off."


def explained(group: Any) -> str:
    shapes = ((512, 1024), (2048, 1024))
    return str(fused_tp.explain("matmul_reduce_scatter", *shapes, dtype=torch.float32, group=group))


def test_explain_says_what_runs_and_why() -> None:
    plain = run_ranks(2, explained, env={"FUSED_TP_SHM": "0", "FUSED_TP_SCHEDULE": None})
    assert plain[0] == plain[1]
    assert plain[0].splitlines()[0] == (
        "matmul_reduce_scatter(x [512, 1024], weight [2048, 1024]), float32 on cpu, 2 ranks"
    )
    assert "forward: pipelined over gloo, because dispatch table as shipped, rule cpu/default" in plain[0]
    assert "no shared memory: FUSED_TP_SHM=0 turns it off" in plain[0]
    forced_plain = run_ranks(2, explained, env={"FUSED_TP_SCHEDULE": "plain"})[0]
    assert "backward: plain over gloo, because FUSED_TP_SCHEDULE=plain forces it" in forced_plain
