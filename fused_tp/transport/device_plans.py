"""Plans of device kernels: what a launch needs besides addresses, and whether its arguments fit, once for a shape.

An all-to-all has a layout, too: where its parts lie, so that a change of layout on the way costs no pass over memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from fused_tp.runtime import settings
from fused_tp.runtime.partition import shard_sizes
from fused_tp.transport.native_kernels import suggested_blocks, workspace_bytes
from fused_tp.transport.shm import dtype_number
from fused_tp.transport.symm_mem import KernelMemory

# All-reduces by name, as csrc/cuda/launchers.h numbers them. one_shot: every rank sums all terms; one hop, W times the
# bytes. two_shot: every rank sums its part and tells the others; two hops (Thakur et al., "Optimization of Collective
# Communication Operations in MPICH", 2005, section 3). multimem: the NVLink switch adds (PTX ISA, multimem.ld_reduce).
ALGORITHMS = {"one_shot": 0, "two_shot": 1, "multimem": 2}
# With a norm behind the sum a rank would have to fetch from the switch what it norms, and send it on as two_shot does.
NORMED_ALGORITHMS = ("one_shot", "two_shot")
SUMMED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Blocks of a kernel that overlaps with another. One on every SM would leave a matmul no room until the kernel ends,
# waits for peers included; and this many move about as much as NVLink takes. All ranks agree on whether they overlap.
OVERLAP_BLOCKS = 32

_MOST_KEPT = 4096  # lengths may keep changing


@dataclass(frozen=True)
class Plan:
    """The same for all calls of one shape, and on all ranks.

    Attributes:
        nbytes: of the workspace.
        blocks: of the launch.
        count: of elements, or of bytes where nothing is summed; 0: there is nothing to do.
        chunk: how many of them a rank has, or a row.
        dtype: its number.
        shape: of the result.
    """

    nbytes: int
    blocks: int
    count: int
    chunk: int
    dtype: int
    shape: tuple[int, ...]


class Plans:
    """The plans of one group's calls. Methods raise TypeError or ValueError where the arguments do not fit."""

    def __init__(self, memory: KernelMemory) -> None:
        self._memory = memory
        self._device = memory.device
        self._rank = memory.rank
        self._world_size = memory.world_size
        self._kept: dict[Hashable, Plan] = {}

    def all_reduce(self, x: Tensor, algorithm: str, bias: Tensor | None, overlapped: bool = False) -> Plan:
        def make() -> Plan:
            self._check_summed("x", x)
            _check_algorithm(algorithm, ALGORITHMS)
            _check_bias(bias, x, "x")
            return self._plan("all_reduce", algorithm, x.numel(), 0, x, x.shape, overlapped)

        return self._of(("all_reduce", algorithm, overlapped, *_traits(x), bias is not None and _traits(bias)), make)

    def reduce_scatter(
        self, rows: Tensor, counts: Sequence[int] | None, bias: Tensor | None, overlapped: bool = False
    ) -> Plan:
        cut = None if counts is None else tuple(counts)

        def make() -> Plan:
            self._check_summed("rows", rows)
            self._check_dims("rows", rows)
            _check_bias(bias, rows, "rows")
            sizes = self._checked_counts(cut or shard_sizes(rows.shape[0], self._world_size))
            if sum(sizes) != rows.shape[0]:
                raise ValueError(f"counts {sizes} add up to {sum(sizes)}; rows has {rows.shape[0]}.")
            shape = (sizes[self._rank], *rows.shape[1:])
            chunk = sizes[0] * prod(rows.shape[1:])
            return self._plan("reduce_scatter", "", rows.numel(), chunk, rows, shape, overlapped)

        return self._of(("reduce_scatter", cut, overlapped, *_traits(rows), bias is not None and _traits(bias)), make)

    def all_reduce_rms_norm(self, partial: Tensor, algorithm: str) -> Plan:
        def make() -> Plan:
            self._check_summed("partial", partial)
            self._check_dims("partial", partial)
            _check_algorithm(algorithm, NORMED_ALGORITHMS)
            columns = partial.shape[-1]
            return self._plan("all_reduce_rms_norm", algorithm, partial.numel(), columns, partial, partial.shape)

        return self._of(("all_reduce_rms_norm", algorithm, *_traits(partial)), make)

    def all_gather(self, shard: Tensor, counts: Sequence[int] | None, overlapped: bool = False) -> Plan:
        cut = None if counts is None else tuple(counts)

        def make() -> Plan:
            self._check_place("shard", shard)
            self._check_dims("shard", shard)
            sizes = self._checked_counts(cut or [shard.shape[0]] * self._world_size)
            if sizes[self._rank] != shard.shape[0]:
                raise ValueError(
                    f"counts {sizes} give rank {self._rank} {sizes[self._rank]} rows; shard has {shard.shape[0]}."
                )
            row = prod(shard.shape[1:]) * shard.element_size()
            shape = (sum(sizes), *shard.shape[1:])
            return self._plan("all_gather", "", sum(sizes) * row, sizes[0] * row, None, shape, overlapped)

        return self._of(("all_gather", cut, overlapped, *_traits(shard)), make)

    def all_to_all(self, x: Tensor, layout: AllToAllLayout, out_shape: Sequence[int]) -> Plan:
        shape = tuple(out_shape)

        def make() -> Plan:
            self._check_place("x", x)
            spans = _span(x) * x.element_size(), prod(shape) * x.element_size()
            for name, reach, has in zip(("x", "the result"), layout.reach(self._world_size), spans, strict=True):
                if reach > has:
                    raise ValueError(f"layout reaches over {reach} bytes of {name}, which has {has}: {layout}.")
            return self._plan("all_to_all", "", self._world_size * layout.part_bytes, layout.part_bytes, None, shape)

        return self._of(("all_to_all", layout, shape, x.stride(), *_traits(x)), make)

    # -----------------------------------------------------------------------------------------------------------------

    def _of(self, key: tuple[Hashable, ...], make: Callable[[], Plan]) -> Plan:
        key = (settings.sm_margin(), *key)
        plan = self._kept.get(key)
        if plan is None:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            plan = self._kept[key] = make()
        return plan

    def _plan(
        self,
        op: str,
        algorithm: str,
        count: int,
        chunk: int,
        summed: Tensor | None,
        shape: Sequence[int],
        overlapped: bool = False,
    ) -> Plan:
        number = 0 if summed is None else dtype_number(summed.dtype)
        if count == 0:
            return Plan(0, 0, 0, chunk, number, tuple(shape))
        # On the CPU it is threads that are counted, and none are spared.
        sms = self._memory.sms - (settings.sm_margin() if self._device.type == "cuda" else 0)
        most = max(1, min(sms, OVERLAP_BLOCKS) if overlapped else sms)
        arguments = op, ALGORITHMS.get(algorithm, 0), count, chunk, number, self._world_size
        blocks = suggested_blocks(*arguments, most)
        return Plan(workspace_bytes(*arguments, blocks), blocks, count, chunk, number, tuple(shape))

    def _check_place(self, name: str, x: Tensor) -> None:
        if x.device != self._device:
            raise ValueError(f"{name} is on {x.device}; this group's kernels work on {self._device}.")

    def _check_summed(self, name: str, x: Tensor) -> None:
        self._check_place(name, x)
        if x.dtype not in SUMMED_DTYPES:
            raise TypeError(f"{name} has dtype {x.dtype}; sums take float32, bfloat16 and float16.")

    def _check_dims(self, name: str, x: Tensor) -> None:
        if x.ndim == 0:
            raise ValueError(f"{name} must have at least one dim.")

    def _checked_counts(self, counts: Sequence[int]) -> list[int]:
        """Whether all ranks but the last ones have equally much, as kernels take for granted."""
        if len(counts) != self._world_size:
            raise ValueError(f"counts is {list(counts)}; one number is needed for each of {self._world_size} ranks.")
        left = sum(counts)
        for count in counts:
            if count != min(counts[0], left):
                raise ValueError(
                    f"counts is {list(counts)}; rows must be cut as torch.chunk does: equally many for each rank, and "
                    "what is left for the last ones."
                )
            left -= count
        return list(counts)


