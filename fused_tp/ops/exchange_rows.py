"""All-to-all of rows with unequal counts, which sends tokens to their experts. Internal.

The caller must know the numbers of rows to send and to receive: `expert_parallel` exchanges them first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fused_tp.backends.registry import ALL_TO_ALL
from fused_tp.backends.schedule import Schedule
from fused_tp.core.group import GroupLike
from fused_tp.core.partition import SymInt
from fused_tp.ops.arguments import check_tensor, checked_sizes
from fused_tp.ops.op import AnyGroup, Op, SavedForBackward, ScheduleKey


def exchange_rows(x: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int], *, group: GroupLike) -> Tensor:
    """Exchange rows with all ranks; return the received rows [sum(recv_sizes), ...] in rank order.

    Args:
        x: [sum(send_sizes), ...], rows sorted by destination rank.
        send_sizes: number of rows to send to each rank.
        recv_sizes: number of rows to receive from each rank.
    """
    result: Tensor = EXCHANGE_ROWS(x, list(send_sizes), list(recv_sizes), group)
    return result


class _Args(NamedTuple):
    x: Tensor
    send_sizes: list[SymInt]
    recv_sizes: list[SymInt]
    group: AnyGroup


def _prepare(a: _Args) -> _Args:
    check_tensor("x", a.x, min_dims=2)
    sizes = checked_sizes("send_sizes", a.send_sizes), checked_sizes("recv_sizes", a.recv_sizes)
    if sum(sizes[0]) != len(a.x):
        raise ValueError(f"The sum of send_sizes={sizes[0]} must be the number of rows of x, {len(a.x)}.")
    return _Args(a.x, *sizes, a.group)


def _exchange(schedule: Schedule, a: _Args) -> Tensor:
    rows = schedule.all_to_all(a.x, a.send_sizes, a.recv_sizes)
    return rows.clone() if rows is a.x else rows


def _backward(s: SavedForBackward[_Args], grad: Tensor) -> dict[str, Any]:
    return {"x": EXCHANGE_ROWS(grad, s.args.recv_sizes, s.args.send_sizes, s.args.group) if s.needs.x else None}


def _fake(a: _Args) -> Tensor:
    return a.x.new_empty((sum(a.recv_sizes), *a.x.shape[1:]))


def _key(a: _Args) -> ScheduleKey | None:
    return ScheduleKey(ALL_TO_ALL, a.x.dtype, a.x.device, 0, None, a.x.shape[1])


EXCHANGE_ROWS: Op[_Args] = Op(
    "exchange_rows",
    _Args,
    "Tensor",
    _exchange,
    _fake,
    # The key must be equal on all ranks, so it omits the number of rows.
    key=_key,
    prepare=_prepare,
    backward=_backward,
)
