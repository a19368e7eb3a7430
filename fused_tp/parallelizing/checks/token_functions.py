"""Functions of torch that combine tokens, called by the callers' code in a forward pass.

Over context parallel ranks only attention sees the tokens of all ranks. What else a forward computes from earlier
tokens (number of the paragraph, n-grams, share of masked tokens) may differ only for batches that contain certain
tokens, which no comparison on other tokens finds. So the calls themselves are found.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_ALL_DIMS = "all"
# Name of a function -> index of its argument dim, and the default dim.
_DIM_ARGUMENTS: dict[str, tuple[int, int | str | None]] = {
    "cumsum": (1, None),
    "cumprod": (1, None),
    "cummax": (1, None),
    "cummin": (1, None),
    "logcumsumexp": (1, None),
    "diff": (2, -1),
    "roll": (2, None),
    "flip": (1, None),
    "unfold": (1, None),
    "sort": (1, -1),
    "argsort": (1, -1),
    **dict.fromkeys(("mean", "sum", "nanmean", "nansum", "prod", "std", "var", "median", "softmax"), (1, _ALL_DIMS)),
    **dict.fromkeys(("max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "any", "all"), (1, _ALL_DIMS)),
    **dict.fromkeys(("logsumexp", "log_softmax", "count_nonzero"), (1, _ALL_DIMS)),
    **dict.fromkeys(("norm", "vector_norm", "linalg_vector_norm", "linalg_norm", "quantile"), (2, _ALL_DIMS)),
}
_TORCH_FOLDER = str(Path(torch.__file__).parent)


class FindTokenFunctions(TorchFunctionMode):
    """Mode that records calls which combine or shift the elements of dim 1 of tensors [batch, seq, ...].

    Attributes:
        calls: "name (file:line)" of each such call.

    Args:
        ignored_folders: calls of code in these folders are not recorded.
    """

    def __init__(self, batch: int, seq: int, ignored_folders: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.calls: dict[str, None] = {}
        self._shape = (batch, seq)
        self._ignored_folders = ignored_folders

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if (
            args
            and not torch.compiler.is_compiling()
            and isinstance(args[0], Tensor)
            and args[0].shape[:2] == self._shape
        ):
            if func is Tensor.__getitem__:
                if self._is_shifted(args[1]):
                    self._record("a slice of the sequence")
            elif name in _DIM_ARGUMENTS:
                index, default = _DIM_ARGUMENTS[name]
                dim = next((kwargs[key] for key in ("dim", "dims", "dimension") if key in kwargs), None)
                dim = dim if dim is not None else args[index] if len(args) > index else default
                if isinstance(dim, bool):  # `unbiased` of std and var
                    dim = default
                dims = dim if isinstance(dim, (tuple, list)) else (dim,)
                if isinstance(dim, str) or any(isinstance(d, int) and d % args[0].ndim == 1 for d in dims):
                    self._record(name)
        return func(*args, **kwargs)

    def _is_shifted(self, index: Any) -> bool:
        """True if `index` takes some consecutive tokens of several."""
        if not isinstance(index, tuple) or len(index) < 2 or not isinstance(index[1], slice) or index[0] is Ellipsis:
            return False
        return 1 < len(range(*index[1].indices(self._shape[1]))) < self._shape[1]

    def _record(self, name: str) -> None:
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH_FOLDER):
            frame = frame.f_back
        if not frame.f_code.co_filename.startswith(self._ignored_folders):
            self.calls[f"{name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"] = None
