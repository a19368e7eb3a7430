"""Streams with one owner each. torch instead returns the 32 streams of a pool in turn, to all callers.

Work that a kernel waits for must not be queued behind that kernel. On a pool stream it may be: the caller's own stream
can be the same one, also through the capture of a CUDA graph. Nor may it be queued behind a kernel that does not fit
on the GPU yet: until that kernel fits, a GPU places no block of a later kernel, unless the later one has a higher
priority. An NCCL collective launched in clusters can be such a kernel, so work that a kernel waits for uses streams of
high priority.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from typing import Any

import torch

_STREAM_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not serialized with the default stream
_CAPTURE_MODE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: no call of this thread invalidates a capture

_DEFAULT_QUEUE_COUNT = 8

_free_streams: dict[tuple[int, bool], list[torch.cuda.ExternalStream]] = {}
_lock = threading.RLock()  # reentrant: the garbage collector may return streams while this thread holds the lock


def own_streams(
    owner: object, device: torch.device, count: int, *, has_high_priority: bool = False
) -> list[torch.cuda.Stream]:
    """Return `count` streams of `device` that belong to `owner`; others may get them only once `owner` is deleted.

    Args:
        has_high_priority: use the device's greatest priority; else the least, the default of streams.

    Raises:
        RuntimeError: the driver cannot create a stream.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    with _lock:
        key = index, has_high_priority
        free_streams = _free_streams.setdefault(key, [])
        streams = [
            free_streams.pop() if free_streams else _create_stream(index, has_high_priority) for _ in range(count)
        ]
    weakref.finalize(owner, _return_streams, key, streams).atexit = False
    return list(streams)


def _return_streams(key: tuple[int, bool], streams: list[torch.cuda.ExternalStream]) -> None:
    with _lock:
        _free_streams[key].extend(streams)


def _create_stream(index: int, has_high_priority: bool) -> torch.cuda.ExternalStream:
    torch.cuda.init()
    # Created by the driver: torch's cudart().cudaStreamCreate makes one that is serialized with the default stream.
    handle = new_stream(ctypes.CDLL("libcuda.so.1"), index, has_high_priority)
    return torch.cuda.ExternalStream(handle, device=torch.device("cuda", index))


def new_stream(driver: Any, index: int, has_high_priority: bool = False) -> int:
    """Create a stream of GPU `index` and return its handle, also while this thread captures a CUDA graph.

    No stream is queried, and this thread's context is restored. The device's primary context, which torch uses too,
    stays retained for as long as the process runs, as it does for torch.

    Args:
        driver: libcuda, loaded by ctypes.
        has_high_priority: see `own_streams`.

    Raises:
        RuntimeError: a call of the driver fails.
    """

    def call_driver(name: str, *arguments: object) -> None:
        status = getattr(driver, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"The CUDA driver could not create a stream: {name} returned error {status}.")

    device, mode = ctypes.c_int(), ctypes.c_int(_CAPTURE_MODE_RELAXED)
    context, previous_context, handle = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    call_driver("cuDeviceGet", ctypes.byref(device), index)
    call_driver("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        call_driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        call_driver("cuCtxPushCurrent_v2", context)
        try:
            least, greatest = ctypes.c_int(), ctypes.c_int()
            call_driver("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
            priority = (greatest if has_high_priority else least).value
            call_driver("cuStreamCreateWithPriority", ctypes.byref(handle), _STREAM_NON_BLOCKING, priority)
        finally:
            call_driver("cuCtxPopCurrent_v2", ctypes.byref(previous_context))
    finally:
        call_driver("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))  # restores the previous mode
    if handle.value is None:
        raise RuntimeError(
            "The CUDA driver could not create a stream: cuStreamCreateWithPriority returned a null handle."
        )
    return handle.value


def runs_copies_concurrently(device: torch.device) -> bool:
    """True if a kernel and the copies that it waits for run concurrently on `device`; else enqueue the copies first.

    CUDA does not guarantee concurrency for branches of a CUDA graph, with CUDA_LAUNCH_BLOCKING=1, and if
    CUDA_DEVICE_MAX_CONNECTIONS, which Megatron sets to 1, leaves the GPU fewer queues than it has by default: streams
    then share queues, and a copy can be queued behind the kernel that waits for it.
    """
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    has_few_queues = queues.isdecimal() and int(queues) < _DEFAULT_QUEUE_COUNT
    if has_few_queues or os.environ.get("CUDA_LAUNCH_BLOCKING", "0") == "1":
        return False
    if device.type != "cuda":
        return True
    with torch.cuda.device(device):
        return not torch.cuda.is_current_stream_capturing()
