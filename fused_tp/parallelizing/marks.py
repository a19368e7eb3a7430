"""Names of the attributes that `parallelize` sets: `MARK`, on each module with parameters, holds its Parallelism;
`SHARDING`, on the model, holds its Sharding, or None without TP ranks."""

from __future__ import annotations

MARK, SHARDING = "_fused_tp_parallelism", "_fused_tp_sharding"
