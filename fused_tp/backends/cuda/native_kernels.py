"""Library of device kernels (csrc/cuda): its availability to this process, and loading it once.

It is a file next to this package, built where nvcc was available. Nothing is loaded, and CUDA is not initialised,
before the first request.
"""

from __future__ import annotations

import mmap
import re
import threading
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from fused_tp.backends.cuda import cuda_driver
from fused_tp.core.availability import AVAILABLE, Availability, unavailable

LIBRARY = Path(__file__).resolve().parents[2] / "_cuda.so"
DEVICES = ("cuda",)  # device types that the library has kernels for
HOW_TO_BUILD = (
    "install the CUDA toolkit (12.0 or later, for its nvcc) and reinstall fused_tp where the GPU is visible, or with "
    "FUSED_TP_CUDA=1"
)


@dataclass(frozen=True)
class BuiltFor:
    """Targets that a library of device kernels was compiled for."""

    archs: tuple[str, ...]  # sm_90a is code for that GPU; compute_100 is PTX, for GPUs from sm_100 on
    toolkit: tuple[int, ...]  # CUDA version

    def runs_on(self, arch: int) -> bool:
        """True if it runs on a GPU of compute capability `arch`, such as 90."""
        return any(_serves(name, arch) for name in self.archs)


_lock = threading.Lock()
_loaded: dict[Path, Any] = {}


def native_kernels() -> Any:
    """The device kernels, a `_core.DeviceKernels`; the first call loads the library.

    Raises:
        RuntimeError: they cannot be used here; the message has the reason.
    """
    kernels = _loaded.get(LIBRARY)
    if kernels is not None:
        return kernels
    available = native_kernels_available()
    if not available:
        raise RuntimeError(f"The device kernels cannot be used: {available.reason}.")
    return _loaded[LIBRARY]


def native_kernels_available(arch: int = 0) -> Availability:
    """Availability of the device kernels to this process, with the reason if there are none.

    Args:
        arch: compute capability of the GPU in question, such as 90; 0: any.
    """
    if "cuda" in DEVICES and not (here := _here(arch)):
        return here
    try:
        core = import_module("fused_tp._core")
        with _lock:
            if LIBRARY not in _loaded:
                _loaded[LIBRARY] = core.DeviceKernels(str(LIBRARY))
    except (ImportError, RuntimeError) as error:
        return unavailable(str(error).rstrip("."))
    return AVAILABLE


@cache
def built_for(path: Path = LIBRARY) -> BuiltFor | None:
    """Targets of the library at `path`, read without loading it; None if it is missing or names none."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found = re.search(rb"fused_tp device kernels: ([\w ]+), nvcc ([\d.]+)\0", content)
            archs, toolkit = (text.decode() for text in found.groups()) if found else ("", "")
    except (OSError, ValueError):
        return None
    return BuiltFor(tuple(archs.split()), tuple(map(int, toolkit.split(".")))) if archs else None


def _here(arch: int) -> Availability:
    """Availability of the library's requirements on this machine."""
    if not LIBRARY.exists():
        return unavailable(f"they were not built when fused_tp was installed; {HOW_TO_BUILD}")
    if not torch.cuda.is_available():
        why = "no GPU or no driver for it" if torch.version.cuda else "a torch that was built without CUDA"
        return unavailable(f"torch finds no GPU here ({why})")
    built = built_for(LIBRARY)
    if built is None:
        return AVAILABLE  # no known obstacle
    if arch and not built.runs_on(arch):
        return unavailable(
            f"they were built for {', '.join(built.archs)}, and this GPU is sm_{arch}; reinstall fused_tp with "
            f"FUSED_TP_CUDA_ARCHS={arch}"
        )
    driver = cuda_driver.cuda_version()
    if driver is not None and driver[0] < built.toolkit[0]:
        return unavailable(
            f"they were built by CUDA {built.toolkit[0]}.{built.toolkit[1]}, and the driver serves CUDA {driver[0]}."
            f"{driver[1]}; update the driver, or reinstall fused_tp with a CUDA toolkit of that version"
        )
    return AVAILABLE


def _serves(name: str, arch: int) -> bool:
    found = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", name)
    if found is None:
        return False
    number, letter = int(found[2]), found[3]
    if found[1] == "compute":
        return number <= arch
    if letter == "a":
        return number == arch
    return number <= arch and number // 10 == arch // 10  # code runs on later GPUs of the same major number
