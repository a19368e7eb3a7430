"""Names of the attributes that `parallelize` sets.

`PARALLELISM_ATTRIBUTE` of each module with parameters holds its Parallelism. `SHARDING_ATTRIBUTE` of the model holds
its Sharding, or None without TP ranks.
"""

from __future__ import annotations

PARALLELISM_ATTRIBUTE, SHARDING_ATTRIBUTE = "_fused_tp_parallelism", "_fused_tp_sharding"
