"""Library of device kernels: loading it, its errors, and the layout of workspaces.

The library here is a double that launches nothing; `test_device_kernels` tests the kernels and their arguments.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fused_tp.backends.cuda import cuda_driver, native_kernels
from fused_tp.backends.cuda.device_schedule import DeviceSchedule
from fused_tp.backends.cuda.native_kernels import KernelTargets, native_kernels_available
from fused_tp.triton_kernels.comm import signals
from tests.native_build import GPU_ON_CPU, REPOSITORY, build_program, build_shared, output_of, use_library

pytestmark = pytest.mark.full

_core = pytest.importorskip("fused_tp._core")

BUILT_FOR = '-DBUILT_FOR="sm_90a compute_100, nvcc 13.0.88"'
WORKSPACE = (101, 102, 103, 4096, 5, 104, 2, 3)


def double(*flags: str, abi: str = "kAbiVersion") -> Path:
    return build_shared(
        "device_kernels", ["tests/native/doubles/device_kernels.cpp"], ["-Icsrc", f"-DABI={abi}", *flags]
    )


@pytest.fixture
def kernels() -> Iterator[Any]:
    use_library(double())
    yield native_kernels.native_kernels()
    use_library(None)


def test_it_is_loaded_once_by_whichever_thread_comes_first() -> None:
    use_library(double())
    try:
        found: list[Any] = []
        threads = [threading.Thread(target=lambda: found.append(native_kernels.native_kernels())) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 8 and len(set(map(id, found))) == 1
        assert native_kernels_available(80), "the arch of a GPU does not matter to a library that was chosen"
    finally:
        use_library(None)


def test_what_cuda_says_names_the_op(kernels: Any) -> None:
    with pytest.raises(RuntimeError, match=r"^barrier could not be launched: an illegal memory access \(CUDA"):
        kernels.barrier(_core.DeviceWorkspace(*WORKSPACE), 2**64 - 1)


def test_numbers_that_mean_nothing_are_refused(kernels: Any) -> None:
    with pytest.raises(ValueError, match="the algorithm number is 3; it must be 0 to 2"):
        kernels.all_reduce(_core.DeviceWorkspace(*WORKSPACE), 3, 0, 0, 0, 0, (0, 0), 1, 0)
    with pytest.raises(ValueError, match="world must be 1 to 63"):
        _core.DeviceWorkspace(0, 0, 0, 0, 0, 0, 0, 64)
    with pytest.raises(ValueError, match="op must be the name of a collective"):
        _core.device_plan("gather", 0, 1, 1, 0, 2, 1)


def test_why_a_library_cannot_be_loaded(tmp_path: Path) -> None:
    expected = {
        tmp_path / "nowhere.so": "could not be loaded: .*nowhere.so",
        Path(_core.__file__): "is not a library of device kernels: .*fused_tp_launchers",
        double(abi="kAbiVersion+1"): f"version {_core.DEVICE_KERNELS_ABI + 1} and this fused_tp needs version",
    }
    for path, sentence in expected.items():
        use_library(path)
        try:
            with pytest.raises(RuntimeError, match=f"^The device kernels are not available: .*{sentence}"):
                native_kernels.native_kernels()
            assert not native_kernels_available().reason.endswith(".")
        finally:
            use_library(None)


# -- the library of this installation --------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library built for Hopper and Blackwell by CUDA 13.0, with a torch that sees a GPU."""
    library = double(BUILT_FOR)
    monkeypatch.setattr(native_kernels, "KERNEL_LIBRARY", library)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda_driver, "cuda_version", lambda: (13, 1))
    return library


