"""Symmetric memory, which kernels of all ranks of a group read and write: its availability, and its allocation.

All ranks must make the same decision; otherwise some would launch kernels that wait for peers without kernels. So the
ranks exchange information once per group, and all of them decide by the same information.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fused_tp.backends.hierarchical.two_level import host_id
from fused_tp.backends.shared_memory.shm import ShmTransport, shm_availability, shm_transport
from fused_tp.core import settings
from fused_tp.core.availability import AVAILABLE, Availability, unavailable
from fused_tp.core.errors import FusedTPError
from fused_tp.core.group import Group, GroupSlot, on_destroy
from fused_tp.core.peer_watch import process_identity, watchable_pids
from fused_tp.core.store import exchange, first_unavailability

T = TypeVar("T")


def is_capturing(device: torch.device) -> bool:
    """True if the current stream of `device`, which need not be the current device, is capturing a CUDA graph."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def check_not_capturing(device: torch.device, missing_clause: str) -> None:
    """Raise RuntimeError during CUDA graph capture.

    Args:
        missing_clause: beginning of the message, such as "The group has no workspace yet".
    """
    if is_capturing(device):
        raise RuntimeError(
            f"{missing_clause}; it cannot be created during CUDA graph capture. Run the same ops once before the "
            "capture."
        )


def make_once_on_device(
    slot: GroupSlot[dict[tuple[str, int], T]],
    group: Group,
    device: torch.device,
    feature: str,
    make: Callable[[Group, torch.device], T],
) -> T:
    """Return the value of `slot` for `group` on `device`. The first call makes it; all ranks must call together.

    Raises:
        RuntimeError: the first call is during the capture of a CUDA graph.
        CollectiveTimeoutError: some rank did not make the call.
    """
    values, key = slot[group], (device.type, device.index or 0)
    value = values.get(key)
    if value is None:
        check_not_capturing(device, f"The group has no {feature} yet")
        value = values[key] = make(group, device)
    return value


class KernelMemory(ABC):
    """Base class of memory of a group that kernels of all its ranks can access, and properties of these ranks.

    Streams share the GPU's queues, of which a process has 8, or up to 32 (CUDA_DEVICE_MAX_CONNECTIONS): a wait in one
    stream blocks all work behind it in the queue. So the workspaces of a rank share the stream in which nothing waits.
    """

    rank: int
    world_size: int
    device: torch.device  # device of their memory
    arch: int  # compute capability as in sm_90, the same on all ranks; 0 where kernels are interpreted
    sms: int  # multiprocessors of the rank with the fewest; ranks on one GPU share its multiprocessors
    pids: Mapping[int, int]  # processes of peers that can be watched from here, by rank
    serialized_by: Hashable  # ops in all memories with an equal value are serialized with each other
    shares_gpu = False  # True if the ranks are threads of this process, on one GPU

    @cached_property
    def rescue_stream(self) -> torch.cuda.Stream | None:
        """Stream of this rank in which nothing waits, so that copies on it can end waits; None on a CPU."""
        return self.own_streams(self, 1)[0] if self.device.type == "cuda" else None

    def own_streams(self, owner: object, num_streams: int) -> list[torch.cuda.Stream]:
        """Return `num_streams` streams of the GPU's highest priority, which are reused only once `owner` is deleted."""
        from fused_tp.triton_kernels.comm.streams import own_streams

        streams: list[torch.cuda.Stream] = own_streams(owner, self.device, num_streams, has_high_priority=True)
        return streams

    @abstractmethod
    def allocate(self, nbytes: int) -> tuple[Tensor, Any]:
        """Return this rank's buffer, uint8 [nbytes], and the handle to reach the others'. A collective call."""


def byte_range(sizes: Sequence[int], dtype: torch.dtype, offset: int | None, nbytes: int) -> tuple[int, int]:
    """Return (first byte, end) of a view at element `offset` of a buffer of `nbytes`.

    Raises:
        ValueError: the view does not fit.
    """
    begin = (offset or 0) * dtype.itemsize
    end = begin + math.prod(sizes) * dtype.itemsize
    if not 0 <= begin <= end <= nbytes:
        raise ValueError(
            f"sizes {tuple(sizes)} of {dtype} at element {offset} end at byte {end}; the buffer has {nbytes} bytes."
        )
    return begin, end


@dataclass(frozen=True)
class SymmMemRankInfo:
    """Information that one rank sends to the others."""

    host: str
    process: Sequence[str | int]  # from `peer_watch.process_identity`
    gpu: str = ""  # uuid, which two ranks may share
    arch: int = 0
    sms: int = 0
    unreachable_gpus: Sequence[str] = ()  # GPUs that this rank's GPU cannot address
    may_share_gpu: bool = False  # torch is configured to let ranks share a GPU
    problem: str = ""


