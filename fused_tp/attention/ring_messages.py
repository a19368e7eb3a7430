"""Ring attention by messages: at step t every rank gets from rank r - t the keys that it looks at, and nothing else.

The keys of step t + 1 travel while those of step t are used, so at most three sets of K/V are on a rank: its own, those
in use, those arriving. In the backward steps are cut into parts (`RingCall.rounds`), of which that holds; the terms of
dK/dV go straight back to their owner, in fp32, while the next part computes. The owner adds them in the order of the
rounds, so the bits are the same in every run. What comes and goes has memory that is made once a call and used in turn:
asked for round by round, it would leave a heap in pieces, which is memory too.

Not passed on from neighbour to neighbour, as a ring is named for: with a window or documents most ranks need a part of
most others' keys, or none, and would have to carry what they do not need. The bytes are the same where all need all.
(Liu et al., Ring Attention, arXiv:2310.01889.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fused_tp.attention.plan import Rows
from fused_tp.attention.ring import (
    Backward,
    Forward,
    Gradients,
    RingCall,
    Round,
    Saved,
    Shown,
    add_to,
    from_wire,
    to_wire,
    wire_buffer,
    zeros_like,
)
from fused_tp.runtime import settings
from fused_tp.transport.base import After, Done, Pending, accumulate_dtype
from fused_tp.transport.torch_dist import TorchDist

Pair = tuple[Tensor, Tensor]


class SendRecvRing:
    """Works on every torch.distributed group."""

    name = "pipelined"

    def __init__(self, transport: TorchDist) -> None:
        self._transport = transport

    def forward(self, call: RingCall, q: Tensor, k: Tensor, v: Tensor, dims: tuple[int, ...]) -> Pair:
        self._transport.check("ring_attention", dims, q.dtype, q.device)
        call = replace(call, shown=Shown.NEEDED)
        with self._transport.abort_scope("ring_attention"):
            rounds = [Round(t, call.needs(t), call.gives(t)) for t in call.steps]
            keys = _Keys(self._transport, rounds, k, v)
            state = Forward(call, q, v)
            state.attend(0, k, v)
            for index, one in enumerate(rounds):
                state.attend(one.t, *keys.wait(index), one.needs.start)
        del keys  # before there is a result
        return state.result()

    def backward(self, call: RingCall, saved: Saved, dims: tuple[int, ...]) -> Gradients:
        k, v = saved.k, saved.v
        self._transport.check("ring_attention_backward", dims, k.dtype, k.device)
        call = replace(call, shown=Shown.NEEDED)
        with self._transport.abort_scope("ring_attention_backward"):
            keys = _Keys(self._transport, call.rounds, k, v)
            state, own = Backward(call, saved), [zeros_like(k), zeros_like(v)]
            state.attend(0, k, v, own[0], own[1])
            terms = _Terms(self._transport, call.rounds, k, v)
            for index, one in enumerate(call.rounds):
                state.attend(one.t, *keys.wait(index), *terms.zeroed(index), one.needs.start)
                terms.add_returned(own)
                terms.give_back(index)
            terms.add_returned(own)
        del keys, terms
        return state.result(own)


class _Slots:
    """Room for parts of keys and values, or of their gradients: pairs [rows, B, H, D] that are used in turn."""

    def __init__(self, k: Tensor, v: Tensor, rows: Iterable[int], dtype: torch.dtype, count: int) -> None:
        most = max(rows, default=0)
        self._pairs = [(wire_buffer(k, most, dtype), wire_buffer(v, most, dtype)) for _ in range(count)]

    def at(self, number: int, rows: int) -> Pair:
        first, second = self._pairs[number % len(self._pairs)]
        return first[:rows], second[:rows]


class _Keys:
    """Other ranks' keys and values, round after round; those of the next round are under way while one computes."""

    def __init__(self, transport: TorchDist, rounds: Sequence[Round], k: Tensor, v: Tensor) -> None:
        self._transport, self._rounds, self._own = transport, rounds, (k, v)
        self._slots = _Slots(k, v, (len(one.needs) for one in rounds), k.dtype, min(2, len(rounds)))
        self._arriving = self._start(0)

    def wait(self, index: int) -> Pair:
        """Those of a round, [B, rows, H, D]; those of the round before are used no more."""
        held = self._arriving.wait()
        self._arriving = self._start(index + 1)
        return held

    def _start(self, index: int) -> Pending[Pair]:
        """Start getting those of a round, and giving ours to the rank that needs them; nothing behind the last."""
        if index == len(self._rounds):
            return Done(self._own)
        one = self._rounds[index]
        return _both(
            self._transport.shift("ring_attention K/V", to_wire(own, one.gives), room, one.t)
            for own, room in zip(self._own, self._slots.at(index, len(one.needs)), strict=True)
        )


class _Terms:
    """What rounds find of other ranks' dK/dV, and its way to the owners of the keys."""

    def __init__(self, transport: TorchDist, rounds: Sequence[Round], k: Tensor, v: Tensor) -> None:
        self._transport, self._rounds = transport, rounds
        self._travels_in = k.dtype if settings.narrow_gradients() else accumulate_dtype(k.dtype)
        # One computes while the one before is on its way.
        needs, gives = [len(one.needs) for one in rounds], [one.gives.length for one in rounds]
        self._found = _Slots(k, v, needs, accumulate_dtype(k.dtype), min(2, len(rounds)))
        self._returned = _Slots(k, v, gives, self._travels_in, min(1, len(rounds)))
        self._returning: tuple[Rows, Pending[Pair]] | None = None

    def zeroed(self, index: int) -> Pair:
        """Sums for a round, [B, rows, H, D]."""
        first, second = self._found.at(index, len(self._rounds[index].needs))
        return from_wire(first.zero_()), from_wire(second.zero_())

    def give_back(self, index: int) -> None:
        """Start giving the sums of a round to the owner of the keys, and getting those for ours."""
        one = self._rounds[index]
        moving = _both(
            self._transport.shift("ring_attention dK/dV", found.to(self._travels_in), room, -one.t)
            for found, room in zip(
                self._found.at(index, len(one.needs)), self._returned.at(index, one.gives.length), strict=True
            )
        )
        self._returning = one.gives, moving

    def add_returned(self, own: Sequence[Tensor]) -> None:
        """Add what was found for our keys in the round that was given back last."""
        if self._returning is None:
            return
        rows, moving = self._returning
        for total, term in zip(own, moving.wait(), strict=True):
            add_to(total, rows, term)
        self._returning = None


def _both(moving: Iterable[Pending[Tensor]]) -> Pending[Pair]:
    first, second = moving
    return After(lambda: (from_wire(first.wait()), from_wire(second.wait())))
