"""Compute a model with 16-bit parameters in fp32 for a comparison, in which the rounding of 16 bits could hide errors.

On exit modules get their own parameters and buffers back. The copies take twice the memory of the originals.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_DTYPES = (torch.float16, torch.bfloat16)


def has_16_bit_parameters(model: nn.Module) -> bool:
    """True if `model` has parameters in fp16 or bf16, and all of these are plain tensors."""
    parameters = [p for p in model.parameters() if p.dtype in _DTYPES]
    return bool(parameters) and all(type(p) is nn.Parameter and p.layout == torch.strided for p in parameters)


@contextmanager
def in_float32(models: Sequence[nn.Module]) -> Iterator[None]:
    """Context in which fp32 copies replace the 16-bit parameters and buffers of `models`; tied ones stay tied."""
    copies: dict[int, Tensor] = {}

    def widen(t: Tensor) -> Tensor:
        if id(t) not in copies:
            copy = t.detach().float()
            copies[id(t)] = nn.Parameter(copy, t.requires_grad) if isinstance(t, nn.Parameter) else copy
        return copies[id(t)]

    tables: list[dict[str, Any]] = [
        table for model in models for module in model.modules() for table in (module._parameters, module._buffers)
    ]
    originals = [
        (table, name, t) for table in tables for name, t in table.items() if t is not None and t.dtype in _DTYPES
    ]
    try:
        for table, name, t in originals:
            table[name] = widen(t)
        yield
    finally:
        for table, name, t in originals:
            table[name] = t


def widen_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `arguments` with 16-bit tensors in fp32."""
    widened: dict[str, Any] = tree_map(
        lambda t: t.float() if isinstance(t, Tensor) and t.dtype in _DTYPES else t, dict(arguments)
    )
    return widened


class Find16BitResults(TorchDispatchMode):
    """Mode that records in `found` whether an operation has returned a 16-bit tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self.found |= any(isinstance(t, Tensor) and t.dtype in _DTYPES for t in tree_leaves(results))
        return results
