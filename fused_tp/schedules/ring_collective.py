"""Ring attention in two collectives: gather all K/V, compute; and reduce-scatter dK/dV. For sequences so short that
latency, not bytes, is what W - 1 messages cost."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from fused_tp.schedules.ring_state import OwnGrads, RingBackward, RingCall, RingForward, from_wire, to_wire
from fused_tp.transport.base import accumulate_dtype
from fused_tp.transport.torch_dist import TorchDist


class CollectiveRing:
    """Works on every torch.distributed group; holds the K/V of all ranks."""

    name = "plain"

    def __init__(self, transport: TorchDist) -> None:
        self._transport = transport

    def forward(self, call: RingCall, q: Tensor, k: Tensor, v: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        self._transport.check("ring_attention", dims, q.dtype, q.device)
        everyone = self._gather(call, k, v)
        state = RingForward(call, q, v)
        for t in range(call.plan.world_size):
            state.attend(t, *_keys_of(everyone, call.plan.source(call.rank, t), k))
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
        self._transport.check("ring_attention_backward", dims, q.dtype, q.device)
        plan = call.plan
        everyone = self._gather(call, k, v)
        sums = torch.zeros_like(everyone, dtype=accumulate_dtype(everyone.dtype))
        state = RingBackward(call, grad_out, q, out, lse)
        own = None
        for t in range(plan.world_size):
            source = plan.source(call.rank, t)
            terms = state.attend(t, *_keys_of(everyone, source, k))
            if t == 0:
                own = terms
            elif terms is not None:
                for total, term in zip(_keys_of(sums, source, k), terms, strict=True):
                    total[:, :, : term.shape[2]].copy_(term)
        grads = OwnGrads(k, v, own)
        rows = everyone.shape[1]
        others = self._transport.reduce_scatter("ring_attention dK/dV", sums.flatten(0, 1), [rows] * plan.world_size)
        grads.add(*(g[:, :, : call.length] for g in _split(others.wait(), k)))
        return state.dq(), *grads.result()

    def _gather(self, call: RingCall, k: Tensor, v: Tensor) -> Tensor:
        """K and V of every rank, side by side: [W, rows of the longest, B, Hkv, D + Dv]."""
        rows = max(call.plan.lengths)
        mine = torch.cat([to_wire(k, call.length), to_wire(v, call.length)], dim=-1)
        mine = pad(mine, (0, 0, 0, 0, 0, 0, 0, rows - call.length))
        return self._transport.all_gather("ring_attention K/V", mine).wait().unflatten(0, (-1, rows))


def _keys_of(everyone: Tensor, rank: int, k: Tensor) -> tuple[Tensor, Tensor]:
    return _split(everyone[rank], k)


def _split(both: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, B, Hkv, D + Dv] as K and V, heads first."""
    return from_wire(both[..., : k.shape[-1]]), from_wire(both[..., k.shape[-1] :])
