"""One Triton kernel for a matmul and its communication: one launch multiplies, sends and sums tiles.

- all_gather_matmul: peers' shards arrive by copy engine, or small ones are read over the link, while tiles of the
  shards that have arrived are multiplied. A CUDA graph does not guarantee that copies run at once with a kernel that
  waits for them; there, the library multiplies shard by shard behind the copies (schedule `copy_engine`).
- matmul_reduce_scatter, matmul_all_reduce: each tile is sent to the rank that sums it as soon as it is multiplied.
- matmul_all_reduce_rms_norm: the same launch also adds the residual and computes the norm, after the sum.
- ring_attention, forward: all steps are one launch (`attention.ring_fused`).

Requires GPUs that write into each other's memory, or, for tests, `TRITON_INTERPRET=1` and ranks on one host, which run
the same kernels interpreted on the CPU. Calls without a kernel fall back to plain collectives: collectives without
a matmul, and dtypes that tensor cores do not support.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor

from fused_tp.backends.copy_engine.copy_engine import CopyEngine
from fused_tp.backends.copy_engine.copy_engine_schedule import CopyEngineSchedule
from fused_tp.backends.gemm import Product, as_rows
from fused_tp.backends.messages.plain import PlainSchedule
from fused_tp.backends.schedule import DimShards, GatherMatmul, OverlappedWork, Schedule
from fused_tp.backends.symmetric_memory.group_kernels import MAX_TIMEOUT_SECONDS, KernelSchedule, Workspaces
from fused_tp.backends.symmetric_memory.side_stream import SideStream
from fused_tp.backends.symmetric_memory.symm_mem import KernelMemory
from fused_tp.core import settings
from fused_tp.core.pending import Pending

MATMULS = frozenset({"all_gather_matmul", "matmul_all_reduce", "matmul_all_reduce_rms_norm", "matmul_reduce_scatter"})
OPS = MATMULS | {"ring_attention"}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Up to this many bytes of gathered x every program reads peers' memory directly: a copy would take longer to set up.
DIRECT_BYTES = 256 * 1024
# Up to this many bytes of result every rank sums all of it: one hop of W times the bytes instead of two hops.
ONE_SHOT_BYTES = 256 * 1024


class FusedKernelSchedule(KernelSchedule):
    """Implements the ops of one group by fused kernels, in memory that all ranks of the group can access.

    Args:
        memory: memory of the group.
        plain: schedule of the ops that have no kernel; None if the ranks are threads, for which there is no fallback.
        copy_schedule: schedule of the group's copy engines; None if it has none: then kernels read all shards
            directly over the link.
    """

    name = "fused_kernel"

    def __init__(
        self, memory: KernelMemory, plain: PlainSchedule | None, copy_schedule: CopyEngineSchedule | None = None
    ) -> None:
        from fused_tp.triton_kernels.attention.ring_keys import RingWorkspace
        from fused_tp.triton_kernels.comm.gather import GatherWorkspace
        from fused_tp.triton_kernels.comm.signals import MAX_TILE_ROWS, Workspace
        from fused_tp.triton_kernels.device import kernel_arch

        workspace_classes = {"sum": Workspace, "gather": GatherWorkspace, "ring": RingWorkspace}
        self.workspaces = Workspaces(memory, workspace_classes, None if plain is None else plain.transport)
        super().__init__(
            self.workspaces,
            plain,
            "If the ranks are threads of one process, fused kernels support only matmuls and the forward pass of "
            "attention.",
        )
        self.memory = memory
        self.copy_schedule = copy_schedule
        if copy_schedule is not None:
            self.workspaces.link_failures(copy_schedule.engine)
        self._loaded_kernels: set[Any] = set()  # calls whose kernels have been loaded on the device
        self._side_stream = SideStream()
        # An architecture such as sm_120 uses the kernels of another one with the same instructions.
        self._arch = kernel_arch(memory.arch)
        self._max_norm_tile_rows = MAX_TILE_ROWS

    @staticmethod
    def load() -> None:
        """Import the kernels, and install precompiled ones in Triton's cache. Exceptions propagate."""
        from fused_tp.triton_kernels.archive import install_shipped_kernels

        install_shipped_kernels()
        import fused_tp.triton_kernels.attention.ring_forward
        import fused_tp.triton_kernels.gemm.all_gather_gemm
        import fused_tp.triton_kernels.gemm.gemm_sum  # noqa: F401  # to see that they can be imported

    @contextmanager
    def abort_scope(self, op: str) -> Iterator[None]:
        with (
            super().abort_scope(op),
            nullcontext() if self.copy_schedule is None else self.copy_schedule.abort_scope(op),
        ):
            yield

    def _gather(self, x_shard: Tensor, dim_shards: DimShards) -> Pending[Tensor]:
        return (self.fallback if self.copy_schedule is None else self.copy_schedule)._gather(x_shard, dim_shards)

    # -- matmuls ------------------------------------------------------------------------------------------------------

    def _fallback_for(self, op: str, dtype: torch.dtype, shape: Sequence[int]) -> Schedule | None:
        # The gathered x is empty (M = 0 or K = 0): nothing to gather; results are empty or zero.
        return self.fallback if op == "all_gather_matmul" and prod(shape) == 0 else None

    def _sum_rows(self, rows: Tensor, dim_shards: DimShards) -> Tensor:
        return self.fallback._sum_rows(rows, dim_shards)  # there is no kernel for a sum without a matmul

    def _gather_matmul(self, request: GatherMatmul, dim_shards: DimShards) -> tuple[list[Tensor], Tensor | None]:
        from fused_tp.triton_kernels.comm.streams import runs_copies_concurrently

        is_small = prod(dim_shards.shape) * request.x_shard.dtype.itemsize <= DIRECT_BYTES
        if self.copy_schedule is None or is_small:
            return self._gather_matmul_direct(request, dim_shards)
        if not runs_copies_concurrently(request.x_shard.device):
            return self.copy_schedule._gather_matmul(request, dim_shards)
        return self.gather_matmul_copied(
            request, dim_shards, self.copy_schedule.engine, self._gather_launch(request, dim_shards)
        )

    def gather_matmul_copied(
        self, request: GatherMatmul, dim_shards: DimShards, engine: CopyEngine, launch: Any
    ) -> tuple[list[Tensor], Tensor | None]:
        """Implement `_gather_matmul` with shards that `engine` copies; not during captures.

        Args:
            launch: launch options of the matmul.
        """
        from fused_tp.triton_kernels.comm.arrivals import Arrivals
        from fused_tp.triton_kernels.gemm.all_gather_gemm import multiply_arriving_shards

        own_rows = as_rows(request.x_shard).contiguous()
        if own_rows.data_ptr() % 16:
            own_rows = own_rows.clone()  # TMA requires 16-byte alignment
        gathered = own_rows.new_empty((sum(dim_shards.row_counts), dim_shards.shape[-1]))
        destinations = list(gathered.split(dim_shards.row_counts))
        max_bytes = max(destination.nbytes for destination in destinations)
        if not request.return_gathered:
            destinations[self.rank] = destinations[self.rank][:0]
        # The matmul's own deadline is only an upper bound: the streams that copy enforce the deadline.
        timeout_ns = int(min(2 * settings.timeout_seconds(), MAX_TIMEOUT_SECONDS) * 1e9)
        with self.workspaces.in_turn(), engine.begin_call("all_gather_matmul", gather_bytes=max_bytes) as call:

            def start() -> Arrivals:
                shards = call.offer(own_rows, destinations)
                return Arrivals(shards.arrival_flags, shards.order_scratch, shards.expired_flag, timeout_ns)

            outputs = multiply_arriving_shards(
                own_rows,
                gathered,
                request.weights,
                start_gather=start,
                rank=self.rank,
                world_size=self.world_size,
                launch=launch,
                rows_per_rank=dim_shards.row_counts[0],
                timeout_ns=timeout_ns,
                loaded_keys=self._loaded_kernels,
                biases=[_contiguous_bias(bias) for bias in request.biases],
            )
            call.finish(*outputs, *([gathered] if request.return_gathered else []))
        return [dim_shards.from_rank_major(y) for y in outputs], dim_shards.from_rank_major(
            gathered
        ) if request.return_gathered else None

    def _gather_matmul_direct(self, request: GatherMatmul, dim_shards: DimShards) -> tuple[list[Tensor], Tensor | None]:
        from fused_tp.triton_kernels.gemm import all_gather_gemm as module

        rows_per_rank, dtype = dim_shards.row_counts[0], request.x_shard.dtype
        nbytes = module.workspace_bytes(rows_per_rank, dim_shards.shape[-1], dtype, self.world_size)
        with self.workspaces.use("gather", nbytes, "all_gather_matmul") as workspace:
            outputs, gathered = module.all_gather_gemm(
                as_rows(request.x_shard),
                request.weights,
                workspace=workspace,
                launch=self._gather_launch(request, dim_shards),
                rows=sum(dim_shards.row_counts),
                rows_per_rank=rows_per_rank,
                biases=[_contiguous_bias(bias) for bias in request.biases],
                return_gathered=request.return_gathered,
            )
        return [
            dim_shards.from_rank_major(y) for y in outputs
        ], None if gathered is None else dim_shards.from_rank_major(gathered)

    def _gather_launch(self, request: GatherMatmul, dim_shards: DimShards) -> Any:
        # Tiles, and the widths of weights, may differ between ranks. One SM stays free, see _matmul_reduce_scatter.
        max_width = max(w.shape[0] for w in request.weights)
        return self._choose_launch(request.x_shard.dtype, sum(dim_shards.row_counts), max_width, min_margin=1)

    def _matmul_reduce_scatter(
        self, products: Sequence[Product], dim_shards: DimShards, bias: Tensor | None, overlapped_work: OverlappedWork
    ) -> Tensor:
        from fused_tp.triton_kernels.gemm.gemm_sum import gemm_reduce_scatter, reduce_scatter_bytes

        x, row_counts, n = products[0][0], dim_shards.row_counts, dim_shards.shape[-1]
        # A gather may run at the same time (of x, for the weight's gradient). Copies on one GPU, within its stage or
        # between ranks that share the GPU, may be kernels that peers wait for, so one SM stays free.
        launch = self._choose_launch(x.dtype, sum(row_counts), n, min_margin=1)
        self._check_launch("matmul_reduce_scatter", launch, x)
        nbytes = reduce_scatter_bytes(sum(row_counts), n, x.dtype, self.world_size, launch, rows_per_rank=row_counts[0])
        with (
            self.workspaces.use("sum", nbytes, "matmul_reduce_scatter") as workspace,
            self._side_stream(overlapped_work, x.device),
        ):
            out: Tensor = gemm_reduce_scatter(
                products, workspace=workspace, launch=launch, rows_per_rank=row_counts[0], bias=_contiguous_bias(bias)
            )
        return out

    def matmul_all_reduce(
        self, products: Sequence[Product], bias: Tensor | None, *, overlapped_work: OverlappedWork = None
    ) -> Tensor:
        x, w = products[0]
        shape = (*x.shape[:-1], w.shape[0])
        self.check("matmul_all_reduce", (*shape, bias is not None), x)
        return self._matmul_all_reduce([(as_rows(x), w) for x, w in products], bias, overlapped_work).view(shape)

    def _matmul_all_reduce(
        self, products: Sequence[Product], bias: Tensor | None, overlapped_work: OverlappedWork
    ) -> Tensor:
        return self._launch_sum("matmul_all_reduce", products, overlapped_work, bias=_contiguous_bias(bias))[0]

    def matmul_all_reduce_rms_norm(
        self, x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        num_rows = prod(x.shape[:-1])
        tile_rows, _ = self._choose_launch(x.dtype, num_rows, weight.shape[0]).tile_counts(num_rows, 1)
        if not x.dtype == residual.dtype == norm_weight.dtype or tile_rows > self._max_norm_tile_rows:
            return super().matmul_all_reduce_rms_norm(x, weight, residual, norm_weight, eps)
        shape = (*x.shape[:-1], weight.shape[0])
        self.check("matmul_all_reduce_rms_norm", (*shape, eps), x)
        new_residual, normed = self._launch_sum(
            "matmul_all_reduce_rms_norm",
            [(as_rows(x), weight)],
            None,
            residual=as_rows(residual).contiguous(),
            norm_weight=norm_weight.contiguous(),
            eps=eps,
        )
        assert normed is not None
        return normed.view(shape), new_residual.view(shape)

    def _launch_sum(
        self, op: str, products: Sequence[Product], overlapped_work: OverlappedWork, **epilogue: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Launch the sum over ranks of all `products`; `epilogue`: the bias, or the residual and the norm."""
        from fused_tp.triton_kernels.gemm.gemm_sum import all_reduce_bytes, gemm_all_reduce

        x, w = products[0]
        m, n = len(x), w.shape[0]
        launch = self._choose_launch(x.dtype, m, n)
        is_two_shot = m * n * x.dtype.itemsize > ONE_SHOT_BYTES
        self._check_launch(op, launch, x)
        nbytes = all_reduce_bytes(m, n, x.dtype, self.world_size, launch, two_shot=is_two_shot)
        with self.workspaces.use("sum", nbytes, op) as workspace, self._side_stream(overlapped_work, x.device):
            result: tuple[Tensor, Tensor | None] = gemm_all_reduce(
                products, workspace=workspace, launch=launch, two_shot=is_two_shot, **epilogue
            )
        return result

    # -- launch options -----------------------------------------------------------------------------------------------

    def _choose_launch(self, dtype: torch.dtype, m: int, n: int, min_margin: int = 0) -> Any:
        from fused_tp.triton_kernels.gemm.tiles import launch_for

        return launch_for(
            dtype,
            m,
            n,
            self.world_size,
            arch=self._arch,
            sms=self.memory.sms,
            sm_margin=max(settings.sm_margin(), min(min_margin, self.memory.sms - 1)) if self.memory.arch else 0,
            precision="tf32" if dtype == torch.float32 and _is_tf32_allowed() else "ieee",
        )

    def _check_launch(self, op: str, launch: Any, x: Tensor) -> None:
        """Compare the programs and tiles of a sum, which must be equal on all ranks, if FUSED_TP_CHECK=1."""
        if settings.check_ranks():
            self.check(f"{op} in {launch.precision}", (launch.programs, launch.block_m, launch.block_n), x)


def _contiguous_bias(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


def _is_tf32_allowed() -> bool:
    """True if torch may use tf32 in its own matmuls.

    Read from the attributes: the older query function fails if the newer attributes have been set.
    """
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if precision in (None, "none"):
        precision = getattr(torch.backends, "fp32_precision", None)
    if precision in (None, "none"):
        return False
    return str(precision) == "tf32"
