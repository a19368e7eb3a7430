"""What users' type checkers see of ops that return several kinds of things: mypy reads this file, and it runs too.

`assert_type` is for mypy (`make lint`) and does nothing here, so what comes back is also looked at.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import assert_type

import fused_tp
from fused_tp.nn import ContextKVCache
from fused_tp.ops.attention_arguments import AttentionKeywords, ScoreKeywords

X, W, B = torch.ones(4, 3), torch.ones(2, 3), torch.ones(2)


def is_list(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(t, Tensor) for t in value)


def test_all_gather_matmul() -> None:
    one = assert_type(fused_tp.all_gather_matmul(X, W, B, group=None), Tensor)
    assert isinstance(one, Tensor)
    several = assert_type(fused_tp.all_gather_matmul(X, [W, W], [B, None], group=None, gather_dim=0), list[Tensor])
    assert is_list(several)
    y, x = assert_type(fused_tp.all_gather_matmul(X, W, group=None, return_gathered=True), tuple[Tensor, Tensor])
    assert isinstance(y, Tensor) and isinstance(x, Tensor)
    ys, x = assert_type(
        fused_tp.all_gather_matmul(X, (W, W), group=None, return_gathered=True), tuple[list[Tensor], Tensor]
    )
    assert is_list(ys) and isinstance(x, Tensor)


def test_column_parallel_matmul() -> None:
    assert isinstance(assert_type(fused_tp.column_parallel_matmul(X, W, B, group=None), Tensor), Tensor)
    assert is_list(assert_type(fused_tp.column_parallel_matmul(X, [W, W], group=None), list[Tensor]))


def test_ring_attention() -> None:
    q = torch.ones(1, 4, 2, 8)
    assert isinstance(assert_type(fused_tp.ring_attention(q, q, q, group=None, causal=True), Tensor), Tensor)
    out, lse = assert_type(fused_tp.ring_attention(q, q, q, group=None, return_lse=True), tuple[Tensor, Tensor])
    assert isinstance(out, Tensor) and isinstance(lse, Tensor)


def test_context_parallel_decode() -> None:
    q, lengths = torch.ones(1, 4, 2, 8), torch.tensor([4])
    one = assert_type(fused_tp.context_parallel_decode(q, q, q, group=None, cache_seqlens=lengths), Tensor)
    assert isinstance(one, Tensor)
    both = fused_tp.context_parallel_decode(q, q, q, group=None, cache_seqlens=lengths, return_lse=True)
    assert_type(both, tuple[Tensor, Tensor])
    assert isinstance(both, tuple)
    cache = ContextKVCache(None)
    cache.append(q, q)
    assert isinstance(assert_type(cache.attend(q, window=(2, 0)), Tensor), Tensor)
    assert isinstance(assert_type(cache.attend(q, return_lse=True), tuple[Tensor, Tensor]), tuple)


def test_ulysses_attention() -> None:
    q = torch.ones(1, 4, 2, 8)
    assert isinstance(assert_type(fused_tp.ulysses_attention(q, q, q, group=None, causal=True), Tensor), Tensor)
    out, lse = assert_type(fused_tp.ulysses_attention(q, q, q, group=None, return_lse=True), tuple[Tensor, Tensor])
    assert isinstance(out, Tensor) and isinstance(lse, Tensor)


@pytest.mark.parametrize(
    ("op", "keywords"),
    [
        (fused_tp.ring_attention, AttentionKeywords),
        (fused_tp.ulysses_attention, AttentionKeywords),
        (fused_tp.context_parallel_attention, AttentionKeywords),
        (fused_tp.context_parallel_decode, ScoreKeywords),
    ],
)
def test_shared_keywords_are_those_of_the_signature(op: Callable[..., object], keywords: type) -> None:
    """Overloads name them by a TypedDict: none of them may be missing there, or be of another type."""
    own = {"group", "mesh", "ulysses_dim", "ring_dim", "return_lse", "cache_seqlens", "page_table", "block"}
    parameters = inspect.signature(op).parameters.values()
    stated = {p.name: p.annotation for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in own}
    assert stated == {name: kind.__forward_arg__ for name, kind in keywords.__annotations__.items()}


def types_of_context_parallel_attention(mesh: DeviceMesh) -> None:
    """Never called: a mesh needs ranks."""
    assert_type(fused_tp.context_parallel_attention(X, X, X, mesh=mesh, ulysses_dim="heads"), Tensor)
    assert_type(fused_tp.context_parallel_attention(X, X, X, mesh=mesh, return_lse=True), tuple[Tensor, Tensor])


def test_the_other_ops() -> None:
    norm = torch.ones(2)
    assert_type(fused_tp.matmul_all_reduce(X, W, group=None), Tensor)
    assert_type(fused_tp.matmul_reduce_scatter(X, W, group=None), Tensor)
    assert_type(fused_tp.all_reduce_rms_norm(X @ W.T, X @ W.T, norm, 1e-5, group=None), tuple[Tensor, Tensor])
    assert_type(fused_tp.matmul_all_reduce_rms_norm(X, W, X @ W.T, norm, 1e-5, group=None), tuple[Tensor, Tensor])
    assert_type(fused_tp.all_gather(X, 0, group=None), Tensor)
    assert_type(fused_tp.all_reduce(X, group=None), Tensor)
    loss = assert_type(fused_tp.vocab_parallel_cross_entropy(X, torch.zeros(4, dtype=torch.long), group=None), Tensor)
    assert isinstance(loss, Tensor)
