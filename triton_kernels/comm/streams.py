"""Streams with one owner. Those of torch are of a pool of 32 that it hands out in turn, to all callers.

Work that a kernel waits for must not end up behind that kernel. With a stream of the pool it may: the caller's own
stream can be the very same one, also by way of a CUDA graph's capture.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from typing import Any

import torch

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: takes no turns with the default stream
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: no call of this thread is taken for one that harms a capture

_free: dict[int, list[torch.cuda.ExternalStream]] = {}
_lock = threading.RLock()  # the garbage collector may give streams back in the middle of handing some out


def own_streams(owner: object, device: torch.device, count: int) -> list[torch.cuda.Stream]:
    """`count` streams of `device` that belong to `owner`, and to others only once `owner` is deleted.

    Raises:
        RuntimeError: the driver gives none.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    with _lock:
        free = _free.setdefault(index, [])
        streams = [free.pop() if free else _create(index) for _ in range(count)]
    weakref.finalize(owner, _give_back, index, streams).atexit = False
    return list(streams)


def _give_back(index: int, streams: list[torch.cuda.ExternalStream]) -> None:
    with _lock:
        _free[index].extend(streams)


def _create(index: int) -> torch.cuda.ExternalStream:
    torch.cuda.init()
    # By the driver: the one that torch offers (cudart().cudaStreamCreate) is serialized with the default stream.
    return torch.cuda.ExternalStream(new_stream(ctypes.CDLL("libcuda.so.1"), index), device=torch.device("cuda", index))


def new_stream(driver: Any, index: int) -> int:
    """Handle of a new stream of GPU `index`, also while this thread captures a CUDA graph.

    Nothing is asked of any stream, and this thread's context is what it was. The device's own context, which torch
    uses too, stays for as long as the process, as that of torch does.

    Args:
        driver: libcuda, by ctypes.

    Raises:
        RuntimeError: the driver refuses.
    """

    def call(name: str, *arguments: object) -> None:
        status = getattr(driver, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"The CUDA driver made no stream: error {status} of {name}.")

    device, mode = ctypes.c_int(), ctypes.c_int(_RELAXED)
    context, before, handle = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    call("cuDeviceGet", ctypes.byref(device), index)
    call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        call("cuCtxPushCurrent_v2", context)
        try:
            call("cuStreamCreate", ctypes.byref(handle), _NON_BLOCKING)
        finally:
            call("cuCtxPopCurrent_v2", ctypes.byref(before))
    finally:
        call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))  # what it was
    if handle.value is None:
        raise RuntimeError("The CUDA driver made no stream: cuStreamCreate gave none.")
    return handle.value
