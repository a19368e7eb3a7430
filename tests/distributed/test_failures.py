"""Ranks that are late, stop, die, disagree or raise in the middle of an op: errors on each rank, and their delays.

One table over all transports. Failures of a single transport are in its own test files; tests/campaign.py injects many
random faults on shared memory and gloo.
"""

from __future__ import annotations

import atexit
import gc
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fused_tp
from fused_tp.backends import schedule as base
from fused_tp.backends.copy_engine import copy_engine_schedule as copy_engine
from fused_tp.backends.copy_engine.copy_engine_schedule import CopyEngineSchedule
from fused_tp.backends.cuda.device_collectives import DeviceCollectives
from fused_tp.backends.cuda.device_schedule import DeviceSchedule
from fused_tp.backends.hierarchical import hierarchical
from fused_tp.backends.messages import pipelined, plain
from fused_tp.backends.messages import torch_dist as torch_dist_module
from fused_tp.backends.messages.torch_dist import torch_dist
from fused_tp.backends.nccl import nccl_pipeline
from fused_tp.backends.shared_memory import shared_memory
from fused_tp.core.errors import PeerLostError, RankMismatchError
from fused_tp.core.group import resolve_group
from fused_tp.core.settings import override_environment
from tests.beside import beside
from tests.distributed.schedule_cases import CPU, low_limits
from tests.distributed.shm_tools import core_resources
from tests.faults import (
    MATMULS,
    NOTICE_SECONDS,
    OPS,
    TRANSPORTS,
    Failure,
    Op,
    calls_of,
    check_late,
    check_lost,
    check_stopped_then_killed,
    failure_of,
    fresh_stopped_then_killed,
    group_on,
    late,
    leaf,
    left_in_dev_shm,
    lost_behind_its_part,
    weight,
)
from tests.late import give_up, wait_for_those_who_gave_up
from tests.native.doubles.libraries import DOUBLES, build_doubles
from tests.workers import Outcome, error_of, fresh_ranks, on_ranks, run_fresh, run_ranks

# Imported by name, because the ops shadow the modules of the same name.
decode_module, column_module = (
    import_module(f"fused_tp.ops.{op}") for op in ("context_parallel_decode", "column_parallel_matmul")
)

WORLD = 4
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="stops and kills processes"),
    pytest.mark.skipif(find_spec("fused_tp._core") is None, reason="needs the native core: pip install -e ."),
]


def on(*transports: str) -> pytest.MarkDecorator:
    """Parametrize over those transports: `make test` runs shared memory and `plain` messages."""
    marks = {"one_sided": [], "plain": [], "pipelined": [pytest.mark.long]}  # messages again
    cases = [pytest.param(one, marks=marks.get(one, [pytest.mark.full])) for one in transports or TRANSPORTS]
    return pytest.mark.parametrize("transport", cases)


# ---- late ------------------------------------------------------------------------------------------------------------


@on()
def test_late_rank_is_a_timeout_that_names_it(transport: str) -> None:
    build_doubles(transport)
    found = run_ranks(WORLD, late, transport, MATMULS)
    check_late(found)
    for rank, failures in enumerate(found[:-1]):
        for failure in failures:
            assert f"ank {rank}" in failure.message and "group" in failure.again, failure
            assert re.search("FUSED_TP_TIMEOUT|gave up|peer failed|past its deadline", failure.message), failure


@pytest.mark.full
@on()
def test_who_waits_for_a_rank_that_knows_of_a_loss_is_told(transport: str) -> None:
    build_doubles(transport)
    size = 4 if transport == "hierarchical" else 3
    check_lost(fresh_ranks(size, lost_behind_its_part, transport, ("matmul_all_reduce",), expect_deaths=True))


def another_op(_: Any, transport: str) -> str:
    """The last rank is late, and rank 1 calls another op of equally many bytes, since gloo aborts if they differ."""
    rank, last = dist.get_rank(), WORLD - 1
    x, w = torch.ones(4, 6), torch.ones(3, 6)
    with group_on(transport) as group:
        fused_tp.all_reduce(x, group=group)
        if rank == last:
            wait_for_those_who_gave_up(group.group_name, range(last))
        os.environ["FUSED_TP_TIMEOUT"] = "1.5"
        with pytest.raises(fused_tp.CollectiveTimeoutError) as raised:
            if rank == 1:
                fused_tp.all_reduce(x, group=group)
            while True:
                fused_tp.all_gather_matmul(x, w, group=group)
        give_up(group.group_name)
        wait_for_those_who_gave_up(group.group_name, range(WORLD))
        return str(raised.value)


