"""Accumulation of gradients in a parameter's `main_grad` instead of `.grad`, as in Megatron-Core."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.compiler import is_dynamo_compiling

T = TypeVar("T", bound=Tensor)


def redirect_to_main_grad(parameter: T) -> T:
    """Return an alias of `parameter` whose gradient is added to `parameter.main_grad`.

    An autograd node between the op and the parameter adds the gradient. This node runs only if the gradient of the
    parameter is requested. Rejected: adding it in the op's backward, which also runs if only the gradient of the input
    is requested, and runs twice if a pipeline schedule splits it.

    Follows Megatron-Core (gradient_accumulation_fusion in tensor_parallel/layers.py). If a parameter has the attribute
    `grad_added_to_main_grad`, it is set to True, so that the data-parallel hook does not add the gradient again. Such a
    parameter gets a `.grad` of zeros, because the hook asserts that a gradient exists. Any other parameter gets no
    `.grad`. torch.autograd.grad requires a gradient, so the node then returns zeros.

    Under torch.compile this function returns `parameter` itself, so the gradient is in `.grad`.
    """
    if not (parameter.requires_grad and torch.is_grad_enabled()) or is_dynamo_compiling():
        return parameter
    alias: T = _RedirectToMainGrad.apply(parameter)
    return alias


class _RedirectToMainGrad(Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        # Not save_for_backward: unpacked tensors do not have the Python attributes of the parameter.
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
        elif not is_grad_requested(ctx.next_functions[0][0]):
            return None
        return torch.zeros_like(parameter)


def is_grad_requested(node: Any) -> bool:
    """True if torch.autograd.grad requested the gradient of the leaf of the AccumulateGrad node `node`."""
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch raises for a leaf that torch.autograd.grad requested
        return True
    return False
