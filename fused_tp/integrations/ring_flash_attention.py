"""Functions of ring-flash-attention (Zhu, 2024) on `ring_attention`, with the same names, signatures and token orders.

Change the import; calls and the sharding of tokens stay the same. Of [batch, seq, heads, head_dim] a rank holds

- `ring_flash_attn_*`: chunk r of W of the sequence;
- `zigzag_ring_flash_attn_*`: chunks r and 2W-1-r of 2W of the sequence;

and of packed documents, [tokens, heads, head_dim],

- `ring_flash_attn_varlen_*`: chunk r of W of each document;
- `zigzag_ring_flash_attn_varlen_*`: chunks r and 2W-1-r of 2W of each document;
- `llama3_flash_attn_varlen_*`: chunk r of W of all tokens, wherever documents begin.

Each exists as `_func` (q, k, v), `_kvpacked_func` (q, kv with 2 before heads) and `_qkvpacked_func` (qkv with 3).

All devices (also CPU ranks) and dtypes of `ring_attention` are supported, and features that the library rejects or
computes wrongly: windows (of the whole sequence), ALiBi, dropout, sequences without a causal mask in zigzag order. Sums
have a fixed order, with and without `deterministic`. `max_seqlen`, which sizes the library's CUDA launches, is ignored.

Arguments common to all:

- `dropout_p`, `softmax_scale` (None: head_dim ** -0.5), `causal`, `window_size` and `alibi_slopes` [heads] are those of
  flash-attn. They are passed to `ring_attention`, which documents them.
- `cu_seqlens` of the varlen functions is int32 or int64 [documents + 1], for a rank's tokens: that of the whole
  documents divided by W. Keep it on the CPU: reading it elsewhere waits for the device.
- `return_attn_probs`: return (out, lse, None), lse [batch, heads, seq / W], for varlen functions [heads, tokens / W].
- `group`: a ProcessGroup, or None for the world.

Not supported: `stripe_flash_attn_*` (no layout of fused_tp has its token order). Use zigzag, which balances as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fused_tp.core.group import group_identity
from fused_tp.ops.arguments import check_bool, check_int
from fused_tp.ops.attention_arguments import move_to_cpu
from fused_tp.ops.ring_attention import ring_attention

AttentionResult: TypeAlias = "Tensor | tuple[Tensor, Tensor, None]"

__all__ = [
    f"{name}{suffix}_func"
    for name in (
        "ring_flash_attn",
        "zigzag_ring_flash_attn",
        "ring_flash_attn_varlen",
        "zigzag_ring_flash_attn_varlen",
        "llama3_flash_attn_varlen",
    )
    for suffix in ("", "_kvpacked", "_qkvpacked")
] + ["llama3_flash_attn_prepare_cu_seqlens"]


def attend(
    layout: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    alibi_slopes: Tensor | None,
    return_attn_probs: bool,
    group: ProcessGroup | None,
    *,
    cu_seqlens: Tensor | None = None,
) -> AttentionResult:
    """Call `ring_attention` with arguments named as in flash-attn. `cu_seqlens`: bounds of the documents of all ranks.

    Returns out, or (out, lse, None) if `return_attn_probs`.
    """
    check_bool(return_attn_probs=return_attn_probs)
    keywords: dict[str, Any] = {"layout": layout, "group": group, "dropout_p": dropout_p, "scale": softmax_scale}
    keywords |= {"causal": causal, "window": window_size, "alibi_slopes": alibi_slopes, "cu_seqlens": cu_seqlens}
    if not return_attn_probs:
        return ring_attention(q, k, v, **keywords)
    out, lse = ring_attention(q, k, v, return_lse=True, **keywords)
    return out, lse, None


def _attend_packed(
    cu_seqlens: Any, layout: str, q: Tensor, k: Tensor, v: Tensor, *options: Any, covers_all_ranks: bool = False
) -> AttentionResult:
    """Attention within packed documents, whose bounds `cu_seqlens` cover this rank's tokens, or those of all ranks.

    Args:
        options: the arguments of `attend` after v; the last one is the group.
    """
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.ndim != 3:
            raise ValueError(f"{name} must have shape [tokens of this rank, heads, head_dim], got {tuple(t.shape)}.")
    bounds = cu_seqlens if covers_all_ranks else _bounds_of_all_ranks(cu_seqlens, q, options[-1])
    result = attend(layout, q[None], k[None], v[None], *options, cu_seqlens=bounds)
    if isinstance(result, Tensor):
        return result[0]
    out, lse, _ = result
    return out[0], lse[0], None


def _bounds_of_all_ranks(cu_seqlens: Any, q: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the bounds of the documents over all ranks, from the `cu_seqlens` of this rank's tokens."""
    bounds = cast("Tensor", move_to_cpu("cu_seqlens", cu_seqlens))
    if not torch.compiler.is_compiling() and len(bounds) and int(bounds[-1]) != q.shape[0]:
        raise ValueError(
            f"the last value of cu_seqlens must be {q.shape[0]}, the number of tokens of q on this rank, got "
            f"{int(bounds[-1])}. Divide the cu_seqlens of the unsharded documents by the number of ranks."
        )
    return bounds.long() * group_identity(group)[1]


