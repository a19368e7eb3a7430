"""Launch plans of device kernels: all arguments of a launch except addresses, computed once per shape.

The plan of an all-to-all also contains the strides of its input and output, so that the kernel can transpose without an
extra pass over memory. Arguments are not checked here, because the ops have checked them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from fused_tp.backends.shared_memory.shm import dtype_number
from fused_tp.backends.symmetric_memory.symm_mem import KernelMemory
from fused_tp.core import settings
from fused_tp.core.partition import shard_sizes

# All-reduce algorithms, with their numbers in csrc/cuda/launchers.h. one_shot: every rank sums the full tensor; one
# hop, W times the bytes. two_shot: every rank sums one slice and sends the sum to its peers; two hops (Thakur et al.,
# "Optimization of Collective Communication Operations in MPICH", 2005, section 3). multimem: the NVLink switch computes
# the sum (PTX ISA, multimem.ld_reduce).
ALGORITHMS = {"one_shot": 0, "two_shot": 1, "multimem": 2}
# multimem is excluded, because the switch cannot normalize: a rank would have to read its rows from the switch,
# normalize them and send them to its peers, as two_shot does.
NORM_ALGORITHMS = ("one_shot", "two_shot")
SUMMED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Number of blocks of a kernel that overlaps with another one. A block on every SM would delay a concurrent matmul until
# the kernel, including its waits for peers, has finished. 32 blocks approximately saturate NVLink. All ranks must use
# the same number, so they must agree on whether a call is overlapped.
OVERLAP_BLOCKS = 32

_MAX_CACHED_PLANS = 4096  # bounds the cache if sequence lengths keep changing


@dataclass(frozen=True)
class DevicePlan:
    """Launch plan of all calls of one shape; all fields except `shape` are equal on all ranks."""

    nbytes: int  # size of the workspace
    num_blocks: int  # of the launch
    total_size: int  # in elements for sums, in bytes for data movement; 0: no launch
    chunk_size: int  # number of elements or bytes of one rank; for norms, of one row
    dtype_index: int  # number of the dtype in csrc/dtype.h
    shape: tuple[int, ...]  # shape of the result on this rank


class PlanCache:
    """Cache of the launch plans of one group."""

    def __init__(self, memory: KernelMemory) -> None:
        self._memory = memory
        self._world_size = memory.world_size
        self._cache: dict[Hashable, DevicePlan] = {}

    def get(
        self,
        op: str,
        x: Tensor,
        algorithm: str = "",
        counts: Sequence[int] | None = None,
        is_overlapped: bool = False,
    ) -> DevicePlan:
        """Return the plan of `op` on `x` [M, ..., n]. `counts`: rows of each rank, for gathers and scatters."""
        key = op, algorithm, counts and tuple(counts), is_overlapped, x.shape, x.dtype
        return self._cached_plan(key, partial(self._make_plan, op, x, algorithm, counts, is_overlapped))

    def all_to_all(self, layout: AllToAllLayout, shape: tuple[int, ...]) -> DevicePlan:
        """Return the plan of an all-to-all with this layout and result shape."""
        part_bytes = layout.part_bytes
        make_plan = partial(self._plan_launch, "all_to_all", "", self._world_size * part_bytes, part_bytes, None, shape)
        return self._cached_plan((layout, shape), make_plan)

    def _cached_plan(self, key: tuple[Hashable, ...], make_plan: Callable[[], DevicePlan]) -> DevicePlan:
        key = (settings.sm_margin(), *key)
        plan = self._cache.get(key)
        if plan is None:
            if len(self._cache) >= _MAX_CACHED_PLANS:
                self._cache.clear()
            plan = self._cache[key] = make_plan()
        return plan

    def _make_plan(
        self, op: str, x: Tensor, algorithm: str, counts: Sequence[int] | None, is_overlapped: bool
    ) -> DevicePlan:
        row_size = prod(x.shape[1:])
        if op == "all_gather":  # sizes in bytes, because the dtype does not matter
            sizes, row_size = counts or [x.shape[0]] * self._world_size, row_size * x.element_size()
            shape = (sum(sizes), *x.shape[1:])
            return self._plan_launch(
                op, algorithm, sum(sizes) * row_size, sizes[0] * row_size, None, shape, is_overlapped
            )
        chunk_size, shape = 0, tuple(x.shape)
        if op == "reduce_scatter":
            sizes = counts or shard_sizes(x.shape[0], self._world_size)
            chunk_size, shape = sizes[0] * row_size, (sizes[self._memory.rank], *x.shape[1:])
        elif op == "all_reduce_rms_norm":
            chunk_size = x.shape[-1]
        return self._plan_launch(op, algorithm, x.numel(), chunk_size, x.dtype, shape, is_overlapped)

    def _plan_launch(
        self,
        op: str,
        algorithm: str,
        total_size: int,
        chunk_size: int,
        summed_dtype: torch.dtype | None,
        shape: tuple[int, ...],
        is_overlapped: bool = False,
    ) -> DevicePlan:
        if summed_dtype is not None and summed_dtype not in SUMMED_DTYPES:
            raise TypeError(f"Sums must have dtype float32, bfloat16 or float16, got {summed_dtype}.")
        dtype_index = 0 if summed_dtype is None else dtype_number(summed_dtype)
        if total_size == 0:
            return DevicePlan(0, 0, 0, chunk_size, dtype_index, shape)
        # The margin applies to GPUs only: in the CPU build, blocks are threads.
        sms = self._memory.sms - (settings.sm_margin() if self._memory.device.type == "cuda" else 0)
        max_blocks = max(1, min(sms, OVERLAP_BLOCKS) if is_overlapped else sms)
        arguments = op, ALGORITHMS.get(algorithm, 0), total_size, chunk_size, dtype_index, self._world_size
        core = import_module("fused_tp._core")
        num_blocks, nbytes = core.device_plan(*arguments, max_blocks)
        return DevicePlan(nbytes, num_blocks, total_size, chunk_size, dtype_index, shape)


# -- layouts of an all-to-all ------------------------------------------------------------------------------------------


class AllToAllLayout(NamedTuple):
    """Layout of an all-to-all of equal chunks: chunk p goes to rank p, and rank p's chunk becomes result chunk p.

    A chunk ("part" in names) consists of [num_batches, num_rows] contiguous runs of row_bytes. Strides are in bytes,
    for the input and the output. csrc/cuda/launchers.h has the same struct.
    """

    num_batches: int
    num_rows: int
    row_bytes: int
    in_part_stride: int
    in_batch_stride: int
    in_row_stride: int
    out_part_stride: int
    out_batch_stride: int
    out_row_stride: int

    @property
    def part_bytes(self) -> int:
        return self.num_batches * self.num_rows * self.row_bytes


def sequence_to_heads_layout(x: Tensor, world_size: int) -> tuple[AllToAllLayout, tuple[int, ...]]:
    """Return layout and result shape of [B, S/W, H, D] -> [B, S, H/W, D]; the heads of `x` must be contiguous.

    Source: Jacobs et al., "DeepSpeed Ulysses", 2023.
    """
    num_batches, num_rows, num_heads, head_dim = x.shape
    heads_per_rank = num_heads // world_size
    run_bytes = heads_per_rank * head_dim * x.element_size()
    in_strides = run_bytes, x.stride(0) * x.element_size(), x.stride(1) * x.element_size()
    out_strides = num_rows * run_bytes, world_size * num_rows * run_bytes, run_bytes
    return AllToAllLayout(num_batches, num_rows, run_bytes, *in_strides, *out_strides), (
        num_batches,
        world_size * num_rows,
        heads_per_rank,
        head_dim,
    )


def heads_to_sequence_layout(x: Tensor, world_size: int) -> tuple[AllToAllLayout, tuple[int, ...]]:
    """Return layout and result shape of [B, S, H/W, D] -> [B, S/W, H, D], the inverse of `sequence_to_heads_layout`."""
    num_batches, length, heads_per_rank, head_dim = x.shape
    num_rows = length // world_size
    run_bytes = heads_per_rank * head_dim * x.element_size()
    in_strides = (
        num_rows * x.stride(1) * x.element_size(),
        x.stride(0) * x.element_size(),
        x.stride(1) * x.element_size(),
    )
    out_strides = run_bytes, num_rows * world_size * run_bytes, world_size * run_bytes
    return AllToAllLayout(num_batches, num_rows, run_bytes, *in_strides, *out_strides), (
        num_batches,
        num_rows,
        world_size * heads_per_rank,
        head_dim,
    )


def with_dense_heads(x: Tensor) -> Tensor:
    """Return `x` [B, S, H, D], or a contiguous copy if its heads are not contiguous."""
    is_dense = x.ndim == 4 and (x.stride(3) == 1 or x.shape[3] == 1) and (x.stride(2) == x.shape[3] or x.shape[2] == 1)
    return x if is_dense and min(x.stride()) >= 0 else x.contiguous()
