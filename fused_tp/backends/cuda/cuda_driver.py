"""Queries to the CUDA driver, including properties that torch does not expose. They work without a GPU."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

MULTICAST_SUPPORTED = 132  # CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED


@cache
def _driver_library() -> Any:
    """Return the initialised driver library; None without a driver, or without a GPU that the driver supports."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        return library if library.cuInit(0) == 0 else None
    except (OSError, AttributeError):
        return None


def _query_driver(function: str, *arguments: int) -> int | None:
    """Return the int that the driver's `function` writes to its first argument; None if the query fails."""
    value = ctypes.c_int(0)
    try:
        status = getattr(_driver_library(), function)(ctypes.byref(value), *arguments)
    except AttributeError:
        return None
    return value.value if status == 0 else None


def cuda_version() -> tuple[int, int] | None:
    """Return the newest CUDA version that the driver supports, such as (13, 0); None without a driver."""
    version = _query_driver("cuDriverGetVersion")
    return None if version is None else (version // 1000, version % 1000 // 10)


def device_attribute(attribute: int, device: int) -> int | None:
    """Return a CU_DEVICE_ATTRIBUTE of GPU `device`, an index that respects CUDA_VISIBLE_DEVICES; None if unknown."""
    return _query_driver("cuDeviceGetAttribute", attribute, device)
