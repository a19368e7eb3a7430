"""Detection of Tensor and Parameter subclasses whose memory native code may read like that of a plain Tensor."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_DELEGATION_NAMES = {"super", "__torch_function__"}  # global names in a function that only calls its base class


@cache
def result_kind(kind: type) -> type | None:
    """Return the result type of torch functions on tensors of type `kind`: `kind`, or Tensor for parameters.

    None if `kind` overrides __torch_function__ or __torch_dispatch__ with custom behavior.
    """
    if not issubclass(kind, Tensor) or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return None
    for base in kind.__mro__:
        override: Any = vars(base).get("__torch_function__")
        if base is Tensor:
            return kind
        if override is None:
            continue
        if base is Parameter or override is torch._C._disabled_torch_function_impl:
            return Tensor
        # vLLM's parameters override __torch_function__ for torch.compile; the override only calls super().
        code = getattr(getattr(override, "__func__", override), "__code__", None)
        if code is None or "super" not in code.co_names or not _DELEGATION_NAMES.issuperset(code.co_names):
            return None
    return None


def why_not_plain(kind: type) -> str | None:
    """Return the reason why tensors of type `kind` cannot be treated as plain Tensors; None if they can."""
    if kind in (Tensor, Parameter) or result_kind(kind) is not None:
        return None
    return f"it is a {kind.__name__}, which overrides __torch_function__ or __torch_dispatch__"
