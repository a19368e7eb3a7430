"""Import `fused_tp.triton_kernels`, `.examples` and `.benchmarks` from a checkout that is not installed.

These folders are stored beside the package and are installed inside it (setup.py, `FOLDED_IN`). In a checkout without
`pip install` nothing maps them, so this finder does. It precedes the other finders, because an editable installation of
another checkout would otherwise mix two trees.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

FOLDERS = ("triton_kernels", "examples", "benchmarks")
_MARK = Path("csrc", "native_build.py")  # only in a checkout: site-packages may hold such folders of other projects


class CheckoutFinder:
    """Meta path finder of the three folders inside fused_tp; top-level packages of the same names are not touched."""

    def __init__(self, checkout: Path) -> None:
        self._places = {f"fused_tp.{folder}": checkout / folder / "__init__.py" for folder in FOLDERS}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        place = self._places.get(name)
        if place is None or not place.exists():
            return None
        return spec_from_file_location(name, place, submodule_search_locations=[str(place.parent)])


def find_folders() -> None:
    """Make the folders importable if this package is in a checkout; do nothing in an installation."""
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / _MARK).exists() and not any(isinstance(finder, CheckoutFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, CheckoutFinder(checkout))
