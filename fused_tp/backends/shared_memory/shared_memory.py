"""Schedule `one_sided`: matmuls read from and write to CPU memory that all ranks map, with few or no copies.

- all_gather_matmul: every rank writes its shard into one gathered x, which all ranks multiply in place.
- matmul_reduce_scatter: the matmul writes its partial result into shared memory; the owner of rows sums them from all
  ranks' partial results.
- matmul_all_reduce: as in matmul_reduce_scatter, but partial results are summed in place, and that memory is returned.

Rejected after measurement: multiplying peers' rows one peer at a time (the library packs the weight again in every
call: 1.02x to 1.15x of one matmul), and letting the matmul accumulate onto the peer's partial result (saves one read of
it, at the cost of the same packing).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from fused_tp.backends.gemm import Product, linear, sum_of_products
from fused_tp.backends.grouped import GroupedProduct
from fused_tp.backends.messages.torch_dist import TorchDist
from fused_tp.backends.schedule import DimShards, GatherMatmul, OverlappedWork, RowSchedule, T, add_rms_norm
from fused_tp.backends.shared_memory.shm import ShmCall, ShmTransport, dtype_number, fold_dims
from fused_tp.core.errors import FusedTPError, describe_midway_error
from fused_tp.core.native import core as _core
from fused_tp.core.pending import Pending, PendingCall

# For results smaller than this, the native all-reduce is faster than a call with several steps.
_MIN_STEPPED_BYTES = 1 << 20


class SharedMemorySchedule(RowSchedule):
    """Implements the ops of one group whose ranks share memory."""

    name = "one_sided"

    def __init__(self, transport: ShmTransport) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.world_size = transport.world_size
        self._gathers_in_flight: WeakSet[ShmCall] = WeakSet()

    @property
    def messages(self) -> TorchDist:
        raise ValueError("Schedule 'one_sided' has no message transport; use its `transport`, the shared memory.")

    @contextmanager
    def abort_scope(self, op: str) -> Iterator[None]:
        core_group, outer_calls_before = self.transport.core_group, self.transport.calls_before_op
        calls_before = core_group.calls
        self.transport.calls_before_op = calls_before if outer_calls_before is None else outer_calls_before
        try:
            yield
        except BaseException as error:
            if core_group.calls != calls_before and not isinstance(error, FusedTPError):
                core_group.give_up(f"{op} {describe_midway_error(error)}")
            # Abandon unfinished gathers now. A stored exception would keep them alive through its traceback, and after
            # 16 more calls peers would wait for their end until the deadline.
            for workspace in list(self._gathers_in_flight):
                workspace.abandon()
            raise
        finally:
            self.transport.calls_before_op = outer_calls_before

    # -- collectives -----------------------------------------------------------------------------------

    def _gather(self, x_shard: Tensor, dim_shards: DimShards) -> Pending[Tensor]:
        dims = (*fold_dims(dim_shards.shape), dim_shards.dim)
        workspace = self.transport.begin("all_gather", dims, x_shard.dtype, x_shard.nbytes)
        with ExitStack() as on_error:  # abandon the call if copying raises
            on_error.push(workspace)
            workspace.buffer(self.rank, x_shard.shape, x_shard.dtype).copy_(x_shard)
            workspace.signal(1)
            on_error.pop_all()
        self._gathers_in_flight.add(workspace)

        def finish() -> Tensor:
            self._gathers_in_flight.discard(workspace)
            with workspace:
                out = x_shard.new_empty(dim_shards.shape)
                for rank, shard in enumerate(out.split(dim_shards.sizes, dim_shards.dim)):
                    if rank == self.rank:
                        shard.copy_(x_shard)
                    else:
                        workspace.wait(rank, 1)
                        shard.copy_(workspace.buffer(rank, shard.shape, out.dtype))
            return out

        return PendingCall(finish)

    def _sum_partial(self, partial: Tensor) -> Tensor:
        return self.transport.all_reduce(partial.contiguous())

    all_reduce = _sum_partial  # no `check`, because the native core compares the calls of all ranks

    def all_to_all(self, rows: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> Tensor:
        return self.transport.all_to_all(rows.contiguous(), send_sizes, recv_sizes)

    # -- matmuls ------------------------------------------------------------------------------------------------------

    def _sum_rows(self, rows: Tensor, dim_shards: DimShards) -> Tensor:
        return self.transport.reduce_scatter(
            rows, dim_shards.row_counts, op_dims=(*dim_shards.shape[:-1], dim_shards.dim)
        )

    def apply_to_gathered(
        self, op: str, x_shard: Tensor, gather_dim: int, gather_size: int | None, use: Callable[[Tensor], T]
    ) -> T:
        dim_shards, dtype = DimShards.from_shard(x_shard.shape, gather_dim, gather_size, self.world_size), x_shard.dtype
        owner = 0  # the gathered x is in rank 0's workspace; each page is on the NUMA node of the rank that writes it
        nbytes = prod(dim_shards.shape) * dtype.itemsize if self.rank == owner else 0
        with self.transport.begin(op, (*fold_dims(dim_shards.shape), dim_shards.dim), dtype, nbytes) as workspace:
            x = workspace.buffer(owner, dim_shards.shape, dtype)
            x.narrow(dim_shards.dim, sum(dim_shards.sizes[: self.rank]), dim_shards.sizes[self.rank]).copy_(x_shard)
            workspace.signal(1)
            workspace.wait_all(1)
            return use(x)

    def all_gather_matmul(self, request: GatherMatmul) -> tuple[list[Tensor], Tensor | None]:
        x_shard, weights, biases, gather_dim, gather_size, return_gathered = request

        def multiply(x: Tensor) -> tuple[list[Tensor], Tensor | None]:
            outputs = []
            for w, b in zip(weights, biases, strict=True):
                outputs.append(linear(x, w, b))
            return outputs, x.clone() if return_gathered else None

        return self.apply_to_gathered("all_gather_matmul", x_shard, gather_dim, gather_size, multiply)

    def _matmul_reduce_scatter(
        self, products: Sequence[Product], dim_shards: DimShards, bias: Tensor | None, overlapped_work: OverlappedWork
    ) -> Tensor:
        op = "matmul_reduce_scatter" if bias is None else "matmul_reduce_scatter with bias"
        own_bias = bias if self.rank == 0 else None  # the bias must be added once, so only rank 0 adds it

        def write(partial: Tensor) -> object:
            return sum_of_products(products, own_bias, out=partial)

        return self._write_and_scatter(op, write, dim_shards, products[0][0].dtype, overlapped_work)

    def grouped_matmul_reduce_scatter(
        self, product: GroupedProduct, shape: Sequence[int], *, scatter_dim: int, overlapped_work: OverlappedWork = None
    ) -> Tensor:
        dim_shards = DimShards.from_shape((*shape, product.shape[1]), scatter_dim, self.world_size)
        if not dim_shards.is_rank_major:
            product = product.reorder_tokens(dim_shards.rank_major_indices(product.x.device))
        op, dtype, rows = "grouped_matmul_reduce_scatter", product.x.dtype, self._product_buffer(product)
        out = self._write_and_scatter(op, partial(product.sum, rows=rows), dim_shards, dtype, overlapped_work)
        return out.view(dim_shards.shard_shapes[self.rank])

    def _write_and_scatter(
        self,
        op: str,
        write: Callable[[Tensor], object],
        dim_shards: DimShards,
        dtype: torch.dtype,
        overlapped_work: OverlappedWork,
    ) -> Tensor:
        dims, n, row_counts = (
            (*fold_dims(dim_shards.shape), dim_shards.dim),
            dim_shards.shape[-1],
            dim_shards.row_counts,
        )
        with self.transport.begin(op, dims, dtype, prod(dim_shards.shape) * dtype.itemsize) as workspace:
            write(workspace.buffer(self.rank, (sum(row_counts), n), dtype))
            workspace.signal(1)
            if overlapped_work is not None:
                overlapped_work()
            workspace.wait_all(1)
            out = self.transport.empty((row_counts[self.rank], n), dtype)
            if out.numel():
                sources = workspace.addresses(self.world_size, dim_shards.row_starts[self.rank] * n * dtype.itemsize)
                # The rows are contiguous, so they are summed as one long row.
                _core.sum_arrays(out.data_ptr(), sources, out.numel(), dtype_number(dtype))
        return out

    def _product_buffer(self, product: GroupedProduct) -> Tensor:
        """Return memory for the product of each routed row, from the pool, whose pages are mapped already."""
        return self.transport.empty((len(product.x), product.shape[1]), product.x.dtype)

    def grouped_matmul_all_reduce(self, product: GroupedProduct, *, overlapped_work: OverlappedWork = None) -> Tensor:
        op, shape = "grouped_matmul_all_reduce", product.shape
        if prod(shape) * product.x.dtype.itemsize >= _MIN_STEPPED_BYTES:
            write = partial(product.sum, rows=self._product_buffer(product))
            return self.transport.write_and_all_reduce(op, shape, product.x.dtype, write, overlapped_work)
        y = product.sum()
        if overlapped_work is not None:
            overlapped_work()
        return self.transport.all_reduce(y, y, op)

    def matmul_all_reduce(
        self, products: Sequence[Product], bias: Tensor | None, *, overlapped_work: OverlappedWork = None
    ) -> Tensor:
        x, w = products[0]
        own_bias = bias if self.rank == 0 else None
        shape = torch.Size((*x.shape[:-1], w.shape[0]))
        if shape.numel() * x.dtype.itemsize < _MIN_STEPPED_BYTES:
            y = sum_of_products(products, own_bias)
            if overlapped_work is not None:
                overlapped_work()
            self.transport.all_reduce(y, y, "matmul_all_reduce" if bias is None else "matmul_all_reduce with bias")
            return y
        return self._matmul_all_reduce(products, bias, overlapped_work)

    def _matmul_all_reduce(
        self, products: Sequence[Product], bias: Tensor | None, overlapped_work: OverlappedWork
    ) -> Tensor:
        x, w = products[0]
        op, num_columns = "matmul_all_reduce" if bias is None else "matmul_all_reduce with bias", w.shape[0]

        def write(y: Tensor) -> None:
            sum_of_products(products, bias if self.rank == 0 else None, out=y.view(-1, num_columns))

        return self.transport.write_and_all_reduce(op, (*x.shape[:-1], num_columns), x.dtype, write, overlapped_work)

    def make_fast_call(self, op: str, args: Any) -> Callable[..., Any] | None:
        if op != "matmul_all_reduce":
            return None
        x, w, bias, _ = args
        shape = torch.Size((*x.shape[:-1], w.shape[0]))
        if shape.numel() * x.dtype.itemsize >= _MIN_STEPPED_BYTES:
            return None
        core_group, rank = self.transport.core_group, self.rank
        signature = self.transport.call_signature(op if bias is None else f"{op} with bias", x.dtype, shape)

        def call(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor | None:
            if bias is not None and not bias.data_ptr():  # only rank 0 reads the bias
                return None
            try:
                y = linear(x, w, bias if rank == 0 else None)
            except RuntimeError:  # out of memory, for example; the checks of the op report the cause
                return None
            address = y.data_ptr()
            _core.all_reduce(core_group, address, address, *signature)
            return y

        return call

    def all_reduce_rms_norm(
        self, partial: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if not partial.dtype == residual.dtype == norm_weight.dtype:
            total = self.transport.all_reduce(partial.contiguous(), op_name=f"all_reduce_rms_norm of eps {eps!r}")
            return add_rms_norm(total, residual, norm_weight, eps)
        return self.transport.all_reduce_rms_norm(
            partial.contiguous(), residual.contiguous(), norm_weight.contiguous(), eps
        )

    def matmul_all_reduce_rms_norm(
        self, x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return self.all_reduce_rms_norm(linear(x, weight), residual, norm_weight, eps)
