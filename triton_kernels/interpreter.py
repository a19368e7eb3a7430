"""Whether Triton's interpreter runs with the numpy that is here."""

from __future__ import annotations

import re


def interpreter_obstacle() -> str | None:
    """Why kernels cannot be interpreted (`TRITON_INTERPRET=1`), or None. Compiled ones need nothing of it."""
    import numpy
    import triton

    if _version(triton.__version__) < (3, 7) and _version(numpy.__version__) >= (2, 4):
        return (
            f"Triton {triton.__version__} interprets kernels with numpy before 2.4 only, and numpy is "
            f"{numpy.__version__}: pip install 'numpy<2.4', or Triton 3.7"
        )
    return None


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
