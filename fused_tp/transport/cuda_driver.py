"""What the CUDA driver says of itself and its GPUs, also where torch does not ask it. Nothing here needs a GPU."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

MULTICAST = 132  # CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED


@cache
def _library() -> Any:
    """The initialised driver; None where there is none, or no GPU that it could drive."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        return library if library.cuInit(0) == 0 else None
    except (OSError, AttributeError):
        return None


def _asked(function: str, *arguments: int) -> int | None:
    """What `function` writes to its first argument; None where it cannot say."""
    value = ctypes.c_int(0)
    try:
        status = getattr(_library(), function)(ctypes.byref(value), *arguments)
    except AttributeError:
        return None
    return value.value if status == 0 else None


def cuda_version() -> tuple[int, int] | None:
    """The newest CUDA that the driver serves, such as (13, 0)."""
    number = _asked("cuDriverGetVersion")
    return None if number is None else (number // 1000, number % 1000 // 10)


def device_attribute(attribute: int, device: int) -> int | None:
    """A CU_DEVICE_ATTRIBUTE of the GPU of that number, as CUDA_VISIBLE_DEVICES lets it be seen."""
    return _asked("cuDeviceGetAttribute", attribute, device)
