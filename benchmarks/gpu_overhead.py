"""What an op costs the host: microseconds of one call beside a torch op that launches one kernel, and in a CUDA graph.

Calls follow each other and nobody waits for the GPU, as in a program whose host is the slower of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fused_tp

from .case import OURS, Case, Contestant, Rival
from .gpu_collectives import DTYPE, KB, Exchange, Ranks, size
from .gpu_ranks import each, normal
from .gpu_timing import GpuContext, TimedContestant, assert_near
from .ratios import MICROSECONDS, TIME_RATIO

CALLS = 100  # of each rank at once; streams have room for a thousand launches
LINEAR = "torch's linear"
ADD = "torch.add"
IN_GRAPH = "in a graph"


def cases() -> Iterator[Case]:
    rivals = {LINEAR: Rival(TIME_RATIO)}
    yield Case("overhead/matmul_all_reduce/W=1", op_contestants, {"rows": 16, "columns": 256}, rivals, 1.0)
    rivals = {ADD: Rival(TIME_RATIO), IN_GRAPH: Rival(MICROSECONDS)}
    parameters = {"nbytes": 8 * KB, "world_size": 2}
    yield Case(f"overhead/one-shot/W=2/{size(8 * KB)}", collective_contestants, parameters, rivals, 1.5)


def op_contestants(context: GpuContext, rows: int, columns: int) -> dict[str, Callable[[], Contestant]]:
    """The whole way of a public op, on a group of one rank, so that all of it is the host's part."""
    x, w = (normal(rows, columns, dtype=DTYPE, device=context.device, seed=seed) for seed in (1, 2))
    (stream,) = context.streams(1)
    context.synchronize()  # they were made in another one

    def contestant(call: Callable[[], Tensor]) -> Contestant:
        def check() -> None:
            with torch.cuda.stream(stream):
                result = call()
            context.synchronize()
            assert_near(result, x.double() @ w.double().t())

        return TimedContestant(lambda: repeat([stream], lambda rank: call()), check, "", repeats=CALLS, on_host=True)

    return {
        OURS: lambda: contestant(lambda: fused_tp.matmul_all_reduce(x, w, group=None)),
        LINEAR: lambda: contestant(lambda: F.linear(x, w)),
    }


def collective_contestants(context: GpuContext, nbytes: int, world_size: int) -> dict[str, Callable[[], Contestant]]:
    """A call of one rank of `DeviceCollectives`; both ranks' calls are made by this host, and one of them counted."""
    exchange = Exchange(context, "one-shot", nbytes, world_size)
    ranks = Ranks(context, world_size, exchange.call)
    calls = CALLS * world_size

    def ours() -> Contestant:
        def check() -> None:
            results = ranks.run_set(0)
            ranks.raise_if_expired()
            exchange.check(results)

        def run() -> None:
            repeat(ranks.streams, lambda rank: exchange.call(ranks.collectives[rank], rank, 0))

        return TimedContestant(run, check, "", repeats=calls, on_host=True)

    def add() -> Contestant:
        def run() -> None:
            repeat(ranks.streams, lambda rank: torch.add(exchange.inputs[0][rank], 1.0, out=exchange.outs[0][rank]))

        return TimedContestant(run, None, "", repeats=calls, on_host=True)

    def in_graph() -> Contestant:
        replay = ranks.graphs(CALLS)
        return TimedContestant(replay, None, f"{CALLS} calls in the graph of each rank", repeats=calls, on_host=True)

    return {OURS: ours, ADD: add, IN_GRAPH: in_graph}


def repeat(streams: list[torch.cuda.Stream], call: Callable[[int], Any]) -> None:
    """CALLS calls of every rank, one rank after the other, as to change the current stream takes as long as a call."""

    def calls(rank: int) -> None:
        for _ in range(CALLS):
            call(rank)

    each(streams, calls)
