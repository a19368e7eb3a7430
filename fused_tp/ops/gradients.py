"""The two local gradients of y = x @ w^T + b that every matmul op needs."""

from __future__ import annotations

from torch import Tensor

from fused_tp.schedules.gemm import linear
from fused_tp.schedules.layout import as_rows


def weight_grad(d_output: Tensor, x: Tensor) -> Tensor:
    """dW [N, K] = dY^T @ X, over all leading dims."""
    return linear(as_rows(d_output).t(), as_rows(x).t())


def bias_grad(d_output: Tensor) -> Tensor:
    """db [N]: the sum of dY over all leading dims."""
    return as_rows(d_output).sum(0)
