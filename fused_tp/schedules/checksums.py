"""Checksums by which ranks compare what they were called with, beside what they exchange anyway."""

from __future__ import annotations

import zlib
from collections.abc import Sequence


def checksum(words: str) -> int:
    """Of 24 bits: a float of any transport holds them."""
    return zlib.crc32(words.encode()) & 0xFFFFFF


def first_apart(checksums: Sequence[float]) -> int:
    """The first rank whose checksum is not that of rank 0; 0 where all are alike."""
    return next((rank for rank, theirs in enumerate(checksums) if theirs != checksums[0]), 0)
