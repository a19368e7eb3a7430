"""Ranks that disagree: RankMismatchError on all of them, naming both sides; the group works afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fused_tp.core.errors import RankMismatchError
from tests.distributed.shm_tools import new_tag, own_transport
from tests.workers import error_of, run_ranks

X = torch.ones(40, 6)


def swapped(transport: Any, odd: bool) -> None:
    calls = [transport.barrier, lambda: transport.all_reduce(X)]
    for call in reversed(calls) if odd else calls:
        call()


def parts(transport: Any, odd: bool) -> None:
    """Reduce-scatter with other parts on the odd rank, of equal total."""
    sizes = [40 - 10 * (transport.world_size - 1), *[10] * (transport.world_size - 1)]
    transport.reduce_scatter(X, sizes[::-1] if odd else sizes)


def all_to_all(transport: Any, odd: bool) -> None:
    """All-to-all in which the last rank sends one row less than rank 0 expects."""
    send = [2 - odd, *[2] * (transport.world_size - 1)]
    transport.all_to_all(X[: sum(send)], send, [2] * transport.world_size)


def begin(transport: Any, odd: bool) -> None:
    with transport.begin("mine", (3, 4 + odd), torch.float32, 48) as workspace:
        workspace.signal(1)
        workspace.wait_all(1)


KINDS: dict[str, Callable[[Any, bool], object]] = {
    "shape": lambda one, odd: one.all_reduce(torch.ones(20_000 + odd)),  # the others' two shots against one more
    "shape_of_equal_size": lambda one, odd: one.all_reduce(X.view(6, 40) if odd else X),
    "part_of": lambda one, odd: one.all_reduce(X, op_name="matmul_all_reduce" if odd else "all_reduce"),
    "dtype": lambda one, odd: one.all_reduce(X.double() if odd else X),
    "op": lambda one, odd: one.barrier() if odd else one.all_reduce(X),
    "order": swapped,
    "parts": parts,
    "all_to_all": all_to_all,
    "empty": lambda one, odd: one.all_reduce_rms_norm(*[X[:0] if odd else X] * 2, X[0], 1e-5),
    "begin": begin,
}


def disagree(group: Any, tag: str) -> dict[str, str]:
    """Try every kind of mismatch on one group, with the odd rank early and late; ranks must stay in step."""
    transport = own_transport(group, tag)
    last = transport.rank == transport.world_size - 1
    said = {}
    for late in (False, True):
        for kind in KINDS:
            if last == late:
                time.sleep(0.02)
            error = error_of(KINDS[kind], transport, last)
            assert isinstance(error, RankMismatchError), f"{kind} on rank {transport.rank}: {error}"
            said[kind] = str(error)
            if kind == "order":  # the other half of the swapped pair
                with pytest.raises(RankMismatchError):
                    transport.barrier() if last else transport.all_reduce(X)
            total = transport.all_reduce(torch.ones(20_000))
            assert total.eq(transport.world_size).all(), f"after {kind}"
    return said


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_learn_of_a_disagreement(world_size: int) -> None:
    found = run_ranks(world_size, disagree, new_tag())
    last = world_size - 1
    for rank, said in enumerate(found):
        assert "all_to_all: rank" in said["all_to_all"] and "which expects 12" in said["all_to_all"]
        for kind, sentence in said.items():
            if kind != "all_to_all":
                assert "ranks disagree about call" in sentence and f"rank {rank} called" in sentence, kind
                assert f"rank {last} called" in sentence, f"{kind} on {rank} does not name the odd one: {sentence}"
        assert "all_reduce(20001; float32)" in said["shape"] and "all_reduce(20000; float32)" in said["shape"]
        assert "float64" in said["dtype"] and "float32" in said["dtype"]
        assert "barrier(" in said["op"] and "all_reduce(" in said["op"]
        assert "mine(3, 5; float32)" in said["begin"] and "mine(3, 4; float32)" in said["begin"]
