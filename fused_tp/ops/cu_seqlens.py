"""Bounds of packed documents, as callers pass them: a tensor, `cu_seqlens`, as in flash attention.

Plans are made of its values, on the host. A public function takes the tensor through `on_host`, which reads no value
and so can be traced by a compiler; the implementation of its op, which runs on real tensors only, reads the values with
`as_bounds`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_tp.attention.spec import check_cu_seqlens
from fused_tp.ops.arguments import check_local


def on_host(name: str, cu_seqlens: Any) -> Tensor | None:
    """`cu_seqlens` on the CPU, None for None; copied there once if it is not, which waits for its device.

    Raises:
        TypeError, ValueError: it is not a 1-D tensor of int32 or int64.
    """
    if cu_seqlens is None:
        return None
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(
            f"{name} must be a Tensor, not {type(cu_seqlens).__name__}; pass torch.tensor([0, ...]), in which each "
            "number is where a document begins, and the last where the last ends."
        )
    check_local(name, cu_seqlens)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} has dtype {cu_seqlens.dtype}; it must be int32 or int64.")
    if cu_seqlens.ndim != 1:
        raise ValueError(f"{name} has shape {tuple(cu_seqlens.shape)}; it must be [documents + 1].")
    return cu_seqlens.cpu()


def as_bounds(name: str, cu_seqlens: Any, seq_len: int) -> tuple[int, ...]:
    """The values of `cu_seqlens`, () for None: (0, ..., seq_len), never going back.

    >>> as_bounds("cu_seqlens", torch.tensor([0, 3, 3, 8]), 8)
    (0, 3, 3, 8)

    Raises:
        TypeError, ValueError: it is not a 1-D tensor of int32 or int64, or not the bounds of `seq_len` tokens.
    """
    tensor = on_host(name, cu_seqlens)
    if tensor is None:
        return ()
    bounds = tuple(tensor.tolist())
    check_cu_seqlens(name, bounds, seq_len)
    return bounds
