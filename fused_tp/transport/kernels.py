"""Whether Triton is here, and whether it compiles kernels or interprets them.

The kernels, `fused_tp.triton_kernels`, are imported where one is first needed: Triton takes 0.2 s to import, and not
everybody has it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import cache


@cache
def has_triton() -> bool:
    """Whether Triton can be imported; it is not, here."""
    return importlib.util.find_spec("triton") is not None


@cache
def interpreted() -> bool:
    """Whether kernels run on the CPU, interpreted (`TRITON_INTERPRET=1`): Triton decides that when it is imported."""
    if "triton" in sys.modules:
        return bool(sys.modules["triton"].knobs.runtime.interpret)
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")
