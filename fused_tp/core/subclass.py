"""Detection of Tensor and Parameter subclasses whose memory native code may read like that of a plain Tensor."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_DELEGATION_NAMES = {"super", "__torch_function__"}  # global names in a function that only calls its base class


@cache
def result_type(tensor_type: type) -> type | None:
    """Return the result type of torch functions on tensors of `tensor_type`: the same type, or Tensor for parameters.

    Return None if `tensor_type` overrides __torch_function__ or __torch_dispatch__ with custom behavior.
    """
    if not issubclass(tensor_type, Tensor) or tensor_type.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return None
    for base in tensor_type.__mro__:
        override: Any = vars(base).get("__torch_function__")
        if base is Tensor:
            return tensor_type
        if override is None:
            continue
        if base is Parameter or override is torch._C._disabled_torch_function_impl:
            return Tensor
        # vLLM's parameters override __torch_function__ for torch.compile; the override only calls super().
        code = getattr(getattr(override, "__func__", override), "__code__", None)
        if code is None or "super" not in code.co_names or not _DELEGATION_NAMES.issuperset(code.co_names):
            return None
    return None


def reason_not_plain(tensor_type: type) -> str | None:
    """Return the reason why tensors of type `tensor_type` cannot be treated as plain Tensors; None if they can."""
    if tensor_type in (Tensor, Parameter) or result_type(tensor_type) is not None:
        return None
    return f"it is a {tensor_type.__name__}, which overrides __torch_function__ or __torch_dispatch__"
