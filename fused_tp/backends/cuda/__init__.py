"""Device kernels over symmetric memory: csrc/cuda and Triton."""
