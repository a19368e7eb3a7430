"""Compute a model with 16-bit parameters in fp32 for a comparison, in which the rounding of 16 bits could hide errors.

On exit modules get their own parameters and buffers back. The copies take twice the memory of the originals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

T = TypeVar("T")
_DTYPES = (torch.float16, torch.bfloat16)


def has_16_bit_parameters(model: nn.Module) -> bool:
    """True if `model` has parameters in fp16 or bf16, and all of these are plain tensors or DTensors of such."""
    parameters = [p for p in model.parameters() if p.dtype in _DTYPES]
    shards = [p._local_tensor if isinstance(p, DTensor) else p for p in parameters]
    return bool(parameters) and all(type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided for t in shards)


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


def widen_arguments(arguments: T) -> T:
    """Return a copy of nested `arguments` with 16-bit tensors in fp32."""
    widened: T = tree_map(lambda t: t.float() if isinstance(t, Tensor) and t.dtype in _DTYPES else t, arguments)
    return widened


class Find16BitResults(TorchDispatchMode):
    """Mode that records in `found_16_bit` whether an operation has returned a 16-bit tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.found_16_bit = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self.found_16_bit |= any(isinstance(t, Tensor) and t.dtype in _DTYPES for t in tree_leaves(results))
        return results
