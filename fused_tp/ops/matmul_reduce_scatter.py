"""Overlapped matmul and reduce-scatter: the row-parallel linear under sequence parallelism."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fused_tp.backends.gemm import bias_grad, weight_grad
from fused_tp.backends.schedule import GatherMatmul, Schedule
from fused_tp.core.group import GroupLike, group_by_name
from fused_tp.core.partition import shard_sizes
from fused_tp.ops.arguments import check_int, checked_linear, normalize_token_dim, resized_shape
from fused_tp.ops.op import AnyGroup, Op, SavedForBackward, ScheduleKey


def matmul_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: GroupLike,
    scatter_dim: int = 0,
    float8: str | None = None,
) -> Tensor:
    """y_shard = reduce_scatter(x @ weight^T, scatter_dim) + bias, with the matmul and the reduction overlapped.

    Backward is one `all_gather_matmul` of dy_shard: dy is gathered once, for dgrad, wgrad and dbias.

    =======  ==========================================================================
    forward  y_shard [..., m, ..., N] = reduce_scatter(x [..., M, ..., k] @ weight^T) + bias
    dgrad    dx [..., M, ..., k] = all_gather(dy_shard) @ weight: an `all_gather_matmul`
    wgrad    dW [N, k] = dy^T @ x, dy as gathered for dgrad
    dbias    db [N] = sum of the gathered dy over tokens: complete on each rank
    =======  ==========================================================================

    Args:
        x: [..., M, ..., k], all tokens, this rank's shard of the features; float16, bfloat16, float32 or float64.
        weight: [N, k], this rank's columns of the full weight.
        bias: [N] or None, the same on all ranks, added once after the sum. Its gradient is complete on each rank.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        scatter_dim: any dim but the last; may be negative. Sharded as by torch.chunk: the last ranks may get less.
        float8: multiply in float8 by this recipe of torchao: "tensorwise", "rowwise" or "rowwise_with_gw_hp"; see
            `fused_tp.backends.float8`. The terms of the sum leave in x's dtype. dy_shard is
            gathered in 8 bits per element by "tensorwise", or if `weight` needs no gradient.

    Returns:
        [..., m, ..., N]; summed over ranks in float32 (float64 for float64) in rank order and rounded once.

    Raises:
        TypeError, ValueError: an argument is invalid; raised before anything is sent.
        CollectiveTimeoutError, PeerLostError, RankMismatchError: a peer timed out, was lost, or made another call.

    Example:
        y_shard = matmul_reduce_scatter(hidden, w_down, group=mesh["tp"], scatter_dim=1)

    Source: see `all_gather_matmul`.
    """
    result: Tensor
    if float8 is not None:
        from fused_tp.ops.float8_row_matmul import FLOAT8_ROW_MATMUL  # needed only here

        check_int("scatter_dim", scatter_dim)  # None would not scatter
        result = FLOAT8_ROW_MATMUL(x, weight, bias, scatter_dim, float8, group)
    else:
        result = MATMUL_REDUCE_SCATTER(x, weight, bias, scatter_dim, group)
    return result


class _Args(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    scatter_dim: int
    group: AnyGroup


class _BackwardArgs(NamedTuple):
    d_shard: Tensor
    x: Tensor
    weight: Tensor
    needs_x: bool
    needs_d_output: bool
    scatter_dim: int
    group: AnyGroup


def _prepare(a: _Args) -> _Args:
    x, weight, bias = checked_linear("x", *a[:3], min_dims=2)
    return _Args(x, weight, bias, normalize_token_dim("scatter_dim", a.scatter_dim, "x", x), a.group)


def _fake(a: _Args) -> Tensor:
    group = group_by_name(a.group)
    size = shard_sizes(a.x.shape[a.scatter_dim], group.size)[group.rank]
    return a.x.new_empty((*resized_shape(a.x, a.scatter_dim, size)[:-1], a.weight.shape[0]))


def _backward(s: SavedForBackward[_Args], d_shard: Tensor) -> dict[str, Any]:
    a, needs, grads = s.args, s.needs, dict[str, Any]()
    if needs.x or (s.carry is None and (needs.weight or needs.bias)):
        keeps_d_output = s.all_needs.weight or s.all_needs.bias
        results = MATMUL_REDUCE_SCATTER_BACKWARD(
            d_shard, a.x, a.weight, needs.x, keeps_d_output, a.scatter_dim, a.group
        )
        grads["x"] = results[0] if needs.x else None
        s.carry = results[-1] if keeps_d_output else None
    if needs.weight:
        grads["weight"] = weight_grad(s.carry, a.x)
    if needs.bias:
        grads["bias"] = bias_grad(s.carry)
    return grads


# -- backward: dx is an all_gather_matmul of dy; dW and db use the gathered dy ----------------------------------------


def _gather_grads(schedule: Schedule, g: _BackwardArgs) -> list[Tensor]:
    """Return [dx, gathered dy], omitting those not needed."""
    size = g.x.shape[g.scatter_dim]
    if not g.needs_x:
        d_output = schedule.all_gather(g.d_shard, gather_dim=g.scatter_dim, gather_size=size).wait()
        return [g.d_shard.clone() if d_output is g.d_shard else d_output]
    call = GatherMatmul(g.d_shard, [g.weight.t()], [None], g.scatter_dim, size, g.needs_d_output)
    grads, gathered_d_output = schedule.all_gather_matmul(call)
    return grads if gathered_d_output is None else [*grads, gathered_d_output]


def _grads_key(g: _Args | _BackwardArgs) -> ScheduleKey:
    return ScheduleKey.from_shard("all_gather_matmul", g.x, g.x.shape, g.weight.shape[0], None)


def _grads_fake(g: _BackwardArgs) -> list[Tensor]:
    shapes = [(g.x.shape, g.needs_x), ((*g.x.shape[:-1], g.weight.shape[0]), g.needs_d_output)]
    return [g.x.new_empty(shape) for shape, needed in shapes if needed]


MATMUL_REDUCE_SCATTER_BACKWARD: Op[_BackwardArgs] = Op(
    "matmul_reduce_scatter_backward", _BackwardArgs, "Tensor[]", _gather_grads, _grads_fake, key=_grads_key
)


def _matmul_reduce_scatter_forward(schedule: Schedule, a: _Args) -> Tensor:
    return schedule.matmul_reduce_scatter([(a.x, a.weight)], a.bias, scatter_dim=a.scatter_dim)


def _matmul_reduce_scatter_key(a: _Args) -> ScheduleKey | None:
    return ScheduleKey.from_shard("matmul_reduce_scatter", a.x, a.x.shape, None, a.weight.shape[0])


def _matmul_reduce_scatter_example(size: int, x: Tensor, weight: Tensor) -> _Args:
    return _Args(x, weight, None, 0, None)


MATMUL_REDUCE_SCATTER: Op[_Args] = Op(
    "matmul_reduce_scatter",
    _Args,
    "Tensor",
    _matmul_reduce_scatter_forward,
    _fake,
    key=_matmul_reduce_scatter_key,
    backward_key=_grads_key,
    make_example_args=_matmul_reduce_scatter_example,
    prepare=_prepare,
    saves=("x", "weight"),
    backward=_backward,
)
