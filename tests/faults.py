"""Ranks that are late, stop, die or raise within an op: errors of their peers, and how soon these are raised.

    with group_on("pipelined", FUSED_TP_TIMEOUT="1") as group:    # a group of its own for each case
        failure = failure_of(calls_of(group))

Each case runs on all ranks of the default group, on one of TRANSPORTS; GPU transports use library test doubles. The
input of call number n is n, so that ranks whose calls are mismatched return wrong numbers.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fused_tp
from fused_tp.core.errors import FusedTPError
from tests.late import give_up, wait_for_those_who_gave_up
from tests.native.doubles.libraries import build_doubles, doubles
from tests.workers import Outcome, fresh_ranks

TRANSPORTS = ("one_sided", "plain", "pipelined", "hierarchical", "two_shot", "copy_engine", "nccl_pipeline")
DEVICE = torch.device("cpu")
NOTICE_SECONDS = 4.0  # bound from a loss or a deadline to the error, with many processes on a core


@contextmanager
def group_on(transport: str, ranks: Sequence[int] | None = None, **env: str) -> Iterator[Any]:
    """Make a new group whose ops run on that transport: of all ranks, or of `ranks`, which alone call this."""
    env = {"FUSED_TP_SCHEDULE": transport, "FUSED_TP_TIMEOUT": "60", **env}
    if transport == "hierarchical":
        env["FUSED_TP_HOST"] = "aabb"[dist.get_rank()]
    members = list(range(dist.get_world_size()) if ranks is None else ranks)
    with mock.patch.dict(os.environ, env), doubles(transport if DEVICE.type == "cpu" else ""):
        yield dist.new_group(members, use_local_synchronization=ranks is not None)


# ---- the ops ---------------------------------------------------------------------------------------------------------


def leaf(n: float, *shape: int) -> Tensor:
    return torch.full(shape, n, device=DEVICE, requires_grad=True)


def weight() -> Tensor:
    return leaf(1.0, 8, 6)


def norm() -> dict[str, Any]:
    return {"residual": torch.zeros(4, 8, device=DEVICE), "norm_weight": torch.ones(8, device=DEVICE), "eps": 1e-9}


def attention(op: Callable[..., Any], group: Any, n: float) -> Tensor:
    q, k, v = (leaf(number, 1, 16, 2 * group.size(), 16) for number in (1.0, 1.0, n))
    out: Tensor = op(q, k, v, group=group)
    return out


Op = Callable[[Any, float], tuple[Tensor, float]]

# A call with n: its result, and the value that every element of the result must have.
OPS: dict[str, Op] = {
    "all_gather": lambda group, n: (fused_tp.all_gather(leaf(n, 4, 6), 0, group=group), n),
    "all_gather_matmul": lambda group, n: (fused_tp.all_gather_matmul(leaf(n, 4, 6), weight(), group=group), 6 * n),
    "all_gather_matmul float8": lambda group, n: (
        fused_tp.all_gather_matmul(leaf(n, 4, 6), weight(), group=group, float8="tensorwise"),
        6 * n,
    ),
    "matmul_reduce_scatter float8": lambda group, n: (
        fused_tp.matmul_reduce_scatter(leaf(n, 4 * group.size(), 6), weight(), group=group, float8="tensorwise"),
        6 * n * group.size(),
    ),
    "all_reduce": lambda group, n: (fused_tp.all_reduce(leaf(n, 400_000), group=group), n * group.size()),
    "all_reduce_rms_norm": lambda group, n: (
        fused_tp.all_reduce_rms_norm(leaf(n, 4, 8), **norm(), group=group)[0],
        1.0,
    ),
    "column_parallel_matmul": lambda group, n: (
        fused_tp.column_parallel_matmul(leaf(n, 4, 6), weight(), group=group),
        6 * n,
    ),
    "matmul_all_reduce": lambda group, n: (
        fused_tp.matmul_all_reduce(leaf(n, 4 * group.size(), 6), weight(), group=group),
        6 * n * group.size(),
    ),
    "matmul_all_reduce_rms_norm": lambda group, n: (
        fused_tp.matmul_all_reduce_rms_norm(leaf(n, 4, 6), weight(), **norm(), group=group)[0],
        1.0,
    ),
    "matmul_reduce_scatter": lambda group, n: (
        fused_tp.matmul_reduce_scatter(leaf(n, 4 * group.size(), 6), weight(), group=group),
        6 * n * group.size(),
    ),
    "reduce_scatter": lambda group, n: (
        fused_tp.reduce_scatter(leaf(n, 4 * group.size(), 8), 0, group=group),
        n * group.size(),
    ),
    "ring_attention": lambda group, n: (attention(fused_tp.ring_attention, group, n), n),
    "ulysses_attention": lambda group, n: (attention(fused_tp.ulysses_attention, group, n), n),
    "linear_cross_entropy": lambda group, n: (
        fused_tp.linear_cross_entropy(leaf(1.0, 4, 6), weight(), torch.arange(4, device=DEVICE), group=group),
        math.log(8 * group.size()),
    ),
    "vocab_parallel_cross_entropy": lambda group, n: (
        fused_tp.vocab_parallel_cross_entropy(leaf(1.0, 4, 8), torch.arange(4, device=DEVICE), group=group),
        math.log(8 * group.size()),
    ),
}
MATMULS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


def calls_of(group: Any, ops: Sequence[str | Op] = tuple(OPS)) -> Callable[..., None]:
    """Return a function that calls the next of these ops, forward and backward (the same op again after an error), and
    checks its result. With `lost=True` elements may be NaN: a peer is lost, and a later call raises."""
    numbers, done = itertools.count(1), 0

    def run(*, lost: bool = False) -> None:
        nonlocal done
        op = ops[done % len(ops)]
        y, right = (OPS[op] if isinstance(op, str) else op)(group, float(next(numbers) % 1000 + 1))
        if y.requires_grad:
            y.sum().backward()
        assert (y.isclose(torch.tensor(right, device=DEVICE)) | (y.isnan() & lost)).all(), op
        done += 1

    return run


# ---- errors of ranks -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """Error of an endless loop of calls, duration of the call that raised it, and message of the next call."""

    kind: str
    message: str
    seconds: float
    again: str


def failure_of(run: Callable[..., object]) -> Failure:
    """Call `run(lost=True)` until it raises; return the failure."""
    begun = time.monotonic()
    with pytest.raises(FusedTPError) as first:
        while True:
            begun = time.monotonic()
            run(lost=True)
    seconds = time.monotonic() - begun
    with pytest.raises(FusedTPError, match="unusable because an earlier") as second:
        run(lost=True)
    return Failure(type(first.value).__name__, str(first.value), seconds, str(second.value))


def check_failures(failures: Sequence[Failure], victim: int, kind: str, deadline: float = 0.0) -> None:
    """Assert that all raised an error of that kind in time and at least one names the victim: others may follow it."""
    for one in failures:
        assert one.kind == kind and one.seconds < deadline + NOTICE_SECONDS, failures
    assert any(names(one.message, victim) for one in failures), failures


def names(message: str, rank: int) -> bool:
    """True if the message names `rank`, as "rank 2" or "ranks 0 (last heard of at call 4, all_gather), 1 and 2" name 2;
    the 0 of "rank 0 of 2" does not count."""
    return bool(re.search(rf"\b[Rr]anks? (?:\d+(?: \([^()]*\))?(?:, | and ))*{rank}\b(?! of \d)", message))


# ---- cases -----------------------------------------------------------------------------------------------------------


def late(_: Any, transport: str, ops: Sequence[str]) -> list[Failure]:
    """The last rank calls after the others have given up. On message transports one of these has a long deadline and
    is notified by its peers; on others a rank that waits only for the late one is not, so all deadlines are equal."""
    rank, last, found = dist.get_rank(), dist.get_world_size() - 1, []
    short = last - 1 if transport in ("plain", "pipelined", "nccl_pipeline") else last
    for op in ops:
        with group_on(transport) as group:
            run = calls_of(group, [op])
            run()
            dist.barrier()
            if rank == last:
                wait_for_those_who_gave_up(group.group_name, range(last))
            elif rank < short:
                os.environ["FUSED_TP_TIMEOUT"] = "1"
            try:
                found.append(failure_of(run))
            finally:
                give_up(group.group_name)
            wait_for_those_who_gave_up(group.group_name, range(last + 1))  # a group that ends would notify peers, too
    return found


def lost_behind_its_part(_: Any, transport: str, ops: Sequence[str]) -> Failure:
    """The last rank dies in a call for which rank 0 is late. Rank 0 then knows of the loss and does not make the call;
    the others may already hold everything they need from the lost rank."""
    with group_on(transport) as group:
        run = calls_of(group, ops)
        run()
        if group.rank() == group.size() - 1:
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if group.rank() == 0:
            time.sleep(2.0)
        return failure_of(run)


def check_lost(outcomes: Sequence[Outcome]) -> None:
    """Check the outcomes of `lost_behind_its_part`."""
    *others, victim = outcomes
    assert victim.exit_code == -signal.SIGKILL
    check_failures([one.unwrap() for one in others], victim.rank, "PeerLostError")


def check_late(found: Sequence[Sequence[Failure]]) -> None:
    *others, victim = found
    for number, failure in enumerate(victim):
        check_failures([one[number] for one in others], len(others), "CollectiveTimeoutError", 1.0)
        assert failure.seconds < NOTICE_SECONDS


def stopped_then_killed(_: Any, transport: str, ops: Sequence[str], delay: float) -> tuple[Failure, Failure]:
    """The last rank is stopped (SIGSTOP) for longer than the deadline, and killed in another group. The others then
    work together in a new group. Returns both failures."""
    rank, last, found = dist.get_rank(), dist.get_world_size() - 1, []
    pids: list[Any] = [None] * (last + 1)
    dist.all_gather_object(pids, os.getpid())
    for number, deadline in ((signal.SIGSTOP, "1.5"), (signal.SIGKILL, "60")):
        with group_on(transport) as group:
            run = calls_of(group, ops)
            for _op in ops:  # first calls, with their setup
                run()
            dist.barrier()
            os.environ["FUSED_TP_TIMEOUT"] = deadline
            if rank == 0:
                threading.Timer(delay, os.kill, (pids[last], number)).start()
            try:
                found.append(failure_of(run))
            finally:
                give_up(group.group_name)
            if number == signal.SIGSTOP:
                if rank == 0:
                    wait_for_those_who_gave_up(group.group_name, range(last))
                    os.kill(pids[last], signal.SIGCONT)
                dist.barrier()
    with group_on("plain" if transport == "hierarchical" else transport, ranks=range(last)) as group:
        run = calls_of(group, MATMULS)
        for _op in MATMULS:
            run()
    return found[0], found[1]


def fresh_stopped_then_killed(transport: str) -> list[Outcome]:
    """Outcomes of `stopped_then_killed` on new ranks, for `check_stopped_then_killed`."""
    build_doubles(transport)
    size = 4 if transport == "hierarchical" else 3
    return fresh_ranks(size, stopped_then_killed, transport, list(OPS), 0.02, expect_deaths=True)


def check_stopped_then_killed(outcomes: list[Outcome]) -> None:
    *others, victim = outcomes
    assert victim.exit_code == -signal.SIGKILL
    stopped, killed = zip(*(one.unwrap() for one in others), strict=True)
    check_failures(stopped, victim.rank, "CollectiveTimeoutError", 1.5)
    check_failures(killed, victim.rank, "PeerLostError")


def left_in_dev_shm() -> set[str]:
    """Files of fused_tp in /dev/shm, without those of the NCCL double, which other tests may be using."""
    return {name for name in os.listdir("/dev/shm") if "fused_tp" in name and "double" not in name}
