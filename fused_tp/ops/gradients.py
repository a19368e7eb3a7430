"""The two local gradients of y = x @ w^T + b that every matmul op needs."""

from __future__ import annotations

from torch import Tensor


def weight_grad(d_output: Tensor, x: Tensor) -> Tensor:
    """dW [N, K] = dY^T @ X, over all leading dims."""
    return d_output.reshape(-1, d_output.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


def bias_grad(d_output: Tensor) -> Tensor:
    """db [N]: the sum of dY over all leading dims."""
    return d_output.reshape(-1, d_output.shape[-1]).sum(0)
