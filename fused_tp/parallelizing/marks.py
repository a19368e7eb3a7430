"""Attributes that `parallelize` sets: the Parallelism of each module; the model's Sharding, None without TP ranks."""

from __future__ import annotations

MARK, SHARDING = "_fused_tp_parallelism", "_fused_tp_sharding"
