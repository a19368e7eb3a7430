"""Ring attention by messages: at step t every rank gets from rank r - t the keys that it looks at, and nothing else.

The keys of step t + 1 travel while those of step t are used, so at most three sets of K/V are on a rank: its own, those
in use, those arriving. In the backward steps are cut into parts (`RingCall.rounds`), of which that holds; the terms of
dK/dV go straight back to their owner, in fp32, while the next part computes. The owner adds them in the order of the
rounds, so the bits are the same in every run.

Not passed on from neighbour to neighbour, as a ring is named for: with a window or documents most ranks need a part of
most others' keys, or none, and would have to carry what they do not need. The bytes are the same where all need all.
(Liu et al., Ring Attention, arXiv:2310.01889.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fused_tp.runtime import settings
from fused_tp.schedules.attention.ring import (
    Backward,
    Forward,
    Gradients,
    RingCall,
    Round,
    Saved,
    from_wire,
    to_wire,
    wire_buffer,
    zeros_like,
)
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
        with self._transport.several("ring_attention"):
            arriving = self._fetch(call, 1, k, v)
            state = Forward(call, q, v)
            state.attend(0, k, v)
            for t in call.steps:
                held = arriving.wait()
                arriving = self._fetch(call, t + 1, k, v)
                state.attend(t, *held, call.needs(t).start)
        return state.result()

    def backward(self, call: RingCall, saved: Saved, dims: tuple[int, ...]) -> Gradients:
        k, v = saved.k, saved.v
        self._transport.check("ring_attention_backward", dims, k.dtype, k.device)
        with self._transport.several("ring_attention_backward"):
            rounds = call.rounds
            arriving = self._fetch_part(rounds, 0, k, v)
            state, own = Backward(call, saved), (zeros_like(k), zeros_like(v))
            state.attend(0, k, v, *own)
            returning: Pending[Pair] | None = None
            for index, one in enumerate(rounds):
                held = arriving.wait()
                arriving = self._fetch_part(rounds, index + 1, k, v)
                terms = zeros_like(held[0]), zeros_like(held[1])
                state.attend(one.t, *held, *terms, one.needs.start)
                del held
                if returning is not None:
                    _add(own, rounds[index - 1].gives, returning.wait())
                returning = self._give_back(one, terms, k, v)
                del terms
            if returning is not None:
                _add(own, rounds[-1].gives, returning.wait())
        return state.result(*own)

    def _fetch(self, call: RingCall, t: int, k: Tensor, v: Tensor) -> Pending[Pair]:
        """Start getting all keys and values of step t; nothing behind the last."""
        if t >= call.plan.world_size:
            return Done((k[:, :0], v[:, :0]))
        return self._exchange_keys(Round(t, call.needs(t), call.gives(t)), k, v)

    def _fetch_part(self, rounds: Sequence[Round], index: int, k: Tensor, v: Tensor) -> Pending[Pair]:
        """Start getting those of a round; nothing behind the last."""
        return self._exchange_keys(rounds[index], k, v) if index < len(rounds) else Done((k[:, :0], v[:, :0]))

    def _exchange_keys(self, one: Round, k: Tensor, v: Tensor) -> Pending[Pair]:
        """Start getting keys and values, and giving ours to the rank that needs them."""
        moving = [
            self._transport.shift(
                "ring_attention K/V", to_wire(x, one.gives), wire_buffer(x, one.needs, x.dtype), one.t
            )
            for x in (k, v)
        ]
        return _both(moving)

    def _give_back(self, one: Round, terms: Pair, k: Tensor, v: Tensor) -> Pending[Pair]:
        """Start giving the terms of a round to the owner of the keys, and getting those for ours."""
        moving = [
            self._transport.shift(
                "ring_attention dK/dV",
                to_wire(term.to(_travels_in(x)), range(term.shape[1])),
                wire_buffer(x, one.gives, _travels_in(x)),
                -one.t,
            )
            for term, x in zip(terms, (k, v), strict=True)
        ]
        return _both(moving)


def _travels_in(x: Tensor) -> torch.dtype:
    """What terms of the gradient of keys or values are rounded to on their way."""
    return x.dtype if settings.narrow_gradients() else accumulate_dtype(x.dtype)


def _both(moving: list[Pending[Tensor]]) -> Pending[Pair]:
    first, second = moving
    return After(lambda: (from_wire(first.wait()), from_wire(second.wait())))


def _add(sums: Pair, rows: range, terms: Pair) -> None:
    for total, term in zip(sums, terms, strict=True):
        total[:, rows.start : rows.stop] += term
