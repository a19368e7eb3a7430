"""Ring attention on one rank: the forward and backward of each step, independent of the transport.

The K/V of step t + 1 are transferred while step t is computed. The backward splits a step into chunks. This saves
memory: a rank then holds a few chunks, not full shards, of other ranks' keys and gradients. Partial sums of dK/dV are
returned to the owner of the keys, which adds them in the order of the chunks, so results are bitwise reproducible.
(Liu et al., Ring Attention, arXiv:2310.01889.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fused_tp.attention.kernels.base import AttentionKernel, BackwardTensors, GradientSums
from fused_tp.attention.ring_plan import Chunk, KVView, RankPlan, RingPlan, RowRanges, restrict_to_keys
from fused_tp.attention.softmax import SoftmaxState, compute_delta, compute_sink_gradient
from fused_tp.attention.spec import ScoreParameters
from fused_tp.core.pending import accumulate_dtype
from fused_tp.core.tracing import span

RING_OP = "ring_attention"


class RingCall(NamedTuple):
    """Parameters that all steps of a forward or a backward share.

    Attributes:
        rank_plan: the steps and transfers of this rank.
        dims: at most eight numbers that must be equal on all ranks.
    """

    rank_plan: RankPlan
    kernel: AttentionKernel
    score_parameters: ScoreParameters
    dims: tuple[int, ...] = ()

    @property
    def plan(self) -> RingPlan:
        return self.rank_plan.plan

    @property
    def rank(self) -> int:
        return self.rank_plan.rank

    def select_heads(self, heads: slice) -> RingCall:
        """Return the call restricted to the query heads `heads`."""
        return self._replace(score_parameters=self.score_parameters.select_heads(heads))


class RingSaved(NamedTuple):
    """Tensors saved by the forward, and the gradients of its results; shapes as in `fused_tp.ring_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None
    kv_grad_dtype: torch.dtype | None = None  # dtype of the returned dk and dv; None: the dtype of k and v

    def select_heads(self, heads: slice, kv_heads: slice) -> RingSaved:
        """Return the tensors of the query heads `heads` and their key heads `kv_heads`."""
        q, out, grad_out = (x[:, :, heads] for x in (self.q, self.out, self.grad_out))
        k, v = (x[:, :, kv_heads] for x in (self.k, self.v))
        grad_lse = None if self.grad_lse is None else self.grad_lse[:, heads]
        return RingSaved(q, k, v, out, self.lse[:, heads], grad_out, grad_lse, self.kv_grad_dtype)


class AttentionGradients(NamedTuple):
    """Gradients of one call.

    dq, dk and dv have the shapes of q, k and v. d_slopes [H], in the accumulation dtype, and d_sinks [H], in the dtype
    of the sinks, are sums over this rank's queries only.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    d_slopes: Tensor | None
    d_sinks: Tensor | None


class RingForward:
    """Forward of one call: a running softmax over the keys of the steps so far. Only `finalize` rounds."""

    def __init__(self, call: RingCall, q: Tensor, v: Tensor) -> None:
        self._call, self._q = call, q
        self._state, self._is_uninitialized = SoftmaxState.uninitialized(q, v.shape[3]), True

    def attend(self, t: int, k: Tensor, v: Tensor, first_row: int = 0) -> None:
        """Compute step t. `k` and `v` [B, rows, Hkv, D] are the source's rows from row `first_row` on."""
        call, q, state, is_uninitialized = self._call, self._q, self._state, self._is_uninitialized
        step = call.rank_plan.steps[t]
        if step.is_empty:
            return
        if step.num_rows != q.shape[1]:
            if is_uninitialized:  # this step writes only some rows of the uninitialized state
                state.clear()
            q, state, is_uninitialized = q[:, step.q_start : step.q_stop], state.rows(step.q_start, step.q_stop), False
        self._is_uninitialized = False
        if step.num_keys != k.shape[1]:
            k, v = (x[:, step.k_start - first_row : step.k_stop - first_row] for x in (k, v))
        with span("ring_attention step", t):
            call.kernel.forward(step, call.score_parameters, q, k, v, state, is_uninitialized=is_uninitialized)

    def finalize(self) -> tuple[Tensor, Tensor]:
        """Return (out [B, S, H, Dv], lse [B, H, S])."""
        if self._is_uninitialized:
            self._state.clear()
        return self._state.finalize(self._q.dtype, self._call.score_parameters.sinks)


class RingBackward:
    """Backward of one call: running sums of dq and of the gradient of the slopes. Only `finalize` rounds dq."""

    def __init__(self, call: RingCall, saved: RingSaved) -> None:
        self._call, self._saved = call, saved
        # A query that sees no key has lse = -inf, and its gradient is 0 even if its lse has a gradient.
        delta = compute_delta(saved.grad_out, saved.out, saved.grad_lse)
        self._delta = delta.masked_fill_(saved.lse == -torch.inf, 0.0)
        self._dq = fp32_accumulator(saved.q)
        slopes = call.score_parameters.alibi_slopes
        self._d_slopes = None if slopes is None else slopes.new_zeros(slopes.shape, dtype=self._dq.dtype)

    def attend(self, t: int, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor, first_row: int = 0) -> None:
        """Compute step t for the keys `k` and values `v`, and add their gradients to `dk` and `dv`.

        All four hold the same rows of the source, from row `first_row` on; these may be a chunk of the step's keys.
        """
        call, saved = self._call, self._saved
        # Cache the step's tensors on the GPU: re-copying them is slow, and captured CUDA graphs read them in place.
        step = restrict_to_keys(call.rank_plan.steps[t], first_row, first_row + k.shape[1], cache_result=k.is_cuda)
        if step.is_empty:
            return
        rows, keys = slice(step.q_start, step.q_stop), slice(step.k_start - first_row, step.k_stop - first_row)
        with span("ring_attention backward step", t):
            inputs = BackwardTensors(saved.q, k, v, saved.out, saved.lse, saved.grad_out, self._delta)
            sums = GradientSums(self._dq, dk, dv, self._d_slopes)
            call.kernel.backward(step, call.score_parameters, inputs.select(rows, keys), sums.select(rows, keys))

    def finalize(self, own_gradients: list[Tensor]) -> AttentionGradients:
        """Return the gradients, where `own_gradients` is [dk, dv] of this rank's keys, summed over all steps.

        Empties `own_gradients` and frees the sum of dq: each sum is freed once it is rounded, to lower peak memory.
        """
        saved, sinks = self._saved, self._call.score_parameters.sinks
        d_sinks = None if sinks is None else compute_sink_gradient(sinks, saved.lse, self._delta)
        dq = self._dq.to(saved.q.dtype)
        del self._dq
        kv_dtype = saved.kv_grad_dtype or saved.k.dtype
        # The op's fake implementation returns contiguous tensors, so these must be contiguous.
        dk, dv = (own_gradients.pop(0).to(kv_dtype).contiguous() for _ in range(2))
        return AttentionGradients(dq, dk, dv, self._d_slopes, d_sinks)


class KVExchange(ABC):
    """Transfers of one call: other ranks' keys to this rank, and partial gradients of these keys back."""

    @abstractmethod
    def receive_keys(self, index: int) -> tuple[Tensor, Tensor]:
        """Return K and V of the `recv_rows` of chunk `index`. Called once per chunk, in order.

        The K and V of the previous chunk become invalid.
        """

    @abstractmethod
    def gradient_buffers(self, index: int) -> tuple[Tensor, Tensor]:
        """Return zeroed buffers for the partial dK and dV of chunk `index`."""

    @abstractmethod
    def send_gradients(self, index: int, own_gradients: Sequence[Tensor]) -> None:
        """Start sending the partial dK and dV of chunk `index` to the owner of its keys.

        Also add the partial gradients that arrived for the previous chunk to `own_gradients`, the dK and dV of this
        rank's keys.
        """

    @abstractmethod
    def finish_gradients(self, own_gradients: Sequence[Tensor]) -> None:
        """Add the partial gradients that arrive for the last chunk to `own_gradients`."""


class RingSchedule(ABC):
    """Schedule of ring attention: transfers keys to queries and gradients back."""

    name: str
    kv_view: ClassVar[KVView] = KVView.FULL

    @abstractmethod
    def forward(self, call: RingCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return (out [B, S, H, Dv], lse [B, H, S])."""

    @abstractmethod
    def backward(self, call: RingCall, saved: RingSaved) -> AttentionGradients:
        """Return the gradients; dk and dv are summed over all ranks and rounded once."""


class SteppedRing(RingSchedule):
    """Ring attention step by step; each transport implements `_exchange_scope`."""

    def forward(self, call: RingCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        state, chunks = RingForward(call, q, v), call.rank_plan.unsplit_steps
        with self._exchange_scope(RING_OP, call, chunks, k, v, partial(state.attend, 0, k, v)) as exchange:
            for index, chunk in enumerate(chunks):
                state.attend(chunk.t, *exchange.receive_keys(index), chunk.recv_rows.start)
        del exchange  # frees its buffers before the result is allocated
        return state.finalize()

    def backward(self, call: RingCall, saved: RingSaved) -> AttentionGradients:
        k, v, chunks = saved.k, saved.v, call.rank_plan.chunks
        state, own_gradients = RingBackward(call, saved), [fp32_accumulator(k), fp32_accumulator(v)]
        with self._exchange_scope(
            f"{RING_OP}_backward",
            call,
            chunks,
            k,
            v,
            partial(state.attend, 0, k, v, own_gradients[0], own_gradients[1]),
        ) as exchange:
            for index, chunk in enumerate(chunks):
                state.attend(
                    chunk.t, *exchange.receive_keys(index), *exchange.gradient_buffers(index), chunk.recv_rows.start
                )
                exchange.send_gradients(index, own_gradients)
            if chunks:
                exchange.finish_gradients(own_gradients)
        del exchange
        return state.finalize(own_gradients)

    @abstractmethod
    def _exchange_scope(
        self,
        op: str,
        call: RingCall,
        chunks: Sequence[Chunk],
        k: Tensor,
        v: Tensor,
        attend_own_keys: Callable[[], None],
    ) -> AbstractContextManager[KVExchange]:
        """Context manager of one call, which yields its `KVExchange`.

        Entering it also calls `attend_own_keys` (step 0) once, at a time when this does not delay other ranks.
        """


class LocalRing(SteppedRing):
    """Ring attention for W = 1, without communication."""

    name = "local"

    def forward(self, call: RingCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        step = call.rank_plan.steps[0]
        if step.num_rows == q.shape[1] > 0:
            keys = slice(step.k_start, step.k_stop)
            result = call.kernel.forward_single_step(step, call.score_parameters, q, k[:, keys], v[:, keys])
            if result is not None:
                return result
        return super().forward(call, q, k, v)

    def _exchange_scope(
        self,
        op: str,
        call: RingCall,
        chunks: Sequence[Chunk],
        k: Tensor,
        v: Tensor,
        attend_own_keys: Callable[[], None],
    ) -> AbstractContextManager[Any]:
        attend_own_keys()
        return nullcontext()


def fp32_accumulator(x: Tensor) -> Tensor:
    """Return zeros in fp32 (fp64 for fp64), contiguous and shaped like `x`, for accumulation."""
    return x.new_zeros(x.shape, dtype=accumulate_dtype(x.dtype))


def add_rows(total: Tensor, rows: RowRanges, term: Tensor) -> None:
    """Add `term` [B, rows, H, D] to the rows `rows` of `total` [B, S, H, D]."""
    start = 0
    for r in rows.ranges:
        total[:, r.start : r.stop] += term[:, start : start + len(r)]
        start += len(r)
