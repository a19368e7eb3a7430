"""CPU shared memory: ranks multiply out of and into memory that all of them see, so that little or nothing is copied.

- all_gather_matmul: every rank writes its shard into one gathered x, which all ranks then multiply where it lies.
- matmul_reduce_scatter: the partial result is multiplied straight into shared memory; the owner of rows sums them out
  of all ranks' partials.
- matmul_all_reduce: the same, and the partial results become the sum where they lie: they are what is returned.

Rejected, by measurement: multiplying one peer's rows after the other (the library packs the weight anew for every
call: 1.02x to 1.15x of one matmul), and letting the matmul accumulate onto the peer's partial (saves one read of it,
costs the same packing).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from math import prod
from typing import Any
from weakref import WeakSet

from torch import Tensor

from fused_tp.runtime.errors import FusedTPError, raised_midway
from fused_tp.runtime.partition import shard_sizes
from fused_tp.schedules.base import Schedule, add_rms_norm
from fused_tp.schedules.gemm import Product, linear, sum_of_products
from fused_tp.schedules.layout import as_rows, gathered_shape, gathered_sizes, rank_offsets, row_sizes, to_rank_major
from fused_tp.transport.base import After, Pending
from fused_tp.transport.shm import ShmTransport, Workspace, dtype_number, folded
from fused_tp.transport.torch_dist import TorchDist

with suppress(ImportError):  # where it is not built no group shares memory, and this schedule is never made
    from fused_tp import _core

# Below this many bytes of result the native all-reduce, which chunks for the cache, beats a call of several steps.
_DIRECT_BYTES = 1 << 20
_MAX_DESCRIBED = 1024


class SharedMemory(Schedule):
    """Every op over one group of ranks that share memory."""

    name = "one_sided"

    def __init__(self, transport: ShmTransport) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.world_size = transport.world_size
        self._core_group = transport.core_group
        self._described: dict[Any, tuple[int, Any]] = {}  # of sums, by shape and dtype
        self._gathers: WeakSet[Workspace] = WeakSet()  # under way

    @property
    def messages(self) -> TorchDist:
        raise ValueError("Ranks that share memory send no messages; ask for `transport`, what they share.")

    @contextmanager
    def abort_scope(self, op: str) -> Iterator[None]:
        core_group = self.transport.core_group
        before = core_group.calls
        try:
            yield
        except BaseException as error:
            if core_group.calls != before and not isinstance(error, FusedTPError):
                core_group.give_up(f"{op} {raised_midway(error)}")
            # Whoever keeps an exception keeps what it has interrupted, and 16 calls later peers wait for its end.
            for workspace in list(self._gathers):
                workspace.abandon()
            raise

    # -- movements of whole tensors -----------------------------------------------------------------------------------

    def all_gather(self, x_shard: Tensor, *, gather_dim: int, gather_size: int | None) -> Pending[Tensor]:
        shape, sizes = self._gathered_shape(x_shard, gather_dim, gather_size)
        dims = (*folded(shape), gather_dim)
        workspace = self.transport.begin("all_gather", dims, x_shard.dtype, x_shard.nbytes)
        with ExitStack() as on_error:  # an error here must not leave the call open
            on_error.push(workspace)
            workspace.buffer(self.rank, x_shard.shape, x_shard.dtype).copy_(x_shard)
            workspace.signal(1)
            on_error.pop_all()
        self._gathers.add(workspace)

        def finish() -> Tensor:
            self._gathers.discard(workspace)
            with workspace:
                out = x_shard.new_empty(shape)
                for rank, (offset, size) in enumerate(zip(rank_offsets(sizes), sizes, strict=True)):
                    part = out.narrow(gather_dim, offset, size)
                    if rank == self.rank:
                        part.copy_(x_shard)
                    else:
                        workspace.wait(rank, 1)
                        part.copy_(workspace.buffer(rank, part.shape, out.dtype))
            return out

        return After(finish)

    def reduce_scatter(self, partial: Tensor, *, scatter_dim: int) -> Tensor:
        sizes = shard_sizes(partial.shape[scatter_dim], self.world_size)
        shape = list(partial.shape)
        shape[scatter_dim] = sizes[self.rank]
        last = partial.unsqueeze(-1)  # so that `scatter_dim` is never the last dim
        rows = to_rank_major(last, scatter_dim, sizes)
        counts = row_sizes(last.shape, scatter_dim, sizes)
        return self.transport.reduce_scatter(rows, counts, shape=partial.shape).view(shape)

    def all_reduce(self, partial: Tensor) -> Tensor:
        return self.transport.all_reduce(partial.contiguous())

    def all_to_all(self, rows: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> Tensor:
        return self.transport.all_to_all(rows, send_sizes, recv_sizes)

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
        shape, sizes = self._gathered_shape(x_shard, gather_dim, gather_size)
        dims = (*folded(shape), gather_dim)
        host = 0  # one rank's workspace holds the gathered x; the pages lie where the rank that writes them runs
        nbytes = prod(shape) * x_shard.dtype.itemsize if self.rank == host else 0
        with self.transport.begin("all_gather_matmul", dims, x_shard.dtype, nbytes) as workspace:
            x = workspace.buffer(host, shape, x_shard.dtype)
            x.narrow(gather_dim, rank_offsets(sizes)[self.rank], sizes[self.rank]).copy_(x_shard)
            workspace.signal(1)
            workspace.wait_all(1)
            outputs = [linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
            gathered = x.clone() if return_gathered else None
        return outputs, gathered

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
        sizes = shard_sizes(shape[scatter_dim], self.world_size)
        rows = [(to_rank_major(x, scatter_dim, sizes), w) for x, w in products]
        counts = row_sizes(shape, scatter_dim, sizes)
        dims = (*folded(shape), scatter_dim)
        with self.transport.begin("matmul_reduce_scatter", dims, x.dtype, prod(shape) * x.dtype.itemsize) as workspace:
            self._partial(workspace, rows, bias, meanwhile)
            shape[scatter_dim] = sizes[self.rank]
            out = self.transport.empty(shape, x.dtype)
            self._sum_rows(workspace, rank_offsets(counts)[self.rank], counts[self.rank], out)
        return out

    def matmul_all_reduce(
        self, products: Sequence[Product], bias: Tensor | None, *, meanwhile: Callable[[], None] | None = None
    ) -> Tensor:
        x, w = products[0]
        own_bias = bias if self.rank == 0 else None
        # Few steps for decoding, which is here token after token: see ops/op.py.
        if x.shape[:-1].numel() * w.shape[0] * x.dtype.itemsize < _DIRECT_BYTES:
            y = linear(x, w, own_bias) if len(products) == 1 else sum_of_products(products, own_bias)
            if meanwhile is not None:
                meanwhile()
            described = self._described.get((y.shape, y.dtype))
            if described is None:
                described = self.transport.described("matmul_all_reduce", y.dtype, y.shape)
                if len(self._described) >= _MAX_DESCRIBED:  # lengths that keep changing
                    self._described.clear()
                self._described[y.shape, y.dtype] = described
            address = y.data_ptr()
            _core.all_reduce(self._core_group, address, address, *described)
            return y
        return self.transport.all_reduce_of(
            "matmul_all_reduce",
            [*x.shape[:-1], w.shape[0]],
            x.dtype,
            lambda y: sum_of_products(products, own_bias, out=as_rows(y)),
            meanwhile,
        )

    def all_reduce_rms_norm(
        self, partial: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if not partial.dtype == residual.dtype == norm_weight.dtype:
            return add_rms_norm(self.all_reduce(partial), residual, norm_weight, eps)
        return self.transport.all_reduce_rms_norm(
            partial.contiguous(), residual.contiguous(), norm_weight.contiguous(), eps
        )

    def matmul_all_reduce_rms_norm(
        self, x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return self.all_reduce_rms_norm(linear(x, weight), residual, norm_weight, eps)

    # -- parts --------------------------------------------------------------------------------------------------------

    def _gathered_shape(self, x_shard: Tensor, gather_dim: int, gather_size: int | None) -> tuple[list[int], list[int]]:
        sizes = gathered_sizes(x_shard, gather_dim, gather_size, self.world_size)
        return gathered_shape(x_shard, gather_dim, sizes), sizes

    def _partial(
        self,
        workspace: Workspace,
        products: Sequence[Product],
        bias: Tensor | None,
        meanwhile: Callable[[], None] | None,
    ) -> None:
        """Multiply into this rank's workspace and wait until all ranks have. Rank 0's term carries the bias."""
        x, w = products[0]
        partial = workspace.buffer(self.rank, (prod(x.shape[:-1]), w.shape[0]), x.dtype)
        sum_of_products(products, bias if self.rank == 0 else None, out=partial)
        workspace.signal(1)
        if meanwhile is not None:
            meanwhile()
        workspace.wait_all(1)

    def _sum_rows(self, workspace: Workspace, start: int, count: int, out: Tensor) -> None:
        """out = sum over ranks of rows [start, start + count) of their workspaces."""
        n = out.shape[-1]
        if count * n == 0:
            return
        offset = start * n * out.dtype.itemsize
        sources = [workspace.address(rank) + offset for rank in range(self.world_size)]
        # The rows lie one behind the other: they are summed as one long row.
        _core.sum_arrays(out.data_ptr(), sources, count * n, dtype_number(out.dtype))
