"""What an op asks of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

from torch import Tensor

from fused_tp.transport.base import Pending

# x [..., K] and w [N, K], for x @ w^T. In backward `w` is a transposed view, which costs nothing.
Product: TypeAlias = tuple[Tensor, Tensor]


class Schedule(Protocol):
    """One way to run the ops over one group.

    Dims that are gathered or scattered are given as 0 <= dim < x.ndim - 1. `gather_size` None means that all shards are
    equally long. `meanwhile` is work the caller has anyway, which the schedule does while bytes move; it is called
    exactly once.
    """

    name: str

    def several(self, op: str) -> AbstractContextManager[object]:
        """Around calls that make one op together. What one rank raises between them gives the group up, and its peers
        hear of it, wherever they could take its next call for the one that they wait in."""
        ...

    def all_gather(self, x_shard: Tensor, *, gather_dim: int, gather_size: int | None) -> Pending[Tensor]:
        """Start gathering the shards along `gather_dim` (here any dim)."""
        ...

    def reduce_scatter(self, partial: Tensor, *, scatter_dim: int) -> Tensor:
        """This rank's slice along `scatter_dim` (here any dim) of the sum of `partial` over ranks."""
        ...

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum of `partial` over ranks, in memory of its own."""
        ...

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
        ...

    def matmul_reduce_scatter(
        self,
        products: Sequence[Product],
        bias: Tensor | None,
        *,
        scatter_dim: int,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        """This rank's slice along `scatter_dim` of the sum of all `products` over ranks, plus `bias`."""
        ...

    def matmul_all_reduce(
        self, products: Sequence[Product], bias: Tensor | None, *, meanwhile: Callable[[], None] | None = None
    ) -> Tensor:
        """The sum of all `products` over ranks, plus `bias`; the same bits on every rank."""
        ...

    def all_reduce_rms_norm(
        self, partial: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(new_residual) * norm_weight, new_residual) for new_residual = residual + sum of `partial`."""
        ...

    def matmul_all_reduce_rms_norm(
        self, x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """`all_reduce_rms_norm` of `x @ weight^T`."""
        ...
