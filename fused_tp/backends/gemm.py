"""Choice of the matmul library on CPU: torch's choice, except where another library was measured to be faster.

torch multiplies float32 with MKL, which is slower than oneDNN on CPUs that are not made by Intel. On AMD Zen 4, one
thread, weights [4096, 2048], oneDNN takes 0.64 to 0.83 of MKL's time for 16 to 1024 rows. The choice depends on the
CPU's vendor and on the shape, but never on a run-time measurement, because two runs must produce the same bits.

Few rows of x, as in decoding, are multiplied by the native core (csrc/matmul), which reads the weight once and in its
stored layout, whereas the libraries reorder the weight in every call. Run time relative to torch on the same CPU, two
ranks of one thread, weights [4096, 2048], over several runs: bfloat16 0.5 to 0.65 for 1 row and 0.75 to 0.85 for 16;
float32 0.7 to 0.9 for 1 row and 0.45 to 0.6 for 4 to 16.
Rejected: a copy of the weight that oneDNN reorders once. It was slower for 1 and 2 rows and 10 to 20 % faster for 16,
doubled the weight's memory, and had to detect every write to the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from fused_tp.core.native import DTYPE_NUMBERS
from fused_tp.core.native import core as _core
from fused_tp.core.subclass import reason_not_plain

# (x [..., K], w [N, K]), multiplied as x @ w^T. Backward passes a transposed view as w, which needs no copy.
Product: TypeAlias = tuple[Tensor, Tensor]

# Multiply-adds below which oneDNN's dispatch costs more than it gains.
_MIN_ONEDNN_MULTIPLY_ADDS = 1 << 24
# Multiply-adds below which oneDNN's copy of a transposed matrix costs more than it gains over MKL, which needs no copy.
# One thread of an AMD EPYC with AVX-512, fp32, 2048 rows: dW [352, 256] takes 4.5 ms by oneDNN and 3.8 by MKL,
# [704, 256] 8.3 and 7.5, [2048, 1024] 86 and 88.
_MIN_TRANSPOSED_MULTIPLY_ADDS = 1 << 29


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
        and _onednn_beats_mkl()
        and bool(torch.backends.mkldnn.enabled)
        and not torch._C._len_torch_dispatch_stack()  # FlopCounterMode does not count oneDNN's op
        # oneDNN's op has no derivative, so a double backward would silently omit this term.
        and not (torch.is_grad_enabled() and (x.requires_grad or w.requires_grad))
    )


def _onednn_linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    if bias is not None:
        bias = bias.contiguous()  # oneDNN ignores the stride of a bias
    (num_rows, num_columns), (row_stride, column_stride) = w.shape, w.stride()
    if not ((column_stride == 1 and row_stride >= num_columns) or (row_stride == 1 and column_stride >= num_rows)):
        w = w.contiguous()  # oneDNN is a thousand times slower for an expanded w, such as the gradient of a sum
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], "")
    return out


# Types whose memory holds their values; subclasses may interpret it differently.
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_MIN_NATIVE_ELEMENTS = 1 << 17  # fewest elements of w; for smaller weights the overhead of a call dominates
_NATIVE_DTYPES = (torch.float32, torch.bfloat16)
_MAX_FEW_ROWS: int = _core.FEW_ROWS if _core is not None else 0  # largest number of rows that the native core supports


@cache
def _max_native_rows(dtype: torch.dtype) -> int:
    """Return the largest number of rows of x for which the native core is used; 0 if never."""
    if dtype is torch.float32 and not _onednn_beats_mkl():
        return 0  # not measured against MKL on Intel CPUs
    return _MAX_FEW_ROWS if _core is not None and _core.few_rows_isa(DTYPE_NUMBERS[dtype]) else 0


def _few_rows_matmul(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor | None:
    """Return x @ w^T + bias (in `out` if given) by the native kernels for few rows; None if not supported."""
    dtype, depth = x.dtype, w.shape[-1]
    if dtype not in _NATIVE_DTYPES or not 0 < x.numel() <= _max_native_rows(dtype) * depth:
        return None
    if bias is not None and bias.dtype is not dtype:
        return None
    if not x.is_cpu or w.numel() < _MIN_NATIVE_ELEMENTS or w.dtype is not dtype or x.shape[-1] != depth:
        return None
    if type(x) not in _PLAIN_TYPES or type(w) not in _PLAIN_TYPES or w.stride(1) != 1 or x.stride(-1) != 1:
        return None
    if x.is_neg() or w.is_neg() or not (x.data_ptr() and w.data_ptr()):
        return None  # lazily negated, or without memory: the memory does not hold the values
    if (torch.is_grad_enabled() and (x.requires_grad or w.requires_grad)) or torch._C._len_torch_dispatch_stack():
        return None  # the kernels have no derivative, and are invisible to modes such as FlopCounterMode
    rows, num_columns = as_rows(x), w.shape[0]
    if bias is not None:
        bias = bias.resolve_neg().expand(num_columns).contiguous()
    y = x.new_empty((*x.shape[:-1], num_columns)) if out is None else out
    _core.few_rows(
        DTYPE_NUMBERS[dtype],
        rows.data_ptr(),
        rows.stride(0),
        w.data_ptr(),
        w.stride(0),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        len(rows),
        num_columns,
        depth,
        torch.get_num_threads(),
    )
    return y


def explain_few_rows(x: Tensor, w: Tensor) -> tuple[bool, str]:
    """Return (used, reason): whether the native kernels for few rows compute x @ w^T when no gradient is needed."""
    if not x.is_cpu:
        return False, f"the kernels for few rows run on CPUs, not on {x.device.type}"
    for name, t in (("x", x), ("weight", w)):
        if (reason := reason_not_plain(type(t))) is not None:
            return False, f"{name} is not a plain tensor: {reason}"
    if x.dtype not in _NATIVE_DTYPES or w.dtype is not x.dtype or not _max_native_rows(x.dtype):
        return False, f"the kernels for few rows do not multiply {x.dtype} by {w.dtype} on this CPU"
    num_rows, max_rows = prod(x.shape[:-1]), _max_native_rows(x.dtype)
    if not 0 < num_rows <= max_rows:
        return False, f"x has {num_rows} rows, and the kernels for few rows support 1 to {max_rows}"
    if w.numel() < _MIN_NATIVE_ELEMENTS:
        return False, f"weight has {w.numel()} elements; the kernels for few rows need at least {_MIN_NATIVE_ELEMENTS}"
    for name, t in (("x", x), ("weight", w)):
        if t.stride(-1) != 1:
            return False, f"the last dim of {name} has stride {t.stride(-1)}; the kernels for few rows need stride 1"
        if t.is_neg():
            return False, f"{name} is negated lazily, so its memory does not hold its values"
    return True, f"{num_rows} rows of x read the weight once, in its stored layout"


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ w^T + bias` for x [..., K], w [N, K] (any strides), bias [N]."""
    # Sizes that rule a library out are compared here, because a call costs more.
    if w.numel() >= _MIN_NATIVE_ELEMENTS and (y := _few_rows_matmul(x, w, bias)) is not None:
        return y
    if x.dtype is torch.float32 and x.numel() * w.shape[0] >= _MIN_ONEDNN_MULTIPLY_ADDS and _use_onednn(x, w):
        return _onednn_linear(x, w, bias)
    return torch.nn.functional.linear(x, w, bias)


