"""Every schedule by its name: what it can run, where it can, and how it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from fused_tp.runtime import settings
from fused_tp.runtime.group import Group, GroupSlot
from fused_tp.schedules import fused_kernel
from fused_tp.schedules.base import Schedule
from fused_tp.schedules.collective import Collective
from fused_tp.schedules.copy_engine import CopyEngineSchedule
from fused_tp.schedules.device import DeviceSchedule, device_collectives
from fused_tp.schedules.fused_kernel import FusedKernel
from fused_tp.schedules.half_way import ends_messages
from fused_tp.schedules.hierarchical import Hierarchical
from fused_tp.schedules.nccl_pipeline import NcclPipeline
from fused_tp.schedules.pipelined import Pipelined
from fused_tp.transport.copy_engine import CopyEngine, driver_of, no_copy_engine_on
from fused_tp.transport.device_collectives import DeviceCollectives
from fused_tp.transport.device_plans import SUMMED_DTYPES
from fused_tp.transport.kernels import has_triton, interpreted
from fused_tp.transport.native_kernels import native_kernels_for_cpu, no_native_kernels
from fused_tp.transport.nccl import NcclDist, nccl_dist
from fused_tp.transport.shm import ShmTransport, shm_transport, shm_unavailable_reason
from fused_tp.transport.store import agree
from fused_tp.transport.symm_mem import GroupMemory, group_memory
from fused_tp.transport.torch_dist import torch_dist
from fused_tp.transport.two_level import Hosts, hosts_of, speaking_of

RING = "ring_attention"
ALL_TO_ALL = "all_to_all"
MAX_RANKS = 63  # of kernels that write into each other's memory: their error record has a bit for each


@dataclass(frozen=True)
class Way:
    """A schedule as dispatch sees it.

    Attributes:
        moves_over: what carries its bytes, for `explain`; None is the group's torch.distributed backend.
        lacks: why it has nothing of its own for calls of an op in a dtype, whatever the group; None where it has.
        obstacle: why a group cannot have it on a device, or None. The first time, all ranks must ask together.
        make: the schedule of a group that has no obstacle; the number is that of chunks, None where it is free.
        devices: types of devices that it is for; none: any that torch.distributed moves.
        most_ranks: in a group; None: any number.
    """

    moves_over: str | None
    lacks: Callable[[str, torch.dtype], str | None]
    obstacle: Callable[[Group, torch.device], str | None]
    make: Callable[[Group, torch.device, int | None], Schedule]
    devices: tuple[str, ...] = ()
    most_ranks: int | None = None


def _lacks_nothing(op: str, dtype: torch.dtype) -> None:
    return None


def _no_ring(op: str, dtype: torch.dtype) -> str | None:
    return f"it has no {op}" if op in (RING, ALL_TO_ALL) else None


def _everywhere(group: Group, device: torch.device) -> None:
    return None


def _plain(group: Group, device: torch.device, chunks: int | None = None) -> Collective:
    return Collective(torch_dist(group, device.type))


def _pipelined(group: Group, device: torch.device, chunks: int | None) -> Schedule:
    return Pipelined(torch_dist(group, device.type))


# -- one_sided: CPU shared memory -------------------------------------------------------------------------------------


def shared_memory(group: Group, device: torch.device) -> ShmTransport | None:
    """The group's shared-memory transport, or None."""
    if device.type != "cpu" or not settings.shared_memory_allowed():
        return None
    return shm_transport(group)


def no_shared_memory(group: Group, device: torch.device) -> str | None:
    """Why there is none, or None where there is."""
    if device.type != "cpu":
        return f"it moves CPU tensors only, not {device.type}"
    if not settings.shared_memory_allowed():
        return "FUSED_TP_SHM=0 turns it off"
    return None if shared_memory(group, device) is not None else shm_unavailable_reason(group)


def _one_sided(group: Group, device: torch.device, chunks: int | None) -> Schedule:
    shared = shared_memory(group, device)
    assert shared is not None, "there is no obstacle"
    # Imported here: without the native core it cannot be.
    made: Schedule = import_module("fused_tp.schedules.one_sided").OneSided(shared)
    return made


# -- fused_kernel: Triton over symmetric memory -----------------------------------------------------------------------


