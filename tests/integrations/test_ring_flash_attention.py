"""Functions of ring-flash-attention and ms-swift, on tensors sharded as in these libraries, against dense fp64."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fused_tp.integrations import ms_swift
from fused_tp.integrations import ring_flash_attention as library
from tests.attention_reference import dense_attention, dense_mask
from tests.reference import refuses, seeded
from tests.workers import on_ranks

HEADS, KV_HEADS, DIM = 4, 2, 8
WHOLE = (0, 24, 24, 48, 120)  # document lengths divide into 2W chunks for 2, 3 and 4 ranks


def contiguous(t: Tensor, rank: int, ranks: int) -> Tensor:
    return t.chunk(ranks)[rank]


def zigzag(t: Tensor, rank: int, ranks: int) -> Tensor:
    chunks = t.chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def in_each(cut: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Equivalent of `extract_local` in the library's tests of varlen functions."""
    return lambda t, rank, ranks: torch.cat([cut(t[a:b], rank, ranks) for a, b in pairwise(WHOLE) if b > a])


# name: (function that shards tokens, True for packed documents)
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "ring_flash_attn": (contiguous, False),
    "zigzag_ring_flash_attn": (zigzag, False),
    "ring_flash_attn_varlen": (in_each(contiguous), True),
    "zigzag_ring_flash_attn_varlen": (in_each(zigzag), True),
    "llama3_flash_attn_varlen": (contiguous, True),
}
CASES: list[dict[str, Any]] = [
    {"causal": True},
    {"causal": False, "softmax_scale": 0.3, "deterministic": True},
    {"causal": True, "window_size": (9, 0), "alibi_slopes": seeded(HEADS, seed=9).abs()},
]


def inputs(kv_heads: int = KV_HEADS) -> list[Tensor]:
    """Return q, k, v and the gradient of out, for all tokens."""
    return [seeded(WHOLE[-1], heads, DIM, seed=seed) for seed, heads in enumerate((HEADS, kv_heads, kv_heads, HEADS))]


def wanted(documents: bool, how: dict[str, Any], kv_heads: int = KV_HEADS) -> list[Tensor]:
    """Expected out, lse [tokens, heads], and gradients of q, k and v."""
    *qkv, grad = (t.double()[None] for t in inputs(kv_heads))
    qkv = [t.requires_grad_() for t in qkv]
    bounds: Sequence[int] | None = WHOLE if documents else None
    seen, distance = dense_mask(
        WHOLE[-1], WHOLE[-1], causal=how["causal"], window=how.get("window_size"), cu_seqlens=bounds
    )
    scores = {"scale": how.get("softmax_scale"), "alibi_slopes": how.get("alibi_slopes")}
    out, lse = dense_attention(*qkv, seen, distance, **scores)
    grads = torch.autograd.grad((out * grad).sum(), qkv)
    return [out[0].detach(), lse[0].T.detach(), *(t[0] for t in grads)]


