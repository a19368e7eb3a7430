"""An error of one rank inside an op on shared memory ends the op on all ranks, at once, and the others hear why."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fused_tp
from fused_tp.runtime.errors import FusedTPError
from fused_tp.runtime.group import resolve_group
from fused_tp.schedules.one_sided import OneSided
from fused_tp.transport.shm import Workspace, shm_transport
from tests.workers import run_ranks

SOON = 5.0  # seconds; the deadline is 60


def gather(group: dist.ProcessGroup, x: torch.Tensor) -> torch.Tensor:
    transport = shm_transport(resolve_group(group))
    assert transport is not None
    return OneSided(transport).all_gather(x, gather_dim=0, gather_size=None).wait()


OPS: dict[str, Callable[[dist.ProcessGroup, torch.Tensor], Any]] = {
    "all_gather": gather,
    "all_gather_matmul": lambda group, x: fused_tp.all_gather_matmul(x, x, group=group),
}


def fail_to_copy_in(group: dist.ProcessGroup, op: str) -> str:
    """The last rank cannot get at its own workspace; what each rank then says. In the end the group works again."""
    x = torch.ones(3, 5)
    OPS[op](group, x)
    odd = dist.get_rank(group) == dist.get_world_size(group) - 1
    begun = time.perf_counter()
    # `error` is kept, and with it the frames that it came through: the call must have ended all the same.
    if odd:
        broken = mock.patch.object(Workspace, "buffer", side_effect=MemoryError("no room to copy"))
        with broken, pytest.raises(MemoryError) as error:
            OPS[op](group, x)
    else:
        with pytest.raises(FusedTPError) as error:
            OPS[op](group, x)
    assert time.perf_counter() - begun < SOON
    for _ in range(40):  # more calls than the group has slots: the failed one gave its slot back
        assert gather(group, x).shape == (3 * dist.get_world_size(group), 5)
    return str(error.value)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("op", list(OPS))
def test_a_rank_that_cannot_copy_in(op: str, world_size: int) -> None:
    *peers, odd = run_ranks(world_size, fail_to_copy_in, op, env={"FUSED_TP_SCHEDULE": "one_sided"})
    assert odd == "no room to copy"
    for said in peers:
        assert said.startswith(f"rank {world_size - 1} left {op}({3 * world_size}, 5, 0; float32), call ")
        assert said.endswith("because of an error of its own")
