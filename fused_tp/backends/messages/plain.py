"""Schedule `plain`: compute, then one collective. The baseline without overlap, and the fastest on small shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from math import prod

import torch
from torch import Tensor

from fused_tp.backends.gemm import Product, sum_of_products
from fused_tp.backends.grouped import GroupedProduct
from fused_tp.backends.messages.torch_dist import TorchDist
from fused_tp.backends.schedule import DimShards, OverlappedWork, RowSchedule
from fused_tp.core.pending import Pending, PendingCall


class PlainSchedule(RowSchedule):
    """Implements the ops of one group by compute, followed by a torch.distributed collective.

    `overlapped_work`, such as the weight gradient, runs while the collective is in flight.
    """

    name = "plain"

    def __init__(self, transport: TorchDist) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.world_size = transport.world_size

    @property
    def messages(self) -> TorchDist:
        return self.transport

    def abort_scope(self, op: str) -> AbstractContextManager[object]:
        return self.transport.abort_scope(op)

    def _gather(self, x_shard: Tensor, dim_shards: DimShards) -> Pending[Tensor]:
        return gather_blocks(x_shard, dim_shards, lambda flat: self.transport.all_gather("all_gather", flat))

    def _sum_partial(self, partial: Tensor) -> Tensor:
        x = partial.contiguous()
        if x is partial and self.transport.reduces_in_place:
            x = x.clone()
        with self.transport.abort_scope("all_reduce"):
            return self.transport.all_reduce("all_reduce", x).wait()

    def _sum_rows(self, rows: Tensor, dim_shards: DimShards) -> Tensor:
        with self.transport.abort_scope("reduce_scatter"):
            return self.transport.reduce_scatter("reduce_scatter", rows.view(-1), dim_shards.row_counts).wait()

    def _matmul_reduce_scatter(
        self, products: Sequence[Product], dim_shards: DimShards, bias: Tensor | None, overlapped_work: OverlappedWork
    ) -> Tensor:
        with self.transport.abort_scope("matmul_reduce_scatter"):
            partial = sum_of_products(products)
            pending = self.transport.reduce_scatter("matmul_reduce_scatter", partial, dim_shards.row_counts, bias)
            if overlapped_work is not None:
                overlapped_work()
            return pending.wait()

    def _matmul_all_reduce(
        self, products: Sequence[Product], bias: Tensor | None, overlapped_work: OverlappedWork
    ) -> Tensor:
        with self.transport.abort_scope("matmul_all_reduce"):
            pending = self.transport.all_reduce("matmul_all_reduce", sum_of_products(products), bias)
            if overlapped_work is not None:
                overlapped_work()
            return pending.wait()

    def grouped_matmul_reduce_scatter(
        self, product: GroupedProduct, shape: Sequence[int], *, scatter_dim: int, overlapped_work: OverlappedWork = None
    ) -> Tensor:
        dim_shards = DimShards.from_shape((*shape, product.shape[1]), scatter_dim, self.world_size)
        self.check("grouped_matmul_reduce_scatter", (*dim_shards.shape, scatter_dim), product.x)
        if not dim_shards.is_rank_major:
            product = product.reorder_tokens(dim_shards.rank_major_indices(product.x.device))
        return self._grouped_scatter(product, dim_shards, overlapped_work).view(dim_shards.shard_shapes[self.rank])

    def grouped_matmul_all_reduce(self, product: GroupedProduct, *, overlapped_work: OverlappedWork = None) -> Tensor:
        self.check("grouped_matmul_all_reduce", product.shape, product.x)
        return self._grouped_sum(product, overlapped_work)

    def _grouped_scatter(
        self, product: GroupedProduct, dim_shards: DimShards, overlapped_work: OverlappedWork
    ) -> Tensor:
        op = "grouped_matmul_reduce_scatter"
        with self.transport.abort_scope(op):
            pending = self.transport.reduce_scatter(op, product.sum(), dim_shards.row_counts)
            if overlapped_work is not None:
                overlapped_work()
            return pending.wait()

    def _grouped_sum(self, product: GroupedProduct, overlapped_work: OverlappedWork) -> Tensor:
        with self.transport.abort_scope("grouped_matmul_all_reduce"):
            pending = self.transport.all_reduce("grouped_matmul_all_reduce", product.sum())
            if overlapped_work is not None:
                overlapped_work()
            return pending.wait()

    def check(self, op: str, dims: Sequence[float], x: Tensor) -> None:
        self.transport.check(op, dims, x.dtype, x.device)


def gather_blocks(
    x_shard: Tensor, dim_shards: DimShards, start_gather: Callable[[Tensor], Pending[Tensor]]
) -> Pending[Tensor]:
    """Start gathering the shards by `start_gather`, which gathers blocks [n] of equal length to [W * n]."""
    shape, sizes, max_size = dim_shards.shape, dim_shards.sizes, max(dim_shards.sizes)
    # All ranks must send blocks of equal length, so `x_shard` is padded to the longest shard.
    elements_per_index = prod(shape[: dim_shards.dim]) * prod(shape[dim_shards.dim + 1 :])
    flat = x_shard.contiguous().view(-1)  # not reshape(-1), which may keep strides that NCCL rejects, such as 0
    if flat.numel() < elements_per_index * max_size:
        flat = torch.nn.functional.pad(flat, (0, elements_per_index * max_size - flat.numel()))
    pending = start_gather(flat)

    def finish() -> Tensor:
        gathered = pending.wait()
        if dim_shards.is_rank_major or prod(shape) == 0:
            return gathered[: prod(shape)].view(shape)
        blocks = gathered.view(len(sizes), -1)
        return dim_shards.join_shards(
            [block[: elements_per_index * size] for block, size in zip(blocks, sizes, strict=True)]
        )

    return PendingCall(finish)
