"""What public ops do before their custom op: cast under autocast. And after: hand weight gradients to Megatron."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast wants matmul operands in, or None where it is off or has nothing to say (float64)."""
    # Of meta, which autocast does not know, torch would raise.
    if isinstance(x, Tensor) and (device := x.device.type) != "meta" and torch.is_autocast_enabled(device):
        return None if x.dtype == torch.float64 else torch.get_autocast_dtype(device)
    return None


def cast(dtype: torch.dtype, *tensors: Tensor | None) -> list[Any]:
    """Floating-point tensors in `dtype`, differentiably; anything else as it is, for the checks to refuse."""
    return [t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for t in tensors]


def main_grads(weights: Sequence[Tensor]) -> list[tuple[Tensor, Tensor] | None]:
    """(weight, its main_grad) where it has one. Looked up in forward: unpacked saved tensors lose Python attributes."""
    grads = [getattr(w, "main_grad", None) for w in weights]
    return [None if grad is None else (w, grad) for w, grad in zip(weights, grads, strict=True)]


def deliver(weight_grad: Tensor, target: tuple[Tensor, Tensor] | None) -> Tensor | None:
    """Accumulate into `main_grad`, and return what autograd is to see.

    Megatron-Core's convention (gradient_accumulation_fusion in its tensor_parallel/layers.py): a weight that has
    `grad_added_to_main_grad` gets it set, so that its data-parallel hook does not add the gradient again, and autograd
    gets a zero gradient, because that hook asserts that there is one. Any other weight gets no `.grad`.
    """
    if target is None:
        return weight_grad
    weight, main_grad = target
    main_grad.add_(weight_grad)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    setattr(weight, "grad_added_to_main_grad", True)  # noqa: B010  # Tensor does not declare it
    return torch.zeros_like(weight)
