"""Setup of GPU tests: a hardware queue for every stream.

Triton compiles hundreds of kernels for these tests, one after the other: with pytest-xdist, `pytest -n 8 tests/gpu`
takes a fraction of the time. (Except for test_local_ranks.py, which measures times; ranks of several processes take
turns on a GPU.) Ranks that are threads load their kernels beforehand, as loading may wait for a kernel that waits for
another rank. If a test fails at a deadline but passes with CUDA_MODULE_LOADING=EAGER, a kernel was not loaded before.
"""

from __future__ import annotations

import os

# Set before CUDA starts: streams that share a queue run one after the other, and ranks need to run concurrently.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
