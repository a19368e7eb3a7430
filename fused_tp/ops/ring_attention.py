"""Attention over a sequence that is cut over the ranks: keys and values pass the queries, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from fused_tp.attention.kernels.base import AttentionKernel, KernelQuery
from fused_tp.attention.kernels.select import kernel_for
from fused_tp.attention.kernels.triton import TRITON
from fused_tp.attention.plan import RingPlan, ring_plan
from fused_tp.attention.ring import OP, LocalRing, Ring, RingCall, RingSaved
from fused_tp.attention.ring_fused import FusedRing, fused_ring_available_in
from fused_tp.attention.ring_messages import AllGatherRing, MessageRing
from fused_tp.attention.ring_shared_memory import SharedMemoryRing
from fused_tp.attention.spec import SCHEMA, AttentionArguments
from fused_tp.ops.arguments import autocast_dtype, cast
from fused_tp.ops.attention_arguments import (
    AttentionKeywords,
    annotate_mismatch,
    checked_arguments,
    checksum,
    describe,
)
from fused_tp.ops.custom_op import CustomOp
from fused_tp.runtime import settings
from fused_tp.runtime.group import GroupLike, group_by_name, group_identity
from fused_tp.runtime.tracing import span
from fused_tp.schedules.fused_kernel import FusedKernel
from fused_tp.schedules.local import Local
from fused_tp.schedules.plain import Plain
from fused_tp.schedules.registry import select_schedule
from fused_tp.schedules.shared_memory import SharedMemory
from fused_tp.transport.base import accumulate_dtype

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: GroupLike,
    return_lse: Literal[False] = False,
    **keywords: Unpack[AttentionKeywords],
) -> Tensor: ...


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: GroupLike,
    return_lse: Literal[True],
    **keywords: Unpack[AttentionKeywords],
) -> tuple[Tensor, Tensor]: ...


def ring_attention(  # noqa: PLR0913  # its public keywords
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
    cu_seqlens_kv: Tensor | None = None,
    return_lse: bool = False,
    seq_len: int | None = None,
    seq_len_kv: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v over the whole sequence, of which each rank holds the tokens that `layout` gives it.

    Every rank computes its queries' share against all keys that they see. What a mask hides is not computed, and of a
    rank's keys another receives those from the first to the last that it reads; "zigzag" makes causal work equal on all
    ranks. The softmax is carried from step to step in float32 (float64 for float64) and rounded once; the gradients of
    k and v travel and add up in float32. All sums have a fixed order, so results never depend on timing.

    Args:
        q: [batch, seq_local, heads, head_dim]; float16, bfloat16, float32 or float64.
        k: [batch, seq_local, kv_heads, head_dim]; heads is a multiple of kv_heads (GQA, MQA): query head h reads key
            head h // (heads / kv_heads).
        v: [batch, seq_local, kv_heads, v_head_dim].
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        causal: each token sees itself and those before it in the whole sequence.
        scale: of the scores; None is head_dim ** -0.5.
        layout: "zigzag", "contiguous" or, with documents, "balanced", as given to `shard_sequence`.
        window: (left, right): how many keys before and after itself a token sees; -1 for no limit. transformers'
            sliding_window=n is (n - 1, 0).
        softcap: scores x become softcap * tanh(x / softcap), as in Gemma 2; 0.0 leaves them.
        alibi_slopes: [heads]; slope * distance is taken off each score. Differentiable.
        sinks: [heads]; score of one more key per head whose value is 0, as in gpt-oss. Differentiable.
        dropout_p: probability that a weight is dropped. Which are, depends on torch's CPU generator and on the place
            in the whole sequence alone: not on the number of ranks, where their generators are in equal states. Heads
            count from 0 on every rank: tensor parallel ranks need unequal states (ParallelAttention sees to it).
        cu_seqlens: packed documents, int32 or int64 [documents + 1]: (0, ..., seq_len), of the whole sequence, on the
            CPU (elsewhere reading it waits for the device). A token sees its own document only. Any lengths, 0 too.
        return_lse: also return the log-sum-exp of the scores of every row, sinks included. Differentiable.
        seq_len: length of the whole sequence, where the ranks do not all hold equally many tokens.
        seq_len_kv: length of the keys' sequence, where it is another one than that of the queries (cross-attention).
            It is cut by `layout`, too. Under masks the last query stands at the last key, of each document.
        cu_seqlens_kv: the keys' documents, where they are others; as many as of the queries.

    Returns:
        out [batch, seq_local, heads, v_head_dim] in the dtype of q, 0 for tokens that see nothing; with `return_lse`,
        (out, lse) with lse [batch, heads, seq_local] in float32 (float64 for float64), -inf for these tokens.
        Gradients of alibi_slopes and sinks are those of this rank's queries: sum them over the group, like those of
        any parameter that all its ranks hold.

    Raises:
        TypeError, ValueError: an argument does not fit; raised before anything is sent.
        CollectiveTimeoutError, PeerLostError, RankMismatchError: the peers did not arrive. Over messages, ranks
            that disagree are found with FUSED_TP_CHECK=1, else at the deadline, or not.

    Example:
        q, k, v = (shard_sequence(t, 1, group=mesh["cp"]) for t in (q, k, v))
        out = ring_attention(q, k, v, group=mesh["cp"], causal=True, seq_len=seq_len)

    Source: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", arXiv:2310.01889; the
    zigzag order of Zhu, "ring-flash-attention", 2024; Dao et al., FlashAttention, arXiv:2205.14135.
    """
    name, size, rank = group_identity(group)
    dtype = autocast_dtype(q)
    if dtype is not None:
        q, k, v = cast(dtype, q, k, v)
    arguments = checked_arguments(
        q,
        k,
        v,
        size,
        rank,
        causal=causal,
        scale=scale,
        layout=layout,
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_p=dropout_p,
        cu_seqlens=cu_seqlens,
        cu_seqlens_kv=cu_seqlens_kv,
        seq_len=seq_len,
        seq_len_kv=seq_len_kv,
    )
    out, lse = RING_ATTENTION(q, k, v, *arguments, name)
    return (out, lse) if return_lse else out


