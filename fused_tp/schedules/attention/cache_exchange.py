"""Tokens go from who computed their keys to who keeps them: one all-to-all of rows."""

from __future__ import annotations

from math import prod

import numpy as np
import torch
from torch import Tensor

from fused_tp.runtime.group import Group
from fused_tp.schedules.attention.dealing import Dealing
from fused_tp.schedules.attention.layouts import Tokens
from fused_tp.schedules.attention.masks import Ints
from fused_tp.schedules.select import select_schedule
from fused_tp.transport.nccl import nccl_dist
from fused_tp.transport.shm import shm_transport
from fused_tp.transport.torch_dist import torch_dist

_OP = "all_to_all"


def deal(group: Group, block: int, tokens: tuple[Tokens, ...], first: int, rows: Tensor) -> tuple[Ints, Tensor]:
    """The rows [n, ...] of this rank's tokens, counted from the cache's token `first` on, go to their owners.

    `tokens` says what each rank has. Returns which tokens of the cache arrived, in any order, and their rows.
    """
    dealing = Dealing(group.size, group.rank, block)
    held = [first + one.indices for one in tokens]
    owners = [dealing.owners(indices) for indices in held]
    order = np.argsort(owners[group.rank], kind="stable")
    send = np.bincount(owners[group.rank], minlength=group.size).tolist()
    receive = [int((theirs == group.rank).sum()) for theirs in owners]
    arriving = np.concatenate([indices[theirs == group.rank] for indices, theirs in zip(held, owners, strict=True)])
    return arriving, _exchange(group, rows[torch.from_numpy(order).to(rows.device)], send, receive, sum(map(len, held)))


def _exchange(group: Group, x: Tensor, send: list[int], receive: list[int], total: int) -> Tensor:
    """Rows by destination -> rows by source, over what serves the group; `total` rows on all ranks together."""
    if group.size == 1:
        return x
    name = select_schedule(_OP, group, x.dtype, x.device, total, None, prod(x.shape[1:])).name
    if name == "one_sided":
        shared = shm_transport(group)
        assert shared is not None, "select_schedule has just found it"
        return shared.all_to_all(x, send, receive)
    if name == "nccl_pipeline":
        own = nccl_dist(group, x.device)
        assert not isinstance(own, str), "select_schedule has just found it"
        return own.all_to_all(_OP, x, send, receive).wait()
    return torch_dist(group, x.device.type).all_to_all(_OP, x, send, receive).wait()
