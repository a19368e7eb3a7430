"""The plain schedule: compute, then one collective. What overlap is measured against, and what wins on small shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from math import prod

import torch
from torch import Tensor

from fused_tp.runtime.partition import shard_sizes
from fused_tp.schedules.base import Schedule
from fused_tp.schedules.gemm import Product, sum_of_products
from fused_tp.schedules.layout import from_rank_major, gathered_shape, gathered_sizes, row_sizes, to_rank_major
from fused_tp.transport.base import After, Pending
from fused_tp.transport.torch_dist import TorchDist


class Plain(Schedule):
    """Every op over one group as compute followed by a torch.distributed collective.

    `meanwhile` still runs while the collective is under way: a gradient that needs nothing from the peers is free.
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

    # -- movements of whole tensors -----------------------------------------------------------------------------------

    def all_gather(self, x_shard: Tensor, *, gather_dim: int, gather_size: int | None) -> Pending[Tensor]:
        sizes = gathered_sizes(x_shard, gather_dim, gather_size, self.world_size)
        shape = gathered_shape(x_shard, gather_dim, sizes)
        self._check("all_gather", (*shape, gather_dim), x_shard)
        return gather_blocks(x_shard, gather_dim, sizes, lambda flat: self.transport.all_gather("all_gather", flat))

    def reduce_scatter(self, partial: Tensor, *, scatter_dim: int) -> Tensor:
        self._check("reduce_scatter", (*partial.shape, scatter_dim), partial)
        sizes = shard_sizes(partial.shape[scatter_dim], self.world_size)
        last = partial.unsqueeze(-1)  # so that `scatter_dim` is never the last dim
        rows = to_rank_major(last, scatter_dim, sizes)
        shape = list(partial.shape)
        shape[scatter_dim] = sizes[self.rank]
        counts = row_sizes(last.shape, scatter_dim, sizes)
        with self.transport.abort_scope("reduce_scatter"):
            return self.transport.reduce_scatter("reduce_scatter", rows.view(-1), counts).wait().view(shape)

    def all_reduce(self, partial: Tensor) -> Tensor:
        self._check("all_reduce", partial.shape, partial)
        x = partial.contiguous()
        if x is partial and self.transport.reduces_in_place:
            x = x.clone()
        with self.transport.abort_scope("all_reduce"):
            return self.transport.all_reduce("all_reduce", x).wait()

    # -- matmuls ------------------------------------------------------------------------------------------------------

    def matmul_reduce_scatter(
        self,
        products: Sequence[Product],
        bias: Tensor | None,
        *,
        scatter_dim: int,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        rows, counts, shape = self._scattered_rows(products, scatter_dim)
        with self.transport.abort_scope("matmul_reduce_scatter"):
            moving = self.transport.reduce_scatter("matmul_reduce_scatter", sum_of_products(rows), counts, bias)
            if meanwhile is not None:
                meanwhile()
            return moving.wait().view(shape)

    def matmul_all_reduce(
        self, products: Sequence[Product], bias: Tensor | None, *, meanwhile: Callable[[], None] | None = None
    ) -> Tensor:
        x, w = products[0]
        self._check("matmul_all_reduce", (*x.shape[:-1], w.shape[0]), x)
        with self.transport.abort_scope("matmul_all_reduce"):
            moving = self.transport.all_reduce("matmul_all_reduce", sum_of_products(products), bias)
            if meanwhile is not None:
                meanwhile()
            return moving.wait()

    # -- shared with the pipelined schedule ---------------------------------------------------------------------------

    def _scattered_rows(
        self, products: Sequence[Product], scatter_dim: int
    ) -> tuple[list[Product], list[int], list[int]]:
        """The products on rank-major rows, how many rows each rank gets, and the shape of this rank's result."""
        x, w = products[0]
        shape = [*x.shape[:-1], w.shape[0]]
        self._check("matmul_reduce_scatter", (*shape, scatter_dim), x)
        sizes = shard_sizes(shape[scatter_dim], self.world_size)
        rows = [(to_rank_major(x, scatter_dim, sizes), w) for x, w in products]
        counts = row_sizes(shape, scatter_dim, sizes)
        shape[scatter_dim] = sizes[self.rank]
        return rows, counts, shape

    def _check(self, op: str, dims: Sequence[int], x: Tensor) -> None:
        self.transport.check(op, dims, x.dtype, x.device)


class KernelSchedule(Schedule):
    """Base of the schedules of kernels: what they have no kernel for goes by plain collectives.

    Args:
        plain: of the group; None for ranks that are threads, which have nothing that could.
        without: why such ranks cannot run what has no kernel, in a sentence.
    """

    def __init__(self, plain: Plain | None, without: str) -> None:
        self._plain = plain
        self._transport = None if plain is None else plain.transport
        self._without = without

    @property
    def fallback(self) -> Plain:
        """What runs the calls that have no kernel.

        Raises:
            ValueError: the ranks are threads.
        """
        if self._plain is None:
            raise ValueError(self._without)
        return self._plain

    @property
    def messages(self) -> TorchDist:
        return self.fallback.transport

    def reduce_scatter(self, partial: Tensor, *, scatter_dim: int) -> Tensor:
        return self.fallback.reduce_scatter(partial, scatter_dim=scatter_dim)

    def all_reduce(self, partial: Tensor) -> Tensor:
        return self.fallback.all_reduce(partial)


def gather_blocks(
    x_shard: Tensor, gather_dim: int, sizes: Sequence[int], move: Callable[[Tensor], Pending[Tensor]]
) -> Pending[Tensor]:
    """The shards along `gather_dim`, `sizes` of them, by `move`: from everyone's block [n] to [W * n], for one n."""
    shape = gathered_shape(x_shard, gather_dim, sizes)
    # The ranks' blocks are equally long on the wire: `x_shard` padded to the longest shard.
    block = prod(shape[:gather_dim]) * max(sizes) * prod(shape[gather_dim + 1 :])
    flat = x_shard.contiguous().view(-1)  # reshape(-1) may leave strides, also 0, which NCCL refuses
    if flat.numel() < block:
        flat = torch.nn.functional.pad(flat, (0, block - flat.numel()))
    moving = move(flat)

    def finish() -> Tensor:
        gathered = moving.wait()
        if prod(shape[:gather_dim]) == 1 or prod(shape) == 0:
            return gathered[: prod(shape)].view(shape)
        per_index = block // max(sizes) if block else 0
        blocks = gathered.view(len(sizes), -1)
        return from_rank_major([b[: per_index * n] for b, n in zip(blocks, sizes, strict=True)], shape, gather_dim)

    return After(finish)
