"""Row-parallel matmul, sum over ranks, residual, RMS norm: everything from one block's activation to the next block."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor

from fused_tp.ops.all_reduce_rms_norm import check_norm
from fused_tp.ops.arguments import check_linear, check_tensor
from fused_tp.ops.context import autocast_dtype, cast, deliver, main_grads
from fused_tp.ops.custom_op import CustomOp
from fused_tp.ops.gradients import weight_grad
from fused_tp.ops.matmul_all_reduce import matmul_all_reduce
from fused_tp.runtime.group import GroupLike, group_by_name, group_identity
from fused_tp.schedules.base import Schedule
from fused_tp.schedules.norm import add_rms_norm, rms_norm_backward
from fused_tp.schedules.registry import select_schedule


def matmul_all_reduce_rms_norm(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, *, group: GroupLike
) -> tuple[Tensor, Tensor]:
    """new_residual = residual + sum over ranks(x @ weight^T); normed = new_residual / rms(new_residual) * norm_weight.

    `residual` and `norm_weight` are the same on all ranks, so backward is local and all its gradients are complete.

    Args:
        x: [..., k], this rank's part of the features; float16, bfloat16, float32 or float64.
        weight: [N, k], this rank's columns of the whole weight.
        residual: [..., N], the residual stream. Under autocast it may stay float32 while the matmul is not; the results
            then have residual's dtype.
        norm_weight: [N].
        eps: added to the mean square, > 0.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.

    Returns:
        (normed, new_residual), both [..., N].

    Raises:
        TypeError, ValueError: an argument does not fit; raised before anything is sent.
        CollectiveTimeoutError, PeerLostError, RankMismatchError: the peers did not come along.

    Example:
        hidden, residual = matmul_all_reduce_rms_norm(h, w_down, residual, norm.weight, 1e-6, group=mesh["tp"])

    Source: as `all_reduce_rms_norm`.
    """
    dtype = autocast_dtype(x)
    if dtype is not None:
        x, weight = cast(dtype, x, weight)
    check_tensor("x", x)
    check_linear("x", x, weight, None)
    shape = (*x.shape[:-1], weight.shape[0])
    if dtype is not None and isinstance(residual, Tensor) and residual.dtype != dtype:
        check_norm("residual", residual, shape, residual, norm_weight, eps)
        # Two dtypes in one kernel is for no schedule to carry; the norm after the fused matmul is cheap.
        return add_rms_norm(matmul_all_reduce(x, weight, group=group), residual, norm_weight, float(eps))
    check_norm("x", x, shape, residual, norm_weight, eps)
    normed, new_residual = MATMUL_ALL_REDUCE_RMS_NORM(
        x, weight, residual, norm_weight, float(eps), group_identity(group)[0]
    )
    return normed, new_residual


def _schedule(x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, group: str) -> Schedule:
    rows = prod(x.shape[:-1])
    return select_schedule(
        "matmul_all_reduce_rms_norm", group_by_name(group), x.dtype, x.device, rows, None, weight.shape[0]
    )


def _forward(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, group: str
) -> tuple[Tensor, Tensor]:
    schedule = _schedule(x, weight, residual, norm_weight, eps, group)
    return schedule.matmul_all_reduce_rms_norm(x, weight, residual, norm_weight, eps)


def _fake(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, group: str
) -> tuple[Tensor, Tensor]:
    return residual.new_empty(residual.shape), residual.new_empty(residual.shape)


def _setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    x, weight, residual, norm_weight, ctx.eps, _ = inputs
    ctx.save_for_backward(x, weight, output[1], norm_weight)
    ctx.needs = tuple(t.requires_grad for t in (x, weight, residual, norm_weight))
    ctx.main_grads = main_grads([weight])


def _backward(ctx: Any, d_normed: Tensor, d_new_residual: Tensor) -> tuple[Any, ...]:
    x, weight, new_residual, norm_weight = ctx.saved_tensors
    needs_x, needs_weight, needs_residual, needs_norm_weight = ctx.needs
    d_h, d_norm_weight = rms_norm_backward(d_normed, new_residual, norm_weight, ctx.eps)
    d_stream = (d_h + d_new_residual).to(new_residual.dtype)
    return (
        d_stream @ weight if needs_x else None,
        deliver(weight_grad(d_stream, x), ctx.main_grads[0]) if needs_weight else None,
        d_stream if needs_residual else None,
        d_norm_weight.to(norm_weight.dtype) if needs_norm_weight else None,
        None,
        None,
    )


MATMUL_ALL_REDUCE_RMS_NORM = CustomOp(
    "matmul_all_reduce_rms_norm(Tensor x, Tensor weight, Tensor residual, Tensor norm_weight, float eps, str group) "
    "-> (Tensor, Tensor)",
    _forward,
    _fake,
    _setup_context,
    _backward,
    _schedule,
)
