"""Running softmax over the steps of a ring, and per-row terms of its gradient, in fp32 (fp64 for fp64)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fused_tp.core.pending import accumulate_dtype

_BLOCK_ROWS = 1024  # rows per block in `compute_delta`


@dataclass(frozen=True)
class SoftmaxState:
    """Unnormalized attention over the keys so far: out = acc / row_sum, lse = row_max + log(row_sum).

    Only `finalize` rounds. (Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867.)

    Attributes:
        acc: [B, S, H, Dv], sum of exp(score - row_max) * v; with dropout, over the kept elements only.
        row_max: [B, H, S], the highest score or a value near it; -inf for a query that has seen no keys.
        row_sum: [B, H, S], sum of exp(score - row_max), over all elements even with dropout.
    """

    acc: Tensor
    row_max: Tensor
    row_sum: Tensor

    @classmethod
    def empty(cls, q: Tensor, v_head_dim: int) -> SoftmaxState:
        """Return the state of queries `q` [B, S, H, D] that have seen no keys."""
        state = cls.uninitialized(q, v_head_dim)
        state.clear()
        return state

    @classmethod
    def uninitialized(cls, q: Tensor, v_head_dim: int) -> SoftmaxState:
        """Return a state with uninitialized tensors, for queries `q` [B, S, H, D]."""
        dtype, (batch, rows, heads, _) = accumulate_dtype(q.dtype), q.shape
        acc = q.new_empty((batch, rows, heads, v_head_dim), dtype=dtype)
        row_max = q.new_empty((batch, heads, rows), dtype=dtype)
        return cls(acc, row_max, torch.empty_like(row_max))

    def clear(self) -> None:
        """Reset to the state of queries that have seen no keys."""
        self.acc.zero_()
        self.row_max.fill_(-torch.inf)
        self.row_sum.zero_()

    def rows(self, start: int, stop: int) -> SoftmaxState:
        """Return the state of queries [start, stop) as views: writes to it change this state."""
        return SoftmaxState(self.acc[:, start:stop], self.row_max[..., start:stop], self.row_sum[..., start:stop])

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Add the attention over further keys, given by its normalized `out` [B, S, H, Dv] and its `lse` [B, H, S].

        `out` may have any dtype.
        """
        new_max = torch.maximum(self.row_max, lse)
        # exp(-inf - -inf) would be NaN. With base 0, the sums of a row that has seen no keys stay 0.
        base = new_max.masked_fill(new_max == -torch.inf, 0.0)
        old_scale, new_scale = torch.exp(self.row_max - base), torch.exp(lse - base)
        self.acc.mul_(_per_row(old_scale)).addcmul_(out.to(self.acc.dtype), _per_row(new_scale))
        self.row_sum.mul_(old_scale).add_(new_scale)
        self.row_max.copy_(new_max)

    def finalize(self, dtype: torch.dtype, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (out [B, S, H, Dv] in `dtype`, lse [B, H, S]); 0 and -inf for a query that has seen no keys.

        Overwrites `acc`, so the state must not be used afterwards. `sinks` [H] are the scores of one extra key per
        head, with value 0 (Xiao et al., arXiv:2309.17453; gpt-oss, 2025); lse includes them.
        """
        lse = self.row_max + self.row_sum.log()
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None].expand_as(lse))
        factor = torch.exp(self.row_max - lse).masked_fill_(lse == -torch.inf, 0.0)
        return self.acc.mul_(_per_row(factor)).to(dtype), lse


def compute_delta(grad_out: Tensor, out: Tensor, grad_lse: Tensor | None) -> Tensor:
    """Return delta = rowsum(grad_out * out) - grad_lse, [B, H, S].

    The backward of softmax subtracts it from the gradient of each probability.
    """
    batch, length, heads, _ = out.shape
    delta = out.new_empty((batch, heads, length), dtype=accumulate_dtype(out.dtype))
    for start in range(0, length, _BLOCK_ROWS):  # in blocks, to limit the size of the fp32 temporaries
        rows = slice(start, start + _BLOCK_ROWS)
        product = grad_out[:, rows].to(delta.dtype) * out[:, rows]
        torch.sum(product, -1, out=delta[..., rows].transpose(1, 2))
    return delta if grad_lse is None else delta - grad_lse


def compute_sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return the gradient of `sinks`, [H], over this rank's queries.

    `delta` is the result of `compute_delta`. A sink has value 0, so it changes the output only by its share of the
    probability.
    """
    probability = torch.exp(sinks.to(lse.dtype)[:, None] - lse).masked_fill_(lse == -torch.inf, 0.0)
    return -(probability * delta).sum((0, 2)).to(sinks.dtype)


def _per_row(x: Tensor) -> Tensor:
    """View [B, H, S] as [B, S, H, 1], to broadcast against [B, S, H, D]."""
    return x.transpose(1, 2).unsqueeze(-1)
