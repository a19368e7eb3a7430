"""The device kernels from Python: every collective and the schedules based on them, on processes and threads.

The kernels run in their CPU build. A sum over ranks has defined bits: float32, in rank order.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fused_tp
from benchmarks.local_ranks import LocalRank, run_local
from fused_tp.backends.cuda.device_collectives import DeviceCollectives
from fused_tp.backends.cuda.device_plans import NORM_ALGORITHMS
from fused_tp.backends.cuda.device_schedule import DeviceSchedule
from fused_tp.backends.messages.torch_dist import torch_dist
from fused_tp.backends.symmetric_memory.group_kernels import Workspaces
from fused_tp.backends.symmetric_memory.symm_mem import CpuSymmetricMemory, group_memory
from fused_tp.core.availability import Availability
from fused_tp.core.errors import FusedTPError, PeerLostError, RankMismatchError
from fused_tp.core.group import resolve_group
from fused_tp.core.partition import shard_range, shard_sizes
from tests.distributed import test_tp_ops as cases
from tests.distributed.schedule_cases import ALGORITHMS, CPU, multicast, ranks_on, schedule_on
from tests.distributed.shm_tools import summed
from tests.native_build import cpu_device_library, use_library
from tests.reference import assert_within_dtype_error, rms_norm64, seeded
from tests.workers import fresh_ranks, on_ranks

pytestmark = pytest.mark.full

# One element, less than a packet of 16 bytes, odd, several packets and a rest, more than one block's share.
SHAPES = [(1,), (7,), (3, 5), (5, 131), (2, 33, 129)]


@pytest.fixture(autouse=True)
def no_library_stays() -> Iterator[None]:
    """Reset the library, which ranks that are threads set in this process."""
    yield
    use_library(None)


device_ranks = partial(ranks_on, "two_shot")


def collectives_of(group: Any) -> DeviceCollectives:
    """Create new DeviceCollectives, independent of earlier ones of the group."""
    described = resolve_group(group)
    memory = group_memory(described, CPU)
    assert not isinstance(memory, Availability), memory
    return DeviceCollectives(memory, torch_dist(described, "cpu"))


def same_bits(actual: Tensor, wanted: Tensor) -> None:
    assert actual.shape == wanted.shape and actual.dtype == wanted.dtype
    assert torch.equal(actual.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


def terms_of(world_size: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    return [seeded(*shape, dtype=dtype, seed=1000 * seed + rank) for rank in range(world_size)]


# -- collectives on any ranks: on the CPU here, on GPUs in tests/gpu ---------------------------------------------------


def sums(device: DeviceCollectives, dtype: torch.dtype) -> None:
    rank, world_size = device.rank, device.world_size
    for seed, shape in enumerate(SHAPES):
        terms = terms_of(world_size, shape, dtype, seed)
        bias = seeded(shape[-1], dtype=dtype, seed=77)
        for algorithm in ALGORITHMS:
            same_bits(device.all_reduce(terms[rank], algorithm), summed(terms))
            total = device.all_reduce(terms[rank], algorithm, bias)
            if algorithm == "multimem":  # the switch rounds the sum, then the bias is added
                wanted = torch.stack([t.double() for t in terms]).sum(0) + bias.double()
                assert_within_dtype_error(total, wanted, dtype, reduced_over=world_size + 1, roundings=2)
            else:
                same_bits(total, summed(terms, bias))
        in_place = terms[rank].clone()
        assert device.all_reduce(in_place, "two_shot", bias, out=in_place) is in_place
        same_bits(in_place, summed(terms, bias))
        backwards = terms[rank].flip(0).t().contiguous().t() if len(shape) == 2 else terms[rank].flip(0)
        strided_bias = torch.stack([bias, bias], -1)[..., 0]
        same_bits(device.all_reduce(backwards, "one_shot", strided_bias), summed([t.flip(0) for t in terms], bias))
        start, stop = shard_range(shape[0], world_size, rank)
        same_bits(device.reduce_scatter(terms[rank]), summed(terms)[start:stop])
        same_bits(device.reduce_scatter(terms[rank], None, bias), summed(terms, bias)[start:stop])
    # Blocks of rows, as for a dim in the middle: 3 rows for each index of a dim of 5.
    terms = terms_of(world_size, (15, 4), dtype)
    sizes = [3 * size for size in shard_sizes(5, world_size)]
    wanted = summed(terms).split(sizes)[rank]
    same_bits(device.reduce_scatter(terms[rank], sizes), wanted)


def movements(device: DeviceCollectives, dtype: torch.dtype) -> None:
    rank, world_size = device.rank, device.world_size
    for shape in ((1,), (7,), (13, 3), (4 * world_size, 5, 2), (257, 67)):
        whole = (100 * seeded(*shape)).to(dtype)
        sizes = shard_sizes(shape[0], world_size)
        shard = whole.split(sizes)[rank]
        same_bits(device.all_gather(shard, sizes), whole)
    shards = [torch.full((2, 3), r, dtype=dtype)[:, ::2] for r in range(world_size)]
    same_bits(device.all_gather(shards[rank]), torch.cat(shards))
    for batch, length, heads, head_dim in ((1, 1, 1, 1), (2, 3, 2, 5), (3, 4, 1, 64)):
        whole = (100 * seeded(batch, length * world_size, heads * world_size, head_dim)).to(dtype)
        of_sequence = whole.split(length, 1)[rank]
        of_heads = whole.split(heads, 2)[rank]
        assert 1 in (batch, world_size) or not of_sequence.is_contiguous()  # strided batches need no copy
        same_bits(device.sequence_to_heads(of_sequence), of_heads)
        same_bits(device.heads_to_sequence(of_heads), of_sequence)
        same_bits(device.heads_to_sequence(device.sequence_to_heads(of_sequence)), of_sequence)


def norms(device: DeviceCollectives, dtype: torch.dtype) -> list[Tensor]:
    """Test the norms, and return results whose bits must agree on all ranks."""
    rank, world_size = device.rank, device.world_size
    results: list[Tensor] = []
    for seed, shape in enumerate(SHAPES):
        terms = terms_of(world_size, shape, dtype, seed)
        residual, weight = seeded(*shape, dtype=dtype, seed=5), seeded(shape[-1], dtype=dtype, seed=6)
        wanted = residual.double() + torch.stack([t.double() for t in terms]).sum(0)
        for algorithm in NORM_ALGORITHMS:
            name = f"{shape} {algorithm}"
            normed, stream = device.all_reduce_rms_norm(terms[rank], residual, weight, 1e-6, algorithm)
            assert_within_dtype_error(stream, wanted, dtype, reduced_over=world_size + 1, name=name)
            normed64 = rms_norm64(stream, weight, 1e-6)
            assert_within_dtype_error(normed, normed64, dtype, reduced_over=shape[-1], name=name)
            results += [normed, stream]
    return results


def every_collective(device: DeviceCollectives, dtype: torch.dtype) -> list[Tensor]:
    sums(device, dtype)
    movements(device, dtype)
    return norms(device, dtype)


def in_process(group: Any, dtype_name: str) -> list[bytes]:
    device = collectives_of(group)
    results = every_collective(device, getattr(torch, dtype_name))
    for dtype in (torch.int64, torch.uint8, torch.float64, torch.complex64):  # movements support any dtype
        movements(device, dtype)
    return [t.contiguous().view(torch.uint8).numpy().tobytes() for t in results]


@pytest.mark.parametrize(
    ("world_size", "dtype_name"), [(1, "bfloat16"), (2, "float32"), (3, "float16"), (4, "bfloat16")]
)
def test_collectives_of_processes(world_size: int, dtype_name: str) -> None:
    results = device_ranks(world_size, in_process, dtype_name)
    assert all(result == results[0] for result in results)


@pytest.fixture
def library() -> Iterator[None]:
    use_library(cpu_device_library())
    with multicast():
        yield


@on_ranks(2, run=device_ranks)
def test_nothing_to_do_and_scalars(group: Any) -> None:
    device = collectives_of(group)
    x = torch.empty(0, 4)
    assert device.all_reduce(x, "one_shot", torch.ones(4)).shape == (0, 4)
    assert device.reduce_scatter(torch.empty(3, 0)).shape == (shard_sizes(3, device.world_size)[device.rank], 0)
    assert device.all_gather(x).shape == (0, 4)
    assert device.all_reduce_rms_norm(x, x, torch.ones(4), 1e-6)[0].shape == (0, 4)
    assert device.sequence_to_heads(torch.empty(1, 0, 4, 2)).shape == (1, 0, 4 // device.world_size, 2)
    rows = torch.empty(3, 0)
    assert device.all_reduce_rms_norm(rows, rows, torch.empty(0), 1e-6)[0].shape == (3, 0)
    scalar = device.all_reduce(torch.tensor(1.5))
    assert scalar.shape == () and scalar.item() == 1.5 * device.world_size


# -- groups at once -------------------------------------------------------------------------------------------------


@on_ranks(4, run=device_ranks)
def test_two_groups_at_once(group: Any) -> None:
    """Two groups of the same ranks, each called by a separate thread."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    assert group is not dist.group.WORLD  # which has the same ranks
    failed: list[BaseException] = []

    def calls(device: DeviceCollectives, seed: int) -> None:
        try:
            for call in range(10):
                terms = terms_of(world_size, (9 + 300 * (call % 3), 17), torch.float32, seed + call)
                same_bits(device.all_reduce(terms[rank], ALGORITHMS[call % 3]), summed(terms))
        except BaseException as error:
            failed.append(error)

    devices = [collectives_of(group), collectives_of(dist.group.WORLD)]
    threads = [threading.Thread(target=calls, args=(device, 100 * i)) for i, device in enumerate(devices)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


# -- schedules --------------------------------------------------------------------------------------------------------


def kernels_of_ops(group: Any) -> dict[str, list[str]]:
    """Kernels that run for each op, forward and backward."""
    found: dict[str, list[str]] = {}
    real = Workspaces.use

    def use(self: Workspaces, kind: str, nbytes: int, op: str, **keywords: Any) -> Any:
        taken.append(op)
        return real(self, kind, nbytes, op, **keywords)

    x, w = seeded(6, 4), seeded(4, 4)
    norm = {"residual": torch.ones(6, 4), "norm_weight": torch.ones(4), "eps": 1e-5}
    with mock.patch.object(Workspaces, "use", use):
        for op in (*cases.MATMULS, "matmul_all_reduce_rms_norm"):
            taken = found[op] = []
            more = norm if op.endswith("norm") else {}
            out = getattr(fused_tp, op)(cases.leaf(x), cases.leaf(w), group=group, **more)
            (out[0] if isinstance(out, tuple) else out).sum().backward()
        taken = found["all_reduce_rms_norm"] = []
        fused_tp.all_reduce_rms_norm(x, **norm, group=group)
        taken = found["all_reduce of float64"] = []
        fused_tp.all_reduce(x.double(), group=group)
    return found


@on_ranks(2, run=device_ranks)
def test_every_op_runs_its_kernel_forward_and_backward(group: Any) -> None:
    with schedule_on(group, "two_shot"):
        assert kernels_of_ops(group) == {
            "all_gather_matmul": ["all_gather", "all_gather", "reduce_scatter"],
            "matmul_reduce_scatter": ["reduce_scatter", "all_gather"],
            "matmul_all_reduce": ["all_reduce"],
            "column_parallel_matmul": ["all_reduce"],
            "matmul_all_reduce_rms_norm": ["all_reduce_rms_norm"],
            "all_reduce_rms_norm": ["all_reduce_rms_norm"],
            "all_reduce of float64": [],
        }


def test_ranks_that_are_threads_have_nothing_without_kernels(library: None) -> None:
    def ranks(rank: LocalRank) -> None:
        schedule = DeviceSchedule("two_shot", DeviceCollectives(rank), None)
        assert torch.equal(schedule.all_reduce(torch.ones(2)), torch.full((2,), 3.0))
        with pytest.raises(ValueError, match="ranks are threads of one process"):
            schedule.all_reduce(torch.ones(2, dtype=torch.float64))

    run_local(3, ranks, timeout=60)


# -- rejected arguments -----------------------------------------------------------------------------------------------


@on_ranks(2, run=device_ranks)
def test_what_does_not_fit_is_refused_before_anything_is_sent(group: Any) -> None:
    device = collectives_of(group)
    x = torch.ones(4, 6)
    with pytest.raises(TypeError, match=r"dtype float32, bfloat16 or float16, got torch\.float64"):
        device.all_reduce(x.double())
    without_switch = mock.patch.object(CpuSymmetricMemory, "multicast_ptr", 0)
    with without_switch, pytest.raises(ValueError, match="'multimem' needs multicast memory"):
        collectives_of(group).all_reduce(x, "multimem")
    assert torch.equal(device.all_reduce(x), 2 * x)  # nothing was sent, so the group still works


@on_ranks(2, run=device_ranks)
def test_ranks_that_disagree_are_told_where_they_are_asked_to_check(group: Any) -> None:
    with schedule_on(group, "one_shot"), mock.patch.dict(os.environ, {"FUSED_TP_CHECK": "1"}):
        fused_tp.matmul_all_reduce(torch.ones(2, 3), torch.ones(4, 3), group=group)
        with pytest.raises(RankMismatchError) as raised:
            fused_tp.matmul_all_reduce(torch.ones(2 + group.rank(), 3), torch.ones(4, 3), group=group)
    assert all(f"matmul_all_reduce (one_shot)(dims=[{rows}, 4" in str(raised.value) for rows in (2, 3))


# -- kernels that fail ----------------------------------------------------------------------------------------

X = torch.ones(40, 24)


def kernels_fail(group: Any) -> tuple[str, str]:
    """Let the kernels of rank 0 fail while rank 1 waits for its message; return rank 1's errors."""
    with schedule_on(group, "two_shot") as schedule:
        schedule.all_reduce(X)
        transport, outside = schedule.fallback.transport, torch.ones(4)
        if dist.get_rank(group) == 0:
            schedule.collectives.abort("the kernels of rank 0 have failed.")
            return "", ""
        begun = time.perf_counter()
        with pytest.raises(PeerLostError) as heard, schedule.abort_scope("op"):
            transport.shift("shift", outside[:0], outside, 1).wait()
        assert time.perf_counter() - begun < 4.0  # the deadline is 60 s
        for run in (lambda: schedule.all_reduce(X), lambda: schedule.collectives.all_reduce(X, "two_shot")):
            with pytest.raises(FusedTPError, match="unusable because an earlier call failed") as refused:
                run()
        return str(heard.value), str(refused.value)


def test_who_waits_for_messages_of_a_rank_whose_kernels_failed_hears_of_it() -> None:
    """The waiting rank also gives up its own kernels, which have not failed."""
    outcomes = device_ranks(2, kernels_fail, run=fresh_ranks)
    heard, refused = outcomes[1].unwrap()
    assert "rank 0 has aborted the group" in heard and "the kernels of rank 0 have failed." in heard
    assert "The group's kernels are unusable" in refused and "the kernels of rank 0 have failed." in refused