def ring_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: ProcessGroup | None = None,
) -> AttentionResult:
    """Attention over a sequence; rank r holds chunk r. Returns [batch, seq / W, heads, head_dim]."""
    return attend(
        "contiguous", q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_attn_probs, group
    )


def zigzag_ring_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: ProcessGroup | None = None,
) -> AttentionResult:
    """Attention over a sequence; rank r holds chunks r and 2W-1-r. Returns [batch, seq / W, heads, head_dim]."""
    return attend(
        "zigzag", q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_attn_probs, group
    )


def ring_flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: ProcessGroup | None = None,
) -> AttentionResult:
    """Attention within documents; rank r holds chunk r of each. Returns [tokens / W, heads, head_dim]."""
    options = dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_attn_probs, group
    return _attend_packed(cu_seqlens, "contiguous_documents", q, k, v, *options)


def zigzag_ring_flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: ProcessGroup | None = None,
) -> AttentionResult:
    """Attention within documents; rank r holds chunks r and 2W-1-r of each. Returns [tokens / W, heads, head_dim]."""
    options = dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_attn_probs, group
    return _attend_packed(cu_seqlens, "zigzag_documents", q, k, v, *options)


@dataclass(frozen=True)
class KeySlice:
    """Replaces the library's slice of the keys that a rank's queries see; also holds the documents of all ranks."""

    start: int
    stop: int
    cu_seqlens: Tensor


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, KeySlice]:
    """Return (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice) of `rank`, for
    `llama3_flash_attn_varlen_func`.

    Args:
        cu_seqlens: int32 or int64 [documents + 1], of the whole documents; best on the CPU.
        causal: same as for that function.
        rank, world_size: of the group that shares the tokens.

    Raises:
        TypeError, ValueError: an argument does not fit; the ranks cannot share the tokens evenly.
    """
    check_bool(causal=causal)
    check_int("world_size", world_size, minimum=1)
    check_int("rank", rank, minimum=0)
    if rank >= world_size:
        raise ValueError(f"rank must be below world_size={world_size}, got {rank}.")
    cu_seqlens_cpu = cast("Tensor", move_to_cpu("cu_seqlens", cu_seqlens))
    bounds: list[int] = cu_seqlens_cpu.tolist()
    total_tokens = bounds[-1]
    if total_tokens % world_size:
        raise ValueError(
            f"the number of tokens must be a multiple of world_size={world_size}, got {total_tokens}. Pad them."
        )
    start, stop = rank * total_tokens // world_size, (rank + 1) * total_tokens // world_size
    inner_bounds = [bound for bound in bounds if start < bound < stop]
    key_start = max(bound for bound in bounds if bound <= start)
    key_stop = stop if causal else min(bound for bound in bounds if bound >= stop)
    query_ends, key_ends = [start, *inner_bounds, stop], [key_start, *inner_bounds, key_stop]

    def relative_bounds(ends: list[int]) -> tuple[Tensor, int]:
        bounds = torch.tensor(ends, dtype=cu_seqlens.dtype, device="cpu") - ends[0]
        return bounds.to(cu_seqlens.device), int(bounds.diff().max())

    (query_bounds, max_queries), (key_bounds, max_keys) = relative_bounds(query_ends), relative_bounds(key_ends)
    return query_bounds, key_bounds, max_queries, max_keys, KeySlice(key_start, key_stop, cu_seqlens_cpu)


