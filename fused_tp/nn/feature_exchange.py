"""Exchange of features (the last dim) between layers that distribute them over ranks differently.

The parameters of a layer are sharded like torch.chunk, so that optimizers, checkpoints and FSDP2 support them for any
number of ranks. Attention needs complete heads. If the number of ranks does not divide the heads, the two differ by a
few features at the ends of the shards. Rejected: moving rows of the weights instead, which copies the weights in each
forward, and sends as much in decoding as in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fused_tp.core.partition import shard_range
from fused_tp.ops.collectives import all_gather

Ranges: TypeAlias = "tuple[tuple[int, int], ...]"
"""Ranges (start, stop) of features, in the order in which a rank has them."""


class _Slice(NamedTuple):
    """Consecutive features of a tensor: of this rank's own, or of the gathered one."""

    is_own: bool
    offset: int
    length: int


class _Routes(NamedTuple):
    """Slices of the features in an exchange, by rank.

    Attributes:
        sent: slices of the rank's own features that other ranks need.
        taken: slices of which its result consists.
        width: largest number of features that a rank sends.
    """

    sent: tuple[tuple[_Slice, ...], ...]
    taken: tuple[tuple[_Slice, ...], ...]
    width: int


class FeatureExchange:
    """Exchange after which each rank has the features that it needs.

    Args:
        held: features that each rank has before; together, each feature once.
        needed: features that each rank has after. Ranks may need the same features: backward sums their gradients.
    """

    def __init__(self, held: tuple[Ranges, ...], needed: tuple[Ranges, ...]) -> None:
        self._routes = _find_routes(held, needed)  # now, because torch.compile would trace the search

    @property
    def num_gathered_features(self) -> int:
        """Number of features per token that each rank receives, with its own."""
        return len(self._routes.sent) * self._routes.width

    def __call__(self, x: Tensor, mesh: DeviceMesh) -> Tensor:
        """Return the needed features of this rank, for its held features `x` [..., features].

        One all-gather of the features that other ranks need; backward is a reduce-scatter. All ranks take part in both.
        """
        routes, rank = self._routes, mesh.get_local_rank()
        if not routes.width:
            return x
        sent = torch.cat([x.narrow(-1, 0, 0), *(x.narrow(-1, s.offset, s.length) for s in routes.sent[rank])], -1)
        gathered = all_gather(F.pad(sent, (0, routes.width - sent.shape[-1])), -1, group=mesh)
        # An empty slice of `gathered`, because backward must reach the collective on ranks that take nothing from it.
        slices = ((x if s.is_own else gathered).narrow(-1, s.offset, s.length) for s in routes.taken[rank])
        return torch.cat([gathered.narrow(-1, 0, 0), *slices], -1)


def chunks(num_features: int, num_ranks: int) -> tuple[Ranges, ...]:
    """Return the features of each rank's shard of a parameter."""
    return tuple((shard_range(num_features, num_ranks, rank),) for rank in range(num_ranks))


@cache
def _find_routes(held: tuple[Ranges, ...], needed: tuple[Ranges, ...]) -> _Routes:
    bounds = sorted({bound for ranges in (*held, *needed) for range_ in ranges for bound in range_})
    stops = dict(pairwise(bounds))  # of the segments between neighboring bounds, by start

    def segments(ranges: Ranges) -> list[int]:
        return [bound for start, stop in ranges for bound in bounds if start <= bound < stop]

    def slices(starts: Sequence[int], offsets: dict[int, tuple[bool, int]]) -> tuple[_Slice, ...]:
        merged: list[_Slice] = []
        for start in starts:
            is_own, offset = offsets[start]
            length = stops[start] - start
            if merged and merged[-1].is_own == is_own and sum(merged[-1][1:]) == offset:
                merged[-1] = merged[-1]._replace(length=merged[-1].length + length)
            else:
                merged.append(_Slice(is_own, offset, length))
        return tuple(merged)

    held_segments, needed_segments = [segments(r) for r in held], [segments(r) for r in needed]
    sent_segments = [
        [start for start in own if any(start in needed for i, needed in enumerate(needed_segments) if i != rank)]
        for rank, own in enumerate(held_segments)
    ]
    widths = [sum(stops[start] - start for start in starts) for starts in sent_segments]
    gathered_offsets = {
        start: (False, rank * max(widths) + offset)
        for rank, starts in enumerate(sent_segments)
        for start, offset in _offsets(starts, stops).items()
    }
    own_offsets = [
        {start: (True, offset) for start, offset in _offsets(starts, stops).items()} for starts in held_segments
    ]
    sent = (slices(starts, offsets) for starts, offsets in zip(sent_segments, own_offsets, strict=True))
    taken = (
        slices(starts, gathered_offsets | offsets) for starts, offsets in zip(needed_segments, own_offsets, strict=True)
    )
    return _Routes(tuple(sent), tuple(taken), max(widths))


def _offsets(starts: Sequence[int], stops: dict[int, int]) -> dict[int, int]:
    """Return the offset of each segment in a tensor that has the segments one after the other."""
    offsets, offset = {}, 0
    for start in starts:
        offsets[start] = offset
        offset += stops[start] - start
    return offsets
