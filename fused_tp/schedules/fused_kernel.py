"""One Triton kernel for a matmul and its communication: tiles are multiplied, sent and summed in the same launch.

- all_gather_matmul: peers' shards arrive by copy engine, or are read over the link where there is little of them,
  while tiles of what is there already are multiplied.
- matmul_reduce_scatter, matmul_all_reduce: each tile goes to the rank that sums it as soon as it is multiplied.
- matmul_all_reduce_rms_norm: residual and norm are taken behind the sum, in that launch too.
- ring_attention, forward: all steps are one launch (`attention.ring_fused`).

It needs GPUs that write into each other's memory, or `TRITON_INTERPRET=1` and ranks on one host, which run the same
kernels on the CPU, interpreted: for tests. What has no kernel here, movements without a matmul and dtypes that tensor
cores do not take, runs on plain collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Any

import torch
from torch import Tensor

from fused_tp.runtime import settings
from fused_tp.runtime.partition import shard_sizes
from fused_tp.schedules.base import add_rms_norm
from fused_tp.schedules.gemm import Product
from fused_tp.schedules.layout import as_rows, gathered_shape, gathered_sizes, placed, row_sizes, to_rank_major
from fused_tp.schedules.plain import KernelSchedule, Plain, gather_blocks
from fused_tp.schedules.side_stream import SideStream
from fused_tp.transport.base import After, Done, Pending
from fused_tp.transport.failure import abort_hook, abort_on_partial_failure, check_usable
from fused_tp.transport.symm_mem import KernelMemory
from fused_tp.transport.workspace import Workspaces

MATMULS = frozenset({"all_gather_matmul", "matmul_all_reduce", "matmul_all_reduce_rms_norm", "matmul_reduce_scatter"})
OPS = MATMULS | {"ring_attention"}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_COLUMNS = 512  # of what is gathered without a matmul
# Up to this many bytes of gathered x every program reads peers' memory itself: a copy would take longer to set up.
DIRECT_BYTES = 256 * 1024
# Up to this many bytes of result every rank sums all of it: one hop of W times the bytes, instead of two hops.
ONE_SHOT_BYTES = 256 * 1024


class FusedKernel(KernelSchedule):
    """Every op over one group whose ranks write into each other's memory.

    Args:
        memory: of the group.
        plain: what runs the ops that have no kernel; None for ranks that are threads, which have nothing that could.
    """

    name = "fused_kernel"

    def __init__(self, memory: KernelMemory, plain: Plain | None) -> None:
        super().__init__(
            plain,
            "Ranks that are threads of one process have kernels for matmuls and for attention's forward only, nothing "
            "that moves.",
        )
        self.memory = memory
        self.rank = memory.rank
        self.world_size = memory.world_size
        self._side_stream = SideStream()
        self._pulling: torch.cuda.Stream | None = None
        from fused_tp.triton_kernels.attention.ring_keys import RingWorkspace
        from fused_tp.triton_kernels.comm.gather import GatherWorkspace
        from fused_tp.triton_kernels.comm.workspace import COUNTERS, Workspace
        from fused_tp.triton_kernels.device import kernels_of

        # sm_120 and the like take the kernels of an architecture that has the same instructions.
        self._arch = kernels_of(memory.arch)
        self._most_rows_of_tiles = COUNTERS
        kinds = {"sum": Workspace, "gather": GatherWorkspace, "ring": RingWorkspace}
        self.workspaces = Workspaces(memory, kinds, abort_hook(self._transport))

    @staticmethod
    def load() -> None:
        """Imports the kernels. Raises what that raises."""
        from fused_tp.triton_kernels.attention import ring_forward  # noqa: F401
        from fused_tp.triton_kernels.gemm import all_gather_gemm, gemm_all_reduce, gemm_reduce_scatter  # noqa: F401

    def abort_scope(self, op: str) -> AbstractContextManager[object]:
        return abort_on_partial_failure(op, lambda: self.workspaces.calls, self.workspaces.abort, self._transport)

    # -- movements of whole tensors -----------------------------------------------------------------------------------

    def all_gather(self, x_shard: Tensor, *, gather_dim: int, gather_size: int | None) -> Pending[Tensor]:
        sizes = gathered_sizes(x_shard, gather_dim, gather_size, self.world_size)
        if x_shard.dtype not in DTYPES or prod(gathered_shape(x_shard, gather_dim, sizes)) == 0:
            return self.fallback.all_gather(x_shard, gather_dim=gather_dim, gather_size=gather_size)
        return gather_blocks(x_shard, gather_dim, sizes, self._pull)

    def _pull(self, flat: Tensor) -> Pending[Tensor]:
        """Everyone's `flat` [n], one after the other: [W * n]. By copy engine, beside what the caller launches next."""
        # As rows, where that is even: a kernel copies blocks of several at a time.
        columns = _COLUMNS if flat.numel() % _COLUMNS == 0 else flat.numel()
        shard = flat.view(-1, columns)
        rows = shard.shape[0]
        from fused_tp.triton_kernels.gemm import all_gather_gemm as module

        launch = self._launch(flat.dtype, rows * self.world_size, columns, least_margin=1)
        self.check("all_gather", (flat.numel(),), flat)
        nbytes = module.workspace_bytes(rows, columns, flat.dtype, self.world_size)

        def pull() -> Tensor:
            with self.workspaces.use("gather", nbytes, "all_gather", exclusive=False) as workspace:
                _, gathered = module.all_gather_gemm(
                    shard, [], workspace=workspace, launch=launch, rows=rows * self.world_size, gathered=True
                )
            whole: Tensor = gathered.view(-1)
            return whole

        if not flat.is_cuda:
            return Done(pull())
        if self._pulling is None:
            self._pulling = self._side_stream.own_stream(flat.device)
        stream = self._pulling
        stream.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(stream):
            gathered = pull()
        flat.record_stream(stream)

        def finish() -> Tensor:
            consumer = torch.cuda.current_stream(flat.device)
            consumer.wait_stream(stream)
            gathered.record_stream(consumer)
            return gathered

        return After(finish)

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
        sizes = gathered_sizes(x_shard, gather_dim, gather_size, self.world_size)
        shape = gathered_shape(x_shard, gather_dim, sizes)
        if prod(shape) == 0:  # K = 0: there is nothing to gather, and the products are zero
            return self.fallback.all_gather_matmul(
                x_shard, weights, biases,
                gather_dim=gather_dim, gather_size=gather_size, return_gathered=return_gathered,
            )  # fmt: skip
        counts = row_sizes(shape, gather_dim, sizes)
        rows, rows_per_rank, k = sum(counts), counts[0], shape[-1]
        from fused_tp.triton_kernels.gemm import all_gather_gemm as module

        # Tiles need not be alike on all ranks here; weights may differ in width.
        launch = self._launch(x_shard.dtype, rows, max(w.shape[0] for w in weights), least_margin=1)
        self.check("all_gather_matmul", (*shape, gather_dim), x_shard)
        nbytes = module.workspace_bytes(rows_per_rank, k, x_shard.dtype, self.world_size)
        with self.workspaces.use("gather", nbytes, "all_gather_matmul") as workspace:
            outputs, gathered = module.all_gather_gemm(
                as_rows(x_shard),
                weights,
                workspace=workspace,
                launch=launch,
                rows=rows,
                rows_per_rank=rows_per_rank,
                biases=[_dense(bias) for bias in biases],
                gathered=return_gathered,
                direct=rows * k * x_shard.dtype.itemsize <= DIRECT_BYTES,
            )
        outputs = [placed(y, shape, gather_dim, counts) for y in outputs]
        return outputs, None if gathered is None else placed(gathered, shape, gather_dim, counts)

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
        from fused_tp.triton_kernels.gemm import gemm_reduce_scatter as module

        # A gather may be under way beside it (x for the weight's gradient), whose small kernels need an SM.
        launch = self._launch(x.dtype, sum(counts), shape[-1], least_margin=1)
        self.check("matmul_reduce_scatter", (*shape, scatter_dim), x, launch)
        nbytes = module.workspace_bytes(
            sum(counts), shape[-1], x.dtype, self.world_size, launch, rows_per_rank=counts[0]
        )
        with (
            self.workspaces.use("sum", nbytes, "matmul_reduce_scatter") as workspace,
            self._side_stream(meanwhile, x.device),
        ):
            out: Tensor = module.gemm_reduce_scatter(
                _few(rows), workspace=workspace, launch=launch, rows_per_rank=counts[0], bias=_dense(bias)
            )
        shape[scatter_dim] = sizes[self.rank]
        return out.view(shape)

    def matmul_all_reduce(
        self, products: Sequence[Product], bias: Tensor | None, *, meanwhile: Callable[[], None] | None = None
    ) -> Tensor:
        return self._sum_everywhere("matmul_all_reduce", products, meanwhile, bias=_dense(bias))[0]

    def matmul_all_reduce_rms_norm(
        self, x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        rows_of_tiles = self._launch(x.dtype, prod(x.shape[:-1]), weight.shape[0]).tiles(prod(x.shape[:-1]), 1)[0]
        if not x.dtype == residual.dtype == norm_weight.dtype or rows_of_tiles > self._most_rows_of_tiles:
            return add_rms_norm(self.matmul_all_reduce([(x, weight)], None), residual, norm_weight, eps)
        new_residual, normed = self._sum_everywhere(
            "matmul_all_reduce_rms_norm",
            [(x, weight)],
            None,
            residual=as_rows(residual).contiguous(),
            norm_weight=norm_weight.contiguous(),
            eps=eps,
        )
        assert normed is not None
        return normed, new_residual

    def _sum_everywhere(
        self, op: str, products: Sequence[Product], meanwhile: Callable[[], None] | None, **tail: Any
    ) -> tuple[Tensor, Tensor | None]:
        x, w = products[0]
        shape = (*x.shape[:-1], w.shape[0])
        m, n = prod(x.shape[:-1]), w.shape[0]
        from fused_tp.triton_kernels.gemm import gemm_all_reduce as module

        launch = self._launch(x.dtype, m, n)
        two_shot = m * n * x.dtype.itemsize > ONE_SHOT_BYTES
        self.check(op, shape, x, launch)
        nbytes = module.workspace_bytes(m, n, x.dtype, self.world_size, launch, two_shot=two_shot)
        with self.workspaces.use("sum", nbytes, op) as workspace, self._side_stream(meanwhile, x.device):
            rows = _few([(as_rows(x), w) for x, w in products])
            out, normed = module.gemm_all_reduce(rows, workspace=workspace, launch=launch, two_shot=two_shot, **tail)
        return out.view(shape), None if normed is None else normed.view(shape)

    # -- parts --------------------------------------------------------------------------------------------------------

    def _launch(self, dtype: torch.dtype, m: int, n: int, least_margin: int = 0) -> Any:
        from fused_tp.triton_kernels.gemm.launch import launch_for

        return launch_for(
            dtype,
            m,
            n,
            self.world_size,
            arch=self._arch,
            sms=self.memory.sms,
            sm_margin=max(settings.sm_margin(), min(least_margin, self.memory.sms - 1)) if self.memory.arch else 0,
            precision="tf32" if dtype == torch.float32 and _tf32_allowed() else "ieee",
        )

    def check(self, op: str, dims: Sequence[int], x: Tensor, launch: Any = None) -> None:
        """With FUSED_TP_CHECK=1 compares what the ranks are about to do, programs and tiles of a sum included.

        Raises:
            FusedTPError: messages of the group have failed.
        """
        if self._transport is None:
            return
        check_usable(self._transport)
        if launch is not None:
            dims = (*dims, launch.programs, launch.block_m, launch.block_n)
            op = f"{op} in {launch.precision}"
        self._transport.check(op, dims, x.dtype, x.device)


def _few(products: Sequence[Product]) -> list[Product]:
    """At most as many products as a launch adds up: those beyond are one, side by side along K."""
    from fused_tp.triton_kernels.gemm.launch import MAX_PRODUCTS as most

    if len(products) <= most:
        return list(products)
    rest = products[most - 1 :]
    joined = torch.cat([x for x, _ in rest], dim=1), torch.cat([w for _, w in rest], dim=1)
    return [*products[: most - 1], joined]


def _dense(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


def _tf32_allowed() -> bool:
    """torch's setting for its own matmuls; the function of old fails where the newer attributes have been set."""
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if precision in (None, "none"):
        precision = getattr(torch.backends, "fp32_precision", None)
    if precision in (None, "none"):
        return False
    return str(precision) == "tf32"
