"""A model that knows nothing of parallelism, and programs to try fused_tp with. Installed as `fused_tp.examples`."""
