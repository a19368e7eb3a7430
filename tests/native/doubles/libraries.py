"""The doubles of libcuda and libnccl, built as one library, and the knobs with which tests inject faults.

    driver, library = load_doubles()                       # _core.Driver and _core.NcclLibrary over the doubles
    communicator = _core.Communicator(library, driver, 0, unique_id, rank, size, timeout_seconds=10)

Device memory is host memory, so addresses of CPU tensors are valid; stream 0 runs immediately on the calling thread,
all other streams are threads. Ranks are processes, or threads of one process.
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
NCCL_NAMES = "fused_tp_nccl_double_"  # prefix of objects in /dev/shm, which exist until all ranks have joined


@functools.cache
def gpu_double(*flags: str) -> Path:
    return build_shared("gpu_double", [FOLDER / f"{name}_double.cpp" for name in ("cuda", "nccl")], ["-O1", *flags])


def load_doubles() -> tuple[_core.Driver, _core.NcclLibrary]:
    """Open the doubles as driver and library of this process."""
    from fused_tp import _core

    return _core.Driver(str(gpu_double())), _core.NcclLibrary(str(gpu_double()))


def double_knobs() -> ctypes.CDLL:
    """Knobs of the doubles: cuda_double_stall(on), nccl_double_inject(error), ...; documented in the doubles."""
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
        """Block later work of the stream until the word is 1 or more."""
        one, at_least = ctypes.c_uint64(1), ctypes.c_uint(0)
        self._cuda.cuStreamWaitValue64_v2(ctypes.c_void_p(self.handle), ctypes.c_uint64(word.data_ptr()), one, at_least)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        addresses = (ctypes.c_uint64(tensor.data_ptr()) for tensor in (to, source))
        self._cuda.cuMemcpyAsync(*addresses, ctypes.c_size_t(source.nbytes), ctypes.c_void_p(self.handle))


def nccl_of_version(version: int, folder: Path) -> Path:
    """Copy the double of libnccl and set NCCL_DOUBLE_VERSION, which it reports, for this process."""
    os.environ["NCCL_DOUBLE_VERSION"] = str(version)
    return Path(shutil.copy(gpu_double(), folder / f"libnccl_{version}.so"))


def run_races() -> str:
    """Run races.cpp under ThreadSanitizer; return its output."""
    require_sanitizer("thread")
    # initial-exec: ThreadSanitizer does not see that thread-local memory of a late-loaded library is reused by threads.
    flags = ("-fsanitize=thread", "-ftls-model=initial-exec")
    own = [source for folder in ("driver", "nccl") for source in sorted(Path("csrc", folder).glob("*.cpp"))]
    program = build_program("nccl_races", [FOLDER / "races.cpp", *own], ["-Icsrc", "-O1", flags[0]])
    return output_of(program, gpu_double(*flags))


# By transport: the function that makes CPU tensors use the doubles, and the functions that build them.
DOUBLES: dict[str, tuple[Callable[..., None], tuple[Callable[[], Path], ...]]] = {
    "two_shot": (use_library, (cpu_device_library,)),
    "copy_engine": (use_driver, (gpu_double,)),
    "nccl_pipeline": (use_nccl, (gpu_double, gpu_double)),
}


def build_doubles(transport: str) -> None:
    """Build the doubles of a transport in the test process, before ranks need them."""
    for library in DOUBLES[transport][1] if transport in DOUBLES else ():
        library()


@contextmanager
def doubles(transport: str) -> Iterator[None]:
    """Let CPU tensors use the doubles of that transport, if it needs any."""
    if transport not in DOUBLES:
        yield
        return
    use, libraries = DOUBLES[transport]
    use(*(library() for library in libraries))
    try:
        yield
    finally:  # the process runs other tests later
        use(None)
