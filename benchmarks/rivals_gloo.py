"""Rival: what torch ships for CPU ranks, the matmul and then a collective of gloo's."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from fused_tp.transport._torch_compat import all_gather_single, reduce_scatter_single


def matmul_all_reduce(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K/W], weight [N, K/W] -> [M, N] summed over the ranks."""
    partial = F.linear(x, weight)
    dist.all_reduce(partial)
    return partial


def all_gather_matmul(x_shard_m: Tensor, weight: Tensor) -> Tensor:
    """x_shard_m [M/W, K], weight [N/W, K] -> [M, N/W]."""
    x = x_shard_m.new_empty(x_shard_m.shape[0] * dist.get_world_size(), x_shard_m.shape[1])
    all_gather_single(x, x_shard_m)
    return F.linear(x, weight)


def matmul_reduce_scatter(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K/W], weight [N, K/W] -> [M/W, N], this rank's rows of the sum."""
    partial = F.linear(x, weight)
    y_shard_m = torch.empty(partial.shape[0] // dist.get_world_size(), partial.shape[1], dtype=partial.dtype)
    reduce_scatter_single(y_shard_m, partial)
    return y_shard_m
