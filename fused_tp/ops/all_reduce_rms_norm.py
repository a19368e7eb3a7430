"""Sum over ranks, add to the residual, RMS norm: the seam between two blocks of a transformer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_tp.ops.arguments import check_like, check_shape, check_tensor
from fused_tp.ops.custom_op import CustomOp
from fused_tp.runtime.group import GroupLike, group_by_name, group_identity
from fused_tp.schedules.base import Schedule
from fused_tp.schedules.norm import rms_norm_backward
from fused_tp.schedules.registry import select_schedule


def all_reduce_rms_norm(
    partial: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, *, group: GroupLike
) -> tuple[Tensor, Tensor]:
    """new_residual = residual + sum over ranks(partial); normed = new_residual / rms(new_residual) * norm_weight.

    Everything but `partial` is the same on all ranks, so backward is local and all its gradients are complete.

    Args:
        partial: [..., N], this rank's term of the sum.
        residual: [..., N], the residual stream. Under autocast `partial` may have another dtype; the sum then has
            residual's.
        norm_weight: [N].
        eps: added to the mean square, > 0.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.

    Returns:
        (normed, new_residual), both [..., N] in residual's dtype.

    Raises:
        TypeError, ValueError: an argument does not fit; raised before anything is sent.
        CollectiveTimeoutError, PeerLostError, RankMismatchError: the peers did not come along.

    Example:
        hidden, residual = all_reduce_rms_norm(partial, residual, norm.weight, 1e-6, group=mesh["tp"])

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    partial = to_residual_dtype(partial, residual)
    check_tensor("partial", partial)
    check_norm("partial", partial, partial.shape, residual, norm_weight, eps)
    normed, new_residual = ALL_REDUCE_RMS_NORM(partial, residual, norm_weight, float(eps), group_identity(group)[0])
    return normed, new_residual


def to_residual_dtype(partial: Any, residual: Any) -> Any:
    """Under autocast matmuls give float16 or bfloat16 while the residual stream stays float32, as the sum then does."""
    if isinstance(partial, Tensor) and isinstance(residual, Tensor) and torch.is_autocast_enabled(partial.device.type):
        return partial.to(residual.dtype)
    return partial


def check_norm(like_name: str, like: Tensor, shape: Any, residual: Any, norm_weight: Any, eps: Any) -> None:
    """`residual`, `norm_weight` and `eps` that fit a sum of `shape`."""
    check_like("residual", residual, like_name, like)
    check_shape("residual", residual, shape, "the shape of the sum it is added to")
    check_like("norm_weight", norm_weight, like_name, like)
    check_shape("norm_weight", norm_weight, shape[-1:], "one for each feature")
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"eps must be a float, not {type(eps).__name__}.")
    if not eps > 0:
        raise ValueError(f"eps is {eps}; it must be positive, or a row of zeros would be divided by zero.")


def _schedule(partial: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, group: str) -> Schedule:
    columns = partial.shape[-1]
    rows = partial.numel() // max(1, columns)
    return select_schedule(
        "all_reduce_rms_norm", group_by_name(group), partial.dtype, partial.device, rows, None, columns
    )


def _forward(partial: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, group: str) -> tuple[Tensor, Tensor]:
    schedule = _schedule(partial, residual, norm_weight, eps, group)
    return schedule.all_reduce_rms_norm(partial, residual, norm_weight, eps)


def _fake(partial: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, group: str) -> tuple[Tensor, Tensor]:
    return partial.new_empty(partial.shape), partial.new_empty(partial.shape)


def _setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    _, _, norm_weight, ctx.eps, _ = inputs
    ctx.save_for_backward(output[1], norm_weight)
    ctx.needs_stream = inputs[0].requires_grad or inputs[1].requires_grad
    ctx.needs_weight = norm_weight.requires_grad


def _backward(ctx: Any, d_normed: Tensor, d_new_residual: Tensor) -> tuple[Any, ...]:
    new_residual, norm_weight = ctx.saved_tensors
    d_h, d_weight = rms_norm_backward(d_normed, new_residual, norm_weight, ctx.eps)
    d_stream = (d_h + d_new_residual).to(new_residual.dtype) if ctx.needs_stream else None
    return d_stream, d_stream, d_weight.to(norm_weight.dtype) if ctx.needs_weight else None, None, None


ALL_REDUCE_RMS_NORM = CustomOp(
    "all_reduce_rms_norm(Tensor partial, Tensor residual, Tensor norm_weight, float eps, str group) "
    "-> (Tensor, Tensor)",
    _forward,
    _fake,
    _setup_context,
    _backward,
    _schedule,
)
