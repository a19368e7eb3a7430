"""Schedule `local`: the ops of a group of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from torch import Tensor

from fused_tp.backends.gemm import Product, linear, sum_of_products
from fused_tp.backends.schedule import GatherMatmul, OverlappedWork, Schedule
from fused_tp.core.pending import Pending, PendingValue

if TYPE_CHECKING:
    from fused_tp.backends.messages.torch_dist import TorchDist


class LocalSchedule(Schedule):
    """Implements the ops for a group of one rank, without communication."""

    name = "local"
    rank = 0
    world_size = 1

    @property
    def messages(self) -> TorchDist:
        raise ValueError("A group of one rank has no message transport.")

    def abort_scope(self, op: str) -> AbstractContextManager[object]:
        return nullcontext()

    def all_gather(self, x_shard: Tensor, *, gather_dim: int, gather_size: int | None) -> Pending[Tensor]:
        return PendingValue(x_shard)

    def reduce_scatter(self, partial: Tensor, *, scatter_dim: int) -> Tensor:
        return partial.clone()

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial.clone()

    def all_to_all(self, rows: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> Tensor:
        return rows

    def all_gather_matmul(self, request: GatherMatmul) -> tuple[list[Tensor], Tensor | None]:
        x, weights, biases, _, _, return_gathered = request
        return [linear(x, w, b) for w, b in zip(weights, biases, strict=True)], x.clone() if return_gathered else None

    def matmul_reduce_scatter(
        self,
        products: Sequence[Product],
        bias: Tensor | None,
        *,
        scatter_dim: int,
        overlapped_work: OverlappedWork = None,
    ) -> Tensor:
        return self.matmul_all_reduce(products, bias, overlapped_work=overlapped_work)

    def matmul_all_reduce(
        self, products: Sequence[Product], bias: Tensor | None, *, overlapped_work: OverlappedWork = None
    ) -> Tensor:
        out = sum_of_products(products, bias)
        if overlapped_work is not None:
            overlapped_work()
        return out


LOCAL_SCHEDULE = LocalSchedule()
