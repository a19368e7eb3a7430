"""Ranges for profilers: what they are called, who gets them, that nobody pays where nobody looks."""

from __future__ import annotations

import timeit
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fused_tp
from fused_tp.ops import all_gather_matmul, collectives, column_parallel_matmul, matmul_all_reduce
from fused_tp.runtime import tracing
from fused_tp.runtime.tracing import label, span
from tests.workers import device_mesh, run_ranks


class Told:
    """In the place of torch.cuda.nvtx: what was pushed, with its depth."""

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
    monkeypatch.setattr(tracing, "TOOL", False)
    monkeypatch.delenv("FUSED_TP_NVTX", raising=False)
    return told


def test_names() -> None:
    x, w, b = torch.empty(8, 64, dtype=torch.bfloat16), torch.empty(32, 64), torch.empty(32)
    assert label("op", (x, w, b), "plain") == "op [8, 64]x[32, 64] bf16 plain"
    assert label("op", (x, [w, w], [b], "group", 3), None) == "op [8, 64]x[32, 64]x[32, 64] bf16"
    assert label("op", [b]) == "op [32] f32"
    assert label("chunk", 2, "of", 4, x) == "chunk 2 of 4 [8, 64]"
    assert label("chunk of columns", (0, 16)) == "chunk of columns (0, 16)"
    assert label("op", (x.long(),)) == "op [8, 64] int64"


class Costly:
    def __str__(self) -> str:
        raise AssertionError("a name that nobody reads was made")


def test_nothing_records_nothing_happens(nvtx: Told) -> None:
    with span("op", Costly()) as nothing:
        assert not nothing
    with pytest.raises(KeyError), span("op"):
        raise KeyError("goes through")
    assert nvtx.names == []


def test_a_span_that_nobody_sees_costs_next_to_nothing() -> None:
    parts = (torch.empty(2, 2), torch.empty(2, 2))

    def one() -> None:
        with span("op", parts, "plain"):
            pass

    # 0.1 us on an idle core; the bound is for one that others share.
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
    monkeypatch.setattr(tracing, "TOOL", True)
    assert tracing.recording()
    with span("seen"):
        pass
    monkeypatch.setenv("FUSED_TP_NVTX", "0")
    assert not tracing.recording()
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
    tracing._say_there_is_no_nvtx.cache_clear()
    monkeypatch.setattr(tracing, "_HAS_NVTX", False)
    monkeypatch.setenv("FUSED_TP_NVTX", "1")
    for _ in range(2):
        with span("op"):
            pass
    assert nvtx.names == [] and len(caplog.records) == 1 and "has no NVTX" in caplog.text


