"""Interface between ops and schedules: primitives that move tensors, and matmuls fused with communication."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from fused_tp.backends.gemm import Product, as_rows, linear
from fused_tp.backends.grouped import GroupedProduct
from fused_tp.core.partition import shard_sizes
from fused_tp.core.pending import Pending, accumulate_dtype

if TYPE_CHECKING:
    from fused_tp.backends.messages.torch_dist import TorchDist

# A function of the caller, called exactly once, that a schedule overlaps with communication.
OverlappedWork: TypeAlias = Callable[[], None] | None
T = TypeVar("T")


class GatherMatmul(NamedTuple):
    """Arguments of `Schedule.all_gather_matmul`, which computes `gathered x @ w^T + b` for every weight.

    Attributes:
        gather_size: length of `gather_dim` in the gathered x; None: all shards are equally long.
        return_gathered: also return the gathered x.
    """

    x_shard: Tensor
    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    gather_dim: int
    gather_size: int | None = None
    return_gathered: bool = False


class Schedule(ABC):
    """Interface of schedules: implementations of the ops for one group.

    Dims to gather or scatter satisfy 0 <= dim < x.ndim - 1 (for ops without a matmul, any dim).

    Attributes:
        name: name of the schedule in `FUSED_TP_SCHEDULE`, the dispatch table and `explain`.
    """

    name: str
    rank: int
    world_size: int

    @property
    @abstractmethod
    def messages(self) -> TorchDist:
        """Transport of this schedule for asynchronous messages, such as `shift` and `all_to_all`.

        Raises:
            ValueError: this schedule has no message transport.
        """

    @abstractmethod
    def abort_scope(self, op: str) -> AbstractContextManager[object]:
        """Return a context manager around an op with several exchanges, which aborts the group if the op raises.

        After the first exchange, peers would mistake this rank's next call for the continuation of the op.
        """

    # -- primitives ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def all_gather(self, x_shard: Tensor, *, gather_dim: int, gather_size: int | None) -> Pending[Tensor]:
        """Start gathering the shards along `gather_dim`; see `GatherMatmul` for `gather_size`."""

    @abstractmethod
    def reduce_scatter(self, partial: Tensor, *, scatter_dim: int) -> Tensor:
        """Return the slice of this rank along `scatter_dim` of the sum of `partial` over ranks."""

    @abstractmethod
    def all_reduce(self, partial: Tensor) -> Tensor:
        """Return the sum of `partial` over ranks, in newly allocated memory."""

    def all_to_all(self, rows: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> Tensor:
        """Send the first send_sizes[0] rows to rank 0, the next send_sizes[1] to rank 1, and so on.

        Returns:
            The rows received, [sum(recv_sizes), ...], ordered by source rank.
        """
        return self.messages.all_to_all("all_to_all", rows.contiguous(), send_sizes, recv_sizes).wait()

    # -- matmuls ------------------------------------------------------------------------------------------------------

    def make_fast_call(self, op: str, args: Any) -> Callable[..., Any] | None:
        """Return a fast forward function of `op` for arguments of the shapes and dtypes of `args`; None if none.

        Decoding repeats one call, so work that is equal for every token is done once, in this method. The function
        receives the arguments except the group. It may return None before anything is sent. Without a function, or if
        it returns None, the op checks its arguments and calls the method of this class.
        """
        return None

    @abstractmethod
    def all_gather_matmul(self, request: GatherMatmul) -> tuple[list[Tensor], Tensor | None]:
        """Return `gathered x @ w^T + b` for every weight, and the gathered x if `request.return_gathered`."""

    @abstractmethod
    def matmul_reduce_scatter(
        self,
        products: Sequence[Product],
        bias: Tensor | None,
        *,
        scatter_dim: int,
        overlapped_work: OverlappedWork = None,
    ) -> Tensor:
        """Return the slice of this rank along `scatter_dim` of the sum of all `products` over ranks, plus `bias`."""

    @abstractmethod
    def matmul_all_reduce(
        self, products: Sequence[Product], bias: Tensor | None, *, overlapped_work: OverlappedWork = None
    ) -> Tensor:
        """Return the sum of all `products` over ranks, plus `bias`; the same bits on every rank."""

    def apply_to_gathered(
        self, op: str, x_shard: Tensor, gather_dim: int, gather_size: int, use: Callable[[Tensor], T]
    ) -> T:
        """Return `use(gathered x)`. `use` must not keep a reference to its input, which may be in shared memory."""
        with self.abort_scope(op):
            return use(self.all_gather(x_shard, gather_dim=gather_dim, gather_size=gather_size).wait())

    def grouped_matmul_reduce_scatter(
        self, product: GroupedProduct, shape: Sequence[int], *, scatter_dim: int, overlapped_work: OverlappedWork = None
    ) -> Tensor:
        """Return the slice of this rank along `scatter_dim` of `product` summed over ranks; tokens have `shape`."""
        with self.abort_scope("grouped_matmul_reduce_scatter"):
            partial = product.sum().view(*shape, product.shape[1])
            if overlapped_work is not None:
                overlapped_work()
            return self.reduce_scatter(partial, scatter_dim=scatter_dim)

    def grouped_matmul_all_reduce(self, product: GroupedProduct, *, overlapped_work: OverlappedWork = None) -> Tensor:
        """Return the sum of `product` over ranks; the same bits on every rank."""
        with self.abort_scope("grouped_matmul_all_reduce"):
            partial = product.sum()
            if overlapped_work is not None:
                overlapped_work()
            return self.all_reduce(partial)

    def all_reduce_rms_norm(
        self, partial: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return (rms_norm(new_residual) * norm_weight, new_residual), new_residual = residual + sum of `partial`."""
        return add_rms_norm(self.all_reduce(partial), residual, norm_weight, eps)

    def matmul_all_reduce_rms_norm(
        self, x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return `all_reduce_rms_norm` of `x @ weight^T`."""
        return add_rms_norm(self.matmul_all_reduce([(x, weight)], None), residual, norm_weight, eps)


class RowSchedule(Schedule):
    """Base of schedules that communicate rank-major rows (`DimShards`); subclasses implement one step per op.

    This class checks and reshapes the arguments of the steps, and reshapes their results.
    """

    def all_gather(self, x_shard: Tensor, *, gather_dim: int, gather_size: int | None) -> Pending[Tensor]:
        dim_shards = DimShards.from_shard(x_shard.shape, gather_dim, gather_size, self.world_size)
        if (fallback := self._fallback_for("all_gather", x_shard.dtype, dim_shards.shape)) is not None:
            return fallback.all_gather(x_shard, gather_dim=gather_dim, gather_size=gather_size)
        self.check("all_gather", (*dim_shards.shape, gather_dim), x_shard)
        return self._gather(x_shard, dim_shards)

    def reduce_scatter(self, partial: Tensor, *, scatter_dim: int) -> Tensor:
        # Append a dim, so that `scatter_dim` is never the last one.
        dim_shards = DimShards.from_shape((*partial.shape, 1), scatter_dim, self.world_size)
        if (fallback := self._fallback_for("reduce_scatter", partial.dtype, dim_shards.shape)) is not None:
            return fallback.reduce_scatter(partial, scatter_dim=scatter_dim)
        self.check("reduce_scatter", (*partial.shape, scatter_dim), partial)
        rows = dim_shards.to_rank_major(partial.unsqueeze(-1))
        return self._sum_rows(rows, dim_shards).view(dim_shards.shard_shapes[self.rank][:-1])

    def all_reduce(self, partial: Tensor) -> Tensor:
        if (fallback := self._fallback_for("all_reduce", partial.dtype, partial.shape)) is not None:
            return fallback.all_reduce(partial)
        self.check("all_reduce", partial.shape, partial)
        return self._sum_partial(partial)

    def all_gather_matmul(self, request: GatherMatmul) -> tuple[list[Tensor], Tensor | None]:
        x_shard, dim = request.x_shard, request.gather_dim
        dim_shards = DimShards.from_shard(x_shard.shape, dim, request.gather_size, self.world_size)
        if (fallback := self._fallback_for("all_gather_matmul", x_shard.dtype, dim_shards.shape)) is not None:
            return fallback.all_gather_matmul(request)
        self.check("all_gather_matmul", (*dim_shards.shape, dim), x_shard)
        return self._gather_matmul(request, dim_shards)

    def matmul_reduce_scatter(
        self,
        products: Sequence[Product],
        bias: Tensor | None,
        *,
        scatter_dim: int,
        overlapped_work: OverlappedWork = None,
    ) -> Tensor:
        x, w = products[0]
        dim_shards = DimShards.from_shape((*x.shape[:-1], w.shape[0]), scatter_dim, self.world_size)
        if (fallback := self._fallback_for("matmul_reduce_scatter", x.dtype, dim_shards.shape)) is not None:
            return fallback.matmul_reduce_scatter(
                products, bias, scatter_dim=scatter_dim, overlapped_work=overlapped_work
            )
        self.check("matmul_reduce_scatter", (*dim_shards.shape, scatter_dim, bias is not None), x)
        row_products = [(dim_shards.to_rank_major(x), w) for x, w in products]
        return self._matmul_reduce_scatter(row_products, dim_shards, bias, overlapped_work).view(
            dim_shards.shard_shapes[self.rank]
        )

    def matmul_all_reduce(
        self, products: Sequence[Product], bias: Tensor | None, *, overlapped_work: OverlappedWork = None
    ) -> Tensor:
        x, w = products[0]
        shape = (*x.shape[:-1], w.shape[0])
        if (fallback := self._fallback_for("matmul_all_reduce", x.dtype, shape)) is not None:
            return fallback.matmul_all_reduce(products, bias, overlapped_work=overlapped_work)
        self.check("matmul_all_reduce", (*shape, bias is not None), x)
        return self._matmul_all_reduce([(as_rows(x), w) for x, w in products], bias, overlapped_work).view(shape)

    def all_reduce_rms_norm(
        self, partial: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        self.check("all_reduce_rms_norm", (*partial.shape, eps), partial)
        return add_rms_norm(self._sum_partial(partial), residual, norm_weight, eps)

    def matmul_all_reduce_rms_norm(
        self, x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        self.check("matmul_all_reduce_rms_norm", (*residual.shape, eps), x)
        total = self._matmul_all_reduce([(as_rows(x), weight)], None, None)
        return add_rms_norm(total.view(residual.shape), residual, norm_weight, eps)

    # -- implemented by subclasses ------------------------------------------------------------------------------------

    def _fallback_for(self, op: str, dtype: torch.dtype, shape: Sequence[int]) -> Schedule | None:
        """Return the fallback schedule if this one does not support `op` in `dtype` and global `shape`; else None."""
        return None

    def check(self, op: str, dims: Sequence[float], x: Tensor) -> None:
        """Compare the call between ranks if FUSED_TP_CHECK=1. `dims`: sizes and other numbers that must be equal."""

    @abstractmethod
    def _gather(self, x_shard: Tensor, dim_shards: DimShards) -> Pending[Tensor]:
        """Implement `all_gather`; `dim_shards` is the sharding of the gathered x."""

    @abstractmethod
    def _sum_partial(self, partial: Tensor) -> Tensor:
        """Implement `all_reduce`."""

    def _gather_matmul(self, request: GatherMatmul, dim_shards: DimShards) -> tuple[list[Tensor], Tensor | None]:
        """Implement `all_gather_matmul`; `dim_shards` is the sharding of the gathered x."""
        with self.abort_scope("all_gather_matmul"):
            x = self.all_gather(request.x_shard, gather_dim=dim_shards.dim, gather_size=request.gather_size).wait()
            outputs = [linear(x, w, b) for w, b in zip(request.weights, request.biases, strict=True)]
            return outputs, x if request.return_gathered else None

    @abstractmethod
    def _sum_rows(self, rows: Tensor, dim_shards: DimShards) -> Tensor:
        """Return this rank's rows of the sum of rank-major `rows` [M, 1] over ranks."""

    @abstractmethod
    def _matmul_reduce_scatter(
        self, products: Sequence[Product], dim_shards: DimShards, bias: Tensor | None, overlapped_work: OverlappedWork
    ) -> Tensor:
        """Return this rank's rows of the sum of all `products`; `dim_shards` is the sharding of the sum."""

    @abstractmethod
    def _matmul_all_reduce(
        self, products: Sequence[Product], bias: Tensor | None, overlapped_work: OverlappedWork
    ) -> Tensor:
        """Return the sum [M, N] over ranks of all `products`, whose x is given as rows."""


# -- rank-major rows --------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class DimShards:
    """Sharding over the ranks of a dim of length G in a tensor [lead, G, trail, n].

    Rank-major rows [sum_r lead * G_r * trail, n] are all rows of rank 0, then all rows of rank 1, and so on; transports
    send rows in this order. If `lead` is 1, it is the order of the tensor itself, so nothing is copied. Otherwise the
    input of a matmul is reordered rather than its output, because it has fewer bytes.

    Attributes:
        shape: shape of the unsharded tensor.
        sizes: length of `dim` on each rank.
    """

    shape: tuple[int, ...]
    dim: int
    sizes: tuple[int, ...]

    # Cached, because calls of one shape repeat; a cache hit runs in C.
    @staticmethod
    @lru_cache(maxsize=1024)
    def from_shape(shape: tuple[int, ...], dim: int, world_size: int) -> DimShards:
        """Return the sharding of dim `dim` of a tensor of `shape` that torch.chunk produces."""
        return DimShards(shape, dim, tuple(shard_sizes(shape[dim], world_size)))

    @staticmethod
    @lru_cache(maxsize=1024)
    def from_shard(shard_shape: tuple[int, ...], dim: int, size: int | None, world_size: int) -> DimShards:
        """Return the sharding of the gathered tensor, from the shape of this rank's shard.

        `size` is the gathered length of `dim`; None: all shards have the same length.
        """
        sizes = [shard_shape[dim]] * world_size if size is None else shard_sizes(size, world_size)
        return DimShards((*shard_shape[:dim], sum(sizes), *shard_shape[dim + 1 :]), dim, tuple(sizes))

    @cached_property
    def is_rank_major(self) -> bool:
        """True if rank-major order is the order of the tensor itself."""
        return prod(self.shape[: self.dim]) == 1

    @cached_property
    def row_counts(self) -> tuple[int, ...]:
        """Number of rows of each rank (product of all dims except the last)."""
        rows_per_index = prod(self.shape[: self.dim]) * prod(self.shape[self.dim + 1 : -1])
        return tuple(rows_per_index * size for size in self.sizes)

    @cached_property
    def row_starts(self) -> tuple[int, ...]:
        """First rank-major row of each rank."""
        return tuple(rank_offsets(self.row_counts))

    @cached_property
    def shard_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each rank's shard."""
        return tuple((*self.shape[: self.dim], size, *self.shape[self.dim + 1 :]) for size in self.sizes)

    def to_rank_major(self, x: Tensor) -> Tensor:
        """Return `x` (this shape, except for the last dim k) as contiguous rank-major rows [M, k]."""
        if self.is_rank_major:
            return as_rows(x).contiguous()
        out = x.new_empty((prod(x.shape[:-1]), x.shape[-1]))
        for rows, part in zip(out.split(self.row_counts), x.split(self.sizes, self.dim), strict=True):
            rows.view(part.shape).copy_(part)
        return out

    def rank_major_indices(self, device: torch.device) -> Tensor:
        """Return [M]: the rank-major index of each row of the tensor."""
        rows = torch.arange(prod(self.shape[:-1]), device=device)
        indices = torch.empty_like(rows)
        indices[self.to_rank_major(rows.view(*self.shape[:-1], 1)).view(-1)] = rows
        return indices

    def join_shards(self, shards: Sequence[Tensor]) -> Tensor:
        """Join the ranks' contiguous shards, of any shape, to the unsharded tensor, which must not be empty."""
        lead, trail = self.shape[: self.dim], self.shape[self.dim + 1 :]
        return torch.cat([shard.view(*lead, -1, *trail) for shard in shards if shard.numel()], dim=self.dim)

    def from_rank_major(self, rows: Tensor) -> Tensor:
        """Return rank-major `rows` [M, n] as [*shape[:-1], n]; a copy if the dims before `dim` are longer than 1."""
        if self.is_rank_major or rows.numel() == 0:
            return rows.view(*self.shape[:-1], rows.shape[-1])
        return replace(self, shape=(*self.shape[:-1], rows.shape[-1])).join_shards(rows.split(self.row_counts))


def rank_offsets(sizes: Sequence[int]) -> list[int]:
    """Return the start of each rank's shard, from the sizes of the shards."""
    return [0, *accumulate(sizes)][:-1]


def add_rms_norm(total: Tensor, residual: Tensor, norm_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (new_residual / rms(new_residual) * norm_weight, new_residual) for new_residual = residual + total.

    The norm uses the rounded new_residual, which backward and the next layer also use. It is computed in float32
    (float64 for float64) and rounded once.
    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    new_residual = residual + total
    h = new_residual.to(accumulate_dtype(new_residual.dtype))
    scale = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return (h * scale * norm_weight).to(new_residual.dtype), new_residual
