"""Stand-ins for SGLang's kernels for CPUs, which have no wheel: each name exists, and calling one raises an error.

Without AMX, SGLang's engine imports these names for text models, and calls none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is not installed")

    return kernel
