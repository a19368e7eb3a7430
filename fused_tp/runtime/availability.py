"""Whether something can be used, and if not, why not."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Availability:
    """Truthy where something can be used; `reason`: why it cannot, as the part of a sentence without a full stop."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


AVAILABLE = Availability(True)


def unavailable(reason: str) -> Availability:
    """The answer no, because of `reason`."""
    return Availability(False, reason)


# -- Triton, whose kernels are imported where one is first needed: it takes 0.2 s, and not everybody has it -----------


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
