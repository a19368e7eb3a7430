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

from fused_tp.attention.kernels.base import AttentionKernel, BackwardTensors, GradientSums
from fused_tp.attention.ring_plan import Step
from fused_tp.attention.softmax import SoftmaxState
from fused_tp.attention.spec import ScoreParameters

# Maximum number of scores per block (but at least 16 rows): 16 MB in fp32. A block needs a few tensors of this size;
# with dropout about 16.
_MAX_BLOCK_SCORES = 1 << 22
_MAX_BLOCK_KEYS = 1024  # maximum number of keys per block


class TileMask(Enum):
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

    mask: TileMask
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


def full_or_masked_tiles(step: Step, row_limit: int, key_limit: int) -> Iterator[ReferenceTile]:
    """Yield FULL or MASKED tiles of up to `row_limit` rows and `key_limit` keys that cover all visible keys of `step`.

    Tiles in which no query sees a key are skipped.
    """
    for q_start in range(0, step.num_rows, row_limit):
        q_stop = min(q_start + row_limit, step.num_rows)
        starts, stops = step.starts[q_start:q_stop], step.stops[q_start:q_stop]
        for k_start in range(int(starts[0]), int(stops[-1]), key_limit):
            k_stop = min(k_start + key_limit, int(stops[-1]))
            if ((starts < k_stop) & (stops > k_start) & (stops > starts)).any():
                is_masked = bool((starts > k_start).any() or (stops < k_stop).any())
                yield ReferenceTile(TileMask.MASKED if is_masked else TileMask.FULL, q_start, q_stop, k_start, k_stop)


@dataclass(frozen=True)
class _BlockScores:
    """Tensors [B, Hkv, G, rows, keys] of one block.

    Attributes:
        scores: the scores; -inf where a query does not see the key.
        dropout_factor: dropout factor of each probability, 0 or 1 / (1 - p); None without dropout.
        softcap_derivative: derivative of the softcap; None without softcap.
        distance: [rows, keys], distance of query and key for ALiBi; None without ALiBi.
    """

    scores: Tensor
    dropout_factor: Tensor | None
    softcap_derivative: Tensor | None
    distance: Tensor | None


