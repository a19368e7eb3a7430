"""Which schedule an op runs on: `FUSED_TP_SCHEDULE` where set, else the dispatch table."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from fused_tp.runtime import dispatch, settings
from fused_tp.runtime.group import Group
from fused_tp.schedules import fused_kernel
from fused_tp.schedules.base import Schedule
from fused_tp.schedules.collective import Collective
from fused_tp.schedules.fused_kernel import FusedKernel
from fused_tp.transport.kernels import has_triton, interpreted
from fused_tp.schedules.local import Local
from fused_tp.schedules.pipelined import Pipelined
from fused_tp.transport.kernel_memory import GroupMemory, group_memory, known_memory
from fused_tp.transport.torch_dist import backend_of, torch_dist

LOCAL = Local()
_MOST_REMEMBERED = 4096
NAMES = ("plain", "pipelined", "one_sided", "fused_kernel")


@dataclass(frozen=True)
class Decision:
    """What would run and why."""

    schedule: str
    transport: str
    reason: str


ALONE = Decision("local", "none", "the group has one rank, so nothing moves")


def select_schedule(
    op: str,
    group: Group,
    dtype: torch.dtype,
    device: torch.device,
    m: int,
    k: int | None,
    n: int | None,
) -> Schedule:
    """The schedule for one call; the arguments are those of `runtime.dispatch.choose`.

    Raises:
        ValueError: `FUSED_TP_SCHEDULE` names a schedule that cannot serve this group, or the group has no backend for
            tensors on `device`.
    """
    if group.size == 1:
        return LOCAL
    # One lookup for a call like one before; all that follows takes several times as long.
    schedules: dict[Any, Schedule] = group.memo.setdefault("selected schedules", {})
    key = (op, dtype, device, m, k, n, settings.routing())
    selected = schedules.get(key)
    if selected is None:
        if len(schedules) >= _MOST_REMEMBERED:  # lengths that keep changing
            schedules.clear()
        selected = schedules[key] = _select(op, group, dtype, device, m, k, n)
    return selected


def _select(
    op: str, group: Group, dtype: torch.dtype, device: torch.device, m: int, k: int | None, n: int | None
) -> Schedule:
    name = settings.forced_schedule()
    # What has no kernel goes by the table, also where kernels are asked for.
    if name is None or (name == "fused_kernel" and no_kernel_of(op, dtype) is not None):
        name = _choose(op, group, dtype, device, m, k, n).schedule
    schedule: Schedule | None = group.memo.get(("schedule", name, device))
    # FUSED_TP_SHM may have been turned off since the schedule was made: then `_make` says so.
    if schedule is None or (name == "one_sided" and not settings.shared_memory_allowed()):
        schedule = group.memo["schedule", name, device] = _make(name, group, device)
    return schedule


def _choose(
    op: str, group: Group, dtype: torch.dtype, device: torch.device, m: int, k: int | None, n: int | None
) -> dispatch.Choice:
    transport = "shm" if _shared_memory(group, device) is not None else backend_of(group, device.type)
    arguments = (op, dtype, m, k, n, group.size, transport, dispatch.arch_of(device))
    choice = dispatch.choose(*arguments)
    if choice.schedule == "fused_kernel":
        # Asked only now, because the ranks must find out together. A table may name it for ops that have no kernel.
        reason = no_kernel_of(op, dtype) or no_kernel_for(group, device)
        if reason is not None:
            choice = dispatch.choose(*arguments, without="fused_kernel")
            return dispatch.Choice(choice.schedule, f"{choice.rule}; no fused kernel: {reason}")
    return choice


def decide(
    op: str, group: Group, dtype: torch.dtype, device: torch.device, m: int, k: int | None, n: int | None
) -> Decision:
    """`select_schedule` in words: same choice, with its reason."""
    if group.size == 1:
        return ALONE
    if device == torch.device("cuda"):  # with its number, as tensors have it
        device = torch.device("cuda", torch.cuda.current_device())
    name = select_schedule(op, group, dtype, device, m, k, n).name
    transport = {"one_sided": "shm", "fused_kernel": "symmetric memory"}.get(name) or backend_of(group, device.type)
    forced = settings.forced_schedule()
    if forced == name:
        return Decision(name, transport, f"FUSED_TP_SCHEDULE={forced} forces it")
    rule = _choose(op, group, dtype, device, m, k, n).rule
    reason = f"dispatch table {settings.table_path() or 'as shipped'}, rule {rule}"
    if forced is not None:
        reason = f"FUSED_TP_SCHEDULE={forced}, but {no_kernel_of(op, dtype)}; {reason}"
    if device.type == "cpu" and _shared_memory(group, device) is None:
        reason += f"; no shared memory: {_no_shared_memory(group, device)}"
    return Decision(name, transport, reason)


def _make(name: str, group: Group, device: torch.device) -> Schedule:
    if name == "one_sided":
        shared = _shared_memory(group, device)
        if shared is None:
            raise ValueError(f"Schedule 'one_sided' cannot serve this group: {_no_shared_memory(group, device)}.")
        one_sided: Schedule = import_module("fused_tp.schedules.one_sided").OneSided(shared)
        return one_sided
    if name == "fused_kernel":
        reason = no_kernel_for(group, device)
        memory = known_memory(group, device)
        if not isinstance(memory, GroupMemory):
            raise ValueError(f"Schedule 'fused_kernel' cannot serve this group: {reason}.")
        return FusedKernel(memory, Collective(torch_dist(group, device.type)))
    if name == "plain":
        return Collective(torch_dist(group, device.type))
    if name == "pipelined":
        return Pipelined(torch_dist(group, device.type))
    source = "FUSED_TP_SCHEDULE" if settings.forced_schedule() == name else "The dispatch table"
    raise ValueError(f"{source} names schedule {name!r}; there are {', '.join(NAMES)}.")


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
    most = fused_kernel.MAX_WORLD_SIZE
    if group.size > most:
        return f"a kernel's slots serve up to {most} ranks, and the group has {group.size}"
    memory = known_memory(group, device)
    if memory is None:
        # What this rank lacks the others must hear of: they would wait for it.
        memory = group_memory(group, device, no_kernel_on(device) or "")
    return memory if isinstance(memory, str) else None


def _shared_memory(group: Group, device: torch.device) -> Any:
    """The group's shared-memory transport, or None."""
    if device.type != "cpu" or not settings.shared_memory_allowed() or not _HAS_SHM:
        return None
    return import_module("fused_tp.transport.shm").shm_transport(group)


def _no_shared_memory(group: Group, device: torch.device) -> str:
    if device.type != "cpu":
        return f"it moves CPU tensors only, not {device.type}"
    if not settings.shared_memory_allowed():
        return "FUSED_TP_SHM=0 turns it off"
    if not _HAS_SHM:
        return "this installation has no shared-memory transport"
    return str(import_module("fused_tp.transport.shm").shm_unavailable_reason(group))


_HAS_SHM = find_spec("fused_tp.transport.shm") is not None and find_spec("fused_tp.schedules.one_sided") is not None
