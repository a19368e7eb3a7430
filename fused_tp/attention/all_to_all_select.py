"""Which all-to-all serves a group: the same table, settings and names as for every other op."""

from __future__ import annotations

import torch

from fused_tp.attention.all_to_all import AllToAll
from fused_tp.attention.all_to_all_device import DeviceAllToAll
from fused_tp.attention.all_to_all_messages import MessagesAllToAll
from fused_tp.attention.all_to_all_one_sided import OneSidedAllToAll
from fused_tp.runtime.group import Group
from fused_tp.schedules.device import DeviceSchedule
from fused_tp.schedules.select import select_schedule
from fused_tp.schedules.ways import ALL_TO_ALL
from fused_tp.transport.nccl import nccl_dist
from fused_tp.transport.shm import shm_transport
from fused_tp.transport.torch_dist import torch_dist


def select_all_to_all(group: Group, dtype: torch.dtype, device: torch.device, tokens: int, columns: int) -> AllToAll:
    """For a call that moves `columns` elements for each of `tokens` of all ranks; the group has several.

    Raises:
        ValueError: `FUSED_TP_SCHEDULE` names a schedule that cannot serve this group.
    """
    schedule = select_schedule(ALL_TO_ALL, group, dtype, device, tokens, None, columns)
    name = schedule.name
    if name == "one_sided":
        shared = shm_transport(group)
        assert shared is not None, "select_schedule has just found it"
        return OneSidedAllToAll(shared)
    if name == "nccl_pipeline":
        own = nccl_dist(group, device)
        assert not isinstance(own, str), "select_schedule has just found it"
        return MessagesAllToAll(name, own)
    messages = MessagesAllToAll(name, torch_dist(group, device.type))
    return DeviceAllToAll(schedule, messages) if isinstance(schedule, DeviceSchedule) else messages
