"""Batches and checkpoints of training runs that can be interrupted and resumed, also with another number of ranks."""

from fused_tp.training.batches import DistributedBatches
from fused_tp.training.checkpoints import CheckpointManager

__all__ = ["CheckpointManager", "DistributedBatches"]
