"""Schedule `fused_kernel` under the public ops: forward and all gradients, its errors, and `explain`.

The cases are those of every other schedule; the ranks interpret the kernels.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton", reason="needs Triton")

import fused_tp
from fused_tp.backends.triton import fused_kernel
from tests import faults
from tests.distributed import test_tp_ops as cases
from tests.distributed.test_device_schedules import kernels_of_ops
from tests.kernels.ranks import interpreted_ranks
from tests.native.doubles.libraries import build_doubles, doubles
from tests.native_build import prebuild
from tests.reference import seeded
from tests.workers import fresh_ranks, run_ranks

FORCED = {"FUSED_TP_SCHEDULE": "fused_kernel"}
INTERPRETED = {"TRITON_INTERPRET": "1", "FUSED_TP_TIMEOUT": "60"}

prebuild(lambda: build_doubles("copy_engine"))


def forced(group: Any, name: str, *args: Any) -> Any:
    with mock.patch.dict(os.environ, FORCED):
        return getattr(cases, name)(group, *args)


@pytest.mark.parametrize(("world_size", "dtype"), [(2, "bfloat16"), pytest.param(3, "float32", marks=pytest.mark.full)])
def test_forward_and_gradients(world_size: int, dtype: str) -> None:
    interpreted_ranks(world_size, forced, "all_cases", dtype, world_size == 2, timeout=120)


def by_copy_engines(group: Any, of: Callable[..., Any], *args: Any) -> Any:
    """Run `of` with copy engines of the driver's double, which also carry the smallest shards."""
    with doubles("copy_engine"), mock.patch.object(fused_kernel, "DIRECT_BYTES", -1):
        return of(group, *args)


def all_cases_by_copy_engines(group: Any, dtype: str) -> list[str]:
    """Check all cases; return the ops that called the copy engines."""
    from fused_tp.backends.copy_engine.copy_engine import CopyEngine

    asked: list[str] = []
    real = CopyEngine.begin_call

    def begin_call(self: CopyEngine, op: str, **sizes: int) -> Any:
        asked.append(op)
        return real(self, op, **sizes)

    with mock.patch.object(CopyEngine, "begin_call", begin_call):
        by_copy_engines(group, forced, "all_cases", dtype, False)
    return sorted(set(asked))


@pytest.mark.full
@pytest.mark.parametrize(("world_size", "dtype"), [(2, "float32"), (3, "bfloat16")])
def test_shards_that_arrive_by_copy_engines(world_size: int, dtype: str) -> None:
    outcomes = fresh_ranks(world_size, all_cases_by_copy_engines, dtype, env=INTERPRETED, timeout=200)
    for outcome in outcomes:
        assert outcome.unwrap() == ["all_gather", "all_gather_matmul"]


def used(group: Any) -> None:
    """Every op uses the workspaces of its kernels in forward and backward."""
    with mock.patch.dict(os.environ, FORCED):
        assert kernels_of_ops(group) == {
            "all_gather_matmul": ["all_gather_matmul", "matmul_reduce_scatter"],
            "matmul_reduce_scatter": ["matmul_reduce_scatter", "all_gather_matmul"],
            "matmul_all_reduce": ["matmul_all_reduce"],
            "column_parallel_matmul": ["matmul_all_reduce"],
            "matmul_all_reduce_rms_norm": ["matmul_all_reduce_rms_norm"],
            "all_reduce_rms_norm": [],
            "all_reduce of float64": [],
        }


def checked_and_strided(group: Any) -> None:
    """Weights of different widths are not a mismatch, and a bias may be non-contiguous on one rank."""
    x = seeded(6, 8, dtype=torch.float32)
    x_shard = cases.own_part(x, 0, group)
    w = seeded(4 if group.rank() else 200, 8, dtype=torch.float32)
    bias = seeded(8, dtype=torch.float32)[::2] if group.rank() else torch.ones(1).expand(200)
    with mock.patch.dict(os.environ, {**FORCED, "FUSED_TP_CHECK": "1"}):
        y = fused_tp.all_gather_matmul(x_shard, w, bias, group=group)
        torch.testing.assert_close(y, x @ w.t() + bias)
        shared = seeded(8, dtype=torch.float32)[::2]
        total = fused_tp.matmul_all_reduce(x, w[:4], shared if group.rank() else shared.contiguous(), group=group)
    wanted = sum(x.double() @ seeded(n, 8, dtype=torch.float32)[:4].double().t() for n in (200, 4))
    torch.testing.assert_close(total.double(), wanted + shared, rtol=1e-5, atol=1e-5)


