"""An op that raises on one rank when its peers have had a part of it: they hear of it at once, and none goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fused_tp
from fused_tp.runtime.errors import FusedTPError, PeerLostError, RankMismatchError
from fused_tp.runtime.group import resolve_group
from fused_tp.schedules import base, pipelined, plain
from fused_tp.schedules.base import GatherMatmul
from fused_tp.schedules.pipelined import Pipelined
from fused_tp.schedules.plain import Plain
from fused_tp.transport import torch_dist as torch_dist_module
from fused_tp.transport.torch_dist import TorchDist
from tests.workers import run_ranks

decode_module = import_module("fused_tp.ops.context_parallel_decode")  # the op has its name

NOTICE_SECONDS = 4.0  # where many processes share a core; the deadline is 60 s


class OutOfMemory(Exception):
    """Of one rank alone."""


def group_of_its_own() -> Any:
    """Of all of the pool's ranks, to be given up."""
    return dist.new_group(list(range(dist.get_world_size())))


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


def meanwhile_fails() -> None:
    raise OutOfMemory("a gradient")


def ops(schedule: Plain) -> dict[str, Callable[..., Any]]:
    x, w = torch.ones(8, 6), torch.ones(8, 6)
    gather: dict[str, Any] = {"gather_dim": 0, "gather_size": None, "return_gathered": True}
    return {
        "all_reduce": lambda **_: schedule.all_reduce(torch.ones(100)),
        "all_gather_matmul": lambda **_: schedule.all_gather_matmul(GatherMatmul(x, [w], [None], **gather)),
        "matmul_reduce_scatter": lambda **k: schedule.matmul_reduce_scatter([(x, w)], None, scatter_dim=0, **k),
        "matmul_all_reduce": lambda **k: schedule.matmul_all_reduce([(x, w)], None, **k),
    }


# Where it raises on rank 0: behind the first of two exchanges, between two chunks, while the last one is under way.
PLACES: list[tuple[type[Plain], str, Any, str, int]] = [
    (Plain, "all_reduce", torch_dist_module, "sum_in_rank_order", 1),
    (Plain, "all_gather_matmul", base, "linear", 1),
    (Plain, "matmul_all_reduce", None, "meanwhile", 1),
    (Pipelined, "all_gather_matmul", pipelined, "_linear_into", 2),
    (Pipelined, "matmul_reduce_scatter", pipelined, "sum_of_products", 2),
    (Pipelined, "matmul_all_reduce", pipelined, "sum_of_products", 2),
]


@mock.patch.object(torch_dist_module, "ONE_SHOT_BYTES", 0)
@mock.patch.object(pipelined, "CHUNK_BYTES", 64)
def half_way(_: Any) -> list[tuple[str, str, float]]:
    found = []
    for kind, op, module, name, number in PLACES:
        group = group_of_its_own()
        schedule = kind(TorchDist(resolve_group(group), "cpu"))
        run = ops(schedule)[op]
        run()
        begun = time.perf_counter()
        if dist.get_rank(group) == 0:
            if module is None:
                with pytest.raises(OutOfMemory):
                    run(meanwhile=meanwhile_fails)
            else:
                with (
                    mock.patch.object(module, name, at_call(number, getattr(module, name))),
                    pytest.raises(OutOfMemory),
                ):
                    run()
            message = str(schedule.transport.broken)
        else:
            with pytest.raises(PeerLostError) as caught:
                for _ in range(100):  # what had been sent may have been all that this one op waits for
                    run()
            message = str(caught.value)
        found.append((op, message, time.perf_counter() - begun))
        with pytest.raises(FusedTPError, match="is unusable since an earlier failure"):
            run()
        dist.barrier()
        dist.destroy_process_group(group)
    return found