@on("plain", "pipelined")
def test_timeout_says_who_has_called_another_op(transport: str) -> None:
    for rank, said in enumerate(run_ranks(WORLD, another_op, transport)):
        assert f"on rank {rank} of 4" in said and "1.5 s (FUSED_TP_TIMEOUT) for rank 3, which had not arrived." in said
        assert "'s call 2 is all_" in said and "must call the same ops in the same order" in said


# ---- disagreeing -----------------------------------------------------------------------------------------------------

X, W = torch.ones(4, 6), torch.ones(3, 6)
Disagreement = tuple[Callable[[Any, bool], object], str]
DISAGREE: dict[str, Disagreement] = {
    "op": (
        lambda group, odd: OPS["matmul_all_reduce" if odd else "all_gather"](group, 1.0),
        "rank 0 calls all_gather(dims=[16, 6, 0], dtype=torch.float32), rank 1 calls matmul_all_reduce(dims=[16, 8]",
    ),
    "shape": (
        lambda group, odd: fused_tp.matmul_all_reduce(X[odd:], W, group=group),
        "rank 0 calls matmul_all_reduce(dims=[4, 3], dtype=torch.float32), rank 1 calls matmul_all_reduce(dims=[3, 3]",
    ),
    "dtype": (
        lambda group, odd: fused_tp.matmul_reduce_scatter(*((X.half(), W.half()) if odd else (X, W)), group=group),
        "dtype=torch.float32), rank 1 calls matmul_reduce_scatter(dims=[4, 3, 0], dtype=torch.float16).",
    ),
    "shards": (
        lambda group, odd: fused_tp.all_gather_matmul(X[odd:], W, group=group),
        "(dims=[16, 6, 0], dtype=torch.float32), rank 1 calls all_gather_matmul(dims=[12, 6, 0]",
    ),
    "bias": (
        lambda group, odd: fused_tp.matmul_all_reduce(X, W, W[:, 0] if odd else None, group=group),
        "rank 1 calls matmul_all_reduce(dims=[4, 3, True]",
    ),
    "eps": (
        lambda group, odd: fused_tp.matmul_all_reduce_rms_norm(
            X, W, W.t()[:4], W[:, 0], 1e-3 if odd else 1, group=group
        ),
        "rank 1 calls matmul_all_reduce_rms_norm(dims=[4, 3, 0.001]",
    ),
}


def disagree(_: Any, transport: str) -> list[str]:
    said = []
    with group_on(transport, FUSED_TP_CHECK="1") as group:
        for call, _said in DISAGREE.values():
            error = error_of(call, group, dist.get_rank() == 1)
            assert isinstance(error, RankMismatchError), error
            said.append(str(error))
            assert fused_tp.all_reduce(torch.ones(1), group=group).item() == WORLD  # nothing was sent before
    return said


@on("plain", "pipelined", "hierarchical", "copy_engine", "nccl_pipeline")
def test_disagreement_is_an_error_on_all_ranks(transport: str) -> None:
    build_doubles(transport)
    first, *others = run_ranks(WORLD, disagree, transport)
    assert others == [first] * (WORLD - 1)
    for message, (_, said) in zip(first, DISAGREE.values(), strict=True):
        assert said in message.replace(", False", "")  # removes the flag for a bias


SETTINGS = {  # name: value on the odd rank, and the message on all ranks
    "FUSED_TP_SHM": ("0", "FUSED_TP_SHM is True on ranks 0 and 2 and False on rank 1"),
    "FUSED_TP_SCHEDULE": ("pipelined", "FUSED_TP_SCHEDULE is None on ranks 0 and 2 and pipelined on rank 1"),
    "FUSED_TP_CHECK": ("1", "FUSED_TP_CHECK is False on ranks 0 and 2 and True on rank 1"),
    "FUSED_TP_SM_MARGIN": ("many", "FUSED_TP_SM_MARGIN is 0 on ranks 0 and 2 and many on rank 1"),
    "FUSED_TP_RING_GRADIENTS": ("input", "FUSED_TP_RING_GRADIENTS is False on ranks 0 and 2 and True on rank 1"),
    "FUSED_TP_TABLE": ("/nowhere.json", "No such file or directory: '/nowhere.json' on rank 1"),
}


