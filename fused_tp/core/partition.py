"""Shard ranges of a tensor dim over ranks, equal to DTensor's `Shard` (`torch.chunk`): the last ranks may hold less."""

from __future__ import annotations

from typing import TypeAlias

SymInt: TypeAlias = int
"""Annotation of a length that may be symbolic under `torch.compile`; op schemas declare it as SymInt."""


def shard_range(size: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return (start, stop) of the shard of `rank` in a dim of `size`.

    Shards have ceil(size / world_size) elements, except that the last shards may be shorter or empty.

    >>> [shard_range(7, 4, r) for r in range(4)]
    [(0, 2), (2, 4), (4, 6), (6, 7)]
    """
    chunk_size = -(-size // world_size)
    return min(rank * chunk_size, size), min((rank + 1) * chunk_size, size)


def shard_sizes(size: int, world_size: int) -> list[int]:
    """Return the length of every rank's shard of a dim of `size`.

    >>> shard_sizes(5, 4)
    [2, 2, 1, 0]
    """
    chunk_size = -(-size // world_size)
    return [max(0, min(chunk_size, size - rank * chunk_size)) for rank in range(world_size)]
