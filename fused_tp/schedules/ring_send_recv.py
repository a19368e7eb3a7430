"""Ring attention by messages: K/V go round the ring of ranks, the next ones travel while the present ones are used.

At most three sets of K/V are on a rank: its own, those in use, those arriving. In the backward dK/dV follow one step
behind the K/V they belong to: each rank adds its term, in fp32 and in the order of the ring, and after W steps they are
home. Only rows that some rank further on looks at travel (Liu et al., Ring Attention, arXiv:2310.01889).
"""

from __future__ import annotations

from torch import Tensor

from fused_tp.schedules.ring_state import OwnGrads, RingBackward, RingCall, RingForward, from_wire, heads_first, to_wire
from fused_tp.transport.base import After, Pending, accumulate_dtype
from fused_tp.transport.torch_dist import TorchDist

Pair = tuple[Tensor, Tensor]


class SendRecvRing:
    """Works on every torch.distributed group."""

    name = "pipelined"

    def __init__(self, transport: TorchDist) -> None:
        self._transport = transport

    def forward(self, call: RingCall, q: Tensor, k: Tensor, v: Tensor, dims: tuple[int, ...]) -> Pair:
        self._transport.check("ring_attention", dims, q.dtype, q.device)
        state = RingForward(call, q, v)
        held = _to_wire(k, v, call.plan.rows_sent(call.rank))
        for t in range(call.plan.world_size):
            arriving = self._pass_on_keys(call, t, held)
            state.attend(t, *((heads_first(k), heads_first(v)) if t == 0 else map(from_wire, held)))
            held = arriving.wait()
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
        plan, rank = call.plan, call.rank
        state = RingBackward(call, grad_out, q, out, lse)
        held = _to_wire(k, v, plan.rows_sent(rank))
        arriving = self._pass_on_keys(call, 0, held)
        own = OwnGrads(k, v, state.attend(0, heads_first(k), heads_first(v)))
        held = arriving.wait()
        sums: Pending[Pair] | None = None
        for t in range(1, plan.world_size):
            arriving = self._pass_on_keys(call, t, held)
            terms = state.attend(t, *map(from_wire, held))
            so_far = sums.wait() if sums is not None else _zeros(held, plan.rows_sent(plan.source(rank, t)))
            if terms is not None:
                for total, term in zip(so_far, terms, strict=True):
                    from_wire(total)[:, :, : term.shape[2]].add_(term)
            sums = self._shift("ring_attention dK/dV", so_far, plan.rows_sent(plan.source(rank, t + 1)))
            held = arriving.wait()
        if sums is not None:
            own.add(*map(from_wire, sums.wait()))
        return state.dq(), *own.result()

    def _pass_on_keys(self, call: RingCall, t: int, held: Pair) -> Pending[Pair]:
        """Start giving the K/V of step t to the next rank, for its step t + 1, and getting ours for it."""
        plan = call.plan
        going, coming = plan.source(call.rank, t), plan.source(call.rank, t + 1)
        rows = plan.rows_sent(coming) if t < plan.last_step(coming) else 0
        if t >= plan.last_step(going):
            held = (held[0][:0], held[1][:0])
        return self._shift("ring_attention K/V", held, rows)

    def _shift(self, op: str, pair: Pair, rows: int) -> Pending[Pair]:
        buffers = [x.new_empty((rows, *x.shape[1:])) for x in pair]
        first, second = (self._transport.shift(op, x, buffer, 1) for x, buffer in zip(pair, buffers, strict=True))
        return After(lambda: (first.wait(), second.wait()))


def _to_wire(k: Tensor, v: Tensor, rows: int) -> Pair:
    return to_wire(k, rows), to_wire(v, rows)


def _zeros(like: Pair, rows: int) -> Pair:
    k, v = (x.new_zeros((rows, *x.shape[1:]), dtype=accumulate_dtype(x.dtype)) for x in like)
    return k, v
