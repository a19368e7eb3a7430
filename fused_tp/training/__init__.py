"""Training runs that are interrupted: their batches and their checkpoints, at another number of ranks too."""

from fused_tp.training.batches import DistributedBatches
from fused_tp.training.checkpoints import CheckpointManager

__all__ = ["CheckpointManager", "DistributedBatches"]
