"""What tests on a GPU share: hardware queues for all streams.

Triton compiles hundreds of kernels for them, one after the other: with pytest-xdist, `pytest -n 8 tests/gpu` takes a
fraction of the time. (But for test_local_ranks.py, which has an eye on the time; ranks of several processes take turns
on a GPU.) Ranks that are threads load their kernels beforehand, as loading may wait for a kernel that waits for another
rank. Where one of these tests ends at a deadline and passes with CUDA_MODULE_LOADING=EAGER, a kernel was forgotten.
"""

from __future__ import annotations

import os

# Before CUDA starts: streams that share a queue run one after the other, and ranks need to run at once.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
