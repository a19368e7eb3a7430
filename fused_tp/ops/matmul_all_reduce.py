"""Overlapped matmul and all-reduce: the row-parallel linear in training and decoding."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fused_tp.backends.gemm import bias_grad, linear, weight_grad
from fused_tp.backends.schedule import Schedule
from fused_tp.core.group import GroupLike
from fused_tp.ops.arguments import checked_linear
from fused_tp.ops.op import AnyGroup, Op, SavedForBackward, ScheduleKey


def matmul_all_reduce(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group: GroupLike, float8: str | None = None
) -> Tensor:
    """y = all_reduce(x @ weight^T) + bias, bitwise equal on all ranks, with the matmul and the reduction overlapped.

    Backward is local: dy is the same on all ranks and counts once (Megatron's convention).

    =======  ==========================================================================
    forward  y [..., N] = all_reduce(x [..., k] @ weight^T) + bias
    dgrad    dx [..., k] = dy @ weight; local
    wgrad    dW [N, k] = dy^T @ x; local
    dbias    db [N] = sum of dy over tokens; local, complete on each rank
    =======  ==========================================================================

    Args:
        x: [..., k], this rank's shard of the features; float16, bfloat16, float32 or float64.
        weight: [N, k], this rank's columns of the full weight.
        bias: [N] or None, the same on all ranks, added once after the sum.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        float8: multiply in float8 by this recipe of torchao: "tensorwise", "rowwise" or "rowwise_with_gw_hp"; see
            `fused_tp.backends.float8`. The terms of the sum leave in x's dtype.

    Returns:
        [..., N]; summed over ranks in float32 (float64 for float64) in rank order and rounded once.

    Raises:
        TypeError, ValueError: an argument is invalid; raised before anything is sent.
        CollectiveTimeoutError, PeerLostError, RankMismatchError: a peer timed out, was lost, or made another call.

    Example:
        y = matmul_all_reduce(hidden, w_down, group=mesh["tp"])

    Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models", 2019.
    """
    result: Tensor
    if float8 is not None:
        from fused_tp.ops.float8_row_matmul import FLOAT8_ROW_MATMUL  # needed only here

        result = FLOAT8_ROW_MATMUL(x, weight, bias, None, float8, group)
    else:
        result = MATMUL_ALL_REDUCE(x, weight, bias, group)
    return result


class _Args(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    group: AnyGroup


def _backward(s: SavedForBackward[_Args], d_output: Tensor) -> dict[str, Any]:
    """Return the gradients; no communication."""
    a, needs = s.args, s.needs
    return {
        "x": linear(d_output, a.weight.t()) if needs.x else None,
        "weight": weight_grad(d_output, a.x) if needs.weight else None,
        "bias": bias_grad(d_output) if needs.bias else None,
    }


def _forward(schedule: Schedule, a: _Args) -> Tensor:
    return schedule.matmul_all_reduce([(a.x, a.weight)], a.bias)


def _fake(a: _Args) -> Tensor:
    return a.x.new_empty((*a.x.shape[:-1], a.weight.shape[0]))


def _key(a: _Args) -> ScheduleKey | None:
    return ScheduleKey.from_shard("matmul_all_reduce", a.x, a.x.shape, None, a.weight.shape[0])


def _example(size: int, x: Tensor, weight: Tensor) -> _Args:
    return _Args(x, weight, None, None)


def _prepare(a: _Args) -> _Args:
    return _Args(*checked_linear("x", *a[:3]), a.group)


MATMUL_ALL_REDUCE: Op[_Args] = Op(
    "matmul_all_reduce",
    _Args,
    "Tensor",
    _forward,
    _fake,
    key=_key,
    make_example_args=_example,
    prepare=_prepare,
    saves=("x", "weight"),
    backward=_backward,
    has_local_backward=True,
)
