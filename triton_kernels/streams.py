"""Streams that nobody else has. torch's come from a pool of 32 that it hands out in turn, to everybody.

Work that a kernel waits for must not end up behind that kernel. With a stream of the pool it may: the caller's own
stream can be the very same one, also by way of a CUDA graph's capture.
"""

from __future__ import annotations

import ctypes
import threading
import weakref

import torch

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: takes no turns with the default stream

_free: dict[int, list[torch.cuda.ExternalStream]] = {}
_lock = threading.Lock()


def own_streams(owner: object, device: torch.device, count: int) -> list[torch.cuda.Stream]:
    """`count` streams of `device` that belong to `owner`, and to others only once it is gone.

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
    handle = ctypes.c_void_p()
    with torch.cuda.device(index):
        torch.cuda.current_stream().query()  # makes the device's context this thread's
        # By the driver: the one that torch offers (cudart().cudaStreamCreate) takes turns with the default stream.
        status = ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(handle), _NON_BLOCKING)
    if status != 0 or handle.value is None:
        raise RuntimeError(f"The CUDA driver made no stream: error {status} of cuStreamCreate.")
    return torch.cuda.ExternalStream(handle.value, device=torch.device("cuda", index))