@on_ranks(3, run=run_fresh)
def test_settings_that_differ_are_an_error_on_all_ranks(world: Any) -> None:
    for name, (value, said) in SETTINGS.items():
        group = dist.new_group([0, 1, 2])
        with override_environment({name: value} if dist.get_rank() == 1 else {}):
            error = error_of(fused_tp.all_reduce, torch.ones(1), group=group)
        assert isinstance(error, RankMismatchError) and said in str(error), error
        assert fused_tp.all_reduce(torch.ones(1), group=group).item() == 3  # ranks compare their settings again


# ---- stopped, killed, ended, forked ----------------------------------------------------------------------------------


@beside(lambda transport: fresh_stopped_then_killed(transport))
@on()
def test_stopped_or_killed_rank_is_noticed_and_others_go_on(outcome: list[Outcome], transport: str) -> None:
    check_stopped_then_killed(outcome)


def ends(_: Any) -> tuple[float, str]:
    """Rank 2 exits like a finished program, while the others wait for it."""
    with group_on("one_sided") as group:
        run = calls_of(group)
        run()
        dist.barrier()
        if dist.get_rank() == 2:
            time.sleep(0.2)  # the others wait for it, most likely
            at = time.monotonic()
            atexit._run_exitfuncs()
            wait_for_those_who_gave_up("ends", (0, 1))  # the end of the process would notify them, too
            return at, ""
        failure = failure_of(run)
        at = time.monotonic()
        give_up("ends")
        return at, failure.kind


def test_rank_that_ends_is_lost_to_those_who_wait() -> None:
    *others, (ended, _) = (one.unwrap() for one in fresh_ranks(3, ends, expect_deaths=True))
    assert all(kind == "PeerLostError" and at - ended < 1.0 for at, kind in others), others


def all_killed(_: Any) -> None:
    with group_on("one_sided") as group:
        run = calls_of(group)
        run()
        dist.barrier()
        threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGKILL)).start()
        error_of(failure_of, run)
        time.sleep(60)  # until it is killed


def test_nothing_is_left_when_all_ranks_are_killed() -> None:
    before = left_in_dev_shm()
    assert all(outcome.died for outcome in fresh_ranks(3, all_killed, expect_deaths=True))
    assert left_in_dev_shm() <= before


def forked(_: Any, transport: str) -> str:
    """A rank forks a child, as data loaders do: the child must not act for the rank, and its end is not the rank's."""
    read, write = os.pipe()
    with group_on(transport) as group:
        run = calls_of(group, MATMULS)
        for _time in range(2):  # before the first call, and after it
            child = os.fork()
            if child == 0:
                os.write(write, str(error_of(run)).encode())
                dist.destroy_process_group(group)
                del run
                gc.collect()
                atexit._run_exitfuncs()
                os._exit(0)
            os.waitpid(child, 0)
            dist.barrier()
            for _call in range(20):
                run()
        return os.read(read, 10_000).decode()


def fresh_forked(transport: str) -> list[Outcome]:
    build_doubles(transport)
    return fresh_ranks(WORLD, forked, transport)


@beside(fresh_forked)
@on()
def test_forked_child_does_not_speak_for_its_rank(outcome: list[Outcome], transport: str) -> None:
    for rank, one in enumerate(outcome):
        assert one.unwrap().count(f"This process is a fork of rank {rank}") == 2


# ---- destroyed -------------------------------------------------------------------------------------------------------

ON_MEMORY_OR_GLOO = ("one_sided", "plain", "pipelined", "hierarchical")


def destroys(_: Any, transport: str) -> list[tuple[float, Any]]:
    """The last rank destroys an unused group, a group whose result it keeps, and all groups; the others wait for it.

    Returns times and messages on the waiting ranks; on the last rank times, leftover resources with and without the
    result, and the error of its next call.
    """
    last = dist.get_rank() == WORLD - 1
    found: list[tuple[float, Any]] = []
    for which in ("unused", "used", "all"):
        before = core_resources()
        with group_on(transport) as group:
            run, kept = calls_of(group, MATMULS), []
            if which != "unused":
                for _op in MATMULS:
                    run()
                kept.append(fused_tp.matmul_all_reduce(torch.ones(4, 6), torch.ones(80_000, 6), group=group))
            dist.barrier()
            if not last:
                with pytest.raises(PeerLostError) as raised:
                    while True:
                        run(lost=True)
                found.append((time.monotonic(), str(raised.value)))
            else:
                time.sleep(0.2)  # the others wait, most likely
                at = time.monotonic()
                dist.destroy_process_group(None if which == "all" else group)
                with_result = core_resources()
                kept.clear()
                again = "" if which == "unused" else str(error_of(fused_tp.all_reduce, torch.ones(1), group=group))
                left = {what: count - before[what] for what, count in with_result.items()}, core_resources() == before
                if which == "unused":
                    del group, run  # a group that fused_tp has never used is closed by torch only
                found.append((at, (left, again)))
        if which != "all":
            dist.barrier()
    time.sleep(2.0 if last else 0.0)  # the end of the process would notify the others, too
    return found


