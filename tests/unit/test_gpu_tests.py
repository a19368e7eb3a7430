"""The bodies of tests/gpu, on the CPU, as far as they go there: so that on a GPU they fail for the GPU's reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from benchmarks.local_ranks import run_local
from tests import faults
from tests.distributed import nccl_tools
from tests.distributed import test_device_schedules as checks
from tests.gpu import test_copy_engine as engine_tests
from tests.gpu import test_device_collectives as collectives
from tests.gpu import test_failures as failure_tests
from tests.gpu import test_nccl as nccl_tests
from tests.gpu.on_device import OnDevice, graph_case, mapped, on_device, public_ops, there
from tests.native_build import cpu_device_library, use_library
from tests.workers import run_ranks

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_spec("fused_tp._core") is None, reason="needs the native core: pip install -e ."),
]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    path = str(cpu_device_library())
    use_library(path)
    monkeypatch.setattr(checks, "ALGORITHMS", collectives.ALGORITHMS)
    monkeypatch.setenv("FUSED_TP_TIMEOUT", "30")
    yield path
    use_library(None)


THREADS: dict[str, Callable[[], Any]] = {
    "collectives": lambda: collectives.same_on_all(run_local(2, collectives.every_collective, torch.bfloat16)),
    "large": lambda: run_local(2, collectives.large, 5003),
    "norms": lambda: collectives.same_on_all(run_local(2, collectives.wide_norms, 5, 4097)),
    "graphs of one": lambda: run_local(1, collectives.in_graph, 4),
    "graphs of three": lambda: run_local(3, collectives.in_graph, 4),
}


@pytest.mark.parametrize("case", THREADS)
def test_threads(library: str, case: str) -> None:
    THREADS[case]()


def test_a_rank_that_stays_away(library: str) -> None:
    first, second = run_local(2, collectives.without_last)
    assert "rank 1 had not begun the call" in first and second == ""


def test_processes(library: str) -> None:
    results = run_ranks(2, collectives.in_process, "cpu", library, "float16")
    assert results[0] == results[1] and len(results[0]) > 10
    assert run_ranks(2, public_ops, "cpu", "plain", "float32") == ["", ""]
    reasons = run_ranks(2, public_ops, "cpu", "two_shot", "float32")
    assert reasons == ["two_shot is for cuda, not cpu"] * 2


@pytest.mark.parametrize("transport", list(faults.DOUBLES))
def test_failures(transport: str) -> None:
    faults.build_doubles(transport)
    failure_tests.test_late_rank_is_a_timeout_that_names_it(transport, "cpu")
    failure_tests.test_stopped_or_killed_rank_is_noticed(transport, "cpu")


# -- NCCL and copy engines, over doubles of NCCL and of the CUDA driver ------------------------------------------------


@pytest.fixture(scope="module")
def doubles() -> tuple[str, str]:
    nccl_double, cuda_double = nccl_tools.doubles()
    return str(nccl_double), str(cuda_double)


@pytest.mark.parametrize(
    ("case", "args"), [("movements_case", ()), ("many_calls_case", ()), ("schedule_case", ("bfloat16",))]
)
def test_nccl(doubles: tuple[str, str], case: str, args: tuple[str, ...]) -> None:
    run_ranks(2, nccl_tests.case_on, "cpu", doubles, case, args)


def test_graphs(doubles: tuple[str, str]) -> None:
    assert run_ranks(3, graph_case, nccl_tests.prepare, "cpu", doubles) == ["", "", ""]
    assert run_ranks(3, graph_case, engine_tests.prepare, "cpu", doubles[1]) == ["", "", ""]


def test_copy_engine(doubles: tuple[str, str]) -> None:
    _, library = doubles
    run_ranks(2, engine_tests.with_schedule, "cpu", library, "numbers", ("bfloat16",))
    run_ranks(2, engine_tests.with_schedule, "cpu", library, "at_random", (3, 20))


# -- what takes checks of the CPU to a device; "meta" stands for one ---------------------------------------------------


def test_tensors_keep_their_strides_and_their_place() -> None:
    base = torch.arange(40.0)
    for view in (base[3:], base[1:31].view(5, 6).t(), base[:30].view(5, 6)[:, ::2], base[:0], base[2]):
        moved = there(view, torch.device("meta"))
        assert moved.device.type == "meta" and moved.stride() == view.stride()
        assert moved.storage_offset() == (view.storage_offset() if view.numel() else 0)
    assert there(base, torch.device("cpu")) is base


def test_arguments_go_and_results_come_back() -> None:
    seen: list[Any] = []

    def fn(x: torch.Tensor, several: list[Any], *, out: torch.Tensor) -> Any:
        seen.extend([x.dtype, several[0].dtype, out is x])
        return out

    class Half:
        """In the place of a device: what goes there becomes another tensor."""

        type = "elsewhere"

    x = torch.ones(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.gpu.on_device.there", lambda t, device: t.double())
        called: list[bool] = []
        result = on_device(fn, Half(), lambda: called.append(True))(x, [x], out=x)  # a double
    assert result is x and called == [True] and seen == [torch.float64, torch.float64, True]


def test_what_is_not_a_tensor_stays() -> None:
    class Target:
        number = 3

        def double(self, x: torch.Tensor, times: int) -> tuple[torch.Tensor, int]:
            return x * times, times

    proxy = OnDevice(Target(), torch.device("cpu"))
    (y, times) = proxy.double(torch.ones(2), 2)
    assert proxy.number == 3 and times == 2 and y.tolist() == [2.0, 2.0]
    assert mapped(("a", [1, None]), lambda t: t) == ("a", [1, None])
