"""Types that users' type checkers infer for ops with several return types: mypy checks this file (`make lint`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import assert_type

import fused_tp
from fused_tp.nn import ContextKVCache
from fused_tp.ops.attention_arguments import AttentionKeywords, ScoreKeywords


def types(x: Tensor, w: Tensor, lengths: Tensor, cache: ContextKVCache, mesh: DeviceMesh) -> None:
    """Checked by mypy; never called."""
    gather = fused_tp.all_gather_matmul
    assert_type(gather(x, w, w, group=None), Tensor)
    assert_type(gather(x, [w, w], [w, None], group=None, gather_dim=0), list[Tensor])
    assert_type(gather(x, w, group=None, return_gathered=True), tuple[Tensor, Tensor])
    assert_type(gather(x, (w, w), group=None, return_gathered=True), tuple[list[Tensor], Tensor])
    assert_type(fused_tp.column_parallel_matmul(x, w, w, group=None), Tensor)
    assert_type(fused_tp.column_parallel_matmul(x, [w, w], group=None), list[Tensor])
    assert_type(gather(x, [w, w], group=None, float8="tensorwise"), list[Tensor])
    assert_type(fused_tp.column_parallel_matmul(x, w, group=None, float8="rowwise"), Tensor)
    assert_type(fused_tp.matmul_all_reduce(x, w, group=None), Tensor)
    assert_type(fused_tp.matmul_reduce_scatter(x, w, group=None), Tensor)
    assert_type(fused_tp.all_reduce_rms_norm(x, x, w, 1e-5, group=None), tuple[Tensor, Tensor])
    assert_type(fused_tp.matmul_all_reduce_rms_norm(x, w, x, w, 1e-5, group=None), tuple[Tensor, Tensor])
    assert_type(fused_tp.all_gather(x, 0, group=None), Tensor)
    assert_type(fused_tp.all_reduce(x, group=None), Tensor)
    assert_type(fused_tp.vocab_parallel_cross_entropy(x, lengths, group=None), Tensor)
    assert_type(fused_tp.linear_cross_entropy(x, x, lengths, group=None), Tensor)
    assert_type(fused_tp.ring_attention(x, x, x, group=None, causal=True), Tensor)
    assert_type(fused_tp.ring_attention(x, x, x, group=None, return_lse=True), tuple[Tensor, Tensor])
    assert_type(fused_tp.ulysses_attention(x, x, x, group=None, causal=True), Tensor)
    assert_type(fused_tp.ulysses_attention(x, x, x, group=None, return_lse=True), tuple[Tensor, Tensor])
    assert_type(fused_tp.context_parallel_attention(x, x, x, mesh=mesh, ulysses_dim="heads"), Tensor)
    assert_type(fused_tp.context_parallel_attention(x, x, x, mesh=mesh, return_lse=True), tuple[Tensor, Tensor])
    decode = fused_tp.context_parallel_decode
    assert_type(decode(x, x, x, group=None, cache_seqlens=lengths), Tensor)
    assert_type(decode(x, x, x, group=None, cache_seqlens=lengths, return_lse=True), tuple[Tensor, Tensor])
    assert_type(cache.attend(x, window=(2, 0)), Tensor)
    assert_type(cache.attend(x, return_lse=True), tuple[Tensor, Tensor])


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
    """Overloads take these keywords from a TypedDict: none may be missing there or have another type."""
    own = {"group", "mesh", "ulysses_dim", "ring_dim", "return_lse", "cache_seqlens", "page_table", "block"}
    parameters = inspect.signature(op).parameters.values()
    stated = {p.name: p.annotation for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in own}
    assert stated == {name: kind.__forward_arg__ for name, kind in keywords.__annotations__.items()}
