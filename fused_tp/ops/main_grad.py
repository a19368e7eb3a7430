"""Gradients that go to a parameter's `main_grad`, as in Megatron-Core, and not to its `.grad`."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.compiler import is_dynamo_compiling

T = TypeVar("T", bound=Tensor)


def into_main_grad(parameter: T) -> T:
    """`parameter`; the gradient that arrives through what is returned is added to `parameter.main_grad`.

    The sum has an autograd node of its own on the way to the parameter, not in the backward of the op that reads the
    parameter: it runs exactly where the parameter's gradient is asked for. The op's backward cannot know. It runs for
    the input's gradient alone, too, and twice where a pipeline schedule splits it.

    Megatron-Core's convention (gradient_accumulation_fusion in its tensor_parallel/layers.py): a parameter that has
    `grad_added_to_main_grad` gets it set, so that its data-parallel hook does not add the gradient again, and a zero
    gradient, because that hook asserts that there is one. Any other parameter gets no `.grad`; torch.autograd.grad,
    which asserts that too, gets zeros. What torch.compile compiles has no such node: there the gradient is in `.grad`.
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
        if hasattr(grad, "to_local") != hasattr(main_grad, "to_local"):  # of a DTensor its part on this rank
            grad, main_grad = (getattr(t, "to_local", lambda t=t: t)() for t in (grad, main_grad))
        main_grad.add_(grad.detach())
        if hasattr(parameter, "grad_added_to_main_grad"):
            parameter.grad_added_to_main_grad = True
        elif not is_captured(ctx.next_functions[0][0]):
            return None
        return torch.zeros_like(parameter)


def is_captured(node: Any) -> bool:
    """Whether torch.autograd.grad was asked for the gradient of the leaf that `node` accumulates."""
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError:  # which says that it has no answer for such a leaf
        return True
    return False
