"""Tensor parallel layers, whose parameters are DTensors on a mesh or plain local shards, and KV caches."""

from fused_tp.nn.attention import ParallelAttention, RotaryEmbedding
from fused_tp.nn.checkpoint import gather_state_dict, original_shapes
from fused_tp.nn.embedding import VocabParallelEmbedding
from fused_tp.nn.grad_norm import clip_grad_norm_
from fused_tp.nn.kv_cache import ContextKVCache, KVCache, PagedContextKVCache
from fused_tp.nn.linear import ColumnParallelLinear, RowParallelLinear
from fused_tp.nn.mlp import ParallelMLP
from fused_tp.nn.sharding import plain_parameters_

__all__ = [
    "ColumnParallelLinear",
    "ContextKVCache",
    "KVCache",
    "PagedContextKVCache",
    "ParallelAttention",
    "ParallelMLP",
    "RotaryEmbedding",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "clip_grad_norm_",
    "gather_state_dict",
    "original_shapes",
    "plain_parameters_",
]
