"""Rotary position embedding (Su et al., https://arxiv.org/abs/2104.09864), as a hook of ParallelAttention."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_tp.nn.linear import check_positive


class RotaryEmbedding:
    """Turns q and k by their positions, in fp32: feature i is paired with i + head_dim / 2, as in Llama.

    Called as rope(q [batch, seq, heads, head_dim], k, positions [seq] or [batch, seq]) -> (q, k) of the same dtypes.

    Args:
        head_dim: an even number.
        theta: the base of the frequencies theta ** (-2 i / head_dim), in radians per token.

    Raises:
        ValueError: an odd head_dim or a theta that is not positive.

    Example:
        >>> attention = ParallelAttention(512, 8, rope=RotaryEmbedding(64), causal=True, mesh=mesh)
    """

    def __init__(self, head_dim: int, theta: float = 10_000.0) -> None:
        check_positive("head_dim", head_dim)
        if head_dim % 2:
            raise ValueError(f"head_dim must be even, features are turned in pairs; got {head_dim}.")
        if not theta > 0:
            raise ValueError(f"theta must be positive, got {theta}.")
        self.head_dim = head_dim
        self.theta = theta

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        halves = torch.arange(0, self.head_dim, 2, device=q.device, dtype=torch.float32) / self.head_dim
        angles = positions.to(torch.float32).unsqueeze(-1) * self.theta**-halves
        # [seq, head_dim / 2] -> a dim for the heads; angles of all heads are the same.
        cos, sin = angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)
        return _turn(q, cos, sin), _turn(k, cos, sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