def attention_over(
    q: Tensor, k: Tensor, v: Tensor, group_name: str, size: int, rank: int, **keywords: Any
) -> tuple[Tensor, Tensor]:
    """(out, lse) over the ranks of the group of that name ("": this rank alone); keywords: `checked_arguments`."""
    dtype = autocast_dtype(q)
    if dtype is not None:
        q, k, v = cast(dtype, q, k, v)
    out, lse = RING_ATTENTION(q, k, v, *checked_arguments(q, k, v, size, rank, **keywords), group_name)
    return out, lse


_BY_HEAD = 2  # of the arguments behind q, k and v, those that have a gradient: alibi_slopes and sinks
_TENSORS = 5  # and those that are tensors


def kv_moved(k_shape: Sequence[int], v_shape: Sequence[int], seq_len: int) -> tuple[int, None, int]:
    """(m, k, n) of a call, as dispatch wants them: all ranks' K/V, which is what a plain schedule would gather."""
    batch, _, heads, head_dim = k_shape
    return seq_len * batch, None, heads * (head_dim + v_shape[3])


def _select(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Ring:
    """The ring for one call, by the size of all K/V in the dtype of q.

    Raises:
        ValueError: `FUSED_TP_SCHEDULE` names a schedule that cannot serve this group.
    """
    arguments, group = AttentionArguments(*rest[:-1]), group_by_name(rest[-1])
    schedule = select_schedule(OP, group, q.dtype, k.device, *kv_moved(k.shape, v.shape, arguments.seq_len_kv))
    if isinstance(schedule, Local):
        return LocalRing()
    if isinstance(schedule, SharedMemory):
        return SharedMemoryRing(schedule.transport)
    if isinstance(schedule, FusedKernel):
        query = KernelQuery(q.device, q.dtype, q.shape[3], v.shape[3], positive_scale=arguments.scale > 0)
        if fused_ring_available_in(group, query):
            return FusedRing(schedule)
    return (AllGatherRing if type(schedule) is Plain else MessageRing)(schedule.messages)


def _prepare(q: Tensor, k: Tensor, v: Tensor, rest: tuple[Any, ...], grad_lse: bool) -> tuple[Ring, RingCall, str]:
    """What runs, and in words what all ranks must agree on."""
    arguments, group = AttentionArguments(*rest[:-1]), group_by_name(rest[-1])
    spec, ring = arguments.spec(q.dtype), _select(q, k, v, *rest)
    kernel: AttentionKernel = TRITON
    if not isinstance(ring, FusedRing):
        single = group.size == 1 and spec.mask.is_one_piece
        kernel = kernel_for(q, v, spec.scores, grad_lse=grad_lse, single=single)
    plan = ring_plan(spec.mask, group.size, spec.layout)
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        _check_capture(arguments.seed)
        _captured.add(plan)
    given = {"alibi_slopes": arguments.alibi_slopes is not None, "sinks": arguments.sinks is not None}
    given["narrow_gradients"] = settings.narrow_gradients()
    words = f"{describe(arguments, spec.mask, **given)}, ring {ring.name}"
    dims = (q.shape[0], arguments.seq_len, *q.shape[2:], k.shape[2], v.shape[3], checksum(words))
    return ring, RingCall(plan, group.rank, kernel, spec.scores, dims), words


# Graphs read what a plan has on the device, and nothing tells when a graph goes: plans that were captured are kept for
# good, once each (they hash by identity).
_captured: set[RingPlan] = set()


def _check_capture(seed: Tensor | None) -> None:
    if seed is not None:
        raise ValueError(
            "dropout_p is above 0 while a CUDA graph is captured, which would drop the same weights at every replay; "
            "capture with dropout_p=0.0."
        )


def _for_kernels(*tensors: Tensor) -> list[Tensor]:
    """Any strides but that of the last dim, and one dtype: that of the first.

    Callers inside of fused_tp may give k and v, rounded to the dtype of q, in fp32: so their gradients are not rounded.
    """
    dtype = tensors[0].dtype
    return [t.to(dtype) if t.stride(-1) == 1 else t.to(dtype).contiguous() for t in tensors]


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    ring, call, words = _prepare(q, k, v, rest, grad_lse=False)
    with span(f"ring_attention ({ring.name}, {call.kernel.name})"), annotate_mismatch(OP, call.rank, words):
        return ring.forward(call, *_for_kernels(q, k, v))


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulate_dtype(q.dtype))
    return q.new_empty((*q.shape[:3], v.shape[3])), lse


