"""Build C++ for tests with g++, once: outputs are cached in a folder for temporary files.

    library = build_shared("counter", ["tests/native/counter.cpp"], ["-Icsrc"])      # a shared library
    program = build_program("stress", [...], [...])                                  # an executable

Ninja rebuilds only changed sources. If several processes build at once, one builds and the others wait for it. Long
builds run in the background, while other tests wait:

    prebuild(lambda: stress_program("thread"))                                       # in the test file
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from fused_tp.backends.copy_engine import copy_engine
from fused_tp.backends.cuda import native_kernels
from fused_tp.backends.nccl import nccl

REPOSITORY = Path(__file__).parent.parent
INSTALLED = native_kernels.KERNEL_LIBRARY
# -g1: sanitizers only report line numbers; full debug information takes the compiler about a third longer.
COMMON_FLAGS = ("-std=c++17", "-g1", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror")

# Kernels on the CPU: doubles of CUDA's headers are found first, and .cu files are compiled as C++. Kernels access the
# same packets as several types, hence -fno-strict-aliasing.
GPU_ON_CPU = REPOSITORY / "tests" / "native" / "gpu_on_cpu"
GPU_ON_CPU_FLAGS = (
    f"-I{GPU_ON_CPU.parent}",
    f"-I{GPU_ON_CPU}",
    f"-I{REPOSITORY / 'csrc'}",
    "-fno-strict-aliasing",
    "-Wno-unknown-pragmas",
)


@functools.cache
def native_build() -> ModuleType:
    """Import csrc/native_build.py, which setup.py builds with."""
    spec = importlib.util.spec_from_file_location("native_build", REPOSITORY / "csrc" / "native_build.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["native_build"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiler() -> str:
    """The C++ compiler; skips the test where there is none."""
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if found is None:
        pytest.skip("needs a C++ compiler (g++)")
    return found


@functools.cache
def compiler_version() -> str:
    return subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=False).stdout


_prebuilt: list[Callable[[], object]] = []


def prebuild(build: Callable[[], object]) -> None:
    """Register `build()`, at import of a test file, to run in the background before this file's tests."""
    _prebuilt.append(build)


def start_prebuilding(modules: Container[str]) -> None:
    """Run the builds registered by test files of these names in a thread, with compilers at a low priority."""
    wanted = [build for build in _prebuilt if build.__module__ in modules]

    def run() -> None:
        os.nice(10)  # of this thread, and of the compilers that it starts
        for build in wanted:
            # Errors, or a skip for want of a compiler, are reported by the test that needs the build.
            with contextlib.suppress(Exception, pytest.skip.Exception):
                build()

    if wanted:
        threading.Thread(target=run, name="prebuilding", daemon=True).start()


def build_shared(name: str, sources: Sequence[str | Path], flags: Sequence[str] = ()) -> Path:
    """Build a shared library of these sources (paths from the root of the repository), if not up to date.

    Args:
        flags: flags for compiling and linking; they follow COMMON_FLAGS.

    Raises:
        RuntimeError: it cannot be built; the message holds the compiler's output.
    """
    return _build(f"lib{name}.so", [Path(source) for source in sources], [*flags, "-fvisibility=hidden"], ["-shared"])


def build_program(name: str, sources: Sequence[str | Path], flags: Sequence[str] = ()) -> Path:
    """Build an executable; see `build_shared`."""
    return _build(name, [Path(source) for source in sources], list(flags), [])


def output_of(program: str | Path, *arguments: object, said: str = "", timeout: float = 120, **env: str) -> str:
    """Run a program with `said` on its stdin, assert that it exits with 0, and return its stdout."""
    command, env = [str(program), *map(str, arguments)], {**os.environ, **env}
    done = subprocess.run(command, input=said, capture_output=True, text=True, timeout=timeout, check=False, env=env)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout.strip()


