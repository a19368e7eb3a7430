"""Collectives by the device kernels of csrc/cuda: one launch each, through symmetric memory.

Tensors are on the group's device; non-contiguous ones are copied first. All ranks make the same calls: same op, shapes,
dtypes and algorithm, in the same order. Sums including the bias are accumulated in float32 in rank order and rounded
once, so all ranks get the same bits. With multimem the NVLink switch determines the order of the sum, and the bias is
added after rounding.

On a GPU the host never waits: a later call raises the errors that a kernel reports (see
`backends.symmetric_memory.group_kernels`), and data that did not arrive is NaN. The CPU build of the kernels, used by
tests, blocks the host and raises errors immediately.

CUDA graphs: run the same ops once before the capture, so that their workspace exists and is large enough.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from fused_tp.backends.cuda.device_plans import (
    ALGORITHMS,
    SUMMED_DTYPES,
    AllToAllLayout,
    DevicePlan,
    PlanCache,
    heads_to_sequence_layout,
    sequence_to_heads_layout,
    with_dense_heads,
)
from fused_tp.backends.cuda.native_kernels import native_kernels, native_kernels_available
from fused_tp.backends.shared_memory.shm import dtype_number
from fused_tp.backends.symmetric_memory.group_kernels import Workspaces
from fused_tp.backends.symmetric_memory.symm_mem import KernelMemory
from fused_tp.core.failure import GroupCalls
from fused_tp.core.pending import current_stream, sum_in_rank_order


class DeviceCollectives(Workspaces):
    """The collectives of one group on one device.

    Arguments are not checked: tensors to sum must have the same shape on all ranks and a dtype in SUMMED_DTYPES, and a
    bias [n] must have the same values on all ranks. With `is_overlapped`, a kernel leaves SMs free for other kernels
    (`device_plans.OVERLAP_BLOCKS`). Every method raises the errors of `Workspaces.use`.
    """

    def __init__(self, memory: KernelMemory, messages: GroupCalls | None = None) -> None:
        self._kernels = native_kernels()
        self._plans = PlanCache(memory)
        _preload(self._kernels, memory.device)
        super().__init__(memory, dict.fromkeys(("device", "overlapped gather"), _workspace_class()), messages)

    # -- sums over ranks ----------------------------------------------------------------------------------------------

    def all_reduce(
        self,
        x: Tensor,
        algorithm: str = "one_shot",
        bias: Tensor | None = None,
        out: Tensor | None = None,
        *,
        is_overlapped: bool = False,
    ) -> Tensor:
        """Return the sum of `x` [..., n] over ranks plus `bias`, in `out` if given (contiguous; may be `x` itself).

        Raises:
            ValueError: "multimem" on memory without a multicast address.
        """
        plan = self._plans.get("all_reduce", x, algorithm, None, is_overlapped)
        terms = x.contiguous()
        if out is None:
            out = torch.empty_like(terms)
        if plan.total_size:
            bias = None if bias is None else bias.contiguous()
            algorithm_number, addresses = ALGORITHMS[algorithm], (terms.data_ptr(), out.data_ptr())
            sizes = plan.total_size, plan.dtype_index
            self._launch(
                "all_reduce", plan, algorithm_number, *addresses, *sizes, _bias_address(bias), algorithm=algorithm
            )
        return out

    def reduce_scatter(
        self,
        rows: Tensor,
        counts: Sequence[int] | None = None,
        bias: Tensor | None = None,
        *,
        is_overlapped: bool = False,
    ) -> Tensor:
        """Return this rank's rows of the sum of `rows` [M, ..., n] over ranks, plus `bias`.

        Args:
            counts: number of rows of each rank, equal except that the last ranks may have fewer; None: ceil(M / W).
        """
        plan = self._plans.get("reduce_scatter", rows, "", counts, is_overlapped)
        rows = rows.contiguous()
        out = rows.new_empty(plan.shape)
        if plan.total_size:
            bias = None if bias is None else bias.contiguous()
            addresses = rows.data_ptr(), out.data_ptr()
            self._launch(
                "reduce_scatter",
                plan,
                *addresses,
                plan.total_size,
                plan.chunk_size,
                plan.dtype_index,
                _bias_address(bias),
            )
        return out

    def all_reduce_rms_norm(
        self,
        partial: Tensor,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float,
        algorithm: str = "one_shot",
    ) -> tuple[Tensor, Tensor]:
        """Return (normed, new_residual).

        new_residual = residual + sum over ranks of `partial` [..., n]; normed = rms_norm(new_residual) * norm_weight.

        The norm is computed in float32 from the rounded new_residual, and rounded once. Not supported: "multimem".
        """
        plan = self._plans.get("all_reduce_rms_norm", partial, algorithm)
        partial, residual, norm_weight = partial.contiguous(), residual.contiguous(), norm_weight.contiguous()
        new_residual, normed = torch.empty_like(partial), torch.empty_like(partial)
        if plan.total_size:
            operands = (tensor.data_ptr() for tensor in (residual, norm_weight, normed, new_residual))
            norm_arguments = *operands, plan.total_size // plan.chunk_size, plan.chunk_size, eps
            self._launch(
                "all_reduce_rms_norm", plan, ALGORITHMS[algorithm], partial.data_ptr(), norm_arguments, plan.dtype_index
            )
        return normed, new_residual

    # -- data movement ------------------------------------------------------------------------------------------------

    def all_gather(self, shard: Tensor, counts: Sequence[int] | None = None, *, is_overlapped: bool = False) -> Tensor:
        """Concatenate the ranks' shards [m_r, ...], of any dtype, along dim 0.

        Args:
            counts: number of rows of each rank, equal except that the last ranks may have fewer; None: all ranks have
                as many rows as this one.
            is_overlapped: also use a separate workspace, because a CUDA graph may be replayed at the same time.
        """
        plan = self._plans.get("all_gather", shard, "", counts, is_overlapped)
        shard = shard.contiguous()
        out = shard.new_empty(plan.shape)
        if plan.total_size:
            # In a later capture this call is not overlapped: it uses the workspace "device", which cannot grow then.
            if is_overlapped:
                needed_bytes = self._plans.get("all_gather", shard, "", counts).nbytes
                self.reserve("device", needed_bytes, "all_gather")
            workspace_name = "overlapped gather" if is_overlapped else "device"
            self._launch(
                "all_gather",
                plan,
                shard.data_ptr(),
                out.data_ptr(),
                plan.total_size,
                plan.chunk_size,
                workspace_name=workspace_name,
            )
        return out

    def sequence_to_heads(self, x: Tensor) -> Tensor:
        """Convert a sequence shard [B, S/W, H, D] to a head shard [B, S, H/W, D], by an all-to-all."""
        x = with_dense_heads(x)
        return self._launch_all_to_all(x, *sequence_to_heads_layout(x, self.world_size))

    def heads_to_sequence(self, x: Tensor) -> Tensor:
        """Convert a head shard [B, S, H/W, D] to a sequence shard [B, S/W, H, D], by an all-to-all."""
        x = with_dense_heads(x)
        return self._launch_all_to_all(x, *heads_to_sequence_layout(x, self.world_size))

    def _launch_all_to_all(self, x: Tensor, layout: AllToAllLayout, out_shape: tuple[int, ...]) -> Tensor:
        plan = self._plans.all_to_all(layout, out_shape)
        out = x.new_empty(plan.shape)
        if plan.total_size:
            self._launch("all_to_all", plan, x.data_ptr(), out.data_ptr(), tuple(layout))
        return out

    def _launch(
        self, op: str, plan: DevicePlan, *arguments: Any, workspace_name: str = "device", algorithm: str = ""
    ) -> None:
        with self.use(workspace_name, plan.nbytes, op) as workspace:
            if algorithm == "multimem" and not workspace.multicast_address:
                raise ValueError(
                    "algorithm='multimem' needs multicast memory (NVLink switches with SHARP, Hopper or later), which "
                    "this group does not support. Use 'one_shot' or 'two_shot'."
                )
            getattr(self._kernels, op)(workspace.native, *arguments, plan.num_blocks, current_stream(self.device))


_preloaded_devices: set[tuple[int, int]] = set()
_preload_lock = threading.Lock()


def _preload(kernels: Any, device: torch.device) -> None:
    """Load all kernels on `device`, once.

    Loading a kernel at its first launch could deadlock: it may synchronize the device, on which another rank's kernel
    may wait for this launch.
    """
    if device.type != "cuda":
        return
    with _preload_lock, torch.cuda.device(device):
        key = id(kernels), torch.cuda.current_device()
        if key not in _preloaded_devices:
            kernels.preload()
            _preloaded_devices.add(key)


def _bias_address(bias: Tensor | None) -> tuple[int, int]:
    """Return (address, length) of `bias`; (0, 0) for None."""
    return (0, 0) if bias is None else (bias.data_ptr(), bias.numel())


@cache
def _workspace_class() -> Any:
    """Return the workspace class of native kernels. It is defined at the first use, because its base imports Triton."""
    core = import_module("fused_tp._core")
    from fused_tp.triton_kernels.comm.signals import Workspace

    class DeviceWorkspace(Workspace):
        def __init__(
            self, buffer: Tensor, handle: Any, *, timeout_seconds: float, rescue_stream: torch.cuda.Stream | None
        ) -> None:
            super().__init__(buffer, handle, timeout_seconds=timeout_seconds, counters=0, rescue_stream=rescue_stream)
            self.native = core.DeviceWorkspace(
                self.addresses.data_ptr(),
                self.state.data_ptr(),
                self.error.data_ptr(),
                self.half_bytes,
                self.timeout_ns,
                self.multicast_address,
                self.rank,
                self.world_size,
            )

        def _launch_begin(self) -> None:
            native_kernels().barrier(self.native, current_stream(self.buffer.device))

        def _load_begin_kernel(self) -> None:
            """Do nothing, because `_preload` has loaded all kernels."""

        @property
        def timeout_ns(self) -> int:
            return self._timeout_ns

        @timeout_ns.setter
        def timeout_ns(self, timeout_ns: int) -> None:
            self._timeout_ns = timeout_ns
            native = self.__dict__.get("native")  # the base constructor sets timeout_ns before `native` exists
            if native is not None:
                native.timeout_ns = timeout_ns

    return DeviceWorkspace


# -- sums of received terms -------------------------------------------------------------------------------------------


def sum_into(out: Tensor, terms: Tensor, bias: Tensor | None = None) -> None:
    """Write the sum of `terms` [t, ..., n] over dim 0 plus `bias` [n] to `out`.

    Terms are added in order, in float32 (float64 for float64), and the result is rounded once. `out` and each term must
    be contiguous.
    """
    if not out.numel():
        return
    if out.is_cuda and out.dtype in SUMMED_DTYPES and _has_kernels_for(out.device.index):
        bias = None if bias is None else bias.contiguous()
        with torch.cuda.device(out.device):
            native_kernels().sum_terms(
                terms.data_ptr(),
                terms.shape[0],
                terms.stride(0),
                out.data_ptr(),
                out.numel(),
                dtype_number(out.dtype),
                _bias_address(bias),
                current_stream(out.device),
            )
        return
    out.copy_(sum_in_rank_order(terms, bias))


@cache
def _has_kernels_for(device_index: int) -> bool:
    """True if the library contains code for GPU `device_index`; it may have been built for other GPUs only."""
    major, minor = torch.cuda.get_device_capability(device_index)
    return native_kernels_available(10 * major + minor).is_available
