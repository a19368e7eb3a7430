"""Where the parts of an all-to-all lie, so that a change of layout on the way costs no pass over memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


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
