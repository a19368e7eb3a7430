"""Self-attention with heads sharded over a tensor parallel mesh (Megatron-LM, https://arxiv.org/abs/1909.08053),
grouped query heads (https://arxiv.org/abs/2305.13245) and, over a second group, sharded sequences (ring attention)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fused_tp.attention.layout import check_layout, local_length
from fused_tp.core.group import SINGLE_NAME, GroupLike, group_identity, resolve_group
from fused_tp.nn.kv_cache import ContextCache, KVCache, PagedContextKVCache
from fused_tp.nn.linear import (
    ColumnParallelLinear,
    RepeatedColumnLinear,
    RowParallelLinear,
    check_nothing_dropped,
    check_positive,
    column_outputs,
    linear_of,
)
from fused_tp.nn.local_attention import attention_with_mask, local_attention
from fused_tp.nn.norm import replicate_own, sequence_parallel_
from fused_tp.nn.sharding import Memo, check_mesh, empty_parameter, local, shard_parameter
from fused_tp.ops.arguments import check_bool
from fused_tp.ops.attention_arguments import checked_softcap, checked_window, on_host
from fused_tp.ops.collectives import copy_to_group
from fused_tp.ops.context_parallel_decode import DecodeArguments, decode
from fused_tp.ops.ring_attention import attention_over
from fused_tp.ops.sequence import SEQUENCE_POSITIONS, sequence_positions, shard_sequence, unshard_sequence

Rope = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class RotaryEmbedding:
    """Rotates q and k by their positions, in fp32: feature i is paired with i + head_dim / 2, as in Llama.

    Called as rope(q [batch, seq, heads, head_dim], k, positions [seq] or [batch, seq]) -> (q, k) of the same dtypes.

    Args:
        head_dim: an even number.
        theta: the base of the frequencies theta ** (-2 i / head_dim), in radians per token.

    Raises:
        ValueError: an odd head_dim or a theta that is not positive.

    Example:
        >>> attention = ParallelAttention(512, 8, rope=RotaryEmbedding(64), causal=True, mesh=mesh)
    """

    def __init__(self, head_dim: int, theta: float = 10_000.0) -> None:
        check_positive("head_dim", head_dim)
        if head_dim % 2:
            raise ValueError(f"head_dim must be even, features are turned in pairs; got {head_dim}.")
        if not theta > 0:
            raise ValueError(f"theta must be positive, got {theta}.")
        self.head_dim = head_dim
        self.theta = theta

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        halves = torch.arange(0, self.head_dim, 2, device=q.device, dtype=torch.float32) / self.head_dim
        angles = positions.to(torch.float32).unsqueeze(-1) * self.theta**-halves
        # [seq, head_dim / 2] -> adds a dim for the heads, which share the angles.
        cos, sin = angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)
        return _turn(q, cos, sin), _turn(k, cos, sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


@dataclass(frozen=True)
class _ForwardArguments:
    """The keywords of one `ParallelAttention.forward`."""

    positions: Tensor | None
    attention_mask: Tensor | None
    kv_cache: KVCache | ContextCache | None
    seq_len: int | None
    cu_seqlens: Tensor | None
    new_lengths: Sequence[int] | Tensor | None
    sharded_chunk: bool

    @property
    def context(self) -> ContextCache | None:
        return self.kv_cache if isinstance(self.kv_cache, ContextCache) else None


class ParallelAttention(nn.Module):
    """Multi-head self-attention with heads sharded over `mesh`.

    Shapes on a rank: x [batch, seq, hidden_size] -> the same; with `sequence_parallel` x and the result are this rank's
    shard of the sequence (dim 1); with `cp_group` they are the shard that `shard_sequence(..., group=cp_group)`
    returns, which `sequence_parallel` shards again. Query, key and value projections share one gather. Submodules
    q_proj, k_proj, v_proj, o_proj (and q_norm, k_norm) are named as in Llama and Qwen3.

    Args:
        hidden_size, num_heads: sizes of the full layer. num_heads must be a multiple of the number of ranks W.
        num_kv_heads: heads of keys and values, default num_heads; a divisor of num_heads. Fewer than W are repeated
            over neighbouring ranks when W is a multiple of them.
        head_dim: default hidden_size / num_heads.
        bias, out_bias: bias in the q, k, v projections, and in o_proj (default: as bias).
        qk_norm: RMSNorm over head_dim on q and k, before `rope`; `norm_eps` is its epsilon.
        rope: called as rope(q, k, positions) -> (q, k) with q [batch, seq, heads / W, head_dim]; see RotaryEmbedding.
            Parameters of a module become replicated DTensors, with a complete gradient on every rank.
        causal: a token sees itself and those before it.
        scale: factor of the scores, default head_dim ** -0.5.
        dropout: probability of dropping an attention weight while training. With equal random states on all ranks
            (torch's CPU generator), dropout is identical for any number of ranks of `mesh` and of cp_group.
        window, softcap: as in ring_attention.
        sinks: one more key per head with value 0 and a learned score, as in gpt-oss: the parameter `sinks` [num_heads],
            sharded like the heads, initially 0.
        alibi_slopes: [num_heads], not learned; slope * distance is subtracted from each score.
        cp_group: ranks over which the sequence is sharded; attention is then ring_attention in `cp_layout` ("zigzag",
            "contiguous", or "balanced" for packed documents). Gradients of the parameters are terms from this rank's
            tokens: reduce them over cp_group as over data parallel ranks.
        mesh, sequence_parallel, device, dtype: as in ColumnParallelLinear.

    Raises:
        ValueError: head counts that W does not divide (the message names those that work); a cp_group that contains
            other ranks of `mesh` than this one; see forward for others.
        TypeError: as the linear layers.

    Example:
        >>> attention = ParallelAttention(512, 8, num_kv_heads=2, causal=True, rope=RotaryEmbedding(64), mesh=mesh)
        >>> y = attention(x)                # [batch, seq, 512]
    """

    def __init__(  # noqa: PLR0913  # its public keywords
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        mesh: DeviceMesh,
        bias: bool = True,
        out_bias: bool | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        rope: Rope | None = None,
        causal: bool = False,
        scale: float | None = None,
        dropout: float = 0.0,
        window: tuple[int, int] | None = None,
        softcap: float = 0.0,
        sinks: bool = False,
        alibi_slopes: Tensor | Sequence[float] | None = None,
        sequence_parallel: bool = False,
        cp_group: GroupLike = None,
        cp_layout: str = "zigzag",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive("hidden_size", hidden_size)
        check_positive("num_heads", num_heads)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_positive("num_kv_heads", num_kv_heads)
        if head_dim is None:
            if hidden_size % num_heads:
                raise ValueError(f"hidden_size {hidden_size} is no multiple of num_heads {num_heads}; pass head_dim.")
            head_dim = hidden_size // num_heads
        check_positive("head_dim", head_dim)
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}.")
        check_bool(qk_norm=qk_norm, causal=causal, sinks=sinks)
        check_layout(cp_layout, documents=True)
        checked_window(window)
        world_size = check_mesh(mesh).size()
        check_heads(num_heads, num_kv_heads, world_size)
        if cp_group is not None:
            _check_apart("cp_group", cp_group, mesh)
        self.mesh = mesh
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        for part in rope.modules() if isinstance(rope, nn.Module) else ():
            replicate_own(part, mesh, None, sums=lambda: True)  # learned from this rank's heads only
        self.rope = rope
        self.causal = causal
        self.scale = scale
        self.dropout = dropout
        self.window = window
        self.softcap = checked_softcap(softcap)
        # Not a buffer: buffers are rounded by model.bfloat16(), and lost on the meta device.
        self.alibi_slopes = _slopes(alibi_slopes, num_heads)
        self.sequence_parallel = sequence_parallel
        self.cp_group = cp_group
        self.cp_layout = cp_layout
        options: dict[str, Any] = {"mesh": mesh, "sequence_parallel": sequence_parallel, "sequence_dim": 1}
        options |= {"device": device, "dtype": dtype}
        width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
        out_bias = bias if out_bias is None else out_bias
        self.q_proj = ColumnParallelLinear(hidden_size, width, bias, **options)
        kind: Any = ColumnParallelLinear
        if num_kv_heads % world_size:
            kind = partial(RepeatedColumnLinear, parts=num_kv_heads)
        self.k_proj: ColumnParallelLinear = kind(hidden_size, kv_width, bias, **options)
        self.v_proj: ColumnParallelLinear = kind(hidden_size, kv_width, bias, **options)
        self.o_proj = RowParallelLinear(width, hidden_size, out_bias, **options)
        self.sinks: nn.Parameter | None = None
        if sinks:
            self.sinks = empty_parameter((num_heads,), mesh, Shard(0), device=device, dtype=dtype)
            self.reset_parameters()
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if qk_norm:
            where = device or mesh.device_type
            # A rank sees its own heads only, so the weights' gradients are terms of a sum over ranks.
            self.q_norm = sequence_parallel_(nn.RMSNorm(head_dim, norm_eps, device=where, dtype=dtype), mesh)
            self.k_norm = sequence_parallel_(nn.RMSNorm(head_dim, norm_eps, device=where, dtype=dtype), mesh)

    def reset_parameters(self) -> None:
        """Set `sinks` to 0; projections and norms have a `reset_parameters` of their own."""
        if self.sinks is not None and not self.sinks.is_meta:
            nn.init.zeros_(local(self.sinks.detach()))

    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        *,
        mesh: DeviceMesh,
        rope: Rope | None = None,
        causal: bool | None = None,
        num_heads: int | None = None,
        sequence_parallel: bool = False,
        cp_group: GroupLike = None,
        cp_layout: str = "zigzag",
        memo: Memo | None = None,
    ) -> ParallelAttention:
        """Build the attention over `mesh` from an nn.MultiheadAttention or a module with nn.Linear layers q_proj,
        k_proj, v_proj and o_proj (Llama, Qwen; q_norm and k_norm over head_dim are converted too). Nothing is sent.

        The packed in_proj_weight of nn.MultiheadAttention becomes q_proj, k_proj and v_proj. `num_heads` defaults to
        the module's num_heads or its config's num_attention_heads, or follows from its head_dim; `causal` to its
        is_causal, else False. Rotary embeddings are outside such modules: pass `rope`, or there is none. A
        sliding_window, an attn_logit_softcapping (Gemma 2) and sinks (gpt-oss) are converted too.

        Raises:
            TypeError: layers that are not nn.Linear.
            ValueError: an nn.MultiheadAttention that is not batch_first or has other key sizes, bias_k or
                add_zero_attn; missing layers or head counts; a config with rotary embeddings, but no `rope`.

        Example:
            >>> block.attention = ParallelAttention.from_module(block.attention, mesh=mesh["tp"], rope=rope)
        """
        shared: dict[str, Any] = {"mesh": mesh, "rope": rope, "sequence_parallel": sequence_parallel}
        shared |= {"cp_group": cp_group, "cp_layout": cp_layout, "causal": causal, "num_heads": num_heads}
        if isinstance(module, nn.MultiheadAttention):
            return _from_multihead(cls, module, memo, shared)
        return _from_projections(cls, module, memo, shared)

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        attention_mask: Tensor | None = None,
        kv_cache: KVCache | ContextCache | None = None,
        seq_len: int | None = None,
        cu_seqlens: Tensor | None = None,
        new_lengths: Sequence[int] | Tensor | None = None,
        sharded_chunk: bool = False,
    ) -> Tensor:
        """Attention of x to itself, and to the tokens in `kv_cache`.

        Args:
            positions: positions of the tokens, [seq] or [batch, seq], for `rope`. Default: continued from the cache's
                length; with cp_group this rank's positions in the sequence; with cu_seqlens positions within each
                document. Under sequence_parallel those of the whole sequence.
            attention_mask: bool (True: may attend) or floating point (added to the scores); [batch, kv_len],
                [batch, seq, kv_len] or [batch, 1 or num_heads, seq, kv_len], and dims of 1 are broadcast. The
                gradient of a learned mask is complete on every rank.
            kv_cache: the cache to which keys and values are appended; for generation under no_grad. A ContextKVCache,
                or a batch of a PagedContextKVCache, is sharded over its own group, which must be cp_group if that is
                given: x and the result are then all new tokens, the same on all ranks of the group.
            seq_len: length of the whole sequence, needed under sequence_parallel or with cp_group if ranks hold
                unequal shards.
            cu_seqlens: packed documents, int32 or int64 [documents + 1]: (0, ..., seq_len) of the whole sequence, best
                on the CPU. A token sees its own document only.
            new_lengths: with a ContextKVCache, the number of real tokens at the end of each sequence of x.
            sharded_chunk: with a ContextKVCache over cp_group, x and the result are this rank's shard of the new
                tokens, as from `shard_sequence`: for long prompts, whose projections the ranks then share.

        Raises:
            ValueError: x that is not 3-D or of other width; a mask that does not fit; arguments that exclude each
                other (the message names alternatives).
            TypeError: a cache of another library; a mask of integers; cu_seqlens that is not a tensor of integers.
        """
        call = _ForwardArguments(positions, attention_mask, kv_cache, seq_len, cu_seqlens, new_lengths, sharded_chunk)
        self._check_input(x, positions, attention_mask)
        self._check_together(call)
        sharded = self.cp_group is not None and (call.context is None or sharded_chunk)
        gather_size = self._cp_length(seq_len) if sharded else seq_len
        q, k, v = (
            y.unflatten(-1, (-1, self.head_dim))
            for y in column_outputs([self.q_proj, self.k_proj, self.v_proj], x, gather_size)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            if positions is None:
                positions = self._positions(q, call, sharded)
            if positions.ndim not in (1, 2) or positions.shape[-1] != q.shape[1]:
                raise ValueError(
                    f"positions has shape {tuple(positions.shape)}; it must be [seq] or [batch, seq] with seq = "
                    f"{q.shape[1]}."
                )
            q, k = self.rope(q, k, positions)
        if call.context is not None:
            out = self._attend_cached(q, k, v, call.context, call)
        elif self.cp_group is not None:
            out = self._attend_over(q, k, v, call)
        else:
            out = self._attend_here(q, k, v, call)
        return cast(Tensor, self.o_proj(out.flatten(-2)))

    def _attend_cached(self, q: Tensor, k: Tensor, v: Tensor, cache: ContextCache, call: _ForwardArguments) -> Tensor:
        if not call.sharded_chunk:
            cache.append(k, v, call.new_lengths)
            return cast(Tensor, cache.attend(q, **self._scores(q)))
        cache.append_sharded(k, v, layout=self.cp_layout, seq_len=call.seq_len)
        # Each rank attends with all queries to the keys that it holds.
        how: dict[str, Any] = {"group": self.cp_group, "layout": self.cp_layout}
        q = unshard_sequence(q, 1, seq_len=call.seq_len, **how)
        return shard_sequence(cache.attend(q, **self._scores(q)), 1, **how)

    def _attend_over(self, q: Tensor, k: Tensor, v: Tensor, call: _ForwardArguments) -> Tensor:
        """Attention over `cp_group`, or on this rank alone without one."""
        return attention_over(
            q,
            k,
            v,
            self.cp_group,
            alone=self.cp_group is None,
            layout="contiguous" if self.cp_group is None else self.cp_layout,
            dropout_p=self._dropout_p,
            cu_seqlens=call.cu_seqlens,
            seq_len=call.seq_len,
            first_head=self._first_head(),
            **self._scores(q),
        )

    def _attend_here(self, q: Tensor, k: Tensor, v: Tensor, call: _ForwardArguments) -> Tensor:
        cache = cast("KVCache | None", call.kv_cache)
        if cache is not None:
            k, v = cache.append(k, v)
        mask = self._local_mask(call.attention_mask, q, k)
        if self._dropout_p == 0 and call.cu_seqlens is None and self._is_plain:
            return local_attention(q, k, v, mask=mask, causal=self.causal, scale=self.scale)
        if cache is not None and mask is None and self._dropout_p > 0:
            mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=q.device)
        how = self._scores(q)
        if mask is not None:
            return attention_with_mask(q, k, v, mask, dropout_p=self._dropout_p, first_head=self._first_head(), **how)
        if cache is not None:
            lengths = torch.full((q.shape[0],), k.shape[1], dtype=torch.int64, device="cpu")
            return decode(DecodeArguments(q, k, v, lengths, **how), alone=True)[0]
        return self._attend_over(q, k, v, call)

    @property
    def _dropout_p(self) -> float:
        return self.dropout if self.training else 0.0

    @property
    def _is_plain(self) -> bool:
        return self.window is None and not self.softcap and self.sinks is None and self.alibi_slopes is None

    def _scores(self, q: Tensor) -> dict[str, Any]:
        """Keywords that all attention functions share, for this rank's heads."""
        first = self._first_head()
        slopes = None if self.alibi_slopes is None else self.alibi_slopes[first : first + q.shape[2]]
        return {
            "causal": self.causal,
            "scale": self.scale,
            "window": self.window,
            "softcap": self.softcap,
            "alibi_slopes": None if slopes is None else torch.tensor(slopes, dtype=torch.float64, device=q.device),
            "sinks": local(self.sinks),
        }

    def extra_repr(self) -> str:
        return (
            f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, causal={self.causal}, "
            f"dropout={self.dropout}"
        )

    def _first_head(self) -> int:
        return self.mesh.get_local_rank() * (self.num_heads // self.mesh.size())

    def _cp_length(self, seq_len: int | None) -> int | None:
        """Number of tokens that the tensor parallel ranks hold together; None if `seq_len` is."""
        if seq_len is None:
            return None
        _, size, rank = group_identity(self.cp_group)
        return local_length(seq_len, size, rank, self.cp_layout)

    def _positions(self, q: Tensor, call: _ForwardArguments, sharded: bool) -> Tensor:
        seen = 0 if call.kv_cache is None else call.kv_cache.length
        if sharded:
            total = q.shape[1] * group_identity(self.cp_group)[1] if call.seq_len is None else call.seq_len
            within = call.cu_seqlens is not None
            how: dict[str, Any] = {"group": self.cp_group, "layout": self.cp_layout, "device": q.device}
            return seen + sequence_positions(total, cu_seqlens=call.cu_seqlens, within_documents=within, **how)
        if call.cu_seqlens is not None:
            bounds = on_host("cu_seqlens", call.cu_seqlens)
            return SEQUENCE_POSITIONS.named(bounds, q.shape[1], "contiguous", True, SINGLE_NAME).to(q.device)
        if call.context is not None:
            return call.context.positions(q.shape[1], call.new_lengths).to(q.device)
        return torch.arange(seen, seen + q.shape[1], device=q.device)

    def _check_together(self, call: _ForwardArguments) -> None:
        """Raise ValueError for arguments that exclude each other, TypeError for a cache of an unsupported type."""
        cache, mask, over_cp, context = call.kv_cache, call.attention_mask, self.cp_group is not None, call.context
        if isinstance(cache, PagedContextKVCache):
            raise TypeError(
                "kv_cache is a PagedContextKVCache, which holds the sequences of many batches; pass those of x, "
                "kv_cache.batch([sequence, ...])."
            )
        if cache is not None and not isinstance(cache, (KVCache, ContextCache)):
            raise TypeError(
                f"kv_cache is a {type(cache).__name__}; ParallelAttention takes KVCache and ContextKVCache of "
                "fused_tp.nn, and batches of a PagedContextKVCache."
            )
        other = "kv_cache" if cache is not None else "attention_mask"
        for wrong, sentence in (
            (
                over_cp and mask is not None,
                "attention_mask cannot be used with cp_group, where each rank sees a part of the keys only; packed "
                "documents are cu_seqlens, and sequences of different lengths before a ContextKVCache new_lengths.",
            ),
            (
                over_cp and isinstance(cache, KVCache),
                "a KVCache holds all tokens on one rank; with cp_group pass a ContextKVCache(cp_group), which shards "
                "them over its ranks.",
            ),
            (
                over_cp and context is not None and group_identity(context.group) != group_identity(self.cp_group),
                "the cache is sharded over another group than cp_group; make it with this cp_group.",
            ),
            (
                context is not None and mask is not None,
                "attention_mask cannot be used with a ContextKVCache; pad sequences of different lengths on the left "
                "and pass new_lengths, the sums of the rows of the mask.",
            ),
            (
                context is not None and self._dropout_p > 0,
                "dropout is for training, which has no ContextKVCache; call eval() to generate.",
            ),
            (
                context is None and call.new_lengths is not None,
                "new_lengths is for a ContextKVCache; without one pass an attention_mask.",
            ),
            (
                call.sharded_chunk and (context is None or not over_cp),
                "sharded_chunk is for a ContextKVCache over cp_group; without one x is sharded already.",
            ),
            (
                call.sharded_chunk and call.new_lengths is not None,
                "sharded_chunk takes sequences of one length; with new_lengths pass all tokens on all ranks.",
            ),
            (
                call.cu_seqlens is not None and (cache is not None or mask is not None),
                f"cu_seqlens and {other} cannot be combined; packed documents need no {other}.",
            ),
        ):
            if wrong:
                raise ValueError(sentence)
        if not over_cp and context is not None:
            _check_apart("the group of the cache", context.group, self.mesh)

    def _check_input(self, x: Tensor, positions: Tensor | None, attention_mask: Tensor | None) -> None:
        if not isinstance(x, Tensor) or x.is_nested or x.ndim != 3 or x.shape[-1] != self.hidden_size:
            given = tuple(x.shape) if isinstance(x, Tensor) and not x.is_nested else type(x).__name__
            raise ValueError(f"x must be a Tensor [batch, seq, {self.hidden_size}], got {given}.")
        if positions is not None and self.rope is None:
            raise ValueError("positions were given, but this attention has no rope that would use them.")
        if attention_mask is not None:
            if attention_mask.dtype != torch.bool and not attention_mask.is_floating_point():
                raise TypeError(
                    "attention_mask must be bool (True: may attend) or floating point (added), not "
                    f"{attention_mask.dtype}; a mask of ones and zeros is mask.bool()."
                )
            if attention_mask.ndim not in (2, 3, 4):
                raise ValueError(
                    f"attention_mask has shape {tuple(attention_mask.shape)}; it must be [batch, kv_len], "
                    "[batch, seq, kv_len] or [batch, heads, seq, kv_len]."
                )

    def _local_mask(self, mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """Convert `mask` to [batch, this rank's heads, q_len, kv_len]; dims of 1 are kept."""
        if mask is None:
            return None
        if mask.ndim == 2:
            mask = mask[:, None, None, :]
        elif mask.ndim == 3:
            mask = mask[:, None]
        full = (q.shape[0], self.num_heads, q.shape[1], k.shape[1])
        if any(given not in (1, wanted) for given, wanted in zip(mask.shape, full, strict=True)):
            raise ValueError(f"attention_mask broadcast to 4 dims is {tuple(mask.shape)}; that does not fit {full}.")
        if mask.requires_grad:  # a learned bias: this rank has its heads' term of the gradient
            mask = copy_to_group(mask, group=self.mesh)
        return mask.narrow(1, self._first_head(), q.shape[2]) if mask.shape[1] > 1 else mask


def _check_apart(what: str, group: GroupLike, mesh: DeviceMesh) -> None:
    """Raise ValueError if ranks of `mesh`, which hold different heads, would also hold different tokens."""
    shared = sorted({*resolve_group(group).ranks} & {*resolve_group(mesh).ranks})
    if len(shared) > 1:
        raise ValueError(
            f"{what} shares the ranks {shared} with the tensor parallel mesh, whose ranks hold different heads; tokens "
            "can be sharded only over ranks that hold the same heads. Use another dim of one mesh for it."
        )


def _slopes(given: Tensor | Sequence[float] | None, num_heads: int) -> tuple[float, ...] | None:
    if given is None:
        return None
    slopes = tuple(float(slope) for slope in given)
    if len(slopes) != num_heads:
        raise ValueError(f"alibi_slopes has {len(slopes)} numbers; it must have {num_heads}, one for each head.")
    return slopes


def check_heads(num_heads: int, num_kv_heads: int, world_size: int) -> None:
    """Raise ValueError, naming the group sizes that work, if heads cannot be sharded over `world_size` ranks."""
    if num_heads % num_kv_heads:
        divisors = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise ValueError(f"num_kv_heads is {num_kv_heads}; it must divide num_heads {num_heads}: one of {divisors}.")

    def works(size: int) -> bool:
        return num_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0)

    if not works(world_size):
        sizes = [size for size in range(1, num_heads + 1) if works(size)]
        raise ValueError(
            f"{num_heads} heads with {num_kv_heads} key/value heads cannot be sharded over {world_size} ranks: every "
            "rank needs equally many heads, and key/value heads of its own or one shared by whole ranks. Group sizes "
            f"that work: {sizes}."
        )


def _from_multihead(
    cls: type[ParallelAttention], module: nn.MultiheadAttention, memo: Memo | None, shared: dict[str, Any]
) -> ParallelAttention:
    if shared["num_heads"] not in (None, module.num_heads):
        raise ValueError(f"num_heads is {shared['num_heads']}, but the nn.MultiheadAttention has {module.num_heads}.")
    for wrong, what in (
        (not module.batch_first, "batch_first=False; ParallelAttention takes [batch, seq, hidden]"),
        (
            not module._qkv_same_embed_dim,
            f"kdim={module.kdim} and vdim={module.vdim}; ParallelAttention is self-attention, where both are "
            f"embed_dim={module.embed_dim}",
        ),
        (module.bias_k is not None, "bias_k (add_bias_kv=True), which ParallelAttention lacks"),
        (module.add_zero_attn, "add_zero_attn=True, which ParallelAttention lacks"),
        (
            memo is not None and module.in_proj_weight in memo,
            "a packed in_proj_weight that it shares with one converted before, and the projections made of it cannot "
            "be kept tied; give it weights of its own",
        ),
    ):
        if wrong:
            raise ValueError(f"the nn.MultiheadAttention has {what}.")
    weights = module.in_proj_weight.chunk(3)
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    projections = [_plain_linear(w, b) for w, b in zip(weights, biases, strict=True)]
    shared |= {"num_heads": module.num_heads, "causal": bool(shared["causal"])}
    made = _around(cls, [*projections, module.out_proj], memo, dropout=module.dropout, **shared)
    if memo is not None:
        memo[module.in_proj_weight] = made.q_proj.weight
    return made.train(module.training)


def _plain_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """An nn.Linear around existing tensors, without memory of its own."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=bias.requires_grad)
    return linear


def _from_projections(
    cls: type[ParallelAttention], module: nn.Module, memo: Memo | None, shared: dict[str, Any]
) -> ParallelAttention:
    kind = type(module).__name__
    projections = []
    for name in PROJECTIONS:
        if getattr(module, name, None) is None:
            raise ValueError(f"{kind} has no {name}; ParallelAttention knows nn.MultiheadAttention and q/k/v/o_proj.")
        projections.append(linear_of(module, name))
    q_proj, k_proj, v_proj, _ = projections
    config = getattr(module, "config", None)
    if shared["rope"] is None and any(
        hasattr(config, name) for name in ("rope_theta", "rope_parameters", "rope_scaling")
    ):
        raise ValueError(
            f"the config of {kind} has rotary embeddings, which live outside the module; pass rope=, such as "
            "RotaryEmbedding(head_dim, theta)."
        )
    width, head_dim, num_heads = q_proj.out_features, getattr(module, "head_dim", None), shared["num_heads"]
    if num_heads is None:
        num_heads = getattr(module, "num_heads", None) or getattr(config, "num_attention_heads", None)
    if num_heads is None and head_dim is not None:
        num_heads = width // head_dim
    if num_heads is None or width % num_heads:
        raise ValueError(
            f"the number of heads of {kind} is not known, or does not divide q_proj's {width} features (found "
            f"{num_heads}); pass num_heads."
        )
    head_dim = width // num_heads
    biases = [layer.bias is not None for layer in (q_proj, k_proj, v_proj)]
    if len(set(biases)) > 1:
        raise ValueError(f"q_proj, k_proj, v_proj of {kind} must all have a bias or none; found {biases}.")
    q_norm, k_norm = (getattr(module, name, None) for name in ("q_norm", "k_norm"))
    for norm in (q_norm, k_norm):
        weight = getattr(norm, "weight", None)
        if norm is not None and (weight is None or tuple(weight.shape) != (head_dim,)):
            raise ValueError(f"q_norm and k_norm of {kind} must be norms over head_dim {head_dim} with a weight.")
    if (q_norm is None) != (k_norm is None):
        raise ValueError(f"{kind} has only one of q_norm and k_norm; ParallelAttention has both or none.")
    sinks = module._parameters.get("sinks")
    if sinks is not None and tuple(sinks.shape) != (num_heads,):
        raise ValueError(
            f"sinks of {kind} has shape {tuple(sinks.shape)}; it must be [{num_heads}], one for each head."
        )
    dropouts = {name: child for name, child in module.named_children() if isinstance(child, nn.Dropout)}
    check_nothing_dropped(module, cls.__name__, {*PROJECTIONS, "q_norm", "k_norm", "rotary_emb", "sinks", *dropouts})
    dropout = next((child.p for child in dropouts.values()), getattr(module, "attention_dropout", 0.0))
    causal = bool(getattr(module, "is_causal", False) if shared["causal"] is None else shared["causal"])
    sliding = _sliding_window(module, config)
    shared |= {"num_heads": num_heads, "head_dim": head_dim, "causal": causal}
    made = _around(
        cls,
        projections,
        memo,
        num_kv_heads=k_proj.out_features // head_dim,
        scale=getattr(module, "scaling", None),
        dropout=dropout if isinstance(dropout, float) else 0.0,
        window=None if sliding is None else (sliding - 1, 0 if causal else sliding - 1),
        softcap=getattr(module, "attn_logit_softcapping", getattr(config, "attn_logit_softcapping", None)) or 0.0,
        **shared,
    )
    if q_norm is not None and k_norm is not None:
        made.q_norm, made.k_norm = (sequence_parallel_(copy.deepcopy(norm), made.mesh) for norm in (q_norm, k_norm))
    if sinks is not None:
        made.sinks = shard_parameter(sinks, made.mesh, Shard(0), memo)
    return made.train(module.training)


def _around(
    cls: type[ParallelAttention], projections: list[nn.Linear], memo: Memo | None, **keywords: Any
) -> ParallelAttention:
    """Build attention from q, k, v and o projections and the constructor's other `keywords`."""
    q_proj, *_, o_proj = projections
    keywords |= {"bias": q_proj.bias is not None, "out_bias": o_proj.bias is not None}
    made = cls(q_proj.in_features, device="meta", dtype=q_proj.weight.dtype, **keywords)
    for name, linear in zip(PROJECTIONS, projections, strict=True):
        getattr(made, name).take(linear, memo)
    return made


def _sliding_window(module: nn.Module, config: Any) -> int | None:
    """Number of keys that a query sees, its own included; None: all. A config may have layers of both kinds."""
    if hasattr(module, "sliding_window"):
        return cast("int | None", module.sliding_window)
    kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds is not None and layer is not None and kinds[layer] != "sliding_attention":
        return None
    return cast("int | None", getattr(config, "sliding_window", None))
