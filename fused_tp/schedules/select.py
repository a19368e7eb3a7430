"""Which schedule an op runs on: `FUSED_TP_SCHEDULE` where set, else the dispatch table."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fused_tp.runtime import dispatch, settings
from fused_tp.runtime.group import Group, GroupSlot
from fused_tp.schedules.base import Schedule
from fused_tp.schedules.local import Local
from fused_tp.schedules.ways import WAYS, no_shared_memory, shared_memory
from fused_tp.transport.store import exchange
from fused_tp.transport.torch_dist import backend_of

LOCAL = Local()
_SELECTED: GroupSlot[dict[object, Schedule]] = GroupSlot(lambda group: {})  # by all that selects
_MADE: GroupSlot[dict[object, Schedule]] = GroupSlot(lambda group: {})  # by name, device and chunks
_ARCHS: GroupSlot[dict[str, str]] = GroupSlot(lambda group: {})  # by type of device
_MOST_REMEMBERED = 4096


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
    schedules = _SELECTED[group]
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
    name, chunks = settings.forced_schedule(), None
    if name is not None and name not in WAYS:
        raise ValueError(f"FUSED_TP_SCHEDULE names schedule {name!r}; there are {', '.join(WAYS)}.")
    # What a schedule has nothing for goes by the table, also where that schedule is asked for.
    if name is None or WAYS[name].lacks(op, dtype) is not None:
        choice = _choose(op, group, dtype, device, m, k, n)
        name, chunks = choice.schedule, choice.chunks
    made, key = _MADE[group], (name, device, chunks)
    schedule = made.get(key)
    # FUSED_TP_SHM may have been turned off since the schedule was made.
    if schedule is None or (name == "one_sided" and not settings.shared_memory_allowed()):
        obstacle = WAYS[name].obstacle(group, device)
        if obstacle is not None:
            raise ValueError(f"Schedule {name!r} cannot serve this group: {obstacle}.")
        schedule = made[key] = WAYS[name].make(group, device, chunks)
    return schedule


def _choose(
    op: str, group: Group, dtype: torch.dtype, device: torch.device, m: int, k: int | None, n: int | None
) -> dispatch.Choice:
    """The first rule of the table whose schedule can serve the call."""
    transport = "shm" if shared_memory(group, device) is not None else backend_of(group, device.type)
    reasons: dict[str, str] = {}
    while True:
        choice = dispatch.choose(
            op, dtype, m, k, n, group.size, transport, group_arch(group, device), without=tuple(reasons)
        )
        if choice.schedule not in WAYS:
            raise ValueError(f"The dispatch table names schedule {choice.schedule!r}; there are {', '.join(WAYS)}.")
        way = WAYS[choice.schedule]
        # Asked only now, one after the other, because the ranks must find out together.
        reason = way.lacks(op, dtype) or (None if _made(group, choice, device) else way.obstacle(group, device))
        if reason is None:
            notes = "".join(f"; no {name}: {why}" for name, why in reasons.items())
            return dispatch.Choice(choice.schedule, choice.rule + notes, choice.chunks)
        reasons[choice.schedule] = reason


def group_arch(group: Group, device: torch.device) -> str:
    """The architecture by which all ranks of `group` choose for tensors on their devices of this type: where their GPUs
    differ the lowest, which all wait for. The first time, all ranks must ask together.

    Raises:
        CollectiveTimeoutError: some rank did not ask within `FUSED_TP_TIMEOUT` seconds.
    """
    own = dispatch.arch_of(device)
    if device.type != "cuda":
        return own
    archs = _ARCHS[group]
    if device.type not in archs:
        answers = exchange(group, "the architecture of GPUs", own.encode())
        archs[device.type] = dispatch.lowest(text.decode() for text in answers)
    return archs[device.type]


def _made(group: Group, choice: dispatch.Choice, device: torch.device) -> bool:
    return choice.schedule != "one_sided" and (choice.schedule, device, None) in _MADE[group]


def decide(
    op: str, group: Group, dtype: torch.dtype, device: torch.device, m: int, k: int | None, n: int | None
) -> Decision:
    """`select_schedule` in words: same choice, with its reason."""
    if group.size == 1:
        return ALONE
    if device == torch.device("cuda"):  # with its number, as tensors have it
        device = torch.device("cuda", torch.cuda.current_device())
    name = select_schedule(op, group, dtype, device, m, k, n).name
    transport = WAYS[name].moves_over or backend_of(group, device.type)
    forced = settings.forced_schedule()
    if forced == name:
        return Decision(name, transport, f"FUSED_TP_SCHEDULE={forced} forces it")
    rule = _choose(op, group, dtype, device, m, k, n).rule
    reason = f"dispatch table {settings.table_path() or 'as shipped'}, rule {rule}"
    if forced is not None:
        reason = f"FUSED_TP_SCHEDULE={forced}, but {WAYS[forced].lacks(op, dtype)}; {reason}"
    if device.type == "cpu" and "no one_sided" not in rule and (why := no_shared_memory(group, device)) is not None:
        reason += f"; no shared memory: {why}"
    return Decision(name, transport, reason)
