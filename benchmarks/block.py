"""The Llama block that the block cases race: norms, rotary attention and gated MLP over anybody's linear layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EPS = 1e-5
ROTARY_BASE = 10000.0


@dataclass(frozen=True)
class BlockSize:
    """Sizes of the whole block, before sharding."""

    hidden: int
    intermediate: int
    heads: int
    seq: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class Layers(Protocol):
    """The parts of the block that know about parallelism: x is [seq_local, 1, hidden], inside it is [seq, 1, local]."""

    parameters: list[nn.Parameter]

    def norm_weight(self, index: int) -> Tensor:
        """Weight of norm 0 (before attention) or 1 (before the MLP)."""
        ...

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...

    def attention_out(self, x: Tensor) -> Tensor: ...

    def gate_up(self, x: Tensor) -> tuple[Tensor, Tensor]: ...

    def down(self, x: Tensor) -> Tensor: ...

    def finish_grads(self) -> None:
        """What is left to do for the gradients after backward()."""
        ...

    def norm_grad(self) -> Tensor:
        """The complete gradient of norm_weight(0)."""
        ...


def full_weights(size: BlockSize, dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights of the block, whole and the same on every rank; [out, in] as in nn.Linear."""
    random = torch.Generator().manual_seed(0)

    def weight(out_features: int, in_features: int) -> Tensor:
        drawn = torch.randn(out_features, in_features, generator=random)
        return (drawn / math.sqrt(in_features)).to(dtype)

    hidden, inner = size.hidden, size.intermediate
    weights = {name: weight(hidden, hidden) for name in ("q", "k", "v", "o")}
    weights |= {"gate": weight(inner, hidden), "up": weight(inner, hidden), "down": weight(hidden, inner)}
    return weights | {"norm0": torch.ones(hidden, dtype=dtype), "norm1": torch.ones(hidden, dtype=dtype)}


class Block:
    """One pre-norm transformer block as in Llama, without dropout and biases."""

    def __init__(self, size: BlockSize, layers: Layers) -> None:
        self.size = size
        self.layers = layers
        dtype = layers.parameters[0].dtype
        inverse = ROTARY_BASE ** (-torch.arange(0, size.head_dim, 2) / size.head_dim)
        angles = torch.outer(torch.arange(size.seq).float(), inverse).repeat(1, 2)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.layers.attention_out(self._attention(*self.layers.qkv(self._norm(0, x))))
        gate, up = self.layers.gate_up(self._norm(1, x))
        return x + self.layers.down(F.silu(gate) * up)

    def step(self, x: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Forward and backward; gives the output, dx and the gradient of the first norm's weight."""
        for parameter in self.layers.parameters:
            parameter.grad = None
        x = x.detach().requires_grad_()
        out = self.forward(x)
        out.backward(d_out)
        self.layers.finish_grads()
        assert x.grad is not None
        return out.detach(), x.grad, self.layers.norm_grad()

    def _norm(self, index: int, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.size.hidden,), self.layers.norm_weight(index), EPS)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.view(t.shape[0], -1, self.size.head_dim).transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        out = F.scaled_dot_product_attention(self._rotate(q), self._rotate(k), v, is_causal=True)
        return out.squeeze(0).transpose(0, 1).reshape(out.shape[2], 1, -1)

    def _rotate(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-second, first), dim=-1) * self.sin


class PlainLayers:
    """The whole block on one rank: what every contestant must agree with."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self._weights = {name: nn.Parameter(weight.clone()) for name, weight in weights.items()}
        self.parameters = list(self._weights.values())

    def norm_weight(self, index: int) -> Tensor:
        return self._weights[f"norm{index}"]

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._linear("q", x), self._linear("k", x), self._linear("v", x)

    def attention_out(self, x: Tensor) -> Tensor:
        return self._linear("o", x)

    def gate_up(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._linear("gate", x), self._linear("up", x)

    def down(self, x: Tensor) -> Tensor:
        return self._linear("down", x)

    def finish_grads(self) -> None:
        pass  # nothing is cut, so nothing is left to add up

    def norm_grad(self) -> Tensor:
        grad = self._weights["norm0"].grad
        assert grad is not None
        return grad

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._weights[name])