def no_kernel_of(op: str, dtype: torch.dtype) -> str | None:
    """Why there is no fused kernel for such a call, or None."""
    if op not in fused_kernel.OPS:
        return f"there is no fused kernel of {op}"
    if dtype not in fused_kernel.DTYPES:
        return f"fused kernels take float16, bfloat16 and float32, not {str(dtype).removeprefix('torch.')}"
    return None


def no_kernel_on(device: torch.device) -> str | None:
    """Why no fused kernel can run on `device`, whatever the group, or None."""
    if not has_triton():
        return "Triton is not installed (pip install triton)"
    if device.type != "cuda" and not (device.type == "cpu" and interpreted()):
        return f"kernels run on NVIDIA GPUs, and on the CPU only where TRITON_INTERPRET=1 is set; this is {device.type}"
    if device.type == "cuda" and interpreted():
        return "TRITON_INTERPRET is set, so kernels run on the CPU only"
    try:
        FusedKernel.load()
    except Exception as error:  # whatever a broken Triton may raise
        return f"the kernels cannot be loaded ({type(error).__name__}: {error})"
    return None


def no_kernel_for(group: Group, device: torch.device) -> str | None:
    """Why this group cannot run fused kernels on `device`, or None. The first time, all ranks must ask together."""
    return (
        _too_many(group)
        or agree(group, f"fused kernels on {device.type}", lambda: no_kernel_on(device))
        or _no_memory(group, device)
    )


def _too_many(group: Group) -> str | None:
    if group.size > MAX_RANKS:
        return f"a kernel's slots serve up to {MAX_RANKS} ranks, and the group has {group.size}"
    return None


def _no_memory(group: Group, device: torch.device) -> str | None:
    memory = group_memory(group, device)
    return memory if isinstance(memory, str) else None


def _memory(group: Group, device: torch.device) -> GroupMemory:
    memory = group_memory(group, device)
    assert isinstance(memory, GroupMemory), "there is no obstacle"
    return memory


def _fused_kernel(group: Group, device: torch.device, chunks: int | None) -> Schedule:
    return FusedKernel(_memory(group, device), _plain(group, device))


# -- one_shot, two_shot, multimem: csrc/cuda over symmetric memory ----------------------------------------------------


def _no_device_kernel_of(op: str, dtype: torch.dtype) -> str | None:
    if op == RING:
        return f"there is no device kernel of {RING}"
    if dtype not in SUMMED_DTYPES and op != ALL_TO_ALL:
        return f"device kernels take float16, bfloat16 and float32, not {str(dtype).removeprefix('torch.')}"
    return None


