"""Distribution of attention heads over ranks whose number does not divide the number of heads."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from math import gcd, inf
from typing import NamedTuple


class RankHeads(NamedTuple):
    """Attention heads of one rank.

    Attributes:
        start, stop: range of its query heads.
        kv_heads: its key/value heads, each read by the same number of consecutive query heads. A head is repeated if
            the query heads that read it are not a multiple of those that read another one.
    """

    start: int
    stop: int
    kv_heads: tuple[int, ...]

    @property
    def num_heads(self) -> int:
        return self.stop - self.start

    @property
    def group_size(self) -> int:
        """Number of query heads that read each key/value head."""
        return self.num_heads // len(self.kv_heads)


@cache
def partition_heads(
    num_heads: int, num_kv_heads: int, num_ranks: int, *, keeps_groups: bool = False
) -> tuple[RankHeads, ...]:
    """Return each rank's heads: consecutive query heads, at least one, and the key/value heads that they read.

    The load of a rank is its number of query heads, which its attention computes, plus that of key/value heads, which
    its cache holds. The partition minimizes the largest load, then the sum of loads, then the distance from an equal
    split.

    Args:
        keeps_groups: no two ranks share the query heads of one key/value head.

    Raises:
        ValueError: there are more ranks than query heads, or than key/value heads with `keeps_groups`.

    >>> [(rank.num_heads, rank.kv_heads) for rank in partition_heads(16, 8, 3)]
    [(6, (0, 1, 2)), (4, (3, 4)), (6, (5, 6, 7))]
    >>> [(rank.num_heads, rank.kv_heads) for rank in partition_heads(8, 2, 3)]
    [(3, (0,)), (2, (0, 1)), (3, (1,))]
    """
    group_size = num_heads // num_kv_heads
    step = group_size if keeps_groups else 1
    if num_ranks * step > num_heads:
        limit = num_heads // step
        raise ValueError(f"at most {limit} ranks can share {limit} {'key/value' if keeps_groups else 'query'} heads.")
    # By number of query heads of the first ranks: (largest load, sum of loads, distance from an equal split, bounds).
    best: dict[int, tuple[float, float, float, tuple[int, ...]]] = {0: (0, 0, 0, (0,))}
    for rank in range(num_ranks):
        previous, best = best, {}
        ideal_stop, later_heads = num_heads * (rank + 1) / num_ranks, (num_ranks - rank - 1) * step
        stops = range(step, num_heads - later_heads + 1, step) if later_heads else (num_heads,)
        for stop in stops:
            options = []
            for start, (largest, total, distance, bounds) in previous.items():
                if start < stop:
                    heads = _rank_heads(start, stop, group_size)
                    load = heads.num_heads + len(heads.kv_heads)
                    options.append(
                        (max(largest, load), total + load, distance + abs(stop - ideal_stop), (*bounds, stop))
                    )
            best[stop] = min(options, default=(inf, inf, inf, ()))
        best = {stop: option for stop, option in best.items() if option[3]}
    return tuple(_rank_heads(start, stop, group_size) for start, stop in pairwise(best[num_heads][3]))


@cache
def _rank_heads(start: int, stop: int, group_size: int) -> RankHeads:
    bounds = [start, *range((start // group_size + 1) * group_size, stop, group_size), stop]
    local_group_size = gcd(*(after - before for before, after in pairwise(bounds)))
    return RankHeads(start, stop, tuple(head // group_size for head in range(start, stop, local_group_size)))
