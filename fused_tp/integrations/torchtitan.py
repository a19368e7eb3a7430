"""Overrides for torchtitan (0.3): projections by fused ops, and ring attention over context parallel ranks.

    ./run_train.sh ... --parallelism.tensor_parallel_degree 8 --override.imports \\
        fused_tp.integrations.torchtitan.attention fused_tp.integrations.torchtitan.feed_forward

They replace modules of any model made of torchtitan's GQAttention and FeedForward before it is built: its own
`parallelize_fn`, activation checkpointing, FSDP2, checkpoints and parameter names stay. They support features that
torchtitan's `tp_gemm_backend="dist_gemm"` does not: CPUs, several hosts, sequence parallelism off, separate q, k and v,
biases, all SPMD backends.

| module | without | here |
|---|---|---|
| q, k and v; w1 and w3 | all-gather, matmuls | `all_gather_matmul` of all |
| wo, w2 | matmul, reduce-scatter | `matmul_reduce_scatter` |
| without sequence parallelism | matmuls, all-reduce | `matmul_all_reduce`, whose backward is `column_parallel_matmul` |
| `attention` with `ring` | all-gather of keys and values over context parallel ranks | `ring_attention` |

Importing this module imports torchtitan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary
from torchtitan.config import derive, override
from torchtitan.models.common.attention import (
    FusedQKVLinear,
    GQAttention,
    QKVLinear,
    ScaledDotProductAttention,
    VarlenAttention,
    VarlenMetadata,
)
from torchtitan.models.common.decoder_sharding import dense_activation_placement, dense_sequence_parallel_placement
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import LocalMapConfig, ShardingConfig

from fused_tp.attention.layout import check_layout
from fused_tp.nn.linear import column_matmul, row_matmul
from fused_tp.nn.sharding import local_shard
from fused_tp.ops.ring_attention import ring_attention_from_head
from fused_tp.ops.sequence import unshard_sequence

if TYPE_CHECKING:
    from torchtitan.distributed import ParallelDims


# Placement of q, k, v and the output of attention, as [batch, seq, heads, head_dim] or [batch, seq, heads * head_dim].
_HEADS = dense_activation_placement(tp=spmd.S(2))


class _Projections(Module):
    """Base of the modules below: holds the tensor parallel mesh, and the dim in which tokens are sharded over it."""

    tp_mesh: DeviceMesh | None = None
    sequence_dim: int | None = None  # sharded dim of tensors between the modules; None: not sharded

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.sequence_dim = config.sequence_dim

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        # Store the mesh here instead of reading the current mesh in forward: only torchtitan's training step sets the
        # current mesh, so other calls would return a rank's partial sum.
        self.tp_mesh = parallel_dims.get_optional_mesh("tp")
        super().parallelize(parallel_dims)

    def run_column(self, x: Tensor, *layers: Linear) -> Sequence[Tensor]:
        weights, biases = [local_shard(layer.weight) for layer in layers], [local_shard(layer.bias) for layer in layers]
        return column_matmul(x, weights, biases, self.tp_mesh, self.sequence_dim)

    def run_row(self, x: Tensor, layer: Linear) -> Tensor:
        return row_matmul(x, local_shard(layer.weight), None, self.tp_mesh, self.sequence_dim)


class FusedGatherQKVLinear(_Projections, FusedQKVLinear):
    """torchtitan's FusedQKVLinear by one op: x [batch, seq / W, dim] -> q, k, v [batch, seq, heads / W, head_dim]."""

    @dataclass(kw_only=True, slots=True)
    class Config(FusedQKVLinear.Config):
        sequence_dim: int | None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.tp_mesh is None:
            return FusedQKVLinear.forward(self, x)
        with spmd.no_typecheck():
            (qkv,) = self.run_column(x, self.wqkv)
            qkv_parts = qkv.unflatten(-1, (-1, self.r_dim, self.head_dim)).split([self.heads_per_kv, 1, 1], dim=-2)
            q, k, v = (part.flatten(2, 3).contiguous() for part in qkv_parts)
        return q, k, v


class GatherQKVLinear(_Projections, QKVLinear):
    """torchtitan's QKVLinear by one op for wq, wk and wv; shapes as in FusedGatherQKVLinear."""

    @dataclass(kw_only=True, slots=True)
    class Config(QKVLinear.Config):
        sequence_dim: int | None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.tp_mesh is None:
            return QKVLinear.forward(self, x)
        with spmd.no_typecheck():
            q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in self.run_column(x, self.wq, self.wk, self.wv))
        return q, k, v


