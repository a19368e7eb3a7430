"""Sharing packed documents out: equally many tokens and nearly equal attention work for every rank."""

from __future__ import annotations


def balanced_ranges(cu_seqlens: tuple[int, ...], world_size: int) -> list[tuple[range, ...]]:
    """The tokens of every rank, as ascending ranges of the packed sequence."""
    raise NotImplementedError
