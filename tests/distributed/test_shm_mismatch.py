"""Ranks that disagree: RankMismatchError on all of them, naming both sides; the group goes on working afterwards."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from fused_tp.runtime.errors import FusedTPError, RankMismatchError
from tests.distributed.shm_tools import new_tag, own_transport
from tests.workers import run_ranks

KINDS = [
    "shape",
    "shape_of_equal_size",
    "part_of",
    "dtype",
    "op",
    "order",
    "parts",
    "all_to_all",
    "empty",
    "begin",
]


def call(transport: Any, kind: str, differs: bool) -> None:
    x = torch.ones(40, 6)
    odd = int(differs)
    size = transport.world_size
    parts = [40 - 10 * (size - 1), *[10] * (size - 1)]
    if kind == "shape":
        transport.all_reduce(torch.ones(20_000 + odd))  # the others' two shots against one more
    elif kind == "shape_of_equal_size":
        transport.all_reduce(x.view(6, 40) if differs else x)
    elif kind == "part_of":
        transport.all_reduce(x, called="matmul_all_reduce" if differs else "all_reduce")
    elif kind == "dtype":
        transport.all_reduce(x.double() if differs else x)
    elif kind == "op":
        transport.barrier() if differs else transport.all_reduce(x)
    elif kind == "order":
        first, second = (lambda: transport.barrier()), (lambda: transport.all_reduce(x))
        for step in (second, first) if differs else (first, second):
            step()
    elif kind == "parts":  # of equal total
        transport.reduce_scatter(x, parts[::-1] if differs else parts)
    elif kind == "all_to_all":  # the last rank sends one row less to rank 0 than that expects
        send = [2] * size
        send[0] -= odd
        transport.all_to_all(x[: sum(send)], send, [2] * size)
    elif kind == "empty":
        empty = x[:0] if differs else x
        transport.all_reduce_rms_norm(empty, empty, x[0], 1e-5)
    elif kind == "begin":
        with transport.begin("mine", (3, 4 + odd), torch.float32, 48) as workspace:
            workspace.signal(1)
            workspace.wait_all(1)
    else:
        raise AssertionError(kind)


def disagree(group: Any, tag: str) -> dict[str, str]:
    """Every kind in turn on one group, which must be in step again after each; with the odd one early and late."""
    transport = own_transport(group, tag)
    last = transport.rank == transport.world_size - 1
    said = {}
    for late in (False, True):
        for kind in KINDS:
            if last == late:
                time.sleep(0.02)
            try:
                call(transport, kind, differs=last)
                said[kind] = "nothing"
            except FusedTPError as error:
                said[kind] = f"{type(error).__name__}: {error}"
            kept = said[kind]
            assert kept.startswith("RankMismatchError"), f"{kind} on rank {transport.rank}: {kept}"
            if kind == "order":  # the other half of the swapped pair
                with pytest.raises(RankMismatchError):
                    transport.barrier() if last else transport.all_reduce(torch.ones(40, 6))
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