def cpu_device_library() -> Path:
    """Build the library of device kernels, csrc/cuda, for CPU memory: `fused_tp_launchers` of csrc/cuda/launchers.h.

    Launches are synchronous, whatever their stream. Ranks are processes, or threads of one process.
    """
    return build_shared("fused_tp_cuda_on_cpu", device_sources(), [*GPU_ON_CPU_FLAGS, "-O1"])


def device_sources() -> list[Path]:
    """Sources of the kernels' launchers, and of the emulator that runs kernels on a CPU."""
    return [*sorted((REPOSITORY / "csrc" / "cuda").glob("*.cu")), GPU_ON_CPU / "fibers.cpp"]


@functools.cache
def require_sanitizer(sanitizer: str) -> None:
    """Skip the test if programs built with -fsanitize=`sanitizer` do not work."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.cpp")
        source.write_text("int main() {}\n")
        program = source.with_suffix("")
        made = subprocess.run([compiler(), f"-fsanitize={sanitizer}", str(source), "-o", str(program)], check=False)
        if made.returncode or subprocess.run([program], check=False).returncode:
            pytest.skip(f"{compiler()} has no -fsanitize={sanitizer} that works here")


def _build(file_name: str, sources: list[Path], flags: list[str], link_flags: list[str]) -> Path:
    native = native_build()
    ninja = native.find_ninja()
    if ninja is None:
        pytest.skip("needs ninja (pip install ninja)")
    # Ninja runs in the folder that it writes to.
    found = [f"-I{REPOSITORY / flag[2:]}" if flag.startswith("-I") else flag for flag in flags]
    command = [compiler(), *COMMON_FLAGS, *found]
    words = "\0".join([str(REPOSITORY), compiler_version(), *command])
    folder = cache() / hashlib.sha256(words.encode()).hexdigest()[:16]
    steps = []
    for source in sources:
        language = ["-x", "c++"] if source.suffix == ".cu" else []
        output = f"{source.parent.name}_{source.stem}.o"
        steps.append(native.compile_step(output, str(REPOSITORY / source), [*command, *language]))
    objects = [step.output for step in steps]
    steps.append(native.Step(file_name, objects, [*command, *link_flags, *objects, "-ldl", "-o", file_name]))
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "build.ninja").write_text(native.ninja_file(steps))
        # Ninja inherits the lock: if this process is killed, ninja continues, and no other process builds beside it.
        done = subprocess.run(
            [*ninja, "--quiet"], cwd=folder, capture_output=True, text=True, check=False, pass_fds=(lock.fileno(),)
        )
    if done.returncode:
        raise RuntimeError(f"{file_name} cannot be built:\n{done.stdout[-8000:]}")
    return folder / file_name


@functools.cache
def cache() -> Path:
    """Folder that keeps the builds of tests between sessions."""
    folder = Path(tempfile.gettempdir(), f"fused_tp_native_tests_{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} belongs to another user.")
    return folder


def use_library(path: str | Path | None) -> None:
    """Load device kernels from the library at `path`, such as `cpu_device_library()`, for CPU tensors; None restores
    those of this installation."""
    native_kernels.KERNEL_LIBRARY = INSTALLED if path is None else Path(path).resolve()
    native_kernels.KERNEL_DEVICES = ("cuda",) if path is None else ("cpu",)


def use_driver(path: str | Path | None) -> None:
    """Use the double of the CUDA driver at `path` for copy engines of CPU tensors; None: the CPU has none."""
    copy_engine.DRIVER_LIBRARIES.pop("cpu", None)
    if path is not None:
        copy_engine.DRIVER_LIBRARIES["cpu"] = str(path)


def use_nccl(nccl_library: str | Path | None, driver: str | Path | None = None) -> None:
    """Use doubles of NCCL and of the CUDA driver for communicators of CPU tensors; None: CPU tensors have none."""
    nccl.NCCL_LIBRARIES.pop("cpu", None)
    if nccl_library is not None:
        nccl.NCCL_LIBRARIES["cpu"] = (str(nccl_library), str(driver))
