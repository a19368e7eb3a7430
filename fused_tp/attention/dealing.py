"""Which tokens of a growing cache a rank holds: blocks of tokens are dealt out in turn, like cards.

Token i lies on rank (i // block) % W, in row (i // (block * W)) * block + i % block there. A token never moves, ranks
differ by one block at most, and everything follows from lengths alone, so nothing is ever sent to find it out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fused_tp.attention.layout import Tokens
from fused_tp.attention.spec import Ints

DEFAULT_BLOCK = 64


@dataclass(frozen=True)
class Dealing:
    """What `rank` of `world_size` holds. Its rows keep the order of the tokens.

    >>> Dealing(world_size=2, rank=1, block=2).count(7)  # tokens 2, 3 and 6
    3
    """

    world_size: int
    rank: int
    block: int

    def count(self, length: int) -> int:
        """How many of the first `length` tokens are held here: the row that token `length`, if held, lies in."""
        rounds, rest = divmod(length, self.block * self.world_size)
        return rounds * self.block + min(max(rest - self.rank * self.block, 0), self.block)

    def indices(self, start: int, stop: int) -> Ints:
        """Which tokens lie in the rows [start, stop); ascending."""
        rows = np.arange(start, stop, dtype=np.int64)
        return (rows // self.block * self.world_size + self.rank) * self.block + rows % self.block

    def tokens(self, start: int, stop: int) -> Tokens:
        """The same as ranges."""
        ranges = []
        while start < stop:
            end = min(stop, (start // self.block + 1) * self.block)
            first = (start // self.block * self.world_size + self.rank) * self.block + start % self.block
            ranges.append(range(first, first + end - start))
            start = end
        return Tokens(tuple(ranges))

    def rows(self, tokens: Ints) -> Ints:
        """In which rows these tokens lie, with whoever holds them."""
        return tokens // (self.block * self.world_size) * self.block + tokens % self.block

    def owners(self, tokens: Ints) -> Ints:
        """Who holds these tokens."""
        return tokens // self.block % self.world_size
