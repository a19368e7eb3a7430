"""Availability and loading of the library of device kernels (csrc/cuda).

The library is a file in the package, built if nvcc was available at installation. It is loaded, and CUDA is
initialised, at the first request only.
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

KERNEL_LIBRARY = Path(__file__).resolve().parents[2] / "_cuda.so"
KERNEL_DEVICES = ("cuda",)  # device types that the kernels run on; tests add the CPU
HOW_TO_BUILD = (
    "install the CUDA toolkit (12.0 or later, for its nvcc) and reinstall fused_tp where the GPU is visible, or with "
    "FUSED_TP_CUDA=1"
)


@dataclass(frozen=True)
class KernelTargets:
    """Targets of a compiled library of device kernels."""

    archs: tuple[str, ...]  # sm_90a: binary code for that GPU; compute_100: PTX for sm_100 and later GPUs
    toolkit: tuple[int, ...]  # CUDA version

    def runs_on(self, arch: int) -> bool:
        """True if the library runs on a GPU of compute capability `arch`, such as 90."""
        return any(_target_runs_on(name, arch) for name in self.archs)


_load_lock = threading.Lock()
_loaded_kernels: dict[Path, Any] = {}


def native_kernels() -> Any:
    """Return the device kernels (`_core.DeviceKernels`). The first call loads the library.

    Raises:
        RuntimeError: the kernels are not available; the message has the reason.
    """
    kernels = _loaded_kernels.get(KERNEL_LIBRARY)
    if kernels is not None:
        return kernels
    available = native_kernels_available()
    if not available:
        raise RuntimeError(f"The device kernels are not available: {available.reason}.")
    return _loaded_kernels[KERNEL_LIBRARY]


def native_kernels_available(arch: int = 0) -> Availability:
    """Return whether this process can use the device kernels, with the reason if not.

    Args:
        arch: compute capability of the GPU, such as 90; 0: do not check it.
    """
    if "cuda" in KERNEL_DEVICES and not (requirements := _check_requirements(arch)):
        return requirements
    try:
        core = import_module("fused_tp._core")
        with _load_lock:
            if KERNEL_LIBRARY not in _loaded_kernels:
                _loaded_kernels[KERNEL_LIBRARY] = core.DeviceKernels(str(KERNEL_LIBRARY))
    except (ImportError, RuntimeError) as error:
        return unavailable(str(error).rstrip("."))
    return AVAILABLE


@cache
def read_kernel_targets(path: Path = KERNEL_LIBRARY) -> KernelTargets | None:
    """Read the targets of the library at `path` without loading it; None if the file is missing or lists no target."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            match = re.search(rb"fused_tp device kernels: ([\w ]+), nvcc ([\d.]+)\0", content)
            archs, toolkit = (text.decode() for text in match.groups()) if match else ("", "")
    except (OSError, ValueError):
        return None
    return KernelTargets(tuple(archs.split()), tuple(map(int, toolkit.split(".")))) if archs else None


def _check_requirements(arch: int) -> Availability:
    """Return whether this machine has the library, a GPU that it supports and a driver of a sufficient version."""
    if not KERNEL_LIBRARY.exists():
        return unavailable(f"the device kernels were not built when fused_tp was installed; {HOW_TO_BUILD}")
    if not torch.cuda.is_available():
        cause = "no GPU, or no driver" if torch.version.cuda else "torch was built without CUDA"
        return unavailable(f"torch finds no GPU ({cause})")
    targets = read_kernel_targets(KERNEL_LIBRARY)
    if targets is None:
        return AVAILABLE  # the targets are unknown, so let loading decide
    if arch and not targets.runs_on(arch):
        return unavailable(
            f"the device kernels were built for {', '.join(targets.archs)}, and this GPU is sm_{arch}; reinstall "
            f"fused_tp with FUSED_TP_CUDA_ARCHS={arch}"
        )
    driver = cuda_driver.cuda_version()
    if driver is not None and driver[0] < targets.toolkit[0]:
        return unavailable(
            f"the device kernels were built with CUDA {targets.toolkit[0]}.{targets.toolkit[1]}, and the driver "
            f"supports only CUDA {driver[0]}.{driver[1]}; update the driver, or reinstall fused_tp with a toolkit of "
            "that version"
        )
    return AVAILABLE


def _target_runs_on(name: str, arch: int) -> bool:
    match = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", name)
    if match is None:
        return False
    arch_number, suffix = int(match[2]), match[3]
    if match[1] == "compute":
        return arch_number <= arch
    if suffix == "a":
        return arch_number == arch
    # binary code also runs on later GPUs of the same major version
    return arch_number <= arch and arch_number // 10 == arch // 10
