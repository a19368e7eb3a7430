"""Attention over a sequence that is cut over the ranks: keys and values come past the queries, step by step."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from typing import Any, Literal, overload

from torch import Tensor

from fused_tp.ops.arguments import check_int, check_like, check_tensor
from fused_tp.ops.context import autocast_dtype, cast
from fused_tp.ops.custom_op import CustomOp
from fused_tp.runtime.errors import RankMismatchError
from fused_tp.runtime.group import GroupLike, group_by_name, group_identity
from fused_tp.runtime.tracing import span
from fused_tp.schedules.attention_providers import provider_for
from fused_tp.schedules.ring_plan import check_layout, local_length, ring_plan
from fused_tp.schedules.ring_select import Ring, select_ring
from fused_tp.schedules.ring_state import RingCall
from fused_tp.transport.base import accumulate_dtype


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: GroupLike,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "zigzag",
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    cu_seqlens: Tensor | None = None,
    return_lse: Literal[False] = False,
    deterministic: bool = False,
    seq_len: int | None = None,
) -> Tensor: ...


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: GroupLike,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "zigzag",
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    cu_seqlens: Tensor | None = None,
    return_lse: Literal[True],
    deterministic: bool = False,
    seq_len: int | None = None,
) -> tuple[Tensor, Tensor]: ...


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: GroupLike,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "zigzag",
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    cu_seqlens: Tensor | None = None,
    return_lse: bool,
    deterministic: bool = False,
    seq_len: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: GroupLike,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "zigzag",
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    cu_seqlens: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    seq_len: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v over the whole sequence, of which each rank holds the tokens that `layout` gives it.

    Every rank computes its queries' share against all keys. With a causal mask only what the mask leaves is computed,
    and "zigzag" makes that equally much on all ranks. Output and log-sum-exp are carried from step to step in float32
    (float64 for float64) and rounded once; the gradients of k and v travel and add up in float32. All sums have a
    fixed order, so results never depend on timing.

    Args:
        q: [batch, seq_local, heads, head_dim]; float16, bfloat16, float32 or float64.
        k: [batch, seq_local, kv_heads, head_dim]; heads is a multiple of kv_heads (GQA, MQA): query head h reads key
            head h // (heads / kv_heads).
        v: [batch, seq_local, kv_heads, v_head_dim].
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        causal: each token sees itself and those before it in the whole sequence.
        scale: of the scores; None is head_dim ** -0.5.
        layout: "zigzag" or "contiguous", as given to `shard_sequence`.
        window, softcap, alibi_slopes, sinks, dropout_p, cu_seqlens: refused unless left at the default.
        return_lse: also return the log-sum-exp of the scores of every row. It carries no gradient.
        deterministic: both values give the same, deterministic result; there is no faster way that is not.
        seq_len: length of the whole sequence, where the ranks do not all hold equally many tokens.

    Returns:
        out [batch, seq_local, heads, v_head_dim] in the dtype of q; with `return_lse`, (out, lse) with lse
        [batch, heads, seq_local] in float32 (float64 for float64).

    Raises:
        TypeError, ValueError: an argument does not fit; raised before anything is sent.
        CollectiveTimeoutError, PeerLostError, RankMismatchError: the peers did not come along.

    Example:
        q, k, v = (shard_sequence(t, 1, group=mesh["cp"]) for t in (q, k, v))
        out = ring_attention(q, k, v, group=mesh["cp"], causal=True, seq_len=seq_len)

    Source: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", arXiv:2310.01889; the
    zigzag order of Zhu, "ring-flash-attention", 2024.
    """
    _refuse_what_is_not_served(window, softcap, alibi_slopes, sinks, dropout_p, cu_seqlens)
    dtype = autocast_dtype(q)
    if dtype is not None:
        q, k, v = cast(dtype, q, k, v)
    check_heads(q, k, v)
    scale = _checked_scale(scale, q.shape[3])
    check_layout(layout)
    name, size, rank = group_identity(group)
    total = _total_length(seq_len, q.shape[1], size, rank, layout)
    out, lse = RING_ATTENTION(q, k, v, bool(causal), scale, layout, total, name)
    return (out, lse.detach()) if return_lse else out


def _refuse_what_is_not_served(
    window: Any, softcap: Any, alibi_slopes: Any, sinks: Any, dropout_p: Any, cu_seqlens: Any
) -> None:
    refused = {
        "window": (window is not None, "leave it out and mask nothing, or attend to a window on a single rank"),
        "softcap": (softcap != 0.0, "pass 0.0, or compute capped scores on a single rank"),
        "alibi_slopes": (alibi_slopes is not None, "pass None and use rotary position embeddings on q and k"),
        "sinks": (
            sinks is not None,
            "pass None; in inference, multiply out by sigmoid(lse - sink) instead",
        ),
        "dropout_p": (dropout_p != 0.0, "pass 0.0, for instance by setting the model's attention dropout to 0"),
        "cu_seqlens": (cu_seqlens is not None, "pass None and put each document in a batch row of its own"),
    }
    for name, (given, instead) in refused.items():
        if given:
            raise ValueError(f"{name} is not served by ring_attention yet: {instead}.")


