"""Triton kernels that multiply and communicate in one launch."""
