"""An op that raises on one rank, over messages: after its first exchange the group is aborted, before it is not.

Peers notice at once, and no rank takes a call for another one. The same on shared memory is in
test_one_sided_errors.py, and on schedules of GPUs in the files of their transports.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fused_tp
from fused_tp.runtime.errors import FusedTPError, RankMismatchError
from fused_tp.runtime.group import resolve_group
from fused_tp.schedules import base, hierarchical, pipelined, plain
from fused_tp.transport import torch_dist as torch_dist_module
from fused_tp.transport.torch_dist import torch_dist
from tests.distributed.schedule_cases import CPU
from tests.workers import run_ranks

# The ops have the names of their modules.
decode_module, column_module = (
    import_module(f"fused_tp.ops.{op}") for op in ("context_parallel_decode", "column_parallel_matmul")
)

NOTICE_SECONDS = 4.0  # where many processes share a core; the deadline is 60 s
WORLD = 4
NEEDS_CORE = pytest.mark.skipif(find_spec("fused_tp._core") is None, reason="needs the native core: pip install -e .")


class OutOfMemory(Exception):
    """Of one rank alone."""


@dataclass(frozen=True)
class Failure:
    """What an endless loop of an op has raised, how long its last call took, and what the next call says."""

    kind: str
    message: str
    seconds: float
    again: str


def failure_of(run: Callable[[], object]) -> Failure:
    begun = time.monotonic()
    with pytest.raises(FusedTPError) as first:
        for _ in range(1000):
            begun = time.monotonic()
            run()
    seconds = time.monotonic() - begun
    with pytest.raises(FusedTPError, match="unusable since an earlier") as second:
        run()
    return Failure(type(first.value).__name__, str(first.value), seconds, str(second.value))


@contextmanager
def group_on(schedule: str) -> Iterator[Any]:
    """A new group of all ranks, whose ops run on `schedule`."""
    env = {"FUSED_TP_SCHEDULE": schedule, "FUSED_TP_TIMEOUT": "60", "FUSED_TP_HOST": "aabb"[dist.get_rank()]}
    if schedule != "hierarchical":
        del env["FUSED_TP_HOST"]
    with mock.patch.dict(os.environ, env):
        yield dist.new_group(list(range(dist.get_world_size())))


def step(group: Any) -> None:
    """Some ops, whose results are right."""
    size = dist.get_world_size(group)
    x, w = torch.ones(4 * size, 6), torch.ones(5, 6)
    for op, right in ((fused_tp.all_gather_matmul, 6.0), (fused_tp.matmul_reduce_scatter, 6.0 * size),
                      (fused_tp.matmul_all_reduce, 6.0 * size)):  # fmt: skip
        y = op(x, w, group=group)
        assert y.eq(right).all(), op


# ---- raising in the middle of an op ----------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where rank 0 raises: at call `number` of `name` in `where`, while `op` runs on `schedule`."""

    schedule: str
    op: Callable[[Any, float], object]
    where: Any
    name: str
    number: int = 1


# Call number n of an op takes n: where a call of one rank is taken for another call of a peer, numbers are wrong.


def x_and_w(group: Any, n: float) -> tuple[torch.Tensor, torch.Tensor]:
    x, w = torch.full((4 * group.size(), 6), n), torch.ones(8, 6)
    return x.requires_grad_(), w.requires_grad_()


def gather_matmul(group: Any, n: float) -> None:
    assert fused_tp.all_gather_matmul(*x_and_w(group, n), group=group).eq(6 * n).all()


def matmul_scatter(group: Any, n: float) -> None:
    assert fused_tp.matmul_reduce_scatter(*x_and_w(group, n), group=group).eq(6 * n * group.size()).all()


def matmul_sum(group: Any, n: float) -> None:
    assert fused_tp.matmul_all_reduce(*x_and_w(group, n), group=group).eq(6 * n * group.size()).all()


def backward(group: Any, n: float) -> None:
    """A gather for the gradient of w, and meanwhile the sum for that of x."""
    x, w = x_and_w(group, n)
    y = n * fused_tp.all_gather_matmul(x, w, group=group)
    dx, dw = torch.autograd.grad(y.sum(), (x, w))
    assert dx.eq(8 * n * group.size()).all() and dw.eq(n * n * len(y)).all()


def meanwhile(group: Any, n: float) -> None:
    """The sum for the gradient of x, and meanwhile the gradient of w."""
    x, w = x_and_w(group, n)
    y = n * fused_tp.column_parallel_matmul(x, w, group=group)
    dx, dw = torch.autograd.grad(y.sum(), (x, w))
    assert dx.eq(8 * n * group.size()).all() and dw.eq(n * n * len(y)).all()


