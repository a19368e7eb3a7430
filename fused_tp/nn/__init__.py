"""Layers whose parameters are DTensors on a tensor parallel mesh."""

from fused_tp.nn.embedding import VocabParallelEmbedding
from fused_tp.nn.linear import ColumnParallelLinear, RowParallelLinear
from fused_tp.nn.share_gather import share_gather

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding", "share_gather"]
