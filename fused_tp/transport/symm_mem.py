"""Memory that kernels of all ranks of a group write and read: whether the ranks can have it, and making it.

All ranks must come to the same answer, or some would launch kernels that wait for nobody. So they tell each other what
each of them sees, once for a group, and all judge by the same facts.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fused_tp.runtime import settings
from fused_tp.runtime.errors import FusedTPError
from fused_tp.runtime.group import Group, GroupSlot
from fused_tp.transport.hosts import own_host
from fused_tp.transport.peer_watch import own_process, watchable
from fused_tp.transport.shm import shm_transport, shm_unavailable_reason
from fused_tp.transport.store_exchange import exchange
from fused_tp.transport.symmetric_memory import SymmetricMemory, symmetric_empty


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of `device`, which need not be the current device, records a CUDA graph."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


class KernelMemory(Protocol):
    """The ranks of a group as kernels see them.

    Attributes:
        device: where their memory is.
        arch: compute capability as in sm_90, the same on all ranks; 0 where kernels are interpreted.
        sms: multiprocessors, of the rank that has fewest; ranks of one GPU have a share each.
        pids: processes of peers that can be watched from here, by rank.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

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
    process: tuple[str, int]  # as `peer_watch.own_process` says
    gpu: str = ""  # uuid; two ranks may share one
    arch: int = 0
    sms: int = 0
    unreachable: tuple[str, ...] = ()  # GPUs that its own cannot address
    overlapping: bool = False  # torch was told that ranks may share a GPU
    problem: str = ""

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_bytes(text: bytes) -> Facts:
        found = json.loads(text)
        namespace, pid = found["process"]
        return Facts(**found | {"process": (namespace, pid), "unreachable": tuple(found["unreachable"])})


@dataclass(frozen=True)
class GroupMemory:
    """`KernelMemory` of the processes of a group.

    Attributes:
        multicast: whether one address reaches all ranks' memory at once (NVLink SHARP).
    """

    group: Group
    device: torch.device
    arch: int
    sms: int
    pids: Mapping[int, int]
    multicast: bool = False

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def world_size(self) -> int:
        return self.group.size

    def allocate(self, nbytes: int) -> tuple[Tensor, SymmetricMemory]:
        if self.device.type == "cpu":
            return symmetric_empty((nbytes,), torch.uint8, group=self.group.process_group)
        return _allocate_cuda(self.group, self.device, nbytes)


# Programs of a kernel that is interpreted run one after the other; more than one so that all of its paths do run.
_INTERPRETED_PROGRAMS = 3

# By type and number of the device.
_MEMORIES: GroupSlot[dict[tuple[str, int], GroupMemory | str]] = GroupSlot(lambda group: {})


def known_memory(group: Group, device: torch.device) -> GroupMemory | str | None:
    """What `group_memory` has answered; None where it has not been asked yet."""
    return _MEMORIES[group].get((device.type, device.index or 0))


def group_memory(group: Group, device: torch.device) -> GroupMemory | str:
    """The memory that `group` can share on `device`, or why it cannot. The first time, all ranks must ask together.

    Args:
        device: a GPU by its index, or the CPU.

    Raises:
        RuntimeError: the first time is during the capture of a CUDA graph.
        CollectiveTimeoutError: some rank did not ask.
    """
    answer = known_memory(group, device)
    if answer is None:
        if is_capturing(device):
            raise RuntimeError(
                "The group has not run fused kernels yet, and what they need cannot be set up while a CUDA graph is "
                "being captured. Run the same ops once before the capture."
            )
        answer = _MEMORIES[group][device.type, device.index or 0] = _agree(group, device)
    return answer


def _agree(group: Group, device: torch.device) -> GroupMemory | str:
    if device.type == "cpu":
        mine = Facts(own_host(), own_process(), sms=_INTERPRETED_PROGRAMS)
    else:
        mine = _facts_of_gpu(device)
    facts = [Facts.from_bytes(text) for text in exchange(group, "kernel memory", mine.to_bytes())]
    reason = obstacle(facts)
    multicast = False
    if reason is None and device.type == "cpu":
        if shm_transport(group) is None:
            reason = f"the ranks cannot share memory: {shm_unavailable_reason(group)}"
    elif reason is None:
        reason, multicast = _try_fabric(group, device)
    if reason is not None:
        return reason
    pids = watchable({rank: fact.process for rank, fact in enumerate(facts)})
    return GroupMemory(group, device, facts[0].arch, shared_sms(facts), pids, multicast)