def test_peers_hear_of_it_at_once_and_nobody_goes_on() -> None:
    for rank, found in enumerate(run_ranks(4, half_way)):
        assert [op for op, _, _ in found] == [place[1] for place in PLACES]
        for op, message, seconds in found:
            assert f"{op} (call" in message and "on rank 0 of 4 raised OutOfMemory (" in message, message
            assert "half-way" in message and "and more" not in message
            assert rank == 0 or "rank 0 has given the group up. It said: " in message, message
            assert seconds < NOTICE_SECONDS, (op, seconds)


def backward_of_a_gather(group: Any) -> Callable[[], Any]:
    x, w = torch.ones(4, 6, requires_grad=True), torch.ones(8, 6, requires_grad=True)
    y = fused_tp.all_gather_matmul(x, w, group=group)
    return lambda: torch.autograd.grad(y.sum(), (x, w), retain_graph=True)


def long_prompt(group: Any) -> Callable[[], Any]:
    q, cache, lengths = torch.ones(1, 6, 2, 4), torch.ones(1, 8, 2, 4), torch.tensor([6])
    return lambda: fused_tp.context_parallel_decode(q, cache, cache, group=group, cache_seqlens=lengths)


# What comes of calls of a schedule, and where it raises on rank 0 between two of them.
OPS: list[tuple[str, Callable[[Any], Callable[[], Any]], Any, str]] = [
    ("all_gather_matmul_backward", backward_of_a_gather, plain, "sum_of_products"),
    ("context_parallel_decode", long_prompt, decode_module, "merge"),
]


@mock.patch.object(decode_module, "_GATHERED_BYTES", 1)  # one query at a time
def between_calls(_: Any) -> list[tuple[str, float]]:
    found = []
    for _, make, module, name in OPS:
        group = group_of_its_own()
        run = make(group)
        run()
        begun = time.perf_counter()
        if dist.get_rank(group) == 0:
            with mock.patch.object(module, name, at_call(1, getattr(module, name))):
                said = raised_by(run)
            assert said == "no memory for 12 bytes\nand more", said
            said = raised_by(run)
            assert "is unusable since an earlier failure" in said, said
        else:
            said = raised_by(run)
        found.append((said, time.perf_counter() - begun))
        dist.barrier()
        dist.destroy_process_group(group)
    return found


def raised_by(run: Callable[[], Any]) -> str:
    try:
        run()
    except Exception as error:
        return str(error)
    return ""


def test_peers_hear_of_what_raises_between_the_calls_of_an_op() -> None:
    outcomes = run_ranks(4, between_calls, env={"FUSED_TP_SCHEDULE": "plain", "FUSED_TP_SHM": "0"})
    for rank, found in enumerate(outcomes):
        for (op, *_), (said, seconds) in zip(OPS, found, strict=True):
            assert f"{op} (call" in said and "on rank 0 of 4 raised OutOfMemory (" in said, said
            assert rank == 0 or "rank 0 has given the group up. It said: " in said, said
            assert seconds < NOTICE_SECONDS, (op, seconds)


def in_step(group: Any) -> list[bool]:
    """What raises before the first exchange, or on all ranks since they disagree, has sent nothing."""
    transport = TorchDist(resolve_group(group), "cpu")
    schedule = Pipelined(transport)
    run, found = ops(schedule)["matmul_all_reduce"], []
    for _ in range(2):
        if transport.rank == 0:
            with mock.patch.object(pipelined, "sum_of_products", side_effect=OutOfMemory), pytest.raises(OutOfMemory):
                run()
        found.append(bool(run().eq(6.0 * transport.world_size).all()))
    checking = mock.patch.dict("os.environ", FUSED_TP_CHECK="1")
    with checking, pytest.raises(RankMismatchError), transport.abort_scope("op"):
        transport.check("op", (transport.rank,), torch.float32, torch.device("cpu"))
    found.append(bool(run().eq(6.0 * transport.world_size).all()))
    return found


def test_what_has_sent_nothing_may_be_called_again() -> None:
    assert run_ranks(3, in_step) == [[True] * 3] * 3