def newer_precision(group: Any) -> None:
    """Torch's newer setting of the fp32 precision is respected like the older one."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        forced(group, "matmul_case", "all_gather_matmul", (1, 6, 4, 6), torch.float32)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.full
def test_same_bits_on_every_rank_and_run() -> None:
    runs = [interpreted_ranks(3, forced, "bits", "bfloat16") for _ in range(2)]
    assert all(result == runs[0][0] for run in runs for result in run)


def many_weights(group: Any) -> None:
    """More weights than fit into one launch: an output for each, and dx summed over all."""
    widths, x = (3, 4, 5, 6, 7), seeded(5, 6, dtype=torch.float32, seed=1)
    ws = [seeded(n, 6, dtype=torch.float32, seed=2 + n) for n in widths]
    x_shard = cases.leaf(cases.own_part(x, 0, group))
    with mock.patch.dict(os.environ, FORCED):
        ys = fused_tp.all_gather_matmul(x_shard, ws, group=group, gather_size=5)
        torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
    for y, w in zip(ys, ws, strict=True):
        torch.testing.assert_close(y, x @ w.t())
    wanted = sum(w.sum(0) for w in ws).expand(5, 6) * group.size()
    torch.testing.assert_close(x_shard.grad, cases.own_part(wanted, 0, group))


def explained(group: Any) -> None:
    shapes = (4, 8), (6, 8)
    with mock.patch.dict(os.environ, FORCED):
        fits = str(fused_tp.explain("matmul_all_reduce", *shapes, dtype=torch.bfloat16, group=group))
        double = str(fused_tp.explain("matmul_all_reduce", *shapes, dtype=torch.float64, group=group))
        moves = str(fused_tp.explain("all_reduce", (4, 8), group=group))
    assert "fused_kernel over symmetric memory, because FUSED_TP_SCHEDULE=fused_kernel forces it" in fits
    assert "one_sided over shm" in double and "support float16, bfloat16 and float32, not float64" in double
    assert "one_sided over shm" in moves and "there is no fused kernel of all_reduce" in moves


@pytest.mark.full
@pytest.mark.parametrize("of", [used, checked_and_strided, newer_precision, many_weights, explained])
def test_ops(of: Callable[[Any], None]) -> None:
    interpreted_ranks(2, of)


@pytest.mark.full
def test_late_rank_is_a_timeout_that_names_it() -> None:
    ops = ("matmul_all_reduce", "all_gather_matmul", "ring_attention")
    outcomes = fresh_ranks(3, faults.late, "fused_kernel", ops, env=INTERPRETED, timeout=120)
    found = [outcome.unwrap() for outcome in outcomes]
    faults.check_late(found)
    for number, op in enumerate(ops):
        assert any(one[number].message.startswith(f"{op}, call ") for one in found[:2]), found


@pytest.mark.full
def test_late_rank_where_shards_arrive_by_copy_engines() -> None:
    args = faults.late, "fused_kernel", ("all_gather_matmul",)
    outcomes = fresh_ranks(3, by_copy_engines, *args, env=INTERPRETED, timeout=120)
    found = [outcome.unwrap() for outcome in outcomes]
    faults.check_late(found)
    assert any("all_gather_matmul" in one[0].message for one in found[:2]), found


@pytest.mark.full
def test_stopped_or_killed_rank_is_noticed_where_shards_arrive_by_copy_engines() -> None:
    args = faults.stopped_then_killed, "fused_kernel", faults.MATMULS, 0.02
    how = {"env": INTERPRETED, "expect_deaths": True, "timeout": 120}
    faults.check_stopped_then_killed(fresh_ranks(3, by_copy_engines, *args, **how))


@pytest.mark.full
def test_stopped_or_killed_rank_is_noticed() -> None:
    how = {"env": INTERPRETED, "expect_deaths": True, "timeout": 120}
    faults.check_stopped_then_killed(
        fresh_ranks(3, faults.stopped_then_killed, "fused_kernel", faults.MATMULS, 0.02, **how)
    )


@pytest.mark.full
def test_who_waits_for_a_rank_that_knows_of_a_loss_is_told() -> None:
    how = {"env": INTERPRETED, "expect_deaths": True, "timeout": 120}
    faults.check_lost(fresh_ranks(3, faults.lost_behind_its_part, "fused_kernel", ("matmul_all_reduce",), **how))


def from_table(group: Any) -> tuple[str, str]:
    covered = fused_tp.explain("matmul_all_reduce", (4, 8), (6, 8), dtype=torch.float32, group=group)
    return str(covered), str(fused_tp.explain("all_reduce", (4, 8), group=group))


def where_one_lacks_it(group: Any) -> tuple[tuple[str, str], str]:
    """Explanations from a table on a group where all ranks have Triton, and on one where rank 1 lacks it."""
    from fused_tp.backends import registry

    os.environ.pop("FUSED_TP_SCHEDULE", None)
    everybody = from_table(group)
    other = dist.new_group([0, 1])
    if group.rank() == 1:
        registry.has_triton = lambda: False
    x = torch.ones(3, 4)
    assert torch.equal(fused_tp.matmul_all_reduce(x, torch.ones(5, 4), group=other), torch.full((3, 5), 8.0))
    return everybody, from_table(other)[0]


@pytest.mark.full
def test_a_table_that_names_it_is_followed_where_all_ranks_can(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    rules = [{"schedule": "fused_kernel"}, {"schedule": "pipelined"}]
    table.write_text(json.dumps({"arch": {"default": {"default": {"default": rules}}}}))
    env = {"FUSED_TP_TABLE": str(table), "FUSED_TP_SCHEDULE": None}
    for matmul, moves in run_ranks(2, from_table, env=env):
        assert "pipelined" in matmul and "no fused_kernel: rank 0: fused kernels run on NVIDIA GPUs" in matmul
        assert "pipelined" in moves and "no fused_kernel: there is no fused kernel of all_reduce" in moves
    for outcome in fresh_ranks(2, where_one_lacks_it, env={**INTERPRETED, **env}):
        (matmul, moves), lacking = outcome.unwrap()
        assert "fused_kernel over symmetric memory" in matmul and "pipelined" in moves
        assert "no fused_kernel: rank 1: Triton is not installed" in lacking