def test_ops_in_nvtx(nvtx: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank, forward and backward, through both doors of an op; the loss has no tensor of two dims but one."""
    monkeypatch.setenv("FUSED_TP_NVTX", "1")
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    op = matmul_all_reduce.MATMUL_ALL_REDUCE
    for run, group in ((op, None), (op.overload, "")):
        nvtx.names.clear()
        run(x, w, None, group).sum().backward()
        assert nvtx.names == ["matmul_all_reduce [4, 8]x[6, 8] f32 local", "matmul_all_reduce backward [4, 6] f32"]
    assert nvtx.depth == 0


# -- every public op, on two ranks ------------------------------------------------------------------------------------


def ranges_of_all(group: dist.ProcessGroup, compiled: bool) -> dict[str, list[str]]:
    """By public op: the ranges that torch's profiler has seen of its forward and backward."""
    torch.manual_seed(group.rank())

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, requires_grad=True)

    x, x_shard, w = leaf(4, 8), leaf(4, 8), leaf(6, 8)
    partial, residual, norm_weight, logits = leaf(4, 6), leaf(4, 6), leaf(6), leaf(4, 5)
    target = torch.arange(4)
    q, k, v = (leaf(1, 4, 2, 8) for _ in range(3))
    mesh = device_mesh(group)
    new, cached, lengths = q.detach()[:, :1], k.detach(), torch.tensor([8])
    calls: dict[str, Any] = {
        "all_gather": lambda: collectives.all_gather(x_shard, 0, group=group),
        "all_gather_matmul": lambda: fused_tp.all_gather_matmul(x_shard, [w, w], group=group),
        "all_reduce": lambda: collectives.all_reduce(x, group=group),
        "all_reduce_rms_norm": lambda: fused_tp.all_reduce_rms_norm(partial, residual, norm_weight, 1e-6, group=group),
        "column_parallel_matmul": lambda: fused_tp.column_parallel_matmul(x, w, group=group),
        "context_parallel_attention": lambda: fused_tp.context_parallel_attention(q, k, v, mesh=mesh),
        "context_parallel_decode": lambda: fused_tp.context_parallel_decode(
            torch.ones_like(new), cached, cached, group=group, cache_seqlens=lengths, block=4
        ),
        "copy_to_group": lambda: collectives.copy_to_group(x, group=group),
        "gather": lambda: collectives.gather(x_shard, 0, group=group),
        "matmul_all_reduce": lambda: fused_tp.matmul_all_reduce(x, w, group=group),
        "matmul_all_reduce_rms_norm": lambda: fused_tp.matmul_all_reduce_rms_norm(
            x, w, residual, norm_weight, 1e-6, group=group
        ),
        "matmul_reduce_scatter": lambda: fused_tp.matmul_reduce_scatter(x, w, group=group),
        "reduce_scatter": lambda: collectives.reduce_scatter(x, 0, group=group),
        "ring_attention": lambda: fused_tp.ring_attention(q, k, v, group=group, causal=True),
        "scatter": lambda: collectives.scatter(x, 0, group=group),
        "shard_sequence": lambda: fused_tp.shard_sequence(x, 0, group=group),
        "ulysses_attention": lambda: fused_tp.ulysses_attention(q, k, v, group=group, causal=True),
        "unshard_sequence": lambda: fused_tp.unshard_sequence(x_shard, 0, group=group),
        "vocab_parallel_cross_entropy": lambda: fused_tp.vocab_parallel_cross_entropy(logits, target, group=group),
    }
    seen = {}
    for name, call in calls.items():
        run = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
        for recorded in (False, True):  # the first time compiles, and sets up what ranks share
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                result = run()
                outputs = [t for t in (result if isinstance(result, (list, tuple)) else [result]) if t.requires_grad]
                if outputs:
                    torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
            if recorded:
                events = sorted(profile.events(), key=lambda event: event.time_range.start)
                seen[name] = [event.name for event in events]
    return seen


# What the ops show of themselves on two ranks that send messages, in order; chunks and steps apart.
GRADS = "all_gather_matmul_backward [8, 6]x[8, 6]x[4, 8]x[6, 8]x[6, 8] f32"
RING = [
    "ring_attention [1, 4, 2, 8]x[1, 4, 2, 8]x[1, 4, 2, 8] f32 {}",
    "ring_attention_backward " + "x".join(["[1, 4, 2, 8]"] * 5 + ["[1, 2, 4]"]) + " f32 {}",
]
EXPECTED = {
    "all_gather": ["all_gather [4, 8] f32 {}", "reduce_scatter [8, 8] f32 {}"],
    "all_gather_matmul": ["all_gather_matmul [4, 8]x[6, 8]x[6, 8] f32 {}", GRADS + " {}"],
    "all_reduce": ["all_reduce [4, 8] f32 {}"],
    "all_reduce_rms_norm": ["all_reduce_rms_norm [4, 6]x[4, 6] f32 {}"],
    "column_parallel_matmul": [
        "column_parallel_matmul [4, 8]x[6, 8] f32",
        "column_parallel_matmul_backward [4, 6]x[4, 8]x[6, 8] f32 {}",
    ],
    "context_parallel_attention": RING,  # over a mesh of one dim
    "context_parallel_decode": ["context_parallel_decode [1, 1, 2, 8]x[1, 4, 2, 8]x[1, 4, 2, 8] f32 {}"],
    "copy_to_group": ["all_reduce [4, 8] f32 {}"],
    "gather": ["all_gather [4, 8] f32 {}"],
    "matmul_all_reduce": ["matmul_all_reduce [4, 8]x[6, 8] f32 {}"],
    "matmul_all_reduce_rms_norm": ["matmul_all_reduce_rms_norm [4, 8]x[6, 8]x[4, 6] f32 {}"],
    "matmul_reduce_scatter": [
        "matmul_reduce_scatter [4, 8]x[6, 8] f32 {}",
        "matmul_reduce_scatter_backward [2, 6]x[4, 8]x[6, 8] f32 {}",
    ],
    "reduce_scatter": ["reduce_scatter [4, 8] f32 {}", "all_gather [2, 8] f32 {}"],
    "ring_attention": RING,
    "scatter": ["all_gather [2, 8] f32 {}"],
    "shard_sequence": ["shard_sequence [4, 8] f32", "unshard_sequence [2, 8] f32 {}"],
    "ulysses_attention": [
        "sequence_to_heads [1, 4, 2, 8]x[1, 4, 2, 8]x[1, 4, 2, 8] f32 {}",
        "heads_to_sequence [1, 8, 1, 8] f32 {}",
        "sequence_to_heads [1, 4, 2, 8] f32 {}",
        "heads_to_sequence [1, 8, 1, 8]x[1, 8, 1, 8]x[1, 8, 1, 8] f32 {}",
    ],
    "unshard_sequence": ["unshard_sequence [4, 8] f32 {}", "shard_sequence [8, 8] f32"],
    "vocab_parallel_cross_entropy": ["vocab_parallel_cross_entropy [4, 5] f32 {}"],
}
# Whose backward is nothing but local arithmetic: no op of ours, so no range where a compiler takes it apart.
LOCAL_BACKWARD = {
    "matmul_all_reduce": "matmul_all_reduce backward [4, 6] f32",
    "matmul_all_reduce_rms_norm": "matmul_all_reduce_rms_norm backward [4, 6]x[4, 6] f32",
    "all_reduce_rms_norm": "all_reduce_rms_norm backward [4, 6]x[4, 6] f32",
}


