"""Adding up terms that have been exchanged: by one kernel where the library of kernels is there, else by torch."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from fused_tp.transport.base import accumulate_dtype
from fused_tp.transport.native_kernels import native_kernels, no_native_kernels
from fused_tp.transport.shm import dtype_number

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def sum_into(out: Tensor, terms: Tensor, bias: Tensor | None = None) -> None:
    """out = sum of `terms` [t, ..., n] over dim 0 in its order, plus `bias` [n], in float32 and rounded once.

    `out` and each of the terms are contiguous. float64 is added in float64.
    """
    if not out.numel():
        return
    if out.is_cuda and out.dtype in _KERNEL_DTYPES and _has_kernels(out.device.index):
        bias = None if bias is None else bias.contiguous()
        with torch.cuda.device(out.device):
            native_kernels().sum_terms(
                terms.data_ptr(),
                terms.shape[0],
                terms.stride(0),
                out.data_ptr(),
                out.numel(),
                dtype_number(out.dtype),
                0 if bias is None else bias.data_ptr(),
                0 if bias is None else bias.numel(),
                torch._C._cuda_getCurrentRawStream(out.device.index),
            )
        return
    total = terms[0].to(accumulate_dtype(out.dtype), copy=True)
    for term in terms[1:]:
        total.add_(term)
    if bias is not None:
        total.add_(bias)
    out.copy_(total)


@cache
def _has_kernels(index: int) -> bool:
    """Whether the library serves this very GPU: one built for others only has no code for it."""
    major, minor = torch.cuda.get_device_capability(index)
    return no_native_kernels(10 * major + minor) is None