def check_heads(q: Any, k: Any, v: Any) -> None:
    """Raise TypeError or ValueError unless q, k and v fit each other."""
    check_tensor("q", q)
    check_like("k", k, "q", q)
    check_like("v", v, "q", q)
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.ndim != 4:
            raise ValueError(f"{name} has shape {tuple(t.shape)}; it must be [batch, seq_local, heads, head_dim].")
        if 0 in (t.shape[0], *t.shape[2:]):
            raise ValueError(f"{name} has shape {tuple(t.shape)}; only seq_local may be 0.")
    if k.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"k has batch and seq_local {tuple(k.shape[:2])}, but q has {tuple(q.shape[:2])}; "
            "each rank holds the queries and keys of the same tokens."
        )
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k has head_dim {k.shape[3]}, but q has {q.shape[3]}; they must be equal.")
    if q.shape[2] % k.shape[2] != 0:
        raise ValueError(f"k has {k.shape[2]} heads, of which the {q.shape[2]} heads of q are not a multiple.")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v has batch, seq_local and heads {tuple(v.shape[:3])}, but k has {tuple(k.shape[:3])}; make them equal."
        )


def _checked_scale(scale: Any, head_dim: int) -> float:
    if scale is None:
        return float(head_dim) ** -0.5
    if isinstance(scale, (bool, Tensor)) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale must be a float or None, not {type(scale).__name__}.")
    if not isfinite(scale):
        raise ValueError(f"scale is {scale}; it must be finite.")
    return float(scale)


def _total_length(seq_len: Any, length: int, world_size: int, rank: int, layout: str) -> int:
    if seq_len is None:
        return length * world_size
    check_int("seq_len", seq_len)
    wanted = local_length(seq_len, world_size, rank, layout) if seq_len >= 0 else -1
    if wanted != length:
        raise ValueError(
            f"seq_len={seq_len} in layout {layout!r} gives rank {rank} of {world_size} {max(0, wanted)} tokens, but q "
            f"holds {length}; cut q, k and v with shard_sequence."
        )
    return int(seq_len)


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, layout: str, seq_len: int, group_name: str
) -> tuple[Ring, RingCall, tuple[int, ...]]:
    group = group_by_name(group_name)
    plan = ring_plan(seq_len, group.size, layout, causal)
    # What ranks compare are at most eight numbers (those of shared memory): the keywords, of which there are more, are
    # one of them.
    keywords = zlib.crc32(_keywords(causal, scale, layout).encode())
    dims = (q.shape[0], seq_len, *q.shape[2:], k.shape[2], v.shape[3], keywords)
    return (
        _ring(q, k, v, causal, scale, layout, seq_len, group_name),
        RingCall(plan, group.rank, provider_for(q, v), scale),
        dims,
    )


def _ring(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, layout: str, seq_len: int, group_name: str
) -> Ring:
    return select_ring(group_by_name(group_name), k, v, seq_len)


def _keywords(causal: bool, scale: float, layout: str) -> str:
    """Whatever must agree on all ranks besides shapes and dtypes."""
    return f"causal={causal}, layout={layout!r}, scale={scale!r}"


@contextmanager
def _keywords_in_words(rank: int, causal: bool, scale: float, layout: str) -> Iterator[None]:
    """Each rank that hears of a disagreement says what its checksum of the keywords stands for."""
    try:
        yield
    except RankMismatchError as error:
        raise RankMismatchError(
            f"{str(error).rstrip('.')}. The last number of a ring_attention is a checksum; on rank {rank} it stands "
            f"for {_keywords(causal, scale, layout)}."
        ) from error


def _dense_last(*tensors: Tensor) -> list[Tensor]:
    """Kernels take any strides but that of the last dim."""
    return [t if t.stride(-1) == 1 else t.contiguous() for t in tensors]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, layout: str, seq_len: int, group_name: str
) -> tuple[Tensor, Tensor]:
    ring, call, dims = _prepare(q, k, v, causal, scale, layout, seq_len, group_name)
    q, k, v = _dense_last(q, k, v)
    with (
        span(f"ring_attention ({ring.name}, {call.provider.name})"),
        _keywords_in_words(call.rank, causal, scale, layout),
    ):
        return ring.forward(call, q, k, v, dims)


def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, layout: str, seq_len: int, group_name: str
) -> tuple[Tensor, Tensor]:
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulate_dtype(q.dtype))
    return q.new_empty((*q.shape[:3], v.shape[3])), lse


def _backward_op(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    layout: str,
    seq_len: int,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    ring, call, dims = _prepare(q, k, v, causal, scale, layout, seq_len, group_name)
    grad_out, q, k, v = _dense_last(grad_out, q, k, v)
    with (
        span(f"ring_attention backward ({ring.name}, {call.provider.name})"),
        _keywords_in_words(call.rank, causal, scale, layout),
    ):
        return ring.backward(call, grad_out, q, k, v, out, lse, dims)


def _backward_ring(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *how: Any) -> Ring:
    return _ring(q, k, v, *how)


def _backward_fake(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    # Computed together and for all three: which of them need a gradient may differ between ranks, the messages may not.
    return (*RING_ATTENTION_BACKWARD(grad_out, *ctx.saved_tensors, *ctx.rest), None, None, None, None, None)


_HOW = "bool causal, float scale, str layout, SymInt seq_len, str group"

RING_ATTENTION_BACKWARD = CustomOp(
    "ring_attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_HOW}) -> (Tensor, Tensor, Tensor)",
    _backward_op,
    _backward_fake,
    schedule=_backward_ring,
)

RING_ATTENTION = CustomOp(
    f"ring_attention(Tensor q, Tensor k, Tensor v, {_HOW}) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    _setup_context,
    _backward,
    _ring,
)
