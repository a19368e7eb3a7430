"""Which schedule an op runs on: `FUSED_TP_SCHEDULE` where set, else the dispatch table."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from fused_tp.runtime import dispatch, settings
from fused_tp.runtime.group import Group
from fused_tp.schedules.base import Schedule
from fused_tp.schedules.collective import Collective
from fused_tp.schedules.local import Local
from fused_tp.schedules.pipelined import Pipelined
from fused_tp.transport.torch_dist import backend_of, torch_dist

LOCAL = Local()
_MOST_REMEMBERED = 4096
NAMES = ("plain", "pipelined", "one_sided")


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
    if name is None:
        name = _choose(op, group, dtype, device, m, k, n).schedule
    schedule: Schedule | None = group.memo.get(("schedule", name, device.type))
    # FUSED_TP_SHM may have been turned off since the schedule was made: then `_make` says so.
    if schedule is None or (name == "one_sided" and not settings.shared_memory_allowed()):
        schedule = group.memo["schedule", name, device.type] = _make(name, group, device)
    return schedule


def _choose(
    op: str, group: Group, dtype: torch.dtype, device: torch.device, m: int, k: int | None, n: int | None
) -> dispatch.Choice:
    transport = "shm" if _shared_memory(group, device) is not None else backend_of(group, device.type)
    return dispatch.choose(op, dtype, m, k, n, group.size, transport, dispatch.arch_of(device))


def decide(
    op: str, group: Group, dtype: torch.dtype, device: torch.device, m: int, k: int | None, n: int | None
) -> Decision:
    """`select_schedule` in words: same choice, with its reason."""
    if group.size == 1:
        return ALONE
    name = select_schedule(op, group, dtype, device, m, k, n).name
    transport = "shm" if name == "one_sided" else backend_of(group, device.type)
    if settings.forced_schedule() is not None:
        return Decision(name, transport, f"FUSED_TP_SCHEDULE={name} forces it")
    rule = _choose(op, group, dtype, device, m, k, n).rule
    reason = f"dispatch table {settings.table_path() or 'as shipped'}, rule {rule}"
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
    if name == "plain":
        return Collective(torch_dist(group, device.type))
    if name == "pipelined":
        return Pipelined(torch_dist(group, device.type))
    source = "FUSED_TP_SCHEDULE" if settings.forced_schedule() == name else "The dispatch table"
    raise ValueError(f"{source} names schedule {name!r}; there are {', '.join(NAMES)}.")


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
