"""The libraries that are bound at run time, the real NCCL and the doubles; the driver's functions; the watchdog."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.native.doubles import libraries
from tests.native_build import build_program, prebuild, require_sanitizer
from tests.workers import REPOSITORY

pytestmark = pytest.mark.full

_core = pytest.importorskip("fused_tp._core", reason="needs the native core")

CORE = [f"csrc/{name}.cpp" for name in ("driver/driver", "driver/watchdog", "nccl/library", "nccl/communicator")]


def real_nccl() -> Path:
    spec = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.nccl")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if Path(folder, "lib", "libnccl.so.2").exists():
            return Path(folder, "lib", "libnccl.so.2")
    pytest.skip("needs NCCL's library (the extra `nccl`)")


# ---- the library -----------------------------------------------------------------------------------------------


def test_the_real_library_loads_and_tells_its_version() -> None:
    library = _core.NcclLibrary(str(real_nccl()))
    assert library.version >= _core.OLDEST_NCCL and library.path == str(real_nccl())
    major, minor, patch = (int(part) for part in library.version_text.split("."))
    assert library.version == 10000 * major + 100 * minor + patch
    assert library.has_windows == (library.version >= 22700)
    assert library.has_zero_cta == (library.version >= 22800)
    assert library.has_shared_devices == (library.version >= 23000)


def test_the_library_that_is_loaded_already_comes_first() -> None:
    """In a process of its own, without torch, of which a CUDA build has loaded one already."""
    program = (
        "import ctypes, importlib.util as importing, sys; core, real, other = sys.argv[1:]\n"
        "spec = importing.spec_from_file_location('fused_tp._core', core)\n"
        "spec.loader.exec_module(_core := importing.module_from_spec(spec))\n"
        "before = _core.NcclLibrary(otherwise=other).path\n"
        "ctypes.CDLL(real)\n"
        "assert _core.NcclLibrary(otherwise=other).path == real and before == other, before"
    )
    command = [sys.executable, "-c", program, _core.__file__, str(real_nccl()), str(libraries.nccl_double())]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_features_go_by_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DOUBLE_VERSION", "")  # restored at the end
    features = {}
    for version in (21900, 22703, 22800, 22907, 23004):
        library = _core.NcclLibrary(str(libraries.nccl_of_version(version, tmp_path)))
        assert library.version == version
        found = (library.has_windows, library.has_zero_cta, library.has_revoke, library.has_shared_devices)
        features[version] = sum(found)
    assert features == {21900: 0, 22703: 1, 22800: 2, 22907: 3, 23004: 4}


def test_one_too_old_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DOUBLE_VERSION", "")
    path = libraries.nccl_of_version(21805, tmp_path)
    with pytest.raises(RuntimeError, match=r"is version 2\.18\.5, fused_tp needs 2\.19\.0 or later"):
        _core.NcclLibrary(str(path))


def test_what_is_no_nccl_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"could not be loaded: .*nowhere\.so"):
        _core.NcclLibrary(str(tmp_path / "nowhere.so"))
    with pytest.raises(RuntimeError, match="is no NCCL"):
        _core.NcclLibrary(str(libraries.cuda_double()))


# ---- the driver ------------------------------------------------------------------------------------------------


@pytest.fixture
def driver() -> _core.Driver:
    return libraries.load_doubles()[0]


def test_driver_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"the CUDA driver could not be loaded: .*nowhere\.so"):
        _core.Driver(str(tmp_path / "nowhere.so"))
    with pytest.raises(RuntimeError, match=r"has no cuInit: this CUDA driver is too old, 12\.0 or later is needed"):
        _core.Driver(str(libraries.nccl_double()))


def test_driver_says_what_a_device_can(driver: _core.Driver) -> None:
    assert driver.version == 13000 and driver.device_count == 8
    assert driver.has_stream_memory_ops(0) and not driver.has_multicast(0)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_DEVICE"):
        driver.has_multicast(8)
    with pytest.raises(RuntimeError, match="there is no device 9, this process sees 8"):
        _core.DriverStream(driver, 9)


def test_streams_wait_for_events_and_words(driver: _core.Driver) -> None:
    first, second = _core.DriverStream(driver, 0, True), _core.DriverStream(driver, 0)
    words = _core.PinnedMemory(driver, 0, 4 * 8)
    host = memoryview(words).cast("Q")
    go, seen, copied, exact = (words.device_address + 8 * i for i in range(4))
    event = _core.DriverEvent(driver, 0)
    assert driver.done(0, event.handle)  # never recorded
    driver.wait_value(0, first.handle, go, 7)
    driver.write_value(0, first.handle, seen, 5)
    driver.record(0, event.handle, first.handle)
    driver.wait(0, second.handle, event.handle)
    driver.copy(0, copied, seen, 8, second.handle)
    time.sleep(0.02)  # enough for streams that do not wait
    assert not driver.done(0, event.handle) and list(host) == [0, 0, 0, 0]
    assert not driver.synchronize(0, second.handle, 0.01)
    host[0] = 9  # at least 7
    assert driver.synchronize(0, second.handle, 10) and driver.done(0, event.handle)
    driver.wait_value(0, first.handle, exact, 2, exactly=True)
    driver.fill(0, seen, 0xFF, 8, first.handle)
    host[3] = 3
    assert not driver.synchronize(0, first.handle, 0.02)
    host[3] = 2
    assert driver.synchronize(0, first.handle, 10)
    assert list(host) == [9, 2**64 - 1, 5, 2]


def test_a_call_that_fails_is_named(driver: _core.Driver) -> None:
    stream = _core.DriverStream(driver, 0)
    libraries.cuda_knobs().cuda_double_fail(b"cuStreamWriteValue64", 700, 0)
    with pytest.raises(RuntimeError, match=r"cuStreamWriteValue64 failed with CUDA_ERROR_ILLEGAL_ADDRESS \(700\)"):
        driver.write_value(0, stream.handle, 0, 0)


def test_a_capture_is_seen(driver: _core.Driver) -> None:
    stream, knobs = _core.DriverStream(driver, 0), libraries.cuda_knobs()
    word = _core.PinnedMemory(driver, 0, 8)
    assert not driver.capturing(0, stream.handle)
    knobs.cuda_double_begin_capture(stream.handle)
    assert driver.capturing(0, stream.handle)
    driver.write_value(0, stream.handle, word.device_address, 3)
    graph = ctypes.c_void_p(knobs.cuda_double_end_capture(stream.handle, None))
    assert memoryview(word).cast("Q")[0] == 0
    knobs.cuda_double_replay(graph, stream.handle)
    assert driver.synchronize(0, stream.handle, 10) and memoryview(word).cast("Q")[0] == 3
    knobs.cuda_double_free_graph(graph)


# ---- in C++ ----------------------------------------------------------------------------------------------------


def test_deadlines_without_clocks_or_threads() -> None:
    require_sanitizer("address,undefined")
    flags = ["-Icsrc", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    program = build_program("deadlines", ["tests/native/doubles/deadlines.cpp"], flags)
    done = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout.strip() == "all as expected", done.stdout + done.stderr


def communicators_program() -> tuple[Path, Path, Path]:
    """And the doubles that it loads."""
    sanitizer = "-fsanitize=thread"
    # initial-exec: thread-local memory of a library that was loaded late is given to the next thread unseen by it.
    flags = (sanitizer, "-ftls-model=initial-exec")
    doubles = libraries.cuda_double(*flags), libraries.nccl_double(*flags)
    sources = ["tests/native/doubles/communicators.cpp", *CORE]
    return build_program("communicators", sources, ["-Icsrc", "-O1", sanitizer]), *doubles


prebuild(communicators_program)


def test_watchdog_and_communicators_have_no_races() -> None:
    """Ranks are threads of one process, so that ThreadSanitizer sees all of them."""
    require_sanitizer("thread")
    done = subprocess.run(communicators_program(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stdout.strip() == "no race", done.stdout + done.stderr[-5000:]
