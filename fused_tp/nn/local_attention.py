"""Attention over a rank's heads: by torch's scaled_dot_product_attention (SDPA), or with features that SDPA lacks.

Tensors are [batch, seq, heads, head_dim]. The last query is aligned with the last key, as with a KV cache.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_tp.attention.spec import Dropout


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attend from q [batch, q_len, heads, head_dim] to k and v [batch, kv_len, kv_heads, head_dim]. Returns q's shape.

    `mask` broadcasts to [batch, heads, q_len, kv_len]: bool (True: may attend) or added to the scores. The output of a
    query that may attend to no key is 0.
    """
    q_len, kv_len = q.shape[1], k.shape[1]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if causal and mask is None and q_len == 1:
        causal = False  # the newest token sees all keys
    if causal and (mask is not None or q_len != kv_len):
        # SDPA's is_causal aligns the first query with the first key, and excludes attn_mask.
        mask, causal = _causal_mask(mask, q_len, kv_len, q.device), False
    is_grouped_query = q.shape[1] != k.shape[1]
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=is_grouped_query
    )
    return out.transpose(1, 2)


def _causal_mask(mask: Tensor | None, q_len: int, kv_len: int, device: torch.device) -> Tensor:
    causal = torch.ones(q_len, kv_len, dtype=torch.bool, device=device).tril(kv_len - q_len)
    if mask is None:
        return causal
    return mask & causal if mask.dtype == torch.bool else mask.masked_fill(~causal, -torch.inf)


def attention_with_mask(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    *,
    causal: bool,
    scale: float | None,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    first_head: int = 0,
) -> Tensor:
    """Attend like `local_attention`, with a mask of any form and all other features of `ring_attention`.

    All scores are materialized, in float32 (in float64 for float64 inputs). Dropout drops the same elements as in
    `ring_attention`.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    num_heads = q.shape[2]
    queries, keys, values = (
        x.transpose(1, 2).to(dtype).repeat_interleave(num_heads // x.shape[2], dim=1) for x in (q, k, v)
    )
    scores = (queries @ keys.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    key_offsets = torch.arange(k.shape[1], device=q.device) - torch.arange(q.shape[1], device=q.device)[:, None]
    key_offsets = key_offsets - (k.shape[1] - q.shape[1])
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.to(dtype)[:, None, None] * key_offsets.abs()
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    window_left, window_right = window or (-1, -1)
    window_right = 0 if causal else window_right
    if window_right >= 0:
        scores = scores.masked_fill(key_offsets > window_right, -torch.inf)
    if window_left >= 0:
        scores = scores.masked_fill(-key_offsets > window_left, -torch.inf)
    if sinks is not None:
        sink_scores = sinks.to(dtype)[None, :, None, None].expand(q.shape[0], -1, q.shape[1], 1)
        scores = torch.cat([scores, sink_scores], -1)
    max_score = scores.amax(-1, keepdim=True)
    # Not torch.softmax: a row in which all scores are -inf would be NaN, also in its gradient.
    weights = torch.exp(scores - torch.where(torch.isinf(max_score), 0.0, max_score).detach())
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(dtype).tiny)
    weights = weights[..., : k.shape[1]]
    if dropout_p > 0:
        # The seed stays a tensor, which torch.compile can trace. Arithmetic on it works as on an int.
        seed = torch.randint(2**63 - 1, (), device="cpu")
        dropout = Dropout(dropout_p, cast(int, seed), first_head)
        indices = (torch.arange(n, device=q.device) for n in (q.shape[1], k.shape[1]))
        weights = weights * dropout.keep_mask(q.shape[0], num_heads, *indices) / (1 - dropout_p)
    return (weights @ values).to(q.dtype).transpose(1, 2)
