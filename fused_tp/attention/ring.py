"""Ring attention on one rank: what forward and backward do at each step, whatever moves the keys.

The K/V of step t + 1 are on their way while those of step t are used. In the backward a step is cut into chunks: what a
rank holds of other ranks' keys and their gradients is a few chunks, not a few shards. The terms of dK/dV go back to the
owner of the keys, which adds them in the order of the chunks: the same bits in every run.
(Liu et al., Ring Attention, arXiv:2310.01889.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fused_tp.attention.kernels.base import AttentionKernel, Saved, Sums
from fused_tp.attention.plan import RingPlan, Rows, Step, compact_index, expand_index, keys_of_step
from fused_tp.attention.softmax import SoftmaxState, row_sums, sink_gradient
from fused_tp.attention.spec import Scores
from fused_tp.runtime.tracing import span
from fused_tp.transport.base import accumulate_dtype

OP = "ring_attention"
# In bf16 a chunk's gradients, in fp32, are three times under way, its keys twice: all as much as one shard's K/V.
_MOST_CHUNKS = 8
_FEWEST_ROWS_OF_A_CHUNK = 2048


class Chunk(NamedTuple):
    """A part of step t: the source's keys that this rank reads, by their indices in its view of them, and the rows of
    this rank's keys that `consumer(t)` reads."""

    t: int
    recv_rows: range
    send_rows: Rows


def _part(rows: range, part: int, size: int) -> range:
    start = min(rows.start + part * size, rows.stop)
    return range(start, min(start + size, rows.stop))


class KVView(Enum):
    """Which of another rank's keys a rank can read."""

    FULL = "all of them"
    UNION = "those that any rank reads"
    NEEDED = "those that it reads itself"


