"""Which rows move in which exchange of a pipeline over NCCL: csrc/nccl/chunk_plan.h, once for a size."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Plan:
    """Which rows move in which exchange (csrc/nccl/chunk_plan.h).

    Attributes:
        counts: rows of every rank.
        ranges: (start, stop) of the rows that arrive (gather), or go (scatter), in each exchange.
        pieces: in how many pieces each rank's rows are cut. Piece i of a scatter's own rows is complete after
            `len(ranges) / pieces * (i + 1)` exchanges.
    """

    native: Any
    counts: tuple[int, ...]
    ranges: tuple[tuple[tuple[int, int], ...], ...]
    pieces: int


@lru_cache(maxsize=1024)
def gather_plan(counts: tuple[int, ...], rank: int, chunks: int) -> Plan:
    """Rows of all ranks in up to `chunks` exchanges: those of rank - 1 first, then those of rank - 2, ..."""
    native = import_module("fused_tp._core").gather_plan(counts, rank, chunks)
    return Plan(native, counts, tuple(tuple(native.rows_received(i)) for i in range(len(native))), native.pieces)


@lru_cache(maxsize=1024)
def scatter_plan(counts: tuple[int, ...], rank: int, chunks: int) -> Plan:
    """Terms of all ranks' rows in up to `chunks` exchanges: those of the farthest owner first, the own ones stay."""
    native = import_module("fused_tp._core").scatter_plan(counts, rank, chunks)
    return Plan(native, counts, tuple(tuple(native.rows_sent(i)) for i in range(len(native))), native.pieces)
