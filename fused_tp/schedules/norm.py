"""The tail that follows a row-parallel matmul in a transformer: add to the residual, then RMS norm."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_tp.transport.base import accumulate_dtype


def add_rms_norm(total: Tensor, residual: Tensor, norm_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed, new_residual) for new_residual = residual + total, normed = new_residual / rms(new_residual) * weight.

    The norm is taken of the rounded new_residual, because that is what backward has and what the next layer sees. It is
    computed in float32 (float64 for float64) and rounded once.
    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    new_residual = residual + total
    h = new_residual.to(accumulate_dtype(new_residual.dtype))
    scale = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return (h * scale * norm_weight).to(new_residual.dtype), new_residual


def rms_norm_backward(d_normed: Tensor, new_residual: Tensor, norm_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """d(new_residual), d(norm_weight) of normed = h * rsqrt(mean(h^2) + eps) * weight, in float32 or float64."""
    dtype = accumulate_dtype(new_residual.dtype)
    h, d = new_residual.to(dtype), d_normed.to(dtype)
    scale = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    h_hat = h * scale
    d_hat = d * norm_weight.to(dtype)
    d_h = scale * (d_hat - h_hat * (d_hat * h_hat).mean(-1, keepdim=True))
    d_weight = (d * h_hat).flatten(0, -2).sum(0)
    return d_h, d_weight
