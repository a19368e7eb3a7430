"""Attention over a sequence that is cut over the ranks: tokens are exchanged for heads, and each rank attends for some.

An all-to-all makes of some tokens with all heads all tokens with some heads; attention over them is that of one rank;
a second all-to-all brings its result back. Every element travels once, whatever the number of ranks, and all ranks have
the same work whatever the mask; but there can be no more ranks than heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from fused_tp.attention.spec import AttentionArguments
from fused_tp.ops.all_to_all import (
    HEADS_TO_SEQUENCE,
    OP,
    SEQUENCE_TO_HEADS,
    Heads,
    HeadsExchange,
    check_shared,
    moved_columns,
)
from fused_tp.ops.arguments import check_bool
from fused_tp.ops.attention_arguments import (
    AttentionKeywords,
    OutAndLseKeywords,
    OutKeywords,
    arguments_of,
    with_keywords,
)
from fused_tp.ops.ring_attention import RING_ATTENTION, checked_call
from fused_tp.runtime.group import ALONE, GroupIdentity, GroupLike, group_identity

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: GroupLike, **keywords: Unpack[OutKeywords]
) -> Tensor: ...


@overload
def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: GroupLike, **keywords: Unpack[OutAndLseKeywords]
) -> tuple[Tensor, Tensor]: ...


@with_keywords(AttentionKeywords)
def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: GroupLike,
    return_lse: bool = False,
    **keywords: Unpack[AttentionKeywords],
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v over the whole sequence, of which each rank holds the tokens that `layout` gives it.

    What `ring_attention` computes, with the same arguments, in another way: each rank gets all tokens of its share of
    the heads, attends, and gives the result back. Key heads go to the ranks whose query heads read them, so there may
    be more ranks than key heads; their gradients then travel and add up in float32, in the order of the ranks. All
    ranks have the same work, whatever the mask and the layout.

    Args:
        q: [batch, seq_local, heads, head_dim]; float16, bfloat16, float32 or float64. Ranks must divide heads.
        k: [batch, seq_local, kv_heads, head_dim]; heads is a multiple of kv_heads (GQA, MQA): query head h reads key
            head h // (heads / kv_heads).
        v: [batch, seq_local, kv_heads, v_head_dim].
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        return_lse: also return the log-sum-exp of the scores of every row, sinks included. Differentiable; all ranks
            must ask for it alike, and its gradient, zeros too, rules out torch's own kernels in the backward.
        causal, scale, layout, window, softcap, dropout_p: as for `ring_attention`.
        cu_seqlens, cu_seqlens_kv, seq_len, seq_len_kv: the same.
        alibi_slopes, sinks: the same, of all heads, on every rank.

    Returns:
        out [batch, seq_local, heads, v_head_dim] in the dtype of q, 0 for tokens that see nothing; with `return_lse`,
        (out, lse) with lse [batch, heads, seq_local] in float32 (float64 for float64), -inf for these tokens.
        Gradients of alibi_slopes and sinks are zero but for this rank's heads: sum them over the group, like those of
        any parameter that all its ranks hold.

    Raises:
        TypeError, ValueError: an argument does not fit; raised before anything is sent.
        CollectiveTimeoutError, PeerLostError, RankMismatchError: the peers did not arrive.

    Example:
        q, k, v = (shard_sequence(t, 1, group=mesh["cp"]) for t in (q, k, v))
        out = ulysses_attention(q, k, v, group=mesh["cp"], causal=True, seq_len=seq_len)

    Source: Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence
    Transformer Models", arXiv:2309.14509.
    """
    arguments = arguments_of(OP, keywords)
    return attention_by_heads(q, k, v, arguments, group_identity(group), ALONE, return_lse=return_lse)


def attention_of_heads_over(
    q: Tensor, k: Tensor, v: Tensor, inner: GroupLike, ring: GroupLike, first_head: int, **keywords: Any
) -> Tensor:
    """out of `context_parallel_attention`, whose q begins with that head of the whole; `ring` None: no ring."""
    arguments = arguments_of(OP, keywords, first_head=first_head)
    outer = ALONE if ring is None else group_identity(ring)
    out = attention_by_heads(q, k, v, arguments, group_identity(inner), outer, return_lse=False)
    assert isinstance(out, Tensor)
    return out


def attention_by_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arguments: AttentionArguments,
    inner: GroupIdentity,
    ring: GroupIdentity,
    *,
    strided: bool = False,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Heads shared out over `inner`, and of each share a ring over `ring`.

    The rank of number i in `inner` and r in `ring` holds part r * inner.size + i of the layout; where `strided`, part
    i * ring.size + r.
    """
    check_bool(return_lse=return_lse)
    first, stride = (ring.rank, ring.size) if strided else (ring.rank * inner.size, 1)
    parts = inner.size * ring.size
    q, k, v, arguments = checked_call(q, k, v, arguments, parts, first + inner.rank * stride)
    check_shared(q.shape[2], inner.size)
    if inner.size == 1:
        out, lse = RING_ATTENTION.named(q, k, v, *arguments, ring.name)
        return (out, lse) if return_lse else out
    heads, columns = Heads(q.shape[2], k.shape[2], inner.size), moved_columns(q.shape, k.shape, v.shape)
    given = (arguments.alibi_slopes is not None, arguments.sinks is not None, return_lse)
    exchange = HeadsExchange("qkk", heads.heads, heads.kv_heads, columns, *given, parts, first, stride)
    rest = (*arguments._replace(alibi_slopes=None, sinks=None, seed=None), inner.name)
    q, k, v = SEQUENCE_TO_HEADS.named([q, k, v], *exchange, *rest)
    k, v = (_one_for_equally_many(x, heads, inner.rank) for x in (k, v))
    own = heads.of("q", inner.rank)
    alibi_slopes, sinks = (None if x is None else x[own.start : own.stop] for x in arguments[:2])
    first_head = arguments.first_head + own.start
    arguments = arguments._replace(alibi_slopes=alibi_slopes, sinks=sinks, first_head=first_head)
    if ring.size > 1:
        arguments = arguments._replace(joined=inner.size, strided=strided)
    else:
        arguments = arguments._replace(layout="contiguous")
    out, lse = RING_ATTENTION.named(q, k, v, *arguments, ring.name)
    if not return_lse:
        (out,) = HEADS_TO_SEQUENCE.named([out], *exchange._replace(kinds="q"), *rest)
        return out
    out, lse = HEADS_TO_SEQUENCE.named([out, lse.transpose(1, 2).unsqueeze(-1)], *exchange._replace(kinds="qq"), *rest)
    return out, lse.squeeze(-1).transpose(1, 2).contiguous()


def _one_for_equally_many(x: Tensor, heads: Heads, rank: int) -> Tensor:
    """Key heads of a rank, repeated so that each is read by equally many of its query heads, where it is not so."""
    own, per_kv_head = heads.of("q", rank), heads.heads // heads.kv_heads
    each, rest = len(own), per_kv_head
    while rest:  # their greatest common divisor, of symbolic sizes too
        each, rest = rest, each % rest
    readers = [head // per_kv_head - own.start // per_kv_head for head in range(own.start, own.stop, each)]
    if readers == list(range(x.shape[2])):
        return x
    # Slices, and not an index: their gradients add up in a fixed order on every device.
    return torch.cat([x[:, :, head : head + 1] for head in readers], 2)