@on(*ON_MEMORY_OR_GLOO)
def test_destroyed_group_is_gone_for_all_ranks_at_once(transport: str) -> None:
    *others, own = (one.unwrap() for one in fresh_ranks(WORLD, destroys, transport))
    for number, (at, (left, again)) in enumerate(own):
        noticed = [one[number][0] - at for one in others]
        assert all(0 <= seconds < 2.0 for seconds in noticed), (number, noticed, others)
        # A kept result keeps this rank's segment alive, but not those of its peers.
        kept = int(transport == "one_sided" and number > 0)
        assert left == ({"segments": kept, "pidfds": 0, "mappings": kept}, True), (number, left)
        assert number == 0 or "may have been destroyed" in again


def destroy_in_some_order(_: Any, order: Sequence[int]) -> None:
    for transport in ("one_sided", "plain", "pipelined", "hierarchical"):
        with group_on(transport) as group:
            run = calls_of(group, MATMULS)
            for _op in MATMULS:
                run()
            time.sleep(0.05 * order[dist.get_rank()])
            dist.destroy_process_group(group)
    group = dist.new_group(list(range(WORLD)))
    fused_tp.all_reduce(torch.ones(1), group=group)
    time.sleep(0.1 * order[dist.get_rank()])
    dist.destroy_process_group()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), pytest.param((3, 2, 1, 0), marks=pytest.mark.full)])
def test_ranks_destroy_in_any_order(order: Sequence[int]) -> None:
    for outcome in fresh_ranks(WORLD, destroy_in_some_order, order):
        outcome.unwrap()


# ---- raising in the middle of an op ----------------------------------------------------------------------------------


class OutOfMemory(Exception):
    """Error that only one rank raises."""


class Place(NamedTuple):
    """Place where rank 0 raises: at call `number` of `name` in `where`, while `op` runs on `transport`."""

    transport: str
    op: str | Op
    where: Any
    name: str
    number: int = 1


def gradients(op: Any, group: Any, n: float) -> tuple[Tensor, float]:
    """Backward of `op`: the reduction for dx overlaps with dw, for which a gather op gathers x again."""
    x, w = leaf(n, 4, 6), weight()
    y = n * op(x, w, group=group)
    dx, dw = torch.autograd.grad(y.sum(), (x, w))
    assert dw.eq(n * n * len(y)).all()
    return dx, 8 * n * group.size()


backward = partial(gradients, fused_tp.all_gather_matmul)
meanwhile = partial(gradients, fused_tp.column_parallel_matmul)


@mock.patch.object(decode_module, "_MAX_GATHERED_BYTES", 1)  # one query at a time
def long_prompt(group: Any, n: float) -> tuple[Tensor, float]:
    q, cache, lengths = torch.ones(1, 6, 2, 4), torch.full((1, 8, 2, 4), n), torch.tensor([6])
    return fused_tp.context_parallel_decode(q, cache, cache, group=group, cache_seqlens=lengths), n


