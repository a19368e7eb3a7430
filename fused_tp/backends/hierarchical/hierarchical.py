"""Two-level schedule: a fast schedule inside each host, and messages over the network between hosts.

In a group of H hosts with L ranks each, a rank sends over the network only its own shard, or its own slice of the sum
over its host's ranks. These are 1/L of the bytes of a flat exchange.

    gather:   a rank receives shards from the ranks with the same local rank on the other hosts, one after the other.
              Each is gathered inside the host (and multiplied, if a matmul follows) while the next one is in flight.
    scatter:  the rows of the farthest host come first. They are summed inside this host, and sent while the rows of the
              next host are computed.
    reduce:   reduce-scatter inside the host, all-reduce across hosts, all-gather inside the host.

Sums inside a host are added in rank order and rounded to the tensor's dtype. Sums across hosts are added in host order
in float32. All ranks get the same bits. Shards of unequal length use the flat schedule. A failure on one level aborts
the group on all levels (`backends.hierarchical.two_level`).

Source: the two-level collectives of MPI libraries, as in Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH", 2005.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from math import prod

import torch
from torch import Tensor

from fused_tp.backends.gemm import Product, as_rows
from fused_tp.backends.hierarchical.two_level import Hosts, LevelScope, TwoLevelGroup
from fused_tp.backends.messages.plain import PlainSchedule
from fused_tp.backends.messages.torch_dist import TorchDist
from fused_tp.backends.schedule import DimShards, GatherMatmul, OverlappedWork, Schedule
from fused_tp.core import tracing
from fused_tp.core.partition import shard_range
from fused_tp.core.pending import Pending, PendingCall, sum_in_rank_order

# Sums of at least twice this size are split into chunks: one is sent over the network while the next one is computed.
CHUNK_BYTES = 2 << 20
MAX_CHUNKS = 4


class HierarchicalSchedule(Schedule):
    """Implements the ops of a group that spans several hosts.

    Args:
        hosts: layout of the group's ranks on hosts.
        host_schedule: returns the schedule of an op and dtype for the ranks of this host.
        cross_host: transport between the ranks with this rank's local rank on all hosts.
        flat_schedule: schedule of the full group, for shards of unequal length and empty tensors.
    """

    name = "hierarchical"

    def __init__(
        self,
        hosts: Hosts,
        host_schedule: Callable[[str, torch.dtype], Schedule],
        cross_host: TorchDist,
        flat_schedule: PlainSchedule,
    ) -> None:
        self._hosts = hosts
        self._host_schedule = host_schedule
        self._cross_host = cross_host
        self._flat_schedule = flat_schedule
        self._levels = TwoLevelGroup(hosts, flat_schedule.transport)
        self.rank, self.world_size = flat_schedule.rank, flat_schedule.world_size

    @property
    def messages(self) -> TorchDist:
        return self._flat_schedule.transport

    def abort_scope(self, op: str) -> AbstractContextManager[object]:
        return self._levels.abort_scope(op)

    # -- collectives --------------------------------------------------------------------------------------------------

    def all_gather(self, x_shard: Tensor, *, gather_dim: int, gather_size: int | None) -> Pending[Tensor]:
        dim_shards = DimShards.from_shard(x_shard.shape, gather_dim, gather_size, self.world_size)
        shape, sizes = dim_shards.shape, dim_shards.sizes
        if not _are_all_equal(sizes) or prod(shape) == 0:
            return self._flat_schedule.all_gather(x_shard, gather_dim=gather_dim, gather_size=gather_size)
        scope = self._begin_call("all_gather", (*shape, gather_dim), x_shard)
        with scope:
            host_schedule = self._host_schedule("all_gather", x_shard.dtype)
            pending = self._cross_host.all_gather("all_gather", x_shard.contiguous().unsqueeze(0))

        def finish() -> Tensor:
            with scope:
                shards = pending.wait()
                with tracing.span("inside", "of", self._hosts.num_hosts, "hosts", host_schedule.name):
                    by_host = host_schedule.all_gather(shards, gather_dim=gather_dim + 1, gather_size=None).wait()
            return by_host.movedim(0, gather_dim).reshape(shape)

        return PendingCall(finish)

    def reduce_scatter(self, partial: Tensor, *, scatter_dim: int) -> Tensor:
        length = partial.shape[scatter_dim]
        if length % self.world_size or partial.numel() == 0:
            return self._flat_schedule.reduce_scatter(partial, scatter_dim=scatter_dim)
        with self._begin_call("reduce_scatter", (*partial.shape, scatter_dim), partial):
            host_schedule = self._host_schedule("reduce_scatter", partial.dtype)
            host_length = length // self._hosts.num_hosts

            def host_term(host: int) -> Tensor:
                host_partial = partial.narrow(scatter_dim, host * host_length, host_length)
                return host_schedule.reduce_scatter(host_partial, scatter_dim=scatter_dim)

            return self._scatter_to_hosts("reduce_scatter", host_schedule.name, host_term)

    def all_reduce(self, partial: Tensor) -> Tensor:
        if partial.numel() == 0:
            return partial.clone()
        with self._begin_call("all_reduce", partial.shape, partial):
            flat_partial = partial.reshape(-1)
            host_schedule = self._host_schedule("reduce_scatter", flat_partial.dtype)
            with tracing.span("inside", host_schedule.name):
                own_slice = host_schedule.reduce_scatter(flat_partial, scatter_dim=0)
            return self._gather_within_host(
                self._cross_host.all_reduce("all_reduce", own_slice), flat_partial.numel()
            ).view(partial.shape)

    # -- matmuls ------------------------------------------------------------------------------------------------------

    def all_gather_matmul(self, request: GatherMatmul) -> tuple[list[Tensor], Tensor | None]:
        dim = request.gather_dim
        dim_shards = DimShards.from_shard(request.x_shard.shape, dim, request.gather_size, self.world_size)
        shape, sizes = dim_shards.shape, dim_shards.sizes
        if not _are_all_equal(sizes) or prod(shape) == 0:
            return self._flat_schedule.all_gather_matmul(request)
        num_hosts, own_host_index = self._hosts.num_hosts, self._hosts.host_index
        outputs: list[list[Tensor]] = [[] for _ in range(num_hosts)]
        gathered: list[Tensor | None] = [None] * num_hosts
        with self._begin_call("all_gather_matmul", (*shape, dim), request.x_shard):
            host_schedule = self._host_schedule("all_gather_matmul", request.x_shard.dtype)
            x_shard = request.x_shard.contiguous()
            pending_shards = [
                self._cross_host.shift("all_gather_matmul", x_shard, torch.empty_like(x_shard), step)
                for step in range(1, num_hosts)
            ]
            for step in range(num_hosts):
                host = (own_host_index - step) % num_hosts
                shard = pending_shards[step - 1].wait() if step else x_shard
                with tracing.span("host", host, "of", num_hosts, host_schedule.name):
                    host_request = request._replace(x_shard=shard, gather_size=None)
                    outputs[host], gathered[host] = host_schedule.all_gather_matmul(host_request)
        # This copy takes little time compared to a matmul that is large enough to be sharded over hosts.
        joined_outputs = [torch.cat(blocks, dim=dim) for blocks in zip(*outputs, strict=True)]
        gathered_blocks = [block for block in gathered if block is not None]
        return joined_outputs, torch.cat(gathered_blocks, dim=dim) if gathered_blocks else None

    def matmul_reduce_scatter(
        self,
        products: Sequence[Product],
        bias: Tensor | None,
        *,
        scatter_dim: int,
        overlapped_work: OverlappedWork = None,
    ) -> Tensor:
        x, w = products[0]
        shape = (*x.shape[:-1], w.shape[0])
        length = shape[scatter_dim]
        if length % self.world_size or prod(shape) == 0:
            return self._flat_schedule.matmul_reduce_scatter(
                products, bias, scatter_dim=scatter_dim, overlapped_work=overlapped_work
            )
        with self._begin_call("matmul_reduce_scatter", (*shape, scatter_dim, bias is not None), x):
            host_schedule = self._host_schedule("matmul_reduce_scatter", x.dtype)
            host_length = length // self._hosts.num_hosts

            def host_term(host: int) -> Tensor:
                host_products = [(x.narrow(scatter_dim, host * host_length, host_length), w) for x, w in products]
                return host_schedule.matmul_reduce_scatter(host_products, None, scatter_dim=scatter_dim)

            return self._scatter_to_hosts("matmul_reduce_scatter", host_schedule.name, host_term, bias, overlapped_work)

    def matmul_all_reduce(
        self, products: Sequence[Product], bias: Tensor | None, *, overlapped_work: OverlappedWork = None
    ) -> Tensor:
        x, w = products[0]
        shape = (*x.shape[:-1], w.shape[0])
        if prod(shape) == 0:
            return self._flat_schedule.matmul_all_reduce(products, bias, overlapped_work=overlapped_work)
        row_products = [(as_rows(x), w) for x, w in products]
        m, n = row_products[0][0].shape[0], w.shape[0]
        ranges = self._column_chunks(m, n, x)
        pending = []
        with self._begin_call("matmul_all_reduce", (*shape, bias is not None), x):
            host_schedule = self._host_schedule("matmul_reduce_scatter", x.dtype)
            # Chunks of columns, because the rows are already sharded over the ranks of a host.
            for chunk, (start, stop) in enumerate(ranges):
                with tracing.span("chunk", chunk, "of", len(ranges), host_schedule.name):
                    partial = host_schedule.matmul_reduce_scatter(
                        [(x, w[start:stop]) for x, w in row_products], None, scatter_dim=0
                    )
                chunk_bias = None if bias is None else bias[start:stop]
                pending.append(self._cross_host.all_reduce("matmul_all_reduce", partial, chunk_bias))
            if overlapped_work is not None:
                overlapped_work()
            chunks = [self._gather_within_host(chunk, m) for chunk in pending]
        return (chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=-1)).view(shape)

    def all_reduce_rms_norm(
        self, partial: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        self._flat_schedule.check("all_reduce_rms_norm", (*partial.shape, eps), partial)
        return super().all_reduce_rms_norm(partial, residual, norm_weight, eps)

    def matmul_all_reduce_rms_norm(
        self, x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        self._flat_schedule.check("matmul_all_reduce_rms_norm", (*residual.shape, eps), x)
        return super().matmul_all_reduce_rms_norm(x, weight, residual, norm_weight, eps)

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _scatter_to_hosts(
        self,
        op: str,
        schedule_name: str,
        host_term: Callable[[int], Tensor],
        bias: Tensor | None = None,
        overlapped_work: OverlappedWork = None,
    ) -> Tensor:
        """Return the sum over hosts of their terms for this host, plus the bias.

        Args:
            host_term: computes this host's term for the host of the given index.
        """
        num_hosts, own_host_index = self._hosts.num_hosts, self._hosts.host_index

        def traced_term(host: int) -> Tensor:
            with tracing.span("host", host, "of", num_hosts, schedule_name):
                return host_term(host)

        sent_terms, transfers = [], []  # terms are kept alive until they have been received
        for step in range(1, num_hosts):
            sent_terms.append(traced_term((own_host_index + step) % num_hosts).contiguous())
            transfers.append(self._cross_host.shift(op, sent_terms[-1], torch.empty_like(sent_terms[-1]), step))
        terms = {own_host_index: traced_term(own_host_index)}
        if overlapped_work is not None:
            overlapped_work()
        for step, transfer in enumerate(transfers, 1):
            terms[(own_host_index - step) % num_hosts] = transfer.wait()
        return sum_in_rank_order(torch.stack([terms[host] for host in range(num_hosts)]), bias)

    def _gather_within_host(self, pending: Pending[Tensor], length: int) -> Tensor:
        """Gather the slices along dim 0 of a sum from the ranks of this host."""
        total = pending.wait()
        host_schedule = self._host_schedule("all_gather", total.dtype)
        with tracing.span("inside", host_schedule.name):
            return host_schedule.all_gather(total, gather_dim=0, gather_size=length).wait()

    def _column_chunks(self, m: int, n: int, x: Tensor) -> list[tuple[int, int]]:
        num_chunks = max(1, min(MAX_CHUNKS, n, m * n * x.element_size() // CHUNK_BYTES))
        ranges = [shard_range(n, num_chunks, i) for i in range(num_chunks)]
        return [bounds for bounds in ranges if bounds[0] < bounds[1]]

    def _begin_call(self, op: str, dims: Sequence[int], x: Tensor) -> LevelScope:
        call = self._levels.begin_call(op)
        self._flat_schedule.transport.check(op, dims, x.dtype, x.device)
        return call


def _are_all_equal(sizes: Sequence[int]) -> bool:
    return len(set(sizes)) == 1
