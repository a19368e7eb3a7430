"""Triton device code: signals, matmuls, attention, norms. Installed as `fused_tp.triton_kernels`; imports nothing of it."""
