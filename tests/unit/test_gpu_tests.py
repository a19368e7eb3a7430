"""Bodies of tests/gpu on the CPU, as far as they run there, so that on a GPU they fail for the GPU's reasons."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.local_ranks import run_local
from tests.distributed import test_device_schedules as checks
from tests.gpu import test_device_collectives as collectives
from tests.gpu import test_failures as failure_tests
from tests.gpu import test_models as model_tests
from tests.gpu import test_schedules as schedule_tests
from tests.gpu.on_device import on_device, there
from tests.native.doubles.libraries import DOUBLES, build_doubles
from tests.native_build import cpu_device_library, use_library
from tests.workers import fresh_ranks, run_ranks

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


def test_large(library: str) -> None:
    run_local(2, collectives.large, 5003)


def test_public_ops() -> None:
    assert run_ranks(2, schedule_tests.public_ops, "cpu", "plain", "float32") == ["", ""]
    reasons = run_ranks(2, schedule_tests.public_ops, "cpu", "two_shot", "float32")
    assert reasons == ["two_shot is for cuda, not cpu"] * 2


@pytest.mark.parametrize("transport", list(DOUBLES))
def test_failures(transport: str) -> None:
    build_doubles(transport)
    failure_tests.test_late_rank_is_a_timeout_that_names_it(transport, "cpu")
    failure_tests.test_stopped_or_killed_rank_is_noticed(transport, "cpu")


TESTS: dict[str, tuple[Any, ...]] = {
    "threads": (collectives.test_threads, 2, torch.bfloat16),
    "norms": (collectives.test_wide_norms, 7, 4097),
    "a thread alone in a graph": (collectives.test_graphs_and_calls_between_replays, 1),
    "threads in graphs": (collectives.test_graphs_and_calls_between_replays, 3),
    "processes": (collectives.test_processes, 2, "float16"),
}
ON_SCHEDULES: list[tuple[Any, ...]] = [
    (schedule_tests.test_movements_of_nccl, 2),
    (schedule_tests.test_a_rank_that_is_late_to_copy_engines_ends_the_call_on_all,),
    *((schedule_tests.test_every_method, name, 2, torch.bfloat16) for name in ("nccl_pipeline", "copy_engine")),
    (schedule_tests.test_every_method, "symm_mem", 2, torch.bfloat16),
    (schedule_tests.test_torchs_ops_in_graphs,),
    *((schedule_tests.test_many_calls_at_a_random_pace, name, 2) for name in ("nccl_pipeline", "copy_engine")),
    *((schedule_tests.test_graphs_and_calls_between_replays, name, 3) for name in ("nccl_pipeline", "copy_engine")),
]


@pytest.mark.parametrize("name", TESTS)
def test_on_threads_and_processes(name: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run tests for GPUs with the CPU build of the kernels."""
    test, *args = TESTS[name]

    def ranks(world_size: int, fn: Any, *args: Any, env: object, timeout: float) -> Any:
        here = ["cpu" if one == "cuda" else one for one in args]
        return fresh_ranks(world_size, fn, *here, timeout=120, env={"FUSED_TP_TIMEOUT": "30"})

    monkeypatch.setattr(collectives, "fresh_ranks", ranks)
    monkeypatch.setattr(collectives, "run_local", lambda *args, device: run_local(*args))
    test(*args)


@pytest.mark.parametrize("case", ON_SCHEDULES)
def test_on_doubles(case: tuple[Any, ...]) -> None:
    test, *args = case
    build_doubles("nccl_pipeline")  # the same library as for copy engines
    test(*args, kind="cpu")


@pytest.mark.parametrize("layout", model_tests.LAYOUTS)
def test_models(layout: str) -> None:
    model_tests.test_training_and_generation(layout, 2, kind="cpu")


# -- helpers that move CPU checks to a device; "meta" simulates one ----------------------------------------------------


def test_tensors_keep_their_strides_and_their_place() -> None:
    base = torch.arange(40.0)
    for view in (base[3:], base[1:31].view(5, 6).t(), base[:30].view(5, 6)[:, ::2], base[:0], base[2]):
        moved = there(view, torch.device("meta"))
        assert moved.device.type == "meta" and moved.stride() == view.stride()
        assert moved.storage_offset() == (view.storage_offset() if view.numel() else 0)
    assert there(base, torch.device("cpu")) is base


def test_arguments_go_and_results_come_back() -> None:
    """A result that is one of the arguments is returned as that CPU tensor."""
    seen: list[Any] = []

    def fn(x: torch.Tensor, several: list[Any], *, out: torch.Tensor) -> Any:
        seen.extend([x.dtype, several[0].dtype, several[1], out is x])
        return out

    device: Any = SimpleNamespace(type="elsewhere")  # a tensor moved there becomes another one
    x, called = torch.ones(3), mock.Mock()
    with mock.patch("tests.gpu.on_device.there", lambda t, device: t.double()):
        assert on_device(fn, device, called)(x, [x, 7], out=x) is x
    assert called.called and seen == [torch.float64, torch.float64, 7, True]
