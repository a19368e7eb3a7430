"""Whether a group can have an NCCL communicator, and why not: the same answer on all ranks, from what they tell."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fused_tp.transport.nccl import Facts, judged, own_facts
from tests.native.doubles.libraries import gpu_double
from tests.native_build import use_nccl

pytestmark = pytest.mark.full

CPU = torch.device("cpu")
RANK = SimpleNamespace(rank=0)  # all of a group that `own_facts` looks at
needs_core = pytest.mark.skipif(find_spec("fused_tp._core") is None, reason="needs the native core: pip install -e .")


@pytest.fixture(autouse=True)
def real_libraries_afterwards() -> Iterator[None]:
    yield
    use_nccl(None)


def facts(gpu: str = "", version: int = 22907, problem: str = "") -> Facts:
    return Facts(("pid:[1]", 1), gpu, version, "", problem)


def test_ranks_that_can() -> None:
    assert judged([facts("a"), facts("b")])
    assert judged([facts(version=22907), facts(version=22903)])
    assert judged([facts(), facts()])  # those that may share a GPU do not say which they have


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ([facts("a"), facts(problem="no driver")], "rank 1: no driver"),
        ([facts("a"), facts("a")], "several of its ranks share a GPU"),
        ([facts("a", 22907), facts("b", 22703)], "different versions of NCCL: 2.27.3, 2.29.7"),
    ],
)
def test_what_keeps_ranks_from_it(told: list[Facts], said: str) -> None:
    assert said in judged(told).reason


@needs_core
def test_tensors_of_the_cpu_need_the_doubles() -> None:
    assert own_facts(RANK, CPU).problem == "NCCL moves tensors of NVIDIA GPUs, not of cpu"


@needs_core
def test_a_library_that_is_not_there(tmp_path: Path) -> None:
    use_nccl(tmp_path / "libnccl.so", tmp_path / "libcuda.so")
    assert str(tmp_path) in own_facts(RANK, CPU).problem


@needs_core
@pytest.mark.parametrize(("value", "refused"), [("1", True), ("0", False), ("", False)])
def test_an_environment_that_makes_nccl_block(value: str, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    use_nccl(gpu_double(), gpu_double())
    monkeypatch.setenv("NCCL_COMM_BLOCKING", value)
    told = own_facts(RANK, CPU)
    assert told.problem.startswith("NCCL_COMM_BLOCKING is set") == refused
