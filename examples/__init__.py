"""Small models to try fused_tp on. Installed as `fused_tp.examples`; nothing here knows of parallelism."""
