"""Ranks whose CPU tensors go through our NCCL communicator: over the doubles of NCCL and of the CUDA driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

from fused_tp.runtime.group import resolve_group
from fused_tp.schedules import nccl_pipeline
from fused_tp.schedules.nccl_pipeline import NcclPipeline
from fused_tp.transport.nccl import NcclDist, nccl_dist
from tests.distributed.schedule_cases import CPU, forced
from tests.native.doubles.libraries import cuda_double, nccl_double
from tests.native_build import use_nccl
from tests.workers import Outcome, fresh_ranks, run_ranks


def doubles() -> tuple[str, str]:
    """Paths of the look-alikes of libnccl and libcuda, which are built if they have not been."""
    return str(nccl_double()), str(cuda_double())


def nccl_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, env: Mapping[str, str | None] | None = None
) -> list[Any]:
    """`run_ranks` of `fn(group, *args)` with the doubles."""
    return run_ranks(world_size, with_doubles, doubles(), fn, args, env=env)


def fresh_nccl_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, expect_deaths: bool = False, **env: str
) -> list[Outcome]:
    """`fresh_ranks` of `fn(group, *args)` with the doubles."""
    return fresh_ranks(world_size, with_doubles, doubles(), fn, args, env=env, expect_deaths=expect_deaths, timeout=60)


def with_doubles(group: Any, libraries: tuple[str, str], fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    use_nccl(*libraries)
    try:
        return fn(group, *args)
    finally:  # the process goes on to other tests
        use_nccl(None)


def transport_of(group: Any) -> NcclDist:
    found = nccl_dist(resolve_group(group), CPU)
    assert isinstance(found, NcclDist), found
    return found


@contextmanager
def public_ops_use(group: Any, chunks: int | None, one_shot_bytes: int = 0) -> Iterator[None]:
    """The public ops run by NcclPipeline, sums in two steps from more than `one_shot_bytes` on."""
    schedule = NcclPipeline(transport_of(group), chunks)
    with forced(group, schedule), mock.patch.object(nccl_pipeline, "ONE_SHOT_BYTES", one_shot_bytes):
        yield
