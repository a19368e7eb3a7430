"""The device kernels from Python: every collective and the schedules on top, on processes and on threads.

The kernels run in their CPU build. What a sum over ranks must be is known to the bit: float32, in the order of ranks.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fused_tp
from benchmarks.local_ranks import LocalRank, run_local
from fused_tp.runtime.errors import RankMismatchError
from fused_tp.runtime.partition import shard_sizes
from fused_tp.schedules.device import DeviceSchedule
from fused_tp.transport.device_collectives import DeviceCollectives
from fused_tp.transport.symm_mem import CpuSymmetricMemory
from fused_tp.transport.workspace import Workspaces
from tests.distributed import test_tp_ops as cases
from tests.distributed.device_tools import (
    ALGORITHMS,
    collectives_of,
    device_ranks,
    forced,
    multicast,
    rank_and_size,
    summed,
)
from tests.distributed.schedule_cases import at_random, every_method
from tests.native_build import cpu_device_library, use_library
from tests.reference import seeded

pytestmark = pytest.mark.full


@pytest.fixture(autouse=True)
def no_library_stays() -> Iterator[None]:
    """Ranks that are threads have set one in this very process."""
    yield
    use_library(None)


def same_bits(actual: Tensor, wanted: Tensor) -> None:
    assert actual.shape == wanted.shape and actual.dtype == wanted.dtype
    assert torch.equal(actual.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


def terms_of(world_size: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    return [seeded(*shape, dtype=dtype, seed=1000 * seed + rank) for rank in range(world_size)]


# -- collectives, on any ranks ----------------------------------------------------------------------------------------


@pytest.fixture
def library() -> Iterator[None]:
    use_library(cpu_device_library())
    with multicast():
        yield


def empties(group: Any) -> None:
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


def test_nothing_to_do_and_scalars() -> None:
    device_ranks(2, empties)


# -- calls in a row, groups at once -----------------------------------------------------------------------------------


def many_calls(group: Any) -> None:
    with forced(group, "two_shot") as schedule:
        at_random(schedule, 5, 60, torch.float32)


def test_many_calls_at_a_random_pace_in_growing_workspaces() -> None:
    device_ranks(3, many_calls)


def at_once(group: Any) -> None:
    """Two groups of the same ranks, each called by a thread of its own."""
    rank, world_size = rank_and_size(group)
    assert group is not dist.group.WORLD
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


def test_two_groups_at_once() -> None:
    device_ranks(4, at_once)  # the default group has these ranks too


# -- schedules --------------------------------------------------------------------------------------------------------


def on_schedule(group: Any, algorithm: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with forced(group, algorithm):
        return fn(group, *args)


def scheduled(world_size: int, algorithm: str, fn: Callable[..., Any], *args: Any) -> list[Any]:
    return device_ranks(world_size, on_schedule, algorithm, fn, args)


@pytest.mark.parametrize(
    ("algorithm", "world_size", "dtype_name"),
    [("one_shot", 2, "bfloat16"), ("two_shot", 3, "float32"), ("multimem", 4, "float16"), ("two_shot", 2, "float64")],
)
def test_forward_and_gradients(algorithm: str, world_size: int, dtype_name: str) -> None:
    scheduled(world_size, algorithm, cases.all_cases, dtype_name, dtype_name in ("bfloat16", "float64"))


def used(group: Any) -> list[str]:
    """The kernels that ran, forward and backward, for each op."""
    taken: list[str] = []
    real = Workspaces.use

    def use(self: Workspaces, kind: str, nbytes: int, op: str, **keywords: Any) -> Any:
        taken.append(op)
        return real(self, kind, nbytes, op, **keywords)

    x, w = seeded(6, 4), seeded(4, 4)
    norm = {"residual": torch.ones(6, 4), "norm_weight": torch.ones(4), "eps": 1e-5}
    with mock.patch.object(Workspaces, "use", use):
        for op, more in (
            ("all_gather_matmul", {}),
            ("matmul_reduce_scatter", {}),
            ("matmul_all_reduce", {}),
            ("column_parallel_matmul", {}),
            ("matmul_all_reduce_rms_norm", norm),
        ):
            taken.append(f"{op}:")
            out = getattr(fused_tp, op)(cases.leaf(x), cases.leaf(w), group=group, **more)
            (out[0] if isinstance(out, tuple) else out).sum().backward()
        fused_tp.all_reduce_rms_norm(x, **norm, group=group)
        fused_tp.all_reduce(x.double(), group=group)
    return taken


def test_every_op_runs_its_kernel_forward_and_backward() -> None:
    for taken in scheduled(2, "two_shot", used):
        assert taken == [
            *("all_gather_matmul:", "all_gather", "all_gather", "reduce_scatter"),
            *("matmul_reduce_scatter:", "reduce_scatter", "all_gather"),
            *("matmul_all_reduce:", "all_reduce"),
            *("column_parallel_matmul:", "all_reduce"),
            *("matmul_all_reduce_rms_norm:", "all_reduce_rms_norm"),
            "all_reduce_rms_norm",
        ]


def by_hand(group: Any, algorithm: str, dtype: str) -> None:
    with forced(group, algorithm) as schedule:
        every_method(schedule, getattr(torch, dtype), exact=algorithm != "multimem")  # whose switch rounds the sum


@pytest.mark.parametrize(
    ("world_size", "algorithm", "dtype"),
    [
        *((1, "two_shot", "float32"), (2, "two_shot", "bfloat16")),
        *((2, "one_shot", "float32"), (3, "one_shot", "float64"), (4, "one_shot", "float16")),
        *((3, "multimem", "float16"), (4, "multimem", "bfloat16")),
    ],
)
def test_every_method(world_size: int, algorithm: str, dtype: str) -> None:
    device_ranks(world_size, by_hand, algorithm, dtype)


def test_ranks_that_are_threads_have_nothing_without_kernels(library: None) -> None:
    def ranks(rank: LocalRank) -> None:
        schedule = DeviceSchedule("two_shot", DeviceCollectives(rank), None)
        assert torch.equal(schedule.all_reduce(torch.ones(2)), torch.full((2,), 3.0))
        with pytest.raises(ValueError, match="Ranks that are threads"):
            schedule.all_reduce(torch.ones(2, dtype=torch.float64))

    run_local(3, ranks, timeout=60)


# -- what is refused --------------------------------------------------------------------------------------------------


def refused(group: Any) -> None:
    device = collectives_of(group)
    x = torch.ones(4, 6)
    with pytest.raises(TypeError, match=r"dtype torch\.float64; sums take float32, bfloat16 and float16"):
        device.all_reduce(x.double())
    without_switch = mock.patch.object(CpuSymmetricMemory, "multicast_ptr", 0)
    with without_switch, pytest.raises(ValueError, match="'multimem', which needs memory with a multicast address"):
        collectives_of(group).all_reduce(x, "multimem")
    assert torch.equal(device.all_reduce(x), 2 * x)  # nothing has been sent, so the group goes on


def test_what_does_not_fit_is_refused_before_anything_is_sent() -> None:
    device_ranks(2, refused)


def test_more_ranks_than_an_error_record_has_bits_for() -> None:
    memory = mock.Mock(world_size=64)
    with pytest.raises(ValueError, match="serve up to 63 ranks, and the group has 64"):
        DeviceCollectives(memory)


def mismatched(group: Any) -> str:
    with forced(group, "one_shot"), mock.patch.dict(os.environ, {"FUSED_TP_CHECK": "1"}):
        fused_tp.matmul_all_reduce(torch.ones(2, 3), torch.ones(4, 3), group=group)
        with pytest.raises(RankMismatchError) as raised:
            fused_tp.matmul_all_reduce(torch.ones(2 + group.rank(), 3), torch.ones(4, 3), group=group)
    return str(raised.value)


def test_ranks_that_disagree_are_told_where_they_are_asked_to_check() -> None:
    for sentence in device_ranks(2, mismatched):
        for rows in (2, 3):
            assert f"matmul_all_reduce (one_shot)(dims=[{rows}, 4" in sentence