def check_like(name: str, tensor: Tensor, shape: Sequence[int], like: Tensor) -> None:
    """Raises where `tensor` has not this shape, or not the dtype and device of `like`."""
    if tensor.dtype != like.dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}; {like.dtype} is needed.")
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; {tuple(shape)} is needed.")
    if tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}; {like.device} is needed.")


def _check_algorithm(algorithm: str, known: Collection[str]) -> None:
    if algorithm not in known:
        raise ValueError(f"algorithm is {algorithm!r}; it must be one of {', '.join(known)}.")


def _check_bias(bias: Tensor | None, x: Tensor, name: str) -> None:
    if bias is None:
        return
    if x.ndim == 0:
        raise ValueError(f"{name} must have a dim for bias to run along.")
    check_like("bias", bias, x.shape[-1:], x)


def _traits(x: Tensor) -> tuple[Hashable, ...]:
    if not isinstance(x, Tensor):
        raise TypeError(f"A tensor is needed, not {type(x).__name__}.")
    return x.shape, x.dtype, x.device


def _span(x: Tensor) -> int:
    """Elements from the first to the last of `x`, in memory."""
    if x.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


# -- layouts of an all-to-all ------------------------------------------------------------------------------------------


class AllToAllLayout(NamedTuple):
    """An all-to-all of equal parts, in bytes: part p goes to rank p, and what comes from there is part p of the result.

    A part is [batches, rows] runs of row_bytes; the strides say where they lie. csrc/cuda/launchers.h has the same.
    """

    batches: int
    rows: int
    row_bytes: int
    in_part_stride: int
    in_batch_stride: int
    in_row_stride: int
    out_part_stride: int
    out_batch_stride: int
    out_row_stride: int

    @property
    def part_bytes(self) -> int:
        return self.batches * self.rows * self.row_bytes

    def reach(self, world_size: int) -> tuple[int, int]:
        """How many bytes of the input and of the result it spans.

        Raises:
            ValueError: a number is negative.
        """
        if min(self) < 0:
            raise ValueError(f"layout has a negative number: {self}.")
        if self.part_bytes == 0:
            return 0, 0
        steps = world_size - 1, self.batches - 1, self.rows - 1
        strides = self[3:6], self[6:9]
        of_input, of_result = (sum(n * s for n, s in zip(steps, side, strict=True)) for side in strides)
        return of_input + self.row_bytes, of_result + self.row_bytes