def sum_of_products(products: Sequence[Product], bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Return sum_i x_i @ w_i^T + bias with the leading dims of x; in `out` [rows, N] if given."""
    (x, w), *other_products = products
    if out is None:
        out = linear(x, w, bias)
    elif (
        x.numel() <= _MAX_FEW_ROWS * w.shape[-1]
        and out.is_contiguous()
        and _few_rows_matmul(x, w, bias, out) is not None
    ):
        pass
    elif x.numel() * w.shape[0] >= _MIN_ONEDNN_MULTIPLY_ADDS and _use_onednn(x, w):
        out.copy_(_onednn_linear(x, w, bias).view(out.shape))
    elif bias is None:
        torch.mm(as_rows(x), w.t(), out=out)
    else:
        torch.addmm(bias, as_rows(x), w.t(), out=out)
    for x, w in other_products:
        as_rows(out).addmm_(as_rows(x), w.t())
    return out


def as_rows(x: Tensor) -> Tensor:
    """Reshape `x` [..., n] to [rows, n]. Unlike reshape(-1, n), it supports empty tensors."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def weight_grad(d_output: Tensor, x: Tensor) -> Tensor:
    """Return the weight gradient dW [N, K] = dY^T @ X, summed over all leading dims."""
    d_rows, rows = as_rows(d_output), as_rows(x)
    if d_rows.numel() * rows.shape[-1] < _MIN_TRANSPOSED_MULTIPLY_ADDS:
        return torch.mm(d_rows.t(), rows)
    return linear(d_rows.t(), rows.t())


def bias_grad(d_output: Tensor) -> Tensor:
    """Return the bias gradient db [N], the sum of dY over all leading dims."""
    return as_rows(d_output).sum(0)
