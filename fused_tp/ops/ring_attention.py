"""Ring attention over a sharded sequence: keys and values are sent from rank to rank; queries are not sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast, overload

import torch
from torch import Tensor

from fused_tp.attention.kernels.base import AttentionKernel, KernelRequest
from fused_tp.attention.kernels.select import select_kernel
from fused_tp.attention.kernels.triton import TRITON_KERNEL
from fused_tp.attention.ring import RING_OP, LocalRing, RingCall, RingSaved, RingSchedule
from fused_tp.attention.ring_plan import RingPlan, ring_plan
from fused_tp.attention.spec import AttentionArguments, ScoreParameters
from fused_tp.backends.schedule import Schedule
from fused_tp.core import settings
from fused_tp.core.group import SINGLE_GROUP_NAME, Group, GroupLike, group_by_name, group_identity, resolve_group
from fused_tp.core.pending import accumulate_dtype, checksum
from fused_tp.core.tracing import span
from fused_tp.ops.arguments import autocast_dtype, check_bool
from fused_tp.ops.arguments import cast as cast_tensors
from fused_tp.ops.attention_arguments import (
    AttentionKeywords,
    OutAndLseKeywords,
    OutKeywords,
    annotate_mismatch,
    build_arguments,
    checked_arguments,
    describe_call,
    with_keywords,
)
from fused_tp.ops.op import AnyGroup, Op, SavedForBackward, ScheduleKey

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fused_tp.backends.shared_memory.shared_memory import SharedMemorySchedule
    from fused_tp.backends.triton.fused_kernel import FusedKernelSchedule


@overload
def ring_attention(q: Tensor, k: Tensor, v: Tensor, *, group: GroupLike, **keywords: Unpack[OutKeywords]) -> Tensor: ...


@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: GroupLike, **keywords: Unpack[OutAndLseKeywords]
) -> tuple[Tensor, Tensor]: ...


@with_keywords(AttentionKeywords)
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: GroupLike,
    return_lse: bool = False,
    **keywords: Unpack[AttentionKeywords],
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v over the whole sequence, sharded over ranks by `layout`.

    Each rank computes the attention of its queries to all keys that they see. Fully masked blocks are not computed, and
    a rank receives only the ranges of keys that it reads. Layout "zigzag" balances causal work over ranks. The softmax
    accumulates over steps in float32 (float64 for float64) and is rounded once. Gradients of k and v are sent and
    summed in float32. All sums have a fixed order, so results do not depend on timing.

    =======  ==========================================================================
    forward  out [B, s, H, Dv] of local q [B, s, H, D] over the k [B, s, Hkv, D] and v [B, s, Hkv, Dv] of all ranks
    dgrad    dq [B, s, H, D]: local sum over steps. dk, dv: summed over ranks, on the rank that holds the keys
    wgrad    d_alibi_slopes, d_sinks [H]: sums over this rank's queries only; sum them over the group
    dbias    none: there is no bias
    =======  ==========================================================================

    Args:
        q: [batch, seq_local, heads, head_dim]; float16, bfloat16, float32 or float64.
        k: [batch, seq_local, kv_heads, head_dim]; heads is a multiple of kv_heads (GQA, MQA): query head h reads key
            head h // (heads / kv_heads).
        v: [batch, seq_local, kv_heads, v_head_dim].
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        causal: True: a token sees itself and all tokens before it in the full sequence. False: it sees all tokens.
        scale: factor of the scores; None: head_dim ** -0.5.
        layout: "zigzag", "contiguous" or, with documents, "balanced", "zigzag_documents" or "contiguous_documents", as
            given to `shard_sequence`.
        window: (left, right): number of keys before and after itself that a token sees; -1 for no limit. transformers'
            sliding_window=n is (n - 1, 0).
        softcap: scores x become softcap * tanh(x / softcap), as in Gemma 2; 0.0 disables it.
        alibi_slopes: [heads]; slope * distance is subtracted from each score. Differentiable.
        sinks: [heads]; score of one additional key per head, whose value is 0, as in gpt-oss. Differentiable.
        dropout_p: probability of dropping an attention weight. The mask depends only on the state of torch's CPU
            generator and the global positions: with equal states it is the same for any number of ranks. Heads count
            from 0 on every rank, so tensor parallel ranks need different states (ParallelAttention sets them).
        cu_seqlens: bounds of packed documents in the full sequence, int32 or int64 [documents + 1]: (0, ..., seq_len).
            A token sees only its own document. Documents may be empty. Pass it on the CPU: reading a GPU tensor
            synchronizes with the GPU.
        return_lse: also return the log-sum-exp of the scores of every row, sinks included. Differentiable.
        seq_len: length of the full sequence. Required if the ranks do not all hold the same number of tokens.
        seq_len_kv: length of the full sequence of keys, if it differs from `seq_len` (cross-attention). Keys are also
            sharded by `layout`. Masks align the last query of each document with the document's last key.
        cu_seqlens_kv: bounds of the documents of the keys, if they differ; the number of documents must be equal.

    Returns:
        out [batch, seq_local, heads, v_head_dim] in the dtype of q, 0 for tokens that see no keys. With `return_lse`,
        (out, lse) with lse [batch, heads, seq_local] in float32 (float64 for float64), -inf for tokens that see no
        keys. Gradients of alibi_slopes and sinks cover this rank's queries only: sum them over the group, like the
        gradients of any replicated parameter.

    Raises:
        TypeError, ValueError: an argument is invalid; raised before anything is sent.
        CollectiveTimeoutError, PeerLostError, RankMismatchError: a peer timed out, was lost, or made another call.
            Over messages, a mismatch is reliably detected only with FUSED_TP_CHECK=1; otherwise the call may time out,
            or return wrong results.

    Example:
        q, k, v = (shard_sequence(t, 1, group=mesh["cp"]) for t in (q, k, v))
        out = ring_attention(q, k, v, group=mesh["cp"], causal=True, seq_len=seq_len)

    Source: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", arXiv:2310.01889; the
    zigzag order of Zhu, "ring-flash-attention", 2024; Dao et al., FlashAttention, arXiv:2205.14135.
    """
    check_bool(return_lse=return_lse)
    out, lse = RING_ATTENTION(q, k, v, *build_arguments(RING_OP, keywords), group)
    return (out, lse) if return_lse else out


