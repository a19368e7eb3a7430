"""RMSNorm of rows on CPUs, with or without adding a residual, in one pass: for engines that only serve.

    sum = x + residual;   y = sum / sqrt(mean(sum^2) + eps) * (weight + weight_offset)

Sums are float32 (float64 for float64). y is the norm of the rounded sum, which the caller keeps as the next residual.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fused_tp.backends.gemm import as_rows
from fused_tp.core.native import DTYPE_NUMBERS
from fused_tp.core.native import core as _core
from fused_tp.core.subclass import reason_not_plain

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def supports_rms_norm(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> bool:
    """Return True if `rms_norm` supports these tensors: plain, dense, of one dtype, on the CPU, without a gradient."""
    tensors = (x, weight) if residual is None else (x, weight, residual)
    return (
        _core is not None
        and x.dtype in _DTYPES
        and x.numel() > 0
        and weight.shape == x.shape[-1:]
        and (residual is None or residual.shape == x.shape)
        and all(t.is_cpu and t.dtype is x.dtype and t.is_contiguous() for t in tensors)
        and all(reason_not_plain(type(t)) is None and not t.is_neg() and t.data_ptr() for t in tensors)
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0) -> Tensor:
    """Return the RMSNorm of the rows of x [..., K] with weight [K]; requires `supports_rms_norm(x, weight)`.

    `weight_offset`: added to the weight in float32; 1 in Gemma.
    """
    y = torch.empty_like(x)
    _run(x, None, weight, y, None, eps, weight_offset)
    return y


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return (RMSNorm of the rows of x + residual, x + residual) for x, residual [..., K] and weight [K].

    Requires `supports_rms_norm(x, weight, residual)`. `weight_offset`: as in `rms_norm`.
    """
    y, total = torch.empty_like(x), torch.empty_like(x)
    _run(x, residual, weight, y, total, eps, weight_offset)
    return y, total


def _run(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    y: Tensor,
    new_residual: Tensor | None,
    eps: float,
    weight_offset: float,
) -> None:
    rows = as_rows(x)
    _core.rms_norm(
        x.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        y.data_ptr(),
        0 if new_residual is None else new_residual.data_ptr(),
        len(rows),
        rows.shape[1],
        eps,
        weight_offset,
        DTYPE_NUMBERS[x.dtype],
        torch.get_num_threads(),
    )
