"""Schedule `copy_engine`: library matmuls overlap with block copies by the GPU's copy engines.

- all_gather_matmul: this rank's shard is multiplied first, then the peers' shards by distance, as they arrive.
- matmul_reduce_scatter: the block of the farthest rank is multiplied first, and sent while the next block is
  multiplied. This rank's own block is last. The terms are summed in float32 in rank order, as in every schedule.
- matmul_all_reduce: a matmul_reduce_scatter whose sums are then gathered, in chunks of rows: one chunk is multiplied
  while the previous one is summed and gathered.

torch's asynchronous tensor parallelism uses symmetric memory in the same way (`torch.distributed._symmetric_memory`;
the decomposition is from Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep
Learning Models", ASPLOS 2023). This schedule adds deadlines, any number of ranks, any sizes, and CUDA graphs. No kernel
waits for a peer, so all multiprocessors are available to the matmuls.

`overlapped_work` runs on the caller's stream, after the last send and before the first wait, so that it overlaps with
the transfer of the last blocks. On a separate stream it would only compete with the matmuls.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fused_tp.backends.copy_engine.copy_engine import BlockScatter, CopyCall, CopyEngine
from fused_tp.backends.cuda.device_collectives import sum_into
from fused_tp.backends.gemm import Product, as_rows, sum_of_products
from fused_tp.backends.messages.plain import PlainSchedule, gather_blocks
from fused_tp.backends.schedule import DimShards, GatherMatmul, OverlappedWork, Schedule, rank_offsets
from fused_tp.backends.symmetric_memory.group_kernels import KernelSchedule
from fused_tp.core.partition import shard_range, shard_sizes
from fused_tp.core.pending import Pending, PendingCall
from fused_tp.core.tracing import span

# Smallest chunk of an all-reduce. For smaller ones, flags and events take longer than the time that overlap saves.
CHUNK_BYTES = 4 << 20
MAX_CHUNKS = 4


class CopyEngineSchedule(KernelSchedule):
    """Implements the ops of one group by library matmuls and copies of blocks.

    Args:
        plain: schedule of all-reduces without a matmul, which have no copy engine version; None if the ranks are
            threads.
        num_chunks: number of chunks of a matmul_all_reduce; None: computed from its size.
    """

    name = "copy_engine"

    def __init__(self, engine: CopyEngine, plain: PlainSchedule | None, num_chunks: int | None = None) -> None:
        no_fallback_message = "all_reduce by copy engines is not supported for ranks that are threads of one process."
        super().__init__(engine, plain, no_fallback_message)
        self.engine = engine
        self.num_chunks = num_chunks
        # Ordered by distance, so that no two ranks send to the same peer at the same time.
        self._peers = [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]

    def _gather(self, x_shard: Tensor, dim_shards: DimShards) -> Pending[Tensor]:
        return gather_blocks(x_shard, dim_shards, self._start_gather)

    def _start_gather(self, flat: Tensor) -> Pending[Tensor]:
        """Start gathering the ranks' `flat` [n] in rank order, to [W * n]."""
        out = flat.new_empty(self.world_size * flat.numel())
        shards = out.view(self.world_size, flat.numel())
        call = self.engine.begin_call("all_gather", gather_bytes=flat.nbytes)
        with span("all_gather", flat, self.name), call:
            call.gather(flat, list(shards.unbind()))
            shards[self.rank].copy_(flat)
        start_stream = _current_stream_of(flat)

        def finish() -> Tensor:
            with call:
                call.finish(out)
            if (stream := _current_stream_of(flat)) != start_stream and stream is not None:
                flat.record_stream(stream)
                out.record_stream(stream)
            return out

        return PendingCall(finish)

    # -- steps of an op -----------------------------------------------------------------------------------------------

    def _fallback_for(self, op: str, dtype: torch.dtype, shape: Sequence[int]) -> Schedule | None:
        return self.fallback if op == "reduce_scatter" and not dtype.is_floating_point else None

    def _sum_rows(self, rows: Tensor, dim_shards: DimShards) -> Tensor:
        blocks = rows.split(dim_shards.row_counts)
        own_block = blocks[self.rank]
        out = torch.empty_like(own_block)
        with (
            span("reduce_scatter", rows, self.name),
            self.engine.begin_call("reduce_scatter", scatter_bytes=_max_bytes(blocks)) as call,
        ):
            scatter = call.scatter()
            for owner in self._peers:
                scatter.push(owner, blocks[owner])
            scatter.terms(own_block.shape, own_block.dtype)[self.rank].copy_(own_block)
            self._sum_block(scatter, out, None)
            call.finish(out)
        return out

    def _gather_matmul(self, request: GatherMatmul, dim_shards: DimShards) -> tuple[list[Tensor], Tensor | None]:
        row_counts = dim_shards.row_counts
        own_rows = as_rows(request.x_shard).contiguous()
        gathered = own_rows.new_empty((sum(row_counts), dim_shards.shape[-1]))
        shards = gathered.split(row_counts)
        outputs = [own_rows.new_empty((sum(row_counts), w.shape[0])) for w in request.weights]
        output_shards = [y.split(row_counts) for y in outputs]
        with self.engine.begin_call("all_gather_matmul", gather_bytes=_max_bytes(shards)) as call:
            call.gather(own_rows, shards)
            for source in (self.rank, *self._peers):
                if source != self.rank:
                    call.wait_for(source)
                with span("all_gather_matmul of the shard of rank", source, self.name):
                    rows = own_rows if source == self.rank else shards[source]
                    for output_shard, w, bias in zip(output_shards, request.weights, request.biases, strict=True):
                        sum_of_products([(rows, w)], bias, out=output_shard[source])
            if request.return_gathered:
                shards[self.rank].copy_(own_rows)
                call.finish(*outputs, gathered)
            else:
                call.finish(*outputs)
        return [dim_shards.from_rank_major(y) for y in outputs], dim_shards.from_rank_major(
            gathered
        ) if request.return_gathered else None

    def _matmul_reduce_scatter(
        self, products: Sequence[Product], dim_shards: DimShards, bias: Tensor | None, overlapped_work: OverlappedWork
    ) -> Tensor:
        x, row_counts, n = products[0][0], dim_shards.row_counts, dim_shards.shape[-1]
        partial, out = x.new_empty((sum(row_counts), n)), x.new_empty((row_counts[self.rank], n))
        max_bytes = max(row_counts) * n * x.element_size()
        with self.engine.begin_call("matmul_reduce_scatter", scatter_bytes=max_bytes) as call:
            scatter = self._multiply_and_send("matmul_reduce_scatter", call, products, partial, row_counts)
            if overlapped_work is not None:
                overlapped_work()
            self._sum_block(scatter, out, bias)
            call.finish(out)
        return out

    def _matmul_all_reduce(
        self, products: Sequence[Product], bias: Tensor | None, overlapped_work: OverlappedWork
    ) -> Tensor:
        x, w = products[0]
        m, n = len(x), w.shape[0]
        partial, out = x.new_empty((m, n)), x.new_empty((m, n))
        num_chunks = self._num_chunks(m, n, x)
        chunks = [shard_range(m, num_chunks, chunk_index) for chunk_index in range(num_chunks)]
        max_bytes = max(shard_sizes(stop - start, self.world_size)[0] for start, stop in chunks) * n * x.element_size()
        previous_chunk: tuple[BlockScatter, Tensor] | None = None
        with self.engine.begin_call("matmul_all_reduce", gather_bytes=max_bytes, scatter_bytes=max_bytes) as call:
            for chunk_index, (start, stop) in enumerate(chunks):
                row_counts = shard_sizes(stop - start, self.world_size)
                chunk_products = [(x[start:stop], w) for x, w in products]
                with span("matmul_all_reduce chunk", chunk_index, "of", len(chunks), self.name):
                    scatter = self._multiply_and_send(
                        "matmul_all_reduce", call, chunk_products, partial[start:stop], row_counts
                    )
                if previous_chunk is not None:
                    # The transfer of the previous chunk has overlapped with a matmul, so this wait is short.
                    self._reduce_and_gather(call, *previous_chunk, bias)
                previous_chunk = scatter, out[start:stop]
            if overlapped_work is not None:
                overlapped_work()
            assert previous_chunk is not None
            self._reduce_and_gather(call, *previous_chunk, bias)
            call.finish(out)
        return out

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _multiply_and_send(
        self, op: str, call: CopyCall, products: Sequence[Product], partial: Tensor, row_counts: Sequence[int]
    ) -> BlockScatter:
        """Multiply block by block, and send each block to the owner of its rows. `partial`: memory for the blocks."""
        scatter = call.scatter()
        offsets = rank_offsets(row_counts)
        blocks = partial.split(list(row_counts))
        for owner in (*reversed(self._peers), self.rank):
            block_products = [(x[offsets[owner] : offsets[owner] + row_counts[owner]], w) for x, w in products]
            with span(f"{op} of the block of rank", owner, self.name):
                if owner != self.rank:
                    sum_of_products(block_products, out=blocks[owner])
                    scatter.push(owner, blocks[owner])
                else:
                    sum_of_products(block_products, out=scatter.terms(blocks[owner].shape, partial.dtype)[self.rank])
        return scatter

    def _sum_block(self, scatter: BlockScatter, out: Tensor, bias: Tensor | None) -> None:
        """Sum the ranks' terms of this rank's block into `out`."""
        scatter.receive()
        sum_into(out, scatter.terms(out.shape, out.dtype), bias)
        scatter.release()

    def _reduce_and_gather(self, call: CopyCall, scatter: BlockScatter, out: Tensor, bias: Tensor | None) -> None:
        """Sum this rank's rows of `out`, and start gathering the rows that the other ranks have summed."""
        shards = out.split(shard_sizes(out.shape[0], self.world_size))
        self._sum_block(scatter, shards[self.rank], bias)
        call.gather(shards[self.rank], shards)

    def _num_chunks(self, m: int, n: int, x: Tensor) -> int:
        """Return the number of chunks, from M, N and the dtype only: K is sharded and may differ between ranks."""
        num_chunks = self.num_chunks or m * n * x.element_size() // CHUNK_BYTES
        return max(1, min(num_chunks, MAX_CHUNKS if self.num_chunks is None else num_chunks, m // self.world_size))


def _max_bytes(tensors: Sequence[Tensor]) -> int:
    return max(t.nbytes for t in tensors)


def _current_stream_of(t: Tensor) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(t.device) if t.is_cuda else None
