"""Attention by heads, and by heads inside of a ring, on real ranks: every mask and score against fp64."""

from __future__ import annotations

import pytest

from fused_tp.ops.ulysses_attention import ulysses_attention
from tests.attention_cases import FEATURES, run


@pytest.mark.parametrize(("world_size", "route"), [(1, "one_sided"), (2, "plain"), (4, "one_sided"), (4, "pipelined")])
def test_features(world_size: int, route: str) -> None:
    run(world_size, list(FEATURES.values()), route, ulysses_attention)
