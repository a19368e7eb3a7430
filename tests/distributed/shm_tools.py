"""Helpers for tests of the shared-memory core: inputs that every rank can create, references, counts of resources."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import uuid
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fused_tp.backends.shared_memory import shm
from fused_tp.backends.shared_memory.shm import ShmTransport, shm_availability, shm_transport
from fused_tp.core.group import Group, resolve_group
from fused_tp.core.pending import accumulate_dtype
from fused_tp.core.store import GROUP_STORES, StoreWithTimeout

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def transport_of(group: dist.ProcessGroup) -> ShmTransport:
    transport = shm_transport(resolve_group(group))
    assert transport is not None, shm_availability(resolve_group(group)).reason
    return transport


@contextlib.contextmanager
def own_group(ranks: Sequence[int]) -> Iterator[dist.ProcessGroup]:
    """Create a group of these global ranks; all ranks of the default group enter, and the others get a non-member."""
    group = dist.new_group(list(ranks), backend="gloo")
    try:
        yield group
    finally:
        if dist.get_rank() in ranks:
            dist.destroy_process_group(group)


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def new_tag() -> str:
    """Draw a tag for `own_transport`, in the test process."""
    return uuid.uuid4().hex


def with_store(group: Group, store: dist.Store) -> Group:
    """Copy the description of `group` without cached state, with `store` for the rendezvous of its ranks."""
    described = dataclasses.replace(group)
    GROUP_STORES[described] = StoreWithTimeout(store)
    return described


def own_transport(group: dist.ProcessGroup, tag: str) -> ShmTransport:
    """Create a private transport over the ranks of `group`, which a test may leave unusable or out of step."""
    store = dist.PrefixStore(tag, dist.distributed_c10d._get_process_group_store(group))
    transport = shm._create_transport(with_store(resolve_group(group), store))
    assert isinstance(transport, ShmTransport), transport
    return transport


def values(count: int, dtype: torch.dtype, rank: int, seed: int = 0) -> Tensor:
    """Random numbers of `rank`, which all ranks can draw; integers cover their whole range, so that sums wrap."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).to(torch.bool)
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max, (count,), generator=generator, dtype=dtype)
    return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)


def summed(terms: Sequence[Tensor], bias: Tensor | None = None) -> Tensor:
    """Sum `terms` in rank order, in fp32 (fp64 for fp64, integers in their own type), rounded once."""
    dtype = terms[0].dtype
    wide = accumulate_dtype(dtype) if dtype.is_floating_point else dtype
    total = terms[0].to(wide)
    for term in (*terms[1:], *([] if bias is None else [bias])):
        total = total + term.to(wide)
    return total.to(dtype)


def assert_same_bits(actual: Tensor, wanted: Tensor, what: str) -> None:
    """Assert equality bit for bit, except that all NaNs count as equal."""
    assert actual.dtype == wanted.dtype and actual.shape == wanted.shape, f"{what}: {actual.shape} {actual.dtype}"
    torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{what}: {text}")


def checksum(tensor: Tensor, before: int = 0) -> int:
    return zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), before)


def core_resources() -> dict[str, int]:
    """Number of descriptors and mappings of the native core in this process."""
    gc.collect()
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(os.readlink(entry))
    return {
        "segments": sum("memfd:fused_tp" in link for link in links),
        "pidfds": sum("[pidfd]" in link for link in links),
        "mappings": sum("memfd:fused_tp" in line for line in Path("/proc/self/maps").read_text().splitlines()),
    }
