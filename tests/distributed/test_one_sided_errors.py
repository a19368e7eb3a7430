"""An error of one rank inside an op on shared memory ends the op on all ranks, at once, and the others hear why."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fused_tp
from fused_tp.runtime.errors import FusedTPError
from fused_tp.runtime.group import resolve_group
from fused_tp.schedules import one_sided
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


def fail_between_two_calls(group: dist.ProcessGroup) -> str:
    """Rank 0 raises in a backward while its gather of x is under way, and keeps the error. The group works on."""
    x, w = torch.ones(4, 6, requires_grad=True), torch.ones(8, 6, requires_grad=True)
    y = fused_tp.all_gather_matmul(x, w, group=group)
    broken = mock.patch.object(one_sided, "sum_of_products", side_effect=MemoryError("no room for a product"))
    with broken if dist.get_rank(group) == 0 else nullcontext(), pytest.raises((MemoryError, FusedTPError)) as error:
        y.sum().backward()
    for _ in range(40):
        assert gather(group, x.detach()).shape == (4 * dist.get_world_size(group), 6)
    return str(error.value)


def test_what_an_error_has_interrupted_has_ended_though_the_error_is_kept() -> None:
    own, others = run_ranks(2, fail_between_two_calls, env={"FUSED_TP_SCHEDULE": "one_sided"})
    assert own == "no room for a product" and others.startswith("rank 0 left matmul_reduce_scatter(8, 6, 0; float32)")