class GroupMemory(KernelMemory):
    """`KernelMemory` of the processes of a group.

    `has_multicast`: one address reaches all ranks' memory (NVLink SHARP).
    """

    def __init__(
        self, group: Group, device: torch.device, arch: int, sms: int, pids: Mapping[int, int], has_multicast: bool
    ) -> None:
        self.group, self.rank, self.world_size = group, group.rank, group.size
        self.device = self.serialized_by = device
        self.arch, self.sms, self.pids, self.has_multicast = arch, sms, pids, has_multicast

    def allocate(self, nbytes: int) -> tuple[Tensor, Any]:
        if self.device.type == "cpu":
            return allocate_cpu(self.group, nbytes)
        return _allocate_cuda(self.group, self.device, nbytes)


# Programs of an interpreted kernel run one after the other; more than one, so that all code paths run.
_INTERPRETED_PROGRAMS = 3

# By device type and index.
_MEMORIES: GroupSlot[dict[tuple[str, int], GroupMemory | Availability]] = GroupSlot(lambda group: {})


def group_memory(group: Group, device: torch.device) -> GroupMemory | Availability:
    """Return the memory that `group` shares on `device`, or the reason why there is none.

    All ranks make the first call together.

    Args:
        device: a GPU with its index, or the CPU.

    Raises the errors of `make_once_on_device`.
    """
    return make_once_on_device(_MEMORIES, group, device, "memory for kernels", _create_group_memory)


def knows_group_memory(group: Group, device: torch.device) -> bool:
    """True if `group_memory` was called before, so that the next call does not communicate."""
    return (device.type, device.index or 0) in _MEMORIES[group]


def _create_group_memory(group: Group, device: torch.device) -> GroupMemory | Availability:
    if device.type == "cpu":
        own_info = SymmMemRankInfo(host_id(), process_identity(), sms=_INTERPRETED_PROGRAMS)
    else:
        own_info = _gpu_rank_info(device)
    rank_infos = [SymmMemRankInfo(**fields) for fields in exchange(group, "kernel memory", asdict(own_info))]
    availability, has_multicast = check_rank_infos(rank_infos), False
    if availability and device.type == "cpu":
        if shm_transport(group) is None:
            availability = unavailable(f"the ranks cannot share memory: {shm_availability(group).reason}")
    elif availability:
        availability, has_multicast = _try_allocation(group, device)
    if not availability:
        return availability
    pids = watchable_pids([rank_info.process for rank_info in rank_infos])
    return GroupMemory(group, device, rank_infos[0].arch, sms_per_rank(rank_infos), pids, has_multicast)


def _try_allocation(group: Group, device: torch.device) -> tuple[Availability, bool]:
    """Allocate a small buffer as a test; return (availability, True if all ranks have multicast). Collective."""
    own_answer: tuple[str, bool]
    try:
        _, handle = _allocate_cuda(group, device, 1024)
        own_answer = "", bool(getattr(handle, "multicast_ptr", 0))
    except (RuntimeError, ValueError) as error:
        own_answer = str(error).splitlines()[0], False
    answers = exchange(group, "symmetric memory", own_answer)
    problems = [f"rank {rank}: {problem}" for rank, (problem, _) in enumerate(answers) if problem]
    availability = unavailable(f"torch could not allocate symmetric memory: {problems[0]}") if problems else AVAILABLE
    return availability, all(has_multicast for _, has_multicast in answers)