@mock.patch.object(decode_module, "_GATHERED_BYTES", 1)  # one query at a time
def long_prompt(group: Any, n: float) -> None:
    q, cache, lengths = torch.ones(1, 6, 2, 4), torch.ones(1, 8, 2, 4), torch.tensor([6])
    fused_tp.context_parallel_decode(q, cache, cache, group=group, cache_seqlens=lengths)


BETWEEN_CALLS = {
    "plain": (plain, "sum_of_products"),
    "pipelined": (pipelined, "sum_of_products"),
    "hierarchical": (hierarchical.Hierarchical, "matmul_reduce_scatter"),
}
PLACES = {
    "first of two exchanges": Place("plain", matmul_sum, torch_dist_module, "sum_in_rank_order"),
    "after a gather": Place("plain", gather_matmul, base, "linear"),
    "last exchange under way": Place("plain", meanwhile, column_module, "weight_grad"),
    "decode": Place("plain", long_prompt, decode_module, "merge"),
    "shards": Place("pipelined", gather_matmul, pipelined, "_linear_into", 2),
    "chunks of a scatter": Place("pipelined", matmul_scatter, pipelined, "sum_of_products", 2),
    "chunks of a sum": Place("pipelined", matmul_sum, pipelined, "sum_of_products", 2),
    "between levels": Place("hierarchical", matmul_scatter, hierarchical, "sum_in_rank_order"),
    **{f"backward, {schedule}": Place(schedule, backward, *where) for schedule, where in BETWEEN_CALLS.items()},
}


def at_call(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which raises when it is called for that time."""
    calls = 0

    def raising(*args: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise OutOfMemory("no memory for 12 bytes\nand more")
        return function(*args, **keywords)

    return raising


@contextmanager
def small_chunks() -> Iterator[None]:
    with (
        mock.patch.object(torch_dist_module, "ONE_SHOT_BYTES", 0),
        mock.patch.object(pipelined, "CHUNK_BYTES", 64),
    ):
        yield


@small_chunks()
def raises_midway(_: Any, name: str) -> Failure:
    place = PLACES[name]
    with group_on(place.schedule) as group:
        numbers = itertools.count(1)

        def run() -> None:
            place.op(group, float(next(numbers)))

        run()
        if dist.get_rank() == 0:
            raising = at_call(place.number, getattr(place.where, place.name))
            with mock.patch.object(place.where, place.name, raising), pytest.raises(OutOfMemory):
                run()
        # What rank 0 had sent may have been all that this one op of a peer waits for.
        failure = failure_of(run)
        dist.barrier()
    return failure


def marks_of(schedule: str) -> list[Any]:
    return [NEEDS_CORE] if schedule == "hierarchical" else []


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(PLACES[name].schedule)) for name in PLACES])
def test_error_midway_aborts_group(name: str) -> None:
    own, *peers = run_ranks(WORLD, raises_midway, name)
    assert "unusable since an earlier" in own.message and "OutOfMemory" in own.message, own
    assert "no memory for 12 bytes" in own.message, own
    for one in peers:
        assert "rank 0 has given the group up. It said: " in one.message, one
        assert "and more" not in one.message and one.seconds < NOTICE_SECONDS, one


# ---- raising before anything is sent ---------------------------------------------------------------------------------

BEFORE_ANYTHING_IS_SENT = {
    "pipelined": (pipelined, "sum_of_products"),
    "hierarchical": (hierarchical.Hierarchical, "_to_hosts"),
}


def raises_before(_: Any, schedule: str) -> None:
    with group_on(schedule) as group:
        step(group)
        for _ in range(2):
            if dist.get_rank() == 0:
                where, name = BEFORE_ANYTHING_IS_SENT[schedule]
                with mock.patch.object(where, name, side_effect=OutOfMemory), pytest.raises(OutOfMemory):
                    matmul_scatter(group, 1.0)
            step(group)
        if schedule == "pipelined":  # all ranks raise this one together
            transport = torch_dist(resolve_group(group), "cpu")
            checking = mock.patch.dict(os.environ, FUSED_TP_CHECK="1")
            with checking, pytest.raises(RankMismatchError), transport.abort_scope("op"):
                transport.check("op", (transport.rank,), torch.float32, CPU)
            step(group)


@pytest.mark.parametrize("schedule", [pytest.param(one, marks=marks_of(one)) for one in BEFORE_ANYTHING_IS_SENT])
def test_error_before_anything_is_sent_leaves_group_usable(schedule: str) -> None:
    run_ranks(WORLD, raises_before, schedule)
