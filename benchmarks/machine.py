"""What a result must say about where it comes from: processor, instruction set, versions."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

from .records import Machine

_PACKAGES = ("fused-tp", "torch", "deepspeed", "megatron-core")


def this_machine() -> Machine:
    """Model name as /proc/cpuinfo has it (Linux; the platform's word elsewhere), torch's vector ISA, usable cores."""
    import torch

    return Machine(cpu=_cpu_model(), isa=torch.backends.cpu.get_cpu_capability(), cores=len(cores()))


def cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that take part, as far as installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