def arguments(name: str, rank: int, ranks: int, causal: bool) -> dict[str, Any]:
    bounds = torch.tensor(WHOLE, dtype=torch.int32)
    if name.startswith("llama3"):
        prepared = library.llama3_flash_attn_prepare_cu_seqlens(bounds, causal, rank, ranks)
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")
        return {**dict(zip(names, prepared, strict=True)), "heads_k_stride": 1}
    return {"cu_seqlens": bounds // ranks, "max_seqlen": 72 // ranks} if "varlen" in name else {}


def check(found: Any, given: list[Tensor], grad: Tensor, expected: list[Tensor], packed: bool) -> None:
    """Compare out, lse and gradients. `given`: leaves q, k and v, or the tensors that pack them."""
    out, lse, nothing = found
    assert nothing is None
    grads = torch.autograd.grad(out, given, grad)
    if len(grads) == 1:
        grads = grads[0].unbind(-3)
    elif len(grads) == 2:
        grads = (grads[0], *grads[1].unbind(-3))
    if not packed:
        out, lse, grads = out[0], lse[0], [t[0] for t in grads]
    for actual, good in zip((out, lse.T, *grads), expected, strict=True):
        torch.testing.assert_close(actual, good.float(), rtol=1e-5, atol=1e-5)


@on_ranks(1, 2, 3, 4)
def test_out_lse_and_gradients_of_all_functions(group: dist.ProcessGroup) -> None:
    rank, ranks = dist.get_rank(group), group.size()
    for name, (cut, packed) in FUNCTIONS.items():
        for how in CASES:
            expected = [cut(t, rank, ranks) for t in wanted(packed, how)]
            *qkv, grad = (t if packed else t[None] for t in (cut(t, rank, ranks) for t in inputs()))
            leaves = [t.requires_grad_() for t in qkv]
            own = {**arguments(name, rank, ranks, how["causal"]), **how, "return_attn_probs": True, "group": group}
            check(getattr(library, f"{name}_func")(*leaves, **own), leaves, grad, expected, packed)
            kv = torch.stack([t.detach() for t in leaves[1:]], -3).requires_grad_()
            found = getattr(library, f"{name}_kvpacked_func")(leaves[0], kv, **own)
            check(found, [leaves[0], kv], grad, expected, packed)
        expected = [cut(t, rank, ranks) for t in wanted(packed, how, HEADS)]
        *qkv, grad = (t if packed else t[None] for t in (cut(t, rank, ranks) for t in inputs(HEADS)))
        together = torch.stack(qkv, -3).requires_grad_()
        found = getattr(library, f"{name}_qkvpacked_func")(together, **own)
        check(found, [together], grad, expected, packed)


@on_ranks(2, 3)
def test_function_of_ms_swift(group: dist.ProcessGroup) -> None:
    """Pass a batch of one row, bounds of whole documents, and a window in the form of transformers."""
    rank, ranks = dist.get_rank(group), group.size()
    cut, _ = FUNCTIONS["zigzag_ring_flash_attn_varlen"]
    *qkv, grad = (cut(t, rank, ranks)[None] for t in inputs())
    leaves = [t.requires_grad_() for t in qkv]
    for window, size in (((-1, -1), (-1, -1)), (5, (4, 0))):
        expected = [cut(t, rank, ranks) for t in wanted(True, {"causal": True, "window_size": size})]
        found = ms_swift.zigzag_ring_flash_attn_varlen_func(
            *leaves,
            cu_seqlens=torch.tensor(WHOLE, dtype=torch.int32),
            max_seqlen=72,
            causal=True,
            dropout_p=0.0,
            softmax_scale=DIM**-0.5,
            window_size=window,
            return_attn_probs=True,
            group=group,
        )
        check(found, leaves, grad, expected, packed=False)


@on_ranks(2)
def test_dropout_compilation_and_several_passes_before_a_backward(group: dist.ProcessGroup) -> None:
    """The options reach ring_attention, whose own tests cover them."""
    rank = dist.get_rank(group)
    cut, _ = FUNCTIONS["zigzag_ring_flash_attn_varlen"]
    *qkv, grad = (cut(t, rank, 2).bfloat16() for t in inputs())
    leaves = [t.requires_grad_() for t in qkv]
    own: dict[str, Any] = {**arguments("varlen", rank, 2, True), "causal": True, "group": group}
    function = library.zigzag_ring_flash_attn_varlen_func
    torch.manual_seed(1)
    dropped = function(*leaves, **own, dropout_p=0.5)
    first, second = function(*leaves, **own), function(*(2 * t for t in leaves), **own)
    assert dropped.dtype == torch.bfloat16 and not torch.equal(dropped, first)
    leaves[0].grad = None
    ((first + second) * grad).sum().backward()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*leaves, **own), first)
    leaves[1].requires_grad_(False)
    assert torch.equal(function(*leaves, **own), first)


def test_prepared_lengths_are_those_of_the_library() -> None:
    """Compare with the library's algorithm, for all ranks of its own test and of others."""
    for whole, ranks in (([0, 7, 14, 16], 8), ([0, 120, 1248, 4232], 4), ([0, 4, 8], 2), ([0, 3, 3, 9, 12], 3)):
        bounds = torch.tensor(whole, dtype=torch.int32)
        for rank, causal in ((rank, causal) for rank in range(ranks) for causal in (True, False)):
            found = library.llama3_flash_attn_prepare_cu_seqlens(bounds, causal, rank, ranks)
            for mine, theirs in zip(found[:4], prepared_by_the_library(bounds, causal, rank, ranks), strict=False):
                assert torch.equal(torch.as_tensor(mine), torch.as_tensor(theirs)), (whole, rank, causal)
            keys = prepared_by_the_library(bounds, causal, rank, ranks)[4]
            assert (found[4].start, found[4].stop) == (keys.start, keys.stop)
            assert found[0].dtype == torch.int32


