"""Thousands of random shared-memory calls over two overlapping groups, up to four in flight, every result checked.

All ranks follow one random script: group, call and size, and when and in which order to finish calls in flight. Delays
differ by rank. Values are small integers, whose sums are exact in every dtype.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fused_tp.backends.shared_memory.shm import ShmTransport, shm_transport
from fused_tp.core.group import resolve_group
from tests.workers import fresh_ranks

MEMBERS = ((0, 1, 2), (1, 2, 3))
IN_FLIGHT = 4
DRAIN_EVERY = 8  # otherwise a call that chance never finishes would hit the limit of 16 calls
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8)


def data(count: int, dtype: torch.dtype, rank: int, call: int) -> Tensor:
    return ((torch.arange(count) + 3 * call) % 13 + rank).to(dtype)


class Player:
    """One rank of one group."""

    def __init__(self, transport: ShmTransport) -> None:
        self.transport = transport
        self.rank, self.size = transport.rank, transport.world_size

    def terms(self, count: int, dtype: torch.dtype, call: int) -> list[Tensor]:
        return [data(count, dtype, rank, call) for rank in range(self.size)]

    def all_reduce(self, count: int, dtype: torch.dtype, call: int) -> None:
        terms = self.terms(count, dtype, call)
        own = terms[self.rank].clone()
        same(self.transport.all_reduce(own, out=own if call % 2 else None), sum_of(terms), call)

    def reduce_scatter(self, count: int, dtype: torch.dtype, call: int) -> None:
        terms = self.terms(count, dtype, call)
        parts = [count // 7, 0, count - count // 7]
        begin = sum(parts[: self.rank])
        wanted = sum_of(terms)[begin : begin + parts[self.rank]]
        same(self.transport.reduce_scatter(terms[self.rank], parts), wanted, call)

    def all_to_all(self, count: int, dtype: torch.dtype, call: int) -> None:
        terms = self.terms(count * self.size, dtype, call)
        mine = slice(self.rank * count, (self.rank + 1) * count)
        counts = [count] * self.size
        out = self.transport.all_to_all(terms[self.rank], counts, counts)
        same(out, torch.cat([term[mine] for term in terms]), call)

    def barrier(self, count: int, dtype: torch.dtype, call: int) -> None:
        self.transport.barrier()

    def start(self, count: int, dtype: torch.dtype, call: int) -> Callable[[], None]:
        """Start a two-stage call, like that of matmul_all_reduce; the returned function finishes it later."""
        workspace = self.transport.begin("soak", (count, call), dtype, count * dtype.itemsize)
        workspace.buffer(self.rank, (count,), dtype).copy_(data(count, dtype, self.rank, call))
        workspace.signal(1)

        def finish() -> None:
            with workspace:
                peer = (self.rank + 1) % self.size
                workspace.wait(peer, 1)
                same(workspace.buffer(peer, (count,), dtype), data(count, dtype, peer, call), call)
                out = self.transport.empty((count,), dtype)
                workspace.wait_all(1)
                terms = [workspace.buffer(rank, (count,), dtype) for rank in range(self.size)]
                torch.sum(torch.stack(terms), 0, dtype=dtype, out=out)
                same(out, sum_of(self.terms(count, dtype, call)), call)

        return finish


BLOCKING = ("all_reduce", "reduce_scatter", "all_to_all", "barrier")


def sum_of(terms: list[Tensor]) -> Tensor:
    return torch.stack(terms).sum(0).to(terms[0].dtype)


def same(actual: Tensor, wanted: Tensor, call: int) -> None:
    assert actual.dtype == wanted.dtype and torch.equal(actual, wanted), f"call {call}: {actual} instead of {wanted}"


def soak_rank(group: Any, seed: int, calls: int) -> int:
    me = dist.get_rank(group)
    groups = [dist.new_group(list(members), backend="gloo") for members in MEMBERS]
    players: list[Player | None] = []
    for members, one in zip(MEMBERS, groups, strict=True):
        transport = shm_transport(resolve_group(one)) if me in members else None
        players.append(Player(transport) if transport is not None else None)
    script, own = random.Random(seed), random.Random(1000 * seed + me)
    in_flight: list[Callable[[], None]] = []
    for call in range(calls):
        player = players[script.randrange(2)]
        count = script.choice((0, 1, script.randrange(100), script.randrange(5000), script.randrange(100_000)))
        dtype, deferred = script.choice(DTYPES), script.random() < 0.5
        kind, finishes, order = script.choice(BLOCKING), script.randrange(3), script.random()
        if own.random() < 0.03:
            time.sleep(own.random() * 4e-3)
        if player is not None:
            if deferred:
                in_flight.append(player.start(count, dtype, call))
            else:
                getattr(player, kind)(count, dtype, call)
        if call % DRAIN_EVERY == 0:
            finishes = len(in_flight)
        while in_flight and (finishes or len(in_flight) >= IN_FLIGHT):
            in_flight.pop(int(order * len(in_flight)))()
            finishes = max(0, finishes - 1)
    while in_flight:
        in_flight.pop()()
    made = 0
    for player in players:
        if player is not None:
            made += 1
            for _ in range(18):  # ranks may be 16 calls apart: after 18 barriers all have ended the earlier calls
                player.transport.barrier()
            assert player.transport.core_group.bytes_in_use == 0, "memory of ended calls has not come back"
    return made


def soak(calls: int, seed: int) -> str:
    began = time.monotonic()
    outcomes = fresh_ranks(4, soak_rank, seed, calls, timeout=900, env={"FUSED_TP_TIMEOUT": "60"})
    assert [outcome.unwrap() for outcome in outcomes] == [1, 2, 2, 1]
    return f"{calls} shared-memory calls over two overlapping groups, {time.monotonic() - began:.0f} s"
