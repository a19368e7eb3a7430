"""Ring attention: how much of W times the speed W ranks give on one long causal sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .case import DTYPES, OURS, Case, Contestant, Maker, Rival, assert_close
from .ranks import RankContext
from .ratios import EFFICIENCY

SEQ, HEADS, HEAD_DIM = 8192, 8, 64
WHOLE = "whole on one rank"
# The cores of a machine share caches, memory and clock. With all at work on a whole sequence each, a core gets no more
# of them than under the ring.
WHOLE_ON_ALL = "whole on every rank"


def cases() -> list[Case]:
    """All of this file."""
    rivals = {WHOLE: Rival(EFFICIENCY, bar=0.93, aim=0.98), WHOLE_ON_ALL: Rival(EFFICIENCY)}
    return [
        Case(
            f"ring_attention/{dtype}/{'forward+backward' if backward else 'forward'}",
            ring_attention,
            {"dtype": dtype, "backward": backward},
            rivals,
            seconds=45.0 if backward else 20.0,
        )
        for dtype in DTYPES
        for backward in (False, True)
    ]


def ring_attention(context: RankContext, dtype: str, backward: bool, seq: int = SEQ) -> dict[str, Maker]:
    """Causal, zigzag, [1, seq, heads, head_dim] before sharding."""
    random = torch.Generator().manual_seed(0)
    q, k, v, d_out = (torch.randn(1, seq, HEADS, HEAD_DIM, generator=random).to(DTYPES[dtype]) for _ in range(4))
    whole = _runner(_attention, q, k, v, d_out, backward)

    def ours() -> Contestant:
        from fused_tp import ring_attention, shard_sequence

        def cut(tensor: Tensor) -> Tensor:
            return shard_sequence(tensor, 1, group=None)

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = ring_attention(q, k, v, group=None, causal=True)
            return out

        run = _runner(attention, cut(q), cut(k), cut(v), cut(d_out), backward)

        def check() -> None:
            for actual, expected in zip(run(), whole(), strict=True):
                assert_close(actual, cut(expected))

        return Contestant(run, check)

    def on_one() -> Contestant:
        return Contestant(whole if context.rank == 0 else lambda: None)

    return {OURS: ours, WHOLE: on_one, WHOLE_ON_ALL: lambda: Contestant(whole)}


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
    return out.transpose(1, 2)


def _runner(
    attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, backward: bool
) -> Callable[[], Any]:
    """A function that gives [out], or [out, dq, dk, dv] with `backward`."""

    def forward() -> list[Tensor]:
        with torch.no_grad():
            return [attention(q, k, v)]

    def forward_and_backward() -> list[Tensor]:
        inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        out = attention(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, d_out)]

    return forward_and_backward if backward else forward
