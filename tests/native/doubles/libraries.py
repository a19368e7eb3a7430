"""The doubles of libcuda and libnccl, built, and the knobs by which tests make things go wrong in them.

    driver, library = load_doubles()                       # _core.Driver and _core.NcclLibrary over the doubles
    communicator = _core.Communicator(library, driver, 0, unique_id, rank, size, timeout_seconds=10)

Device memory is host memory, so addresses of CPU tensors are as good as any; stream 0 runs at once on the thread that
calls, all other streams are threads. Ranks are processes, or threads of one process.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tests.native_build import (
    build_program,
    build_shared,
    cpu_device_library,
    require_sanitizer,
    use_driver,
    use_library,
    use_nccl,
)

if TYPE_CHECKING:
    from fused_tp import _core

FOLDER = Path("tests", "native", "doubles")
NCCL_NAMES = "fused_tp_nccl_double_"  # of objects in /dev/shm, while ranks find each other


@functools.cache
def cuda_double(*flags: str) -> Path:
    return build_shared("cuda_double", [FOLDER / "cuda_double.cpp"], ["-O1", *flags])


@functools.cache
def nccl_double(*flags: str) -> Path:
    known = f'-DCUDA_DOUBLE="{cuda_double(*flags)}"'
    return build_shared("nccl_double", [FOLDER / "nccl_double.cpp"], ["-O1", known, *flags])


def load_doubles() -> tuple[_core.Driver, _core.NcclLibrary]:
    """Driver and library of this process."""
    from fused_tp import _core

    return _core.Driver(str(cuda_double())), _core.NcclLibrary(str(nccl_double()))


def cuda_knobs() -> ctypes.CDLL:
    """cuda_double_stall(on), cuda_double_fail(call, code, calls_before), ...: see cuda_double.cpp."""
    knobs = ctypes.CDLL(str(cuda_double()))
    knobs.cuda_double_end_capture.restype = ctypes.c_void_p
    knobs.cuda_double_begin_capture.argtypes = [ctypes.c_void_p]
    knobs.cuda_double_end_capture.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    knobs.cuda_double_replay.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    knobs.cuda_double_free_graph.argtypes = [ctypes.c_void_p]
    return knobs


class Stream:
    """A stream of the double of libcuda; words that it waits for are int64 tensors of one element."""

    def __init__(self) -> None:
        self._cuda = cuda_knobs()
        self._cuda.cuda_double_stream.restype = ctypes.c_void_p
        self.handle: int = self._cuda.cuda_double_stream()

    def wait_for(self, word: torch.Tensor) -> None:
        """What follows runs once the word is 1 or more."""
        one, at_least = ctypes.c_uint64(1), ctypes.c_uint(0)
        self._cuda.cuStreamWaitValue64_v2(ctypes.c_void_p(self.handle), ctypes.c_uint64(word.data_ptr()), one, at_least)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        addresses = (ctypes.c_uint64(tensor.data_ptr()) for tensor in (to, source))
        self._cuda.cuMemcpyAsync(*addresses, ctypes.c_size_t(source.nbytes), ctypes.c_void_p(self.handle))


def nccl_knobs() -> ctypes.CDLL:
    """nccl_double_inject(error), nccl_double_stall_launches(on), nccl_double_live_communicators()."""
    return ctypes.CDLL(str(nccl_double()))


def nccl_of_version(version: int, folder: Path) -> Path:
    """Another copy of the double of libnccl; it asks for NCCL_DOUBLE_VERSION, which is set from now on."""
    os.environ["NCCL_DOUBLE_VERSION"] = str(version)
    return Path(shutil.copy(nccl_double(), folder / f"libnccl_{version}.so"))


def run_races() -> str:
    """What races.cpp prints under ThreadSanitizer."""
    require_sanitizer("thread")
    # initial-exec: thread-local memory of a library that was loaded late is given to the next thread unseen by it.
    flags = ("-fsanitize=thread", "-ftls-model=initial-exec")
    own = [source for folder in ("driver", "nccl") for source in sorted(Path("csrc", folder).glob("*.cpp"))]
    program = build_program("nccl_races", [FOLDER / "races.cpp", *own], ["-Icsrc", "-O1", flags[0]])
    command = [program, cuda_double(*flags), nccl_double(*flags)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    return done.stdout.strip()


# What stands for the libraries of GPUs, by transport, and how the CPU's tensors come to go through it.
DOUBLES: dict[str, tuple[Callable[..., None], tuple[Callable[[], Path], ...]]] = {
    "two_shot": (use_library, (cpu_device_library,)),
    "copy_engine": (use_driver, (cuda_double,)),
    "nccl_pipeline": (use_nccl, (nccl_double, cuda_double)),
}


def build_doubles(transport: str) -> None:
    """In the test process, before ranks need them."""
    for library in DOUBLES[transport][1] if transport in DOUBLES else ():
        library()


@contextmanager
def doubles(transport: str) -> Iterator[None]:
    """The CPU's tensors go through the doubles of that transport, if it needs any."""
    if transport not in DOUBLES:
        yield
        return
    use, libraries = DOUBLES[transport]
    use(*(library() for library in libraries))
    try:
        yield
    finally:  # the process goes on to other tests
        use(None)
