"""Profiler ranges of the ops, and the time this process has waited for its peers.

Ranges are recorded by `torch.profiler` while it is active, and as NVTX ranges, which Nsight Systems and Nsight Compute
read, while such a tool is injected into the process. `FUSED_TP_NVTX=1` makes NVTX ranges for any tool, `=0` never does.
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

NVTX = settings.nvtx.key
# Set by the tool that starts the process.
TOOL = any(os.environ.get(name) for name in ("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID"))
# NVTX is part of torch's CUDA builds. A build without CUDA launches nothing that an NVTX timeline could show.
_HAS_NVTX = hasattr(torch._C, "_nvtx")

_SHORT = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float8_e4m3fn: "f8e4m3",
}

_waited = 0.0
_sources: weakref.WeakKeyDictionary[Any, Callable[[Any], float]] = weakref.WeakKeyDictionary()


class _Nothing:
    """A range that is not recorded. Enters and exits in C, because Python methods would double its cost."""

    __enter__ = __exit__ = "".format  # accepts any arguments and returns a false value


_NOTHING = cast(AbstractContextManager[object], _Nothing())


def span(name: str, *parts: object) -> AbstractContextManager[object]:
    """A profiler range named after `name` and `parts`; costs some tens of nanoseconds where nothing records.

    `parts` are formatted only while something records: a tensor by its shape, a list with tensors by the shapes of its
    matrices and the dtype, None not at all, anything else by `str`. For ("op", (x, weight), "plain") the name is
    "op [8, 64]x[32, 64] bf16 plain".
    """
    if not _profiler._is_profiler_enabled and not (settings.RAW.get(NVTX) or TOOL):
        return _NOTHING
    return _range(name, parts) if recording() else _NOTHING


@contextmanager
def op_span(group: str, name: str, *parts: object) -> Iterator[None]:
    """`span` of an op over the ranks of `group`. In a profile it ends with a range "waited 0.000120 s, group 3" for the
    time of waits in native code, which records no ranges itself."""
    before = _native_seconds()
    with span(name, *parts):
        yield
        if _profiler._is_profiler_enabled:
            with torch.profiler.record_function(f"waited {_native_seconds() - before:.6f} s, group {group}"):
                pass


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Count the time inside as waiting for a peer, and show it as a range "waiting for `what`"."""
    global _waited
    begun = time.perf_counter()
    try:
        with span("waiting for", what):
            yield
    finally:
        _waited += time.perf_counter() - begun


def recording() -> bool:
    """True if a range would be recorded now, so that callers can skip work that only its name needs."""
    return bool(_profiler._is_profiler_enabled or ((settings.RAW.get(NVTX) or TOOL) and _nvtx()))


def _nvtx() -> bool:
    """True if NVTX ranges are wanted and available."""
    asked = settings.nvtx()
    wanted = TOOL if asked is None else asked
    if wanted and not _HAS_NVTX:
        _say_there_is_no_nvtx()
    return wanted and _HAS_NVTX


@cache
def _say_there_is_no_nvtx() -> None:
    _LOG.warning("NVTX ranges are wanted, but this torch has no NVTX, as it is built without CUDA; there will be none.")


def _range(name: str, parts: tuple[object, ...]) -> AbstractContextManager[object]:
    profiled = bool(_profiler._is_profiler_enabled)
    # Under emit_nvtx, torch itself turns the profiler's ranges into NVTX ranges; do not add a second one.
    twice = profiled and torch._C._autograd._profiler_type() == torch._C._profiler.ActiveProfilerType.NVTX
    return _Range(label(name, *parts), profiled, not twice and _nvtx())


class _Range:
    """One range, in torch's profiler and in NVTX. Begins and ends on the same thread."""

    def __init__(self, text: str, profiled: bool, nvtx: bool) -> None:
        self._text = text
        self._record = torch.profiler.record_function(text) if profiled else None
        self._nvtx = nvtx

    def __enter__(self) -> None:
        if self._nvtx:
            torch.cuda.nvtx.range_push(self._text)
        if self._record is not None:
            self._record.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._record is not None:
            self._record.__exit__(kind, error, trace)
        if self._nvtx:
            torch.cuda.nvtx.range_pop()


def label(name: str, *parts: object) -> str:
    """Name of the range of `span(name, *parts)`."""
    return " ".join([name, *(_text(part) for part in parts if part is not None)]).rstrip()


def _text(part: object) -> str:
    if isinstance(part, Tensor):
        return str(list(part.shape))
    if isinstance(part, (list, tuple)):
        tensors = list(_tensors(part))
        shown = [t for t in tensors if t.ndim > 1] or tensors  # biases and norm weights add no information
        if not shown:
            return str(part)
        dtype = shown[0].dtype
        return f"{'x'.join(map(_text, shown))} {_SHORT.get(dtype, str(dtype).removeprefix('torch.'))}"
    return str(part)


def _tensors(values: object) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)


def add_wait_source(source: Any, seconds: Callable[[Any], float]) -> None:
    """Add `seconds(source)` to the count while `source` is alive (a native group keeps its own count)."""
    _sources[source] = seconds


def waited_seconds() -> float:
    """Seconds this process has waited for peers since it started. Take the difference around the code you measure."""
    return _waited + _native_seconds()


def _native_seconds() -> float:
    return sum(seconds(source) for source, seconds in _sources.items())
