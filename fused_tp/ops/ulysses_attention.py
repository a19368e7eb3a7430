"""Ulysses attention over a sharded sequence: an all-to-all exchanges tokens for heads.

The first all-to-all converts a shard of the tokens with all heads into all tokens with a shard of the heads. Each rank
then runs local attention, and a second all-to-all restores the token shards. Every element is sent at most once,
independent of the number of ranks, unless key heads are repeated. All ranks have equal work under any mask. The number
of heads limits the number of ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from fused_tp.attention.spec import AttentionArguments
from fused_tp.core.group import SINGLE_GROUP_IDENTITY, GroupIdentity, GroupLike, group_identity
from fused_tp.ops.all_to_all import (
    HEADS_TO_SEQUENCE,
    SEQUENCE_TO_HEADS,
    ULYSSES_OP,
    HeadsExchange,
    HeadShares,
    check_head_count,
    elements_per_token,
)
from fused_tp.ops.arguments import check_bool
from fused_tp.ops.attention_arguments import (
    AttentionKeywords,
    OutAndLseKeywords,
    OutKeywords,
    build_arguments,
    with_keywords,
)
from fused_tp.ops.ring_attention import RING_ATTENTION, checked_call_arguments

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
    """softmax(scale * q k^T) v over the whole sequence, sharded over ranks by `layout`.

    Returns the same result as `ring_attention`, with the same arguments. Each rank receives all tokens of its heads,
    computes attention, and sends the results back. There may be more ranks than key heads: a key head is sent to all
    ranks whose query heads read it, and its gradients are then sent and summed in float32, in rank order. All ranks
    have equal work under any mask and layout.

    =======  ==========================================================================
    forward  all-to-all of q, k, v [B, s, H, D] to [B, S, H/W, D]; local attention; all-to-all of out to [B, s, H, Dv]
    dgrad    all-to-all of d_out to [B, S, H/W, Dv]; local backward; all-to-all of dq, dk, dv to [B, s, H, D]
    wgrad    d_alibi_slopes, d_sinks [H]: zero except for this rank's heads; sum them over the group
    dbias    none: there is no bias
    =======  ==========================================================================

    Args:
        q: [batch, seq_local, heads, head_dim]; float16, bfloat16, float32 or float64. heads is a multiple of the ranks.
        k: [batch, seq_local, kv_heads, head_dim]; heads is a multiple of kv_heads (GQA, MQA): query head h reads key
            head h // (heads / kv_heads).
        v: [batch, seq_local, kv_heads, v_head_dim].
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        return_lse: also return the log-sum-exp of the scores of every row, sinks included. Differentiable. It must be
            equal on all ranks. With it, backward cannot use torch's flash kernels, even if the gradient of lse is zero.
        causal, scale, layout, window, softcap, dropout_p: as for `ring_attention`.
        cu_seqlens, cu_seqlens_kv, seq_len, seq_len_kv: as for `ring_attention`.
        alibi_slopes, sinks: as for `ring_attention`. Pass the values of all heads on every rank.

    Returns:
        out [batch, seq_local, heads, v_head_dim] in the dtype of q, 0 for tokens that see no keys. With `return_lse`,
        (out, lse) with lse [batch, heads, seq_local] in float32 (float64 for float64), -inf for tokens that see no
        keys. Gradients of alibi_slopes and sinks are zero except for this rank's heads: sum them over the group, like
        the gradients of any replicated parameter.

    Raises:
        TypeError, ValueError: an argument is invalid; raised before anything is sent.
        CollectiveTimeoutError, PeerLostError, RankMismatchError: a peer timed out, was lost, or made another call.

    Example:
        q, k, v = (shard_sequence(t, 1, group=mesh["cp"]) for t in (q, k, v))
        out = ulysses_attention(q, k, v, group=mesh["cp"], causal=True, seq_len=seq_len)

    Source: Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence
    Transformer Models", arXiv:2309.14509.
    """
    arguments = build_arguments(ULYSSES_OP, keywords)
    return head_sharded_attention(
        q, k, v, arguments, group_identity(group), SINGLE_GROUP_IDENTITY, return_lse=return_lse
    )


def context_parallel_attention_from_head(
    q: Tensor, k: Tensor, v: Tensor, head_group: GroupLike, ring_group: GroupLike, first_head: int, **keywords: Any
) -> Tensor:
    """Return `out` of `context_parallel_attention` for a `q` whose first head has the global index `first_head`.

    Heads are sharded over `head_group`; `ring_group` is the group of the ring, None for no ring.
    """
    arguments = build_arguments(ULYSSES_OP, keywords, first_head=first_head)
    ring_identity = SINGLE_GROUP_IDENTITY if ring_group is None else group_identity(ring_group)
    out = head_sharded_attention(q, k, v, arguments, group_identity(head_group), ring_identity, return_lse=False)
    assert isinstance(out, Tensor)
    return out


def head_sharded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arguments: AttentionArguments,
    head_group: GroupIdentity,
    ring_group: GroupIdentity,
    *,
    is_strided: bool = False,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Shard heads over `head_group`, and run ring attention over `ring_group` for each shard of heads.

    Rank i of `head_group` and r of `ring_group` holds shard r * head_group.size + i of the layout; if `is_strided`,
    shard i * ring_group.size + r.
    """
    check_bool(return_lse=return_lse)
    first_shard, stride = (ring_group.rank, ring_group.size) if is_strided else (ring_group.rank * head_group.size, 1)
    num_shards = head_group.size * ring_group.size
    q, k, v, arguments = checked_call_arguments(q, k, v, arguments, num_shards, first_shard + head_group.rank * stride)
    check_head_count(q.shape[2], head_group.size)
    if head_group.size == 1:
        out, lse = RING_ATTENTION.call_prepared(q, k, v, *arguments, ring_group.name)
        return (out, lse) if return_lse else out
    head_shares, token_elements = (
        HeadShares(q.shape[2], k.shape[2], head_group.size),
        elements_per_token(q.shape, k.shape, v.shape),
    )
    flags = (arguments.alibi_slopes is not None, arguments.sinks is not None, return_lse)
    exchange = HeadsExchange(
        "qkk", head_shares.num_heads, head_shares.num_kv_heads, token_elements, *flags, num_shards, first_shard, stride
    )
    attention_args = (*arguments._replace(alibi_slopes=None, sinks=None, seed=None), head_group.name)
    q, k, v = SEQUENCE_TO_HEADS.call_prepared([q, k, v], *exchange, *attention_args)
    k, v = (_repeat_key_heads(x, head_shares, head_group.rank) for x in (k, v))
    own_heads = head_shares.heads_of_rank("q", head_group.rank)
    alibi_slopes, sinks = (None if x is None else x[own_heads.start : own_heads.stop] for x in arguments[:2])
    first_head = arguments.first_head + own_heads.start
    arguments = arguments._replace(alibi_slopes=alibi_slopes, sinks=sinks, first_head=first_head)
    if ring_group.size > 1:
        arguments = arguments._replace(joined=head_group.size, strided=is_strided)
    else:
        arguments = arguments._replace(layout="contiguous")
    out, lse = RING_ATTENTION.call_prepared(q, k, v, *arguments, ring_group.name)
    if not return_lse:
        (out,) = HEADS_TO_SEQUENCE.call_prepared([out], *exchange._replace(kinds="q"), *attention_args)
        return out
    out, lse = HEADS_TO_SEQUENCE.call_prepared(
        [out, lse.transpose(1, 2).unsqueeze(-1)], *exchange._replace(kinds="qq"), *attention_args
    )
    return out, lse.squeeze(-1).transpose(1, 2).contiguous()


def _repeat_key_heads(x: Tensor, head_shares: HeadShares, rank: int) -> Tensor:
    """Repeat the key heads of `rank` if needed, so that each is read by the same number of the rank's query heads."""
    own_heads, heads_per_kv_head = (
        head_shares.heads_of_rank("q", rank),
        head_shares.num_heads // head_shares.num_kv_heads,
    )
    repeats, remainder = len(own_heads), heads_per_kv_head
    while remainder:  # greatest common divisor; math.gcd does not support symbolic sizes
        repeats, remainder = remainder, repeats % remainder
    key_heads = [
        head // heads_per_kv_head - own_heads.start // heads_per_kv_head
        for head in range(own_heads.start, own_heads.stop, repeats)
    ]
    if key_heads == list(range(x.shape[2])):
        return x
    # Slices, not an index: the backward of an index may sum the gradients of repeated heads in any order.
    return torch.cat([x[:, :, head : head + 1] for head in key_heads], 2)
