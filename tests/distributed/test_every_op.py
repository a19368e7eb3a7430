"""Every public op on two ranks: ranges for profilers, torch.compile(fullgraph=True), checkpointing, autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fused_tp
from fused_tp.ops import collectives
from tests.distributed.schedule_cases import SCHEDULES, run_variant
from tests.reference import seeded
from tests.workers import device_mesh, fresh_ranks, on_ranks, run_ranks

Call = tuple[Callable[..., Any], list[Tensor]]


def calls(group: dist.ProcessGroup, dtype: torch.dtype = torch.float32) -> dict[str, Call]:
    """Calls by public op: a function of leaves, and the leaves, which require grad except in decoding."""
    rank, mesh, words = group.rank(), device_mesh(group), 5 * group.size()
    target = torch.tensor([0, words - 5, -100, words - 1])

    def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
        return [seeded(*shape, dtype=dtype, seed=10 * rank + i).requires_grad_() for i, shape in enumerate(shapes)]

    x, w, partial, norm, qkv = (4, 8), (6, 8), (4, 6), (6,), [(1, 4, 2, 8)] * 3
    new, cached = torch.ones(1, 1, 2, 8, dtype=dtype), seeded(1, 4, 2, 8, dtype=dtype, seed=rank)
    lengths = torch.tensor([8])
    one: dict[str, Any] = {"group": group}
    rows, stacked = (6, 8), (2, 6, 8)  # for experts
    tokens, offsets = torch.tensor([0, 3, 1, 1, 2, 0]), torch.tensor([2, 6], dtype=torch.int32)
    return {
        "all_gather": (lambda x: collectives.all_gather(x, 0, **one), leaves(x)),
        "all_gather_matmul": (lambda x, w, v: fused_tp.all_gather_matmul(x, [w, v], **one), leaves(x, w, w)),
        "all_gather_matmul float8": (
            lambda x, w, v: fused_tp.all_gather_matmul(x, [w, v], float8="tensorwise", **one),
            leaves(x, w, w),
        ),
        "column_parallel_matmul float8": (
            lambda x, w: fused_tp.column_parallel_matmul(x, w, float8="rowwise", **one),
            leaves(x, w),
        ),
        "matmul_all_reduce float8": (
            lambda x, w, b: fused_tp.matmul_all_reduce(x, w, b, float8="rowwise_with_gw_hp", **one),
            leaves(x, w, norm),
        ),
        "matmul_reduce_scatter float8": (
            lambda x, w, b: fused_tp.matmul_reduce_scatter(x, w, b, float8="tensorwise", group=mesh),
            leaves(x, w, norm),
        ),
        "all_gather_grouped_matmul": (
            lambda x, w: fused_tp.all_gather_grouped_matmul(x, w, group.size() * tokens, offsets, **one),
            leaves(x, stacked),
        ),
        "column_parallel_grouped_matmul": (
            lambda x, w: fused_tp.column_parallel_grouped_matmul(x, w, tokens, offsets, **one),
            leaves(x, stacked),
        ),
        "grouped_matmul_all_reduce": (
            lambda x, w, s: fused_tp.grouped_matmul_all_reduce(x, w, tokens, offsets, s, shape=(6,), **one),
            leaves(rows, stacked, (6,)),
        ),
        "grouped_matmul_reduce_scatter": (
            lambda x, w: fused_tp.grouped_matmul_reduce_scatter(x, w, tokens, offsets, shape=(6,), **one),
            leaves(rows, stacked),
        ),
        "all_reduce": (lambda x: collectives.all_reduce(x, **one), leaves(x)),
        "all_reduce_rms_norm": (
            lambda x, r, w: fused_tp.all_reduce_rms_norm(x, r, w, 1e-6, **one),
            leaves(partial, partial, norm),
        ),
        "column_parallel_matmul": (lambda x, w: fused_tp.column_parallel_matmul(x, w, **one), leaves(x, w)),
        "context_parallel_attention": (
            lambda q, k, v: fused_tp.context_parallel_attention(q, k, v, mesh=mesh),
            leaves(*qkv),
        ),
        "context_parallel_decode": (
            lambda q, k, v: fused_tp.context_parallel_decode(q, k, v, cache_seqlens=lengths, block=4, **one),
            [new, cached, cached],
        ),
        "copy_to_group": (lambda x: collectives.copy_to_group(x, **one), leaves(x)),
        "gather": (lambda x: collectives.gather(x, 0, **one), leaves(x)),
        "linear_cross_entropy": (
            lambda x, w: fused_tp.linear_cross_entropy(x, w, target, z_loss=0.01, **one),
            leaves(x, (5, 8)),
        ),
        "matmul_all_reduce": (lambda x, w, b: fused_tp.matmul_all_reduce(x, w, b, **one), leaves(x, w, norm)),
        "matmul_all_reduce_rms_norm": (
            lambda x, w, r, n: fused_tp.matmul_all_reduce_rms_norm(x, w, r, n, 1e-6, **one),
            leaves(x, w, partial, norm),
        ),
        "matmul_reduce_scatter": (lambda x, w: fused_tp.matmul_reduce_scatter(x, w, group=mesh), leaves(x, w)),
        "reduce_scatter": (lambda x: collectives.reduce_scatter(x, 0, **one), leaves(x)),
        "ring_attention": (lambda q, k, v: fused_tp.ring_attention(q, k, v, causal=True, **one), leaves(*qkv)),
        "scatter": (lambda x: collectives.scatter(x, 0, **one), leaves(x)),
        "shard_sequence": (lambda x: fused_tp.shard_sequence(x, 0, **one), leaves(x)),
        "ulysses_attention": (lambda q, k, v: fused_tp.ulysses_attention(q, k, v, causal=True, **one), leaves(*qkv)),
        "unshard_sequence": (lambda x: fused_tp.unshard_sequence(x, 0, **one), leaves(x)),
        "vocab_parallel_cross_entropy": (
            lambda x: fused_tp.vocab_parallel_cross_entropy(x, target, label_smoothing=0.1, **one),
            leaves((4, 5)),
        ),
    }


def outcome(fn: Callable[..., Any], leaves: list[Tensor]) -> list[Tensor]:
    """Run `fn` and return its outputs and gradients."""
    result = fn(*leaves)
    outputs = [result] if isinstance(result, Tensor) else list(result)
    found = [t.detach() for t in outputs]
    if leaves[0].requires_grad:
        found += torch.autograd.grad(outputs, leaves, [torch.sin(t.detach()) for t in outputs])
    return found


def ranges_of_all(group: dist.ProcessGroup, compiled: bool) -> dict[str, list[str]]:
    """Ranges of torch's profiler by public op, forward and backward; compiled results must equal eager ones."""
    seen = {}
    for name, (fn, leaves) in calls(group).items():
        torch._dynamo.reset()
        run = torch.compile(fn, backend="aot_eager", fullgraph=True) if compiled else fn
        first = outcome(run, leaves)  # compiles, and sets up what ranks share
        torch.testing.assert_close(first, outcome(fn, leaves), msg=lambda said, name=name: f"{name}: {said}")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            outcome(run, leaves)
        events = sorted(profile.events(), key=lambda event: event.time_range.start)
        seen[name] = [event.name for event in events]
    return seen


