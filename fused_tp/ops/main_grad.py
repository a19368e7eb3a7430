"""Accumulation of gradients in a parameter's `main_grad` instead of `.grad`, as in Megatron-Core."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.compiler import is_dynamo_compiling

T = TypeVar("T", bound=Tensor)


def into_main_grad(parameter: T) -> T:
    """Return an alias of `parameter` whose gradient is added to `parameter.main_grad`.

    An autograd node between the op and the parameter adds the gradient, because it runs exactly if the parameter's
    gradient is requested. The op's backward cannot do it: it also runs for the input's gradient alone, and twice if a
    pipeline schedule splits it.

    Megatron-Core's convention (gradient_accumulation_fusion in its tensor_parallel/layers.py): if a parameter has
    `grad_added_to_main_grad`, the attribute is set to True, so that the data-parallel hook does not add the gradient
    again, and the parameter gets a gradient of zeros, because that hook asserts that one exists. Any other parameter
    gets no `.grad`; torch.autograd.grad, which also requires a gradient, returns zeros. Code compiled by torch.compile
    has no such node: its gradient is in `.grad`.
    """
    if not (parameter.requires_grad and torch.is_grad_enabled()) or is_dynamo_compiling():
        return parameter
    through: T = _IntoMainGrad.apply(parameter)
    return through


class _IntoMainGrad(Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        # Not saved for backward: unpacked saved tensors lose Python attributes.
        ctx.parameter = parameter
        return parameter.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor | None:
        parameter: Any = ctx.parameter
        main_grad = getattr(parameter, "main_grad", None)
        if main_grad is None:
            return grad
        if hasattr(grad, "to_local") != hasattr(main_grad, "to_local"):  # one is a DTensor: use its local shard
            grad, main_grad = (t.to_local() if hasattr(t, "to_local") else t for t in (grad, main_grad))
        main_grad.add_(grad.detach())
        if hasattr(parameter, "grad_added_to_main_grad"):
            parameter.grad_added_to_main_grad = True
        elif not is_captured(ctx.next_functions[0][0]):
            return None
        return torch.zeros_like(parameter)


def is_captured(node: Any) -> bool:
    """True if torch.autograd.grad was asked for the gradient of the leaf that `node` accumulates."""
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch raises for a leaf of torch.autograd.grad
        return True
    return False
