"""Every schedule under test, once as it is and once with its size limits so low that small tensors go the long way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

from fused_tp.schedules import pipelined, shared_memory
from fused_tp.transport import torch_dist
from tests.workers import run_ranks

_NEEDS_CORE = pytest.mark.skipif(find_spec("fused_tp._core") is None, reason="needs the native core: pip install -e .")

VARIANTS = [
    "plain",
    "plain-chunked",
    "pipelined",
    "pipelined-chunked",
    pytest.param("one_sided", marks=_NEEDS_CORE),
    pytest.param("one_sided-chunked", marks=_NEEDS_CORE),
]
SCHEDULES = ["plain", "pipelined", pytest.param("one_sided", marks=_NEEDS_CORE)]


@contextmanager
def low_limits() -> Iterator[None]:
    """Chunks of 64 bytes, and two-step sums from 64 bytes on."""
    places: list[tuple[Any, str]] = [
        (pipelined, "CHUNK_BYTES"),
        (torch_dist, "ONE_SHOT_BYTES"),
        (shared_memory, "_DIRECT_BYTES"),
    ]
    before = [getattr(module, name) for module, name in places]
    for module, name in places:
        setattr(module, name, 64)
    try:
        yield
    finally:
        for (module, name), value in zip(places, before, strict=True):
            setattr(module, name, value)


def run_variant(variant: str, world_size: int, fn: Callable[..., Any], *args: Any, **keywords: Any) -> list[Any]:
    """`run_ranks` under one of VARIANTS."""
    schedule, _, chunked = variant.partition("-")
    env = {"FUSED_TP_SCHEDULE": schedule}
    return run_ranks(world_size, _run, fn, bool(chunked), args, env=env, **keywords)


def _run(group: Any, fn: Callable[..., Any], chunked: bool, args: tuple[Any, ...]) -> Any:
    if not chunked:
        return fn(group, *args)
    with low_limits():
        return fn(group, *args)
