"""Queries of the CUDA driver about itself and its GPUs, also those that torch does not expose. No GPU is required."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

MULTICAST = 132  # CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED


@cache
def _library() -> Any:
    """The initialised driver library; None without a driver, or without a GPU that it supports."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        return library if library.cuInit(0) == 0 else None
    except (OSError, AttributeError):
        return None


def _asked(function: str, *arguments: int) -> int | None:
    """The value that `function` writes to its first argument; None if the query fails."""
    value = ctypes.c_int(0)
    try:
        status = getattr(_library(), function)(ctypes.byref(value), *arguments)
    except AttributeError:
        return None
    return value.value if status == 0 else None


def cuda_version() -> tuple[int, int] | None:
    """The newest CUDA version that the driver supports, such as (13, 0)."""
    number = _asked("cuDriverGetVersion")
    return None if number is None else (number // 1000, number % 1000 // 10)


def device_attribute(attribute: int, device: int) -> int | None:
    """A CU_DEVICE_ATTRIBUTE of a GPU, numbered as visible under CUDA_VISIBLE_DEVICES."""
    return _asked("cuDeviceGetAttribute", attribute, device)