def ring_attention_from_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: GroupLike,
    *,
    is_unsharded: bool = False,
    first_head: int = 0,
    **keywords: Any,
) -> Tensor:
    """Return `out` of `ring_attention` for a `q` whose first head has the global index `first_head`.

    With `is_unsharded`, the sequence is not sharded: attention is computed on this rank only.
    """
    arguments, out = build_arguments(RING_OP, keywords, first_head=first_head), q
    if is_unsharded:
        q, k, v, arguments = checked_call_arguments(q, k, v, arguments, 1, 0)
        out, _ = RING_ATTENTION.call_prepared(q, k, v, *arguments, SINGLE_GROUP_NAME)
    else:
        out, _ = RING_ATTENTION(q, k, v, *arguments, group)
    return out


def checked_call_arguments(
    q: Any, k: Any, v: Any, arguments: AttentionArguments, size: int, rank: int
) -> tuple[Tensor, Tensor, Tensor, AttentionArguments]:
    """Cast q, k and v to autocast's dtype and check all arguments."""
    dtype = autocast_dtype(q)
    if dtype is not None:
        q, k, v = cast_tensors(dtype, q, k, v)
    return q, k, v, checked_arguments(arguments, q, k, v, size, rank)


class _Args(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    attention: AttentionArguments
    group: AnyGroup


def _prepare(a: _Args) -> _Args:
    if a.attention.joined:  # Ulysses attention has already checked the arguments, for all ranks that share the sequence
        return a
    _, size, rank = group_identity(a.group)
    return _Args(*checked_call_arguments(*a[:4], size, rank), a.group)


class _BackwardArgs(NamedTuple):
    grad_out: Tensor | None
    grad_lse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    attention: AttentionArguments
    group: AnyGroup


def _key(a: _Args | _BackwardArgs) -> ScheduleKey:
    """Key for dispatch, by the size of the K/V of all ranks (in the dtype of q), which a plain schedule gathers."""
    batch, _, num_heads, head_dim = a.k.shape
    num_columns = num_heads * (head_dim + a.v.shape[3])
    return ScheduleKey(RING_OP, a.q.dtype, a.k.device, a.attention.seq_len_kv * batch, None, num_columns)


def _select_ring(schedule: Schedule, a: _Args | _BackwardArgs) -> RingSchedule:
    """Return the ring for `schedule`. Imports only the module of this ring: a process uses one or two of them."""
    if schedule.name == "local":
        return LocalRing()
    if schedule.name == "one_sided":
        from fused_tp.attention.ring_shared_memory import SharedMemoryRing

        return SharedMemoryRing(cast("SharedMemorySchedule", schedule).transport)
    if schedule.name == "fused_kernel":
        from fused_tp.attention.ring_fused import FusedRing, fused_ring_available_on_all_ranks

        request = KernelRequest(
            a.q.device, a.q.dtype, a.q.shape[3], a.v.shape[3], has_positive_scale=a.attention.scale > 0
        )
        if fused_ring_available_on_all_ranks(group_by_name(a.group), request):
            return FusedRing(cast("FusedKernelSchedule", schedule))
    from fused_tp.attention.ring_messages import AllGatherRing, MessageRing

    return (AllGatherRing if schedule.name == "plain" else MessageRing)(schedule.messages)


# Cache of calls and their descriptions, by all arguments that determine them. Few are kept, because a plan takes some
# bytes per token and step, and every batch of documents needs another plan.
_call_cache: dict[Any, tuple[RingCall, str]] = {}
_MAX_CACHED_CALLS = 16
_get_raw_setting = settings.RAW_ENVIRON.get
_ATTENTION_KEY, _TABLE_KEY, _NARROW_GRADIENTS_KEY = (
    settings.forced_attention.key,
    settings.table_path.key,
    settings.narrow_gradients.key,
)


def _prepare_call(
    schedule: Schedule, a: _Args | _BackwardArgs, has_grad_lse: bool
) -> tuple[RingSchedule, RingCall, str]:
    """Return the ring, its call, and a text of all arguments that must be equal on all ranks."""
    ring = _select_ring(schedule, a)
    call, description = _find_call(ring, group_by_name(a.group), a, has_grad_lse)
    return ring, call, description


def _find_call(ring: RingSchedule, group: Group, a: _Args | _BackwardArgs, has_grad_lse: bool) -> tuple[RingCall, str]:
    """Return the call with the tensors of its score function, and its description; both are cached without tensors."""
    q, arguments = a.q, a.attention
    slopes, sinks, bounds, bounds_kv, seed, causal, window, *other_arguments = arguments
    key = (
        *(ring.name, group.size, group.rank, q.shape, q.dtype, q.device, a.k.shape[2], a.v.shape[3]),
        *(
            type(a),
            has_grad_lse,
            _get_raw_setting(_ATTENTION_KEY),
            _get_raw_setting(_TABLE_KEY),
            _get_raw_setting(_NARROW_GRADIENTS_KEY),
        ),
        *(slopes is None, sinks is None, seed is None, causal, *window, *other_arguments),
        bounds is not None and tuple(bounds.tolist()),
        bounds_kv is not None and tuple(bounds_kv.tolist()),
    )
    cached_call = _call_cache.get(key)
    if cached_call is None:
        cached_call = _make_call(ring, group, a, has_grad_lse)
        if len(_call_cache) >= _MAX_CACHED_CALLS:
            _call_cache.clear()
        _call_cache[key] = cached_call
    call, description = cached_call
    if slopes is not None or sinks is not None or seed is not None:
        call = call._replace(score_parameters=arguments.score_parameters(q.dtype))
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        if seed is not None:
            raise ValueError(
                "dropout_p above 0 is not supported during CUDA graph capture: every replay would drop the same "
                "weights. Pass dropout_p=0.0."
            )
        _captured_plans.add(call.plan)
    return call, description


def call_on_gathered_keys(
    q: Tensor, k: Tensor, v: Tensor, arguments: AttentionArguments, group: GroupLike, *, is_backward: bool
) -> RingCall:
    """Return the call of a rank that has the keys of all ranks: step t reads the keys of rank (rank - t) mod W.

    Args:
        q, k, v: this rank's tensors, shapes as in `ring_attention`.
        arguments: the result of `checked_arguments`.
    """
    resolved_group = resolve_group(group)
    a = _Args(q, k, v, arguments, resolved_group.name)
    backward_args = _BackwardArgs(None, None, q, k, v, q, q, arguments, resolved_group.name)
    return _find_call(LocalRing(), resolved_group, backward_args if is_backward else a, False)[0]


def _make_call(ring: RingSchedule, group: Group, a: _Args | _BackwardArgs, has_grad_lse: bool) -> tuple[RingCall, str]:
    """Return a call without the tensors of its score function, and the description of the call."""
    q, k, v, arguments, mask = a.q, a.k, a.v, a.attention, a.attention.mask()
    kernel: AttentionKernel = TRITON_KERNEL
    if ring.name != "fused_kernel":
        allows_tile_rounding = mask.is_single_tile and (group.size == 1 or accumulate_dtype(q.dtype) == q.dtype)
        is_backward = isinstance(a, _BackwardArgs)
        kernel = select_kernel(
            q,
            v,
            arguments.score_parameters(q.dtype),
            has_grad_lse=has_grad_lse,
            allows_tile_rounding=allows_tile_rounding,
            is_backward=is_backward,
        )
    flags = {name: getattr(arguments, name) is not None for name in _PER_HEAD_ARGUMENTS}
    flags["narrow_gradients"] = settings.narrow_gradients()
    description = f"{describe_call(arguments, mask, **flags)}, ring {ring.name}"
    dims = (q.shape[0], arguments.seq_len, *q.shape[2:], k.shape[2], v.shape[3], checksum(description))
    rank_plan = ring_plan(mask, group.size, arguments.token_layout).rank_plan(group.rank, ring.kv_view)
    return RingCall(rank_plan, kernel, ScoreParameters(arguments.scale, arguments.softcap), dims), description


_PER_HEAD_ARGUMENTS = ("alibi_slopes", "sinks")  # differentiable arguments with one number per head

# A CUDA graph reads the device tensors of its plans at every replay, and there is no notification when a graph is
# deleted. So captured plans are kept forever. They hash by identity, so each is kept once.
_captured_plans: set[RingPlan] = set()


def _to_kernel_inputs(*tensors: Tensor) -> list[Tensor]:
    """Cast all tensors to the dtype of the first, and make their last dim contiguous, which kernels require.

    Internal callers may pass fp32 k and v whose values are representable in the dtype of q. The cast is then exact, and
    the gradients of k and v are returned in fp32, not rounded.
    """
    dtype = tensors[0].dtype
    return [t.to(dtype) if t.stride(-1) == 1 else t.to(dtype).contiguous() for t in tensors]


def _forward(schedule: Schedule, a: _Args) -> tuple[Tensor, Tensor]:
    ring, call, description = _prepare_call(schedule, a, has_grad_lse=False)
    with span(f"ring_attention ({ring.name}, {call.kernel.name})"), annotate_mismatch(RING_OP, call.rank, description):
        return ring.forward(call, *_to_kernel_inputs(a.q, a.k, a.v))


def empty_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate uninitialized (out, lse) for attention with `q` and `v`."""
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulate_dtype(q.dtype))
    return q.new_empty((*q.shape[:3], v.shape[3])), lse


def _backward(s: SavedForBackward[_Args], grad_out: Tensor | None, grad_lse: Tensor | None) -> dict[str, Any]:
    """Compute all gradients, even if not all are needed: needs may differ between ranks, but messages must not."""
    a = s.args
    grads = RING_ATTENTION_BACKWARD(grad_out, grad_lse, *a[:3], *s.outputs, *a.attention, a.group)
    names = ("q", "k", "v", *(name for name in _PER_HEAD_ARGUMENTS if getattr(a.attention, name) is not None))
    return dict(zip(names, grads, strict=True))


def _compute_grads(schedule: Schedule, g: _BackwardArgs) -> list[Tensor]:
    """Return dq, dk, dv, and the gradients of alibi_slopes and sinks if the call has them."""
    ring, call, description = _prepare_call(schedule, g, has_grad_lse=g.grad_lse is not None)
    grad_out = g.out.new_zeros(g.out.shape) if g.grad_out is None else g.grad_out
    q, k, v, grad_out = _to_kernel_inputs(g.q, g.k, g.v, grad_out)
    saved = RingSaved(q, k, v, g.out, g.lse, grad_out, g.grad_lse, g.k.dtype)
    with (
        span(f"ring_attention backward ({ring.name}, {call.kernel.name})"),
        annotate_mismatch(RING_OP, call.rank, description),
    ):
        dq, dk, dv, *per_head_grads = ring.backward(call, saved)
    grads = [dq, dk, dv]
    for name, gradient in zip(_PER_HEAD_ARGUMENTS, per_head_grads, strict=True):
        argument = getattr(g.attention, name)
        if argument is not None and gradient is not None:
            grads.append(gradient.to(argument.dtype))
    return grads


def _grads_fake(g: _BackwardArgs) -> list[Tensor]:
    differentiable_inputs = (g.q, g.k, g.v, g.attention.alibi_slopes, g.attention.sinks)
    return [x.new_empty(x.shape) for x in differentiable_inputs if x is not None]


RING_ATTENTION_BACKWARD: Op[_BackwardArgs] = Op(
    "ring_attention_backward", _BackwardArgs, "Tensor[]", _compute_grads, _grads_fake, key=_key
)


def _ring_attention_fake(a: _Args) -> tuple[Tensor, Tensor]:
    return empty_results(a.q, a.v)


def _ring_attention_example(size: int, q: Tensor, k: Tensor, v: Tensor) -> _Args:
    return _Args(*checked_call_arguments(q, k, v, AttentionArguments(), size, 0), None)


RING_ATTENTION: Op[_Args] = Op(
    "ring_attention",
    _Args,
    "(Tensor, Tensor)",
    _forward,
    _ring_attention_fake,
    key=_key,
    backward_key=_key,
    make_example_args=_ring_attention_example,
    prepare=_prepare,
    saves=("q", "k", "v", "alibi_slopes", "sinks", "cu_seqlens", "cu_seqlens_kv", "seed", 0, 1),
    backward=_backward,
    materialize_grads=False,
)
