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
from fused_tp.core.group import SINGLE_GROUP_NAME, GroupLike, group_identity, resolve_group
from fused_tp.nn.kv_cache import ContextCache, KVCache, PagedContextKVCache
from fused_tp.nn.linear import (
    ColumnParallelLinear,
    RepeatedColumnLinear,
    RowParallelLinear,
    check_nothing_dropped,
    check_positive,
    compute_column_outputs,
    require_linear,
)
from fused_tp.nn.local_attention import attention_with_mask, local_attention
from fused_tp.nn.norm import replicate_own_parameters, sequence_parallel_
from fused_tp.nn.sharding import Memo, check_mesh, empty_parameter, local_shard, shard_parameter
from fused_tp.ops.arguments import check_bool
from fused_tp.ops.attention_arguments import checked_softcap, checked_window, move_to_cpu
from fused_tp.ops.collectives import copy_to_group
from fused_tp.ops.context_parallel_decode import DecodeArguments, decode
from fused_tp.ops.ring_attention import ring_attention_from_head
from fused_tp.ops.sequence import SEQUENCE_POSITIONS, sequence_positions, shard_sequence, unshard_sequence

Rope = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
PROJECTION_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj")


class RotaryEmbedding:
    """Rotates q and k by their positions, in fp32: feature i is paired with i + head_dim / 2, as in Llama.

    Called as rope(q [batch, seq, heads, head_dim], k, positions [seq] or [batch, seq]) -> (q, k) of the same dtypes.

    Args:
        head_dim: an even number.
        theta: the base of the frequencies theta ** (-2 i / head_dim), in radians per token.

    Raises:
        ValueError: head_dim is odd, or theta is not positive.

    Example:
        >>> attention = ParallelAttention(512, 8, rope=RotaryEmbedding(64), causal=True, mesh=mesh)
    """

    def __init__(self, head_dim: int, theta: float = 10_000.0) -> None:
        check_positive("head_dim", head_dim)
        if head_dim % 2:
            raise ValueError(f"head_dim must be even, because features are rotated in pairs; got {head_dim}.")
        if not theta > 0:
            raise ValueError(f"theta must be positive, got {theta}.")
        self.head_dim = head_dim
        self.theta = theta

    def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        exponents = torch.arange(0, self.head_dim, 2, device=q.device, dtype=torch.float32) / self.head_dim
        angles = positions.to(torch.float32).unsqueeze(-1) * self.theta**-exponents
        # [..., seq, head_dim / 2] -> [..., seq, 1, head_dim / 2]: all heads share the angles.
        cos, sin = angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)
        return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


@dataclass(frozen=True)
class _ForwardArguments:
    """Keyword arguments of one call of `ParallelAttention.forward`."""

    positions: Tensor | None
    attention_mask: Tensor | None
    kv_cache: KVCache | ContextCache | None
    seq_len: int | None
    cu_seqlens: Tensor | None
    new_lengths: Sequence[int] | Tensor | None
    sharded_chunk: bool

    @property
    def context_cache(self) -> ContextCache | None:
        return self.kv_cache if isinstance(self.kv_cache, ContextCache) else None


