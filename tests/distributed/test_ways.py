"""Schedules that are unavailable on this machine: an error with the reason if forced, skipped in a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

import fused_tp
from fused_tp.backends import registry
from fused_tp.backends.registry import SCHEDULES, select_schedule
from fused_tp.backends.symmetric_memory import symm_mem
from fused_tp.core import dispatch
from fused_tp.core.dispatch import ScheduleKey
from fused_tp.core.group import resolve_group
from fused_tp.core.store import exchange
from tests.workers import run_ranks

GPU_ONLY = {
    "fused_kernel": "fused kernels run on NVIDIA GPUs, and on the CPU if TRITON_INTERPRET=1 is set, but not on cpu",
    "one_shot": "device kernels run on NVIDIA GPUs, not on cpu",
    "two_shot": "device kernels run on NVIDIA GPUs, not on cpu",
    "multimem": "device kernels run on NVIDIA GPUs, not on cpu",
    "copy_engine": "copy engines are supported on NVIDIA GPUs only, not on cpu",
    "nccl_pipeline": "NCCL supports NVIDIA GPUs only, not cpu",
}


def asked_for(_: Any) -> list[str]:
    group, said = dist.new_group(list(range(4))), []  # a new group, without cached schedules
    for name in (*GPU_ONLY, "one_sided", "fastest"):
        with patch.dict("os.environ", FUSED_TP_SCHEDULE=name), pytest.raises(ValueError) as caught:
            fused_tp.matmul_all_reduce(torch.ones(2, 3), torch.ones(4, 3), group=group)
        said.append(str(caught.value))
    return said


def test_forced_schedules_are_refused_with_the_reason() -> None:
    pytest.importorskip("fused_tp._core", reason="needs the native core: pip install -e .")
    wanted = [
        *(f"Schedule {name!r} does not support this group: rank 0: {why}." for name, why in GPU_ONLY.items()),
        "Schedule 'one_sided' does not support this group: FUSED_TP_SHM=0 turns shared memory off.",
        f"FUSED_TP_SCHEDULE is 'fastest'; it must be one of {', '.join(SCHEDULES)}.",
    ]
    assert run_ranks(4, asked_for, env={"FUSED_TP_SHM": "0"}) == [wanted] * 4


def test_more_ranks_than_an_error_record_has_bits_for() -> None:
    for name in ("fused_kernel", "two_shot", "copy_engine"):
        found = SCHEDULES[name].available(Mock(size=64), torch.device("cuda"))
        assert not found and "support at most 63 ranks, and the group has 64" in found.reason


def named_by_a_table(group: Any) -> str:
    group = dist.new_group(list(range(4)))
    y = fused_tp.matmul_all_reduce(torch.ones(2, 3), torch.ones(4, 3), group=group)
    assert torch.equal(y, torch.full((2, 4), 12.0))
    return str(fused_tp.explain("matmul_all_reduce", (2, 3), (4, 3), dtype=torch.float32, group=group))


def test_a_table_that_names_them_all_comes_to_what_there_is(tmp_path: Path) -> None:
    pytest.importorskip("fused_tp._core", reason="needs the native core: pip install -e .")
    table = tmp_path / "table.json"
    rules = [{"schedule": name} for name in (*GPU_ONLY, "hierarchical", "pipelined", "plain")]
    table.write_text(json.dumps({"arch": {"default": {"default": {"default": rules}}}}))
    for said in run_ranks(4, named_by_a_table, env={"FUSED_TP_TABLE": str(table)}):
        assert "forward: pipelined over gloo" in said
        for name, reason in GPU_ONLY.items():
            assert f"no {name}: rank 0: {reason}" in said
        assert "no hierarchical: all ranks of the group are on one host" in said


def of_mixed_gpus(group: Any) -> list[str]:
    """Choices of ranks with different GPUs."""
    described = resolve_group(dist.new_group(list(range(4))))
    own = ("sm_100", "sm_90", "sm_120", "sm_100")[described.rank]
    chosen = []
    with (
        patch.object(dispatch, "device_arch", lambda _: own),
        patch.object(registry, "exchange", side_effect=exchange) as exchanged,
    ):
        for rows in (1, 2):
            device = torch.device("cuda", described.rank)
            schedule = select_schedule(ScheduleKey("all_reduce", torch.float32, device, rows, None, 8), described)
            chosen.append(schedule.name)
    assert exchanged.call_count == 2  # one for settings, one for GPUs
    return chosen


def test_ranks_of_mixed_gpus_choose_alike(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    archs = {"sm_90": "pipelined", "default": "plain"}
    rules = {arch: {"default": {"default": [{"schedule": name}]}} for arch, name in archs.items()}
    table.write_text(json.dumps({"arch": rules}))
    assert run_ranks(4, of_mixed_gpus, env={"FUSED_TP_TABLE": str(table)}) == [["pipelined"] * 2] * 4


def asked_with_its_own_gpu(_: Any) -> list[str]:
    """Each rank asks with its own device; no schedule for GPUs is available, and all ranks must find out together."""
    described = resolve_group(dist.new_group(list(range(4))))
    with (
        patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        patch.object(symm_mem, "is_capturing", return_value=False),
        patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
    ):
        device = torch.device("cuda", described.rank)
        return [SCHEDULES[name].available(described, device).reason for name in GPU_ONLY]


@pytest.mark.full
def test_ranks_on_different_gpus_find_out_together() -> None:
    pytest.importorskip("fused_tp._core", reason="needs the native core: pip install -e .")
    if torch.cuda.is_available():
        pytest.skip("here there may be no obstacle")
    first, *others = run_ranks(4, asked_with_its_own_gpu, env={"FUSED_TP_TIMEOUT": "20"})
    assert others == [first] * 3 and all(answer.startswith("rank 0: ") for answer in first)


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
    assert "no shared memory: FUSED_TP_SHM=0 turns shared memory off" in plain[0]
    forced_plain = run_ranks(2, explained, env={"FUSED_TP_SCHEDULE": "plain"})[0]
    assert "backward: plain over gloo, because FUSED_TP_SCHEDULE=plain forces it" in forced_plain
