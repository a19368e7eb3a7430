"""What the ops show to a profiler, and how long this process has waited for its peers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_waited = 0.0
_sources: weakref.WeakKeyDictionary[Any, Callable[[Any], float]] = weakref.WeakKeyDictionary()
_NOTHING = nullcontext()


def span(name: str) -> AbstractContextManager[object]:
    """A named range in `torch.profiler` when one is recording; free when none is."""
    if torch.autograd.profiler._is_profiler_enabled:
        return torch.profiler.record_function(name)
    return _NOTHING


def add_wait(seconds: float) -> None:
    """Count `seconds` as time this process stood still for a peer."""
    global _waited
    _waited += seconds


def add_wait_source(source: Any, seconds: Callable[[Any], float]) -> None:
    """Count also what `seconds(source)` says, as long as `source` lives (a native group keeps its own count)."""
    _sources[source] = seconds


def waited_seconds() -> float:
    """Seconds that this process has waited for peers since it started. Take the difference around what you measure."""
    return _waited + sum(seconds(source) for source, seconds in _sources.items())
