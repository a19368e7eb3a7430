"""Multiply and sum over ranks, all keeping everything: the row-parallel linear, in training and in decoding."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor

from fused_tp.ops.arguments import check_linear
from fused_tp.ops.context import autocast_dtype, cast, deliver, main_grads
from fused_tp.ops.custom_op import CustomOp
from fused_tp.ops.gradients import bias_grad, weight_grad
from fused_tp.ops.repeated_call import repeated_call
from fused_tp.runtime.group import GroupLike, group_by_name, group_name
from fused_tp.schedules.base import Schedule
from fused_tp.schedules.gemm import linear
from fused_tp.schedules.registry import select_schedule


def matmul_all_reduce(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group: GroupLike) -> Tensor:
    """y = sum over ranks(x @ weight^T) + bias, the same bits on every rank, matmul and sum overlapped.

    Backward is local: dy is the same on all ranks and counts once (Megatron's convention).

    Args:
        x: [..., k], this rank's part of the features; float16, bfloat16, float32 or float64.
        weight: [N, k], this rank's columns of the whole weight.
        bias: [N] or None, the same on all ranks, added once after the sum.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.

    Returns:
        [..., N]; summed over ranks in float32 (float64 for float64) in rank order and rounded once.

    Raises:
        TypeError, ValueError: an argument does not fit; raised before anything is sent.
        CollectiveTimeoutError, PeerLostError, RankMismatchError: the peers did not come along.

    Example:
        y = matmul_all_reduce(hidden, w_down, group=mesh["tp"])

    Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models", 2019.
    """
    if bias is None:
        again = repeated_call(MATMUL_ALL_REDUCE.name, x, weight, group)
        if again is not None:
            return again(x, weight)
    dtype = autocast_dtype(x)
    if dtype is not None:
        x, weight, bias = cast(dtype, x, weight, bias)
    check_linear("x", x, weight, bias)
    result: Tensor = MATMUL_ALL_REDUCE(x, weight, bias, group_name(group))
    return result


def _schedule(x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> Schedule:
    return select_schedule(
        "matmul_all_reduce", group_by_name(group), x.dtype, x.device, prod(x.shape[:-1]), None, weight.shape[0]
    )


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> Tensor:
    return _schedule(x, weight, bias, group).matmul_all_reduce([(x, weight)], bias)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, weight, bias, _ = inputs
    ctx.save_for_backward(x, weight)
    ctx.needs = (x.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad)
    ctx.main_grads = main_grads([weight])


def _backward(ctx: Any, d_output: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = ctx.needs
    return (
        linear(d_output, weight.t()) if needs_x else None,
        deliver(weight_grad(d_output, x), ctx.main_grads[0]) if needs_weight else None,
        bias_grad(d_output) if needs_bias else None,
        None,
    )


MATMUL_ALL_REDUCE = CustomOp(
    "matmul_all_reduce(Tensor x, Tensor weight, Tensor? bias, str group) -> Tensor",
    _forward,
    _fake,
    _setup_context,
    _backward,
    _schedule,
)
