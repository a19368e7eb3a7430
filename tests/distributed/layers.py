"""Compare a layer over a mesh with its unsharded original: outputs, gradients of inputs and of parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fused_tp.core.partition import shard_range
from fused_tp.nn import RotaryEmbedding
from tests.attention_reference import dense_attention, dense_mask
from tests.reference import seeded

# In fp64 only the order of summation differs.
EXACT = {"rtol": 1e-10, "atol": 1e-10}
HEADS, HEAD_DIM, HIDDEN = 12, 4, 10


class Attention(nn.Module):
    """Reference for ParallelAttention by `dense_attention`, with the names of Llama's attention."""

    def __init__(self, kv_heads: int, bias: bool, norms: bool, rope: RotaryEmbedding | None, causal: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias, dtype=torch.float64)
        self.k_proj = nn.Linear(HIDDEN, kv_heads * HEAD_DIM, bias, dtype=torch.float64)
        self.v_proj = nn.Linear(HIDDEN, kv_heads * HEAD_DIM, bias, dtype=torch.float64)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias, dtype=torch.float64)
        if norms:
            self.q_norm = nn.RMSNorm(HEAD_DIM, 1e-6, dtype=torch.float64)
            self.k_norm = nn.RMSNorm(HEAD_DIM, 1e-6, dtype=torch.float64)
            with torch.no_grad():
                self.q_norm.weight.copy_(seeded(HEAD_DIM, dtype=torch.float64, seed=8))
                self.k_norm.weight.copy_(seeded(HEAD_DIM, dtype=torch.float64, seed=9))
        self.head_dim, self.rope, self.is_causal, self.norms = HEAD_DIM, rope, causal, norms
        self.sliding_window: int | None = None
        self.attn_logit_softcapping: float | None = None
        self.sinks: nn.Parameter | None = None
        self.slopes: Tensor | None = None
        self.documents: list[int] = []

    def with_everything(self) -> Attention:
        """Add a window, a cap and sinks, under their names in transformers, and ALiBi, which has none there."""
        self.sliding_window, self.attn_logit_softcapping = 4, 2.0
        self.sinks = nn.Parameter(seeded(HEADS, dtype=torch.float64, seed=5))
        self.slopes = 0.1 / torch.arange(1, HEADS + 1)
        return self

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Run attention; `mask` is additive or bool, [batch, heads, seq, seq] or broadcastable."""
        q, k, v = (proj(x).unflatten(-1, (-1, HEAD_DIM)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.norms:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            places = [torch.arange(b - a) for a, b in itertools.pairwise([0, *self.documents[1:-1], x.shape[1]])]
            q, k = self.rope(q, k, torch.cat(places))
        window = None if self.sliding_window is None else (self.sliding_window - 1,) * 2
        documents = self.documents or None
        seen, distance = dense_mask(x.shape[1], x.shape[1], causal=self.is_causal, window=window, cu_seqlens=documents)
        if mask is not None and mask.dtype == torch.bool:
            seen, mask = seen & mask, None
        given: dict[str, Any] = {"bias": mask, "alibi_slopes": self.slopes, "sinks": self.sinks}
        out, _ = dense_attention(q, k, v, seen, distance, softcap=self.attn_logit_softcapping or 0.0, **given)
        return self.o_proj(out.flatten(-2))


class Gated(nn.Module):
    """Gated MLP with the names of Llama's."""

    def __init__(
        self, act: Callable[[Tensor], Tensor] = F.silu, bias: bool = False, hidden: int = 6, intermediate: int = 13
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias)
        self.up_proj = nn.Linear(hidden, intermediate, bias)
        self.down_proj = nn.Linear(intermediate, hidden, bias)
        self.act_fn = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def part(t: Tensor, dim: int | None, group: dist.ProcessGroup) -> Tensor:
    """Shard of `t` on this rank; all of `t` if `dim` is None."""
    if dim is None:
        return t
    start, stop = shard_range(t.shape[dim], group.size(), group.rank())
    return t.narrow(dim, start, stop - start).contiguous()


def assert_same(
    group: dist.ProcessGroup,
    full: nn.Module,
    sharded: nn.Module,
    shape: Sequence[int] | Tensor,
    *,
    cut: int | None = None,
    out_cut: int | None = None,
    full_given: Sequence[Any] = (),
    **given: Any,
) -> None:
    """Assert that `sharded` computes this rank's shard of the result of `full`, from x of `shape` or from these ids.

    Parameters must be equal bit for bit, all else up to rounding. The input is sharded along `cut`, the output along
    `out_cut`.
    """
    full.zero_grad()
    sharded.zero_grad()
    ids = isinstance(shape, Tensor)
    x_full = shape if ids else seeded(*shape, dtype=torch.float64, seed=1).requires_grad_()
    x = x_full if ids else part(x_full.detach(), cut, group).clone().requires_grad_()
    y_full, y = full(x_full, *full_given), sharded(x, **given)
    grad = seeded(*y_full.shape, dtype=torch.float64, seed=2)
    y_full.backward(grad)
    y.backward(part(grad, out_cut, group))
    torch.testing.assert_close(y, part(y_full, out_cut, group), **EXACT)
    if not ids:
        torch.testing.assert_close(x.grad, part(x_full.grad, cut, group), **EXACT)
    assert_same_parameters(sharded, full)


def assert_same_parameters(sharded: nn.Module, full: nn.Module) -> None:
    """Assert equal values and gradients under the same names, as DTensors of equal placements."""
    theirs = dict(full.named_parameters())
    assert {name for name, _ in sharded.named_parameters()} == set(theirs)
    for name, mine in sharded.named_parameters():
        wanted = theirs[name].grad
        assert isinstance(mine, DTensor) and torch.equal(mine.full_tensor(), theirs[name]), name
        assert (mine.grad is None) == (wanted is None), name
        if wanted is not None:
            assert isinstance(mine.grad, DTensor) and mine.grad.placements == mine.placements, name
            found = mine.grad.full_tensor()
            torch.testing.assert_close(found, wanted, msg=lambda m, name=name: f"{name}: {m}", **EXACT)
