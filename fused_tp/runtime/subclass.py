"""Subclasses of Tensor and Parameter that show their memory as it is: native code may read it, as that of a Tensor."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_DELEGATES = {"super", "__torch_function__"}  # the names of a function that hands everything on


@cache
def result_kind(kind: type) -> type | None:
    """The kind of tensor that torch's own functions return for arguments of `kind`: `kind` itself, or Tensor for
    parameters. None where a __torch_function__ or __torch_dispatch__ of its own says what `kind` means."""
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
        # vLLM's parameters have one for torch.compile, which calls super() and nothing else.
        code = getattr(getattr(given, "__func__", given), "__code__", None)
        if code is None or "super" not in code.co_names or not _DELEGATES.issuperset(code.co_names):
            return None
    return None


def why_not_plain(kind: type) -> str | None:
    """Why tensors of `kind` do not go the way of a Tensor; None where they do."""
    if kind in (Tensor, Parameter) or result_kind(kind) is not None:
        return None
    return f"it is a {kind.__name__}, whose own __torch_function__ or __torch_dispatch__ says what it means"
