"""Detection of Tensor and Parameter subclasses whose memory native code may read like that of a plain Tensor."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_DELEGATES = {"super", "__torch_function__"}  # names used by a function that only delegates to its base class


@cache
def result_kind(kind: type) -> type | None:
    """The type of tensor that torch's own functions return for arguments of type `kind`: `kind` itself, or Tensor for
    parameters. None if `kind` overrides __torch_function__ or __torch_dispatch__ with a meaning of its own."""
    if not issubclass(kind, Tensor) or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return None
    for base in kind.__mro__:
        given: Any = vars(base).get("__torch_function__")
        if base is Tensor:
            return kind
        if given is None:
            continue
        if base is Parameter or given is torch._C._disabled_torch_function_impl:
            return Tensor
        # vLLM's parameters override it for torch.compile, and their override only calls super().
        code = getattr(getattr(given, "__func__", given), "__code__", None)
        if code is None or "super" not in code.co_names or not _DELEGATES.issuperset(code.co_names):
            return None
    return None


def why_not_plain(kind: type) -> str | None:
    """Reason why tensors of type `kind` cannot be treated as a plain Tensor; None if they can."""
    if kind in (Tensor, Parameter) or result_kind(kind) is not None:
        return None
    return f"it is a {kind.__name__}, whose own __torch_function__ or __torch_dispatch__ says what it means"
