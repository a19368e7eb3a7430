"""Which ring serves a group: the same table, settings and names as for every other op."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fused_tp.attention.kernels.select import forced_provider
from fused_tp.attention.kernels.triton import TRITON, obstacle
from fused_tp.attention.ring import Ring
from fused_tp.attention.ring_all_gather import CollectiveRing
from fused_tp.attention.ring_fused import FusedRing
from fused_tp.attention.ring_local import LocalRing
from fused_tp.attention.ring_messages import SendRecvRing
from fused_tp.attention.ring_shared_memory import OneSidedRing
from fused_tp.attention.scores import Scores
from fused_tp.runtime.availability import AVAILABLE, unavailable
from fused_tp.runtime.group import Group, GroupSlot
from fused_tp.schedules.fused_kernel import FusedKernel
from fused_tp.schedules.local import Local
from fused_tp.schedules.registry import select_schedule
from fused_tp.schedules.shared_memory import SharedMemory
from fused_tp.transport.store import agree

OP = "ring_attention"
_FORCED: GroupSlot[list[str | None]] = GroupSlot(lambda group: [])  # values of FUSED_TP_ATTENTION, as they came


def moved(k_shape: Sequence[int], v_shape: Sequence[int], seq_len: int) -> tuple[int, None, int]:
    """(m, k, n) of a call, as dispatch wants them: all ranks' K/V, which is what a plain schedule would gather."""
    batch, _, heads, head_dim = k_shape
    return seq_len * batch, None, heads * (head_dim + v_shape[3])


def no_fused_ring(
    device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int, scale: float = 1.0
) -> str | None:
    """Why this rank's calls in a group with schedule `fused_kernel` go by messages nevertheless, or None."""
    forced = forced_provider()
    if forced not in (None, TRITON.name):
        return f"FUSED_TP_ATTENTION={forced} asks for other kernels"
    return obstacle(device, dtype, head_dim, v_head_dim, Scores(scale))


def no_fused_ring_in(
    group: Group,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    v_head_dim: int,
    scale: float = 1.0,
) -> str | None:
    """`no_fused_ring` on any rank of `group`, whose devices and environments may differ: those that judged for
    themselves would part ways. The first time, all ranks must ask together.

    Raises:
        CollectiveTimeoutError: some rank did not ask, as where FUSED_TP_ATTENTION was changed on some ranks only.
    """
    # By number, since ranks can agree on nothing under names that are not the same everywhere.
    values = _FORCED[group]
    forced = forced_provider()
    if forced not in values:
        values.append(forced)
    what = (
        f"{OP} in one launch (on {device.type}, {dtype}, head dims {head_dim} and {v_head_dim}, "
        f"value {values.index(forced) + 1} of FUSED_TP_ATTENTION)"
    )
    here = no_fused_ring(device, dtype, head_dim, v_head_dim)
    on_all = agree(group, what, lambda: AVAILABLE if here is None else unavailable(here))
    return on_all.reason or no_fused_ring(device, dtype, head_dim, v_head_dim, scale)


def select_ring(group: Group, q: Tensor, k: Tensor, v: Tensor, seq_len: int, scale: float) -> Ring:
    """The ring for one call, by the size of all K/V in the dtype of q.

    Raises:
        ValueError: `FUSED_TP_SCHEDULE` names a schedule that cannot serve this group.
    """
    schedule = select_schedule(OP, group, q.dtype, k.device, *moved(k.shape, v.shape, seq_len))
    if isinstance(schedule, FusedKernel):
        served = no_fused_ring_in(group, q.device, q.dtype, q.shape[3], v.shape[3], scale) is None
        return FusedRing(schedule) if served else SendRecvRing(schedule.messages)
    if isinstance(schedule, Local):
        return LocalRing()
    if isinstance(schedule, SharedMemory):
        return OneSidedRing(schedule.transport)
    return (CollectiveRing if schedule.name == "plain" else SendRecvRing)(schedule.messages)
