"""fused_tp: tensor and context parallelism whose communication hides behind its compute.

Importing it needs no GPU, no compiler, no initialised process group and none of the libraries it integrates with.
"""

from fused_tp.ops.all_gather_matmul import all_gather_matmul
from fused_tp.ops.all_reduce_rms_norm import all_reduce_rms_norm
from fused_tp.ops.collectives import all_gather, all_reduce, copy_to_group, gather, reduce_scatter, scatter
from fused_tp.ops.column_parallel_matmul import column_parallel_matmul
from fused_tp.ops.explain import explain
from fused_tp.ops.matmul_all_reduce import matmul_all_reduce
from fused_tp.ops.matmul_all_reduce_rms_norm import matmul_all_reduce_rms_norm
from fused_tp.ops.matmul_reduce_scatter import matmul_reduce_scatter
from fused_tp.ops.vocab_parallel_cross_entropy import vocab_parallel_cross_entropy
from fused_tp.runtime.errors import CollectiveTimeoutError, FusedTPError, PeerLostError, RankMismatchError

__all__ = [
    "CollectiveTimeoutError",
    "FusedTPError",
    "PeerLostError",
    "RankMismatchError",
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "all_reduce_rms_norm",
    "column_parallel_matmul",
    "copy_to_group",
    "explain",
    "gather",
    "matmul_all_reduce",
    "matmul_all_reduce_rms_norm",
    "matmul_reduce_scatter",
    "reduce_scatter",
    "scatter",
    "vocab_parallel_cross_entropy",
]
