"""Fused all-reduce, residual addition and RMS norm, between two blocks of a transformer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_tp.backends.gemm import as_rows
from fused_tp.backends.schedule import Schedule
from fused_tp.core.group import GroupLike
from fused_tp.core.pending import accumulate_dtype
from fused_tp.ops.arguments import check_like, check_shape, check_tensor, checked_number
from fused_tp.ops.op import AnyGroup, Op, SavedForBackward, ScheduleKey


def all_reduce_rms_norm(
    partial: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, *, group: GroupLike
) -> tuple[Tensor, Tensor]:
    """new_residual = residual + all_reduce(partial); normed = new_residual / rms(new_residual) * norm_weight.

    All arguments but `partial` are equal on all ranks, so backward is local and its gradients are complete.

    =======  ==========================================================================
    forward  (normed, new_residual), both [..., N], as above
    dgrad    d_partial = d_residual [..., N] = d_new_residual + rms_norm_backward(d_normed); local
    wgrad    d_norm_weight [N] = sum over tokens of d_normed * new_residual / rms; local
    dbias    none: the op has no bias
    =======  ==========================================================================

    Args:
        partial: [..., N], this rank's term of the sum.
        residual: [..., N], the residual stream. Under autocast `partial` may have another dtype; it is then cast to the
            dtype of `residual`.
        norm_weight: [N].
        eps: added to the mean square, > 0.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.

    Returns:
        (normed, new_residual), both [..., N] in residual's dtype.

    Raises:
        TypeError, ValueError: an argument is invalid; raised before anything is sent.
        CollectiveTimeoutError, PeerLostError, RankMismatchError: a peer timed out, was lost, or made another call.

    Example:
        hidden, residual = all_reduce_rms_norm(partial, residual, norm.weight, 1e-6, group=mesh["tp"])

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    normed, new_residual = ALL_REDUCE_RMS_NORM(partial, residual, norm_weight, eps, group)
    return normed, new_residual


class _Args(NamedTuple):
    partial: Tensor
    residual: Tensor
    norm_weight: Tensor
    eps: float
    group: AnyGroup


def _prepare(a: _Args) -> _Args:
    partial, residual, norm_weight, eps, group = a
    # Under autocast, matmuls return float16 or bfloat16, but the residual stream is float32: sum in float32.
    if isinstance(partial, Tensor) and isinstance(residual, Tensor) and torch.is_autocast_enabled(partial.device.type):
        partial = partial.to(residual.dtype)
    check_tensor("partial", partial)
    check_norm("partial", partial, partial.shape, residual, norm_weight, eps)
    return _Args(partial, residual, norm_weight, float(eps), group)


def check_norm(template_name: str, template: Tensor, shape: Any, residual: Any, norm_weight: Any, eps: Any) -> None:
    """Check `residual`, `norm_weight` and `eps` for a sum of shape `shape` with the dtype and device of `template`."""
    check_like("residual", residual, template_name, template)
    check_shape("residual", residual, shape, "the shape of the sum it is added to")
    check_like("norm_weight", norm_weight, template_name, template)
    check_shape("norm_weight", norm_weight, shape[-1:], "one for each feature")
    checked_number("eps", eps, _is_positive, "positive, or a row of zeros would be divided by zero")


def _is_positive(x: float) -> bool:
    return x > 0


def _backward(s: SavedForBackward[_Args], d_normed: Tensor, d_new_residual: Tensor) -> dict[str, Any]:
    """Return the gradients; no communication."""
    (new_residual,), norm_weight, needs = s.outputs, s.args.norm_weight, s.needs
    d_h, d_weight = rms_norm_backward(d_normed, new_residual, norm_weight, s.args.eps)
    d_stream = (d_h + d_new_residual).to(new_residual.dtype) if needs.partial or needs.residual else None
    return {
        "partial": d_stream,
        "residual": d_stream,
        "norm_weight": d_weight.to(norm_weight.dtype) if needs.norm_weight else None,
    }


def rms_norm_backward(d_normed: Tensor, new_residual: Tensor, norm_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of new_residual (h) and norm_weight for normed = h * rsqrt(mean(h^2) + eps) * norm_weight.

    Both are in float32 (float64 for float64). The norm_weight gradient is the sum over tokens.
    """
    dtype = accumulate_dtype(new_residual.dtype)
    h, d = new_residual.to(dtype), d_normed.to(dtype)
    scale = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    h_hat = h * scale
    d_hat = d * norm_weight.to(dtype)
    d_h = scale * (d_hat - h_hat * (d_hat * h_hat).mean(-1, keepdim=True))
    d_weight = as_rows(d * h_hat).sum(0)
    return d_h, d_weight


def _forward(schedule: Schedule, a: _Args) -> tuple[Tensor, Tensor]:
    return schedule.all_reduce_rms_norm(*a[:4])


def _fake(a: _Args) -> tuple[Tensor, Tensor]:
    return (a.partial.new_empty(a.partial.shape), a.partial.new_empty(a.partial.shape))


def _key(a: _Args) -> ScheduleKey | None:
    return ScheduleKey.from_shard("all_reduce_rms_norm", a.partial, a.partial.shape, None, a.partial.shape[-1])


def _example(size: int, partial: Tensor) -> _Args:
    return _Args(partial, partial, partial, 1.0, None)


ALL_REDUCE_RMS_NORM: Op[_Args] = Op(
    "all_reduce_rms_norm",
    _Args,
    "(Tensor, Tensor)",
    _forward,
    _fake,
    key=_key,
    make_example_args=_example,
    prepare=_prepare,
    saves=("norm_weight", 1),
    backward=_backward,
    has_local_backward=True,
)