class ScatterLinear(_Projections, Linear):
    """torchtitan's row-parallel Linear by one op: input [batch, seq, in / W] -> [batch, seq / W, out]."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        sequence_dim: int | None

    def forward(self, input: Tensor) -> Tensor:
        if self.tp_mesh is None:
            return Linear.forward(self, input)
        with spmd.no_typecheck():
            return self.run_row(input, self)


class FusedFeedForward(_Projections, FeedForward):
    """torchtitan's FeedForward by two ops: x [batch, seq / W, dim] -> [batch, seq / W, dim]."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        sequence_dim: int | None

    def forward(self, x: Tensor) -> Tensor:
        if self.tp_mesh is None:
            return FeedForward.forward(self, x)
        with spmd.no_typecheck():
            gate, up = self.run_column(x, self.w1, self.w3)
            return self.run_row(F.silu(gate) * up, self.w2)


class RingAttention(Module):
    """Causal attention for torchtitan's inner modules, over tokens that are sharded over context parallel ranks.

    Ranks pass on only the keys that some query attends to. Documents begin where positions are 0.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        layout: str

    def __init__(self, config: Config) -> None:
        super().__init__()
        check_layout(config.layout)
        self.layout = config.layout
        self.cp_mesh: DeviceMesh | None = None

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        self.cp_mesh = parallel_dims.get_optional_mesh("cp")
        super().parallelize(parallel_dims)

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Tensor | None = None,
        scale: float | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attend. `attention_masks`: positions [batch, seq / W] in documents, or None; see PositionsAttention."""
        with spmd.no_typecheck():
            bounds_of_rows = None
            if attention_masks is not None:
                bounds_of_rows = _document_bounds(local_shard(attention_masks), self.cp_mesh, self.layout)
            return _attend(
                q_BLNH, k_BLNH, v_BLNH, self.cp_mesh, bounds_of_rows, causal=True, scale=scale, layout=self.layout
            )


class PositionsAttention(GQAttention):
    """torchtitan's GQAttention that passes the positions of its tokens to the inner module, instead of masks."""

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        pass

    def forward(self, x_BLD: Tensor, attention_masks: Any, positions: Tensor | None = None) -> Tensor:
        if attention_masks is not None:
            raise ValueError(
                "attention_masks is not supported with ring=..., which is causal within the documents of the "
                "positions. Remove the override, or pass no masks."
            )
        return super().forward(x_BLD, positions, positions)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mesh: DeviceMesh | None, bounds_of_rows: list[Tensor] | None, **keywords: Any
) -> Tensor:
    """Return the output [batch, seq / W, heads, head_dim]; `bounds_of_rows` holds the bounds in each row, if any."""
    keywords["is_unsharded"] = mesh is None
    if bounds_of_rows is None:
        return ring_attention_from_head(q, k, v, mesh, **keywords)
    row_slices = [slice(i, i + 1) for i in range(q.shape[0])]
    outs = [
        ring_attention_from_head(q[row], k[row], v[row], mesh, cu_seqlens=bounds, **keywords)
        for row, bounds in zip(row_slices, bounds_of_rows, strict=True)
    ]
    return torch.cat(outs)


def apply_cp_to_forward(attention_modules: Sequence[nn.Module], cp_mesh: DeviceMesh) -> None:
    """Make inner attention modules attend in a ring over `cp_mesh`; replaces torchtitan's function of this name.

    Use it in a `parallelize_fn` of your own, before `Module.parallelize`, like torchtitan's. Unlike that it supports
    variable lengths (VarlenAttention, with its window), in any floating point dtype. Tokens are sharded as by
    torchtitan's "headtail" balancer. `attention_masks`, a VarlenMetadata, is that of the whole batch, not sharded.

    Raises:
        NotImplementedError: a FlexAttention, whose masks are any function of two positions.
    """
    for module in attention_modules:
        if isinstance(module, VarlenAttention):
            module.forward = partial(_varlen_ring, cp_mesh, module.window_size)
        elif isinstance(module, ScaledDotProductAttention):
            module.forward = partial(_causal_ring, cp_mesh)
        else:
            raise NotImplementedError(
                f"{type(module).__name__} has masks that a ring does not support. Use attn_backend='varlen', or "
                "torchtitan's own apply_cp_to_forward."
            )