BETWEEN_CALLS = {
    "plain": (plain, "sum_of_products"),
    "pipelined": (pipelined, "sum_of_products"),
    "hierarchical": (hierarchical.HierarchicalSchedule, "matmul_reduce_scatter"),
    "one_sided": (shared_memory, "sum_of_products"),
    "two_shot": (DeviceSchedule, "matmul_reduce_scatter"),
    "copy_engine": (CopyEngineSchedule, "matmul_reduce_scatter"),
    "nccl_pipeline": (nccl_pipeline, "sum_of_products"),
}
PLACES = {
    "shared memory": Place("one_sided", "all_gather_matmul", shared_memory, "linear"),
    "between tensors": Place("two_shot", "ulysses_attention", DeviceCollectives, "sequence_to_heads", 2),
    "block by copy engine": Place("copy_engine", "matmul_reduce_scatter", copy_engine, "sum_of_products", 2),
    "chunks of a scatter, NCCL": Place("nccl_pipeline", "matmul_reduce_scatter", nccl_pipeline, "sum_of_products", 2),
    "chunks of a sum, NCCL": Place("nccl_pipeline", "matmul_all_reduce", nccl_pipeline, "sum_of_products", 2),
    "first of two exchanges": Place("plain", "matmul_all_reduce", torch_dist_module, "sum_in_rank_order"),
    "after a gather": Place("plain", "all_gather_matmul", base, "linear"),
    "last exchange under way": Place("plain", meanwhile, column_module, "weight_grad"),
    "decode": Place("plain", long_prompt, decode_module, "merge_partial_outputs"),
    "shards": Place("pipelined", "all_gather_matmul", pipelined, "_linear_into", 2),
    "chunks of a scatter": Place("pipelined", "matmul_reduce_scatter", pipelined, "sum_of_products", 2),
    "chunks of a sum": Place("pipelined", "matmul_all_reduce", pipelined, "sum_of_products", 2),
    "between levels": Place("hierarchical", "matmul_reduce_scatter", hierarchical, "sum_in_rank_order"),
    **{f"backward, {transport}": Place(transport, backward, *where) for transport, where in BETWEEN_CALLS.items()},
}


def at_call(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` so that its call `number` raises."""
    calls = 0

    def raising(*args: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise OutOfMemory("no memory for 12 bytes\nand more")
        return function(*args, **keywords)

    return raising


@low_limits()
def raises_midway(_: Any, name: str) -> Failure:
    place = PLACES[name]
    with group_on(place.transport) as group:
        run = calls_of(group, [place.op])
        run()
        if dist.get_rank() == 0:
            raising = at_call(place.number, getattr(place.where, place.name))
            with mock.patch.object(place.where, place.name, raising), pytest.raises(OutOfMemory):
                run()
        # A peer may finish its first call if rank 0 had already sent all that this call needs.
        failure = failure_of(run)
        dist.barrier()
    return failure


# Error on peers; over messages they receive the original sentence.
HEARD = {
    "one_sided": "rank 0 has left the group",
    "two_shot": "rank 0 gave up",
    "copy_engine": r"Rank 0 notified rank \d that it has given up",
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] if place.transport in (*DOUBLES, "hierarchical") else [])
        for name, place in PLACES.items()
    ],
)
def test_error_midway_aborts_group(name: str) -> None:
    transport = PLACES[name].transport
    build_doubles(transport)
    own, *peers = run_ranks(WORLD, raises_midway, name)
    assert "unusable because an earlier" in own.again and "OutOfMemory" in own.message, own
    assert "no memory for 12 bytes" in own.message, own
    for one in peers:
        assert re.search(HEARD.get(transport, "rank 0 has aborted the group. Its error: "), one.message), one
        assert "and more" not in one.message and one.seconds < NOTICE_SECONDS, one


# ---- raising before anything is sent ---------------------------------------------------------------------------------

BEFORE_ANYTHING_IS_SENT = {
    "pipelined": (pipelined, "sum_of_products"),
    "hierarchical": (hierarchical.HierarchicalSchedule, "_scatter_to_hosts"),
    "nccl_pipeline": (nccl_pipeline, "sum_of_products"),
}


def raises_before(_: Any, transport: str) -> None:
    with group_on(transport) as group:
        run = calls_of(group, MATMULS)
        run()
        for _time in range(2):
            if dist.get_rank() == 0:
                where, name = BEFORE_ANYTHING_IS_SENT[transport]
                with mock.patch.object(where, name, side_effect=OutOfMemory), pytest.raises(OutOfMemory):
                    OPS["matmul_reduce_scatter"](group, 1.0)
            for _op in MATMULS:
                run()
        if transport == "pipelined":  # all ranks raise this one together
            messages = torch_dist(resolve_group(group), "cpu")
            checking = mock.patch.dict(os.environ, FUSED_TP_CHECK="1")
            with checking, pytest.raises(RankMismatchError), messages.abort_scope("op"):
                messages.check("op", (messages.rank,), torch.float32, CPU)
            run()


@on(*BEFORE_ANYTHING_IS_SENT)
def test_error_before_anything_is_sent_leaves_group_usable(transport: str) -> None:
    build_doubles(transport)
    run_ranks(WORLD, raises_before, transport)