def no_device_kernels_on(device: torch.device) -> str | None:
    """Why the device kernels cannot run on `device`, whatever the group, or None."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return no_native_kernels(10 * major + minor)
    if device.type == "cpu" and native_kernels_for_cpu():
        return no_native_kernels()
    return f"device kernels run on NVIDIA GPUs; this is {device.type}"


def _no_device_kernels(group: Group, device: torch.device) -> str | None:
    what = f"device kernels on {device.type}"
    return _too_many(group) or agree(group, what, lambda: no_device_kernels_on(device)) or _no_memory(group, device)


def _no_multimem(group: Group, device: torch.device) -> str | None:
    if (reason := _no_device_kernels(group, device)) is not None:
        return reason
    if not _memory(group, device).multicast:
        return "its GPUs have no multicast memory, which needs NVSwitch with SHARP (Hopper or later)"
    return None


_COLLECTIVES: GroupSlot[dict[torch.device, DeviceCollectives]] = GroupSlot(lambda group: {})


def _device(algorithm: str) -> Callable[[Group, torch.device, int | None], Schedule]:
    def make(group: Group, device: torch.device, chunks: int | None) -> Schedule:
        plain = _plain(group, device)
        made = _COLLECTIVES[group]
        if device not in made:
            made[device] = device_collectives(_memory(group, device), plain)
        return DeviceSchedule(algorithm, made[device], plain)

    return make


# -- copy_engine: over symmetric memory too ---------------------------------------------------------------------------


_ENGINES: GroupSlot[dict[torch.device, CopyEngine]] = GroupSlot(lambda group: {})
# Sums, and no matmul to hide them behind.
_NO_COPY_ENGINE_FORM = ("all_reduce", "all_reduce_rms_norm", RING, ALL_TO_ALL)


def _no_copy_engine_form(op: str, dtype: torch.dtype) -> str | None:
    return f"copy engines have nothing for {op}" if op in _NO_COPY_ENGINE_FORM else None


def _no_copy_engine(group: Group, device: torch.device) -> str | None:
    what = f"copy engines on {device.type}"
    return _too_many(group) or agree(group, what, lambda: no_copy_engine_on(device)) or _no_memory(group, device)


def _copy_engine(group: Group, device: torch.device, chunks: int | None) -> Schedule:
    plain = _plain(group, device)
    made = _ENGINES[group]
    if device not in made:
        made[device] = CopyEngine(_memory(group, device), driver_of(device), on_failure=ends_messages(plain))
    return CopyEngineSchedule(made[device], plain, chunks)


# -- nccl_pipeline: a communicator of our own -------------------------------------------------------------------------


def _no_nccl(group: Group, device: torch.device) -> str | None:
    transport = nccl_dist(group, device)
    return transport if isinstance(transport, str) else None


def _nccl_pipeline(group: Group, device: torch.device, chunks: int | None) -> Schedule:
    transport = nccl_dist(group, device)
    assert isinstance(transport, NcclDist), "there is no obstacle"
    return NcclPipeline(transport, chunks)


# -- hierarchical: two levels -----------------------------------------------------------------------------------------

# The ranks of a host take the first of these that they can have. Without any, two levels gain nothing.
INSIDE = ("one_sided", "fused_kernel", "two_shot")
_TWO_LEVELS = "memory inside of hosts, messages across (all by messages where rows do not divide evenly by the ranks)"


def _no_hosts(group: Group, device: torch.device) -> str | None:
    hosts = hosts_of(group)
    if isinstance(hosts, str):
        return hosts
    with speaking_of(group, hosts.inside):
        why_not = {name: WAYS[name].obstacle(hosts.inside, device) for name in INSIDE}
    reasons = [f"{name}: {why}" for name, why in why_not.items() if why is not None]
    mine = f"its ranks have no fast links inside of a host ({'; '.join(reasons)})"
    return agree(
        group, f"fast links inside of hosts on {device.type}", lambda: mine if len(reasons) == len(INSIDE) else None
    )


def _hierarchical(group: Group, device: torch.device, chunks: int | None) -> Schedule:
    hosts = hosts_of(group)
    assert isinstance(hosts, Hosts), "there is no obstacle"
    inside: dict[Any, Schedule] = {}
    made: dict[Way, Schedule] = {}

    def among_host(op: str, dtype: torch.dtype) -> Schedule:
        key = op, dtype, settings.shared_memory_allowed()  # which may be turned off at any time
        if key not in inside:
            with speaking_of(group, hosts.inside):
                usable = (way for name in INSIDE if _usable(way := WAYS[name], op, dtype, hosts.inside, device))
                way = next(usable, WAYS["plain"])
                if way not in made:
                    made[way] = way.make(hosts.inside, device, None)
            inside[key] = made[way]
        return inside[key]

    with speaking_of(group, hosts.across):
        own = nccl_dist(hosts.across, device)
        across = torch_dist(hosts.across, device.type) if isinstance(own, str) else own
    return Hierarchical(hosts, among_host, across, _plain(group, device))


def _usable(way: Way, op: str, dtype: torch.dtype, group: Group, device: torch.device) -> bool:
    return way.lacks(op, dtype) is None and way.obstacle(group, device) is None


WAYS: dict[str, Way] = {
    "plain": Way(None, _lacks_nothing, _everywhere, _plain),
    "pipelined": Way(None, _lacks_nothing, _everywhere, _pipelined),
    "one_sided": Way("shm", _lacks_nothing, no_shared_memory, _one_sided, ("cpu",)),
    "fused_kernel": Way("symmetric memory", no_kernel_of, no_kernel_for, _fused_kernel, ("cuda",), MAX_RANKS),
    **{
        algorithm: Way("symmetric memory", _no_device_kernel_of, obstacle, _device(algorithm), ("cuda",), MAX_RANKS)
        for algorithm, obstacle in (
            ("one_shot", _no_device_kernels),
            ("two_shot", _no_device_kernels),
            ("multimem", _no_multimem),
        )
    },
    "copy_engine": Way("symmetric memory", _no_copy_engine_form, _no_copy_engine, _copy_engine, ("cuda",), MAX_RANKS),
    "nccl_pipeline": Way("NCCL", _lacks_nothing, _no_nccl, _nccl_pipeline, ("cuda",)),
    "hierarchical": Way(_TWO_LEVELS, _no_ring, _no_hosts, _hierarchical, ("cpu", "cuda")),
}
