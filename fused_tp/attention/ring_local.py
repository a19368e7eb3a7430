"""Ring attention in a group of one: plain attention."""

from __future__ import annotations

from torch import Tensor

from fused_tp.attention.ring import Backward, Forward, Gradients, RingCall, Saved, zeros_like


class LocalRing:
    """Serves W = 1; nothing moves."""

    name = "local"

    def forward(self, call: RingCall, q: Tensor, k: Tensor, v: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        step = call.plan.step(call.rank, 0)
        if step.rows == q.shape[1] > 0:
            keys = slice(step.k_start, step.k_stop)
            result = call.provider.alone(step, call.scores, q, k[:, keys], v[:, keys], call.sinks)
            if result is not None:
                return result
        state = Forward(call, q, v)
        state.attend(0, k, v)
        return state.result()

    def backward(self, call: RingCall, saved: Saved, dims: tuple[int, ...]) -> Gradients:
        state, own = Backward(call, saved), [zeros_like(saved.k), zeros_like(saved.v)]
        state.attend(0, saved.k, saved.v, own[0], own[1])
        return state.result(own)