@dataclass(frozen=True)
class RingCall:
    """What all steps of a forward or a backward have in common.

    Attributes:
        dims: at most eight numbers that all ranks must agree on.
    """

    plan: RingPlan
    rank: int
    kernel: AttentionKernel
    scores: Scores
    dims: tuple[int, ...] = ()
    view: KVView = KVView.FULL

    @property
    def steps(self) -> range:
        """But for step 0, this rank's own keys."""
        return range(1, self.plan.world_size)

    def step(self, t: int) -> Step:
        """What this rank computes in step t, with its view of the keys."""
        view = None if t == 0 else self._rows(self.rank, self.plan.source(self.rank, t))
        return self.plan.step(self.rank, t, view)

    def recv_rows(self, t: int) -> range:
        """From the first to the last of the source's keys that this rank reads in step t, by their indices in its view
        of them."""
        return self.local_index(self.rank, self.plan.source(self.rank, t))

    def local_index(self, reader: int, source: int) -> range:
        """`recv_rows` of any rank and source."""
        needed, view = self.plan.needed(reader, source).ranges, self._rows(reader, source)
        if not needed or view is None:
            return range(needed[0].start, needed[-1].stop) if needed else range(0)
        return range(compact_index(view, needed[0].start), compact_index(view, needed[-1].stop))

    def _rows(self, reader: int, source: int) -> Rows | None:
        """The view that `reader` has of the keys of `source`; None: all of them."""
        if self.view is KVView.FULL:
            return None
        return self.plan.given(source) if self.view is KVView.UNION else self.plan.needed(reader, source)

    @property
    def chunk_rows(self) -> int:
        """Rows of keys in a chunk at most; the same on all ranks."""
        longest = max(tokens.length for tokens in self.plan.keys)
        return max(_FEWEST_ROWS_OF_A_CHUNK, -(-longest // _MOST_CHUNKS))

    @cached_property
    def whole_steps(self) -> tuple[Chunk, ...]:
        """The steps after step 0."""
        longest = self.plan.keys[self.rank].length
        return tuple(Chunk(t, self.recv_rows(t), self._send_rows(t, 0, longest)) for t in self.steps)

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """The same, cut into chunks. Every rank has the same number of them."""
        longest, size = max(tokens.length for tokens in self.plan.keys), self.chunk_rows
        parts = max(1, -(-longest // size))
        return tuple(
            Chunk(t, _part(self.recv_rows(t), part, size), self._send_rows(t, part, size))
            for t in self.steps
            for part in range(parts)
        )

    def consumer(self, t: int) -> int:
        """Who reads this rank's keys in step t."""
        return (self.rank + t) % self.plan.world_size

    def _send_rows(self, t: int, part: int, size: int) -> Rows:
        """Rows of this rank's keys in one part of what `consumer(t)` reads, and what lies between in its view."""
        consumer = self.consumer(t)
        indices, view = _part(self.local_index(consumer, self.rank), part, size), self._rows(consumer, self.rank)
        if view is None:
            return Rows((indices,) if indices else ())
        return expand_index(view, indices)

    def of_heads(self, heads: slice) -> RingCall:
        """The same for some of the query heads."""
        return replace(self, scores=self.scores.of_heads(heads))


class RingSaved(NamedTuple):
    """What a forward leaves for its backward, and the gradients it gets. Tensors as in `fused_tp.ring_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None
    kv_grad_dtype: torch.dtype | None = None  # None: that of k and v

    def of_heads(self, heads: slice, kv_heads: slice) -> RingSaved:
        """The same for some of the query heads and their key heads."""
        q, out, grad_out = (x[:, :, heads] for x in (self.q, self.out, self.grad_out))
        k, v = (x[:, :, kv_heads] for x in (self.k, self.v))
        grad_lse = None if self.grad_lse is None else self.grad_lse[:, heads]
        return RingSaved(q, k, v, out, self.lse[:, heads], grad_out, grad_lse, self.kv_grad_dtype)


class Gradients(NamedTuple):
    """dq, dk, dv in the shapes and dtypes of q, k, v; of this rank's queries alone those of slopes and sinks [H], in
    the dtype of sums and in that of the sinks."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    d_slopes: Tensor | None
    d_sinks: Tensor | None


class Forward:
    """The softmax over the keys seen so far; rounded once, in `result`."""

    def __init__(self, call: RingCall, q: Tensor, v: Tensor) -> None:
        self._call, self._q = call, q
        self._state, self._fresh = SoftmaxState.uninitialised(q, v.shape[3]), True

    def attend(self, t: int, k: Tensor, v: Tensor, first: int = 0) -> None:
        """Step t, with the source's keys [B, rows, Hkv, D] from row `first` on."""
        call = self._call
        step = call.step(t)
        if step.empty:
            return
        keys = slice(step.k_start - first, step.k_stop - first)
        fresh = self._fresh and step.rows == self._q.shape[1]  # then all of the state is written at once
        if not fresh:
            self._begin()
        self._fresh = False
        with span("ring_attention step", t):
            state = self._state.rows(step.q_start, step.q_stop)
            q = self._q[:, step.q_start : step.q_stop]
            call.kernel.forward(step, call.scores, q, k[:, keys], v[:, keys], state, fresh=fresh)

    def _begin(self) -> None:
        if self._fresh:
            self._state.clear()

    def result(self) -> tuple[Tensor, Tensor]:
        """(out [B, S, H, Dv], lse [B, H, S])."""
        self._begin()
        return self._state.result(self._q.dtype, self._call.scores.sinks)


class Backward:
    """dq, and the slopes' gradient, summed over the steps so far; rounded once, in `result`."""

    def __init__(self, call: RingCall, saved: RingSaved) -> None:
        self._call, self._saved = call, saved
        # A row that sees nothing has no probabilities to take a gradient, whatever lse's own may be there.
        sums = row_sums(saved.grad_out, saved.out, saved.grad_lse)
        self._row_sums = sums.masked_fill_(saved.lse == -torch.inf, 0.0)
        self._dq = fp32_accumulator(saved.q)
        slopes = call.scores.alibi_slopes
        self._d_slopes = None if slopes is None else slopes.new_zeros(slopes.shape, dtype=self._dq.dtype)

    def attend(self, t: int, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor, first: int = 0) -> None:
        """Step t, or that part of it whose keys are given: adds to dk and dv, which like k and v have rows of the
        source from `first` on."""
        call, saved = self._call, self._saved
        # A device keeps what it was given: copies to it take time, and graphs that were captured read them.
        step = keys_of_step(call.step(t), first, first + k.shape[1], keep=k.is_cuda)
        if step.empty:
            return
        rows, keys = slice(step.q_start, step.q_stop), slice(step.k_start - first, step.k_stop - first)
        with span("ring_attention backward step", t):
            given = Saved(saved.q, k, v, saved.out, saved.lse, saved.grad_out, self._row_sums)
            sums = Sums(self._dq, dk, dv, self._d_slopes)
            call.kernel.backward(step, call.scores, given.part(rows, keys), sums.part(rows, keys))

    def result(self, own: list[Tensor]) -> Gradients:
        """With `own`, dk and dv of this rank's keys, all steps' terms in them. Ends all sums and empties `own`: each is
        freed once it is rounded, so that not all of them exist at once with their rounded copies."""
        saved, sinks = self._saved, self._call.scores.sinks
        d_sinks = None if sinks is None else sink_gradient(sinks, saved.lse, self._row_sums)
        dq = self._dq.to(saved.q.dtype)
        del self._dq
        kv_dtype = saved.kv_grad_dtype or saved.k.dtype
        # Dense, as the op's fake says.
        dk, dv = (own.pop(0).to(kv_dtype).contiguous() for _ in range(2))
        return Gradients(dq, dk, dv, self._d_slopes, d_sinks)


class KVExchange(ABC):
    """How other ranks' keys arrive in one call, and the terms of their gradients return."""

    @abstractmethod
    def keys(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of the `recv_rows` of a chunk; called once for each chunk in order. Those of the chunk before are
        used no more."""

    @abstractmethod
    def terms(self, index: int) -> tuple[Tensor, Tensor]:
        """Zeros for the terms of dK and dV of a chunk."""

    @abstractmethod
    def return_terms(self, index: int, own: Sequence[Tensor]) -> None:
        """Start returning a chunk's terms; add to `own`, dK and dV of this rank's keys, what came back for the chunk
        before."""

    @abstractmethod
    def finish(self, own: Sequence[Tensor]) -> None:
        """Add what came back for the last chunk."""


class Ring(ABC):
    """How keys get to queries and their gradients back."""

    name: str

    @abstractmethod
    def forward(self, call: RingCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(out [B, S, H, Dv], lse [B, H, S])."""

    @abstractmethod
    def backward(self, call: RingCall, saved: RingSaved) -> Gradients:
        """The terms of all ranks in dk and dv, rounded once."""


class SteppedRing(Ring):
    """Step by step; `_exchange` is what transports differ in."""

    view: ClassVar[KVView] = KVView.FULL

    def forward(self, call: RingCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        call = replace(call, view=self.view)
        state, chunks = Forward(call, q, v), call.whole_steps
        with self._exchange(OP, call, chunks, k, v, lambda: state.attend(0, k, v)) as exchange:
            for index, chunk in enumerate(chunks):
                state.attend(chunk.t, *exchange.keys(index), chunk.recv_rows.start)
        del exchange  # and its buffers, before there is a result
        return state.result()

    def backward(self, call: RingCall, saved: RingSaved) -> Gradients:
        call = replace(call, view=self.view)
        k, v, chunks = saved.k, saved.v, call.chunks
        state, own = Backward(call, saved), [fp32_accumulator(k), fp32_accumulator(v)]
        with self._exchange(
            f"{OP}_backward", call, chunks, k, v, lambda: state.attend(0, k, v, own[0], own[1])
        ) as exchange:
            for index, chunk in enumerate(chunks):
                state.attend(chunk.t, *exchange.keys(index), *exchange.terms(index), chunk.recv_rows.start)
                exchange.return_terms(index, own)
            if chunks:
                exchange.finish(own)
        del exchange
        return state.result(own)

    @abstractmethod
    def _exchange(
        self, op: str, call: RingCall, chunks: Sequence[Chunk], k: Tensor, v: Tensor, attend_own: Callable[[], None]
    ) -> AbstractContextManager[KVExchange]:
        """The scope of one call, in which other ranks' keys can be had; `attend_own`, step 0, is called once on the way
        there, when it delays no rank."""


class LocalRing(SteppedRing):
    """Serves W = 1; nothing moves."""

    name = "local"

    def forward(self, call: RingCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        step = call.plan.step(call.rank, 0)
        if step.rows == q.shape[1] > 0:
            keys = slice(step.k_start, step.k_stop)
            result = call.kernel.forward_once(step, call.scores, q, k[:, keys], v[:, keys])
            if result is not None:
                return result
        return super().forward(call, q, k, v)

    def _exchange(
        self, op: str, call: RingCall, chunks: Sequence[Chunk], k: Tensor, v: Tensor, attend_own: Callable[[], None]
    ) -> AbstractContextManager[Any]:
        attend_own()
        return nullcontext()


def fp32_accumulator(x: Tensor) -> Tensor:
    """A sum to be, dense: zeros in fp32 (fp64 for fp64)."""
    return x.new_zeros(x.shape, dtype=accumulate_dtype(x.dtype))


def parts_of(x: Tensor, rows: Rows) -> list[Tensor]:
    """Views of x [B, S, H, D], one of each range of rows."""
    return [x[:, r.start : r.stop] for r in rows.ranges]


def add_to(total: Tensor, rows: Rows, term: Tensor) -> None:
    """Add term [B, rows, H, D] to these tokens of total [B, S, H, D]."""
    for part, of_part in zip(parts_of(total, rows), term.split([len(r) for r in rows.ranges], 1), strict=True):
        part += of_part


def from_wire(x: Tensor) -> Tensor:
    """[rows, B, H, D] seen as [B, rows, H, D]."""
    return x.transpose(0, 1)
