"""One call of ring attention on this rank: what forward and backward do at each step, whatever moves the keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fused_tp.attention.kernels.base import AttentionProvider
from fused_tp.attention.plan import RingPlan, Rows, Step, number_in, numbered, of_keys
from fused_tp.attention.scores import Scores
from fused_tp.attention.softmax import SoftmaxState, row_sums, sink_gradient
from fused_tp.runtime.tracing import span
from fused_tp.transport.base import accumulate_dtype

# In bf16 a part's gradients, in fp32, are three times under way, its keys twice: all as much as one shard's K/V.
_MOST_PARTS = 8
_FEWEST_ROWS_OF_A_PART = 2048


class Round(NamedTuple):
    """A part of step t: which of the source's keys this rank looks at, by their numbers among those that it is shown,
    and the rows of this rank's keys that `reader(t)` looks at."""

    t: int
    needs: range
    gives: Rows


def _part(rows: range, part: int, size: int) -> range:
    start = min(rows.start + part * size, rows.stop)
    return range(start, min(start + size, rows.stop))


class Shown(Enum):
    """What a rank has before it of another one's keys."""

    ALL = "all of them"
    GIVEN = "those that any rank looks at"
    NEEDED = "those that it looks at itself"


@dataclass(frozen=True)
class RingCall:
    """What all steps of a forward or a backward have in common."""

    plan: RingPlan
    rank: int
    provider: AttentionProvider
    scores: Scores
    sinks: Tensor | None  # [H]
    shown: Shown = Shown.ALL

    @property
    def steps(self) -> range:
        """But for step 0, this rank's own keys."""
        return range(1, self.plan.world_size)

    def step(self, t: int) -> Step:
        """What this rank computes in step t, with the keys that it is shown."""
        shown = None if t == 0 else self._rows(self.rank, self.plan.source(self.rank, t))
        return self.plan.step(self.rank, t, shown)

    def needs(self, t: int) -> range:
        """From the first to the last of the source's keys that this rank looks at in step t, by their numbers among
        those that it is shown."""
        return self.numbers(self.rank, self.plan.source(self.rank, t))

    def numbers(self, reader: int, source: int) -> range:
        """`needs` of any rank and source."""
        needed, shown = self.plan.needed(reader, source).ranges, self._rows(reader, source)
        if not needed or shown is None:
            return range(needed[0].start, needed[-1].stop) if needed else range(0)
        return range(number_in(shown, needed[0].start), number_in(shown, needed[-1].stop))

    def _rows(self, reader: int, source: int) -> Rows | None:
        """What `reader` is shown of the keys of `source`; None: all of them."""
        if self.shown is Shown.ALL:
            return None
        return self.plan.given(source) if self.shown is Shown.GIVEN else self.plan.needed(reader, source)

    @property
    def rows_of_a_part(self) -> int:
        """Rows of keys in a part at most; the same on all ranks."""
        longest = max(tokens.length for tokens in self.plan.keys)
        return max(_FEWEST_ROWS_OF_A_PART, -(-longest // _MOST_PARTS))

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """The steps behind step 0, each in parts: what a backward keeps of other ranks' keys and their gradients is a
        few parts, not a few shards. Every rank has the same number of them."""
        longest, size = max(tokens.length for tokens in self.plan.keys), self.rows_of_a_part
        parts = max(1, -(-longest // size))
        return tuple(
            Round(t, _part(self.needs(t), part, size), self._given(t, part, size))
            for t in self.steps
            for part in range(parts)
        )

    def reader(self, t: int) -> int:
        """Who looks at this rank's keys in step t."""
        return (self.rank + t) % self.plan.world_size

    def gives(self, t: int) -> Rows:
        """Rows of this rank's keys that `reader(t)` looks at, and what lies between them in what it is shown."""
        return self._given(t, 0, self.plan.keys[self.rank].length)

    def _given(self, t: int, part: int, size: int) -> Rows:
        reader = self.reader(t)
        numbers, shown = _part(self.numbers(reader, self.rank), part, size), self._rows(reader, self.rank)
        if shown is None:
            return Rows((numbers,) if numbers else ())
        return numbered(shown, numbers)

    def of_heads(self, heads: slice) -> RingCall:
        """The same for some of the query heads."""
        scores, sinks = self.scores, self.sinks
        slopes, dropout = scores.alibi_slopes, scores.dropout
        if dropout is not None:
            dropout = replace(dropout, first_head=dropout.first_head + heads.start)
        slopes = None if slopes is None else slopes[heads]
        return replace(
            self,
            scores=replace(scores, alibi_slopes=slopes, dropout=dropout),
            sinks=None if sinks is None else sinks[heads],
        )


@dataclass(frozen=True)
class Saved:
    """What a forward leaves for its backward, and what comes back for it. Tensors as in `fused_tp.ring_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None
    kv_grad_dtype: torch.dtype | None = None  # None: that of k and v

    def of_heads(self, heads: slice, kv_heads: slice) -> Saved:
        """The same for some of the query heads and their key heads."""
        q, out, grad_out = (x[:, :, heads] for x in (self.q, self.out, self.grad_out))
        k, v = (x[:, :, kv_heads] for x in (self.k, self.v))
        grad_lse = None if self.grad_lse is None else self.grad_lse[:, heads]
        return Saved(q, k, v, out, self.lse[:, heads], grad_out, grad_lse, self.kv_grad_dtype)


@dataclass(frozen=True)
class Gradients:
    """dq, dk, dv in the shapes and dtypes of q, k, v; of this rank's queries alone those of slopes and sinks [H], in
    the dtype of sums and in that of the sinks."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    d_slopes: Tensor | None
    d_sinks: Tensor | None


class Ring(Protocol):
    """How keys get to queries and their gradients back. `dims` is what all ranks must agree on."""

    name: str

    def forward(self, call: RingCall, q: Tensor, k: Tensor, v: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """(out [B, S, H, Dv], lse [B, H, S])."""
        ...

    def backward(self, call: RingCall, saved: Saved, dims: tuple[int, ...]) -> Gradients: ...


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
            call.provider.forward(step, call.scores, q, k[:, keys], v[:, keys], state, fresh=fresh)

    def _begin(self) -> None:
        if self._fresh:
            self._state.clear()

    def result(self) -> tuple[Tensor, Tensor]:
        self._begin()
        return self._state.result(self._q.dtype, self._call.sinks)


class Backward:
    """dq, and what slopes get, summed over the steps so far; rounded once, in `result`."""

    def __init__(self, call: RingCall, saved: Saved) -> None:
        self._call, self._saved = call, saved
        # A row that sees nothing has no probabilities to take a gradient, whatever lse's own may be there.
        sums = row_sums(saved.grad_out, saved.out, saved.grad_lse)
        self._sums = sums.masked_fill_(saved.lse == -torch.inf, 0.0)
        self._dq = zeros_like(saved.q)
        slopes = call.scores.alibi_slopes
        self._d_slopes = None if slopes is None else slopes.new_zeros(slopes.shape, dtype=self._dq.dtype)

    def attend(self, t: int, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor, first: int = 0) -> None:
        """Step t, or that part of it whose keys are given: adds to dk and dv, which like k and v have rows of the
        source from `first` on."""
        call, saved = self._call, self._saved
        # A device keeps what it was given: copies to it take time, and graphs that were captured read them.
        step = of_keys(call.step(t), first, first + k.shape[1], keep=k.is_cuda)
        if step.empty:
            return
        rows, keys = slice(step.q_start, step.q_stop), slice(step.k_start - first, step.k_stop - first)
        with span("ring_attention backward step", t):
            call.provider.backward(
                step,
                call.scores,
                saved.grad_out[:, rows],
                saved.q[:, rows],
                k[:, keys],
                v[:, keys],
                saved.lse[..., rows],
                self._sums[..., rows],
                self._dq[:, rows],
                dk[:, keys],
                dv[:, keys],
                self._d_slopes,
                saved.out[:, rows],
            )

    def result(self, own: list[Tensor]) -> Gradients:
        """With `own`, dk and dv of this rank's keys, all steps' terms in them. Ends all sums and empties `own`: each is
        let go of once it is rounded, so that not all of them lie beside their rounded copies."""
        saved, sinks = self._saved, self._call.sinks
        d_sinks = None if sinks is None else sink_gradient(sinks, saved.lse, self._sums)
        dq = self._dq.to(saved.q.dtype)
        del self._dq
        kv_dtype = saved.kv_grad_dtype or saved.k.dtype
        # Dense, as the op's fake says.
        dk, dv = (own.pop(0).to(kv_dtype).contiguous() for _ in range(2))
        return Gradients(dq, dk, dv, self._d_slopes, d_sinks)


def zeros_like(x: Tensor) -> Tensor:
    """A sum to be, dense: zeros in fp32 (fp64 for fp64)."""
    return x.new_zeros(x.shape, dtype=accumulate_dtype(x.dtype))


def parts_of(x: Tensor, rows: Rows) -> list[Tensor]:
    """Views of x [B, S, H, D], one of each range of rows."""
    return [x[:, r.start : r.stop] for r in rows.ranges]


def to_wire(x: Tensor, rows: Rows) -> Tensor:
    """These tokens of x [B, S, H, D] as contiguous [rows, B, H, D]; of one range and for B = 1 it is x itself, not a
    copy."""
    parts = [part.transpose(0, 1) for part in parts_of(x, rows) or [x[:, :0]]]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


def add_to(total: Tensor, rows: Rows, term: Tensor) -> None:
    """Add term [B, rows, H, D] to these tokens of total [B, S, H, D]."""
    for part, of_part in zip(parts_of(total, rows), term.split([len(r) for r in rows.ranges], 1), strict=True):
        part += of_part


def from_wire(x: Tensor) -> Tensor:
    """[rows, B, H, D] seen as [B, rows, H, D]."""
    return x.transpose(0, 1)


def wire_buffer(like: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Room for `to_wire` of so many tokens of tensors like this one."""
    return like.new_empty((rows, like.shape[0], *like.shape[2:]), dtype=dtype)
