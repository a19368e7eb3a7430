"""Device kernels on GPUs: ranks as threads on one GPU and as processes, in graphs, and with an absent rank.

The checks are those of the kernels' CPU build (tests/distributed/test_device_schedules.py).
Each process has its own GPU if there are enough; otherwise processes share GPUs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fused_tp
from benchmarks.local_ranks import LocalGroup, LocalRank, run_local
from fused_tp.backends.cuda import native_kernels
from fused_tp.backends.cuda.device_collectives import DeviceCollectives
from fused_tp.backends.symmetric_memory.symm_mem import group_memory
from fused_tp.core.availability import Availability
from fused_tp.core.group import resolve_group
from tests.distributed import test_device_schedules as checks
from tests.gpu.on_device import Graph, OnDevice, device_of, environment, unwrapped, why_not
from tests.native_build import cpu_device_library, use_library
from tests.reference import seeded
from tests.workers import fresh_ranks

pytestmark = pytest.mark.gpu

ALGORITHMS = ("one_shot", "two_shot")  # multimem needs a switch and has its own test
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    available = native_kernels.native_kernels_available()
    if not available:
        pytest.skip(f"needs the library of device kernels: {available.reason}")
    monkeypatch.setenv("FUSED_TP_TIMEOUT", "60")
    monkeypatch.setattr(checks, "ALGORITHMS", ALGORITHMS)


def collectives_on(device: torch.device, target: DeviceCollectives) -> Any:
    """Proxy that takes CPU tensors; errors that the CPU build raises within a call are raised at its end."""
    return OnDevice(target, device, target.raise_if_failed)


# -- threads on one GPU -----------------------------------------------------------------------------------------------


def rehearse(rank: LocalRank, work: Callable[[Any], object]) -> None:
    """Run `work` on a group of one, rank by rank, so that loads and allocations precede calls that wait for peers."""
    with rank.in_turn():
        alone = LocalGroup(1, rank.device).rank(0)
        work(collectives_on(rank.device, DeviceCollectives(alone)))


def every_collective(rank: LocalRank, dtype: torch.dtype) -> list[Tensor]:
    rehearse(rank, lambda device: checks.every_collective(device, dtype))
    return checks.every_collective(collectives_on(rank.device, DeviceCollectives(rank)), dtype)


def same_on_all(results: list[list[Tensor]]) -> None:
    for result in results[1:]:
        for mine, first in zip(result, results[0], strict=True):
            checks.same_bits(mine, first)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_threads(world_size: int, dtype: torch.dtype) -> None:
    same_on_all(run_local(world_size, every_collective, dtype, device="cuda"))


def large(rank: LocalRank, elements: int) -> None:
    """Inputs are so long that every block makes many rounds, and odd, so that ends are not whole packets."""
    device, world_size = DeviceCollectives(rank), rank.world_size
    with rank.in_turn():
        terms = [seeded(elements, dtype=torch.bfloat16, seed=r).to(rank.device) for r in range(world_size)]
        wanted = checks.summed(terms)
        outs = [torch.empty_like(wanted) for _ in range(2)]
        assert torch.equal(wanted, checks.summed(terms))
        kept = [torch.empty(world_size * elements, dtype=torch.bfloat16, device=rank.device) for _ in range(3)]
        del kept
    for algorithm, out in zip(ALGORITHMS, outs, strict=True):
        device.all_reduce(terms[rank.rank], algorithm, out=out)
    gathered = device.all_gather(terms[rank.rank])
    rank.barrier()
    device.raise_if_failed()
    with rank.in_turn():
        assert all(torch.equal(out, wanted) for out in outs)
        assert torch.equal(gathered, torch.cat(terms))


def wide_norms(rank: LocalRank, rows: int, columns: int) -> list[Tensor]:
    """Several rows per block: rows that fit into a block's registers, that do not, and that are not whole packets."""
    dtype, world_size = torch.bfloat16, rank.world_size
    terms = [seeded(rows, columns, dtype=dtype, seed=peer) for peer in range(world_size)]
    residual, weight = seeded(rows, columns, dtype=dtype, seed=7), seeded(columns, dtype=dtype, seed=8)
    summed = torch.stack([term.double() for term in terms]).sum(0) + residual.double()

    def norm(device: Any) -> list[Tensor]:
        results = []
        for algorithm in ALGORITHMS:
            results += device.all_reduce_rms_norm(terms[rank.rank], residual, weight, 1e-6, algorithm)
        return results

    rehearse(rank, norm)
    results = norm(collectives_on(rank.device, DeviceCollectives(rank)))
    for normed, stream in (results[:2], results[2:]):
        checks.assert_within_dtype_error(stream, summed, dtype, reduced_over=world_size + 1)
        normed64 = checks.rms_norm64(stream, weight, 1e-6)
        checks.assert_within_dtype_error(normed, normed64, dtype, reduced_over=columns)
    return results


