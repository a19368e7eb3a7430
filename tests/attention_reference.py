"""Dense [S, S] reference attention in fp64 on one process, with every mask and score of `ring_attention`.

`forward` and `backward` run a kernel step by step, for comparison with the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_tp.attention.kernels.base import AttentionKernel, BackwardTensors, GradientSums
from fused_tp.attention.layout import TokenRanges
from fused_tp.attention.ring_plan import Step, make_step
from fused_tp.attention.softmax import SoftmaxState, compute_delta
from fused_tp.attention.spec import AttentionMask, Dropout, ScoreParameters
from fused_tp.core.pending import accumulate_dtype
from tests.reference import seeded


def dense_mask(
    seq_len: int,
    seq_len_kv: int,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    cu_seqlens: Sequence[int] | None = None,
    cu_seqlens_kv: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """(seen bool [Sq, Sk], distance int64 [Sq, Sk] from a query's place to a key), row by row.

    Places align the last query of a document with its last key.
    """
    bounds = list(cu_seqlens) if cu_seqlens is not None else [0, seq_len]
    bounds_kv = list(cu_seqlens_kv) if cu_seqlens_kv is not None else bounds if cu_seqlens else [0, seq_len_kv]
    left, right = (-1, -1) if window is None else window
    right = 0 if causal else right
    seen = torch.zeros(seq_len, seq_len_kv, dtype=torch.bool)
    distance = torch.zeros(seq_len, seq_len_kv, dtype=torch.int64)
    keys = torch.arange(seq_len_kv)
    for d in range(len(bounds) - 1):
        for i in range(bounds[d], bounds[d + 1]):
            place = i - bounds[d + 1] + bounds_kv[d + 1]
            distance[i] = place - keys
            seen[i] = (bounds_kv[d] <= keys) & (keys < bounds_kv[d + 1])
            if right >= 0:
                seen[i] &= keys - place <= right
            if left >= 0:
                seen[i] &= place - keys <= left
    return seen, distance


def dense(mask: AttentionMask) -> tuple[Tensor, Tensor]:
    """Return `dense_mask` of an AttentionMask."""
    bounds = {name: getattr(mask, name) or None for name in ("cu_seqlens", "cu_seqlens_kv")}
    return dense_mask(mask.seq_len, mask.seq_len_kv, causal=mask.causal, window=mask.window, **bounds)


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    distance: Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout: Dropout | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [B, Sq, H, Dv], lse [B, H, Sq]); differentiable; fully masked rows are 0 in out and -inf in lse."""
    group = q.shape[2] // k.shape[2]
    k, v = (t.double().repeat_interleave(group, dim=2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[:, None, None] * distance.abs()
    scores = torch.where(seen, scores if bias is None else scores + bias, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    if scores.shape[-1] == 0:
        return q.new_zeros((*q.shape[:3], v.shape[3]), dtype=torch.float64), scores.new_full(
            scores.shape[:3], -torch.inf
        )
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    lse = torch.logsumexp(torch.where(empty, 0.0, scores), -1, keepdim=True)
    p = torch.where(empty, 0.0, torch.exp(torch.where(empty, 0.0, scores) - lse))[..., : k.shape[1]]
    if dropout is not None:
        places = (torch.arange(n) for n in (q.shape[1], k.shape[1]))
        p = p * dropout.keep_mask(q.shape[0], q.shape[2], *places) / (1 - dropout.p)
    lse = torch.where(empty, -torch.inf, lse).squeeze(-1)
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


# -- kernels, step by step --------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor


class Gradients(NamedTuple):
    dq: Tensor
    dk: Tensor
    dv: Tensor
    d_slopes: Tensor


def kernel_inputs(
    mask: AttentionMask, dtype: torch.dtype, *, batch: int = 1, heads: int = 2, kv_heads: int = 2, dim: int = 16,
    v_dim: int | None = None, seed: int = 0,
) -> Inputs:  # fmt: skip
    v_dim = dim if v_dim is None else v_dim
    shapes = [
        (batch, mask.seq_len, heads, dim),
        (batch, mask.seq_len_kv, kv_heads, dim),
        (batch, mask.seq_len_kv, kv_heads, v_dim),
        (batch, mask.seq_len, heads, v_dim),
    ]
    return Inputs(*(seeded(*shape, dtype=dtype, seed=seed + number) for number, shape in enumerate(shapes)))


def whole_reference(mask: AttentionMask, scores: ScoreParameters, x: Inputs) -> tuple[Tensor, Tensor, Gradients]:
    """(out, lse, gradients) in fp64."""
    leaves = [t.detach().double().requires_grad_() for t in x[:3]]
    slopes = torch.zeros(x.q.shape[2]) if scores.alibi_slopes is None else scores.alibi_slopes
    slopes = slopes.double().requires_grad_()
    how: Any = {"scale": scores.scale, "softcap": scores.softcap, "dropout": scores.dropout}
    q, k, v = leaves
    out, lse = dense_attention(q, k, v, *dense(mask), alibi_slopes=slopes, **how)
    grads = torch.autograd.grad(out, (*leaves, slopes), x.grad_out.double())
    return out.detach(), lse.detach(), Gradients(*grads)


def everything(mask: AttentionMask) -> tuple[TokenRanges, TokenRanges]:
    """All queries and all keys."""
    return TokenRanges((range(mask.seq_len),)), TokenRanges((range(mask.seq_len_kv),))


def one_step(mask: AttentionMask) -> Step:
    """The single step of one rank, which holds all queries and keys."""
    return make_step(mask, *everything(mask))


def forward(
    kernel: AttentionKernel,
    mask: AttentionMask,
    scores: ScoreParameters,
    x: Inputs,
    *,
    keys: Sequence[TokenRanges] = (),
) -> SoftmaxState:
    """Softmax state of all queries after one step per element of `keys`; by default one step over all keys."""
    queries, all_keys = everything(mask)
    state = SoftmaxState.empty(x.q, x.v.shape[-1])
    for tokens in keys or [all_keys]:
        step = make_step(mask, queries, tokens)
        if not step.is_empty:
            k, v = (t[:, tokens.indices] if keys else t for t in (x.k, x.v))
            k, v = (t[:, step.k_start : step.k_stop] for t in (k, v))
            part = state.rows(step.q_start, step.q_stop)
            kernel.forward(step, scores, x.q[:, step.q_start : step.q_stop], k, v, part)
    return state


def backward(
    kernel: AttentionKernel, mask: AttentionMask, scores: ScoreParameters, x: Inputs, out: Tensor, lse: Tensor,
    sums: Tensor | None = None, *, keys: Sequence[TokenRanges] = (), start: float = 0.0,
) -> Gradients:  # fmt: skip
    """Gradients over one step per element of `keys` (default: one step over all keys), accumulated onto `start`."""
    wide = accumulate_dtype(x.q.dtype)
    sums = compute_delta(x.grad_out, out, None) if sums is None else sums
    found = Gradients(*(torch.full(t.shape, start, dtype=wide) for t in (x.q, x.k, x.v, x.q[0, 0, :, 0])))
    queries, all_keys = everything(mask)
    for tokens in keys or [all_keys]:
        step, indices = make_step(mask, queries, tokens), torch.from_numpy(tokens.indices)
        if step.is_empty:
            continue
        rows, seen = slice(step.q_start, step.q_stop), slice(step.k_start, step.k_stop)
        k, v = (t[:, indices] if keys else t for t in (x.k, x.v))
        dk, dv = (t[:, indices] for t in (found.dk, found.dv))
        saved = BackwardTensors(x.q, k, v, out.to(x.q.dtype), lse.to(wide), x.grad_out, sums.to(wide))
        slopes = found.d_slopes if scores.alibi_slopes is not None else None
        kernel.backward(
            step, scores, saved.select(rows, seen), GradientSums(found.dq, dk, dv, slopes).select(rows, seen)
        )
        found.dk[:, indices], found.dv[:, indices] = dk, dv
    return found