class ReferenceKernel(AttentionKernel):
    """Attention in plain torch operations. Supports every call."""

    name = "torch-blocks"
    reason = "plain torch supports every device, dtype and score"

    def forward(
        self,
        step: Step,
        score_parameters: ScoreParameters,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: SoftmaxState,
        *,
        is_uninitialized: bool = False,
    ) -> None:
        if is_uninitialized:
            state.clear()
        for tile in self._tiles(step, q):
            rows = state.rows(tile.q_start, tile.q_stop)
            row_max, row_sum = (_split_heads(x, k) for x in (rows.row_max, rows.row_sum))
            block_scores = _compute_block_scores(step, score_parameters, tile, q, k, state.acc.dtype)
            new_max = torch.maximum(row_max, block_scores.scores.amax(-1))
            shift = new_max.masked_fill(new_max == -torch.inf, 0.0)  # exp(-inf - -inf) would be NaN
            old_scale, probabilities = (
                torch.exp(row_max - shift),
                torch.exp(block_scores.scores - shift.unsqueeze(-1)),
            )
            row_sum.mul_(old_scale).add_(probabilities.sum(-1))
            row_max.copy_(new_max)
            weighted_values = (
                probabilities if block_scores.dropout_factor is None else probabilities * block_scores.dropout_factor
            ) @ _keys_by_kv_head(v[:, tile.keys], probabilities.dtype)
            rows.acc.mul_(_merge_heads(old_scale.unsqueeze(-1))).add_(_merge_heads(weighted_values))

    def backward(
        self, step: Step, score_parameters: ScoreParameters, inputs: BackwardTensors, sums: GradientSums
    ) -> None:
        q, k, v, _, lse, grad_out, delta = inputs
        dq, dk, dv, d_slopes = sums
        for tile in self._tiles(step, q):
            rows, keys = tile.rows, tile.keys
            block_scores = _compute_block_scores(step, score_parameters, tile, q, k, dq.dtype)
            finite_lse = lse[..., rows].masked_fill(lse[..., rows] == -torch.inf, 0.0)
            probabilities = torch.exp(block_scores.scores - _split_heads(finite_lse, k).unsqueeze(-1))
            kept_probabilities = (
                probabilities if block_scores.dropout_factor is None else probabilities * block_scores.dropout_factor
            )
            grad_out_block, q_block = (
                _queries_by_kv_head(grad_out[:, rows], k, probabilities.dtype),
                _queries_by_kv_head(q[:, rows], k, probabilities.dtype),
            )
            d_scores = kept_probabilities * (grad_out_block @ _keys_by_kv_head(v[:, keys], probabilities.dtype).mT)
            d_scores -= probabilities * _split_heads(delta[..., rows], k).unsqueeze(-1)
            if d_slopes is not None and block_scores.distance is not None:
                d_slopes -= (d_scores * block_scores.distance).sum((0, 3, 4)).flatten()
            if block_scores.softcap_derivative is not None:
                d_scores = d_scores * block_scores.softcap_derivative
            d_scores = d_scores * score_parameters.scale
            dq[:, rows] += _merge_heads(d_scores @ _keys_by_kv_head(k[:, keys], probabilities.dtype))
            dk[:, keys] += (d_scores.mT @ q_block).sum(2).transpose(1, 2)
            dv[:, keys] += (kept_probabilities.mT @ grad_out_block).sum(2).transpose(1, 2)

    def _tiles(self, step: Step, q: Tensor) -> Iterator[ReferenceTile]:
        max_keys = min(_MAX_BLOCK_KEYS, step.num_keys)
        return full_or_masked_tiles(step, max(16, _MAX_BLOCK_SCORES // (q.shape[0] * q.shape[2] * max_keys)), max_keys)


def _compute_block_scores(
    step: Step, score_parameters: ScoreParameters, tile: ReferenceTile, q: Tensor, k: Tensor, dtype: torch.dtype
) -> _BlockScores:
    index_tensors = step.index_tensors_on(q.device)
    scores = _queries_by_kv_head(q[:, tile.rows], k, dtype) @ _keys_by_kv_head(k[:, tile.keys], dtype).mT
    scores *= score_parameters.scale
    softcap_derivative = distance = dropout_factor = None
    if score_parameters.softcap:
        tanh = torch.tanh(scores / score_parameters.softcap)
        scores, softcap_derivative = score_parameters.softcap * tanh, 1 - tanh * tanh
    if score_parameters.alibi_slopes is not None:
        distance = (
            (index_tensors["q_positions"][tile.rows, None] - index_tensors["k_indices"][tile.keys]).abs().to(dtype)
        )
        scores = (
            scores - score_parameters.alibi_slopes.to(dtype).unflatten(0, (k.shape[2], -1))[:, :, None, None] * distance
        )
    if tile.mask is TileMask.MASKED:
        columns = torch.arange(tile.k_start, tile.k_stop, device=q.device)
        starts, stops = index_tensors["starts"][tile.rows, None], index_tensors["stops"][tile.rows, None]
        scores = scores.masked_fill((columns < starts) | (columns >= stops), -torch.inf)
    if score_parameters.dropout is not None:
        indices = index_tensors["q_indices"][tile.rows], index_tensors["k_indices"][tile.keys]
        keep_mask = score_parameters.dropout.keep_mask(q.shape[0], q.shape[2], *indices)
        dropout_factor = _split_heads(keep_mask, k).to(dtype) / (1 - score_parameters.dropout.p)
    return _BlockScores(scores, dropout_factor, softcap_derivative, distance)


def _queries_by_kv_head(x: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert [B, rows, H, D] to [B, Hkv, G, rows, D]."""
    return _split_heads(x.transpose(1, 2).to(dtype), k)


def _keys_by_kv_head(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert [B, keys, Hkv, D] to [B, Hkv, 1, keys, D]."""
    return x.transpose(1, 2).unsqueeze(2).to(dtype)


def _split_heads(x: Tensor, k: Tensor) -> Tensor:
    """View [B, H, ...] as [B, Hkv, G, ...]."""
    return x.unflatten(1, (k.shape[2], -1))


def _merge_heads(x: Tensor) -> Tensor:
    """Convert [B, Hkv, G, rows, D] to [B, rows, H, D]."""
    return x.flatten(1, 2).transpose(1, 2)


REFERENCE_KERNEL = ReferenceKernel()