@pytest.mark.parametrize(("rows", "columns"), [(300, 12288), (300, 4096), (301, 4097), (7, 12289), (5000, 24)])
def test_wide_norms(rows: int, columns: int) -> None:
    same_on_all(run_local(2, wide_norms, rows, columns, device="cuda"))


@pytest.mark.parametrize("world_size", [2, 4])
def test_large(world_size: int) -> None:
    run_local(world_size, large, (1 << 23) + 13, device="cuda")


def in_graph(rank: LocalRank, replays: int) -> None:
    """Capture every kernel in one graph and replay it with other inputs each time, with eager calls in between."""
    device, world_size, r = DeviceCollectives(rank), rank.world_size, rank.rank
    rows, columns = 4 * world_size, 8 * world_size

    def inputs(seed: int) -> list[Tensor]:
        return [seeded(rows, columns, dtype=torch.bfloat16, seed=100 * seed + k) for k in range(world_size)]

    x = torch.empty(rows, columns, dtype=torch.bfloat16, device=rank.device)
    residual, weight = (seeded(*shape, dtype=torch.bfloat16, seed=7) for shape in ((rows, columns), (columns,)))
    residual_here, weight_here = residual.to(rank.device), weight.to(rank.device)

    def work() -> list[Tensor]:
        normed, stream = device.all_reduce_rms_norm(x, residual_here, weight_here, 1e-6, "two_shot")
        again, _ = device.all_reduce_rms_norm(x, residual_here, weight_here, 1e-6, "one_shot")
        moved = device.sequence_to_heads(x.view(1, rows, world_size, 8))
        sums = [device.all_reduce(x, algorithm) for algorithm in ALGORITHMS]
        return [*sums, device.reduce_scatter(x), device.all_gather(x), moved, stream, normed, again]

    def check(results: list[Tensor], terms: list[Tensor]) -> None:
        rank.synchronize()
        device.raise_if_failed()
        total = checks.summed(terms)
        one, two, scattered, gathered, moved, stream, normed, again = (t.cpu() for t in results)
        for actual in (one, two):
            checks.same_bits(actual, total)
        checks.same_bits(scattered, total.chunk(world_size)[r])
        checks.same_bits(gathered, torch.cat(terms))
        whole = torch.cat([t.view(1, rows, world_size, 8) for t in terms], 1)
        checks.same_bits(moved, whole[:, :, r : r + 1])
        summed = torch.stack([t.double() for t in terms]).sum(0) + residual.double()
        checks.assert_within_dtype_error(stream, summed, torch.bfloat16, reduced_over=world_size + 1)
        normed64 = checks.rms_norm64(stream, weight, 1e-6)
        checks.assert_within_dtype_error(normed, normed64, torch.bfloat16, reduced_over=columns)
        checks.same_bits(again, normed)

    with rank.in_turn():  # everything that torch loads and allocates
        _late(rank, 0)
        alone = DeviceCollectives(LocalGroup(1, rank.device).rank(0))
        kept = [alone.all_reduce(x), alone.all_gather(x), alone.all_reduce_rms_norm(x, x, weight_here, 1e-6)]
        x.copy_(inputs(0)[r])
        kept = [torch.empty(1 << 20, dtype=torch.uint8, device=rank.device) for _ in range(16)]
        del kept
    check(work(), inputs(0))
    rank.barrier()
    graph = Graph(rank.device, work, rank.in_turn)
    with rank.in_turn():  # a capture begins by releasing torch's unused memory
        kept = [torch.empty(1 << 20, dtype=torch.uint8, device=rank.device) for _ in range(16)]
        del kept
    for number in range(1, replays + 1):
        terms = inputs(number)
        x.copy_(terms[r])
        if number % 3 == 0:
            _late(rank, r)
        check(graph.replay(), terms)
        if number % 2:
            check(work(), terms)
    rank.barrier()


