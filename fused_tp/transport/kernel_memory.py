"""Memory that kernels of all ranks of a group write and read: whether the ranks can have it, and making it.

All ranks must come to the same answer, or some would launch kernels that wait for nobody. So they tell each other what
each of them sees, once for a group, and all judge by the same facts.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fused_tp.runtime.group import Group
from fused_tp.transport.peer_watch import own_process, watchable
from fused_tp.transport.shm import shm_transport, shm_unavailable_reason
from fused_tp.transport.symmetric_memory import SymmetricMemory, symmetric_empty


class KernelMemory(Protocol):
    """The ranks of a group as kernels see them.

    Attributes:
        arch: compute capability as in sm_90, the same on all ranks; 0 where kernels are interpreted.
        sms: multiprocessors, of the rank that has fewest.
        pids: processes of peers that can be watched from here, by rank.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def arch(self) -> int: ...

    @property
    def sms(self) -> int: ...

    @property
    def pids(self) -> Mapping[int, int]: ...

    def allocate(self, nbytes: int) -> tuple[Tensor, SymmetricMemory]:
        """This rank's buffer, uint8 [nbytes], and the handle to reach the others'. All ranks call it alike."""
        ...


@dataclass(frozen=True)
class Facts:
    """What one rank tells the others."""

    host: str
    gpu: str  # uuid; two ranks may share one
    arch: int
    sms: int
    process: tuple[str, int]  # as `peer_watch.own_process` says
    unreachable: frozenset[str] = frozenset()  # GPUs that its own cannot address
    problem: str = ""


@dataclass(frozen=True)
class GroupMemory:
    """`KernelMemory` of the processes of a group."""

    group: Group
    device: torch.device
    arch: int
    sms: int
    pids: Mapping[int, int]

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def world_size(self) -> int:
        return self.group.size

    def allocate(self, nbytes: int) -> tuple[Tensor, SymmetricMemory]:
        return symmetric_empty((nbytes,), torch.uint8, group=self.group.process_group, device=self.device)


# Programs of a kernel that is interpreted run one after the other; more than one so that all of its paths do run.
_INTERPRETED_PROGRAMS = 3


def group_memory(group: Group, device: torch.device) -> GroupMemory | str:
    """The memory that `group` can share on `device`, or why it cannot. The first time, all ranks must ask together."""
    key = ("kernel memory", device)
    if key not in group.memo:
        group.memo[key] = _cpu_memory(group, device) if device.type == "cpu" else _cuda_memory(group, device)
    answer: GroupMemory | str = group.memo[key]
    return answer


def _cpu_memory(group: Group, device: torch.device) -> GroupMemory | str:
    if shm_transport(group) is None:
        return f"the ranks cannot share memory: {shm_unavailable_reason(group)}"
    everyone = _exchange(group, Facts(_host(), "", 0, _INTERPRETED_PROGRAMS, own_process()))
    return _memory_of(group, device, everyone)


def _cuda_memory(group: Group, device: torch.device) -> GroupMemory | str:
    facts = _exchange(group, _facts_of(device))
    reason = obstacle(facts)
    if reason is None:
        # The fabric may still refuse; then it does so on all ranks, or they hear of it here.
        problem = ""
        try:
            symmetric_empty((1024,), torch.uint8, group=group.process_group, device=device)
        except (RuntimeError, ValueError) as error:
            problem = str(error).splitlines()[0]
        problems = [fact.problem for fact in _exchange(group, replace(facts[group.rank], problem=problem))]
        failed = [f"rank {rank} says: {text}" for rank, text in enumerate(problems) if text]
        reason = f"torch's symmetric memory failed; {failed[0]}" if failed else None
    if reason is not None:
        return reason
    return _memory_of(group, device, facts)


def _memory_of(group: Group, device: torch.device, facts: list[Facts]) -> GroupMemory:
    pids = watchable({rank: fact.process for rank, fact in enumerate(facts)})
    return GroupMemory(group, device, facts[0].arch, min(fact.sms for fact in facts), pids)


def obstacle(facts: list[Facts]) -> str | None:
    """What keeps these ranks from writing into each other's memory, or None."""
    problems = [(rank, fact.problem) for rank, fact in enumerate(facts) if fact.problem]
    if problems:
        return f"rank {problems[0][0]}: {problems[0][1]}"
    if len({fact.host for fact in facts}) > 1:
        return "its ranks are on several hosts"
    if len({fact.arch for fact in facts}) > 1:
        return f"its GPUs differ: {', '.join(sorted({f'sm_{fact.arch}' for fact in facts}))}"
    overlapping = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"
    if len({fact.gpu for fact in facts}) < len(facts) and not overlapping:
        return "several of its ranks share a GPU"
    for rank, fact in enumerate(facts):
        # A GPU that a rank does not see at all (CUDA_VISIBLE_DEVICES) is judged by torch, when memory is made.
        for peer, other in enumerate(facts):
            if other.gpu in fact.unreachable:
                return f"the GPU of rank {rank} cannot address that of rank {peer} with atomics, as over NVLink"
    return None


def _facts_of(device: torch.device) -> Facts:
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        properties = torch.cuda.get_device_properties(index)
        others = [other for other in range(torch.cuda.device_count()) if other != index]
        unreachable = frozenset(
            str(torch.cuda.get_device_properties(other).uuid)
            for other in others
            if not (torch.cuda.can_device_access_peer(index, other) and _atomics_reach(index, other))
        )
    except RuntimeError as error:
        return Facts(_host(), "", 0, 0, own_process(), problem=str(error).splitlines()[0])
    arch = 10 * properties.major + properties.minor
    problem = "" if arch >= 80 else f"its GPU is sm_{arch}; kernels need sm_80 or later"
    sms = properties.multi_processor_count
    return Facts(_host(), str(properties.uuid), arch, sms, own_process(), unreachable, problem)


_NATIVE_ATOMIC_SUPPORTED = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED of the driver API


def _atomics_reach(index: int, other: int) -> bool:
    """Whether atomics of GPU `index` work in the memory of `other`: over NVLink they do, over PCIe they do not."""
    value = ctypes.c_int(0)
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute(
            ctypes.byref(value), _NATIVE_ATOMIC_SUPPORTED, index, other
        )
    except (OSError, AttributeError):
        return False
    return status == 0 and value.value == 1


def _host() -> str:
    """Names the running host, not its address: containers of one host may share GPUs, or not see each other's."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def _exchange(group: Group, mine: Facts) -> list[Facts]:
    everyone: list[Facts] = [mine] * group.size
    dist.all_gather_object(everyone, mine, group=group.process_group)
    return everyone
