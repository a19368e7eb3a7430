"""Kernels for one step of attention: the native C++ core, Triton, torch, and a reference in plain torch."""