# Ranges of the ops on two ranks that send messages, in order, without those of chunks and steps.
GRADS = "all_gather_matmul_backward [8, 6]x[8, 6]x[4, 8]x[6, 8]x[6, 8] f32"
RING = [
    "ring_attention [1, 4, 2, 8]x[1, 4, 2, 8]x[1, 4, 2, 8] f32 {}",
    "ring_attention_backward " + "x".join(["[1, 4, 2, 8]"] * 5 + ["[1, 2, 4]"]) + " f32 {}",
]
EXPECTED = {
    "all_gather": ["all_gather [4, 8] f32 {}", "reduce_scatter [8, 8] f32 {}"],
    "all_gather_matmul": ["all_gather_matmul [4, 8]x[6, 8]x[6, 8] f32 {}", GRADS + " {}"],
    "all_gather_matmul float8": [
        "float8_column_matmul [4, 8]x[6, 8]x[6, 8] f32 {}",
        GRADS.replace("all_gather_matmul", "float8_column_matmul") + " {}",
    ],
    "column_parallel_matmul float8": [
        "float8_column_matmul [4, 8]x[6, 8] f32",
        "float8_column_matmul_backward [4, 6]x[4, 8]x[6, 8] f32 {}",
    ],
    "matmul_all_reduce float8": [
        "float8_row_matmul [4, 8]x[6, 8] f32 {}",
        "float8_row_matmul_backward [4, 6]x[4, 8]x[6, 8] f32",
        "float8_weight_grad [4, 6]x[4, 8] f32",
    ],
    "matmul_reduce_scatter float8": [
        "float8_row_matmul [4, 8]x[6, 8] f32 {}",
        "float8_row_matmul_backward [2, 6]x[4, 8]x[6, 8] f32 {}",
        "float8_weight_grad [4, 8]x[4, 8] f32",
    ],
    "all_gather_grouped_matmul": [
        "all_gather_grouped_matmul [4, 8]x[2, 6, 8] f32 {}",
        "all_gather_grouped_matmul_backward [6, 6]x[4, 8]x[2, 6, 8] f32 {}",
    ],
    "column_parallel_grouped_matmul": [
        "column_parallel_grouped_matmul [4, 8]x[2, 6, 8] f32",
        "column_parallel_grouped_matmul_backward [6, 6]x[4, 8]x[2, 6, 8] f32 {}",
    ],
    "grouped_matmul_all_reduce": [
        "grouped_matmul_all_reduce [6, 8]x[2, 6, 8] f32 {}",
        "grouped_matmul_backward [6, 6]x[6, 8]x[2, 6, 8] f32",
    ],
    "grouped_matmul_reduce_scatter": [
        "grouped_matmul_reduce_scatter [6, 8]x[2, 6, 8] f32 {}",
        "grouped_matmul_reduce_scatter_backward [3, 6]x[2, 6, 8] f32 {}",
        "grouped_matmul_backward [6, 6]x[6, 8]x[2, 6, 8] f32",
    ],
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
    "linear_cross_entropy": ["linear_cross_entropy [4, 8]x[5, 8] f32 {}", "all_reduce [4, 8] f32 {}"],
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
# Ops whose backward is local arithmetic: it is no custom op, so compiled code has no range for it.
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
        pytest.param("plain", False, marks=pytest.mark.full),
        pytest.param("one_sided", True, marks=pytest.mark.full),
        pytest.param("pipelined", True, marks=pytest.mark.long),
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


def run_all(group: dist.ProcessGroup) -> None:
    for name, (fn, leaves) in calls(group).items():
        result = fn(*leaves)
        if name != "context_parallel_decode":
            sum(t.float().sum() for t in ([result] if isinstance(result, Tensor) else result)).backward()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_processes_end_in_order_after_every_op(schedule: str) -> None:
    for outcome in fresh_ranks(2, run_all, env={"FUSED_TP_SCHEDULE": schedule}, finalize=True):
        outcome.unwrap()


def public_ops() -> set[str]:
    """Names of the public ops that take tensors of ranks."""
    modules = {name: getattr(getattr(fused_tp, name), "__module__", "") for name in fused_tp.__all__}
    ops = {name for name, module in modules.items() if module.startswith("fused_tp.ops.")}
    return ops - {"explain", "sequence_positions", "sequence_balance", "split_backward"}


def test_every_public_op_is_in_the_test() -> None:
    assert public_ops() <= set(EXPECTED)


def results_may_be_written_to(group: dist.ProcessGroup) -> None:
    """Results are writable, like those of torch's ops, with and without grad and with a plan: none is a view."""
    for name, (fn, leaves) in calls(group).items():
        for grad in (False, False, True):
            with torch.set_grad_enabled(grad):
                result = fn(*leaves)
            views = [t._is_view() for t in ([result] if isinstance(result, Tensor) else result)]
            assert not any(views) or name == "copy_to_group", name


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_results_may_be_written_to(schedule: str) -> None:
    run_variant(schedule, 2, results_may_be_written_to)


@on_ranks(1, 2)
def test_second_derivatives_are_refused(group: dist.ProcessGroup) -> None:
    """Second derivatives raise, except for collectives. For a local backward they would lack the other ranks' terms."""
    for name, (fn, leaves) in calls(group).items():
        linear = not any(word in name for word in ("matmul", "norm", "attention", "entropy"))
        complete = group.size() == 1 and name in LOCAL_BACKWARD
        if leaves[0].requires_grad and not linear and not complete:
            result = fn(*leaves)
            loss = sum(t.pow(2).sum() for t in ([result] if isinstance(result, Tensor) else result))
            with pytest.raises(RuntimeError, match="differentiated only once"):
                torch.autograd.grad(loss, leaves, create_graph=True)


@on_ranks(2)
def test_compile_with_dynamic_shapes(group: dist.ProcessGroup) -> None:
    torch._dynamo.reset()

    def fn(x: Tensor, w: Tensor, b: Tensor) -> Any:
        both = fused_tp.all_gather_matmul(x, [w, 2 * w], [None, b], group=group, gather_dim=1, return_gathered=True)
        return *both[0], both[1]

    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (4, 7, 9):
        leaves = [seeded(*shape, seed=length).requires_grad_() for shape in ((2, length, 6), (6, 6), (6,))]
        torch.testing.assert_close(outcome(compiled, leaves), outcome(fn, leaves))


@on_ranks(2)
def test_compile_with_dynamic_heads(group: dist.ProcessGroup) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(fused_tp.ulysses_attention, fullgraph=True, backend="aot_eager", dynamic=True)
    q, k, v = (seeded(1, 4, heads, 8) for heads in (4, 2, 2))
    torch.testing.assert_close(compiled(q, k, v, group=group), fused_tp.ulysses_attention(q, k, v, group=group))


def checkpointed_and_under_autocast(group: dist.ProcessGroup) -> None:
    """Matmuls run in bf16 and return gradients in their leaves' dtype; residual streams and losses stay fp32."""
    for name, (fn, leaves) in calls(group).items():
        stored = outcome(fn, leaves)
        again = outcome(lambda *args, fn=fn: checkpoint(fn, *args, use_reentrant=False), leaves)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(again, stored, strict=True)), name

        def low(*args: Tensor, fn: Callable[..., Any] = fn) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return fn(*args)

        found = outcome(low, leaves)
        if "norm" in name or "loss" in name or "entropy" in name:
            assert found[0].dtype == torch.float32, name
        elif "matmul" in name or "attention" in name:
            assert found[0].dtype == torch.bfloat16, name
        trained = [leaf.dtype for leaf in leaves if leaf.requires_grad]
        assert [grad.dtype for grad in found[len(found) - len(trained) :]] == trained, name
        for ours, theirs in zip(found, stored, strict=True):
            scale = theirs.abs().max().item()
            atol = 0.25 if "float8" in name else 0.1  # a float8 e5m2 has 2 bits: a value may round the other way
            torch.testing.assert_close(ours.float() / scale, theirs / scale, rtol=0.0, atol=atol, msg=name)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_checkpointing_and_autocast(schedule: str) -> None:
    run_variant(schedule, 2, checkpointed_and_under_autocast)
