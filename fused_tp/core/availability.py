"""Availability of a feature, with the reason if it cannot be used."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Availability:
    """Truthy if a feature can be used. Otherwise `reason` is the reason, as a clause without a full stop."""

    is_available: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.is_available


AVAILABLE = Availability(True)


def unavailable(reason: str) -> Availability:
    """Return an `Availability` that is false and has the given `reason`."""
    return Availability(False, reason)


# -- Triton: its import takes 0.2 s and it may be missing, so modules with kernels are imported at their first use ----


@cache
def has_triton() -> bool:
    """True if Triton can be imported. Does not import it."""
    return importlib.util.find_spec("triton") is not None


@cache
def is_triton_interpreted() -> bool:
    """True if Triton interprets kernels on the CPU (`TRITON_INTERPRET=1`). Triton reads the variable at its import."""
    if "triton" in sys.modules:
        return bool(sys.modules["triton"].knobs.runtime.interpret)
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")
