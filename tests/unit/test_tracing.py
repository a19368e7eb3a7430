"""Ranges for profilers: their names, the profilers that receive them, and no cost without a profiler."""

from __future__ import annotations

import timeit

import pytest
import torch
import torch.distributed as dist

from fused_tp.core import tracing
from fused_tp.core.tracing import range_name, span
from fused_tp.ops import all_gather_matmul, column_parallel_matmul, matmul_all_reduce
from tests.workers import run_ranks


class Told:
    """Fake of torch.cuda.nvtx that records pushed names and the depth."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.depth = 0

    def range_push(self, name: str) -> None:
        self.names.append("  " * self.depth + name)
        self.depth += 1

    def range_pop(self) -> None:
        self.depth -= 1


@pytest.fixture
def nvtx(monkeypatch: pytest.MonkeyPatch) -> Told:
    told = Told()
    monkeypatch.setattr(torch.cuda, "nvtx", told)
    monkeypatch.setattr(tracing, "_HAS_NVTX", True)
    monkeypatch.setattr(tracing, "HAS_NVTX_TOOL", False)
    monkeypatch.delenv("FUSED_TP_NVTX", raising=False)
    return told


def test_names() -> None:
    x, w, b = torch.empty(8, 64, dtype=torch.bfloat16), torch.empty(32, 64), torch.empty(32)
    assert range_name("op", (x, w, b), "plain") == "op [8, 64]x[32, 64] bf16 plain"
    assert range_name("op", (x, [w, w], [b], "group", 3), None) == "op [8, 64]x[32, 64]x[32, 64] bf16"
    assert range_name("op", [b]) == "op [32] f32"
    assert range_name("chunk", 2, "of", 4, x) == "chunk 2 of 4 [8, 64]"
    assert range_name("chunk of columns", (0, 16)) == "chunk of columns (0, 16)"
    assert range_name("op", (x.long(),)) == "op [8, 64] int64"


def test_a_span_that_nobody_sees_costs_next_to_nothing() -> None:
    parts = (torch.empty(2, 2), torch.empty(2, 2))

    def one() -> None:
        with span("op", parts, "plain"):
            pass

    # 0.1 us on an idle core; the bound allows for a shared one.
    assert min(timeit.repeat(one, number=10_000, repeat=20)) / 10_000 < 1e-6


def test_nvtx_by_the_setting(nvtx: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_TP_NVTX", "1")
    with span("outer", torch.empty(2, 3)), span("inner", 1):
        pass
    with pytest.raises(KeyError), span("fails"):
        raise KeyError
    assert nvtx.names == ["outer [2, 3]", "  inner 1", "fails"] and nvtx.depth == 0
    monkeypatch.setenv("FUSED_TP_NVTX", "0")
    with span("never"):
        pass
    assert len(nvtx.names) == 3
    monkeypatch.setenv("FUSED_TP_NVTX", "sometimes")
    with pytest.raises(ValueError, match="FUSED_TP_NVTX is 'sometimes'; set it to 1 or 0"):
        span("which?")


def test_nvtx_where_a_tool_is_there(nvtx: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "HAS_NVTX_TOOL", True)
    assert tracing.is_recording()
    with span("seen"):
        pass
    monkeypatch.setenv("FUSED_TP_NVTX", "0")
    assert not tracing.is_recording()
    with span("unseen"):
        pass
    assert nvtx.names == ["seen"]


def test_both_profilers_see_a_range_once(nvtx: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_TP_NVTX", "1")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, span("once"):
        pass
    assert nvtx.names == ["once"] and [e.count for e in profile.key_averages() if e.key == "once"] == [1]


def test_without_nvtx_it_says_so_once(
    nvtx: Told, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tracing._warn_without_nvtx.cache_clear()
    monkeypatch.setattr(tracing, "_HAS_NVTX", False)
    monkeypatch.setenv("FUSED_TP_NVTX", "1")
    for _ in range(2):
        with span("op"):
            pass
    assert nvtx.names == [] and len(caplog.records) == 1 and "has no NVTX" in caplog.text


class Native:
    """Fake of a native group, which counts its own waits."""

    seconds = 0.25


def test_a_profiler_sees_waits() -> None:
    native = Native()
    tracing.add_wait_source(native, lambda group: group.seconds)
    before = tracing.waited_seconds()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with tracing.op_span("3", "op", torch.empty(2, 3)):
            native.seconds += 0.5
        with pytest.raises(KeyError), tracing.wait_span("all_gather"):
            raise KeyError
    shown = {event.key for event in profile.key_averages()}
    assert {"op [2, 3]", "waited 0.500000 s, group 3", "waiting for all_gather"} <= shown
    assert 0.5 < tracing.waited_seconds() - before < 5


def test_ops_in_nvtx(nvtx: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward on one rank, through both entry points of an op: the Python function and its overload."""
    monkeypatch.setenv("FUSED_TP_NVTX", "1")
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    op = matmul_all_reduce.MATMUL_ALL_REDUCE
    for run, group in ((op, None), (op.overload, "")):
        nvtx.names.clear()
        run(x, w, None, group).sum().backward()
        assert nvtx.names == ["matmul_all_reduce [4, 8]x[6, 8] f32 local", "matmul_all_reduce backward [4, 6] f32"]
    assert nvtx.depth == 0


def only_one_records(group: dist.ProcessGroup) -> list[float]:
    """Profile rank 0 only, also in the first calls, in which all ranks set up shared state together."""
    x, w = torch.ones(4, 8, requires_grad=True), torch.ones(6, 8)
    results = []
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True)
        if (group.rank() == 0)
        else tracing._NULL_SPAN
    ):
        for op in (column_parallel_matmul.column_parallel_matmul, all_gather_matmul.all_gather_matmul):
            result = op(x, w.clone().requires_grad_(), group=group)
            result.sum().backward()
            results.append(result.sum().item())
        # x needs no gradient, so nothing is communicated, and rank 0 must not request a schedule when its peers do not.
        weight = w.clone().requires_grad_()
        column_parallel_matmul.column_parallel_matmul(x.detach(), weight, group=group).sum().backward()
    return results


def test_one_rank_may_look_alone() -> None:
    first, second = run_ranks(2, only_one_records, env={"FUSED_TP_SCHEDULE": None})
    assert first == second
