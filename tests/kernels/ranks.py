"""Kernels on several ranks: processes over CPU shared memory, each of which interprets its kernels.

Triton decides at import whether a process interprets or compiles kernels, including its own library. So these ranks
are separate processes that start with TRITON_INTERPRET=1 and are kept for the session; other ranks and the test process
never see the variable.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fused_tp.backends.symmetric_memory.symm_mem import allocate_cpu
from fused_tp.core.group import resolve_group
from fused_tp.triton_kernels.comm.signals import Workspace
from tests import workers

interpreted_ranks = partial(workers.run_ranks, interpreted=True, timeout=60)


def interpreted(*world_sizes: int | Callable[..., int], **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Like `tests.workers.on_ranks`, on ranks that interpret Triton kernels."""
    return workers.on_ranks(*world_sizes, run=interpreted_ranks, **options)


def quicken() -> None:
    """Make this process, which only interprets kernels, interpret them in a third of the time.

    At every call of a @jit function, also within kernels, Triton searches all of triton.language for functions to
    replace by its interpreter's, and restores the originals after a launch: here they stay replaced. It also repeats
    every sum and product of integers in 64 bits to detect overflows, which do not occur at the sizes of tests.
    """
    from triton.runtime import interpreter

    search: Callable[[Any], Any] = interpreter._patch_lang
    searched = set()

    def search_once(fn: Any) -> Any:
        if id(fn.__globals__) not in searched:
            searched.add(id(fn.__globals__))
            search(fn)
        return interpreter._LangPatchScope()  # with nothing to restore

    interpreter._patch_lang = search_once
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def workspace_of(group: dist.ProcessGroup, nbytes: int = 1 << 20, timeout_seconds: float = 20.0) -> Workspace:
    buffer, handle = allocate_cpu(resolve_group(group), nbytes)
    return Workspace(buffer, handle, timeout_seconds=timeout_seconds, counters=64)


def same_everywhere(group: dist.ProcessGroup, tensor: Tensor) -> bool:
    """True if this rank holds the same bits as rank 0."""
    mine = tensor.contiguous().view(torch.uint8)
    first = mine.clone()
    dist.broadcast(first, dist.get_global_rank(group, 0), group=group)
    return torch.equal(mine, first)


@contextlib.contextmanager
def delays(seed: int, *, on: bool = True) -> Iterator[None]:
    """Delay this rank at random stores and atomics of its kernels, so that the order of arrivals varies."""
    from triton.runtime.interpreter import InterpreterBuilder

    draw = random.Random(seed)
    before = {name: getattr(InterpreterBuilder, name) for name in ("create_masked_store", "create_atomic_rmw")}

    def late(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if on and draw.random() < 0.05:
                time.sleep(draw.random() * 0.02)
            return method(*args)

        return call

    try:
        for name, method in before.items():
            setattr(InterpreterBuilder, name, late(method))
        yield
    finally:
        for name, method in before.items():
            setattr(InterpreterBuilder, name, method)
