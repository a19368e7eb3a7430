"""Test cases for schedules of every transport: ways to run ops on a schedule, and the required results of its methods.

Schedules for GPUs run on CPU tensors, over the CPU build of the device kernels and test doubles of NCCL and CUDA.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from benchmarks.local_ranks import LocalSymmetricMemory
from fused_tp.backends import registry
from fused_tp.backends.copy_engine import copy_engine_schedule as copy_engine
from fused_tp.backends.messages import pipelined, torch_dist
from fused_tp.backends.nccl import nccl_pipeline
from fused_tp.backends.schedule import GatherMatmul, Schedule
from fused_tp.backends.shared_memory import shared_memory
from fused_tp.backends.symmetric_memory.symm_mem import CpuSymmetricMemory
from fused_tp.core.dispatch import ScheduleKey
from fused_tp.core.group import resolve_group
from fused_tp.core.partition import shard_range
from fused_tp.core.pending import sum_in_rank_order
from tests.distributed.symm_mem_double import symm_mem_on_cpu
from tests.native.doubles.libraries import DOUBLES, build_doubles, double_knobs, doubles
from tests.reference import assert_within_dtype_error, matmul64, seeded
from tests.workers import body_of, run_ranks

CPU = torch.device("cpu")
NEEDS_CORE = pytest.mark.skipif(find_spec("fused_tp._core") is None, reason="needs the native core: pip install -e .")
SCHEDULES = ["plain", "pipelined", pytest.param("one_sided", marks=NEEDS_CORE)]
# Each schedule as it is, and with size limits so low that small tensors take the path of large ones.
VARIANTS = [
    *("plain", "plain-chunked", "pipelined", "pipelined-chunked"),
    *(pytest.param(name, marks=NEEDS_CORE) for name in ("one_sided", "one_sided-chunked")),
]
ALGORITHMS = ("one_shot", "two_shot", "multimem")  # of device kernels
LIMITS: list[tuple[Any, str]] = [
    (pipelined, "CHUNK_BYTES"),
    (copy_engine, "CHUNK_BYTES"),
    (nccl_pipeline, "CHUNK_BYTES"),
    (nccl_pipeline, "ONE_SHOT_BYTES"),
    (torch_dist, "ONE_SHOT_BYTES"),
    (shared_memory, "_MIN_STEPPED_BYTES"),
]


@contextmanager
def low_limits() -> Iterator[None]:
    """Set chunks to 64 bytes, and use two-step sums from 64 bytes on."""
    with ExitStack() as patches:
        for module, name in LIMITS:
            patches.enter_context(mock.patch.object(module, name, 64))
        yield


@contextmanager
def multicast() -> Iterator[None]:
    """Emulate memory behind an NVLink switch: the CPU build computes the switch's sums for `multimem`."""
    with (
        mock.patch.object(CpuSymmetricMemory, "multicast_ptr", 1, create=True),
        mock.patch.object(LocalSymmetricMemory, "multicast_ptr", 1),
    ):
        yield


@contextmanager
def torch_ops(schedule: str) -> Iterator[None]:
    """Register torch's ops for the CPU, if the schedule calls them."""
    with symm_mem_on_cpu() if schedule == "symm_mem" else nullcontext():
        yield


def _double_of(schedule: str) -> str:
    return "two_shot" if schedule in ALGORITHMS else schedule


@contextmanager
def schedule_on(group: Any, name: str) -> Iterator[Any]:
    """Create a schedule as dispatch does, and run the public ops of `group` on it if it supports them."""
    described, spec = resolve_group(group), registry.SCHEDULES[name]
    with doubles(_double_of(name)), multicast(), torch_ops(name):
        available = spec.available(described, CPU)
        assert available or name == "multimem", available.reason  # `multicast` emulates its switch
        schedule = spec.make(described, CPU, None)
        made, selected = registry._CREATED_SCHEDULES[described], registry._SELECTED_SCHEDULES[described]
        selected.clear()
        made[name, CPU, None] = schedule
        try:
            with mock.patch.dict(os.environ, FUSED_TP_SCHEDULE=name):
                key = ScheduleKey("matmul_all_reduce", torch.float32, CPU, 4, None, 4)
                assert described.size == 1 or registry.select_schedule(key, described) is schedule
                yield schedule
        finally:
            del made[name, CPU, None]
            selected.clear()


def run_variant(variant: str, world_size: int, fn: Callable[..., Any], *args: Any, **keywords: Any) -> list[Any]:
    """`run_ranks` with a schedule of CPUs or GPUs, with low limits if the variant ends in "-chunked"."""
    schedule, _, chunked = variant.partition("-")
    build_doubles(_double_of(schedule))
    env = {"FUSED_TP_SCHEDULE": schedule}
    return run_ranks(world_size, _run, schedule, bool(chunked), fn, args, env=env, **keywords)