def _causal_ring(
    mesh: DeviceMesh,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attention_masks: Any = None,
    scale: float | None = None,
    is_causal: bool = True,
    **kwargs: Any,
) -> Tensor:
    if attention_masks is not None:
        raise ValueError("ScaledDotProductAttention supports no attention_masks. Use VarlenAttention for documents.")
    return _attend(q, k, v, mesh, None, causal=is_causal, scale=scale)


def _varlen_ring(
    mesh: DeviceMesh,
    window: tuple[int, int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attention_masks: VarlenMetadata,
    scale: float | None = None,
    out_transform: Any = None,
    **kwargs: Any,
) -> Tensor:
    if out_transform is not None:
        raise NotImplementedError("out_transform is not supported over context parallel ranks. Pass None.")
    bounds, num_rows = attention_masks.cu_seq_q.cpu().long(), q.shape[0]
    row_length = int(bounds[-1]) // num_rows
    if row_length != q.shape[1] * mesh.size():
        raise ValueError(
            f"attention_masks covers {num_rows} rows of {row_length} tokens, but {mesh.size()} ranks hold {q.shape[1]} "
            "tokens of each row. Pass the VarlenMetadata of the full batch, created before its tokens are sharded."
        )
    starts = [row * row_length for row in range(num_rows)]
    bounds_of_rows = [bounds[(bounds >= start) & (bounds <= start + row_length)] - start for start in starts]
    return _attend(q, k, v, mesh, bounds_of_rows, scale=scale, window=window)


# All layers get the same positions, so they are gathered once.
_documents_cache: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@torch.compiler.disable
def _document_bounds(positions: Tensor, mesh: DeviceMesh | None, layout: str) -> list[Tensor]:
    """Return the cu_seqlens of each row.

    Raises:
        ValueError: positions do not count up within documents: tokens are sharded in another layout.
    """
    version, bounds_of_rows = _documents_cache.get(positions, (None, []))
    if version == positions._version:
        return bounds_of_rows
    full_positions = (
        positions if mesh is None else unshard_sequence(positions.contiguous(), 1, group=mesh, layout=layout)
    )
    full_positions, bounds_of_rows = full_positions.cpu(), []
    position_steps = full_positions.diff(dim=1)
    if not bool(((position_steps == 1) | (full_positions[:, 1:] == 0)).all()):
        raise ValueError(
            f"positions must increase by one or restart at 0, but do not in the layout {layout!r}. Use ring='zigzag' "
            "with parallelism.context_parallel_load_balancer='headtail', or ring='contiguous' with "
            "context_parallel_load_balancer=None."
        )
    for row in full_positions:
        starts = (row == 0).nonzero().flatten().tolist()
        bounds_of_rows.append(torch.tensor(sorted({0, *starts, len(row)}), dtype=torch.int64, device="cpu"))
    _documents_cache[positions] = positions._version, bounds_of_rows
    return bounds_of_rows


def _sequence_dim(name: str, sharding: ShardingConfig | None, input_name: str) -> int | None:
    """Return the dim along which tensor parallel ranks shard the input; None if each rank has the full input."""
    layout = (
        None if sharding is None or sharding.in_src_shardings is None else sharding.in_src_shardings.get(input_name)
    )
    if layout == dense_sequence_parallel_placement():
        return 1
    if layout == dense_activation_placement(tp=spmd.I):
        return None
    raise ValueError(
        f"{name} has a sharding that the override does not support ({sharding}). Overrides run after "
        "update_from_config, which shards the stock modules: leave tp_gemm_backend at 'default'."
    )


def _local_sharding_config(
    state_sharding: ShardingConfig | None, inputs: dict[str, Any], outputs: Any, grads: tuple[Any, ...] | None = None
) -> ShardingConfig:
    """ShardingConfig of a module that computes on local tensors and does its own communication."""
    return ShardingConfig(
        state_shardings={} if state_sharding is None else state_sharding.state_shardings,
        in_src_shardings=inputs,
        in_dst_shardings=inputs,
        out_src_shardings=outputs,
        local_map=LocalMapConfig(in_grad_placements=tuple(inputs.values()) if grads is None else grads),
    )


def _check_linears(module_name: str, *layers: Any, bias: bool = True) -> None:
    for layer in layers:
        if type(layer) is not Linear.Config:
            raise ValueError(
                f"{module_name} has a {type(layer).__qualname__} (quantization, adapters), but this override supports "
                "only torchtitan's Linear. Omit this override or the other feature."
            )
        if layer.bias and not bias:
            raise ValueError(
                f"{module_name} has a row-parallel layer with a bias; torchtitan would add the bias once per TP rank. "
                "Set bias=False or omit this override."
            )


@override(
    target=GQAttention.Config, fqns=["*.attention"], exact=True, description="fused_tp: projections, ring attention"
)
def attention(cfg: GQAttention.Config, *, ring: str | None = None) -> GQAttention.Config:
    """GQAttention.Config in which each projection and its communication are one op.

    Args:
        ring: replace the configured inner module by `ring_attention` over the context parallel ranks, causal and within
            documents, which begin at position 0: "zigzag" if torchtitan's load balancer is "headtail", its default;
            "contiguous" if it is None. On the command line
            `fused_tp.integrations.torchtitan.attention={"ring":"zigzag"}`. Not for models whose layers have windows.

    Raises:
        ValueError: projections that are not a plain Linear, or that are sharded in an unknown way.
    """
    sequence_dim = _sequence_dim("attention", cfg.sharding_config, "x_BLD")
    x = dense_activation_placement(tp=spmd.I) if sequence_dim is None else dense_sequence_parallel_placement()
    is_fused = isinstance(cfg.qkv_linear, FusedQKVLinear.Config)
    column_layers = [cfg.qkv_linear.wqkv] if is_fused else [cfg.qkv_linear.wq, cfg.qkv_linear.wkv]
    _check_linears("attention", *column_layers)
    _check_linears("attention", cfg.wo, bias=False)
    qkv = derive(
        cfg.qkv_linear,
        FusedGatherQKVLinear.Config if is_fused else GatherQKVLinear.Config,
        sharding_config=_local_sharding_config(cfg.qkv_linear.sharding_config, {"x": x}, (_HEADS,) * 3),
        sequence_dim=sequence_dim,
    )
    wo = derive(
        cfg.wo,
        ScatterLinear.Config,
        sharding_config=_local_sharding_config(cfg.wo.sharding_config, {"input": _HEADS}, x),
        sequence_dim=sequence_dim,
    )
    changed_fields: dict[str, Any] = {"qkv_linear": qkv, "wo": wo, "sharding_config": None}
    if ring is None:
        return derive(cfg, GQAttention.Config, **changed_fields)
    window = getattr(cfg.inner_attention, "window_size", (-1, 0))
    if window != (-1, 0):
        raise ValueError(f"ring does not support attention windows, got window {window}. Omit ring for this model.")
    inputs = dict.fromkeys(("q_BLNH", "k_BLNH", "v_BLNH"), _HEADS)
    inner_attention = RingAttention.Config(layout=ring, sharding_config=_local_sharding_config(None, inputs, _HEADS))
    return derive(cfg, PositionsAttention.Config, inner_attention=inner_attention, **changed_fields)


@override(target=FeedForward.Config, fqns=["*.feed_forward"], exact=True, description="fused_tp: w1, w3 and w2")
def feed_forward(cfg: FeedForward.Config) -> FusedFeedForward.Config:
    """FeedForward.Config that gathers, multiplies and scatters in two ops.

    Raises:
        ValueError: as for `attention`.
    """
    sequence_dim = _sequence_dim("feed_forward", cfg.sharding_config, "x")
    x = dense_activation_placement(tp=spmd.I) if sequence_dim is None else dense_sequence_parallel_placement()
    _check_linears("feed_forward", cfg.w1, cfg.w3)
    _check_linears("feed_forward", cfg.w2, bias=False)
    w2 = derive(
        cfg.w2, Linear.Config, sharding_config=ShardingConfig(state_shardings=cfg.w2.sharding_config.state_shardings)
    )
    sharding_config = _local_sharding_config(None, {"x": x}, x)
    return derive(cfg, FusedFeedForward.Config, w2=w2, sharding_config=sharding_config, sequence_dim=sequence_dim)
