"""Import `fused_tp.triton_kernels`, `.examples` and `.benchmarks` from a checkout that is not installed.

In a checkout these folders are beside the package; `pip install` copies them into it (setup.py, `SUBPACKAGES`).
In a checkout that is not installed, this finder maps the three module names to the folders. It is the first finder, so
that an editable installation of another checkout cannot supply modules of a different version.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

FOLDERS = ("triton_kernels", "examples", "benchmarks")
# exists only in a source checkout; site-packages may contain unrelated folders with these names
_CHECKOUT_FILE = Path("csrc", "native_build.py")


class CheckoutFinder:
    """Meta path finder for `fused_tp.<folder>` of the three folders; ignores top-level packages of the same names."""

    def __init__(self, checkout: Path) -> None:
        self._init_files = {f"fused_tp.{folder}": checkout / folder / "__init__.py" for folder in FOLDERS}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        init_file = self._init_files.get(name)
        if init_file is None or not init_file.exists():
            return None
        return spec_from_file_location(name, init_file, submodule_search_locations=[str(init_file.parent)])


def install_checkout_finder() -> None:
    """Make the folders importable if this package is in a checkout; do nothing in an installation."""
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / _CHECKOUT_FILE).exists() and not any(isinstance(finder, CheckoutFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, CheckoutFinder(checkout))
