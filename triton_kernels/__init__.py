"""Triton device code: signals, matmuls, attention, norms. Installed as `fused_tp.triton_kernels`.

It imports nothing of `fused_tp`, so that a kernel can be compiled and tried on its own.
"""
