"""Profiler ranges of the ops, and the time that this process has waited for its peers.

`torch.profiler` records the ranges while it is active. They are recorded as NVTX ranges too if Nsight Systems or Nsight
Compute started the process. `FUSED_TP_NVTX=1` records NVTX ranges always, and `FUSED_TP_NVTX=0` never.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import profiler as _profiler

from fused_tp.core import settings

_LOG = logging.getLogger("fused_tp")

NVTX_KEY = settings.nvtx.key
# True if an NVTX tool started this process: such tools set these variables.
HAS_NVTX_TOOL = any(os.environ.get(name) for name in ("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID"))
# Only CUDA builds of torch contain NVTX.
_HAS_NVTX = hasattr(torch._C, "_nvtx")

_DTYPE_ABBREVIATIONS = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float8_e4m3fn: "f8e4m3",
}

_python_wait_seconds = 0.0
_wait_sources: weakref.WeakKeyDictionary[Any, Callable[[Any], float]] = weakref.WeakKeyDictionary()


class _NullSpan:
    """Context manager that does nothing. Its methods are C functions, because Python ones would take twice as long."""

    __enter__ = __exit__ = "".format  # accepts any arguments and returns a falsy value


_NULL_SPAN = cast(AbstractContextManager[object], _NullSpan())


def span(name: str, *items: object) -> AbstractContextManager[object]:
    """Context manager that records a profiler range; takes some tens of nanoseconds if no profiler is active.

    The range's name is `name` and `items`, which are formatted only if a profiler is active: a tensor as its shape, a
    list with tensors as the shapes of its matrices and the dtype, other items by `str`; None is skipped. For example,
    the name for ("op", (x, weight), "plain") is "op [8, 64]x[32, 64] bf16 plain".
    """
    if not _profiler._is_profiler_enabled and not (settings.RAW_ENVIRON.get(NVTX_KEY) or HAS_NVTX_TOOL):
        return _NULL_SPAN
    return _make_range(name, items) if is_recording() else _NULL_SPAN


@contextmanager
def op_span(group: str, name: str, *items: object) -> Iterator[None]:
    """Record a `span` around an op of `group`.

    Native code records no ranges. So in a torch profile, the span ends with an empty range that is named after the time
    of native waits and the group, for example "waited 0.000120 s, group 3".
    """
    seconds_before = _native_wait_seconds()
    with span(name, *items):
        yield
        if _profiler._is_profiler_enabled:
            with torch.profiler.record_function(
                f"waited {_native_wait_seconds() - seconds_before:.6f} s, group {group}"
            ):
                pass


@contextmanager
def wait_span(awaited_name: str) -> Iterator[None]:
    """Context manager that counts the time inside as waiting for a peer, in a range "waiting for `awaited_name`"."""
    global _python_wait_seconds
    start_time = time.perf_counter()
    try:
        with span("waiting for", awaited_name):
            yield
    finally:
        _python_wait_seconds += time.perf_counter() - start_time


def is_recording() -> bool:
    """True if a range would be recorded now. Callers use it to skip the construction of range names."""
    return bool(
        _profiler._is_profiler_enabled or ((settings.RAW_ENVIRON.get(NVTX_KEY) or HAS_NVTX_TOOL) and _records_nvtx())
    )


def _records_nvtx() -> bool:
    """True if NVTX ranges are requested and available."""
    setting = settings.nvtx()
    is_requested = HAS_NVTX_TOOL if setting is None else setting
    if is_requested and not _HAS_NVTX:
        _warn_without_nvtx()
    return is_requested and _HAS_NVTX


@cache
def _warn_without_nvtx() -> None:
    _LOG.warning("No NVTX ranges are recorded, because this torch was built without CUDA and so has no NVTX.")


def _make_range(name: str, items: tuple[object, ...]) -> AbstractContextManager[object]:
    is_profiled = bool(_profiler._is_profiler_enabled)
    # Under emit_nvtx torch converts profiler ranges to NVTX ranges, so adding an NVTX range would record it twice.
    emits_nvtx = is_profiled and torch._C._autograd._profiler_type() == torch._C._profiler.ActiveProfilerType.NVTX
    return _ProfilerRange(range_name(name, *items), is_profiled, not emits_nvtx and _records_nvtx())


class _ProfilerRange:
    """A range in torch's profiler, in NVTX or in both. Must be entered and exited on the same thread."""

    def __init__(self, text: str, is_profiled: bool, uses_nvtx: bool) -> None:
        self._text = text
        self._record_function = torch.profiler.record_function(text) if is_profiled else None
        self._uses_nvtx = uses_nvtx

    def __enter__(self) -> None:
        if self._uses_nvtx:
            torch.cuda.nvtx.range_push(self._text)
        if self._record_function is not None:
            self._record_function.__enter__()

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._record_function is not None:
            self._record_function.__exit__(error_class, error, trace)
        if self._uses_nvtx:
            torch.cuda.nvtx.range_pop()


def range_name(name: str, *items: object) -> str:
    """Return the name of the range that `span(name, *items)` records."""
    return " ".join([name, *(_describe_item(item) for item in items if item is not None)]).rstrip()


def _describe_item(item: object) -> str:
    if isinstance(item, Tensor):
        return str(list(item.shape))
    if isinstance(item, (list, tuple)):
        tensors = list(_iterate_tensors(item))
        shown_tensors = [t for t in tensors if t.ndim > 1] or tensors  # the shapes of matrices imply those of vectors
        if not shown_tensors:
            return str(item)
        dtype = shown_tensors[0].dtype
        abbreviation = _DTYPE_ABBREVIATIONS.get(dtype, str(dtype).removeprefix("torch."))
        return f"{'x'.join(map(_describe_item, shown_tensors))} {abbreviation}"
    return str(item)


def _iterate_tensors(values: object) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _iterate_tensors(value)


def add_wait_source(source: Any, seconds: Callable[[Any], float]) -> None:
    """Include `seconds(source)` in `waited_seconds` while `source`, such as a native group, is alive."""
    _wait_sources[source] = seconds


def waited_seconds() -> float:
    """Return the seconds that this process has waited for peers since its start. For a section, take the difference."""
    return _python_wait_seconds + _native_wait_seconds()


def _native_wait_seconds() -> float:
    return sum(seconds(source) for source, seconds in _wait_sources.items())
