"""Linear layer over a weight that is packed once, on CPUs: for engines that only serve.

`packed_linear` reads a weight once and in the order of memory. It takes the time of reading it up to about 8 rows of x,
and that of the multiplications above (csrc/matmul/packed.h). Weights that are trained stay as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fused_tp.backends.gemm import as_rows
from fused_tp.core.native import DTYPE_NUMBERS
from fused_tp.core.native import core as _core
from fused_tp.core.subclass import reason_not_plain
from fused_tp.ops.op import LIBRARY

_DTYPES = (torch.float32, torch.bfloat16)
_PANEL_COLUMNS = 16  # kPanelColumns in csrc/matmul/kernels.h

_NO_DERIVATIVE = "packed_linear has no derivative: call it under torch.no_grad(); to train, use linear layers."

_in_dispatch_mode = torch._C._len_torch_dispatch_stack


def _pair(tensor: Tensor) -> int:
    """Return how many elements of a row of the weight are side by side once packed."""
    return 4 // tensor.dtype.itemsize


def _in_memory(tensor: Tensor) -> Tensor:
    """Return `tensor` with its values in memory: not negated lazily, not torch's tensor of zeros without memory."""
    tensor = tensor.resolve_neg()
    return tensor if tensor.data_ptr() or not tensor.numel() else tensor.clone()


def reason_not_packable(weight: Tensor) -> str:
    """Return the reason why `pack_weight` does not support `weight` on this CPU; empty if it does."""
    if _core is None:
        return "the native core is not built"
    if (reason := reason_not_plain(type(weight))) is not None:
        return f"the weight is not a plain tensor: {reason}"
    if not weight.is_cpu:
        return f"the weight is on {weight.device.type}; packed weights are on the CPU"
    if weight.dtype not in _DTYPES:
        return f"the weight is {weight.dtype}; packed weights are float32 or bfloat16"
    if weight.dim() != 2 or not weight.numel() or weight.shape[0] % _PANEL_COLUMNS or weight.shape[1] % _pair(weight):
        needed = f"a multiple of {_PANEL_COLUMNS} rows" + (" of an even length" if _pair(weight) == 2 else "")
        return f"the weight has shape {list(weight.shape)}; packed weights of this dtype have {needed}"
    if not _core.packed_isa(DTYPE_NUMBERS[weight.dtype]):
        return "this CPU has neither AVX2 nor AVX-512, or FUSED_TP_ISA forbids them"
    return ""


def pack_weight(weight: Tensor) -> Tensor:
    """Return a packed copy of `weight` for `packed_linear`.

    Args:
        weight: [N, K], float32 or bfloat16, on the CPU. N is a multiple of 16; K is even in bfloat16.

    Returns:
        [N / 16, K / p, 16, p], with p = 2 for bfloat16 and 1 for float32: panels of 16 columns of y.

    Raises:
        ValueError: `weight` cannot be packed (`reason_not_packable`).

    Example:
        packed = pack_weight(linear.weight)
        y = packed_linear(x, packed)
    """
    if reason := reason_not_packable(weight):
        raise ValueError(f"pack_weight: {reason}.")
    weight = _in_memory(weight.detach())
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    num_columns, depth = weight.shape
    shape = (num_columns // _PANEL_COLUMNS, depth // _pair(weight), _PANEL_COLUMNS, _pair(weight))
    packed = torch.empty(shape, dtype=weight.dtype, device="cpu")
    _core.pack_weight(
        DTYPE_NUMBERS[weight.dtype],
        weight.data_ptr(),
        weight.stride(0),
        num_columns,
        depth,
        packed.data_ptr(),
        torch.get_num_threads(),
    )
    return packed


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight^T + bias for a weight that `pack_weight` has packed; not differentiable.

    A row of y has the same bits whatever the other rows of x, and for any number of threads.

    Args:
        x: [..., K], of the weight's dtype, on the CPU.
        packed: the packed weight [N, K].
        bias: [N] or None.

    Returns:
        [..., N], with sums in float32, rounded once.

    Raises:
        TypeError: dtypes differ, or a tensor is of a class that overrides torch's functions.
        ValueError: shapes or devices do not fit, or a gradient is required.
    """
    if is_dynamo_compiling() or _in_dispatch_mode():
        result: Tensor = torch.ops.fused_tp.packed_linear.default(x, packed, bias)
        return result
    return _packed_linear(x, packed, bias)


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    num_panels, num_steps, _, pair = packed.shape
    num_columns, depth, dtype = num_panels * _PANEL_COLUMNS, x.shape[-1], x.dtype
    if (reason := reason_not_plain(type(x))) is not None:
        raise TypeError(f"packed_linear: x is not a plain tensor: {reason}.")
    if dtype is not packed.dtype or (bias is not None and bias.dtype is not dtype):
        dtypes = f"x {dtype}, the packed weight {packed.dtype}" + ("" if bias is None else f", bias {bias.dtype}")
        raise TypeError(f"packed_linear: x, weight and bias must have one dtype; got {dtypes}.")
    if depth != num_steps * pair:
        raise ValueError(
            f"packed_linear: x {list(x.shape)} does not fit the packed weight [{num_columns}, {num_steps * pair}]."
        )
    if not x.is_cpu or (bias is not None and (not bias.is_cpu or bias.shape != (num_columns,))):
        raise ValueError("packed_linear: x and bias must be on the CPU, and bias must have one element per column.")
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        raise ValueError(_NO_DERIVATIVE)
    rows = _in_memory(as_rows(x))
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    if bias is not None:
        bias = _in_memory(bias).contiguous()
    y = x.new_empty((*x.shape[:-1], num_columns))
    if len(rows):
        _core.multiply_packed(
            DTYPE_NUMBERS[dtype],
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


def _fake(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], packed.shape[0] * _PANEL_COLUMNS))


def _no_backward(context: object, d_output: Tensor) -> None:
    raise ValueError(_NO_DERIVATIVE)


LIBRARY.define("packed_linear(Tensor x, Tensor packed, Tensor? bias) -> Tensor")
LIBRARY.impl("packed_linear", _packed_linear, "CPU")
torch.library.register_fake("fused_tp::packed_linear", _fake, lib=LIBRARY)
torch.library.register_autograd("fused_tp::packed_linear", _no_backward, lib=LIBRARY)
