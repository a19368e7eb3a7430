"""Which library multiplies on CPU: torch's choice, except where measurement says otherwise.

torch multiplies float32 with MKL, which on CPUs of other makers than Intel runs well below oneDNN (measured on AMD
Zen 4, one thread, weights [4096, 2048]: oneDNN takes 0.64 to 0.83 of MKL's time for 16 to 1024 rows). The choice
depends on the CPU's maker and on the shape, never on a timing: two runs must give the same bits.

oneDNN brings a weight into an order of its own in every call. Layers that decode with frozen weights keep these in that
order (`FrozenWeight`). Measured on the same CPU, four shapes of weights, in times of what ran before: bfloat16 0.64 to
0.77 for 1 to 16 rows and 0.94 for 128, with the same bits; float32 0.51 to 0.82 for 4 and 16 rows, 0.95 for 128, and
1.3 for one row, which goes on as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any, TypeAlias
from weakref import ref

import torch
from torch import Tensor

from fused_tp.runtime import settings

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


def _by_onednn(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    if bias is not None:
        bias = bias.contiguous()  # oneDNN reads a strided one as if it were dense
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], "")
    return out


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ w^T + bias` for x [..., K], w [N, K] (any strides), bias [N]."""
    if _kept and (packed := _packed(x, w)) is not None:
        return _by_onednn(x, packed, bias)
    if x.dtype is torch.float32 and _use_onednn(x, w):
        return _by_onednn(x, w, bias)
    return torch.nn.functional.linear(x, w, bias)


def packed_linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch's own `linear`, or by the packed form of `w` where one is kept."""
    if _kept and (packed := _packed(x, w)) is not None:
        return _by_onednn(x, packed, bias)
    return torch.nn.functional.linear(x, w, bias)


def sum_of_products(products: Sequence[Product], bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """sum_i x_i @ w_i^T + bias, keeping the leading dims of x; into `out` [rows, N] where given."""
    (x, w), *others = products
    if out is None:
        out = linear(x, w, bias)
    elif _use_onednn(x, w) or (_kept and _packed(x, w) is not None):
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


# -- packed weights ---------------------------------------------------------------------------------------------------

_SMALLEST_PACKED = 1 << 21  # elements of a weight; of smaller ones nothing was measured
_PACKED_ROWS = {torch.bfloat16: (1, 128), torch.float32: (4, 128)}  # of x, where the packed form was faster
_PLACES = 16  # of a weight, of four elements each, that are compared in every call

_kept: dict[int, ref[FrozenWeight]] = {}  # by address; layers hold them


@cache
def _packs(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32 and _onednn_beats_mkl()


class FrozenWeight:
    """The part of a frozen parameter that a layer in eval mode multiplies by and, from its second use on where that is
    faster, a copy of it in oneDNN's order. Copies and pickles of this are None."""

    def __init__(self, parameter: Tensor) -> None:
        self.parameter, self.allowed = parameter, settings.RAW.get(settings.pack_weights.key)
        self.weight = weight = getattr(parameter, "_local_tensor", parameter)
        self.address = address = weight.data_ptr()
        self.seen: tuple[Any, ...] = ()  # what tells whether the weight was written to since it was packed
        self.packed: Tensor | None = None
        large = weight.numel() >= _SMALLEST_PACKED and weight.is_contiguous() and not weight.is_inference()
        if large and _packs(weight.dtype) and settings.pack_weights():
            self.sample = weight.as_strided((_PLACES, 4), ((weight.numel() - 4) // (_PLACES - 1), 1))
            _kept[address] = ref(self, lambda gone: _kept.pop(address) if _kept.get(address) is gone else None)

    def is_of(self, parameter: Tensor | None) -> bool:
        """Whether this is still what a layer in eval mode is to hold."""
        return (
            parameter is self.parameter
            and not torch.is_grad_enabled()
            and not parameter.requires_grad
            and getattr(parameter, "_local_tensor", parameter) is self.weight
            and self.weight.data_ptr() == self.address
            and settings.RAW.get(settings.pack_weights.key) == self.allowed
        )

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def for_call(self, x: Tensor, w: Tensor) -> Tensor | None:
        """What x [..., K] is multiplied by in place of `w`, which lies at this address; None where w itself is."""
        least, most = _PACKED_ROWS[self.weight.dtype]
        if w.shape != self.weight.shape or w.dtype != self.weight.dtype or not w.is_contiguous() or x.dtype != w.dtype:
            return None
        if not least * w.shape[1] <= x.numel() <= most * w.shape[1] or self.weight.data_ptr() != self.address:
            return None
        # Counters miss what is written through `.data` of a DTensor. A sample of the elements does not, unless few
        # of them change.
        versions = self.parameter._version, self.weight._version
        if not self.seen or self.seen[0] != versions or not torch.equal(self.seen[1], self.sample):
            self.seen, self.packed = (versions, self.sample.clone()), None
        elif self.packed is None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)
        return self.packed


def _packed(x: Tensor, w: Tensor) -> Tensor | None:
    kept = _kept.get(w.data_ptr())
    weight = None if kept is None else kept()
    # oneDNN's op has no derivative.
    if weight is None or not torch._C._get_mkldnn_enabled() or (torch.is_grad_enabled() and x.requires_grad):
        return None
    return weight.for_call(x, w)
