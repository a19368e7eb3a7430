"""Ring attention in a group of one: plain attention."""

from __future__ import annotations

from torch import Tensor

from fused_tp.schedules.ring_state import OwnGrads, RingBackward, RingCall, RingForward, heads_first


class LocalRing:
    """Serves W = 1; nothing moves and nothing is merged."""

    name = "local"

    def forward(self, call: RingCall, q: Tensor, k: Tensor, v: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        state = RingForward(call, q, v)
        state.attend(0, heads_first(k), heads_first(v))
        return state.result()

    def backward(
        self,
        call: RingCall,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dims: tuple[int, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        state = RingBackward(call, grad_out, q, out, lse)
        own = OwnGrads(k, v, state.attend(0, heads_first(k), heads_first(v)))
        return state.dq(), *own.result()
