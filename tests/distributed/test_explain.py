"""`explain` makes the same dispatch queries as the ops, and shows the same choices."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fused_tp
from fused_tp.backends import registry
from fused_tp.core.dispatch import ScheduleKey
from fused_tp.ops.explain import FLOAT8_OPS, explain_hypothetical, tensor_argument_names
from fused_tp.ops.op import all_ops
from tests.distributed.test_every_op import calls, public_ops
from tests.workers import run_ranks

Asked = list[tuple[Any, ...]]


@contextmanager
def asked() -> Iterator[Asked]:
    """Record the queries to `select_schedule` in the block, and the names of the schedules that it returns."""
    found: Asked = []
    real = registry.select_schedule

    def recorded(key: ScheduleKey, group: Any) -> Any:
        schedule = real(key, group)
        if schedule.name != "local":  # the attention inside ulysses_attention, which moves nothing
            found.append((key.op, key.dtype, key.m, key.k, key.n, schedule.name))
        return schedule

    for op in all_ops().values():
        op._plans.clear()  # an op with a plan makes no query
    with ExitStack() as patches:
        for name, module in list(sys.modules.items()):
            if name.startswith("fused_tp.") and getattr(module, "select_schedule", None) is real:
                patches.enter_context(mock.patch.object(module, "select_schedule", recorded))
        yield found


def explained_as(group: dist.ProcessGroup, op: str, tensors: list[torch.Tensor], **more: Any) -> Any:
    shapes = [tuple(t.shape) for t in tensors[: len(tensor_argument_names()[op])]]
    return fused_tp.explain(op, *shapes, dtype=tensors[0].dtype, group=group, **more)


def compare(group: dist.ProcessGroup, op: str, call: Callable[..., Any], tensors: list[Any], **more: Any) -> str:
    with asked() as forward:
        out = call(*tensors)
    while not isinstance(out, torch.Tensor):
        out = out[0]
    with asked() as backward:
        if out.requires_grad:
            out.float().sum().backward()
    with asked() as explained:
        explanation = explained_as(group, op, tensors, **more)
    if op == "ulysses_attention":  # two exchanges, there and back, with equal schedules
        assert len(set(forward)) == len(set(backward)) == 1 and len(forward) == len(backward) == 2
        forward, backward = forward[:1], backward[:1]
    assert explained == forward + backward, f"{op} explains {explained}, but runs {forward} and {backward}"
    for decision, ran in ((explanation.forward, forward), (explanation.backward, backward)):
        assert (decision.schedule if decision else None) == (ran[0][-1] if ran else None)
    return str(explanation)


def compare_all(group: dist.ProcessGroup, dtype: torch.dtype) -> list[str]:
    known = {op: call for op, call in calls(group, dtype).items() if op in tensor_argument_names()}
    said = [compare(group, op, *call) for op, call in known.items()]
    for op in FLOAT8_OPS:
        said.append(compare(group, op, *calls(group, dtype)[f"{op} float8"], float8="tensorwise"))
    for op, dim in itertools.product(("all_gather", "reduce_scatter"), (0, 1, -1)):
        run = partial(getattr(fused_tp, op), dim=dim, group=group)
        said.append(compare(group, op, run, [torch.ones(2, 12, 8, dtype=dtype, requires_grad=True)], dim=dim))
    return said


@pytest.mark.parametrize("env", [{"FUSED_TP_SHM": "0"}, {"FUSED_TP_SHM": "1"}], ids=["gloo", "shm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_explained_is_what_runs(env: dict[str, str], dtype: torch.dtype) -> None:
    first, second = run_ranks(2, compare_all, dtype, env={**env, "FUSED_TP_SCHEDULE": None})
    assert first == second


def why(group: dist.ProcessGroup, op: str) -> str:
    return str(fused_tp.explain(op, (4, 8), (6, 8), group=group))


def test_a_table_that_prefers_collectives_where_there_is_shared_memory(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    rules = {"matmul_all_reduce": [{"schedule": "plain", "max_m": 77}], "default": [{"schedule": "pipelined"}]}
    table.write_text(json.dumps({"arch": {"default": {"shm": rules, "default": {"default": [{"schedule": "plain"}]}}}}))
    env = {"FUSED_TP_TABLE": str(table), "FUSED_TP_SCHEDULE": None}
    for explanation in run_ranks(2, why, "matmul_all_reduce", env=env):
        assert "max_m 77" in explanation and "plain" in explanation and "no shared memory" not in explanation


def test_every_public_op_is_known() -> None:
    # The first two depend on the layout, not on dispatch; the last is composed of two known ops.
    others = {"shard_sequence", "unshard_sequence", "context_parallel_attention"}
    assert set(tensor_argument_names()) == public_ops() - others


def step_provider(group: dist.ProcessGroup, op: str, dtype: torch.dtype) -> tuple[str, str]:
    """Return the provider in the name of the op's span, and the explained one."""
    call, tensors = calls(group, dtype)[op]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call(*tensors)
    (span,) = {event.key for event in profile.key_averages() if event.key.startswith("ring_attention (")}
    explanation = explained_as(group, op, tensors)
    assert explanation.forward is not None and explanation.provider is not None
    schedule = explanation.forward.schedule if op == "ring_attention" else "local"  # all tokens are local
    return span, f"ring_attention ({schedule}, {explanation.provider.name})"