def _grad_input(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
) -> list[Tensor]:
    ring, call, words = _prepare(q, k, v, rest, grad_lse=grad_lse is not None)
    grad_out = out.new_zeros(out.shape) if grad_out is None else grad_out
    kv_grad_dtype = k.dtype
    q, k, v, grad_out = _for_kernels(q, k, v, grad_out)
    saved = RingSaved(q, k, v, out, lse, grad_out, grad_lse, kv_grad_dtype)
    with span(f"ring_attention backward ({ring.name}, {call.kernel.name})"), annotate_mismatch(OP, call.rank, words):
        dq, dk, dv, *by_head = ring.backward(call, saved)
    found = [dq, dk, dv]
    for given, gradient in zip(rest[:_BY_HEAD], by_head, strict=True):
        if given is not None and gradient is not None:
            found.append(gradient.to(given.dtype))
    return found


def _select_backward(grad_out: Tensor, grad_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Ring:
    return _select(q, k, v, *rest[2:])  # behind out and lse


def _grad_input_fake(grad_out: Tensor | None, grad_lse: Tensor | None, *saved: Any) -> list[Tensor]:
    q, k, v, _, _, *rest = saved
    return [x.new_empty(x.shape) for x in (q, k, v, *rest[:_BY_HEAD]) if x is not None]


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    q, k, v, *rest = inputs
    ctx.rest = rest[_TENSORS:]
    ctx.save_for_backward(q, k, v, *output, *rest[:_TENSORS])


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    # Computed together and for all: which of them need a gradient may differ between ranks, the messages may not.
    found = iter(RING_ATTENTION_BACKWARD(grad_out, grad_lse, *saved, *ctx.rest))
    # In the order of the op's arguments; slopes and sinks have one where they were given.
    grads = [None if x is None else next(found) for x in (*saved[:3], *saved[5 : 5 + _BY_HEAD])]
    return (*grads, *[None] * (_TENSORS - _BY_HEAD + len(ctx.rest)))


RING_ATTENTION_BACKWARD = CustomOp(
    "ring_attention_backward(Tensor? grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{SCHEMA}, str group) -> Tensor[]",
    _grad_input,
    _grad_input_fake,
    schedule=_select_backward,
)

RING_ATTENTION = CustomOp(
    f"ring_attention(Tensor q, Tensor k, Tensor v, {SCHEMA}, str group) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    _setup_context,
    _backward,
    _select,
)
