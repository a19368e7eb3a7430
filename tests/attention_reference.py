"""Attention over a whole sequence on one process in fp64, with every mask and score of `ring_attention`: S x S."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fused_tp.attention.spec import AttentionMask, Dropout


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

    A query stands so that the last of its document is at the last key of it.
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
    """`dense_mask` of an AttentionMask."""
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
    sinks: Tensor | None = None,
    dropout: Dropout | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [B, Sq, H, Dv], lse [B, H, Sq]); differentiable, 0 and -inf for rows that see nothing."""
    group = q.shape[2] // k.shape[2]
    k, v = (t.double().repeat_interleave(group, dim=2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[:, None, None] * distance.abs()
    scores = torch.where(seen, scores, -torch.inf)
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
        p = p * dropout.kept(q.shape[0], q.shape[2], *places) / (1 - dropout.p)
    lse = torch.where(empty, -torch.inf, lse).squeeze(-1)
    return torch.einsum("bhij,bjhd->bihd", p, v), lse
