"""Tensors as rows in the order of the ranks that hold them: the order in which transports move them.

A dim of length G in the middle of [lead, G, trail, n] is cut over the ranks. "Rank-major rows" are all of rank 0's
rows, then all of rank 1's: [sum_r lead * G_r * trail, n]. Where `lead` is 1 that is the tensor's own order and nothing
is copied. Else the copy is made on the side with the fewer bytes, which is the input of a matmul, not its output.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from fused_tp.runtime.partition import shard_sizes


def rank_offsets(sizes: Sequence[int]) -> list[int]:
    """Where each rank's part starts."""
    return [0, *accumulate(sizes)][:-1]


def gathered_sizes(x_shard: Tensor, dim: int, gather_size: int | None, world_size: int) -> list[int]:
    """Lengths of the ranks' shards along `dim`; `gather_size` None says that all are as long as this one."""
    return [x_shard.shape[dim]] * world_size if gather_size is None else shard_sizes(gather_size, world_size)


def gathered_shape(x_shard: Tensor, dim: int, sizes: Sequence[int]) -> list[int]:
    """Shape of the shards, `sizes` of them along `dim`, put together."""
    shape = list(x_shard.shape)
    shape[dim] = sum(sizes)
    return shape


def row_sizes(shape: Sequence[int], dim: int, sizes: Sequence[int]) -> list[int]:
    """How many rows (all dims but the last) each rank holds when `dim` of `shape` is cut into `sizes`."""
    others = prod(shape[:dim]) * prod(shape[dim + 1 : -1])
    return [others * size for size in sizes]


def as_rows(x: Tensor) -> Tensor:
    """`x` [..., n] as [rows, n]; unlike reshape(-1, n) also where there is nothing in it."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def to_rank_major(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """`x` [..., n] as contiguous rank-major rows [rows, n]."""
    if prod(x.shape[:dim]) == 1:
        return as_rows(x).contiguous()
    out = x.new_empty((prod(x.shape[:-1]), x.shape[-1]))
    start = 0
    for offset, size in zip(rank_offsets(sizes), sizes, strict=True):
        part = x.narrow(dim, offset, size)
        stop = start + part.numel() // max(1, x.shape[-1])
        out[start:stop].view(part.shape).copy_(part)
        start = stop
    return out


def from_rank_major(parts: Sequence[Tensor], shape: Sequence[int], dim: int) -> Tensor:
    """A tensor of `shape` from every rank's part of it along `dim`."""
    return torch.cat([part.view(*shape[:dim], -1, *shape[dim + 1 :]) for part in parts if part.numel()], dim=dim)


def placed(rows: Tensor, shape: Sequence[int], dim: int, counts: Sequence[int]) -> Tensor:
    """Rank-major `rows` [M, n], `counts` of each rank, as [*shape[:-1], n].

    A copy where dims before `dim` are longer than 1.
    """
    shape = [*shape[:-1], rows.shape[-1]]
    if prod(shape[:dim]) == 1 or rows.numel() == 0:
        return rows.view(shape)
    return from_rank_major(rows.split(list(counts)), shape, dim)
