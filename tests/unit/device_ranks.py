"""Ranks that are threads of the test, with workspaces in CPU memory, for the CPU build of the device kernels."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_char_p, c_double, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.native_build import cpu_device_library
from triton_kernels import protocol

ONE_SHOT, TWO_SHOT, MULTIMEM = 0, 1, 2
ALGORITHMS = {"one_shot": ONE_SHOT, "two_shot": TWO_SHOT, "multimem": MULTIMEM}
SAME_DTYPE, FP8_STATIC, FP8_ROW = 0, 1, 2
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
INVALID, NOT_SUPPORTED = 1, 801


class CWorkspace(Structure):
    _fields_ = [
        ("addresses", c_void_p),
        ("state", c_void_p),
        ("error", c_void_p),
        ("half_bytes", c_int64),
        ("timeout_ns", c_int64),
        ("multicast", c_uint64),
        ("rank", c_int32),
        ("world", c_int32),
    ]


class CBias(Structure):
    _fields_ = [("data", c_void_p), ("columns", c_int64)]


class CLayout(Structure):
    _fields_ = [(name, c_int64) for name in "batches rows row_bytes".split()] + [
        (f"{side}_{of}_stride", c_int64) for side in ("in", "out") for of in ("part", "batch", "row")
    ]


class CNorm(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("residual", "weight", "normed", "new_residual", "scale")),
        ("rows", c_int64),
        ("columns", c_int64),
        ("eps", c_double),
        ("output", c_int32),
    ]


def _function(*arguments: Any) -> Any:
    return ctypes.CFUNCTYPE(c_int32, *arguments)


_WORKSPACE = POINTER(CWorkspace)


class Launchers(Structure):
    """csrc/cuda/launchers.h."""

    _fields_ = [
        ("abi_version", c_int32),
        ("barrier", _function(_WORKSPACE, c_void_p)),
        (
            "all_reduce",
            _function(_WORKSPACE, c_int32, c_void_p, c_void_p, c_int64, c_int32, CBias, c_int32, c_void_p),
        ),
        (
            "reduce_scatter",
            _function(_WORKSPACE, c_void_p, c_void_p, c_int64, c_int64, c_int32, CBias, c_int32, c_void_p),
        ),
        ("all_gather", _function(_WORKSPACE, c_void_p, c_void_p, c_int64, c_int64, c_int32, c_void_p)),
        ("all_to_all", _function(_WORKSPACE, c_void_p, c_void_p, POINTER(CLayout), c_int32, c_void_p)),
        (
            "all_reduce_rms_norm",
            _function(_WORKSPACE, c_int32, c_void_p, POINTER(CNorm), c_int32, c_int32, c_void_p),
        ),
        ("sum_terms", _function(c_void_p, c_int32, c_int64, c_void_p, c_int64, c_int32, CBias, c_void_p)),
        ("count_up", _function(c_void_p, c_void_p)),
        ("error_string", ctypes.CFUNCTYPE(c_char_p, c_int32)),
    ]


@cache
def launchers() -> Launchers:
    library = ctypes.CDLL(str(cpu_device_library()))
    library.fused_tp_launchers.restype = POINTER(Launchers)
    found: Launchers = library.fused_tp_launchers().contents
    return found


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def bias_of(tensor: Tensor | None) -> CBias:
    return CBias(address(tensor), 1 if tensor is None else tensor.numel())


@dataclass
class Rank:
    """One rank's side: its workspace, and the ops on tensors. Every op returns the launcher's error number."""

    rank: int
    world: int
    memory: Tensor
    addresses: Tensor
    timeout_seconds: float
    multicast: bool = True
    state: Tensor = field(default_factory=lambda: torch.zeros(protocol.COUNTERS, dtype=torch.int64))
    error: Tensor = field(default_factory=lambda: torch.zeros(protocol.ERROR_WORDS, dtype=torch.int64))

    @property
    def workspace(self) -> CWorkspace:
        return CWorkspace(
            self.addresses.data_ptr(),
            self.state.data_ptr(),
            self.error.data_ptr(),
            self.memory.nbytes // 2 // protocol.DATA_ALIGNMENT * protocol.DATA_ALIGNMENT,
            int(self.timeout_seconds * 1e9),
            1 if self.multicast else 0,
            self.rank,
            self.world,
        )

    def barrier(self) -> int:
        return launchers().barrier(byref(self.workspace), None)

    def all_reduce(
        self, x: Tensor, out: Tensor, *, algorithm: int = ONE_SHOT, bias: Tensor | None = None, blocks: int = 2
    ) -> int:
        return launchers().all_reduce(
            byref(self.workspace),
            algorithm,
            address(x),
            address(out),
            x.numel(),
            DTYPES[x.dtype],
            bias_of(bias),
            blocks,
            None,
        )

    def reduce_scatter(self, x: Tensor, out: Tensor, chunk: int, *, bias: Tensor | None = None, blocks: int = 2) -> int:
        return launchers().reduce_scatter(
            byref(self.workspace),
            address(x),
            address(out),
            x.numel(),
            chunk,
            DTYPES[x.dtype],
            bias_of(bias),
            blocks,
            None,
        )

    def all_gather(self, x: Tensor, out: Tensor, chunk: int, *, blocks: int = 2) -> int:
        """`chunk` in bytes."""
        return launchers().all_gather(
            byref(self.workspace), address(x), address(out), out.nbytes, chunk, blocks, None
        )

    def all_to_all(self, x: Tensor, out: Tensor, layout: tuple[int, ...], *, blocks: int = 2) -> int:
        return launchers().all_to_all(
            byref(self.workspace), address(x), address(out), byref(CLayout(*layout)), blocks, None
        )

    def all_reduce_rms_norm(
        self,
        partial: Tensor,
        residual: Tensor,
        weight: Tensor,
        normed: Tensor,
        new_residual: Tensor,
        scale: Tensor | None,
        eps: float,
        *,
        algorithm: int = ONE_SHOT,
        output: int = SAME_DTYPE,
        blocks: int = 2,
    ) -> int:
        rows, columns = partial.shape
        norm = CNorm(
            *(address(tensor) for tensor in (residual, weight, normed, new_residual, scale)), rows, columns, eps, output
        )
        return launchers().all_reduce_rms_norm(
            byref(self.workspace), algorithm, address(partial), byref(norm), DTYPES[partial.dtype], blocks, None
        )


class Ranks:
    """All ranks of a group. `run` calls a function on each, in threads of their own."""

    def __init__(self, world: int, workspace_bytes: int = 1 << 20, timeout_seconds: float = 20.0) -> None:
        memories = [aligned_bytes(workspace_bytes, 128).zero_() for _ in range(world)]
        addresses = torch.tensor([memory.data_ptr() for memory in memories])
        self.ranks = [Rank(rank, world, memories[rank], addresses, timeout_seconds) for rank in range(world)]

    def run(self, function: Callable[..., Any], *, only: range | None = None) -> list[Any]:
        """function(rank) on every rank, or on some; their results in order."""
        chosen = [self.ranks[rank] for rank in only or range(len(self.ranks))]
        results: list[Any] = [None] * len(chosen)
        errors: list[BaseException] = []

        def call(index: int) -> None:
            try:
                results[index] = function(chosen[index])
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=call, args=(index,), daemon=True) for index in range(len(chosen))]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 60
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0))
        assert not any(thread.is_alive() for thread in threads), "a rank is stuck"
        if errors:
            raise errors[0]
        return results


def aligned_bytes(nbytes: int, to: int) -> Tensor:
    """uint8 [nbytes] at a multiple of `to` bytes."""
    whole = torch.empty(nbytes + to, dtype=torch.uint8)
    return whole[-whole.data_ptr() % to :][:nbytes]


def at_offset(values: Tensor, elements: int) -> Tensor:
    """The same values, so many elements behind a multiple of 16 bytes, between guards that `guards_hold` checks."""
    pad = 16
    size = values.element_size()
    whole = aligned_bytes((values.numel() + elements + 2 * pad) * size, 16).view(values.dtype)
    whole.view(torch.uint8).fill_(0xA5)
    placed = whole[pad + elements :][: values.numel()].view(values.shape)
    placed.copy_(values)
    return placed


def guards_hold(placed: Tensor) -> bool:
    """Whether nothing around a tensor of `at_offset` has been written."""
    size = placed.element_size()
    nbytes = placed.numel() * size
    around = placed.new_empty(0).set_(placed.untyped_storage()).view(torch.uint8)
    start = placed.data_ptr() - around.data_ptr()
    before, after = around[start - 16 * size : start], around[start + nbytes : start + nbytes + 15 * size]
    return bool((before == 0xA5).all() and (after == 0xA5).all())
