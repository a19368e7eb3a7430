"""Linear layer over a weight that is packed once, on CPUs: for engines that only serve.

`packed_linear` reads a weight once and in the order of memory. It takes the time of reading it up to about 8 rows of x,
and that of the multiplications above (csrc/matmul/packed.h). Weights that are trained stay as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fused_tp.backends.gemm import as_rows
from fused_tp.ops.op import LIBRARY

try:
    import fused_tp._core as _core

    _HAS_CORE = True
except ImportError:  # a pure Python installation
    _HAS_CORE = False

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # csrc/dtype.h
_PANEL_COLUMNS = 16  # kPanelColumns in csrc/matmul/kernels.h

_in_dispatch_mode = torch._C._len_torch_dispatch_stack


def reason_not_packable(weight: Tensor) -> str:
    """Return the reason why `pack_weight` does not support `weight` on this CPU; empty if it does."""
    if not _HAS_CORE:
        return "the native core is not built"
    if weight.dim() != 2 or not weight.numel():
        return f"the weight has shape {list(weight.shape)}; packed weights have two dims, neither of them empty"
    if not weight.is_cpu:
        return f"the weight is on {weight.device.type}; packed weights are on the CPU"
    if weight.dtype not in _DTYPES:
        return f"the weight is {weight.dtype}; packed weights are float32 or bfloat16"
    if not _core.packed_isa(_DTYPES[weight.dtype]):
        return "this CPU has neither AVX2 nor AVX-512, or FUSED_TP_ISA forbids them"
    return ""


def pack_weight(weight: Tensor) -> Tensor:
    """Return a packed copy of `weight` for `packed_linear`.

    Args:
        weight: [N, K], float32 or bfloat16, on the CPU.

    Returns:
        [ceil(N / 16), ceil(K / p), 16, p], with p = 2 for bfloat16 and 1 for float32: panels of 16 columns of y, padded
        with zeros. As large as the weight if N is a multiple of 16 and K of p.

    Raises:
        ValueError: `weight` cannot be packed (`reason_not_packable`).

    Example:
        packed = pack_weight(linear.weight)
        y = packed_linear(x, packed)
    """
    if reason := reason_not_packable(weight):
        raise ValueError(f"pack_weight: {reason}.")
    weight = weight.detach()
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    (num_columns, depth), dtype = weight.shape, _DTYPES[weight.dtype]
    pair = 1 if weight.dtype is torch.float32 else 2
    packed = torch.empty(
        (-(-num_columns // _PANEL_COLUMNS), -(-depth // pair), _PANEL_COLUMNS, pair), dtype=weight.dtype, device="cpu"
    )
    _core.pack_weight(
        dtype,
        weight.data_ptr(),
        weight.stride(0),
        num_columns,
        depth,
        packed.data_ptr(),
        torch.get_num_threads(),
    )
    return packed


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None = None, num_columns: int | None = None) -> Tensor:
    """Return x @ weight^T + bias for a weight that `pack_weight` has packed; not differentiable.

    A row of y has the same bits whatever the other rows of x, and for any number of threads.

    Args:
        x: [..., K], of the weight's dtype, on the CPU.
        packed: the packed weight [N, K].
        bias: [N] or None.
        num_columns: N; by default 16 times the number of panels.

    Returns:
        [..., N], with sums in float32, rounded once.

    Raises:
        TypeError: dtypes differ.
        ValueError: shapes or devices do not fit, or a gradient is required.
    """
    num_columns = len(packed) * _PANEL_COLUMNS if num_columns is None else num_columns
    if is_dynamo_compiling() or _in_dispatch_mode():
        result: Tensor = torch.ops.fused_tp.packed_linear.default(x, packed, bias, num_columns)
        return result
    return _packed_linear(x, packed, bias, num_columns)


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, num_columns: int) -> Tensor:
    _, depth_steps, _, pair = packed.shape
    depth, dtype = x.shape[-1], x.dtype
    if dtype is not packed.dtype or (bias is not None and bias.dtype is not dtype):
        dtypes = f"x {dtype}, the packed weight {packed.dtype}" + ("" if bias is None else f", bias {bias.dtype}")
        raise TypeError(f"packed_linear: x, weight and bias must have one dtype; got {dtypes}.")
    if -(-depth // pair) != depth_steps or -(-num_columns // _PANEL_COLUMNS) != len(packed):
        raise ValueError(
            f"packed_linear: x {list(x.shape)} and {num_columns} columns do not fit the packed weight "
            f"{list(packed.shape)}."
        )
    if not x.is_cpu or (bias is not None and (not bias.is_cpu or bias.shape != (num_columns,))):
        raise ValueError("packed_linear: x and bias must be on the CPU, and bias must have one element per column.")
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        raise ValueError("packed_linear has no derivative: call it under torch.no_grad(); to train, use linear layers.")
    rows = as_rows(x).resolve_neg()
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    if bias is not None:
        bias = bias.resolve_neg().contiguous()
    y = x.new_empty((*x.shape[:-1], num_columns))
    if len(rows):
        _core.multiply_packed(
            _DTYPES[dtype],
            rows.data_ptr(),
            rows.stride(0),
            packed.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            y.data_ptr(),
            len(rows),
            num_columns,
            depth,
            torch.get_num_threads(),
        )
    return y


def _fake(x: Tensor, packed: Tensor, bias: Tensor | None, num_columns: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], num_columns))


LIBRARY.define("packed_linear(Tensor x, Tensor packed, Tensor? bias, int num_columns) -> Tensor")
LIBRARY.impl("packed_linear", _packed_linear, "CPU")
torch.library.register_fake("fused_tp::packed_linear", _fake, lib=LIBRARY)