def _late(rank: LocalRank, milliseconds: int) -> None:
    if rank.device.type == "cuda":
        torch.cuda._sleep(2_000_000 * milliseconds)
    else:
        time.sleep(milliseconds / 1e3)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_graphs_and_calls_between_replays(world_size: int) -> None:
    run_local(world_size, in_graph, 8, device="cuda")


def on_another_stream(group: Any, kind: str) -> str:
    """Run forward and backward on one stream, then capture them on another, which has no side stream yet."""
    device = device_of(dist.get_rank(group), kind)
    reason = why_not(group, "two_shot", device)
    if reason is not None:
        return reason
    x = seeded(16, 32, seed=dist.get_rank(group)).to(device).requires_grad_()
    weight = seeded(24, 32, seed=9).to(device).requires_grad_()

    def work() -> list[Tensor]:
        y = fused_tp.all_gather_matmul(x, weight, group=group)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), (x, weight))]

    with mock.patch.dict(os.environ, FUSED_TP_SCHEDULE="two_shot"):
        wanted = [result.clone() for result in work()]
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier(group)
        results = Graph(device, work).replay()  # on a new stream: the default stream cannot be captured
    for actual, result in zip(results, wanted, strict=True):
        assert torch.equal(actual.cpu(), result.cpu())
    dist.barrier(group)
    return ""


def test_forward_and_backward_are_captured_on_another_stream() -> None:
    env = environment(2)
    unwrapped(fresh_ranks(2, on_another_stream, "cuda", timeout=300, env=env))


@pytest.mark.skipif(
    not (torch.cuda.is_available() and torch.cuda.device_count() > 1), reason="multicast reaches several GPUs"
)
def test_multimem() -> None:
    outcomes = fresh_ranks(torch.cuda.device_count(), by_the_switch, "cuda", timeout=300)
    results = unwrapped(outcomes)
    assert all(result == results[0] for result in results)


# -- processes --------------------------------------------------------------------------------------------------------


def group_collectives(group: Any, kind: str) -> Any:
    """Collectives of this process, which take CPU tensors; or the reason why there are none."""
    device = device_of(dist.get_rank(group), kind)
    if kind == "cpu":
        use_library(cpu_device_library())
    memory = group_memory(resolve_group(group), device)
    return memory.reason if isinstance(memory, Availability) else collectives_on(device, DeviceCollectives(memory))


def in_process(group: Any, kind: str, dtype_name: str) -> str | list[bytes]:
    """Results of every collective, which must have the same bits on all ranks; or why the ranks cannot run."""
    device = group_collectives(group, kind)
    if isinstance(device, str):
        return device
    with mock.patch.object(checks, "ALGORITHMS", ALGORITHMS):
        results = checks.every_collective(device, getattr(torch, dtype_name))
    dist.barrier(group)
    return in_bytes(results)


def in_bytes(results: list[Tensor]) -> list[bytes]:
    return [t.contiguous().view(torch.uint8).numpy().tobytes() for t in results]


def by_the_switch(group: Any, kind: str) -> str | list[bytes]:
    """The order of the switch's sums is unknown: they are near the exact sum, with the same bits on all ranks."""
    device = group_collectives(group, kind)
    if isinstance(device, str):
        return device
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    memory = group_memory(resolve_group(group), device_of(rank, kind))
    if isinstance(memory, Availability) or not memory.has_multicast:
        return "these GPUs have no multicast, which takes an NVLink switch with SHARP"
    results = []
    for dtype in DTYPES:
        for count in (8, 4099, (1 << 20) + 8):  # less than a packet for each rank, no whole packets, many blocks
            terms = [seeded(count, dtype=dtype, seed=peer) for peer in range(world_size)]
            total = device.all_reduce(terms[rank], "multimem")
            exact = torch.stack([term.double() for term in terms]).sum(0)
            checks.assert_within_dtype_error(total, exact, dtype, reduced_over=world_size)
            results.append(total)
    dist.barrier(group)
    return in_bytes(results)


@pytest.mark.parametrize(("world_size", "dtype_name"), [(2, "bfloat16"), (2, "float32"), (4, "float16")])
def test_processes(world_size: int, dtype_name: str) -> None:
    env = environment(world_size)
    results = unwrapped(fresh_ranks(world_size, in_process, "cuda", dtype_name, timeout=300, env=env))
    assert all(result == results[0] for result in results)
