"""Scaling efficiency of ring attention over W ranks: a long sequence, packed documents, and a window."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fused_tp.core.settings import override_environment

from .case import DTYPES, EFFICIENCY, FUSED_TP, BenchCase, Contestant, Makers, Rival, assert_close
from .ranks import RankContext

HEADS, HEAD_DIM = 8, 64
SEQ, DOCUMENTS_SEQ, WINDOW_SEQ = 8192, 16384, 16384
DOCUMENTS, WINDOW = 32, 1024
TORCH_ON_ONE_RANK = "torch on one rank"
# Cores share caches, memory bandwidth and clock. With a whole sequence on every core, each core gets no more of them
# than in a ring.
TORCH_ON_EVERY_RANK = "torch on every rank"
FUSED_TP_ON_ONE_RANK = "fused_tp on one rank"
FUSED_TP_ON_EVERY_RANK = "fused_tp on every rank"

AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


def cases() -> list[BenchCase]:
    """All cases of this file."""
    causal_rivals = {
        TORCH_ON_ONE_RANK: Rival(EFFICIENCY, bar=0.95, aim=0.98),
        TORCH_ON_EVERY_RANK: Rival(EFFICIENCY),
        FUSED_TP_ON_ONE_RANK: Rival(EFFICIENCY, bar=0.95, aim=0.98),
        FUSED_TP_ON_EVERY_RANK: Rival(EFFICIENCY),
    }
    masked_rivals = {FUSED_TP_ON_ONE_RANK: Rival(EFFICIENCY, bar=0.90, aim=0.95), TORCH_ON_ONE_RANK: Rival(EFFICIENCY)}
    message_rivals = {
        TORCH_ON_ONE_RANK: Rival(EFFICIENCY, bar=0.80, aim=0.95),
        FUSED_TP_ON_ONE_RANK: Rival(EFFICIENCY, bar=0.80, aim=0.95),
    }
    variants: list[tuple[str, dict[str, Any], dict[str, Rival], float]] = [
        ("ring_attention", {"seq": SEQ}, causal_rivals, 20.0),
        ("ring_attention_documents", {"seq": DOCUMENTS_SEQ, "num_documents": DOCUMENTS}, masked_rivals, 15.0),
        ("ring_attention_window", {"seq": WINDOW_SEQ, "window": WINDOW}, masked_rivals, 15.0),
        ("ring_attention_gloo", {"seq": SEQ, "shared_memory": False}, message_rivals, 20.0),
    ]
    return [
        BenchCase(
            f"{name}/{dtype}/{'forward+backward' if is_backward else 'forward'}",
            ring_attention_makers,
            {"dtype": dtype, "is_backward": is_backward, **parameters},
            rivals,
            seconds=2.25 * seconds if is_backward else seconds,
        )
        for name, parameters, rivals, seconds in variants
        for dtype in ("bf16", "fp32")
        for is_backward in (False, True)
    ]


def zipf_lengths(num_documents: int, total: int) -> list[int]:
    """Lengths in proportion to 1 / rank that add up to `total`, in random order."""
    shares = [1 / rank for rank in range(1, num_documents + 1)]
    lengths = [max(1, int(total * share / sum(shares))) for share in shares]
    lengths[0] += total - sum(lengths)
    order = torch.randperm(num_documents, generator=torch.Generator().manual_seed(0)).tolist()
    return [lengths[i] for i in order]


def ring_attention_makers(
    context: RankContext,
    dtype: str,
    is_backward: bool,
    seq: int = SEQ,
    num_documents: int = 0,
    window: int = 0,
    shared_memory: bool = True,
) -> Makers:
    """Makers for causal attention, [1, seq, heads, head_dim] before sharding.

    The layout is zigzag, or balanced for packed documents.
    """
    random = torch.Generator().manual_seed(0)
    q, k, v, d_out = (torch.randn(1, seq, HEADS, HEAD_DIM, generator=random).to(DTYPES[dtype]) for _ in range(4))
    lengths = zipf_lengths(num_documents, seq) if num_documents else [seq]
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    options: dict[str, Any] = {"causal": True}
    if num_documents:
        options |= {"cu_seqlens": torch.tensor(bounds), "layout": "balanced"}
    if window:
        options["window"] = (window - 1, 0)

    def unsharded_step() -> Callable[[], list[Tensor]]:
        from fused_tp.ops.ring_attention import ring_attention_from_head

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return ring_attention_from_head(q, k, v, None, is_unsharded=True, **options)

        return _make_step(attention, q, k, v, d_out, is_backward)

    def fused_tp_contestant() -> Contestant:
        from fused_tp import ring_attention, shard_sequence

        layout_options = {name: options[name] for name in ("layout", "cu_seqlens") if name in options}

        def shard(tensor: Tensor) -> Tensor:
            return shard_sequence(tensor, 1, group=None, **layout_options)

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = ring_attention(q, k, v, group=None, seq_len=seq, **options)
            return out

        run = _make_step(attention, shard(q), shard(k), shard(v), shard(d_out), is_backward)
        run = run if shared_memory else _without_shared_memory(run)

        def check() -> None:
            reference = (
                unsharded_step() if window else _make_step(_make_torch_attention(bounds), q, k, v, d_out, is_backward)
            )
            for actual, expected in zip(run(), reference(), strict=True):
                assert_close(actual, shard(expected))

        return Contestant(run, check)

    def first_rank_contestant(run: Callable[[], Any]) -> Contestant:
        return Contestant(run if context.rank == 0 else lambda: None)

    makers: Makers = {
        FUSED_TP: fused_tp_contestant,
        FUSED_TP_ON_ONE_RANK: lambda: first_rank_contestant(unsharded_step()),
        FUSED_TP_ON_EVERY_RANK: lambda: Contestant(unsharded_step()),
    }
    if not window:  # torch supports a window only by a mask of seq x seq
        torch_step = _make_step(_make_torch_attention(bounds), q, k, v, d_out, is_backward)
        makers |= {
            TORCH_ON_ONE_RANK: lambda: first_rank_contestant(torch_step),
            TORCH_ON_EVERY_RANK: lambda: Contestant(torch_step),
        }
    return makers


def _make_torch_attention(bounds: list[int]) -> AttentionFunction:
    """Return torch's attention, computed document by document, which is fastest on CPUs."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = []
        for start, stop in pairwise(bounds):
            queries, keys, values = (t[:, start:stop].transpose(1, 2) for t in (q, k, v))
            outs.append(F.scaled_dot_product_attention(queries, keys, values, is_causal=True))
        return (outs[0] if len(outs) == 1 else torch.cat(outs, 2)).transpose(1, 2)

    return attention


def _without_shared_memory(run: Callable[[], Any]) -> Callable[[], Any]:
    def run_with_messages() -> Any:
        with override_environment({"FUSED_TP_SHM": "0"}):
            return run()

    return run_with_messages


def _make_step(
    attention: AttentionFunction, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, is_backward: bool
) -> Callable[[], list[Tensor]]:
    """Return a function that computes [out], or [out, dq, dk, dv] with `is_backward`."""

    def forward() -> list[Tensor]:
        with torch.no_grad():
            return [attention(q, k, v)]

    def forward_and_backward() -> list[Tensor]:
        inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        out = attention(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, d_out)]

    return forward_and_backward if is_backward else forward
