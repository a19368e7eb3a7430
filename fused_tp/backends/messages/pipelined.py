"""Schedule `pipelined`: over torch.distributed, one chunk is transferred while the next is computed.

Gathers work shard by shard: this rank's shard is multiplied first, then that of rank - 1, then that of rank - 2, ...
Sums are split along N: each chunk of columns is sent as soon as it is computed. Splitting along M instead would make a
CPU matmul re-pack the full weight for every chunk (1.15x to 2.3x of the run time; along N 1.01x to 1.1x).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from fused_tp.backends.gemm import Product, as_rows, linear, sum_of_products
from fused_tp.backends.grouped import GroupedProduct
from fused_tp.backends.messages.plain import PlainSchedule
from fused_tp.backends.schedule import DimShards, GatherMatmul, OverlappedWork
from fused_tp.core.partition import shard_range
from fused_tp.core.pending import Pending
from fused_tp.core.tracing import span

CHUNK_BYTES = 512 * 1024  # smallest chunk; for smaller ones latency exceeds the time that overlap saves
MAX_CHUNKS = 4
ComputeColumns: TypeAlias = Callable[[int, int], Tensor]  # computes columns [start, stop) of the partial result


class PipelinedSchedule(PlainSchedule):
    """Implements the ops of one group, with compute and torch.distributed transfers interleaved chunk by chunk."""

    name = "pipelined"

    def _gather_matmul(self, request: GatherMatmul, dim_shards: DimShards) -> tuple[list[Tensor], Tensor | None]:
        with self.transport.abort_scope("all_gather_matmul"):
            x_shard = request.x_shard.contiguous()
            # If all dims before the gathered one are 1, shards arrive in place; otherwise each in a separate buffer.
            gathered = x_shard.new_empty(dim_shards.shape) if dim_shards.is_rank_major else None
            pending_shards = [
                self._start_shift(x_shard, gathered, dim_shards, step) for step in range(1, self.world_size)
            ]
            outputs = [x_shard.new_empty((*dim_shards.shape[:-1], w.shape[0])) for w in request.weights]
            output_shards = [output.split(dim_shards.sizes, dim_shards.dim) for output in outputs]
            shards = [x_shard] * self.world_size
            for step in range(self.world_size):
                source = (self.rank - step) % self.world_size
                shard = shards[source] = pending_shards[step - 1].wait() if step else x_shard
                with span("chunk of rank", source, shard):
                    for output_shard, w, b in zip(output_shards, request.weights, request.biases, strict=True):
                        _linear_into(output_shard[source], shard, w, b)
            if not request.return_gathered:
                return outputs, None
            if gathered is None:
                return outputs, dim_shards.join_shards(shards) if prod(dim_shards.shape) else x_shard.new_empty(
                    dim_shards.shape
                )
            gathered.split(dim_shards.sizes, dim_shards.dim)[self.rank].copy_(x_shard)
            return outputs, gathered

    def _matmul_reduce_scatter(
        self, products: Sequence[Product], dim_shards: DimShards, bias: Tensor | None, overlapped_work: OverlappedWork
    ) -> Tensor:
        def compute_columns(start: int, stop: int) -> Tensor:
            return sum_of_products([(x, w[start:stop]) for x, w in products])

        return self._scatter_columns(
            "matmul_reduce_scatter", compute_columns, dim_shards, products[0][0], bias, overlapped_work
        )

    def _grouped_scatter(
        self, product: GroupedProduct, dim_shards: DimShards, overlapped_work: OverlappedWork
    ) -> Tensor:
        def compute_columns(start: int, stop: int) -> Tensor:
            return product.columns(start, stop).sum()

        return self._scatter_columns(
            "grouped_matmul_reduce_scatter", compute_columns, dim_shards, product.x, None, overlapped_work
        )

    def _scatter_columns(
        self,
        op: str,
        compute_columns: ComputeColumns,
        dim_shards: DimShards,
        x: Tensor,
        bias: Tensor | None,
        overlapped_work: OverlappedWork,
    ) -> Tensor:
        counts = dim_shards.row_counts
        with self.transport.abort_scope(op):
            pending: list[Pending[Tensor]] = []
            for start, stop in self._column_chunks(sum(counts), dim_shards.shape[-1], x):
                with span("chunk of columns", (start, stop)):
                    chunk_bias = None if bias is None else bias[start:stop]
                    pending.append(self.transport.reduce_scatter(op, compute_columns(start, stop), counts, chunk_bias))
            if overlapped_work is not None:
                overlapped_work()
            return _concatenate_columns([chunk.wait() for chunk in pending])

    def _matmul_all_reduce(
        self, products: Sequence[Product], bias: Tensor | None, overlapped_work: OverlappedWork
    ) -> Tensor:
        x, w = products[0]

        def compute_columns(start: int, stop: int) -> Tensor:
            return sum_of_products([(x, w[start:stop]) for x, w in products])

        return self._sum_columns(
            "matmul_all_reduce", compute_columns, (x.shape[0], w.shape[0]), x, bias, overlapped_work
        )

    def _grouped_sum(self, product: GroupedProduct, overlapped_work: OverlappedWork) -> Tensor:
        def compute_columns(start: int, stop: int) -> Tensor:
            return product.columns(start, stop).sum()

        return self._sum_columns(
            "grouped_matmul_all_reduce", compute_columns, product.shape, product.x, None, overlapped_work
        )

    def _sum_columns(
        self,
        op: str,
        compute_columns: ComputeColumns,
        shape: tuple[int, int],
        x: Tensor,
        bias: Tensor | None,
        overlapped_work: OverlappedWork,
    ) -> Tensor:
        with self.transport.abort_scope(op):
            first_steps: list[Pending[Pending[Tensor]]] = []
            second_steps: list[Pending[Tensor]] = []
            for start, stop in self._column_chunks(*shape, x):
                with span("chunk of columns", (start, stop)):
                    chunk_bias = None if bias is None else bias[start:stop]
                    first_steps.append(self.transport.all_reduce_steps(op, compute_columns(start, stop), chunk_bias))
                    if len(first_steps) > 1:
                        # The first step of the previous chunk has overlapped with a matmul; now start its second step.
                        second_steps.append(first_steps[-2].wait())
            if overlapped_work is not None:
                overlapped_work()
            second_steps.append(first_steps[-1].wait())
            return _concatenate_columns([chunk.wait() for chunk in second_steps])

    def _start_shift(
        self, x_shard: Tensor, gathered: Tensor | None, dim_shards: DimShards, step: int
    ) -> Pending[Tensor]:
        """Start sending this rank's shard to rank + step and receiving the shard of rank - step."""
        source = (self.rank - step) % self.world_size
        if gathered is None:
            buffer = x_shard.new_empty(dim_shards.shard_shapes[source])
        else:
            buffer = gathered.split(dim_shards.sizes, dim_shards.dim)[source]
        return self.transport.shift("all_gather_matmul", x_shard, buffer, step)

    def _column_chunks(self, m: int, n: int, x: Tensor) -> list[tuple[int, int]]:
        """Return the chunks of N, from M, N and the dtype only: K is sharded and may differ between ranks."""
        num_chunks = min(MAX_CHUNKS, n, m * n * x.element_size() // CHUNK_BYTES)
        ranges = [shard_range(n, max(1, num_chunks), i) for i in range(max(1, num_chunks))]
        return [bounds for bounds in ranges if bounds[0] < bounds[1]] or [(0, n)]


def _linear_into(out: Tensor, x: Tensor, w: Tensor, b: Tensor | None) -> None:
    """Write x @ w^T + b to `out`, which may be strided."""
    if not out.is_contiguous():
        out.copy_(linear(x, w, b))
        return
    rows, out_rows = as_rows(x), as_rows(out)
    if b is None:
        torch.mm(rows, w.t(), out=out_rows)
    else:
        torch.addmm(b, rows, w.t(), out=out_rows)


def _concatenate_columns(chunks: Sequence[Tensor]) -> Tensor:
    return chunks[0] if len(chunks) == 1 else torch.cat(list(chunks), dim=-1)
