"""The public ops on every schedule for GPUs: ranks as processes, which share a GPU where there are not enough.

The checks are those of tests/distributed/test_tp_ops.py: forward and all gradients against fp64.
"""

from __future__ import annotations

import pytest

from tests.gpu.on_device import environment, public_ops, unwrapped
from tests.workers import fresh_ranks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("schedule", ["one_shot", "two_shot", "fused_kernel", "nccl_pipeline", "copy_engine"])
def test_forward_and_gradients(schedule: str, world_size: int) -> None:
    env = environment(world_size)
    unwrapped(fresh_ranks(world_size, public_ops, "cuda", schedule, "bfloat16", timeout=400, env=env))
