"""Attention over a rank's heads: torch's scaled_dot_product_attention, masks made right, dropout by position.

Layout [batch, seq, heads, head_dim]. Queries stand at the end of the keys, as they do with a KV cache.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    first_head: int = 0,
) -> Tensor:
    """Attention of q [batch, q_len, heads, head_dim] to k, v [batch, kv_len, kv_heads, head_dim] -> like q.

    `mask` broadcasts to [batch, heads, q_len, kv_len]: bool (True: may attend) or added to the scores. A query with
    nothing to attend to gives 0. `first_head` is the number of this rank's first head among all heads.
    """
    q_len, kv_len = q.shape[1], k.shape[1]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if causal and mask is None and q_len == 1:
        causal = False  # the newest token sees all
    if causal and (mask is not None or q_len != kv_len):
        # SDPA's is_causal aligns queries with the first keys and takes no mask beside it.
        mask, causal = _causal_mask(mask, q_len, kv_len, q.device), False
    if dropout_p > 0:
        if causal:
            mask = _causal_mask(None, q_len, kv_len, q.device)
        out = _with_dropout(q, k, v, mask, scale, dropout_p, first_head)
    else:
        gqa = q.shape[1] != k.shape[1]
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(q.dtype)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=gqa)
    return out.transpose(1, 2)


def _causal_mask(mask: Tensor | None, q_len: int, kv_len: int, device: torch.device) -> Tensor:
    causal = torch.ones(q_len, kv_len, dtype=torch.bool, device=device).tril(kv_len - q_len)
    if mask is None:
        return causal
    return mask & causal if mask.dtype == torch.bool else mask.masked_fill(~causal, -torch.inf)


def _with_dropout(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, dropout_p: float, first_head: int
) -> Tensor:
    """softmax, then dropout, then times v, one after the other: SDPA's own dropout would draw by place in this rank's
    memory, and what is dropped would then depend on the number of ranks and be alike on all of them."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    compute = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(compute) @ k.to(compute).transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    highest = scores.amax(-1, keepdim=True)
    # A row of -inf alone would be NaN in softmax, and NaN survives a multiplication by 0 in the backward.
    weights = torch.exp(scores - torch.where(torch.isinf(highest), 0.0, highest).detach())
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(compute).tiny)
    kept = _keep(weights.shape, dropout_p, first_head, q.device)
    return ((weights * kept / (1 - dropout_p)) @ v.to(compute)).to(q.dtype)


def _keep(shape: torch.Size, dropout_p: float, first_head: int, device: torch.device) -> Tensor:
    """Which weights [batch, heads, q_len, kv_len] dropout keeps: a hash of a seed and of their global place.

    The seed is drawn from the device's generator, so torch.manual_seed and the RNG bookkeeping of activation
    checkpointing govern it. The hash is the 32-bit finalizer of MurmurHash3 (public domain), once per dimension.
    """
    batch, heads, q_len, kv_len = (torch.arange(n, device=device, dtype=torch.int64) for n in shape)
    bits = _mix(batch[:, None] + torch.randint(2**31, (1, 1), device=device))
    bits = _mix(bits * 0x9E3779B1 + heads + first_head)
    bits = _mix(bits[..., None] * 0x9E3779B1 + q_len)
    bits = _mix(bits[..., None] * 0x9E3779B1 + kv_len)
    return bits >= int(dropout_p * 2**32)


def _mix(h: Tensor) -> Tensor:
    low = 0xFFFFFFFF  # int64 products wrap, but their low 32 bits are those of the uint32 product
    h = h & low
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & low
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & low
    return h ^ (h >> 16)
