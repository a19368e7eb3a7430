"""Versions of the software components that a selftest uses."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import torch


def nvidia_smi(fields: str) -> list[str]:
    """Return nvidia-smi's values of `fields` as CSV, one line per GPU; empty if the program is missing or fails."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def versions() -> dict[str, str]:
    """Return the versions of Python, torch, CUDA, NCCL, cuDNN, Triton, numpy and the driver."""
    found = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for name in ("triton", "numpy"):
        try:
            found[name] = __import__(name).__version__
        except ImportError:
            found[name] = "not installed"
    if torch.version.cuda and torch.cuda.is_available():
        with contextlib.suppress(Exception):  # an unknown version must not fail the first step
            found["cudnn"] = str(torch.backends.cudnn.version())
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    for line in nvidia_smi("driver_version")[:1]:
        found["driver"] = line.strip()
    return found
