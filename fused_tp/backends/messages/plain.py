"""The plain schedule: compute, then one collective. It is the baseline of overlap, and the fastest on small shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from math import prod

import torch
from torch import Tensor

from fused_tp.backends.gemm import Product, sum_of_products
from fused_tp.backends.grouped import GroupedProduct
from fused_tp.backends.messages.torch_dist import TorchDist
from fused_tp.backends.schedule import DimShards, RowSchedule, Work
from fused_tp.core.pending import After, Pending


class Plain(RowSchedule):
    """The ops of one group as compute followed by a torch.distributed collective.

    `meanwhile` runs while the collective is under way: a gradient that needs nothing from the peers is free.
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

    def _gather(self, x_shard: Tensor, cut: DimShards) -> Pending[Tensor]:
        return gather_blocks(x_shard, cut, lambda flat: self.transport.all_gather("all_gather", flat))

    def _all_reduced(self, partial: Tensor) -> Tensor:
        x = partial.contiguous()
        if x is partial and self.transport.reduces_in_place:
            x = x.clone()
        with self.transport.abort_scope("all_reduce"):
            return self.transport.all_reduce("all_reduce", x).wait()

    def _sum_rows(self, rows: Tensor, cut: DimShards) -> Tensor:
        with self.transport.abort_scope("reduce_scatter"):
            return self.transport.reduce_scatter("reduce_scatter", rows.view(-1), cut.counts).wait()

    def _matmul_scatter(
        self, products: Sequence[Product], cut: DimShards, bias: Tensor | None, meanwhile: Work
    ) -> Tensor:
        with self.transport.abort_scope("matmul_reduce_scatter"):
            partial = sum_of_products(products)
            moving = self.transport.reduce_scatter("matmul_reduce_scatter", partial, cut.counts, bias)
            if meanwhile is not None:
                meanwhile()
            return moving.wait()

    def _matmul_sum(self, products: Sequence[Product], bias: Tensor | None, meanwhile: Work) -> Tensor:
        with self.transport.abort_scope("matmul_all_reduce"):
            moving = self.transport.all_reduce("matmul_all_reduce", sum_of_products(products), bias)
            if meanwhile is not None:
                meanwhile()
            return moving.wait()

    def grouped_matmul_reduce_scatter(
        self, product: GroupedProduct, shape: Sequence[int], *, scatter_dim: int, meanwhile: Work = None
    ) -> Tensor:
        cut = DimShards.of((*shape, product.shape[1]), scatter_dim, self.world_size)
        self.check("grouped_matmul_reduce_scatter", (*cut.shape, scatter_dim), product.x)
        if not cut.in_order:
            product = product.in_order(cut.places(product.x.device))
        return self._grouped_scatter(product, cut, meanwhile).view(cut.shard_shapes[self.rank])

    def grouped_matmul_all_reduce(self, product: GroupedProduct, *, meanwhile: Work = None) -> Tensor:
        self.check("grouped_matmul_all_reduce", product.shape, product.x)
        return self._grouped_sum(product, meanwhile)

    def _grouped_scatter(self, product: GroupedProduct, cut: DimShards, meanwhile: Work) -> Tensor:
        op = "grouped_matmul_reduce_scatter"
        with self.transport.abort_scope(op):
            moving = self.transport.reduce_scatter(op, product.sum(), cut.counts)
            if meanwhile is not None:
                meanwhile()
            return moving.wait()

    def _grouped_sum(self, product: GroupedProduct, meanwhile: Work) -> Tensor:
        with self.transport.abort_scope("grouped_matmul_all_reduce"):
            moving = self.transport.all_reduce("grouped_matmul_all_reduce", product.sum())
            if meanwhile is not None:
                meanwhile()
            return moving.wait()

    def check(self, op: str, dims: Sequence[float], x: Tensor) -> None:
        self.transport.check(op, dims, x.dtype, x.device)


def gather_blocks(x_shard: Tensor, cut: DimShards, move: Callable[[Tensor], Pending[Tensor]]) -> Pending[Tensor]:
    """Gather the shards of `cut` by `move`, which gathers one equally long block [n] per rank to [W * n]."""
    shape, sizes, longest = cut.shape, cut.sizes, max(cut.sizes)
    # All ranks send equally long blocks: `x_shard` is padded to the longest shard.
    per_index = prod(shape[: cut.dim]) * prod(shape[cut.dim + 1 :])
    flat = x_shard.contiguous().view(-1)  # reshape(-1) may keep strides, also 0, which NCCL refuses
    if flat.numel() < per_index * longest:
        flat = torch.nn.functional.pad(flat, (0, per_index * longest - flat.numel()))
    moving = move(flat)

    def finish() -> Tensor:
        gathered = moving.wait()
        if cut.in_order or prod(shape) == 0:
            return gathered[: prod(shape)].view(shape)
        blocks = gathered.view(len(sizes), -1)
        return cut.joined([block[: per_index * size] for block, size in zip(blocks, sizes, strict=True)])

    return After(finish)
