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
from pathlib import Path
from typing import TYPE_CHECKING

from tests.native_build import build_shared

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


def nccl_knobs() -> ctypes.CDLL:
    """nccl_double_inject(error), nccl_double_stall_launches(on), nccl_double_live_communicators()."""
    return ctypes.CDLL(str(nccl_double()))


def nccl_of_version(version: int, folder: Path) -> Path:
    """Another copy of the double of libnccl; it asks for NCCL_DOUBLE_VERSION, which is set from now on."""
    os.environ["NCCL_DOUBLE_VERSION"] = str(version)
    return Path(shutil.copy(nccl_double(), folder / f"libnccl_{version}.so"))
