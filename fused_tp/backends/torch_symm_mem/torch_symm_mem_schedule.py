"""Schedule `symm_mem`: torch's own ops over symmetric memory (`torch.ops.symm_mem`), with our autograd and checks.

    operation                torch's op                             sum over ranks
    all_gather_matmul        fused_all_gather_matmul                none
    matmul_reduce_scatter    fused_matmul_reduce_scatter            of terms in their dtype by torch.sum: in float32,
                                                                    rounded once, in an order torch chooses by shape
    all_gather               _low_contention_all_gather             none
    reduce_scatter           _low_contention_reduce_scatter         as matmul_reduce_scatter
    all_reduce, and          multimem_all_reduce_                   in the switch, in float32, rounded once
    matmul_all_reduce:       multimem_one_shot_all_reduce           the same; two ranks, where the order has no effect
    a matmul into            one_shot_all_reduce                    in rank order; bfloat16 is rounded at every addition
    symmetric memory, then   two_shot_all_reduce_                   the same

An all-reduce returns the same bits on all ranks, and in every run unless the switch adds. A bias is added to the
rounded sum.

A call falls back to plain collectives if no torch op supports it: the rows are not divisible by the number of ranks, a
rank's part is not a multiple of 16 bytes, an all-reduce has a dtype other than float32 and bfloat16, a tensor is empty,
or some rank has too little memory. All ranks know each of these conditions, so they make the same choice. torch's own
alignment checks are weaker: they accept a gather of 8 bytes from each of two ranks, which its kernel writes with
16-byte stores.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fused_tp.backends.gemm import Product, as_rows, sum_of_products
from fused_tp.backends.messages.plain import PlainSchedule, gather_blocks
from fused_tp.backends.schedule import DimShards, GatherMatmul, OverlappedWork
from fused_tp.backends.symmetric_memory.group_kernels import KernelSchedule
from fused_tp.backends.symmetric_memory.side_stream import SideStream
from fused_tp.backends.symmetric_memory.symm_mem import is_capturing
from fused_tp.backends.torch_symm_mem.torch_symm_mem import TorchSymmMem
from fused_tp.core.pending import Pending, PendingValue
from fused_tp.core.tracing import span

SUMMED_DTYPES = (torch.float32, torch.bfloat16)  # dtypes that torch's symmetric-memory all-reduces support
ALIGNMENT_BYTES = 16
ONE_SHOT_BYTES = 256 << 10  # as in torch's own intra-node all-reduce; larger sums use other ops


class TorchSymmMemSchedule(KernelSchedule):
    """Implements the ops of one group by torch's symm_mem ops; other calls fall back to plain collectives.

    Args:
        symm_mem: the group's ops and memory.
        plain: schedule of the calls that no torch op supports.
    """

    name = "symm_mem"

    def __init__(self, symm_mem: TorchSymmMem, plain: PlainSchedule) -> None:
        super().__init__(symm_mem, plain, "")
        self.symm_mem = symm_mem
        self._side_stream = SideStream()

    # -- gathers ------------------------------------------------------------------------------------------------------

    def _gather(self, x_shard: Tensor, dim_shards: DimShards) -> Pending[Tensor]:
        if (
            "_low_contention_all_gather" not in self.symm_mem.ops
            or not self._is_even(dim_shards, x_shard.nbytes)
            or not self.symm_mem.reserve_memory("all_gather", workspace_bytes=x_shard.nbytes)
        ):
            return self.fallback._gather(x_shard, dim_shards)
        # During a capture, ops on two streams are unordered, so both could use the workspace at the same time.
        if not x_shard.is_cuda or is_capturing(x_shard.device):
            return PendingValue(self._launch_gather(x_shard, dim_shards))
        return self._side_stream.start(x_shard, lambda: self._launch_gather(x_shard, dim_shards))

    def _launch_gather(self, x_shard: Tensor, dim_shards: DimShards) -> Tensor:
        gather = self.symm_mem.ops["_low_contention_all_gather"]

        def gather_flat(flat: Tensor) -> Pending[Tensor]:
            with self.symm_mem.op_scope(), span("all_gather", flat, self.name):
                return PendingValue(_wait_for_result(gather(flat, self.symm_mem.name)))

        return gather_blocks(x_shard, dim_shards, gather_flat).wait()

    def _gather_matmul(self, request: GatherMatmul, dim_shards: DimShards) -> tuple[list[Tensor], Tensor | None]:
        rows = as_rows(request.x_shard).contiguous()
        # With multicast, torch gathers all of x in the workspace; otherwise it only stores a shard there.
        max_bytes = rows.nbytes * self.world_size
        if not self._is_even(dim_shards, rows.nbytes) or not self.symm_mem.reserve_memory(
            "all_gather_matmul", workspace_bytes=max_bytes
        ):
            return self.fallback._gather_matmul(request, dim_shards)
        transposed_weights = [w.t() for w in request.weights]
        with self.symm_mem.op_scope(), span("all_gather_matmul", rows, *request.weights, self.name):
            gathered, outputs = self.symm_mem.ops["fused_all_gather_matmul"](
                rows, transposed_weights, 0, self.symm_mem.name, return_A=request.return_gathered
            )
        for y, bias in zip(outputs, request.biases, strict=True):
            if bias is not None:
                y.add_(bias)
        return [dim_shards.from_rank_major(y) for y in outputs], dim_shards.from_rank_major(
            gathered
        ) if request.return_gathered else None

    # -- reduce-scatters ----------------------------------------------------------------------------------------------

    def _sum_rows(self, rows: Tensor, dim_shards: DimShards) -> Tensor:
        scatter = self.symm_mem.ops.get("_low_contention_reduce_scatter")
        if (
            scatter is None
            or not rows.is_floating_point()
            or not self._is_even(dim_shards, rows.nbytes // self.world_size)
            or not self.symm_mem.reserve_memory("reduce_scatter", workspace_bytes=rows.nbytes)
        ):
            return self.fallback._sum_rows(rows, dim_shards)
        with self.symm_mem.op_scope(), span("reduce_scatter", rows, self.name):
            return _wait_for_result(scatter(rows.view(self.world_size, -1), "sum", self.symm_mem.name)).view(-1, 1)

    def _matmul_reduce_scatter(
        self, products: Sequence[Product], dim_shards: DimShards, bias: Tensor | None, overlapped_work: OverlappedWork
    ) -> Tensor:
        (x, w), *other_products = products
        part_bytes = x.shape[0] // self.world_size * w.shape[0] * x.element_size()
        if not self._is_even(dim_shards, part_bytes) or not self.symm_mem.reserve_memory(
            "matmul_reduce_scatter", workspace_bytes=2 * part_bytes
        ):
            return self.fallback._matmul_reduce_scatter(products, dim_shards, bias, overlapped_work)
        if other_products:  # torch's op does not sum products: concatenate their features into one product
            x, w = (torch.cat([product[operand] for product in products], dim=-1) for operand in (0, 1))
        with self.symm_mem.op_scope(), span("matmul_reduce_scatter", x, w, self.name):
            total: Tensor = self.symm_mem.ops["fused_matmul_reduce_scatter"](x, w.t(), "sum", 0, self.symm_mem.name)
        if overlapped_work is not None:
            overlapped_work()  # not on a side stream, where it would compete with torch's matmuls
        return total if bias is None else total.add_(bias)

    # -- all-reduces --------------------------------------------------------------------------------------------------

    def _sum_partial(self, partial: Tensor) -> Tensor:
        if not self._reserve_for_sum("all_reduce", partial.dtype, partial.nbytes):
            return self.fallback._sum_partial(partial)
        with self.symm_mem.op_scope(), span("all_reduce", partial, self.name):
            term = self.symm_mem.summand(partial.shape, partial.dtype)
            term.copy_(partial)
            return self._sum_term(term)

    def _matmul_all_reduce(
        self, products: Sequence[Product], bias: Tensor | None, overlapped_work: OverlappedWork
    ) -> Tensor:
        x, w = products[0]
        shape = torch.Size((x.shape[0], w.shape[0]))
        nbytes = shape.numel() * x.element_size()
        if not self._reserve_for_sum("matmul_all_reduce", x.dtype, nbytes):
            return self.fallback._matmul_all_reduce(products, bias, overlapped_work)
        with self.symm_mem.op_scope():
            term = self.symm_mem.summand(shape, x.dtype)
            with span("matmul", products):
                sum_of_products(products, out=term)
            with self._side_stream(overlapped_work, x.device), span("all_reduce", term, self.name):
                total = self._sum_term(term)
        return total if bias is None else total.add_(bias)

    def _sum_term(self, term: Tensor) -> Tensor:
        """Return the sum of `term` over ranks. `term` is in symmetric memory; the result is not."""
        name, is_in_place = self._algorithm(term.nbytes, term.dtype)
        total: Tensor = self.symm_mem.ops[name](term, "sum", self.symm_mem.name)
        return term.clone() if is_in_place else total

    def _algorithm(self, nbytes: int, dtype: torch.dtype) -> tuple[str, bool]:
        """Return (name of the op that sums this many bytes, True if it sums in place)."""
        is_small = nbytes <= ONE_SHOT_BYTES
        if self.symm_mem.has_multicast:
            # Each rank reads the whole sum from the switch, whose order of three or more terms may vary by rank.
            if is_small and self.world_size == 2 and "multimem_one_shot_all_reduce" in self.symm_mem.ops:
                return "multimem_one_shot_all_reduce", False
            if (not is_small or dtype != torch.float32) and "multimem_all_reduce_" in self.symm_mem.ops:
                return "multimem_all_reduce_", True
        return ("one_shot_all_reduce", False) if is_small else ("two_shot_all_reduce_", True)

    # -- limits of torch's ops ----------------------------------------------------------------------------------------

    def _is_even(self, dim_shards: DimShards, nbytes: int) -> bool:
        """True if all ranks' shards are equal and their size, `nbytes`, is a positive multiple of `ALIGNMENT_BYTES`."""
        return len(set(dim_shards.sizes)) == 1 and nbytes > 0 and nbytes % ALIGNMENT_BYTES == 0

    def _reserve_for_sum(self, op: str, dtype: torch.dtype, nbytes: int) -> bool:
        """Allocate the memory of an all-reduce if needed. True if it exists and one of torch's ops supports the sum."""
        is_supported = dtype in SUMMED_DTYPES and nbytes > 0 and nbytes % ALIGNMENT_BYTES == 0
        return is_supported and self.symm_mem.reserve_memory(op, sum_bytes=nbytes)


def _wait_for_result(result: Tensor) -> Tensor:
    """Make the current stream wait for `result` of one of torch's asynchronous ops, and return it."""
    arrived: Tensor = torch.ops._c10d_functional.wait_tensor(result)
    return arrived
