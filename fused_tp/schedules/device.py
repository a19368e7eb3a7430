"""Schedules `one_shot`, `two_shot` and `multimem`: the library multiplies, one device kernel communicates.

They differ in how a sum gets to all ranks (`transport.device_plans.ALGORITHMS`). What follows the sum, a bias or the
residual and its RMS norm, is in the same kernel, so that the matmul's result is read once. Gathers, and sums that are
scattered, are the same in all three; with a norm behind it, a sum of `multimem` is one of `two_shot`. Dtypes that the
kernels do not add, and results without elements, go to plain collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from math import prod

import torch
from torch import Tensor

from fused_tp.runtime import settings
from fused_tp.runtime.partition import shard_sizes
from fused_tp.runtime.tracing import span
from fused_tp.schedules.base import add_rms_norm
from fused_tp.schedules.gemm import Product, linear, sum_of_products
from fused_tp.schedules.layout import from_rank_major, gathered_shape, gathered_sizes, row_sizes, to_rank_major
from fused_tp.schedules.plain import KernelSchedule, Plain
from fused_tp.schedules.side_stream import SideStream
from fused_tp.transport.base import After, Done, Pending
from fused_tp.transport.device_collectives import DeviceCollectives
from fused_tp.transport.device_plans import NORMED_ALGORITHMS, SUMMED_DTYPES
from fused_tp.transport.failure import abort_hook, abort_on_partial_failure, check_usable
from fused_tp.transport.symm_mem import KernelMemory, is_capturing


def device_collectives(memory: KernelMemory, plain: Plain | None) -> DeviceCollectives:
    """The device kernels of a group. Once they have failed, its plain collectives refuse too."""
    return DeviceCollectives(memory, abort_hook(None if plain is None else plain.transport))


class DeviceSchedule(KernelSchedule):
    """Every op over one group as matmuls of the library and one device kernel.

    Args:
        algorithm: of sums that all ranks get: "one_shot", "two_shot" or "multimem". It is the schedule's name, too.
        device: the group's kernels; all three schedules of a group may share them, and so their memory.
        plain: what runs the calls that have no kernel; None for ranks that are threads, which have nothing that could.
    """

    def __init__(self, algorithm: str, device: DeviceCollectives, plain: Plain | None) -> None:
        super().__init__(
            plain,
            "Ranks that are threads of one process have device kernels for float32, bfloat16 and float16 only, and "
            "nothing for empty tensors.",
        )
        self.name = algorithm
        self.device = device
        self.rank = device.rank
        self.world_size = device.world_size
        self._normed_by = algorithm if algorithm in NORMED_ALGORITHMS else "two_shot"
        self._side_stream = SideStream()
        self._gathers: torch.cuda.Stream | None = None

    def abort_scope(self, op: str) -> AbstractContextManager[object]:
        return abort_on_partial_failure(op, lambda: self.device.calls, self.device.abort, self._transport)

    # -- movements of whole tensors -----------------------------------------------------------------------------------

    def all_gather(self, x_shard: Tensor, *, gather_dim: int, gather_size: int | None) -> Pending[Tensor]:
        sizes = gathered_sizes(x_shard, gather_dim, gather_size, self.world_size)
        shape = gathered_shape(x_shard, gather_dim, sizes)
        if not _has_kernel(x_shard, shape):
            return self.fallback.all_gather(x_shard, gather_dim=gather_dim, gather_size=gather_size)
        self._check("all_gather", (*shape, gather_dim), x_shard)
        # Ops on two streams of a capture would have the workspace at once: there nothing orders them.
        if not x_shard.is_cuda or is_capturing(x_shard.device):
            return Done(self._gathered(x_shard, gather_dim, sizes, shape))
        return self._gathered_overlapped(x_shard, gather_dim, sizes, shape)

    def _gathered_overlapped(
        self, x_shard: Tensor, dim: int, sizes: Sequence[int], shape: Sequence[int]
    ) -> Pending[Tensor]:
        """On a stream of its own, which overlaps with what the caller launches next."""
        if self._gathers is None:
            self._gathers = self._side_stream.own_stream(x_shard.device)
        stream = self._gathers
        stream.wait_stream(torch.cuda.current_stream(x_shard.device))
        with torch.cuda.stream(stream):
            gathered = self._gathered(x_shard, dim, sizes, shape, overlapped=True)
        x_shard.record_stream(stream)

        def finish() -> Tensor:
            consumer = torch.cuda.current_stream(x_shard.device)
            consumer.wait_stream(stream)
            gathered.record_stream(consumer)
            return gathered

        return After(finish)

    def _gathered(
        self, x_shard: Tensor, dim: int, sizes: Sequence[int], shape: Sequence[int], *, overlapped: bool = False
    ) -> Tensor:
        others = prod(shape[:dim]) * prod(shape[dim + 1 :])
        with span("all_gather", x_shard, self.name):
            flat = self.device.all_gather(x_shard.reshape(-1), [size * others for size in sizes], overlapped=overlapped)
        if prod(shape[:dim]) == 1:
            return flat.view(shape)
        return from_rank_major(flat.split([size * others for size in sizes]), shape, dim)

    def reduce_scatter(self, partial: Tensor, *, scatter_dim: int) -> Tensor:
        if not _has_kernel(partial, partial.shape):
            return self.fallback.reduce_scatter(partial, scatter_dim=scatter_dim)
        self._check("reduce_scatter", (*partial.shape, scatter_dim), partial)
        sizes = shard_sizes(partial.shape[scatter_dim], self.world_size)
        shape = list(partial.shape)
        shape[scatter_dim] = sizes[self.rank]
        last = partial.unsqueeze(-1)  # so that `scatter_dim` is never the last dim
        rows = to_rank_major(last, scatter_dim, sizes)
        with span("reduce_scatter", partial, self.name):
            return self.device.reduce_scatter(rows, row_sizes(last.shape, scatter_dim, sizes)).view(shape)

    def all_reduce(self, partial: Tensor) -> Tensor:
        if not _has_kernel(partial, partial.shape):
            return self.fallback.all_reduce(partial)
        self._check("all_reduce", partial.shape, partial)
        with span("all_reduce", partial, self.name):
            return self.device.all_reduce(partial, self.name)

    # -- matmuls ------------------------------------------------------------------------------------------------------

    def all_gather_matmul(
        self,
        x_shard: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        *,
        gather_dim: int,
        gather_size: int | None,
        return_gathered: bool,
    ) -> tuple[list[Tensor], Tensor | None]:
        sizes = gathered_sizes(x_shard, gather_dim, gather_size, self.world_size)
        shape = gathered_shape(x_shard, gather_dim, sizes)
        if not _has_kernel(x_shard, shape):
            return self.fallback.all_gather_matmul(
                x_shard, weights, biases,
                gather_dim=gather_dim, gather_size=gather_size, return_gathered=return_gathered,
            )  # fmt: skip
        self._check("all_gather_matmul", (*shape, gather_dim), x_shard)
        x = self._gathered(x_shard, gather_dim, sizes, shape)
        with span("matmul", x, *weights):
            outputs = [linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
        return outputs, x if return_gathered else None

    def matmul_reduce_scatter(
        self,
        products: Sequence[Product],
        bias: Tensor | None,
        *,
        scatter_dim: int,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        x, w = products[0]
        shape = [*x.shape[:-1], w.shape[0]]
        if not _has_kernel(x, shape):
            return self.fallback.matmul_reduce_scatter(products, bias, scatter_dim=scatter_dim, meanwhile=meanwhile)
        self._check("matmul_reduce_scatter", (*shape, scatter_dim), x)
        sizes = shard_sizes(shape[scatter_dim], self.world_size)
        counts = row_sizes(shape, scatter_dim, sizes)
        with span("matmul", products):
            partial = sum_of_products([(to_rank_major(x, scatter_dim, sizes), w) for x, w in products])
        with self._side_stream(meanwhile, x.device), span("reduce_scatter", partial, self.name):
            # With `meanwhile` or without: that is each rank's own affair (a frozen weight has none), blocks are not.
            out = self.device.reduce_scatter(partial, counts, bias, overlapped=True)
        shape[scatter_dim] = sizes[self.rank]
        return out.view(shape)

    def matmul_all_reduce(
        self, products: Sequence[Product], bias: Tensor | None, *, meanwhile: Callable[[], None] | None = None
    ) -> Tensor:
        x, w = products[0]
        shape = (*x.shape[:-1], w.shape[0])
        if not _has_kernel(x, shape):
            return self.fallback.matmul_all_reduce(products, bias, meanwhile=meanwhile)
        self._check("matmul_all_reduce", shape, x)
        with span("matmul", products):
            partial = sum_of_products(products)
        with self._side_stream(meanwhile, x.device), span("all_reduce", partial, self.name):
            return self.device.all_reduce(partial, self.name, bias, out=partial, overlapped=True)  # as above

    def all_reduce_rms_norm(
        self, partial: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if not _has_kernel(partial, partial.shape):
            return self.fallback.all_reduce_rms_norm(partial, residual, norm_weight, eps)
        if not partial.dtype == residual.dtype == norm_weight.dtype:
            return add_rms_norm(self.all_reduce(partial), residual, norm_weight, eps)
        self._check("all_reduce_rms_norm", partial.shape, partial)
        return self._normed(partial, residual, norm_weight, eps)

    def matmul_all_reduce_rms_norm(
        self, x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        shape = (*x.shape[:-1], weight.shape[0])
        if not _has_kernel(x, shape):
            return self.fallback.matmul_all_reduce_rms_norm(x, weight, residual, norm_weight, eps)
        if not x.dtype == residual.dtype == norm_weight.dtype:
            return add_rms_norm(self.matmul_all_reduce([(x, weight)], None), residual, norm_weight, eps)
        self._check("matmul_all_reduce_rms_norm", shape, x)
        with span("matmul", x, weight):
            partial = linear(x, weight)
        return self._normed(partial, residual, norm_weight, eps)

    # -- parts --------------------------------------------------------------------------------------------------------

    def _normed(self, partial: Tensor, residual: Tensor, norm_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        with span("all_reduce_rms_norm", partial, self._normed_by):
            done = self.device.all_reduce_rms_norm(partial, residual, norm_weight, eps, self._normed_by)
        return done.normed, done.new_residual

    def _check(self, op: str, dims: Sequence[int], x: Tensor) -> None:
        """With FUSED_TP_CHECK=1 compares what the ranks are about to do, the margin too: blocks are counted by it."""
        check_usable(self._transport)
        if self._transport is not None and settings.check_ranks():
            self._transport.check(f"{op} ({self.name})", (*dims, settings.sm_margin()), x.dtype, x.device)


def _has_kernel(x: Tensor, shape: Sequence[int]) -> bool:
    """Whether a kernel takes what has the dtype of `x` and, over all ranks, this shape."""
    return x.dtype in SUMMED_DTYPES and prod(shape) > 0