def test_whether_it_can_be_used_here(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(arch: int = 90) -> str:
        return native_kernels_available(arch).reason

    assert native_kernels.read_kernel_targets(installed) == KernelTargets(("sm_90a", "compute_100"), (13, 0, 88))
    assert native_kernels_available() and native_kernels_available(90) and native_kernels_available(120)
    assert native_kernels.native_kernels() is native_kernels.native_kernels()
    assert reason(80) == (
        "the device kernels were built for sm_90a, compute_100, and this GPU is sm_80; reinstall fused_tp with "
        "FUSED_TP_CUDA_ARCHS=80"
    )
    monkeypatch.setattr(cuda_driver, "cuda_version", lambda: (12, 4))
    assert "built with CUDA 13.0, and the driver supports only CUDA 12.4; update the driver" in reason()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for version, why in (("13.0", "no GPU, or no driver"), (None, "torch was built without CUDA")):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert reason() == f"torch finds no GPU ({why})"


def test_without_library_or_core(installed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "fused_tp._core", None)  # import raises ImportError
        assert "_core" in native_kernels_available().reason
    monkeypatch.setattr(native_kernels, "KERNEL_LIBRARY", tmp_path / "_cuda.so")
    reason = native_kernels_available().reason
    assert reason.startswith("the device kernels were not built when fused_tp was installed; install the CUDA toolkit")
    assert native_kernels.read_kernel_targets(tmp_path / "_cuda.so") is None
    with pytest.raises(RuntimeError, match="The device kernels are not available: the device kernels were not built"):
        native_kernels.native_kernels()


def test_which_gpus_code_serves() -> None:
    gpus = (75, 80, 86, 89, 90, 100, 103, 120)
    for name, served in {
        "sm_80": [80, 86, 89],
        "sm_86": [86, 89],
        "sm_90": [90],
        "sm_90a": [90],
        "sm_100a": [100],
        "sm_100f": [100, 103],
        "compute_90": [90, 100, 103, 120],
    }.items():
        assert [gpu for gpu in gpus if KernelTargets((name,), (13,)).runs_on(gpu)] == served, name


def test_a_process_without_driver_has_none() -> None:
    if cuda_driver.cuda_version() is not None:
        pytest.skip("this machine has a driver")
    assert cuda_driver.device_attribute(cuda_driver.MULTICAST_SUPPORTED, 0) is None


# -- places and sizes ------------------------------------------------------------------------------------------------


def test_places_do_not_overlap_and_all_fits() -> None:
    output_of(build_program("device_plans", [GPU_ON_CPU / "plans.cpp"], ["-Icsrc", "-O1"]))


@pytest.mark.parametrize("world", [1, 2, 3, 8, 63])
@pytest.mark.parametrize("blocks", [1, 7, 132])
def test_workspaces_are_as_large_as_their_layout_needs(world: int, blocks: int) -> None:
    """One host-side layout sizes the workspaces of Triton's and of these kernels, so both must need the same bytes."""

    def check(op: str, count: int, chunk: int, dtype: int, nbytes: int) -> None:
        made, needed = _core.device_plan(op, 0, count, chunk, dtype, world, blocks)
        slots = [(world, -(-nbytes // 128) * 128), ((made - 1) * world, 0)]
        assert needed == signals.needed_bytes(world, slots if world > 1 else [])  # a rank alone sends nothing

    count = 1000003
    chunk = -(-count // world)
    for dtype, size in ((0, 4), (1, 2)):
        check("all_reduce", count, 0, dtype, count * size)
        check("reduce_scatter", count, chunk, dtype, chunk * size)
    for op in ("all_gather", "all_to_all"):
        check(op, world * 1000, 1000, 0, 1000)


def test_blocks_grow_with_the_bytes_up_to_what_fits() -> None:
    def blocks(count: int, most: int = 132) -> int:
        return int(_core.device_plan("all_reduce", 0, count, 0, 1, 8, most)[0])

    assert [blocks(1), blocks(8192), blocks(8193), blocks(1 << 30), blocks(1 << 30, 8)] == [1, 1, 2, 132, 8]
    assert _core.device_plan("all_gather", 0, 8 * 16384, 16384, 0, 8, 132)[0] == 8


def test_the_words_of_the_protocol_are_the_same_in_both_languages() -> None:
    header = (REPOSITORY / "csrc" / "cuda" / "protocol.h").read_text()
    numbers = {name: int(value) for name, value in re.findall(r"constexpr int(?:64_t)? k(\w+) = (\d+);", header)}
    for name, value in numbers.items():
        python = re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper()
        number = getattr(signals, python)
        assert getattr(number, "value", number) == value, name
    words = {"Epoch", "EndedPrograms", "Expired", "UnreachableRanks", "ErrorSet", "ErrorGaveUp", "FlagShare"}
    assert set(numbers) >= words
    ops = re.search(r"enum class Op : int32_t \{(.*?)\}", header, re.DOTALL)
    assert ops is not None
    for name, value in re.findall(r"k(\w+) = (\d+)", ops[1]):
        assert signals.OPS[int(value)] == re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def test_blocks_do_not_depend_on_what_a_rank_has_to_do_meanwhile() -> None:
    """Blocks wait for the peers' blocks of the same number, so all ranks need equally many, also if the weight of one
    is frozen, which leaves it no overlapped work."""
    asked: list[tuple[str, bool]] = []

    class Device:
        rank, world_size = 0, 2

        def all_reduce(self, x: torch.Tensor, *_: object, is_overlapped: bool = False, **__: object) -> torch.Tensor:
            asked.append(("all_reduce", is_overlapped))
            return x

        def reduce_scatter(
            self, x: torch.Tensor, counts: list[int], *_: object, is_overlapped: bool = False
        ) -> torch.Tensor:
            asked.append(("reduce_scatter", is_overlapped))
            return x[: counts[0]]

    schedule = DeviceSchedule("two_shot", Device(), None)  # a fake device with only the methods used here
    products = [(torch.ones(4, 3), torch.ones(2, 3))]
    for meanwhile in (None, lambda: None):
        schedule.matmul_all_reduce(products, None, overlapped_work=meanwhile)
        schedule.matmul_reduce_scatter(products, None, scatter_dim=0, overlapped_work=meanwhile)
    assert asked[:2] == asked[2:]