@pytest.mark.parametrize(
    ("schedule", "compiled"),
    [
        ("pipelined", False),
        ("one_sided", False),
        ("one_sided", True),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (("plain", False), ("plain", True), ("pipelined", True))
        ),
    ],
)
def test_every_op_is_named_with_its_shapes_and_schedule(schedule: str, compiled: bool) -> None:
    for seen in run_ranks(2, ranges_of_all, compiled, env={"FUSED_TP_SCHEDULE": schedule}, timeout=120):
        assert set(seen) == set(EXPECTED)
        for op, expected in EXPECTED.items():
            wanted = [name.format(schedule) for name in expected]
            assert [name for name in seen[op] if name in wanted] == wanted, (op, seen[op])
            if op in LOCAL_BACKWARD and not compiled:
                assert LOCAL_BACKWARD[op] in seen[op], (op, seen[op])
        steps = {name for name in seen["ring_attention"] if " step " in name}
        assert {"ring_attention step 0", "ring_attention backward step 0"} <= steps
        if schedule == "pipelined":
            chunks = {name for name in seen["all_gather_matmul"] if name.startswith("chunk")}
            assert chunks == {"chunk of rank 0 [4, 8]", "chunk of rank 1 [4, 8]", "chunk of columns (0, 8)"}


def test_every_public_op_is_in_the_test() -> None:
    modules = {name: getattr(getattr(fused_tp, name), "__module__", "") for name in fused_tp.__all__}
    ops = {name for name, module in modules.items() if module.startswith("fused_tp.ops.")}
    assert ops - {"explain", "sequence_positions", "sequence_balance"} <= set(EXPECTED)


def only_one_records(group: dist.ProcessGroup) -> list[float]:
    """Rank 0 alone looks, also the first time, when ranks set up together what they share."""
    x, w = torch.ones(4, 8, requires_grad=True), torch.ones(6, 8)
    results = []
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True)
        if (group.rank() == 0)
        else tracing._NOTHING
    ):
        for op in (column_parallel_matmul.column_parallel_matmul, all_gather_matmul.all_gather_matmul):
            result = op(x, w.clone().requires_grad_(), group=group)
            result.sum().backward()
            results.append(result.sum().item())
        # No gradient for x, so nothing moves, and rank 0 must not ask for a schedule that others do not ask for.
        weight = w.clone().requires_grad_()
        column_parallel_matmul.column_parallel_matmul(x.detach(), weight, group=group).sum().backward()
    return results


def test_one_rank_may_look_alone() -> None:
    first, second = run_ranks(2, only_one_records, env={"FUSED_TP_SCHEDULE": None})
    assert first == second
