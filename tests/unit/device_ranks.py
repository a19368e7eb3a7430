"""Ranks that are threads of the test, with workspaces in CPU memory, for the CPU build of the device kernels."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_tp.transport.shm import dtype_number
from fused_tp.triton_kernels.comm import protocol
from tests.native_build import cpu_device_library

_core = pytest.importorskip("fused_tp._core")

ONE_SHOT, TWO_SHOT, MULTIMEM = range(3)
PAD = 16  # elements around what `placed` gives


@cache
def kernels() -> Any:
    """The `_core.DeviceKernels` of the CPU build."""
    return _core.DeviceKernels(str(cpu_device_library()))


class Rank:
    """One rank's workspace, and the ops on it with tensors in place of addresses."""

    def __init__(self, rank: int, memories: Sequence[Tensor], timeout_seconds: float, multicast: bool) -> None:
        self.rank = rank
        self.world = len(memories)
        self.addresses = torch.tensor([memory.data_ptr() for memory in memories])
        self.state = torch.zeros(protocol.COUNTERS, dtype=torch.int64)
        self.error = torch.zeros(protocol.ERROR_WORDS, dtype=torch.int64)
        half_bytes = memories[rank].nbytes // 2 // protocol.DATA_ALIGNMENT * protocol.DATA_ALIGNMENT
        pointers = self.addresses.data_ptr(), self.state.data_ptr(), self.error.data_ptr()
        self.workspace = _core.DeviceWorkspace(
            *pointers, half_bytes, int(timeout_seconds * 1e9), int(multicast), rank, self.world
        )

    def barrier(self) -> None:
        kernels().barrier(self.workspace, 0)

    def all_reduce(
        self, x: Tensor, out: Tensor, *, algorithm: int = ONE_SHOT, bias: Tensor | None = None, blocks: int = 2
    ) -> None:
        sizes = x.numel(), dtype_number(x.dtype), _bias(bias)
        kernels().all_reduce(self.workspace, algorithm, x.data_ptr(), out.data_ptr(), *sizes, blocks, 0)

    def reduce_scatter(
        self, x: Tensor, out: Tensor, chunk: int, *, bias: Tensor | None = None, blocks: int = 2
    ) -> None:
        sizes = x.numel(), chunk, dtype_number(x.dtype), _bias(bias)
        kernels().reduce_scatter(self.workspace, x.data_ptr(), out.data_ptr(), *sizes, blocks, 0)

    def all_gather(self, x: Tensor, out: Tensor, chunk: int, *, blocks: int = 2) -> None:
        """`chunk` in elements."""
        sizes = out.nbytes, chunk * out.element_size()
        kernels().all_gather(self.workspace, x.data_ptr(), out.data_ptr(), *sizes, blocks, 0)

    def all_to_all(self, x: Tensor, out: Tensor, layout: Sequence[int], *, blocks: int = 2) -> None:
        kernels().all_to_all(self.workspace, x.data_ptr(), out.data_ptr(), tuple(layout), blocks, 0)

    def all_reduce_rms_norm(
        self,
        partial: Tensor,
        residual: Tensor,
        weight: Tensor,
        normed: Tensor,
        new_residual: Tensor,
        *,
        eps: float,
        algorithm: int = ONE_SHOT,
        blocks: int = 2,
    ) -> None:
        addresses = [tensor.data_ptr() for tensor in (residual, weight, normed, new_residual)]
        norm = (*addresses, *partial.shape, eps)
        dtype = dtype_number(partial.dtype)
        kernels().all_reduce_rms_norm(self.workspace, algorithm, partial.data_ptr(), norm, dtype, blocks, 0)


class Ranks:
    """All ranks of a group. `run` calls a function on each, in threads of their own."""

    def __init__(
        self, world: int, *, workspace_bytes: int = 1 << 20, timeout_seconds: float = 20.0, multicast: bool = True
    ) -> None:
        memories = [aligned_bytes(workspace_bytes, 128).zero_() for _ in range(world)]
        self.memories = memories
        self.ranks = [Rank(rank, memories, timeout_seconds, multicast) for rank in range(world)]

    def run(self, function: Callable[[Rank], Any], *, only: Sequence[int] | None = None) -> list[Any]:
        """function(rank) on every rank, or on some; their results in order."""
        chosen = [self.ranks[rank] for rank in (range(len(self.ranks)) if only is None else only)]
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


def placed(values: Tensor, offset: int) -> Tensor:
    """The same values, `offset` elements behind a multiple of 16 bytes, between guards that `guards_hold` checks."""
    size = values.element_size()
    whole = aligned_bytes((values.numel() + offset + 2 * PAD) * size, 16).fill_(0xA5).view(values.dtype)
    tensor = whole[PAD + offset :][: values.numel()].view(values.shape)
    return tensor.copy_(values)


def guards_hold(tensor: Tensor) -> bool:
    """Whether nothing beside a tensor of `placed` has been written."""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    pad = PAD * tensor.element_size()
    start = tensor.data_ptr() - storage.data_ptr()
    before, after = storage[start - pad : start], storage[start + tensor.nbytes :][:pad]
    return bool((before == 0xA5).all() and (after == 0xA5).all())


def _bias(bias: Tensor | None) -> tuple[int, int]:
    return (0, 1) if bias is None else (bias.data_ptr(), bias.numel())
