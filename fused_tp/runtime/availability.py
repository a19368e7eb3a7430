"""Whether something can be used, and if not, why not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Availability:
    """Truthy where something can be used.

    Attributes:
        ok: whether it can.
        reason: why it cannot, as the part of a sentence without a full stop; empty where it can.

    Example:
        >>> bool(AVAILABLE), unavailable("Triton is not installed").reason
        (True, 'Triton is not installed')
    """

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


AVAILABLE = Availability(True)


def unavailable(reason: str) -> Availability:
    """The answer no, because of `reason`."""
    return Availability(False, reason)
