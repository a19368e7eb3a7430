"""Attention of new tokens over a sharded KV cache: decoding and chunked prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch
from torch import Tensor

from fused_tp.attention.cache import CacheRows, DenseRows, PagedRows
from fused_tp.attention.decode import (
    NUM_CHECKSUMS,
    CacheCall,
    attend_to_cache,
    attend_with_kernel,
    merge_partial_outputs,
    num_exchanged_elements,
    uses_decode_kernel,
)
from fused_tp.attention.kernels.base import KernelRequest
from fused_tp.attention.kernels.select import select_kernel
from fused_tp.attention.layout import DEFAULT_BLOCK, BlockCyclicLayout
from fused_tp.attention.spec import FILLED_BY_CHECK, ScoreParameters
from fused_tp.backends.schedule import Schedule
from fused_tp.core import settings
from fused_tp.core.group import SINGLE_GROUP_NAME, GroupLike, group_by_name, group_identity
from fused_tp.core.pending import accumulate_dtype, check_equal_checksums, checksum
from fused_tp.ops.arguments import autocast_dtype, cast, check_bool, check_int, check_integers
from fused_tp.ops.attention_arguments import (
    SCORE_KEYWORDS,
    ScoreKeywords,
    ScoreOutAndLseKeywords,
    ScoreOutKeywords,
    check_dtypes,
    check_keywords,
    check_shapes,
    checked_score_arguments,
    with_keywords,
)
from fused_tp.ops.op import AnyGroup, Op, ScheduleKey
from fused_tp.ops.ring_attention import empty_results

if TYPE_CHECKING:
    from typing_extensions import Unpack

_MAX_GATHERED_BYTES = 64 << 20  # maximum bytes per all-gather, at least one query


class DecodeArguments(NamedTuple):
    """Arguments of one call, unchecked or checked. Checked arguments are passed to the torch.library op.

    Attributes:
        window: after the check, [left, right].
        tokens: checksum of the ids of the new tokens, compared between ranks; 0 if the caller does not know the ids.
        world_size: 0 before the check.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cache_seqlens: Tensor
    page_table: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    causal: bool = True
    window: list[int] = FILLED_BY_CHECK
    scale: float = FILLED_BY_CHECK
    softcap: float = 0.0
    block: int = DEFAULT_BLOCK
    tokens: int = 0
    world_size: int = 0
    group: AnyGroup = None

    @property
    def queries_per_gather(self) -> int:
        """Number of queries per all-gather. It is limited because the gathered partial outputs take W times the memory
        of the result."""
        q, v = self.q.shape, self.v.shape
        query_bytes = num_exchanged_elements((q[0], 1, *q[2:]), v[3]) * accumulate_dtype(self.q.dtype).itemsize
        return max(1, _MAX_GATHERED_BYTES // (self.world_size * query_bytes))

    @property
    def visible_window(self) -> tuple[int, int]:
        """Return `window` as (left, right), with right = 0 if `causal`; -1: no limit."""
        left, right = self.window
        return left, 0 if self.causal else right

    def __str__(self) -> str:
        return (
            f"cache_seqlens={self.cache_seqlens.tolist()}, scale={self.scale!r}, window={self.visible_window}, "
            f"softcap={self.softcap!r}, block={self.block}, new={self.q.shape[1]}, "
            f"ALiBi={self.alibi_slopes is not None}, sinks={self.sinks is not None}"
        )


@overload
def context_parallel_decode(
    q: Tensor,
    k_cache_shard: Tensor,
    v_cache_shard: Tensor,
    *,
    group: GroupLike,
    cache_seqlens: Tensor,
    page_table: Tensor | None = None,
    block: int = DEFAULT_BLOCK,
    **keywords: Unpack[ScoreOutKeywords],
) -> Tensor: ...


@overload
def context_parallel_decode(
    q: Tensor,
    k_cache_shard: Tensor,
    v_cache_shard: Tensor,
    *,
    group: GroupLike,
    cache_seqlens: Tensor,
    page_table: Tensor | None = None,
    block: int = DEFAULT_BLOCK,
    **keywords: Unpack[ScoreOutAndLseKeywords],
) -> tuple[Tensor, Tensor]: ...


@with_keywords(ScoreKeywords, DecodeArguments)
def context_parallel_decode(
    q: Tensor,
    k_cache_shard: Tensor,
    v_cache_shard: Tensor,
    *,
    group: GroupLike,
    cache_seqlens: Tensor,
    page_table: Tensor | None = None,
    block: int = DEFAULT_BLOCK,
    return_lse: bool = False,
    **keywords: Unpack[ScoreKeywords],
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v of the newest tokens, replicated over ranks, over a cache sharded over ranks.

    Each rank attends to its cached tokens. One all-gather of the partial (out, lse) combines them, bitwise equal on all
    ranks. Each rank computes about 1 / W of the attention. Supports decoding (one new token), speculative decoding (a
    few) and chunked prefill (many). The cache must already contain the keys and values of the new tokens;
    `fused_tp.nn.ContextKVCache` and `PagedContextKVCache` append them. Backward is not supported.

    The layout is block-cyclic: token i of a sequence is on rank (i // block) % W, in row
    (i // (block * W)) * block + i % block of that sequence. The number of tokens per rank follows from `cache_seqlens`.

    Args:
        q: [batch, new, heads, head_dim], the same on all ranks: the last tokens of each sequence; float16, bfloat16,
            float32 or float64.
        k_cache_shard: [batch, capacity, kv_heads, head_dim] with this rank's tokens in its first rows; with
            `page_table` [pages, page_size, kv_heads, head_dim]. heads is a multiple of kv_heads. Rows after this rank's
            last token are never read.
        v_cache_shard: like k_cache_shard, with v_head_dim.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        cache_seqlens: int32 or int64 [batch]: number of tokens of each sequence over all ranks, new tokens included.
            If a sequence has fewer than `new` tokens, its first queries see no keys. Pass it on the CPU: reading a GPU
            tensor synchronizes with the GPU. A CUDA graph replays with the lengths of its capture.
        causal: True: a new token sees itself and all tokens before it. False: it sees its entire sequence.
        scale, window, softcap, alibi_slopes, sinks: as in `ring_attention`. Keys outside the window are not read.
        page_table: int32 or int64 [batch, max_pages], pages on this rank: row i of a sequence is row i % page_size of
            page page_table[sequence, i // page_size]. Entries after the last page in use are ignored.
        block: block size of the layout that the cache was filled with.
        return_lse: also return the log-sum-exp of the scores of every query, sinks included.

    Returns:
        out [batch, new, heads, v_head_dim] in the dtype of q, 0 for queries that see no keys. With `return_lse`,
        (out, lse) with lse [batch, heads, new] in float32 (float64 for float64), -inf for queries that see no keys.

    Raises:
        TypeError, ValueError: an argument is invalid or requires a gradient; raised before anything is sent.
        CollectiveTimeoutError, PeerLostError, RankMismatchError: a peer timed out, was lost, or passed different
            lengths or keywords (always checked on CPU; on other devices only with FUSED_TP_CHECK=1).

    Example:
        with torch.no_grad():
            out = context_parallel_decode(q, keys, values, group=mesh["cp"], cache_seqlens=lengths)

    Source: Dao et al., "Flash-Decoding for long-context inference", 2023; Yang et al., "Context Parallelism for
    Scalable Million-Token Inference", arXiv:2411.01783; pages: Kwon et al., PagedAttention, arXiv:2309.06180.
    """
    check_keywords("context_parallel_decode", keywords, SCORE_KEYWORDS)
    if type(return_lse) is not bool:  # inlined check: a function call would slow down decoding
        check_bool(return_lse=return_lse)  # type: ignore[unreachable]  # untyped callers may pass any type
    options: dict[str, Any] = {"block": block, "group": group, **keywords}
    out, lse = decode(DecodeArguments(q, k_cache_shard, v_cache_shard, cache_seqlens, page_table, **options))
    return (out, lse) if return_lse else out


def decode(args: DecodeArguments, *, is_unsharded: bool = False) -> tuple[Tensor, Tensor]:
    """Check `args` and return (out, lse). With `is_unsharded`, this rank's cache holds all tokens."""
    if torch.is_grad_enabled():
        for name, x in zip(_DIFFERENTIABLE_NAMES, (*args[:3], args.alibi_slopes, args.sinks), strict=True):
            if getattr(x, "requires_grad", False):
                raise ValueError(
                    f"{name} requires a gradient, but context_parallel_decode does not support backward. Call the op "
                    "under torch.no_grad(), and use ring_attention for training."
                )
    if getattr(args.q, "is_cuda", False) and torch.cuda.is_current_stream_capturing():
        _check_capture(args.cache_seqlens, args.page_table)
    if is_unsharded:
        out, lse = CONTEXT_PARALLEL_DECODE.call_prepared(*_check_arguments(args, 1)._replace(group=SINGLE_GROUP_NAME))
    else:
        out, lse = CONTEXT_PARALLEL_DECODE(*args)
    return out, lse


_DIFFERENTIABLE_NAMES = ("q", "k_cache_shard", "v_cache_shard", "alibi_slopes", "sinks")


def _check_arguments(args: DecodeArguments, world_size: int) -> DecodeArguments:
    if autocast_dtype(args.q) is not None and isinstance(args.k, Tensor):
        # Cast q to the dtype of the cache, not the cache to autocast's dtype, which would copy the cache.
        (q,) = cast(args.k.dtype, args.q)
        args = args._replace(q=q)
    _check_cache(*args[:3], args.page_table)
    lengths, pages = _checked_integers("cache_seqlens", args.cache_seqlens, (args.q.shape[0],)).cpu(), args.page_table
    if pages is not None:
        pages = _checked_integers("page_table", pages, (args.q.shape[0], -1)).cpu()
    check_bool(causal=args.causal)
    check_int("block", args.block, 1, ", the number of consecutive tokens on one rank")
    return checked_score_arguments(args, args.q)._replace(
        cache_seqlens=lengths, page_table=pages, world_size=world_size
    )


def _check_capture(cache_seqlens: Tensor, page_table: Tensor | None) -> None:
    if page_table is not None or not cache_seqlens.is_cpu:
        unsupported_argument = "a page_table" if page_table is not None else f"cache_seqlens on {cache_seqlens.device}"
        raise ValueError(
            f"context_parallel_decode does not support {unsupported_argument} during CUDA graph capture: the host "
            "reads it, and a replay would not read it again. Pass a dense cache, and cache_seqlens on the CPU with the "
            "lengths for all replays."
        )


def _check_cache(q: Any, k: Any, v: Any, page_table: Any) -> None:
    check_dtypes(q, k, v, "_cache_shard")
    if q.ndim != 4 or 0 in (q.shape[0], *q.shape[2:]):
        raise ValueError(f"q has shape {tuple(q.shape)}; it must be [batch, new, heads, head_dim]; only new may be 0.")
    is_paged = page_table is not None
    expected_shape = "[pages, page_size, kv_heads, head_dim]" if is_paged else "[batch, capacity, kv_heads, head_dim]"
    for name, t in (("k_cache_shard", k), ("v_cache_shard", v)):
        if t.ndim != 4 or 0 in t.shape[2:] or (is_paged and t.shape[1] == 0):
            raise ValueError(f"{name} has shape {tuple(t.shape)}; it must be {expected_shape}.")
    check_shapes(q, k, v, "_cache_shard", compares_batch=not is_paged)


def _checked_integers(name: str, value: Any, expected_shape: tuple[int, ...]) -> Tensor:
    check_integers(name, value)
    if value.ndim != len(expected_shape) or value.shape[0] != expected_shape[0]:
        expected_dims = ", ".join("max_pages" if n < 0 else str(n) for n in expected_shape)
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}; it must be [{expected_dims}]; q has batch {expected_shape[0]}."
        )
    tensor: Tensor = value
    return tensor


def _key(a: DecodeArguments) -> ScheduleKey:
    """Key for dispatch, by the size of the first all-gather."""
    num_queries = min(a.q.shape[1], a.queries_per_gather)
    num_elements = num_exchanged_elements((a.q.shape[0], num_queries, *a.q.shape[2:]), a.v.shape[3])
    # Partial outputs are sent in the accumulation dtype.
    return ScheduleKey("all_gather", accumulate_dtype(a.q.dtype), a.q.device, a.world_size, None, num_elements)


def _forward(schedule: Schedule, a: DecodeArguments) -> tuple[Tensor, Tensor]:
    group, q = group_by_name(a.group), a.q
    layout = BlockCyclicLayout(group.size, group.rank, a.block)
    lengths = a.cache_seqlens.tolist()
    if lengths and min(lengths) < 0:
        raise ValueError(f"cache_seqlens is {lengths}; lengths must be at least 0.")
    slopes = None if a.alibi_slopes is None else a.alibi_slopes.to(accumulate_dtype(q.dtype))
    score_parameters = ScoreParameters(a.scale, a.softcap, slopes)
    # Kernels require a contiguous last dim, and support any other strides.
    k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (a.k, a.v))
    keys, values = _cache_rows(k, v, a.page_table, layout, lengths)
    request = KernelRequest(q.device, q.dtype, q.shape[3], v.shape[3], has_positive_scale=a.scale > 0)
    call = CacheCall(
        layout, score_parameters, a.visible_window, select_kernel(q, v, score_parameters), a.page_table is not None
    )
    if uses_decode_kernel(request, q.shape[1]):
        own_output = attend_with_kernel(call, q, lengths, k, v, a.page_table)
    else:
        own_output = attend_to_cache(call, q, lengths, keys, values, v.shape[3])
    outs, lses = [], []
    with schedule.abort_scope("context_parallel_decode"):
        for partial_output in own_output.split(a.queries_per_gather, 1):
            out, lse = merge_partial_outputs(
                _gather_partial_outputs(partial_output, str(a), a.tokens, schedule, group.rank), a.sinks
            )
            outs.append(out.to(q.dtype))
            lses.append(lse)
    return torch.cat(outs, 1), torch.cat(lses, 2).contiguous()


def _cache_rows(
    k: Tensor, v: Tensor, page_table: Tensor | None, layout: BlockCyclicLayout, lengths: Sequence[int]
) -> tuple[CacheRows, CacheRows]:
    row_counts = [layout.count_before(length) for length in lengths]
    if page_table is None:
        if row_counts and max(row_counts) > k.shape[1]:
            seq_index = row_counts.index(max(row_counts))
            raise ValueError(
                f"sequence {seq_index} has {lengths[seq_index]} tokens, {row_counts[seq_index]} of them on rank "
                f"{layout.rank} of {layout.world_size}, but k_cache_shard has a capacity of {k.shape[1]}; increase the "
                "capacity."
            )
        return DenseRows(k), DenseRows(v)
    pages = page_table.tolist()
    for seq_index, num_rows in enumerate(row_counts):
        num_pages = -(-num_rows // k.shape[1])
        if num_pages > page_table.shape[1]:
            raise ValueError(
                f"sequence {seq_index} has {num_rows} tokens on rank {layout.rank} and needs {num_pages} pages of "
                f"{k.shape[1]} tokens, but page_table has {page_table.shape[1]} columns; add columns."
            )
        if any(not 0 <= page < k.shape[0] for page in pages[seq_index][:num_pages]):
            raise ValueError(
                f"page_table has {pages[seq_index][:num_pages]} for sequence {seq_index} on rank {layout.rank}; pages "
                f"must be 0 to {k.shape[0] - 1}."
            )
    return PagedRows(k, pages), PagedRows(v, pages)


def _gather_partial_outputs(
    partial_output: Tensor, description: str, tokens: int, schedule: Schedule, rank: int
) -> Tensor:
    """Gather `partial_output` of all ranks, [W, ...].

    Checksums are sent with it, to check that `description`, a text of the arguments, and `tokens` are equal on all
    ranks.
    """
    checksums = [partial_output.new_full((1,), value) for value in (checksum(description), tokens)]
    message = torch.cat([*checksums, partial_output.reshape(-1)]).unsqueeze(0)
    gathered_messages = schedule.all_gather(message, gather_dim=0, gather_size=None).wait()
    if (
        partial_output.device.type == "cpu" or settings.check_ranks()
    ):  # on a GPU, reading the checksums synchronizes the host
        description_checksums, token_checksums = gathered_messages[:, :NUM_CHECKSUMS].T.tolist()
        difference = "call context_parallel_decode with different lengths or keywords"
        check_equal_checksums(
            description_checksums, difference, f"; rank {rank} passed {description}. Pass the same on all ranks."
        )
        check_equal_checksums(
            token_checksums,
            "continue the same sequences with different tokens",
            ". All ranks must sample the same tokens: call torch.manual_seed(seed) with the same seed on all ranks "
            "before generate().",
        )
    return gathered_messages[:, NUM_CHECKSUMS:].view(len(gathered_messages), *partial_output.shape)


def _example(size: int, q: Tensor, k_cache_shard: Tensor, v_cache_shard: Tensor) -> DecodeArguments:
    _check_cache(q, k_cache_shard, v_cache_shard, None)
    return DecodeArguments(q, k_cache_shard, v_cache_shard, q, world_size=size)


def _fake(a: DecodeArguments) -> tuple[Tensor, Tensor]:
    return empty_results(a.q, a.v)


def _prepare(a: DecodeArguments) -> DecodeArguments:
    return a if a.world_size else _check_arguments(a, group_identity(a.group).size)


CONTEXT_PARALLEL_DECODE: Op[DecodeArguments] = Op(
    "context_parallel_decode",
    DecodeArguments,
    "(Tensor, Tensor)",
    _forward,
    _fake,
    key=_key,
    make_example_args=_example,
    prepare=_prepare,
)
