"""Sharding of a tensor dim over ranks, as DTensor's `Shard` does it (`torch.chunk`): the last ranks may hold less."""

from __future__ import annotations

from typing import TypeAlias

SymInt: TypeAlias = int
"""Annotation of a length that may be symbolic under `torch.compile`; schemas of ops declare it as SymInt."""


def shard_range(size: int, world_size: int, rank: int) -> tuple[int, int]:
    """Start and stop of `rank`'s shard of a dim of `size`: ceil(size / world_size) long, the last ones short or empty.

    >>> [shard_range(7, 4, r) for r in range(4)]
    [(0, 2), (2, 4), (4, 6), (6, 7)]
    """
    chunk = -(-size // world_size)
    return min(rank * chunk, size), min((rank + 1) * chunk, size)


def shard_sizes(size: int, world_size: int) -> list[int]:
    """Length of every rank's shard of a dim of `size`.

    >>> shard_sizes(5, 4)
    [2, 2, 1, 0]
    """
    chunk = -(-size // world_size)
    return [max(0, min(chunk, size - rank * chunk)) for rank in range(world_size)]
