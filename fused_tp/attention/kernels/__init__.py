"""Kernels for one step of attention: the native core, Triton, torch, and a reference in plain torch."""
