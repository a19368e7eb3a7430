"""The native core, `fused_tp._core`, if it is built, and its numbers of dtypes."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

core: Any = None
missing_reason = ""
try:
    core = import_module("fused_tp._core")
except ImportError as _error:  # a pure Python installation
    missing_reason = f"the native core is not built ({_error}); install a C++ compiler and reinstall fused_tp"

# csrc/dtype.h. bool is handled as uint8.
DTYPE_NUMBERS = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float64: 3,
    torch.int8: 4,
    torch.uint8: 5,
    torch.bool: 5,
    torch.int16: 6,
    torch.int32: 7,
    torch.int64: 8,
}
