"""Versions of the software components that a selftest uses."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import torch


def query_nvidia_smi(fields: str) -> list[str]:
    """Return nvidia-smi's values of `fields` as CSV, one line per GPU; empty if the program is missing or fails."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return process.stdout.splitlines() if process.returncode == 0 else []


def find_versions() -> dict[str, str]:
    """Return the versions of Python, torch, CUDA, NCCL, cuDNN, Triton, numpy and the driver."""
    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for name in ("triton", "numpy"):
        try:
            versions[name] = __import__(name).__version__
        except ImportError:
            versions[name] = "not installed"
    if torch.version.cuda and torch.cuda.is_available():
        with contextlib.suppress(Exception):  # an unknown version must not fail the first step
            versions["cudnn"] = str(torch.backends.cudnn.version())
            versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    for line in query_nvidia_smi("driver_version")[:1]:
        versions["driver"] = line.strip()
    return versions
