"""Parts of the plugins for serving engines: the check of their functions, and the shared memory of their groups."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

from fused_tp.backends.shared_memory.shm import ShmTransport, shm_transport
from fused_tp.core.group import resolve_group

COLLECTIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Module -> {qualified name of a function: names of its parameters}.
Signatures = Mapping[str, Mapping[str, tuple[str, ...]]]

# With several threads a rank, engines divide a collective among them; those of `shm` run on one.
_MAX_SERIAL_BYTES = 1 << 18


class LayerType(type):
    """Type of the layers that replace vLLM's. Subclasses of vLLM's layers, such as GateLinear, count as theirs.

    vLLM's LoRA replaces instances of what is registered for a name, here a layer of the plugin.
    """

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.__bases__[-1])


def find_change(signatures: Signatures) -> str:
    """Return the name of the first module that is missing or function whose parameters differ; empty if all match."""
    for module_name, functions in signatures.items():
        try:
            module = import_module(module_name)
        except ImportError as error:
            return f"{module_name} ({error})"
        for name, parameters in functions.items():
            function: Any = module
            for part in name.split("."):
                function = getattr(function, part, None)
            found = tuple(inspect.signature(function).parameters) if callable(function) else None
            if found != parameters:
                return f"{module_name}.{name}"
    return ""


def find_version(*packages: str) -> str:
    """Return the version of the first of `packages` that is installed."""
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "of an unknown version"


def shared_memory_of(group: dist.ProcessGroup) -> tuple[ShmTransport | None, int]:
    """Return (the shared memory of `group`, the bytes of the largest tensor for it), alike on all ranks.

    A collective call. (None, 0) if the ranks share no memory.
    """
    transport = shm_transport(resolve_group(group))
    num_threads = torch.tensor(torch.get_num_threads(), dtype=torch.int64, device="cpu")
    dist.all_reduce(num_threads, dist.ReduceOp.MAX, group=group)
    if transport is None:
        return None, 0
    return transport, sys.maxsize if num_threads == 1 else _MAX_SERIAL_BYTES