def sms_per_rank(rank_infos: list[SymmMemRankInfo]) -> int:
    """Return the smallest number of multiprocessors that a rank can use; ranks on one GPU share its multiprocessors.

    Kernels of the ranks wait for each other, so all of them must fit on the GPU at once.
    """
    num_ranks_by_gpu = Counter(rank_info.gpu for rank_info in rank_infos if rank_info.gpu)
    return max(1, min(rank_info.sms // num_ranks_by_gpu.get(rank_info.gpu, 1) for rank_info in rank_infos))


def check_rank_infos(rank_infos: list[SymmMemRankInfo]) -> Availability:
    """Return whether the ranks can access each other's memory."""
    if not (availability := first_unavailability(rank_info.problem for rank_info in rank_infos)):
        return availability
    if len({rank_info.host for rank_info in rank_infos}) > 1:
        return unavailable("the group's ranks are on several hosts")
    if len({rank_info.arch for rank_info in rank_infos}) > 1:
        return unavailable(
            f"the group's GPUs differ: {', '.join(sorted({f'sm_{rank_info.arch}' for rank_info in rank_infos}))}"
        )
    gpus = [rank_info.gpu for rank_info in rank_infos if rank_info.gpu]
    if len(set(gpus)) < len(gpus) and not all(rank_info.may_share_gpu for rank_info in rank_infos):
        return unavailable("several ranks of the group share a GPU")
    for rank, rank_info in enumerate(rank_infos):
        # `unreachable_gpus` lacks GPUs that the rank does not see (CUDA_VISIBLE_DEVICES). torch checks those when it
        # allocates memory.
        for peer, peer_info in enumerate(rank_infos):
            if peer_info.gpu in rank_info.unreachable_gpus:
                return unavailable(f"the GPU of rank {rank} cannot access the memory of the GPU of rank {peer}")
    return AVAILABLE


def allocate_cpu(group: Group, nbytes: int) -> tuple[Tensor, Any]:
    """Allocate `nbytes` of symmetric memory on the CPU."""
    transport = shm_transport(group)
    if transport is None:
        raise ValueError(f"The ranks cannot share memory: {shm_availability(group).reason}.")
    memory = CpuSymmetricMemory(transport, nbytes)
    return memory.get_buffer(memory.rank, (nbytes,), torch.uint8), memory


_rendezvous_count = 0  # number of rendezvous of this process, over all groups


def _allocate_cuda(
    group: Group, device: torch.device, nbytes: int, group_name: str | None = None
) -> tuple[Tensor, Any]:
    """Allocate `nbytes` of zeroed symmetric memory on a GPU, which returns to the driver when it is freed.

    Args:
        group_name: name of the group, for memory whose group torch must find without a group argument.

    Raises the errors of `_rendezvous_of_all`.
    """
    from torch.distributed import _symmetric_memory as torch_symmetric_memory

    assert group.process_group is not None
    tensor: Any = None
    problem = ""
    try:
        with torch.cuda.device(device):
            # Not from torch's pool, which would return a block of an earlier group with that group's handle.
            tensor = torch_symmetric_memory._SymmetricMemory.empty_strided_p2p(
                size=(nbytes,), stride=(1,), dtype=torch.uint8, device=device, group_name=group_name
            )
    except (RuntimeError, ValueError) as error:
        problem = str(error).splitlines()[0]
    with _rendezvous_of_all(group, device, nbytes, problem):
        handle = torch_symmetric_memory.rendezvous(tensor, group.process_group)
    return tensor, _HostBarrier(handle, group, device)


class NoSymmetricMemory(RuntimeError):
    """A rank could not allocate its memory. All ranks raise this together, and the group stays usable."""


@contextmanager
def _rendezvous_of_all(group: Group, device: torch.device, nbytes: int, problem: str) -> Iterator[None]:
    """Scope of one rendezvous of torch, entered by all ranks of `group` together; bounded by `FUSED_TP_TIMEOUT`.

    Args:
        problem: reason why this rank could not allocate its memory; empty if it could.

    Raises:
        NoSymmetricMemory: some rank could not allocate its memory.
        FusedTPError: the ranks' rendezvous counts differ, so torch would wait forever.
    """
    global _rendezvous_count
    # torch counts rendezvous per process, not per group. If the ranks' counts differ, it waits forever for a number
    # that no peer uses.
    answers = exchange(group, "rendezvous", (_rendezvous_count, problem))
    counts = [count for count, _ in answers]
    if len(set(counts)) > 1:
        raise FusedTPError(
            f"The ranks of group {group.name!r} have created symmetric memory {counts} times in all of their groups, "
            "but torch needs equal counts. Use the same groups on all ranks, in the same order."
        )
    problems = [f"rank {rank}: {rank_problem}" for rank, (_, rank_problem) in enumerate(answers) if rank_problem]
    if problems:
        raise NoSymmetricMemory(f"{nbytes} bytes of symmetric memory could not be allocated; {problems[0]}")
    assert group.process_group is not None
    store = dist.distributed_c10d._get_process_group_store(group.process_group)
    previous_timeout = getattr(store, "timeout")  # noqa: B009  # missing from its stub
    store.set_timeout(timedelta(seconds=settings.timeout_seconds()))
    try:
        with torch.cuda.device(device):
            _rendezvous_count += 1
            yield
    finally:
        store.set_timeout(previous_timeout)


# -- the workspace of torch's own ops ----------------------------------------------------------------------------------

_WORKSPACES: GroupSlot[str] = GroupSlot()  # names of the groups whose torch workspace was made here


def make_torch_workspace(group: Group, device: torch.device, nbytes: int) -> Tensor | None:
    """Grow torch's workspace of `group` to at least `nbytes`; return the previous one, which may still be in use.

    A collective call. torch keeps the workspace by the group's name, while the group is alive. torch itself grows the
    workspace within an op, but there a rank that cannot allocate it would leave the other ranks waiting.

    Raises the errors of `_rendezvous_of_all`.
    """
    from torch.distributed import _symmetric_memory as torch_symmetric_memory

    name: Any = group.name
    workspaces = torch_symmetric_memory._group_name_to_workspace_tensor
    outgrown_workspace = workspaces.get(name)
    if device.type == "cpu":
        torch_symmetric_memory.get_symm_mem_workspace(name, nbytes)
    elif outgrown_workspace is None or outgrown_workspace.numel() * outgrown_workspace.element_size() < nbytes:
        tensor, _ = _allocate_cuda(group, device, nbytes, name)
        workspaces[name] = tensor
    _WORKSPACES[group] = name
    return outgrown_workspace


@on_destroy
def _forget_workspace(group: Group) -> None:
    """Drop torch's workspace of a destroyed group: torch would reuse it for the next group of the same name."""
    if (name := _WORKSPACES.get(group)) is not None:
        from torch.distributed import _symmetric_memory as torch_symmetric_memory

        torch_symmetric_memory._group_name_to_workspace_tensor.pop(name, None)


class _HostBarrier:
    """torch's handle with a barrier on the host: torch's is a kernel that traps if a peer is absent."""

    def __init__(self, handle: Any, group: Group, device: torch.device) -> None:
        self._handle = handle
        self._group = group
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Wait until all ranks have arrived and the work in their streams has run; bounded by `FUSED_TP_TIMEOUT`."""
        torch.cuda.current_stream(self._device).synchronize()
        exchange(self._group, "barrier of kernel memory")


def _gpu_rank_info(device: torch.device) -> SymmMemRankInfo:
    index = device.index
    try:
        properties = torch.cuda.get_device_properties(index)
        other_gpu_indices = [gpu_index for gpu_index in range(torch.cuda.device_count()) if gpu_index != index]
        unreachable_gpus = tuple(
            str(torch.cuda.get_device_properties(gpu_index).uuid)
            for gpu_index in other_gpu_indices
            if not torch.cuda.can_device_access_peer(index, gpu_index)
        )
    except (AssertionError, RuntimeError) as error:  # a torch without CUDA raises AssertionError
        return SymmMemRankInfo(host_id(), process_identity(), problem=str(error).splitlines()[0])
    arch = 10 * properties.major + properties.minor
    return SymmMemRankInfo(
        host_id(),
        process_identity(),
        str(properties.uuid),
        arch,
        properties.multi_processor_count,
        unreachable_gpus,
        os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1",
        "" if arch >= 80 else f"its GPU is sm_{arch}; kernels need sm_80 or later",
    )


# -- symmetric memory: one interface for CPU and CUDA ------------------------------------------------------------------
#
# The interface is the part of torch's own handle (`torch.distributed._symmetric_memory`) that kernels use. They
# signal by words of the memory itself, so torch's signal pads are not part of it.


class CpuSymmetricMemory:
    """Symmetric memory on the CPU: one buffer of `nbytes` per rank, which all ranks of the host can access."""

    def __init__(self, transport: ShmTransport, nbytes: int) -> None:
        self._transport = transport
        self._nbytes = nbytes
        self.rank = transport.rank
        self.world_size = transport.world_size
        with transport.begin("symmetric_memory", (nbytes,), torch.uint8, 8) as workspace:
            # Within the call, so that peers are notified if one rank's pool is full.
            own_memory = transport.core_group.allocate(max(nbytes, 64))
            workspace.buffer(self.rank, (1,), torch.int64).fill_(own_memory.offset)
            workspace.signal(1)
            workspace.wait_all(1)
            offsets = [int(workspace.buffer(r, (1,), torch.int64)) for r in range(self.world_size)]
        # `own_memory` keeps this rank's range from being allocated again; the views of peers' memory do not.
        self._memories = [
            own_memory if r == self.rank else transport.core_group.at(r, offset, max(nbytes, 64))
            for r, offset in enumerate(offsets)
        ]
        self.buffer_ptrs = [memory.address for memory in self._memories]

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int | None = 0) -> Tensor:
        """Return a view of `rank`'s buffer, at element `storage_offset`."""
        begin, end = byte_range(sizes, dtype, storage_offset, self._nbytes)
        if begin == end:
            return torch.empty(tuple(sizes), dtype=dtype, device="cpu")
        memory = self._memories[rank]
        return torch.frombuffer(memory, dtype=dtype, count=math.prod(sizes), offset=begin).view(tuple(sizes))

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Wait until every rank has called it; bounded by `FUSED_TP_TIMEOUT`, `timeout_ms` is ignored."""
        self._transport.barrier()
