"""Libraries bound at run time (the real NCCL and the doubles), and the decision whether a group gets a communicator.

All ranks derive the same reason for a refusal from the facts that they exchange. Also C++ tests of deadlines and
communicators.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fused_tp.backends.nccl.nccl import NcclRankInfo, check_rank_infos, own_rank_info
from tests.native.doubles import libraries
from tests.native_build import build_program, output_of, require_sanitizer, use_nccl

_core = pytest.importorskip("fused_tp._core", reason="needs the native core")


def real_nccl() -> Path:
    spec = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.nccl")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if Path(folder, "lib", "libnccl.so.2").exists():
            return Path(folder, "lib", "libnccl.so.2")
    pytest.skip("needs NCCL's library (the extra `nccl`)")


def test_library_loaded_by_the_process_comes_first() -> None:
    """Runs in a new process without torch, because a CUDA build of torch loads an NCCL itself."""
    program = (
        "import ctypes, importlib.util as importing, sys; core, real = sys.argv[1:]\n"
        "spec = importing.spec_from_file_location('fused_tp._core', core)\n"
        "spec.loader.exec_module(_core := importing.module_from_spec(spec))\n"
        "ctypes.CDLL(real)\n"
        "library = _core.NcclLibrary()\n"
        "major, minor, patch = map(int, library.version_text.split('.'))\n"
        "assert library.path == real and library.version == 10000 * major + 100 * minor + patch >= 21900"
    )
    output_of(sys.executable, "-c", program, _core.__file__, real_nccl())


def test_features_go_by_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DOUBLE_VERSION", "")  # restored at the end
    for version, features in ((21900, (False, False)), (22907, (True, False)), (23004, (True, True))):
        library = _core.NcclLibrary(str(libraries.nccl_of_version(version, tmp_path)))
        assert (library.version, library.has_revoke, library.has_shared_devices) == (version, *features)


def test_libraries_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DOUBLE_VERSION", "")
    nowhere, too_old = str(tmp_path / "nowhere.so"), str(libraries.nccl_of_version(21805, tmp_path))
    refused = [
        (_core.NcclLibrary, nowhere, r"could not be loaded: .*nowhere\.so"),
        (_core.NcclLibrary, _core.__file__, "is not NCCL"),
        (_core.NcclLibrary, too_old, r"is version 2\.18\.5; fused_tp needs 2\.19\.0 or later"),
        (_core.Driver, nowhere, r"the CUDA driver could not be loaded: .*nowhere\.so"),
        (_core.Driver, _core.__file__, r"has no cuInit: this CUDA driver is too old; fused_tp needs 12\.0 or later"),
    ]
    for library, path, sentence in refused:
        with pytest.raises(RuntimeError, match=sentence):
            library(path)


def test_driver_names_devices_and_calls_that_fail() -> None:
    driver, _ = libraries.load_doubles()
    assert driver.has_stream_memory_ops(0)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_DEVICE"):
        driver.has_stream_memory_ops(8)
    with pytest.raises(RuntimeError, match="device 9 does not exist: this process sees 8 devices"):
        driver.synchronize(9, 0, 1)
    libraries.double_knobs().cuda_double_fail(b"cuStreamQuery", 700)
    with pytest.raises(RuntimeError, match=r"cuStreamQuery failed with CUDA_ERROR_ILLEGAL_ADDRESS \(700\)"):
        driver.synchronize(0, 0, 1)


def test_synchronize_returns_at_its_deadline() -> None:
    driver, _ = libraries.load_doubles()
    stream, word = libraries.Stream(), torch.zeros(1, dtype=torch.int64)
    stream.wait_for(word)
    assert not driver.synchronize(0, stream.handle, 0.06)
    word.fill_(1)
    assert driver.synchronize(0, stream.handle, 10)


@pytest.mark.full
def test_deadlines_without_clocks_or_threads() -> None:
    require_sanitizer("address,undefined")
    flags = ["-Icsrc", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    assert output_of(build_program("deadlines", ["tests/native/doubles/deadlines.cpp"], flags)) == "all as expected"


@pytest.mark.full
def test_watchdog_communicators_and_pipelines_have_no_races() -> None:
    """Ranks are threads of one process, so that ThreadSanitizer sees all of them."""
    assert libraries.run_races() == "no race"


def facts(gpu: str = "", version: int = 22907, problem: str = "") -> NcclRankInfo:
    return NcclRankInfo(("pid:[1]", 1), gpu, version, "", problem)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ([facts("a"), facts("b")], ""),
        ([facts(version=22907), facts(version=22903)], ""),
        ([facts(), facts()], ""),  # ranks that may share a GPU do not name theirs
        ([facts("a"), facts(problem="no driver")], "rank 1: no driver"),
        ([facts("a"), facts("a")], "several ranks of the group share a GPU"),
        ([facts("a", 22907), facts("b", 22703)], "different versions of NCCL: 2.27.3, 2.29.7"),
    ],
)
def test_whether_ranks_can(told: list[NcclRankInfo], said: str) -> None:
    found = check_rank_infos(told)
    assert bool(found) == (not said) and said in found.reason


def test_what_a_rank_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing library and an environment that makes NCCL block are reported as problems."""
    rank: Any = SimpleNamespace(rank=0)  # the only attribute of a group that own_rank_info reads
    cpu = torch.device("cpu")
    try:
        use_nccl(tmp_path / "libnccl.so", tmp_path / "libcuda.so")
        assert str(tmp_path) in own_rank_info(rank, cpu).problem
        use_nccl(libraries.gpu_double(), libraries.gpu_double())
        for value, refused in (("1", True), ("0", False), ("", False)):
            monkeypatch.setenv("NCCL_COMM_BLOCKING", value)
            assert own_rank_info(rank, cpu).problem.startswith("NCCL_COMM_BLOCKING is set") == refused
    finally:
        use_nccl(None)
