"""The doubles of libcuda and libnccl, one library, and the knobs by which tests make things go wrong in them.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tests.native_build import (
    build_program,
    build_shared,
    cpu_device_library,
    output_of,
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
def gpu_double(*flags: str) -> Path:
    return build_shared("gpu_double", [FOLDER / f"{name}_double.cpp" for name in ("cuda", "nccl")], ["-O1", *flags])


def load_doubles() -> tuple[_core.Driver, _core.NcclLibrary]:
    """Driver and library of this process."""
    from fused_tp import _core

    return _core.Driver(str(gpu_double())), _core.NcclLibrary(str(gpu_double()))


def double_knobs() -> ctypes.CDLL:
    """cuda_double_stall(on), nccl_double_inject(error), ...: see the doubles."""
    knobs = ctypes.CDLL(str(gpu_double()))
    knobs.cuda_double_stream.restype = knobs.cuda_double_end_capture.restype = ctypes.c_void_p
    knobs.cuda_double_stream_calls.restype = knobs.cuda_double_streams_made.restype = ctypes.c_long
    knobs.cuda_double_begin_capture.argtypes = [ctypes.c_void_p]
    knobs.cuda_double_end_capture.argtypes = [ctypes.c_void_p]
    knobs.cuda_double_replay.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    knobs.cuda_double_free_graph.argtypes = [ctypes.c_void_p]
    return knobs


class Stream:
    """A stream of the double of libcuda; words that it waits for are int64 tensors of one element."""

    def __init__(self) -> None:
        self._cuda = double_knobs()
        self.handle: int = self._cuda.cuda_double_stream()

    def wait_for(self, word: torch.Tensor) -> None:
        """What follows runs once the word is 1 or more."""
        one, at_least = ctypes.c_uint64(1), ctypes.c_uint(0)
        self._cuda.cuStreamWaitValue64_v2(ctypes.c_void_p(self.handle), ctypes.c_uint64(word.data_ptr()), one, at_least)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        addresses = (ctypes.c_uint64(tensor.data_ptr()) for tensor in (to, source))
        self._cuda.cuMemcpyAsync(*addresses, ctypes.c_size_t(source.nbytes), ctypes.c_void_p(self.handle))


def nccl_of_version(version: int, folder: Path) -> Path:
    """Another copy of the double of libnccl; it asks for NCCL_DOUBLE_VERSION, which is set from now on."""
    os.environ["NCCL_DOUBLE_VERSION"] = str(version)
    return Path(shutil.copy(gpu_double(), folder / f"libnccl_{version}.so"))


def run_races() -> str:
    """What races.cpp prints under ThreadSanitizer."""
    require_sanitizer("thread")
    # initial-exec: thread-local memory of a library that was loaded late is given to the next thread unseen by it.
    flags = ("-fsanitize=thread", "-ftls-model=initial-exec")
    own = [source for folder in ("driver", "nccl") for source in sorted(Path("csrc", folder).glob("*.cpp"))]
    program = build_program("nccl_races", [FOLDER / "races.cpp", *own], ["-Icsrc", "-O1", flags[0]])
    return output_of(program, gpu_double(*flags))


# What stands for the libraries of GPUs, by transport, and how the CPU's tensors come to go through it.
DOUBLES: dict[str, tuple[Callable[..., None], tuple[Callable[[], Path], ...]]] = {
    "two_shot": (use_library, (cpu_device_library,)),
    "copy_engine": (use_driver, (gpu_double,)),
    "nccl_pipeline": (use_nccl, (gpu_double, gpu_double)),
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