class ParallelAttention(nn.Module):
    """Multi-head self-attention with heads sharded over `mesh`.

    Shapes on a rank: x [batch, seq, hidden_size] -> the same shape. With `sequence_parallel`, x and the result are this
    rank's shard of the sequence (dim 1). With `cp_group`, they are the shard that `shard_sequence(...,
    group=cp_group)` returns; `sequence_parallel` shards that again. Query, key and value projections share one gather.
    Submodules q_proj, k_proj, v_proj, o_proj (and q_norm, k_norm) are named as in Llama and Qwen3.

    Args:
        hidden_size, num_heads: sizes of the full layer. num_heads must be a multiple of the number of ranks W.
        num_kv_heads: number of key/value heads, default num_heads; it must divide num_heads. If it is less than W, it
            must divide W, and neighboring ranks share a head.
        head_dim: default hidden_size / num_heads.
        bias: True for a bias in q_proj, k_proj and v_proj.
        out_bias: True for a bias in o_proj; default: `bias`.
        qk_norm: RMSNorm over head_dim on q and k, before `rope`; `norm_eps` is its epsilon.
        rope: called as rope(q, k, positions) -> (q, k) with q [batch, seq, heads / W, head_dim]; see RotaryEmbedding.
            If it is a module, its parameters become replicated DTensors, with a complete gradient on every rank.
        causal: each token attends only to itself and to the tokens before it.
        scale: factor of the scores, default head_dim ** -0.5.
        dropout: probability of dropping an attention weight while training. With equal random states on all ranks
            (torch's CPU generator), dropout is identical for any number of ranks of `mesh` and of cp_group.
        window, softcap: as in ring_attention.
        sinks: add one key per head with value 0 and a learned score, as in gpt-oss. The scores are the parameter
            `sinks` [num_heads], sharded like the heads, initially 0.
        alibi_slopes: [num_heads], not learned; slope * distance is subtracted from each score.
        cp_group: ranks over which the sequence is sharded; attention is then `ring_attention`. Each rank has the
            gradients of its own tokens only: reduce them over cp_group as over data parallel ranks.
        cp_layout: distribution of tokens over cp_group: "zigzag", "contiguous", or "balanced" for packed documents.
        mesh, sequence_parallel, device, dtype: as in ColumnParallelLinear.

    Raises:
        ValueError: W ranks cannot share the heads (the message lists numbers of ranks that can); or cp_group and `mesh`
            have more ranks in common than this one.
        TypeError: `mesh` is not a DeviceMesh, or `dtype` is not a floating point type.

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
                raise ValueError(
                    f"hidden_size {hidden_size} is not a multiple of num_heads {num_heads}; pass head_dim."
                )
            head_dim = hidden_size // num_heads
        check_positive("head_dim", head_dim)
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}.")
        check_bool(qk_norm=qk_norm, causal=causal, sinks=sinks)
        check_layout(cp_layout, has_documents=True)
        checked_window(window)
        world_size = check_mesh(mesh).size()
        check_head_sharding(num_heads, num_kv_heads, world_size)
        if cp_group is not None:
            _check_disjoint("cp_group", cp_group, mesh)
        self.mesh = mesh
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        for rope_module in rope.modules() if isinstance(rope, nn.Module) else ():
            # Each rank's gradient has the terms of its heads only.
            replicate_own_parameters(rope_module, mesh, None, sums_gradients=lambda: True)
        self.rope = rope
        self.causal = causal
        self.scale = scale
        self.dropout = dropout
        self.window = window
        self.softcap = checked_softcap(softcap)
        # Not a buffer, because model.bfloat16() would round it, and the meta device would drop its values.
        self.alibi_slopes = _checked_slopes(alibi_slopes, num_heads)
        self.sequence_parallel = sequence_parallel
        self.cp_group = cp_group
        self.cp_layout = cp_layout
        options: dict[str, Any] = {"mesh": mesh, "sequence_parallel": sequence_parallel, "sequence_dim": 1}
        options |= {"device": device, "dtype": dtype}
        width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
        out_bias = bias if out_bias is None else out_bias
        self.q_proj = ColumnParallelLinear(hidden_size, width, bias, **options)
        kv_projection_class: Any = ColumnParallelLinear
        if num_kv_heads % world_size:
            kv_projection_class = partial(RepeatedColumnLinear, num_blocks=num_kv_heads)
        self.k_proj: ColumnParallelLinear = kv_projection_class(hidden_size, kv_width, bias, **options)
        self.v_proj: ColumnParallelLinear = kv_projection_class(hidden_size, kv_width, bias, **options)
        self.o_proj = RowParallelLinear(width, hidden_size, out_bias, **options)
        self.sinks: nn.Parameter | None = None
        if sinks:
            self.sinks = empty_parameter((num_heads,), mesh, Shard(0), device=device, dtype=dtype)
            self.reset_parameters()
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if qk_norm:
            norm_device = device or mesh.device_type
            # A rank normalizes its own heads only, so each rank has one term of the weights' gradients.
            self.q_norm = sequence_parallel_(nn.RMSNorm(head_dim, norm_eps, device=norm_device, dtype=dtype), mesh)
            self.k_norm = sequence_parallel_(nn.RMSNorm(head_dim, norm_eps, device=norm_device, dtype=dtype), mesh)

    def reset_parameters(self) -> None:
        """Set `sinks` to 0. Projections and norms are not changed: call their own `reset_parameters`."""
        if self.sinks is not None and not self.sinks.is_meta:
            nn.init.zeros_(local_shard(self.sinks.detach()))

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
        """Build the attention over `mesh` from an nn.MultiheadAttention, or from a module of q, k, v and o projections.

        Such a module has nn.Linear layers q_proj, k_proj, v_proj and o_proj (Llama, Qwen). Norms q_norm and k_norm over
        head_dim, a sliding_window, an attn_logit_softcapping (Gemma 2) and sinks (gpt-oss) are converted too. The
        packed in_proj_weight of an nn.MultiheadAttention becomes q_proj, k_proj and v_proj. Nothing is sent.

        Args:
            module: the attention to convert, with the same parameters on all ranks.
            rope: see the class. Required if the config has rotary embeddings, which such modules do not contain.
            num_heads: default: the module's num_heads, its config's num_attention_heads, or as its head_dim implies.
            causal: default: the module's is_causal, else False.
            memo: pass one to all conversions of a model to keep tied weights tied.

        Raises:
            TypeError: a layer is not an nn.Linear.
            ValueError: an nn.MultiheadAttention is not batch_first, or has other key sizes, bias_k or add_zero_attn; a
                layer or the number of heads is missing; or the config has rotary embeddings, but `rope` is None.

        Example:
            >>> block.attention = ParallelAttention.from_module(block.attention, mesh=mesh["tp"], rope=rope)
        """
        keywords: dict[str, Any] = {"mesh": mesh, "rope": rope, "sequence_parallel": sequence_parallel}
        keywords |= {"cp_group": cp_group, "cp_layout": cp_layout, "causal": causal, "num_heads": num_heads}
        if isinstance(module, nn.MultiheadAttention):
            return _from_multihead(cls, module, memo, keywords)
        return _from_projections(cls, module, memo, keywords)

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
        """Attend from each token of x to the tokens of x and of `kv_cache`.

        Args:
            positions: positions of the tokens, [seq] or [batch, seq], for `rope`. With sequence_parallel, pass the
                positions of the full sequence. Default: counted from the length of the cache; with cp_group, this
                rank's positions in the sequence; with cu_seqlens, positions within each document.
            attention_mask: bool (True: may attend) or floating point (added to the scores); [batch, kv_len],
                [batch, seq, kv_len] or [batch, 1 or num_heads, seq, kv_len]. Dims of size 1 are broadcast. The
                gradient of a learned mask is complete on every rank.
            kv_cache: the cache to which keys and values are appended; for generation under no_grad. A ContextKVCache,
                or a batch of a PagedContextKVCache, is sharded over its group. If the layer has a cp_group, it must be
                the same group. x and the result then hold all new tokens, equal on all ranks of the group.
            seq_len: length of the full sequence; needed with sequence_parallel or cp_group if the ranks' shards differ
                in length.
            cu_seqlens: bounds (0, ..., seq_len) of packed documents in the full sequence, int32 or int64
                [documents + 1], preferably on the CPU. A token attends only to tokens of its own document.
            new_lengths: with a ContextKVCache, the number of real tokens at the end of each sequence of x.
            sharded_chunk: with a ContextKVCache over cp_group: x and the result are this rank's shard of the new
                tokens, as `shard_sequence` returns it. The ranks then share the projections of a long prompt.

        Raises:
            ValueError: x is not 3-D or has another width; a mask does not fit; or arguments exclude each other (the
                message names alternatives).
            TypeError: the cache has an unsupported type; the mask holds integers; or cu_seqlens does not.
        """
        call = _ForwardArguments(positions, attention_mask, kv_cache, seq_len, cu_seqlens, new_lengths, sharded_chunk)
        self._check_input(x, positions, attention_mask)
        self._check_compatible(call)
        is_sharded = self.cp_group is not None and (call.context_cache is None or sharded_chunk)
        gather_size = self._cp_length(seq_len) if is_sharded else seq_len
        q, k, v = (
            y.unflatten(-1, (-1, self.head_dim))
            for y in compute_column_outputs([self.q_proj, self.k_proj, self.v_proj], x, gather_size)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            if positions is None:
                positions = self._default_positions(q, call, is_sharded)
            if positions.ndim not in (1, 2) or positions.shape[-1] != q.shape[1]:
                raise ValueError(
                    f"positions has shape {tuple(positions.shape)}; it must be [seq] or [batch, seq] with seq = "
                    f"{q.shape[1]}."
                )
            q, k = self.rope(q, k, positions)
        if call.context_cache is not None:
            out = self._attend_cached(q, k, v, call.context_cache, call)
        elif self.cp_group is not None:
            out = self._attend_over_group(q, k, v, call)
        else:
            out = self._attend_locally(q, k, v, call)
        return cast(Tensor, self.o_proj(out.flatten(-2)))

    def _attend_cached(self, q: Tensor, k: Tensor, v: Tensor, cache: ContextCache, call: _ForwardArguments) -> Tensor:
        if not call.sharded_chunk:
            cache.append(k, v, call.new_lengths)
            return cast(Tensor, cache.attend(q, **self._score_keywords(q)))
        cache.append_sharded(k, v, layout=self.cp_layout, seq_len=call.seq_len)
        # Each rank attends from all queries to the keys that it holds.
        keywords: dict[str, Any] = {"group": self.cp_group, "layout": self.cp_layout}
        q = unshard_sequence(q, 1, seq_len=call.seq_len, **keywords)
        return shard_sequence(cache.attend(q, **self._score_keywords(q)), 1, **keywords)

    def _attend_over_group(self, q: Tensor, k: Tensor, v: Tensor, call: _ForwardArguments) -> Tensor:
        """Attend over the ranks of `cp_group`, or on this rank alone if it is None."""
        return ring_attention_from_head(
            q,
            k,
            v,
            self.cp_group,
            is_unsharded=self.cp_group is None,
            layout="contiguous" if self.cp_group is None else self.cp_layout,
            dropout_p=self._dropout_p,
            cu_seqlens=call.cu_seqlens,
            seq_len=call.seq_len,
            first_head=self._first_head(),
            **self._score_keywords(q),
        )

    def _attend_locally(self, q: Tensor, k: Tensor, v: Tensor, call: _ForwardArguments) -> Tensor:
        cache = cast("KVCache | None", call.kv_cache)
        if cache is not None:
            k, v = cache.append(k, v)
        mask = self._local_mask(call.attention_mask, q, k)
        if self._dropout_p == 0 and call.cu_seqlens is None and self._has_plain_scores:
            return local_attention(q, k, v, mask=mask, causal=self.causal, scale=self.scale)
        if cache is not None and mask is None and self._dropout_p > 0:
            mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=q.device)
        score_keywords = self._score_keywords(q)
        if mask is not None:
            return attention_with_mask(
                q, k, v, mask, dropout_p=self._dropout_p, first_head=self._first_head(), **score_keywords
            )
        if cache is not None:
            lengths = torch.full((q.shape[0],), k.shape[1], dtype=torch.int64, device="cpu")
            return decode(DecodeArguments(q, k, v, lengths, **score_keywords), is_unsharded=True)[0]
        return self._attend_over_group(q, k, v, call)

    @property
    def _dropout_p(self) -> float:
        return self.dropout if self.training else 0.0

    @property
    def _has_plain_scores(self) -> bool:
        return self.window is None and not self.softcap and self.sinks is None and self.alibi_slopes is None

    def _score_keywords(self, q: Tensor) -> dict[str, Any]:
        """Return the keyword arguments that all attention functions share, for this rank's heads."""
        first = self._first_head()
        slopes = None if self.alibi_slopes is None else self.alibi_slopes[first : first + q.shape[2]]
        return {
            "causal": self.causal,
            "scale": self.scale,
            "window": self.window,
            "softcap": self.softcap,
            "alibi_slopes": None if slopes is None else torch.tensor(slopes, dtype=torch.float64, device=q.device),
            "sinks": local_shard(self.sinks),
        }

    def extra_repr(self) -> str:
        return (
            f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, causal={self.causal}, "
            f"dropout={self.dropout}"
        )

    def _first_head(self) -> int:
        return self.mesh.get_local_rank() * (self.num_heads // self.mesh.size())

    def _cp_length(self, seq_len: int | None) -> int | None:
        """Return the number of tokens that the tensor parallel ranks hold together; None if `seq_len` is None."""
        if seq_len is None:
            return None
        _, size, rank = group_identity(self.cp_group)
        return local_length(seq_len, size, rank, self.cp_layout)

    def _default_positions(self, q: Tensor, call: _ForwardArguments, is_sharded: bool) -> Tensor:
        first_position = 0 if call.kv_cache is None else call.kv_cache.length
        if is_sharded:
            global_seq_len = q.shape[1] * group_identity(self.cp_group)[1] if call.seq_len is None else call.seq_len
            is_within_documents = call.cu_seqlens is not None
            keywords: dict[str, Any] = {"group": self.cp_group, "layout": self.cp_layout, "device": q.device}
            return first_position + sequence_positions(
                global_seq_len, cu_seqlens=call.cu_seqlens, within_documents=is_within_documents, **keywords
            )
        if call.cu_seqlens is not None:
            bounds = move_to_cpu("cu_seqlens", call.cu_seqlens)
            return SEQUENCE_POSITIONS.call_prepared(bounds, q.shape[1], "contiguous", True, SINGLE_GROUP_NAME).to(
                q.device
            )
        if call.context_cache is not None:
            return call.context_cache.positions(q.shape[1], call.new_lengths).to(q.device)
        return torch.arange(first_position, first_position + q.shape[1], device=q.device)

    def _check_compatible(self, call: _ForwardArguments) -> None:
        """Raise ValueError for arguments that exclude each other, TypeError for a cache of an unsupported type."""
        cache, mask, has_cp_group, context_cache = (
            call.kv_cache,
            call.attention_mask,
            self.cp_group is not None,
            call.context_cache,
        )
        if isinstance(cache, PagedContextKVCache):
            raise TypeError(
                "kv_cache must not be a PagedContextKVCache, which holds the sequences of many batches. Pass the "
                "sequences of x: kv_cache.batch([sequence, ...])."
            )
        if cache is not None and not isinstance(cache, (KVCache, ContextCache)):
            raise TypeError(
                "kv_cache must be a KVCache or a ContextKVCache of fused_tp.nn, or a batch of a PagedContextKVCache; "
                f"got {type(cache).__name__}."
            )
        excluded_name = "kv_cache" if cache is not None else "attention_mask"
        for is_wrong, message in (
            (
                has_cp_group and mask is not None,
                "attention_mask cannot be used with cp_group, because each rank sees only its shard of the keys. For "
                "packed documents, pass cu_seqlens; for sequences of different lengths, a ContextKVCache and "
                "new_lengths.",
            ),
            (
                has_cp_group and isinstance(cache, KVCache),
                "a KVCache holds all tokens on one rank, which cp_group does not support. Pass a "
                "ContextKVCache(cp_group), which shards tokens over its ranks.",
            ),
            (
                has_cp_group
                and context_cache is not None
                and group_identity(context_cache.group) != group_identity(self.cp_group),
                "the cache is sharded over another group than cp_group. Create the cache with this cp_group.",
            ),
            (
                context_cache is not None and mask is not None,
                "attention_mask cannot be used with a ContextKVCache. Pad sequences of different lengths on the left, "
                "and pass new_lengths, the sums of the rows of the mask.",
            ),
            (
                context_cache is not None and self._dropout_p > 0,
                "a ContextKVCache does not support dropout. Call eval() to generate.",
            ),
            (
                context_cache is None and call.new_lengths is not None,
                "new_lengths is for a ContextKVCache only. Without such a cache, pass an attention_mask.",
            ),
            (
                call.sharded_chunk and (context_cache is None or not has_cp_group),
                "sharded_chunk is for a ContextKVCache over cp_group only. Omit it: without such a cache, x is a shard "
                "already.",
            ),
            (
                call.sharded_chunk and call.new_lengths is not None,
                "sharded_chunk needs sequences of equal length. To use new_lengths, omit sharded_chunk and pass all "
                "tokens on all ranks.",
            ),
            (
                call.cu_seqlens is not None and (cache is not None or mask is not None),
                f"cu_seqlens and {excluded_name} cannot be combined. Omit {excluded_name}, which packed documents do "
                "not need.",
            ),
        ):
            if is_wrong:
                raise ValueError(message)
        if not has_cp_group and context_cache is not None:
            _check_disjoint("the group of the cache", context_cache.group, self.mesh)

    def _check_input(self, x: Tensor, positions: Tensor | None, attention_mask: Tensor | None) -> None:
        if not isinstance(x, Tensor) or x.is_nested or x.ndim != 3 or x.shape[-1] != self.hidden_size:
            input_text = tuple(x.shape) if isinstance(x, Tensor) and not x.is_nested else type(x).__name__
            raise ValueError(f"x must be a Tensor [batch, seq, {self.hidden_size}], got {input_text}.")
        if positions is not None and self.rope is None:
            raise ValueError("positions are used only by rope, and this layer has none. Omit positions, or pass rope.")
        if attention_mask is not None:
            if attention_mask.dtype != torch.bool and not attention_mask.is_floating_point():
                raise TypeError(
                    "attention_mask must be bool (True: may attend) or floating point (added to the scores), got "
                    f"{attention_mask.dtype}. Convert a mask of ones and zeros with mask.bool()."
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
        full_shape = (q.shape[0], self.num_heads, q.shape[1], k.shape[1])
        if any(size not in (1, expected) for size, expected in zip(mask.shape, full_shape, strict=True)):
            raise ValueError(
                f"attention_mask must broadcast to [batch, heads, seq, kv_len] = {full_shape}, got {tuple(mask.shape)}."
            )
        if mask.requires_grad:  # sum the gradient of a learned bias over ranks: each rank has its heads' term
            mask = copy_to_group(mask, group=self.mesh)
        return mask.narrow(1, self._first_head(), q.shape[2]) if mask.shape[1] > 1 else mask


def _check_disjoint(name: str, group: GroupLike, mesh: DeviceMesh) -> None:
    """Raise ValueError if `group`, whose ranks hold different tokens, has several ranks of `mesh`."""
    shared_ranks = sorted({*resolve_group(group).ranks} & {*resolve_group(mesh).ranks})
    if len(shared_ranks) > 1:
        raise ValueError(
            f"{name} shares the ranks {shared_ranks} with the tensor parallel mesh, whose ranks hold different heads. "
            "Tokens can be sharded only over ranks that hold the same heads. Use another dim of the same mesh for the "
            "tokens."
        )


def _checked_slopes(alibi_slopes: Tensor | Sequence[float] | None, num_heads: int) -> tuple[float, ...] | None:
    if alibi_slopes is None:
        return None
    slopes = tuple(float(slope) for slope in alibi_slopes)
    if len(slopes) != num_heads:
        raise ValueError(f"alibi_slopes must have {num_heads} numbers, one for each head, got {len(slopes)}.")
    return slopes


def check_head_sharding(num_heads: int, num_kv_heads: int, world_size: int) -> None:
    """Raise ValueError if heads cannot be sharded over `world_size` ranks. The message lists supported group sizes."""
    if num_heads % num_kv_heads:
        divisors = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise ValueError(f"num_kv_heads must divide num_heads {num_heads}: one of {divisors}, got {num_kv_heads}.")

    def can_shard(size: int) -> bool:
        return num_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0)

    if not can_shard(world_size):
        sizes = [size for size in range(1, num_heads + 1) if can_shard(size)]
        raise ValueError(
            f"{num_heads} heads with {num_kv_heads} key/value heads cannot be sharded over {world_size} ranks. The "
            "number of ranks must divide the number of heads, and must divide, or be a multiple of, the number of "
            f"key/value heads. Use one of the group sizes {sizes}."
        )


def _from_multihead(
    cls: type[ParallelAttention], module: nn.MultiheadAttention, memo: Memo | None, keywords: dict[str, Any]
) -> ParallelAttention:
    if keywords["num_heads"] not in (None, module.num_heads):
        raise ValueError(
            f"num_heads must be that of the nn.MultiheadAttention, {module.num_heads}, got {keywords['num_heads']}."
        )
    for is_unsupported, description in (
        (not module.batch_first, "batch_first=False; ParallelAttention needs inputs [batch, seq, hidden]"),
        (
            not module._qkv_same_embed_dim,
            f"kdim={module.kdim} and vdim={module.vdim}; ParallelAttention supports only self-attention, where both "
            f"are embed_dim={module.embed_dim}",
        ),
        (module.bias_k is not None, "bias_k (add_bias_kv=True), which ParallelAttention does not support"),
        (module.add_zero_attn, "add_zero_attn=True, which ParallelAttention does not support"),
        (
            memo is not None and module.in_proj_weight in memo,
            "a packed in_proj_weight that is tied to a module converted before, and the tie cannot be kept. Untie the "
            "weight before conversion",
        ),
    ):
        if is_unsupported:
            raise ValueError(f"the nn.MultiheadAttention has {description}.")
    weights = module.in_proj_weight.chunk(3)
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    projections = [_plain_linear(w, b) for w, b in zip(weights, biases, strict=True)]
    keywords |= {"num_heads": module.num_heads, "causal": bool(keywords["causal"])}
    attention = _build_with_projections(cls, [*projections, module.out_proj], memo, dropout=module.dropout, **keywords)
    if memo is not None:
        memo[module.in_proj_weight] = attention.q_proj.weight
    return attention.train(module.training)


def _plain_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return an nn.Linear with existing tensors as parameters. No memory is allocated."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=bias.requires_grad)
    return linear


def _from_projections(
    cls: type[ParallelAttention], module: nn.Module, memo: Memo | None, keywords: dict[str, Any]
) -> ParallelAttention:
    class_name = type(module).__name__
    projections = []
    for name in PROJECTION_NAMES:
        if getattr(module, name, None) is None:
            raise ValueError(
                f"{class_name} has no {name}; ParallelAttention supports nn.MultiheadAttention, and modules with "
                "q_proj, k_proj, v_proj and o_proj."
            )
        projections.append(require_linear(module, name))
    q_proj, k_proj, v_proj, _ = projections
    config = getattr(module, "config", None)
    if keywords["rope"] is None and any(
        hasattr(config, name) for name in ("rope_theta", "rope_parameters", "rope_scaling")
    ):
        raise ValueError(
            f"the config of {class_name} has rotary embeddings, which are not part of the module. Pass rope=, for "
            "example RotaryEmbedding(head_dim, theta)."
        )
    width, head_dim, num_heads = q_proj.out_features, getattr(module, "head_dim", None), keywords["num_heads"]
    if num_heads is None:
        num_heads = getattr(module, "num_heads", None) or getattr(config, "num_attention_heads", None)
    if num_heads is None and head_dim is not None:
        num_heads = width // head_dim
    if num_heads is None or width % num_heads:
        raise ValueError(
            f"the number of heads of {class_name} must be known, and must divide the {width} features of q_proj; found "
            f"{num_heads}. Pass num_heads."
        )
    head_dim = width // num_heads
    biases = [layer.bias is not None for layer in (q_proj, k_proj, v_proj)]
    if len(set(biases)) > 1:
        raise ValueError(f"q_proj, k_proj, v_proj of {class_name} must all have a bias or none; found {biases}.")
    q_norm, k_norm = (getattr(module, name, None) for name in ("q_norm", "k_norm"))
    for norm in (q_norm, k_norm):
        weight = getattr(norm, "weight", None)
        if norm is not None and (weight is None or tuple(weight.shape) != (head_dim,)):
            raise ValueError(
                f"q_norm and k_norm of {class_name} must have a weight of shape [head_dim] = [{head_dim}], got "
                f"{None if weight is None else tuple(weight.shape)}."
            )
    if (q_norm is None) != (k_norm is None):
        raise ValueError(f"{class_name} has only one of q_norm and k_norm; ParallelAttention supports both or none.")
    sinks = module._parameters.get("sinks")
    if sinks is not None and tuple(sinks.shape) != (num_heads,):
        raise ValueError(
            f"sinks of {class_name} must have shape [{num_heads}], one for each head, got {tuple(sinks.shape)}."
        )
    dropout_modules = {name: child for name, child in module.named_children() if isinstance(child, nn.Dropout)}
    check_nothing_dropped(
        module, cls.__name__, {*PROJECTION_NAMES, "q_norm", "k_norm", "rotary_emb", "sinks", *dropout_modules}
    )
    dropout = next((child.p for child in dropout_modules.values()), getattr(module, "attention_dropout", 0.0))
    causal = bool(getattr(module, "is_causal", False) if keywords["causal"] is None else keywords["causal"])
    sliding_window = _sliding_window(module, config)
    keywords |= {"num_heads": num_heads, "head_dim": head_dim, "causal": causal}
    attention = _build_with_projections(
        cls,
        projections,
        memo,
        num_kv_heads=k_proj.out_features // head_dim,
        scale=getattr(module, "scaling", None),
        dropout=dropout if isinstance(dropout, float) else 0.0,
        window=None if sliding_window is None else (sliding_window - 1, 0 if causal else sliding_window - 1),
        softcap=getattr(module, "attn_logit_softcapping", getattr(config, "attn_logit_softcapping", None)) or 0.0,
        **keywords,
    )
    if q_norm is not None and k_norm is not None:
        attention.q_norm, attention.k_norm = (
            sequence_parallel_(copy.deepcopy(norm), attention.mesh) for norm in (q_norm, k_norm)
        )
    if sinks is not None:
        attention.sinks = shard_parameter(sinks, attention.mesh, Shard(0), memo)
    return attention.train(module.training)


def _build_with_projections(
    cls: type[ParallelAttention], projections: list[nn.Linear], memo: Memo | None, **keywords: Any
) -> ParallelAttention:
    """Build a `cls` from q, k, v and o projections and the other `keywords` of its constructor."""
    q_proj, *_, o_proj = projections
    keywords |= {"bias": q_proj.bias is not None, "out_bias": o_proj.bias is not None}
    attention = cls(q_proj.in_features, device="meta", dtype=q_proj.weight.dtype, **keywords)
    for name, linear in zip(PROJECTION_NAMES, projections, strict=True):
        getattr(attention, name).load_shards(linear, memo)
    return attention


def _sliding_window(module: nn.Module, config: Any) -> int | None:
    """Return the number of keys that a query sees, including its own, or None for all.

    In some configs only some layers have a window.
    """
    if hasattr(module, "sliding_window"):
        return cast("int | None", module.sliding_window)
    layer_types, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if layer_types is not None and layer is not None and layer_types[layer] != "sliding_attention":
        return None
    return cast("int | None", getattr(config, "sliding_window", None))
