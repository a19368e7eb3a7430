"""Fused row-parallel matmul, all-reduce, residual addition and RMS norm."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fused_tp.backends.gemm import weight_grad
from fused_tp.backends.schedule import Schedule, add_rms_norm
from fused_tp.core.group import GroupLike
from fused_tp.ops.all_reduce_rms_norm import check_norm, rms_norm_backward
from fused_tp.ops.arguments import autocast_dtype, checked_linear
from fused_tp.ops.matmul_all_reduce import matmul_all_reduce
from fused_tp.ops.op import AnyGroup, Op, SavedForBackward, ScheduleKey


def matmul_all_reduce_rms_norm(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, *, group: GroupLike
) -> tuple[Tensor, Tensor]:
    """new_residual = residual + all_reduce(x @ weight^T); normed = new_residual / rms(new_residual) * norm_weight.

    `residual` and `norm_weight` are the same on all ranks, so backward is local and all its gradients are complete.

    =======  ==========================================================================
    forward  (normed, new_residual), both [..., N], as above
    dgrad    d_residual [..., N] = d_new_residual + rms_norm_backward(d_normed); dx [..., k] = d_residual @ weight
    wgrad    dW [N, k] = d_residual^T @ x; d_norm_weight [N] = sum over tokens of d_normed * new_residual / rms
    dbias    none: the op has no bias
    =======  ==========================================================================

    Args:
        x: [..., k], this rank's shard of the features; float16, bfloat16, float32 or float64.
        weight: [N, k], this rank's columns of the full weight.
        residual: [..., N], the residual stream. Under autocast it may be float32 although the matmul runs in lower
            precision; the results then have the dtype of `residual`.
        norm_weight: [N].
        eps: added to the mean square, > 0.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.

    Returns:
        (normed, new_residual), both [..., N].

    Raises:
        TypeError, ValueError: an argument is invalid; raised before anything is sent.
        CollectiveTimeoutError, PeerLostError, RankMismatchError: a peer timed out, was lost, or made another call.

    Example:
        hidden, residual = matmul_all_reduce_rms_norm(h, w_down, residual, norm.weight, 1e-6, group=mesh["tp"])

    Source: see `all_reduce_rms_norm`.
    """
    dtype = autocast_dtype(x)
    if dtype is not None and isinstance(residual, Tensor) and residual.dtype != dtype:
        x, weight, _ = checked_linear("x", x, weight, None)
        check_norm("residual", residual, (*x.shape[:-1], weight.shape[0]), residual, norm_weight, eps)
        # No schedule supports two dtypes in one kernel; a separate norm after the fused matmul is cheap.
        return add_rms_norm(matmul_all_reduce(x, weight, group=group), residual, norm_weight, float(eps))
    normed, new_residual = MATMUL_ALL_REDUCE_RMS_NORM(x, weight, residual, norm_weight, eps, group)
    return normed, new_residual


class _Args(NamedTuple):
    x: Tensor
    weight: Tensor
    residual: Tensor
    norm_weight: Tensor
    eps: float
    group: AnyGroup


def _prepare(a: _Args) -> _Args:
    x, weight, _ = checked_linear("x", a.x, a.weight, None)
    check_norm("x", x, (*x.shape[:-1], weight.shape[0]), a.residual, a.norm_weight, a.eps)
    return _Args(x, weight, a.residual, a.norm_weight, float(a.eps), a.group)


def _backward(s: SavedForBackward[_Args], d_normed: Tensor, d_new_residual: Tensor) -> dict[str, Any]:
    """Return the gradients; no communication. The second half of a split backward reuses d_residual of the first."""
    a, (new_residual,), needs = s.args, s.outputs, s.needs
    if s.carry is None:
        d_h, d_norm_weight = rms_norm_backward(d_normed, new_residual, a.norm_weight, a.eps)
        s.carry = (d_h + d_new_residual).to(new_residual.dtype), d_norm_weight
    d_stream, d_norm_weight = s.carry
    return {
        "x": d_stream @ a.weight if needs.x else None,
        "weight": weight_grad(d_stream, a.x) if needs.weight else None,
        "residual": d_stream if needs.residual else None,
        "norm_weight": d_norm_weight.to(a.norm_weight.dtype) if needs.norm_weight else None,
    }


def _forward(schedule: Schedule, a: _Args) -> tuple[Tensor, Tensor]:
    return schedule.matmul_all_reduce_rms_norm(*a[:5])


def _fake(a: _Args) -> tuple[Tensor, Tensor]:
    return (a.residual.new_empty(a.residual.shape), a.residual.new_empty(a.residual.shape))


def _key(a: _Args) -> ScheduleKey | None:
    return ScheduleKey.from_shard("matmul_all_reduce_rms_norm", a.x, a.x.shape, None, a.weight.shape[0])


def _example(size: int, x: Tensor, weight: Tensor) -> _Args:
    return _Args(x, weight, x, weight, 1.0, None)


MATMUL_ALL_REDUCE_RMS_NORM: Op[_Args] = Op(
    "matmul_all_reduce_rms_norm",
    _Args,
    "(Tensor, Tensor)",
    _forward,
    _fake,
    key=_key,
    make_example_args=_example,
    prepare=_prepare,
    saves=("x", "weight", "norm_weight", 1),
    backward=_backward,
    has_local_backward=True,
)
