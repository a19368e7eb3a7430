"""Numbers that the callers' code takes from tensors in forward and backward, and those that it compares.

`if out.norm() > limit` and `scale = out.max().item()` see this rank's tokens or features only. While the branch is not
taken, no output shows it, so the numbers themselves are compared with those without sharding.
"""

from __future__ import annotations

import sys
import sysconfig
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fused_tp.parallelizing.checks.undisturbed import VariableId

PACKAGE_FOLDERS = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parents[2]),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)
_READS = {"item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__", "__format__"}
_COMPARISONS = {"gt", "lt", "ge", "le", "__gt__", "__lt__", "__ge__", "__le__", "greater", "less"}
_BACKWARDS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
_MAX_NUMEL = 64  # of a larger tensor, the first elements are compared


class RecordReads(TorchFunctionMode):
    """Mode that records the numbers which code outside of installed packages reads from tensors, or compares.

    Attributes:
        values: numbers by the place in the code.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[VariableId, list[float]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with _RecordReadsInBackward(self) if func in _BACKWARDS else nullcontext():
            result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if torch.compiler.is_compiling():
            return result
        if name in _READS and args and isinstance(args[0], Tensor):
            self.record(args[:1])
        elif name in _COMPARISONS and isinstance(result, Tensor) and result.numel() == 1:
            self.record(t for t in args if isinstance(t, Tensor) and t.is_floating_point())
        return result

    def record(self, tensors: Any) -> None:
        """Record the numbers in `tensors`, unless an installed package reads them."""
        if (frame := _callers_frame(sys._getframe(2))) is None:
            return
        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        key = VariableId(0, place, place, is_read=True)
        for tensor in tensors:
            values = tensor.detach().flatten()[:_MAX_NUMEL]
            if type(values) is Tensor and not values.is_complex():
                self.values.setdefault(key, []).extend(map(float, values.tolist()))


class _RecordReadsInBackward(TorchDispatchMode):
    """Mode for hooks that backward calls, in which no TorchFunctionMode is active."""

    def __init__(self, reads: RecordReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense" or (name in _COMPARISONS and result.numel() == 1):
            self._reads.record(t for t in args if isinstance(t, Tensor) and t.is_floating_point())
        return result


def _callers_frame(frame: FrameType | None) -> FrameType | None:
    """Return the frame from which torch was called, if its code is outside of installed packages."""
    while frame is not None and (
        frame.f_code.co_filename.startswith(PACKAGE_FOLDERS[0]) or frame.f_code.co_name == "__torch_function__"
    ):
        frame = frame.f_back
    return None if frame is None or frame.f_code.co_filename.startswith(PACKAGE_FOLDERS) else frame
