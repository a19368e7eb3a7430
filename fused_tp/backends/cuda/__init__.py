"""Device kernels of csrc/cuda over symmetric memory."""
