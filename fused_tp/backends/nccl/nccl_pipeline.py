"""Schedule `nccl_pipeline`: on the group's own NCCL communicator, one chunk is sent while the next is computed.

It requires only NCCL: ranks may be on several hosts, and GPUs need no access to each other's memory. No call waits for
data (the host waits for NCCL's launches, see backends/nccl/nccl.py), and every call can be captured in a CUDA graph. An
exception in the middle of an op aborts the group, because only some of the op's exchanges have started.

- all_gather_matmul: all exchanges are enqueued at once. This rank's rows are multiplied first, then those of rank - 1,
  rank - 2, ...
- matmul_reduce_scatter: rows of the farthest owner are multiplied first, and sent while the next rows are multiplied.
  This rank's rows are multiplied last, during the last exchange. Then the terms are added in rank order.
- matmul_all_reduce: in chunks of rows. Each rank sums a slice of every chunk, and the sums are gathered while the chunk
  after the next one is multiplied.

Matmuls are split along M, which costs a GPU little as long as chunks are large, and needs no copy of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fused_tp.backends.cuda.device_collectives import sum_into
from fused_tp.backends.gemm import Product, as_rows, sum_of_products
from fused_tp.backends.messages.plain import PlainSchedule
from fused_tp.backends.nccl.chunk_plan import gather_plan, scatter_plan
from fused_tp.backends.nccl.nccl import NcclDist, PendingExchanges
from fused_tp.backends.schedule import DimShards, GatherMatmul, OverlappedWork, rank_offsets
from fused_tp.backends.symmetric_memory.side_stream import SideStream
from fused_tp.core.partition import shard_range
from fused_tp.core.tracing import span

# Smallest chunk. For smaller ones, latency and slower matmuls cost more time than overlap saves.
CHUNK_BYTES = 4 * 1024 * 1024
MAX_CHUNKS = 8
# Up to this size every rank receives all terms, in one exchange of W times the bytes instead of two sequential ones.
ONE_SHOT_BYTES = 128 * 1024
_ALIGNMENT_BYTES = 16  # bytes that one thread moves at a time


class NcclPipeline(PlainSchedule):
    """Implements the ops of one group on its own NCCL communicator; ops without a matmul are not chunked.

    Args:
        transport: transport of the group, from `backends.nccl.nccl.nccl_dist`.
        num_chunks: largest number of exchanges per op (for matmul_all_reduce, of chunks of rows), equal on all ranks;
            None: computed from the size.
    """

    name = "nccl_pipeline"

    def __init__(self, transport: NcclDist, num_chunks: int | None = None) -> None:
        super().__init__(transport)
        if num_chunks is not None and num_chunks < 1:
            raise ValueError(f"num_chunks must be at least 1, or None (computed from the size), got {num_chunks}.")
        self.transport: NcclDist = transport
        self.num_chunks = num_chunks
        self._side_stream = SideStream()

    # -- steps of an op -----------------------------------------------------------------------------------------------

    def _sum_partial(self, partial: Tensor) -> Tensor:
        partial = partial.contiguous()
        with self.transport.abort_scope("all_reduce"):
            out = torch.empty_like(partial)
            if out.nbytes <= ONE_SHOT_BYTES:
                return self._start_one_shot_sum("all_reduce", partial, out, None)()
            self._start_two_shot_sum("all_reduce", partial, out, None)().wait()
            return out

    def _sum_rows(self, rows: Tensor, dim_shards: DimShards) -> Tensor:
        with self.transport.abort_scope("reduce_scatter"):
            pending, terms = self._exchange_terms("reduce_scatter", rows, dim_shards.row_counts)
            pending.wait()
            out = rows.new_empty(terms.shape[1])
            sum_into(out, terms)
            return out

    def _gather_matmul(self, request: GatherMatmul, dim_shards: DimShards) -> tuple[list[Tensor], Tensor | None]:
        with self.transport.abort_scope("all_gather_matmul"):
            counts = dim_shards.row_counts
            own_rows = as_rows(request.x_shard).contiguous()
            start = rank_offsets(counts)[self.rank]
            gathered = own_rows.new_empty((sum(counts), own_rows.shape[1]))
            plan = gather_plan(counts, self.rank, self._num_chunks(gathered.nbytes))
            pending_gather = self.transport.gather("all_gather_matmul", own_rows, gathered, plan)
            outputs = [own_rows.new_empty((len(gathered), w.shape[0])) for w in request.weights]

            def multiply(x: Tensor, start: int) -> None:
                for output, w, b in zip(outputs, request.weights, request.biases, strict=True):
                    if len(x):
                        sum_of_products([(x, w)], b, out=output[start : start + len(x)])

            with span("own rows", own_rows, self.name):
                multiply(own_rows, start)
            for i, ranges in enumerate(plan.row_ranges):
                with span("chunk", i + 1, "of", len(plan.row_ranges), ranges, self.name):
                    pending_gather.wait(i)
                    for begin, end in ranges:
                        multiply(gathered[begin:end], begin)
            if request.return_gathered and not pending_gather.includes_own_rows:
                gathered[start : start + len(own_rows)].copy_(own_rows)
            outputs = [dim_shards.from_rank_major(y) for y in outputs]
            return outputs, dim_shards.from_rank_major(gathered) if request.return_gathered else None

    def _matmul_reduce_scatter(
        self, products: Sequence[Product], dim_shards: DimShards, bias: Tensor | None, overlapped_work: OverlappedWork
    ) -> Tensor:
        x, counts = products[0][0], dim_shards.row_counts
        own_count, own_start, num_columns = counts[self.rank], rank_offsets(counts)[self.rank], dim_shards.shape[-1]
        partial = x.new_empty((len(x) - own_count, num_columns))  # all rows except this rank's
        terms = x.new_empty((self.world_size, own_count, num_columns))
        plan = scatter_plan(counts, self.rank, self._num_chunks(len(x) * num_columns * x.element_size()))
        pending = self.transport.scatter("matmul_reduce_scatter", partial, terms, plan)
        side_stream_work, main_stream_work = (overlapped_work, None) if x.is_cuda else (None, overlapped_work)
        with self.transport.abort_scope("matmul_reduce_scatter"), self._side_stream(side_stream_work, x.device):
            for i, ranges in enumerate(plan.row_ranges):
                with span("chunk", i + 1, "of", len(plan.row_ranges), ranges, self.name):
                    for begin, end in ranges:
                        partial_row = begin - own_count if begin > own_start else begin
                        sum_of_products(
                            _slice_rows(products, begin, end), out=partial[partial_row : partial_row + end - begin]
                        )
                    pending.send()
            with span("own rows", terms[self.rank], self.name):
                if own_count:
                    sum_of_products(_slice_rows(products, own_start, own_start + own_count), out=terms[self.rank])
            if main_stream_work is not None:
                main_stream_work()
            out = x.new_empty((own_count, num_columns))
            for chunk in range(plan.chunks_per_rank):
                begin, end = shard_range(own_count, plan.chunks_per_rank, chunk)
                with span("sum of chunk", chunk + 1, "of", plan.chunks_per_rank, self.name):
                    if plan.row_ranges:
                        pending.wait(len(plan.row_ranges) // plan.chunks_per_rank * (chunk + 1) - 1)
                    sum_into(out[begin:end], terms[:, begin:end], bias)
        return out

    def _matmul_all_reduce(
        self, products: Sequence[Product], bias: Tensor | None, overlapped_work: OverlappedWork
    ) -> Tensor:
        x, w = products[0]
        out = x.new_empty((len(x), w.shape[0]))
        side_stream_work, main_stream_work = (overlapped_work, None) if x.is_cuda else (None, overlapped_work)
        with self.transport.abort_scope("matmul_all_reduce"), self._side_stream(side_stream_work, x.device):
            if out.nbytes <= ONE_SHOT_BYTES:
                with span("one shot", out, self.name):
                    sum_terms = self._start_one_shot_sum("matmul_all_reduce", sum_of_products(products), out, bias)
                if main_stream_work is not None:
                    main_stream_work()
                return sum_terms()
            num_chunks = self._num_chunks(out.nbytes)
            ranges = [(a, b) for a, b in (shard_range(len(out), num_chunks, i) for i in range(num_chunks)) if a < b]
            sum_previous: Callable[[], PendingExchanges] | None = None
            pending_gathers: list[PendingExchanges] = []
            for i, (begin, end) in enumerate(ranges):
                with span("chunk", i + 1, "of", len(ranges), (begin, end), self.name):
                    partial = sum_of_products(_slice_rows(products, begin, end))
                    sum_current = self._start_two_shot_sum("matmul_all_reduce", partial, out[begin:end], bias)
                    if sum_previous is not None:
                        # The transfer of the previous chunk's terms has overlapped with a matmul.
                        pending_gathers.append(sum_previous())
                    sum_previous = sum_current
            if main_stream_work is not None:
                main_stream_work()
            assert sum_previous is not None, "there are rows"
            pending_gathers.append(sum_previous())
            for chunk in pending_gathers:
                chunk.wait()
        return out

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _num_chunks(self, nbytes: int) -> int:
        """Return the number of exchanges, from the size of the gathered x or the result, which all ranks know."""
        if self.num_chunks is not None:
            return self.num_chunks
        return max(1, min(MAX_CHUNKS, nbytes // CHUNK_BYTES))

    def _start_one_shot_sum(self, op: str, partial: Tensor, out: Tensor, bias: Tensor | None) -> Callable[[], Tensor]:
        """Start gathering the ranks' `partial`; the returned function writes their sum to `out`."""
        terms = self.transport.all_gather(op, partial.view(1, *out.shape))

        def sum_terms() -> Tensor:
            sum_into(out, terms.wait(), bias)
            return out

        return sum_terms

    def _start_two_shot_sum(
        self, op: str, partial: Tensor, out: Tensor, bias: Tensor | None
    ) -> Callable[[], PendingExchanges]:
        """Start sending each rank its slice of `partial` to sum.

        The returned function sums this rank's slice, and starts gathering all sums into `out`. Slices are ranges of
        elements, so that a tensor with few rows is distributed evenly too.
        """
        flat, flat_out = partial.view(-1, 1), out.view(-1, 1)
        slice_length = -(-len(flat) // self.world_size)
        alignment = max(1, _ALIGNMENT_BYTES // partial.element_size())
        slice_length = -(-slice_length // alignment) * alignment
        counts = tuple(max(0, min(slice_length, len(flat) - rank * slice_length)) for rank in range(self.world_size))
        own_count, own_start = counts[self.rank], rank_offsets(counts)[self.rank]
        pending, terms = self._exchange_terms(op, flat, counts)

        def sum_and_gather() -> PendingExchanges:
            pending.wait()
            own_sums = flat_out[own_start : own_start + own_count]
            sum_into(own_sums.view(-1), terms, _flat_bias(bias, own_start, own_count))
            return self.transport.gather(op, own_sums, flat_out, gather_plan(counts, self.rank, 1))

        return sum_and_gather

    def _exchange_terms(self, op: str, partial: Tensor, counts: tuple[int, ...]) -> tuple[PendingExchanges, Tensor]:
        """Start sending each rank r its counts[r] rows of `partial` [sum(counts), 1].

        Returns the transfer, and the terms [W, counts[rank]] of this rank's rows, which are valid after the transfer.
        """
        own_count, own_start = counts[self.rank], rank_offsets(counts)[self.rank]
        terms = partial.new_empty((self.world_size, own_count, 1))
        plan = scatter_plan(counts, self.rank, 1)
        pending = self.transport.scatter(op, partial, terms, plan)
        for _ in plan.row_ranges:  # one exchange; none in a group of one rank
            pending.send()
        terms[self.rank].copy_(partial[own_start : own_start + own_count])
        return pending, terms.view(self.world_size, own_count)


def _slice_rows(products: Sequence[Product], begin: int, end: int) -> list[Product]:
    return [(x[begin:end], w) for x, w in products]


def _flat_bias(bias: Tensor | None, start: int, num_elements: int) -> Tensor | None:
    """Return the bias of `num_elements` elements of the flattened output, from element `start` on."""
    if bias is None:
        return None
    offset = start % len(bias) if len(bias) else 0
    repeats = -(-(offset + num_elements) // max(1, len(bias)))
    return bias.repeat(repeats)[offset : offset + num_elements]
