"""fused_tp: tensor and context parallelism that overlaps communication with compute.

Importing it needs no GPU, no compiler, no initialised process group and none of the libraries it integrates with.
Every name is loaded at first use, and with it its torch.library ops.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fused_tp.core.checkout import install_checkout_finder
from fused_tp.core.errors import CollectiveTimeoutError, FusedTPError, PeerLostError, RankMismatchError

if TYPE_CHECKING:
    from fused_tp import nn
    from fused_tp.integrations.dtensor import FusedColwiseParallel, FusedRowwiseParallel, FusedSequenceParallel
    from fused_tp.ops.all_gather_grouped_matmul import all_gather_grouped_matmul
    from fused_tp.ops.all_gather_matmul import all_gather_matmul
    from fused_tp.ops.all_reduce_rms_norm import all_reduce_rms_norm
    from fused_tp.ops.collectives import all_gather, all_reduce, reduce_scatter
    from fused_tp.ops.column_parallel_grouped_matmul import column_parallel_grouped_matmul
    from fused_tp.ops.column_parallel_matmul import column_parallel_matmul
    from fused_tp.ops.context_parallel_attention import context_parallel_attention
    from fused_tp.ops.context_parallel_decode import context_parallel_decode
    from fused_tp.ops.explain import explain
    from fused_tp.ops.grouped_matmul_all_reduce import grouped_matmul_all_reduce
    from fused_tp.ops.grouped_matmul_reduce_scatter import grouped_matmul_reduce_scatter
    from fused_tp.ops.linear_cross_entropy import linear_cross_entropy
    from fused_tp.ops.matmul_all_reduce import matmul_all_reduce
    from fused_tp.ops.matmul_all_reduce_rms_norm import matmul_all_reduce_rms_norm
    from fused_tp.ops.matmul_reduce_scatter import matmul_reduce_scatter
    from fused_tp.ops.ring_attention import ring_attention
    from fused_tp.ops.sequence import sequence_positions, shard_sequence, unshard_sequence
    from fused_tp.ops.sequence_balance import sequence_balance
    from fused_tp.ops.split_backward import split_backward
    from fused_tp.ops.ulysses_attention import ulysses_attention
    from fused_tp.ops.vocab_parallel_cross_entropy import vocab_parallel_cross_entropy
    from fused_tp.parallelizing.checks.model_check import is_parallelized
    from fused_tp.parallelizing.grad_sync import no_sync, sync_gradients
    from fused_tp.parallelizing.hf.hf_pretrained import load_pretrained
    from fused_tp.parallelizing.mesh import fsdp_mesh, make_mesh
    from fused_tp.parallelizing.parallelize import parallelize
    from fused_tp.pipelining.pipeline import pipeline
    from fused_tp.planning.build import build
    from fused_tp.planning.config import ParallelConfig
    from fused_tp.planning.recommend import recommend
    from fused_tp.training.batches import DistributedBatches
    from fused_tp.training.checkpoints import CheckpointManager

_LAZY = {
    "all_gather": "fused_tp.ops.collectives",
    "all_gather_grouped_matmul": "fused_tp.ops.all_gather_grouped_matmul",
    "all_gather_matmul": "fused_tp.ops.all_gather_matmul",
    "all_reduce": "fused_tp.ops.collectives",
    "all_reduce_rms_norm": "fused_tp.ops.all_reduce_rms_norm",
    "build": "fused_tp.planning.build",
    "CheckpointManager": "fused_tp.training.checkpoints",
    "column_parallel_grouped_matmul": "fused_tp.ops.column_parallel_grouped_matmul",
    "column_parallel_matmul": "fused_tp.ops.column_parallel_matmul",
    "context_parallel_attention": "fused_tp.ops.context_parallel_attention",
    "context_parallel_decode": "fused_tp.ops.context_parallel_decode",
    "DistributedBatches": "fused_tp.training.batches",
    "explain": "fused_tp.ops.explain",
    "fsdp_mesh": "fused_tp.parallelizing.mesh",
    "FusedColwiseParallel": "fused_tp.integrations.dtensor",
    "FusedRowwiseParallel": "fused_tp.integrations.dtensor",
    "FusedSequenceParallel": "fused_tp.integrations.dtensor",
    "grouped_matmul_all_reduce": "fused_tp.ops.grouped_matmul_all_reduce",
    "grouped_matmul_reduce_scatter": "fused_tp.ops.grouped_matmul_reduce_scatter",
    "is_parallelized": "fused_tp.parallelizing.checks.model_check",
    "linear_cross_entropy": "fused_tp.ops.linear_cross_entropy",
    "load_pretrained": "fused_tp.parallelizing.hf.hf_pretrained",
    "make_mesh": "fused_tp.parallelizing.mesh",
    "matmul_all_reduce": "fused_tp.ops.matmul_all_reduce",
    "matmul_all_reduce_rms_norm": "fused_tp.ops.matmul_all_reduce_rms_norm",
    "matmul_reduce_scatter": "fused_tp.ops.matmul_reduce_scatter",
    "nn": "fused_tp.nn",
    "no_sync": "fused_tp.parallelizing.grad_sync",
    "ParallelConfig": "fused_tp.planning.config",
    "parallelize": "fused_tp.parallelizing.parallelize",
    "pipeline": "fused_tp.pipelining.pipeline",
    "recommend": "fused_tp.planning.recommend",
    "reduce_scatter": "fused_tp.ops.collectives",
    "ring_attention": "fused_tp.ops.ring_attention",
    "sequence_balance": "fused_tp.ops.sequence_balance",
    "sequence_positions": "fused_tp.ops.sequence",
    "shard_sequence": "fused_tp.ops.sequence",
    "split_backward": "fused_tp.ops.split_backward",
    "sync_gradients": "fused_tp.parallelizing.grad_sync",
    "ulysses_attention": "fused_tp.ops.ulysses_attention",
    "unshard_sequence": "fused_tp.ops.sequence",
    "vocab_parallel_cross_entropy": "fused_tp.ops.vocab_parallel_cross_entropy",
}

install_checkout_finder()

__all__ = [
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "column_parallel_matmul",
    "all_gather_grouped_matmul",
    "grouped_matmul_reduce_scatter",
    "grouped_matmul_all_reduce",
    "column_parallel_grouped_matmul",
    "all_reduce_rms_norm",
    "matmul_all_reduce_rms_norm",
    "vocab_parallel_cross_entropy",
    "linear_cross_entropy",
    "ring_attention",
    "ulysses_attention",
    "context_parallel_attention",
    "context_parallel_decode",
    "shard_sequence",
    "unshard_sequence",
    "sequence_positions",
    "sequence_balance",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "nn",
    "parallelize",
    "is_parallelized",
    "load_pretrained",
    "pipeline",
    "split_backward",
    "ParallelConfig",
    "recommend",
    "build",
    "make_mesh",
    "fsdp_mesh",
    "no_sync",
    "sync_gradients",
    "DistributedBatches",
    "CheckpointManager",
    "FusedColwiseParallel",
    "FusedRowwiseParallel",
    "FusedSequenceParallel",
    "explain",
    "FusedTPError",
    "CollectiveTimeoutError",
    "PeerLostError",
    "RankMismatchError",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'fused_tp' has no attribute {name!r}")
    module = import_module(_LAZY[name])
    attribute = globals()[name] = module if name == "nn" else getattr(module, name)
    return attribute


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
