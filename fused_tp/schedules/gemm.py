"""Which library multiplies on CPU: torch's choice, except where measurement says otherwise.

torch multiplies float32 with MKL, which on CPUs of other makers than Intel runs well below oneDNN (measured on AMD
Zen 4, one thread, weights [4096, 2048]: oneDNN takes 0.64 to 0.83 of MKL's time for 16 to 1024 rows). The choice
depends on the CPU's maker and on the shape, never on a timing: two runs must give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

# x [..., K] and w [N, K], for x @ w^T. In backward `w` is a transposed view, which costs nothing.
Product: TypeAlias = tuple[Tensor, Tensor]

# Multiply-adds below which oneDNN's dispatch costs more than it gains.
_SMALLEST_FOR_ONEDNN = 1 << 24


@cache
def _onednn_beats_mkl() -> bool:
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):
        return False
    try:
        with open("/proc/cpuinfo") as info:
            vendor = next((line.split(":")[1].strip() for line in info if line.startswith("vendor_id")), "")
    except OSError:
        return False
    return vendor != "" and vendor != "GenuineIntel"


def _use_onednn(x: Tensor, w: Tensor) -> bool:
    return (
        x.dtype == torch.float32
        and x.is_cpu
        and w.dtype == torch.float32
        and x.numel() * w.shape[0] >= _SMALLEST_FOR_ONEDNN
        and _onednn_beats_mkl()
        and bool(torch.backends.mkldnn.enabled)
        and not torch._C._len_torch_dispatch_stack()  # FlopCounterMode does not know oneDNN's op
        # oneDNN's op has no derivative: a backward that is itself differentiated would silently lose this term.
        and not (torch.is_grad_enabled() and (x.requires_grad or w.requires_grad))
    )


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ w^T + bias` for x [..., K], w [N, K] (any strides), bias [N]."""
    if x.dtype is torch.float32 and _use_onednn(x, w):
        if bias is not None:
            bias = bias.contiguous()  # oneDNN reads a strided one as if it were dense
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], "")
        return out
    return torch.nn.functional.linear(x, w, bias)


def sum_of_products(products: Sequence[Product], bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """sum_i x_i @ w_i^T + bias, keeping the leading dims of x; into `out` [rows, N] where given."""
    (x, w), *others = products
    if out is None:
        out = linear(x, w, bias)
    elif _use_onednn(x, w):
        out.copy_(linear(x, w, bias).view(out.shape))
    elif bias is None:
        torch.mm(as_rows(x), w.t(), out=out)
    else:
        torch.addmm(bias, as_rows(x), w.t(), out=out)
    for x, w in others:
        as_rows(out).addmm_(as_rows(x), w.t())
    return out


def as_rows(x: Tensor) -> Tensor:
    """`x` [..., n] as [rows, n]; unlike reshape(-1, n) also where there is nothing in it."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def weight_grad(d_output: Tensor, x: Tensor) -> Tensor:
    """dW [N, K] = dY^T @ X, over all leading dims."""
    return linear(as_rows(d_output).t(), as_rows(x).t())


def bias_grad(d_output: Tensor) -> Tensor:
    """db [N]: the sum of dY over all leading dims."""
    return as_rows(d_output).sum(0)
