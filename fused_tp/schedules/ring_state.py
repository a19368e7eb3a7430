"""What a rank carries from step to step of ring attention, whatever moves the keys: output and log-sum-exp, dq."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fused_tp.runtime.tracing import span
from fused_tp.schedules.attention_providers import AttentionProvider
from fused_tp.schedules.ring_plan import RingPlan
from fused_tp.transport.base import accumulate_dtype


@dataclass(frozen=True)
class RingCall:
    """One call of ring attention on this rank: what all steps of forward and backward have in common."""

    plan: RingPlan
    rank: int
    provider: AttentionProvider
    scale: float

    @property
    def length(self) -> int:
        """Tokens on this rank."""
        return self.plan.lengths[self.rank]


def heads_first(x: Tensor) -> Tensor:
    """[B, S, H, D] seen as [B, H, S, D], or the other way round."""
    return x.transpose(1, 2)


def to_wire(x: Tensor, rows: int) -> Tensor:
    """The first `rows` tokens of x [B, S, H, D] as contiguous [rows, B, H, D]: any prefix of it is contiguous too, and
    for B = 1 it is x itself, not a copy."""
    return x[:, :rows].transpose(0, 1).contiguous()


def from_wire(x: Tensor) -> Tensor:
    """[rows, B, H, D] seen heads first, [B, H, rows, D]."""
    return x.permute(1, 2, 0, 3)


def merge(out: Tensor, lse: Tensor, step_out: Tensor, step_lse: Tensor) -> None:
    """Fold another softmax over other keys into (out [..., D], lse [...]), in place.

    With w = exp(step_lse) / (exp(lse) + exp(step_lse)) = sigmoid(step_lse - lse), which cannot overflow, the output is
    out + w (step_out - out): one pass over the output. Rows that saw nothing so far (lse -inf) are replaced, rows that
    see nothing in this step stay; where both are so, -inf minus -inf is kept from making NaN.
    """
    weight = torch.sigmoid(step_lse - lse).masked_fill_(step_lse == -torch.inf, 0.0)
    out.lerp_(step_out.to(out.dtype), weight.unsqueeze(-1))
    torch.logaddexp(lse, step_lse, out=lse)


class RingForward:
    """Output and log-sum-exp over the keys seen so far, in fp32 (fp64 for fp64); rounded once, in `result`."""

    def __init__(self, call: RingCall, q: Tensor, v: Tensor) -> None:
        self._call = call
        self._q = heads_first(q)
        self._v_head_dim = v.shape[-1]
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def attend(self, t: int, k: Tensor, v: Tensor) -> None:
        """Step t, with the source's keys and values [B, Hkv, at least kv_stop, D]. Step 0 comes first."""
        call = self._call
        step = call.plan.step(call.rank, t)
        if step.empty:
            return
        q, k, v = self._q[:, :, step.q_start :], k[:, :, : step.kv_stop], v[:, :, : step.kv_stop]
        with span("ring_attention step", t):
            out, lse = call.provider.forward(q, k, v, causal=step.causal, scale=call.scale)
            if self._out is None or self._lse is None:  # step 0, which has all queries: its results become the state
                self._out, self._lse = out.to(accumulate_dtype(q.dtype)), lse
            else:
                merge(self._out[:, :, step.q_start :], self._lse[:, :, step.q_start :], out, lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """(out [B, S, H, Dv] in the dtype of q, lse [B, H, S]), both contiguous."""
        q = self._q
        if self._out is None or self._lse is None:  # this rank holds no token
            lse = q.new_empty(q.shape[:3], dtype=accumulate_dtype(q.dtype))
            return heads_first(q).new_empty((q.shape[0], q.shape[2], q.shape[1], self._v_head_dim)), lse
        return heads_first(self._out).to(q.dtype).contiguous(), self._lse.contiguous()


class RingBackward:
    """dq summed over the steps so far, in fp32 (fp64 for fp64)."""

    def __init__(self, call: RingCall, grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> None:
        self._call = call
        self._grad_out, self._q, self._out = heads_first(grad_out), heads_first(q), heads_first(out)
        self._lse = lse
        self._dq: Tensor | None = None

    def attend(self, t: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """Step t's terms (dk, dv) [B, Hkv, kv_stop, D] for the source, or None where it has nothing to compute."""
        call = self._call
        step = call.plan.step(call.rank, t)
        if step.empty:
            return None
        rows = slice(step.q_start, None)
        with span("ring_attention backward step", t):
            dq, dk, dv = call.provider.backward(
                self._grad_out[:, :, rows],
                self._q[:, :, rows],
                k[:, :, : step.kv_stop],
                v[:, :, : step.kv_stop],
                self._out[:, :, rows],
                self._lse[:, :, rows],
                causal=step.causal,
                scale=call.scale,
            )
            if self._dq is None:
                self._dq = dq.to(accumulate_dtype(dq.dtype))
            else:
                self._dq[:, :, rows].add_(dq)
        return dk, dv

    def dq(self) -> Tensor:
        """[B, S, H, D] in the dtype of q, contiguous."""
        if self._dq is None:  # this rank holds no token
            return heads_first(torch.empty_like(self._q)).contiguous()
        return heads_first(self._dq).to(self._q.dtype).contiguous()


class OwnGrads:
    """dk and dv of this rank's keys, summed in fp32 (fp64 for fp64): its own term first, then what others send."""

    def __init__(self, k: Tensor, v: Tensor, own: tuple[Tensor, Tensor] | None) -> None:
        self._like = (k, v)
        self._sums = tuple(x.to(accumulate_dtype(x.dtype)) for x in own) if own is not None else ()

    def add(self, dk: Tensor, dv: Tensor) -> None:
        """Terms [B, Hkv, rows, D] for the first `rows` keys."""
        for total, term in zip(self._sums, (dk, dv), strict=False):
            total[:, :, : term.shape[2]].add_(term)

    def result(self) -> tuple[Tensor, Tensor]:
        """(dk, dv) [B, S, Hkv, D] in the dtypes of k and v, contiguous."""
        if not self._sums:  # this rank holds no token
            k, v = self._like
            return k.new_empty(k.shape), v.new_empty(v.shape)
        dk, dv = (heads_first(s).to(x.dtype).contiguous() for s, x in zip(self._sums, self._like, strict=True))
        return dk, dv
