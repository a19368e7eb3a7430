"""Ring attention on shared memory: a rank's K/V are read by its peers where they lie; nothing goes round.

Each rank writes the K/V rows that others look at into its workspace once, says so, and reads those of its peers in
place, one peer per step in the order of the ring so that not all ranks read the same memory at once.

Backward, in rounds n = 1, 2, ..., parts of the steps behind step 0 (`RingCall.rounds`). Stages of a rank: 1 K/V are
readable; 2n its term of round n is readable; 2n + 3 it has added the term that others found for it in round n. Terms of
dK/dV lie in two slots, used in turn: before round n overwrites what round m < n has left in its slot, m's reader must
have reached stage 2m + 3. m is n - 2, or earlier where this rank found nothing in between, and then its reader is
another one. A reader gets there after its own round m + 1, so ranks may drift apart by a round before anyone waits,
and memory does not grow with W. Owners add terms in the order of the rounds: the same bits in every run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from fused_tp.attention.ring import (
    Backward,
    Forward,
    Gradients,
    RingCall,
    Saved,
    Shown,
    add_to,
    from_wire,
    parts_of,
    zeros_like,
)
from fused_tp.transport.base import accumulate_dtype
from fused_tp.transport.shm import ShmTransport, Workspace

_ALIGNMENT = 64  # a cache line, and the widest vector
_KEYS_READABLE = 1

_Region = tuple[Sequence[int], torch.dtype, int]


class _Regions:
    """Where everything lies in the workspace of one rank, as every rank can work out."""

    def __init__(self, call: RingCall, rank: int, k: Tensor, v: Tensor, *, slots: int) -> None:
        plan = call.plan
        self.rank = rank
        self._offset = 0
        self.rows = plan.given(rank)  # what nobody looks at is not written
        self.keys = [self._region(x, self.rows.length, x.dtype) for x in (k, v)]
        others = [other for other in range(plan.world_size) if other != rank]
        most = min(call.rows_of_a_part, max((len(call.numbers(rank, other)) for other in others), default=0))
        self._slots = [
            [self._region(x, most, accumulate_dtype(x.dtype)) for x in (k, v)]
            for _ in range(min(slots, len(call.rounds)))
        ]
        self.nbytes = self._offset

    def terms(self, number: int) -> list[_Region]:
        return self._slots[number % len(self._slots)]

    def _region(self, like: Tensor, rows: int, dtype: torch.dtype) -> _Region:
        shape = (rows, like.shape[0], *like.shape[2:])
        region = (shape, dtype, self._offset)
        self._offset += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        return region


class _Exchange:
    """The workspaces of all ranks in one call, seen as keys and as terms of their gradients."""

    def __init__(self, workspace: Workspace, call: RingCall, k: Tensor, v: Tensor, *, slots: int) -> None:
        self.workspace, self._call, self._k, self._v, self._count = workspace, call, k, v, slots
        self._known: dict[int, _Regions] = {}
        mine = self._regions(call.rank)
        for region, own in zip(mine.keys, (k, v), strict=True):
            room = self._view(call.rank, region).split([len(r) for r in mine.rows.ranges], 1)
            for part, of_own in zip(room, parts_of(own, mine.rows), strict=True):
                part.copy_(of_own)
        workspace.signal(_KEYS_READABLE)

    def keys(self, t: int) -> tuple[Tensor, Tensor, int]:
        """K and V of the source of step t, once they are there, and the number of the first of them."""
        source = self._call.plan.source(self._call.rank, t)
        self.workspace.wait(source, _KEYS_READABLE)
        regions = self._regions(source)
        k, v = (self._view(source, region) for region in regions.keys)
        return k, v, regions.rows.ranges[0].start

    def terms(self, rank: int, number: int, rows: int) -> tuple[Tensor, Tensor]:
        """dK and dV that `rank` finds in that round, for this many rows."""
        dk, dv = (self._view(rank, region)[:, :rows] for region in self._regions(rank).terms(number))
        return dk, dv

    def _regions(self, rank: int) -> _Regions:
        known = self._known.get(rank)
        if known is None:
            known = self._known[rank] = _Regions(self._call, rank, self._k, self._v, slots=self._count)
        return known

    def _view(self, rank: int, region: _Region) -> Tensor:
        shape, dtype, offset = region
        return from_wire(self.workspace.buffer(rank, shape, dtype, offset))


class OneSidedRing:
    """Serves the CPU tensors of ranks on one host."""

    name = "one_sided"

    def __init__(self, transport: ShmTransport) -> None:
        self._transport = transport

    def forward(self, call: RingCall, q: Tensor, k: Tensor, v: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        call = replace(call, shown=Shown.GIVEN)
        state = Forward(call, q, v)
        with self._exchange("ring_attention", call, k, v, dims, 0, lambda: state.attend(0, k, v)) as exchange:
            for t in call.steps:
                if call.needs(t):
                    state.attend(t, *exchange.keys(t))
        return state.result()

    def backward(self, call: RingCall, saved: Saved, dims: tuple[int, ...]) -> Gradients:
        call = replace(call, shown=Shown.GIVEN)
        k, v, rounds = saved.k, saved.v, call.rounds
        state, own = Backward(call, saved), [zeros_like(k), zeros_like(v)]

        def attend_own() -> None:
            state.attend(0, k, v, own[0], own[1])

        with self._exchange("ring_attention_backward", call, k, v, dims, 2, attend_own) as exchange:
            workspace = exchange.workspace
            left: dict[int, int] = {}  # the round whose terms lie in each slot
            for n, one in enumerate(rounds, start=1):
                if rows := one.needs:
                    keys, values, first = exchange.keys(one.t)
                    if (m := left.get(n % 2)) is not None:
                        workspace.wait(call.plan.source(call.rank, rounds[m - 1].t), _added(m))
                    left[n % 2] = n
                    here = slice(rows.start - first, rows.stop - first)
                    terms = exchange.terms(call.rank, n, len(rows))
                    for term in terms:
                        term.zero_()
                    state.attend(one.t, keys[:, here], values[:, here], *terms, rows.start)
                workspace.signal(_written(n))
                if n > 1:
                    _add(exchange, call, n - 1, own)
                    workspace.signal(_added(n - 1))
            if rounds:
                _add(exchange, call, len(rounds), own)
        return state.result(own)

    @contextmanager
    def _exchange(
        self,
        op: str,
        call: RingCall,
        k: Tensor,
        v: Tensor,
        dims: tuple[int, ...],
        slots: int,
        attend_own: Callable[[], None],
    ) -> Iterator[_Exchange]:
        """A call in which this rank's keys are readable, and step 0 is done.

        Step 0 comes first where peers are still in the call before this one: they cannot need these keys yet, and may
        still read those of that call, next to which these would lie.

        A peer whose mask hides all of this rank's keys ends the call as soon as this rank has begun it, so an error
        before the first signal is one half-way too.
        """
        nbytes = _Regions(call, call.rank, k, v, slots=slots).nbytes
        early = self._transport.settled
        if not early:
            try:
                attend_own()
            except BaseException:
                with self._transport.begin(op, dims, k.dtype, 0) as workspace:
                    workspace.peers_may_end = True
                    raise  # which tells the peers
        with self._transport.begin(op, dims, k.dtype, nbytes, reuse=True) as workspace:
            workspace.peers_may_end = True
            exchange = _Exchange(workspace, call, k, v, slots=slots)
            if early:
                attend_own()
            yield exchange


def _add(exchange: _Exchange, call: RingCall, n: int, own: list[Tensor]) -> None:
    """Add what the rank that looks at our keys in round n found."""
    t, _, rows = call.rounds[n - 1]
    if rows.length:
        exchange.workspace.wait(call.reader(t), _written(n))
        for total, term in zip(own, exchange.terms(call.reader(t), n, rows.length), strict=True):
            add_to(total, rows, term)


def _written(n: int) -> int:
    return 2 * n


def _added(n: int) -> int:
    return 2 * n + 3