@pytest.mark.parametrize("op", ["ring_attention", "ulysses_attention"])
def test_the_provider_of_the_ring_is_the_one_that_runs(op: str) -> None:
    for ran, explained in run_ranks(2, step_provider, op, torch.float16, env={"FUSED_TP_SCHEDULE": None}):
        assert ran == explained


NATIVE, BLOCKS = (
    "native-cpu, because the native kernels support every mask and score",
    "torch-blocks, because plain torch",
)
PROVIDERS = [  # op, arch, dtype, queries, v_head_dim, expected text
    ("ring_attention", "cpu", torch.float64, 64, 8, NATIVE),
    (
        "ring_attention",
        "sm_90",
        torch.bfloat16,
        64,
        128,
        "triton, because the Triton kernels round once, after all steps",
    ),
    ("ring_attention", "sm_90", torch.float16, 64, 320, f"{BLOCKS} supports every device, dtype and score; no tri"),
    ("ring_attention", "sm_90", torch.float64, 64, 64, "attention on GPUs supports float16 and bfloat16, got float64"),
    ("ring_attention", "xpu", torch.float16, 64, 64, f"{BLOCKS} supports every device, dtype and score"),
    ("ulysses_attention", "sm_90", torch.float16, 64, 128, "; this holds for plain scores and a mask of one tile"),
    ("context_parallel_decode", "cpu", torch.float16, 1, 128, "torch, because for up to 16 queries matmuls read the"),
    ("context_parallel_decode", "cpu", torch.float16, 40, 128, "native-cpu, because"),
    ("context_parallel_decode", "sm_90", torch.float16, 1, 128, "triton, because its split-KV kernel"),
    ("context_parallel_decode", "sm_90", torch.float16, 40, 128, "torch-cuda, because"),
]


@pytest.mark.parametrize(("op", "arch", "dtype", "queries", "v_head_dim", "said"), PROVIDERS)
def test_why_a_provider_computes_the_steps(
    op: str, arch: str, dtype: torch.dtype, queries: int, v_head_dim: int, said: str
) -> None:
    shapes = ((2, queries, 8, 128), (2, 64, 2, 128), (2, 64, 2, v_head_dim))
    transport = "xccl" if arch == "xpu" else "gloo"
    answer = explain_hypothetical(op, *shapes, dtype=dtype, world_size=2, transport=transport, arch=arch)
    assert said in next(line for line in str(answer).splitlines() if line.startswith("  each step: "))
    if op == "ring_attention":
        assert "this holds" not in str(answer)
