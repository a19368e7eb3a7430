"""Which all-to-all serves a group: the same table, settings and names as for every other op."""

from __future__ import annotations

import torch

from fused_tp.attention.all_to_all import AllToAll
from fused_tp.attention.all_to_all_device import DeviceAllToAll
from fused_tp.attention.all_to_all_messages import MessagesAllToAll
from fused_tp.attention.all_to_all_one_sided import OneSidedAllToAll
from fused_tp.runtime.group import Group
from fused_tp.schedules.device import DeviceSchedule
from fused_tp.schedules.registry import ALL_TO_ALL, select_schedule
from fused_tp.schedules.shared_memory import SharedMemory


def select_all_to_all(group: Group, dtype: torch.dtype, device: torch.device, tokens: int, columns: int) -> AllToAll:
    """For a call that moves `columns` elements for each of `tokens` of all ranks; the group has several.

    Raises:
        ValueError: `FUSED_TP_SCHEDULE` names a schedule that cannot serve this group.
    """
    schedule = select_schedule(ALL_TO_ALL, group, dtype, device, tokens, None, columns)
    if isinstance(schedule, SharedMemory):
        return OneSidedAllToAll(schedule.transport)
    messages = MessagesAllToAll(schedule.name, schedule.messages)
    return DeviceAllToAll(schedule, messages) if isinstance(schedule, DeviceSchedule) else messages
