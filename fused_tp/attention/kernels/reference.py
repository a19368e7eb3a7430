"""Reference kernel in plain torch, for every device, dtype and score. It computes blocks of queries and keys.

All computation is in fp32 (fp64 for fp64), preferring accuracy to speed. A masked key with finite values does not
affect the result; a NaN or an infinity in a key or value reaches all queries of its block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from fused_tp.attention.kernels.base import AttentionKernel, StepRows, Sums
from fused_tp.attention.ring_plan import Step
from fused_tp.attention.softmax import SoftmaxState
from fused_tp.attention.spec import Scores

# Maximum number of scores per block (but at least 16 rows): 16 MB in fp32. A block needs a few tensors of this size;
# with dropout about 16.
_MOST_SCORES = 1 << 22
_KEYS = 1024  # maximum number of keys per block


class Shape(Enum):
    """Unmasked part of a tile.

    FULL: all keys. LOWER: for row i the keys up to i. UPPER: for row i the keys from i on. MASKED: any other mask.
    """

    FULL = "full"
    LOWER = "lower"
    UPPER = "upper"
    MASKED = "masked"


@dataclass(frozen=True)
class ReferenceTile:
    """Queries [q_start, q_stop) against keys [k_start, k_stop) of a step."""

    shape: Shape
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int

    @property
    def rows(self) -> slice:
        return slice(self.q_start, self.q_stop)

    @property
    def keys(self) -> slice:
        return slice(self.k_start, self.k_stop)


def blocks(step: Step, row_limit: int, key_limit: int) -> Iterator[ReferenceTile]:
    """Yield FULL or MASKED tiles of at most `row_limit` rows and `key_limit` keys that cover all seen keys of `step`.

    Tiles in which no query sees a key are skipped.
    """
    for q_start in range(0, step.rows, row_limit):
        q_stop = min(q_start + row_limit, step.rows)
        starts, stops = step.starts[q_start:q_stop], step.stops[q_start:q_stop]
        for k_start in range(int(starts[0]), int(stops[-1]), key_limit):
            k_stop = min(k_start + key_limit, int(stops[-1]))
            if ((starts < k_stop) & (stops > k_start) & (stops > starts)).any():
                masked = bool((starts > k_start).any() or (stops < k_stop).any())
                yield ReferenceTile(Shape.MASKED if masked else Shape.FULL, q_start, q_stop, k_start, k_stop)


@dataclass(frozen=True)
class _Probabilities:
    """Tensors [B, Hkv, G, rows, keys] of one block.

    Attributes:
        scores: the scores; -inf where a query does not see the key.
        kept: dropout factor of each probability, 0 or 1 / (1 - p); None without dropout.
        d_cap: derivative of the softcap; None without softcap.
        distance: [rows, keys], distance of query and key for ALiBi; None without ALiBi.
    """

    scores: Tensor
    kept: Tensor | None
    d_cap: Tensor | None
    distance: Tensor | None


class Reference(AttentionKernel):
    """Attention in plain torch operations. Supports every call."""

    name = "torch-blocks"
    reason = "plain torch supports every device, dtype and score"

    def forward(
        self, step: Step, scores: Scores, q: Tensor, k: Tensor, v: Tensor, state: SoftmaxState, *, fresh: bool = False
    ) -> None:
        if fresh:
            state.clear()
        for block in self._blocks(step, q):
            rows = state.rows(block.q_start, block.q_stop)
            highest, total = (_by_kv_head(x, k) for x in (rows.highest, rows.total))
            of_block = _probabilities(step, scores, block, q, k, state.weighted.dtype)
            now = torch.maximum(highest, of_block.scores.amax(-1))
            base = now.masked_fill(now == -torch.inf, 0.0)  # exp(-inf - -inf) would be NaN
            before, p = torch.exp(highest - base), torch.exp(of_block.scores - base.unsqueeze(-1))
            total.mul_(before).add_(p.sum(-1))
            highest.copy_(now)
            weighted = (p if of_block.kept is None else p * of_block.kept) @ _keys_first(v[:, block.keys], p.dtype)
            rows.weighted.mul_(_heads_last(before.unsqueeze(-1))).add_(_heads_last(weighted))

    def backward(self, step: Step, scores: Scores, saved: StepRows, sums: Sums) -> None:
        q, k, v, _, lse, grad_out, row_sums = saved
        dq, dk, dv, d_slopes = sums
        for block in self._blocks(step, q):
            rows, keys = block.rows, block.keys
            of_block = _probabilities(step, scores, block, q, k, dq.dtype)
            seen = lse[..., rows].masked_fill(lse[..., rows] == -torch.inf, 0.0)
            p = torch.exp(of_block.scores - _by_kv_head(seen, k).unsqueeze(-1))
            left = p if of_block.kept is None else p * of_block.kept
            g, q_block = _rows_first(grad_out[:, rows], k, p.dtype), _rows_first(q[:, rows], k, p.dtype)
            d_scores = left * (g @ _keys_first(v[:, keys], p.dtype).mT)
            d_scores -= p * _by_kv_head(row_sums[..., rows], k).unsqueeze(-1)
            if d_slopes is not None and of_block.distance is not None:
                d_slopes -= (d_scores * of_block.distance).sum((0, 3, 4)).flatten()
            if of_block.d_cap is not None:
                d_scores = d_scores * of_block.d_cap
            d_scores = d_scores * scores.scale
            dq[:, rows] += _heads_last(d_scores @ _keys_first(k[:, keys], p.dtype))
            dk[:, keys] += (d_scores.mT @ q_block).sum(2).transpose(1, 2)
            dv[:, keys] += (left.mT @ g).sum(2).transpose(1, 2)

    def _blocks(self, step: Step, q: Tensor) -> Iterator[ReferenceTile]:
        keys = min(_KEYS, step.keys)
        return blocks(step, max(16, _MOST_SCORES // (q.shape[0] * q.shape[2] * keys)), keys)


def _probabilities(
    step: Step, how: Scores, block: ReferenceTile, q: Tensor, k: Tensor, dtype: torch.dtype
) -> _Probabilities:
    on = step.on(q.device)
    scores = _rows_first(q[:, block.rows], k, dtype) @ _keys_first(k[:, block.keys], dtype).mT
    scores *= how.scale
    d_cap = distance = factor = None
    if how.softcap:
        tanh = torch.tanh(scores / how.softcap)
        scores, d_cap = how.softcap * tanh, 1 - tanh * tanh
    if how.alibi_slopes is not None:
        distance = (on["places"][block.rows, None] - on["k_indices"][block.keys]).abs().to(dtype)
        scores = scores - how.alibi_slopes.to(dtype).unflatten(0, (k.shape[2], -1))[:, :, None, None] * distance
    if block.shape is Shape.MASKED:
        columns = torch.arange(block.k_start, block.k_stop, device=q.device)
        starts, stops = on["starts"][block.rows, None], on["stops"][block.rows, None]
        scores = scores.masked_fill((columns < starts) | (columns >= stops), -torch.inf)
    if how.dropout is not None:
        where = on["q_indices"][block.rows], on["k_indices"][block.keys]
        keep = how.dropout.kept(q.shape[0], q.shape[2], *where)
        factor = _by_kv_head(keep, k).to(dtype) / (1 - how.dropout.p)
    return _Probabilities(scores, factor, d_cap, distance)


def _rows_first(x: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert [B, rows, H, D] to [B, Hkv, G, rows, D]."""
    return _by_kv_head(x.transpose(1, 2).to(dtype), k)


def _keys_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert [B, keys, Hkv, D] to [B, Hkv, 1, keys, D]."""
    return x.transpose(1, 2).unsqueeze(2).to(dtype)


def _by_kv_head(x: Tensor, k: Tensor) -> Tensor:
    """View [B, H, ...] as [B, Hkv, G, ...]."""
    return x.unflatten(1, (k.shape[2], -1))


def _heads_last(x: Tensor) -> Tensor:
    """Convert [B, Hkv, G, rows, D] to [B, rows, H, D]."""
    return x.flatten(1, 2).transpose(1, 2)


REFERENCE = Reference()
