"""Schedules `one_shot`, `two_shot` and `multimem`: library matmuls, with one device kernel for the communication.

They differ in the all-reduce algorithm (`backends.cuda.device_plans.ALGORITHMS`). The kernel also adds the bias, or
adds the residual and computes the RMS norm, so that it reads the matmul's result only once. Gathers and reduce-scatters
are the same in all three schedules. `multimem` uses two_shot for sums that are followed by a norm. Dtypes that the
kernels do not support, and empty results, fall back to plain collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from fused_tp.backends.cuda.device_collectives import DeviceCollectives
from fused_tp.backends.cuda.device_plans import NORM_ALGORITHMS, SUMMED_DTYPES
from fused_tp.backends.gemm import Product, linear, sum_of_products
from fused_tp.backends.messages.plain import PlainSchedule
from fused_tp.backends.schedule import DimShards, GatherMatmul, OverlappedWork, Schedule
from fused_tp.backends.symmetric_memory.group_kernels import KernelSchedule
from fused_tp.backends.symmetric_memory.side_stream import SideStream
from fused_tp.backends.symmetric_memory.symm_mem import is_capturing
from fused_tp.core import settings
from fused_tp.core.pending import Pending, PendingValue
from fused_tp.core.tracing import span


class DeviceSchedule(KernelSchedule):
    """Implements the ops of one group by library matmuls, each preceded or followed by one device kernel.

    Args:
        algorithm: algorithm of all-reduces: "one_shot", "two_shot" or "multimem". It is also the schedule's name.
        collectives: collectives of the group; all schedules of the group may share this object and its memory.
        plain: fallback for calls without a kernel; None if the ranks are threads, which have no fallback.
    """

    def __init__(self, algorithm: str, collectives: DeviceCollectives, plain: PlainSchedule | None) -> None:
        super().__init__(
            collectives,
            plain,
            "If the ranks are threads of one process, device kernels support only non-empty tensors of float32, "
            "bfloat16 and float16.",
        )
        self.name = algorithm
        self.collectives = collectives
        self._norm_algorithm = algorithm if algorithm in NORM_ALGORITHMS else "two_shot"
        self._side_stream = SideStream()

    def _gather(self, x_shard: Tensor, dim_shards: DimShards) -> Pending[Tensor]:
        # Not on a side stream during capture: ops on two streams of a graph are unordered, so both could use the
        # workspace at the same time.
        if not x_shard.is_cuda or is_capturing(x_shard.device):
            return PendingValue(self._launch_gather(x_shard, dim_shards))
        return self._side_stream.start(x_shard, lambda: self._launch_gather(x_shard, dim_shards, is_overlapped=True))

    def _sum_partial(self, partial: Tensor) -> Tensor:
        with span("all_reduce", partial, self.name):
            return self.collectives.all_reduce(partial, self.name)

    def all_reduce_rms_norm(
        self, partial: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if (fallback := self._fallback_for("all_reduce_rms_norm", partial.dtype, partial.shape)) is not None:
            return fallback.all_reduce_rms_norm(partial, residual, norm_weight, eps)
        if not partial.dtype == residual.dtype == norm_weight.dtype:
            return super().all_reduce_rms_norm(partial, residual, norm_weight, eps)
        self.check("all_reduce_rms_norm", (*partial.shape, eps), partial)
        return self._reduce_and_normalize(partial, residual, norm_weight, eps)

    def matmul_all_reduce_rms_norm(
        self, x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        shape = (*x.shape[:-1], weight.shape[0])
        if (fallback := self._fallback_for("matmul_all_reduce_rms_norm", x.dtype, shape)) is not None:
            return fallback.matmul_all_reduce_rms_norm(x, weight, residual, norm_weight, eps)
        if not x.dtype == residual.dtype == norm_weight.dtype:
            return super().matmul_all_reduce_rms_norm(x, weight, residual, norm_weight, eps)
        self.check("matmul_all_reduce_rms_norm", (*shape, eps), x)
        with span("matmul", x, weight):
            partial = linear(x, weight)
        return self._reduce_and_normalize(partial, residual, norm_weight, eps)

    # -- steps of an op -----------------------------------------------------------------------------------------------

    def _fallback_for(self, op: str, dtype: torch.dtype, shape: Sequence[int]) -> Schedule | None:
        return None if dtype in SUMMED_DTYPES and prod(shape) > 0 else self.fallback

    def check(self, op: str, dims: Sequence[float], x: Tensor) -> None:
        """Compare the call between ranks, including FUSED_TP_SM_MARGIN, because it determines the number of blocks."""
        if self._transport is None:
            return
        self._kernels.raise_if_messages_failed()
        if settings.check_ranks():
            self._transport.check(f"{op} ({self.name})", (*dims, settings.sm_margin()), x.dtype, x.device)

    def _gather_matmul(self, request: GatherMatmul, dim_shards: DimShards) -> tuple[list[Tensor], Tensor | None]:
        x = self._launch_gather(request.x_shard, dim_shards)
        with span("matmul", x, *request.weights):
            outputs = [linear(x, w, b) for w, b in zip(request.weights, request.biases, strict=True)]
        return outputs, x if request.return_gathered else None

    def _launch_gather(self, x_shard: Tensor, dim_shards: DimShards, *, is_overlapped: bool = False) -> Tensor:
        elements_per_index = prod(dim_shards.shape[: dim_shards.dim]) * prod(dim_shards.shape[dim_shards.dim + 1 :])
        counts = [size * elements_per_index for size in dim_shards.sizes]
        with span("all_gather", x_shard, self.name):
            flat = self.collectives.all_gather(x_shard.reshape(-1), counts, is_overlapped=is_overlapped)
        return flat.view(dim_shards.shape) if dim_shards.is_rank_major else dim_shards.join_shards(flat.split(counts))

    def _sum_rows(self, rows: Tensor, dim_shards: DimShards) -> Tensor:
        with span("reduce_scatter", rows, self.name):
            return self.collectives.reduce_scatter(rows, dim_shards.row_counts)

    def _matmul_reduce_scatter(
        self, products: Sequence[Product], dim_shards: DimShards, bias: Tensor | None, overlapped_work: OverlappedWork
    ) -> Tensor:
        with span("matmul", products):
            partial = sum_of_products(products)
        with self._side_stream(overlapped_work, partial.device), span("reduce_scatter", partial, self.name):
            # Overlapped even without `overlapped_work`: the number of blocks must be equal on all ranks, and
            # `overlapped_work` may be None on some ranks only (for example if a weight is frozen there).
            return self.collectives.reduce_scatter(partial, dim_shards.row_counts, bias, is_overlapped=True)

    def _matmul_all_reduce(
        self, products: Sequence[Product], bias: Tensor | None, overlapped_work: OverlappedWork
    ) -> Tensor:
        with span("matmul", products):
            partial = sum_of_products(products)
        with self._side_stream(overlapped_work, partial.device), span("all_reduce", partial, self.name):
            # Always overlapped, as in `_matmul_reduce_scatter`.
            return self.collectives.all_reduce(partial, self.name, bias, out=partial, is_overlapped=True)

    def _reduce_and_normalize(
        self, partial: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        with span("all_reduce_rms_norm", partial, self._norm_algorithm):
            return self.collectives.all_reduce_rms_norm(partial, residual, norm_weight, eps, self._norm_algorithm)