def llama3_flash_attn_varlen_func(  # noqa: PLR0913 - the library's signature
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    local_k_slice: KeySlice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: ProcessGroup | None = None,
) -> AttentionResult:
    """Attention within documents; rank r holds chunk r of all tokens. Returns [tokens / W, heads, head_dim].

    The library gathers all keys of `heads_k_stride` heads at a time. Here keys travel in a ring, only those that some
    query sees, and the stride is ignored. `local_k_slice` must come from `llama3_flash_attn_prepare_cu_seqlens` of this
    module; the other lengths follow from it.

    Raises:
        TypeError: `local_k_slice` does not come from this module.
    """
    if not isinstance(local_k_slice, KeySlice):
        raise TypeError(
            "local_k_slice must be returned by llama3_flash_attn_prepare_cu_seqlens of fused_tp, got "
            f"{type(local_k_slice).__name__}. Import that function from the same module."
        )
    options = dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_attn_probs, group
    return _attend_packed(local_k_slice.cu_seqlens, "contiguous", q, k, v, *options, covers_all_ranks=True)


def _make_packed_variant(
    function: Callable[..., AttentionResult], name: str, num_packed: int
) -> Callable[..., AttentionResult]:
    """Variant of `function` with the last `num_packed` of (q, k, v) stacked in one tensor, along a dim before heads."""

    def call(*args: Any, **keywords: Any) -> AttentionResult:
        call_arguments = signature.bind(*args, **keywords).arguments
        packed_tensor = call_arguments.pop(name)
        if packed_tensor.ndim < 3 or packed_tensor.shape[-3] != num_packed:
            raise ValueError(
                f"{name} must have shape [..., {num_packed}, heads, head_dim], got {tuple(packed_tensor.shape)}."
            )
        separate_tensors = () if num_packed == 3 else (call_arguments.pop("q"),)
        return function(*separate_tensors, *packed_tensor.unbind(-3), **call_arguments)

    function_signature = inspect.signature(function)
    packed_parameter = inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="Tensor")
    parameters = list(function_signature.parameters.values())
    signature = function_signature.replace(
        parameters=[*parameters[: 3 - num_packed], packed_parameter, *parameters[3:]]
    )
    call.__name__ = call.__qualname__ = function.__name__.replace("_func", f"_{name}packed_func")
    call.__doc__ = f"`{function.__name__}` of {name} [..., {num_packed}, heads, head_dim]."
    vars(call)["__signature__"] = signature
    return call


ring_flash_attn_kvpacked_func = _make_packed_variant(ring_flash_attn_func, "kv", 2)
ring_flash_attn_qkvpacked_func = _make_packed_variant(ring_flash_attn_func, "qkv", 3)
zigzag_ring_flash_attn_kvpacked_func = _make_packed_variant(zigzag_ring_flash_attn_func, "kv", 2)
zigzag_ring_flash_attn_qkvpacked_func = _make_packed_variant(zigzag_ring_flash_attn_func, "qkv", 3)
ring_flash_attn_varlen_kvpacked_func = _make_packed_variant(ring_flash_attn_varlen_func, "kv", 2)
ring_flash_attn_varlen_qkvpacked_func = _make_packed_variant(ring_flash_attn_varlen_func, "qkv", 3)
zigzag_ring_flash_attn_varlen_kvpacked_func = _make_packed_variant(zigzag_ring_flash_attn_varlen_func, "kv", 2)
zigzag_ring_flash_attn_varlen_qkvpacked_func = _make_packed_variant(zigzag_ring_flash_attn_varlen_func, "qkv", 3)
llama3_flash_attn_varlen_kvpacked_func = _make_packed_variant(llama3_flash_attn_varlen_func, "kv", 2)
llama3_flash_attn_varlen_qkvpacked_func = _make_packed_variant(llama3_flash_attn_varlen_func, "qkv", 3)
