"""What `fused-tp doctor` reports, one line each."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

OK, NOTE, PROBLEM = "ok", "note", "problem"


@dataclass(frozen=True)
class Finding:
    """One line of the report; `advice` says what to do about a problem."""

    section: str
    name: str
    value: str
    status: str = OK
    advice: str = ""


def output_of(command: str, *arguments: str) -> list[str]:
    """The lines that a program prints; none where it is not there or fails."""
    path = shutil.which(command)
    if path is None:
        return []
    try:
        done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def dotted(numbers: Sequence[int]) -> str:
    """A version as it is written."""
    return ".".join(map(str, numbers))