def _try_fabric(group: Group, device: torch.device) -> tuple[str | None, bool]:
    """The GPUs' fabric may still refuse, then all ranks hear of it; and whether it has multicast for all."""
    mine: tuple[str, bool]
    try:
        _, handle = _allocate_cuda(group, device, 1024)
        mine = "", bool(getattr(handle, "multicast_ptr", 0))
    except (RuntimeError, ValueError) as error:
        mine = str(error).splitlines()[0], False
    answers = [json.loads(text) for text in exchange(group, "symmetric memory", json.dumps(mine).encode())]
    failed = [f"rank {rank} says: {problem}" for rank, (problem, _) in enumerate(answers) if problem]
    reason = f"torch's symmetric memory failed; {failed[0]}" if failed else None
    return reason, all(multicast for _, multicast in answers)


def shared_sms(facts: list[Facts]) -> int:
    """Multiprocessors for each rank: of its GPU, or of its share where ranks have one together.

    Their kernels wait for each other, so all of them must find room at once.
    """
    ranks_on = Counter(fact.gpu for fact in facts if fact.gpu)
    return max(1, min(fact.sms // ranks_on.get(fact.gpu, 1) for fact in facts))


def obstacle(facts: list[Facts]) -> str | None:
    """What keeps these ranks from writing into each other's memory, or None."""
    problems = [(rank, fact.problem) for rank, fact in enumerate(facts) if fact.problem]
    if problems:
        return f"rank {problems[0][0]}: {problems[0][1]}"
    if len({fact.host for fact in facts}) > 1:
        return "its ranks are on several hosts"
    if len({fact.arch for fact in facts}) > 1:
        return f"its GPUs differ: {', '.join(sorted({f'sm_{fact.arch}' for fact in facts}))}"
    gpus = [fact.gpu for fact in facts if fact.gpu]
    if len(set(gpus)) < len(gpus) and not all(fact.overlapping for fact in facts):
        return "several of its ranks share a GPU"
    for rank, fact in enumerate(facts):
        # A GPU that a rank does not see at all (CUDA_VISIBLE_DEVICES) is judged by torch, when memory is made.
        for peer, other in enumerate(facts):
            if other.gpu in fact.unreachable:
                return f"the GPU of rank {rank} cannot address that of rank {peer} with atomics, as over NVLink"
    return None


_rendezvous = 0  # of this process, of all groups


def _allocate_cuda(group: Group, device: torch.device, nbytes: int) -> tuple[Tensor, SymmetricMemory]:
    """Zeroed symmetric memory of exactly this size, which goes back to the driver when it is freed."""
    from torch.distributed import _symmetric_memory as torch_symmetric_memory

    global _rendezvous
    # torch numbers them by process, not by group, and would wait for a number that never comes.
    counts = [int(text) for text in exchange(group, "rendezvous", str(_rendezvous).encode())]
    if len(set(counts)) > 1:
        raise FusedTPError(
            f"The ranks of group {group.name!r} have made symmetric memory {counts} times, in all of their groups; "
            "torch makes more only where that is equally often. Let all ranks use the same groups, in the same order."
        )
    assert group.process_group is not None
    store = dist.distributed_c10d._get_process_group_store(group.process_group)
    before = getattr(store, "timeout")  # noqa: B009  # which its stub does not know
    store.set_timeout(timedelta(seconds=settings.timeout_seconds()))
    try:
        with torch.cuda.device(device):
            # Not torch's pool of such memory, which gives out a block again with the handle of an earlier group.
            tensor = torch_symmetric_memory._SymmetricMemory.empty_strided_p2p(
                size=(nbytes,), stride=(1,), dtype=torch.uint8, device=device
            )
            _rendezvous += 1
            handle = torch_symmetric_memory.rendezvous(tensor, group.process_group)
    finally:
        store.set_timeout(before)
    return tensor, _HostBarrier(handle, group, device)


class _HostBarrier:
    """torch's handle, but for its barrier: that one is a kernel, and one that waits in vain ends the CUDA context."""

    def __init__(self, handle: Any, group: Group, device: torch.device) -> None:
        self._handle = handle
        self._group = group
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Once all ranks have come and what was in their streams has run; bounded by `FUSED_TP_TIMEOUT`."""
        torch.cuda.current_stream(self._device).synchronize()
        exchange(self._group, "barrier of kernel memory", b"")


def _facts_of_gpu(device: torch.device) -> Facts:
    index = device.index
    try:
        properties = torch.cuda.get_device_properties(index)
        others = [other for other in range(torch.cuda.device_count()) if other != index]
        unreachable = tuple(
            str(torch.cuda.get_device_properties(other).uuid)
            for other in others
            if not (torch.cuda.can_device_access_peer(index, other) and _atomics_reach(index, other))
        )
    except (AssertionError, RuntimeError) as error:  # the first from a torch without CUDA
        return Facts(own_host(), own_process(), problem=str(error).splitlines()[0])
    arch = 10 * properties.major + properties.minor
    return Facts(
        own_host(),
        own_process(),
        str(properties.uuid),
        arch,
        properties.multi_processor_count,
        unreachable,
        os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1",
        "" if arch >= 80 else f"its GPU is sm_{arch}; kernels need sm_80 or later",
    )


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
