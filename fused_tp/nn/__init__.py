"""Layers whose parameters are DTensors on a tensor parallel mesh."""

from fused_tp.nn.attention import ParallelAttention, RotaryEmbedding
from fused_tp.nn.cache import ContextKVCache, KVCache, PagedContextKVCache
from fused_tp.nn.checkpoint import gather_state_dict, original_shapes
from fused_tp.nn.embedding import VocabParallelEmbedding
from fused_tp.nn.linear import ColumnParallelLinear, RowParallelLinear
from fused_tp.nn.mlp import ParallelMLP

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
    "gather_state_dict",
    "original_shapes",
]