def prepared_by_the_library(cu_seqlens: Tensor, causal: bool, rank: int, world_size: int) -> tuple[Any, ...]:
    """Copy of ring_flash_attn/llama3_flash_attn_varlen.py (0.1.7); importing that needs flash-attn."""
    length = int(cu_seqlens[-1]) // world_size
    left = int(torch.searchsorted(cu_seqlens, rank * length))
    right = int(torch.searchsorted(cu_seqlens, (rank + 1) * length))
    if cu_seqlens[left] != rank * length:
        left -= 1
    q, k = cu_seqlens[left : right + 1].clone(), cu_seqlens[left : right + 1].clone()
    q -= rank * length
    q[0], q[-1] = 0, length
    slice_right = (rank + 1) * length if causal else int(cu_seqlens[right])
    if causal:
        k[-1] = slice_right
    slice_left = int(cu_seqlens[left])
    k -= slice_left
    return q, k, int(q.diff().max()), int(k.diff().max()), slice(slice_left, slice_right)


def test_signatures() -> None:
    assert set(library.__all__) <= set(dir(library)) and len(library.__all__) == 16
    tail = ["dropout_p", "softmax_scale", "causal", "window_size", "alibi_slopes", "deterministic"]
    tail += ["return_attn_probs", "group"]
    for name in FUNCTIONS:
        lengths = ["cu_seqlens", "max_seqlen"] if "varlen" in name else []
        if name.startswith("llama3"):
            lengths = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "heads_k_stride"]
            lengths += ["local_k_slice"]
        for kind, first in (("", ["q", "k", "v"]), ("_kvpacked", ["q", "kv"]), ("_qkvpacked", ["qkv"])):
            function = getattr(library, f"{name}{kind}_func")
            assert function.__name__ == f"{name}{kind}_func" and function.__doc__
            assert list(inspect.signature(function).parameters) == first + lengths + tail


@on_ranks(2)
def test_refusals(group: dist.ProcessGroup) -> None:
    t, row = seeded(12, HEADS, DIM), seeded(1, 12, HEADS, DIM)
    varlen, bounds = library.zigzag_ring_flash_attn_varlen_func, torch.tensor([0, 12])
    refuses(
        ValueError,
        "the last value of cu_seqlens must be 12, the number of tokens of q on this rank, got 24",
        varlen,
        t,
        t,
        t,
        2 * bounds,
        24,
        group=group,
    )
    refuses(ValueError, r"q must have shape .* got \(1, 12, 4, 8\)", varlen, row, row, row, bounds, 12, group=group)
    refuses(TypeError, "cu_seqlens must be a Tensor", varlen, t, t, t, [0, 12], 12, group=group)
    of_swift = ms_swift.zigzag_ring_flash_attn_varlen_func
    odd = torch.tensor([0, 7, 24])
    refuses(
        ValueError,
        "document 0 has 7 tokens; .* a multiple of the 2 ranks",
        of_swift,
        row,
        row,
        row,
        odd,
        17,
        group=group,
    )
    ring = library.ring_flash_attn_func
    slopes = seeded(1, HEADS)
    refuses(ValueError, r"alibi_slopes has shape \(1, 4\)", ring, row, row, row, alibi_slopes=slopes, group=group)
    refuses(TypeError, "return_attn_probs", ring, row, row, row, return_attn_probs=1, group=group)
    refuses(ValueError, "qkv must have shape", library.ring_flash_attn_qkvpacked_func, row, group=group)
    llama3, prepare = library.llama3_flash_attn_varlen_func, library.llama3_flash_attn_prepare_cu_seqlens
    refuses(TypeError, "of fused_tp, got", llama3, t, t, t, bounds, bounds, 12, 12, 1, slice(0, 12))
    refuses(ValueError, "must be a multiple of world_size=2, got 25", prepare, torch.tensor([0, 25]), True, 0, 2)
    refuses(ValueError, "rank must be below world_size=2, got 2", prepare, torch.tensor([0, 24]), True, 2, 2)