def sequence_to_heads(x: Tensor, world_size: int) -> tuple[AllToAllLayout, tuple[int, ...]]:
    """Layout and shape of the result for [B, S/W, H, D] -> [B, S, H/W, D]; heads of `x` lie one behind the other.

    Source: Jacobs et al., "DeepSpeed Ulysses", 2023.

    Raises:
        ValueError: `x` has not four dims, or H is not a multiple of `world_size`.

    Example:
        layout, shape = sequence_to_heads(q_shard_s, 4)
        q_shard_h = collectives.all_to_all(q_shard_s, layout, shape)
    """
    batches, rows, heads, head_dim = _four(x)
    if heads % world_size:
        raise ValueError(f"x has {heads} heads, which {world_size} ranks cannot share equally.")
    own = heads // world_size
    run = own * head_dim * x.element_size()
    here = run, x.stride(0) * x.element_size(), x.stride(1) * x.element_size()
    there = rows * run, world_size * rows * run, run
    return AllToAllLayout(batches, rows, run, *here, *there), (batches, world_size * rows, own, head_dim)


def heads_to_sequence(x: Tensor, world_size: int) -> tuple[AllToAllLayout, tuple[int, ...]]:
    """Layout and shape of the result for [B, S, H/W, D] -> [B, S/W, H, D]: the way back of `sequence_to_heads`.

    Raises:
        ValueError: `x` has not four dims, or S is not a multiple of `world_size`.
    """
    batches, length, own, head_dim = _four(x)
    if length % world_size:
        raise ValueError(f"x has a sequence of {length}, which {world_size} ranks cannot share equally.")
    rows = length // world_size
    run = own * head_dim * x.element_size()
    here = rows * x.stride(1) * x.element_size(), x.stride(0) * x.element_size(), x.stride(1) * x.element_size()
    there = run, rows * world_size * run, world_size * run
    return AllToAllLayout(batches, rows, run, *here, *there), (batches, rows, world_size * own, head_dim)


def with_dense_heads(x: Tensor) -> Tensor:
    """`x` [B, S, H, D], or a copy of it where its heads do not lie one behind the other."""
    dense = x.ndim == 4 and (x.stride(3) == 1 or x.shape[3] == 1) and (x.stride(2) == x.shape[3] or x.shape[2] == 1)
    return x if dense and min(x.stride()) >= 0 else x.contiguous()


def _four(x: Tensor) -> Sequence[int]:
    if x.ndim != 4:
        raise ValueError(f"x must be [batch, sequence, heads, head_dim]; it has shape {tuple(x.shape)}.")
    return x.shape
