"""A plain single-device model, and example programs for fused_tp. Installed as `fused_tp.examples`."""