def _run(group: Any, schedule: str, chunked: bool, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with ExitStack() as around:
        if chunked:
            around.enter_context(low_limits())
        if schedule in (*ALGORITHMS, *DOUBLES, "symm_mem"):
            around.enter_context(schedule_on(group, schedule))
        return fn(group, *args)


def ranks_on(
    name: str, world_size: int, fn: Callable[..., Any], *args: Any, run: Callable[..., Any] = run_ranks, **how: Any
) -> list[Any]:
    """`run_ranks` of `fn(group, *args)` with the test doubles that this schedule needs."""
    build_doubles(_double_of(name))
    return run(world_size, _with_doubles, name, fn, args, **how)


def _with_doubles(group: Any, name: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with doubles(_double_of(name)), multicast():
        return body_of(fn)(group, *args)


@contextmanager
def stalled_until(schedule: Any, multiplied: int) -> Iterator[None]:
    """Stall transfers until `multiplied` matmuls of the module have run; an earlier wait for a transfer times out."""
    streams, product, done = double_knobs(), schedule.sum_of_products, 0

    def counting(*args: Any, **keywords: Any) -> Tensor:
        nonlocal done
        y = product(*args, **keywords)
        done += 1
        if done == multiplied:
            streams.cuda_double_stall(0)
        return y

    streams.cuda_double_stall(1)
    try:
        with mock.patch.object(schedule, "sum_of_products", counting):
            yield
    finally:
        streams.cuda_double_stall(0)
    assert done >= multiplied


# -- required results of a schedule ------------------------------------------------------------------------------------

# [B, M, K] and N: one element, odd sizes, shards that are empty, no features, no rows, no columns.
SIZES = [(1, 1, 1, 1), (2, 3, 5, 7), (1, 13, 17, 11), (3, 12, 8, 24), (2, 5, 0, 3), (1, 0, 3, 2), (1, 5, 4, 0)]
CHUNKS = (None, 1, 2, 3, 5, 16)


def step(schedule: Schedule, op: str) -> Tensor:
    """Run one op; a row of its products is 6.0 on each rank."""
    x, w = torch.ones(8 * schedule.world_size, 6), torch.ones(5, 6)
    if op == "all_gather":
        return schedule.all_gather(x, gather_dim=0, gather_size=None).wait()
    if op == "all_gather_matmul":
        return schedule.all_gather_matmul(GatherMatmul(x, [w], [None], 0))[0][0]
    if op == "matmul_reduce_scatter":
        return schedule.matmul_reduce_scatter([(x, w)], None, scatter_dim=0)
    if op == "reduce_scatter":
        return schedule.reduce_scatter(x, scatter_dim=0)
    return schedule.matmul_all_reduce([(x, w)], None)


def own(schedule: Schedule, t: Tensor, dim: int) -> Tensor:
    """Shard of `t` on this rank."""
    start, stop = shard_range(t.shape[dim], schedule.world_size, schedule.rank)
    return t.narrow(dim, start, stop - start).contiguous()


@mock.patch.object(nccl_pipeline, "ONE_SHOT_BYTES", 0)
def every_method(schedule: Any, dtype: torch.dtype, *, exact: bool = True) -> None:
    """Test every method on every dim, with each number of CHUNKS if the schedule takes one.

    Products are compared with fp64, and sums bit for bit with those in rank order, so that they agree on all ranks.

    Args:
        exact: False for sums in another order, or with intermediate rounding, which need only agree on all ranks.
    """
    in_chunks = hasattr(schedule, "chunks")
    for sizes in SIZES:
        check = partial(same_sum, schedule, exact)
        movements(schedule, check, dtype, *sizes)
        for count in CHUNKS if in_chunks else (None,):
            if in_chunks:
                schedule.num_chunks = count
            called: list[str] = []
            matmuls(schedule, check, called.append, dtype, *sizes)
            assert called == ["scatter", "scatter", "reduce"], f"sizes {sizes}"


def same_sum(schedule: Schedule, exact: bool, actual: Tensor, terms: Tensor, bias: Tensor | None = None) -> None:
    """Assert that `actual` is the sum of all ranks' `terms`, and equal on every rank."""
    total = sum_in_rank_order(terms, bias)
    if exact:
        assert torch.equal(actual, total)
        return
    assert_within_dtype_error(actual, total.double(), actual.dtype, reduced_over=len(terms), roundings=len(terms))
    everyone = schedule.all_gather(actual.unsqueeze(0), gather_dim=0, gather_size=None).wait()
    assert all(torch.equal(theirs, actual) for theirs in everyone)


Check = Callable[..., None]


def movements(schedule: Schedule, check: Check, dtype: torch.dtype, b: int, m: int, k: int, n: int) -> None:
    terms = torch.stack([seeded(b, m, n, dtype=dtype, seed=20 + r) for r in range(schedule.world_size)])
    mine, total = terms[schedule.rank], sum_in_rank_order(terms)
    for dim in range(3):
        size = total.shape[dim]

        def gathered(part: Tensor, dim: int = dim, size: int = size) -> Tensor:
            return schedule.all_gather(part, gather_dim=dim, gather_size=size).wait()

        assert torch.equal(gathered(own(schedule, total, dim)), total)
        check(gathered(schedule.reduce_scatter(mine, scatter_dim=dim)), terms)
    check(schedule.all_reduce(mine), terms)
    assert torch.equal(mine, seeded(b, m, n, dtype=dtype, seed=20 + schedule.rank)), "an argument is overwritten"
    check(schedule.all_reduce(mine.transpose(0, 2)), terms.transpose(1, 3))


def matmuls(
    schedule: Schedule, check: Check, called: Callable[[str], None], dtype: torch.dtype, b: int, m: int, k: int, n: int
) -> None:
    world, rank = schedule.world_size, schedule.rank
    x, bias = seeded(b, m, k, dtype=dtype, seed=1), seeded(n, dtype=dtype, seed=5)
    ws = [seeded(n + i, k, dtype=dtype, seed=2 + i, scale=max(k, 1) ** -0.5) for i in range(2)]
    # Two products on each rank, with sizes of K that differ between ranks.
    pairs = [
        [
            (seeded(b, m, kk, dtype=dtype, seed=10 * r + i), seeded(n, kk, dtype=dtype, seed=10 * r + 5 + i))
            for i, kk in enumerate((k, k + r))
        ]
        for r in range(world)
    ]
    wanted = torch.stack([matmul64(*pair) for of_rank in pairs for pair in of_rank]).sum(0) + bias.double()
    near = partial(assert_within_dtype_error, dtype=dtype, reduced_over=max(1, world * (2 * k + world)), roundings=4)
    for dim in (0, 1):
        shard, size = own(schedule, x, dim), x.shape[dim]
        ys, kept = schedule.all_gather_matmul(GatherMatmul(shard, ws, [bias, None], dim, size, return_gathered=True))
        assert kept is not None and torch.equal(kept, x)
        for y, w, added in zip(ys, ws, (bias, None), strict=True):
            near(y, matmul64(x, w, added))
        assert schedule.all_gather_matmul(GatherMatmul(shard, ws[:1], [None], dim, size))[1] is None
        meanwhile = partial(called, "scatter")
        y = schedule.matmul_reduce_scatter(pairs[rank], bias, scatter_dim=dim, overlapped_work=meanwhile)
        near(y, own(schedule, wanted, dim))
    near(schedule.matmul_all_reduce(pairs[rank], bias, overlapped_work=partial(called, "reduce")), wanted)
    # Products with the identity are exact, so that only the order of the sum and one rounding matter.
    terms, one = torch.stack([seeded(b, m, n, dtype=dtype, seed=r) for r in range(world)]), torch.eye(n, dtype=dtype)
    check(schedule.matmul_all_reduce([(terms[rank], one)], bias), terms, bias)
    scattered = schedule.matmul_reduce_scatter([(terms[rank], one)], bias, scatter_dim=1)
    check(schedule.all_gather(scattered, gather_dim=1, gather_size=m).wait(), terms, bias)


@mock.patch.object(nccl_pipeline, "ONE_SHOT_BYTES", 0)
def at_random(schedule: Any, seed: int, calls: int, dtype: torch.dtype = torch.float64) -> None:
    """Make the same calls in the same order on all ranks, each rank at its own pace; some gathers end later."""
    script, pace = random.Random(seed), random.Random(seed + 1 + schedule.rank)
    pending: list[tuple[Any, Tensor]] = []
    near = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    for number in range(calls):
        if pace.random() < 0.3:
            time.sleep(pace.random() * 0.005)  # so that ranks overtake each other
        m, k, n = script.choice([1, 7, 64, 300]), script.choice([1, 16, 33]), script.choice([1, 40, 130])
        x, w = seeded(m, k, seed=number, dtype=dtype), seeded(n, k, seed=number + 1, dtype=dtype)
        schedule.num_chunks = script.choice([None, 1, 3])
        kind = script.randrange(5)
        if kind == 0 and len(pending) < 3:
            pending.append((schedule.all_gather(own(schedule, x, 0), gather_dim=0, gather_size=m), x))
        elif kind == 1 and pending:
            moving, wanted = pending.pop(script.randrange(len(pending)))
            assert torch.equal(moving.wait(), wanted), number
        elif kind == 2:
            (y,), _ = schedule.all_gather_matmul(GatherMatmul(own(schedule, x, 0), [w], [None], 0, m))
            near(y, x @ w.t())
        elif kind == 3:
            y = schedule.matmul_reduce_scatter([(x, w)], None, scatter_dim=0)
            near(y, own(schedule, schedule.world_size * (x @ w.t()), 0))
        else:
            y = schedule.matmul_all_reduce([(x, w)], None)
            near(y, schedule.world_size * (x @ w.t()))
    for moving, wanted in pending:
        assert torch.equal(moving.wait(), wanted)
