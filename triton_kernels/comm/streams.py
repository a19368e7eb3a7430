"""Streams with one owner. Those of torch are of a pool of 32 that it hands out in turn, to all callers.

Work that a kernel waits for must not end up behind that kernel. With a stream of the pool it may: the caller's own
stream can be the very same one, also by way of a CUDA graph's capture. Nor may it end up behind a kernel that finds no
room: a GPU places no block of a later kernel meanwhile, unless that has a higher priority. A collective of NCCL that is
launched in clusters can be such a kernel, so work that a kernel waits for has `urgent` streams.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from typing import Any

import torch

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: takes no turns with the default stream
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: no call of this thread is taken for one that harms a capture

_DEFAULT_QUEUES = 8

_free: dict[tuple[int, bool], list[torch.cuda.ExternalStream]] = {}
_lock = threading.RLock()  # the garbage collector may give streams back in the middle of handing some out


def own_streams(owner: object, device: torch.device, count: int, *, urgent: bool = False) -> list[torch.cuda.Stream]:
    """`count` streams of `device` that belong to `owner`, and to others only once `owner` is deleted.

    Args:
        urgent: of the greatest priority that the device has; else of the least, as streams are by default.

    Raises:
        RuntimeError: the driver gives none.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    with _lock:
        kind = index, urgent
        free = _free.setdefault(kind, [])
        streams = [free.pop() if free else _create(index, urgent) for _ in range(count)]
    weakref.finalize(owner, _give_back, kind, streams).atexit = False
    return list(streams)


def _give_back(kind: tuple[int, bool], streams: list[torch.cuda.ExternalStream]) -> None:
    with _lock:
        _free[kind].extend(streams)


def _create(index: int, urgent: bool) -> torch.cuda.ExternalStream:
    torch.cuda.init()
    # By the driver: the one that torch offers (cudart().cudaStreamCreate) is serialized with the default stream.
    handle = new_stream(ctypes.CDLL("libcuda.so.1"), index, urgent)
    return torch.cuda.ExternalStream(handle, device=torch.device("cuda", index))


def new_stream(driver: Any, index: int, urgent: bool = False) -> int:
    """Handle of a new stream of GPU `index`, also while this thread captures a CUDA graph; `urgent` as `own_streams`.

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
            least, greatest = ctypes.c_int(), ctypes.c_int()
            call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
            priority = (greatest if urgent else least).value
            call("cuStreamCreateWithPriority", ctypes.byref(handle), _NON_BLOCKING, priority)
        finally:
            call("cuCtxPopCurrent_v2", ctypes.byref(before))
    finally:
        call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))  # what it was
    if handle.value is None:
        raise RuntimeError("The CUDA driver made no stream: cuStreamCreateWithPriority gave none.")
    return handle.value


def queues_are_few() -> bool:
    """True where CUDA_DEVICE_MAX_CONNECTIONS leaves the GPU fewer queues than it has by default.

    Streams then share queues, and work that a kernel waits for can be behind one that waits for this kernel. Megatron
    sets it to 1.
    """
    given = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    return given.isdecimal() and int(given) < _DEFAULT_QUEUES
