"""What an op asks of a schedule: a few primitives that move tensors, and matmuls with their communication."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from fused_tp.schedules.gemm import Product, linear
from fused_tp.transport.base import Pending, accumulate_dtype
from fused_tp.transport.torch_dist import TorchDist


class Schedule(ABC):
    """One way to run the ops over one group.

    Dims that are gathered or scattered are given as 0 <= dim < x.ndim - 1 (any dim where there is no matmul).
    `gather_size` None means that all shards are equally long. `meanwhile` is work the caller has anyway, which the
    schedule does while bytes move; it is called exactly once.

    Attributes:
        name: as `FUSED_TP_SCHEDULE`, the dispatch table and `explain` say it.
    """

    name: str
    rank: int
    world_size: int

    @property
    @abstractmethod
    def messages(self) -> TorchDist:
        """The transport by which this schedule sends messages: `shift`, `all_to_all` and the like, asynchronously.

        Raises:
            ValueError: it has none.
        """

    @abstractmethod
    def abort_scope(self, op: str) -> AbstractContextManager[object]:
        """Scope of one multi-call op. An exception raised inside, after the first exchange, aborts the group and
        notifies peers, which could not tell this rank's next call from the one they wait for."""

    # -- primitives ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def all_gather(self, x_shard: Tensor, *, gather_dim: int, gather_size: int | None) -> Pending[Tensor]:
        """Start gathering the shards along `gather_dim`."""

    @abstractmethod
    def reduce_scatter(self, partial: Tensor, *, scatter_dim: int) -> Tensor:
        """This rank's slice along `scatter_dim` of the sum of `partial` over ranks."""

    @abstractmethod
    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum of `partial` over ranks, in memory of its own."""

    def all_to_all(self, rows: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> Tensor:
        """Rows [sum(send_sizes), ...] go to the ranks in turn; returns the rows received, by source rank."""
        return self.messages.all_to_all("all_to_all", rows, send_sizes, recv_sizes).wait()

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
        """`gathered x @ w^T + b` for every weight, and the gathered x where asked for."""
        with self.abort_scope("all_gather_matmul"):
            x = self.all_gather(x_shard, gather_dim=gather_dim, gather_size=gather_size).wait()
            outputs = [linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
            return outputs, x if return_gathered else None

    @abstractmethod
    def matmul_reduce_scatter(
        self,
        products: Sequence[Product],
        bias: Tensor | None,
        *,
        scatter_dim: int,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        """This rank's slice along `scatter_dim` of the sum of all `products` over ranks, plus `bias`."""

    @abstractmethod
    def matmul_all_reduce(
        self, products: Sequence[Product], bias: Tensor | None, *, meanwhile: Callable[[], None] | None = None
    ) -> Tensor:
        """The sum of all `products` over ranks, plus `bias`; the same bits on every rank."""

    def all_reduce_rms_norm(
        self, partial: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(new_residual) * norm_weight, new_residual) for new_residual = residual + sum of `partial`."""
        return add_rms_norm(self.all_reduce(partial), residual, norm_weight, eps)

    def matmul_all_reduce_rms_norm(
        self, x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """`all_reduce_rms_norm` of `x @ weight^T`."""
        return add_rms_norm(self.matmul_all_reduce([(x, weight)], None), residual, norm_weight, eps)


def add_rms_norm(total: Tensor, residual: Tensor, norm_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed, new_residual) for new_residual = residual + total, normed = new_residual / rms(new_residual) * weight.

    The norm is taken of the rounded new_residual, because that is what backward has and what the next layer sees. It is
    computed in float32 (float64 for float64) and rounded once.
    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    new_residual = residual + total
    h = new_residual.to(accumulate_dtype(new_residual.dtype))
    scale = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return (h * scale * norm_weight).to(new_residual.dtype), new_residual
