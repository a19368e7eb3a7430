"""Measurements that `fused-tp compare` takes of one variant."""

from __future__ import annotations

from dataclasses import dataclass

WARMUP = 2  # the first steps are not timed: they allocate memory, connect ranks and choose schedules


@dataclass
class VariantResult:
    """Measurements of a variant; lists hold one value per step.

    Attributes:
        seconds: time of the slowest rank.
        waited: seconds that a rank waited for its peers, averaged over ranks.
        memory: peak bytes of any rank; None if another variant ran in the same process before.
    """

    name: str
    ranks: int
    threads: int
    tokens: int
    seconds: list[float]
    waited: list[float]
    losses: list[float]
    memory: int | None
