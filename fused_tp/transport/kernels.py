"""Where the Triton kernels are: installed as `fused_tp.triton_kernels`, in a checkout a folder beside this package.

Imported when a kernel is first asked for and not before: Triton takes 0.2 s to import, and not everybody has it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

_PACKAGE = "fused_tp.triton_kernels"


@cache
def kernel_module(name: str) -> ModuleType:
    """Module `name` of the Triton kernels.

    Raises:
        ImportError: there is no Triton, or this installation has no kernels.
    """
    if _PACKAGE not in sys.modules and importlib.util.find_spec(_PACKAGE) is None:
        folder = Path(__file__).resolve().parents[2] / "triton_kernels"
        spec = importlib.util.spec_from_file_location(
            _PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        if spec is None or spec.loader is None or not (folder / "comm" / "signals.py").exists():
            raise ImportError("this installation of fused_tp has no Triton kernels; install it again")
        package = importlib.util.module_from_spec(spec)
        sys.modules[_PACKAGE] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"{_PACKAGE}.{name}")


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
