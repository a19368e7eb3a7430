"""Multiply rows by experts' weights, sum by token, reduce-scatter: down projections under sequence parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from fused_tp.backends.grouped import (
    GroupedProduct,
    Routing,
    grouped_linear,
    scale_grads,
)
from fused_tp.backends.schedule import Schedule
from fused_tp.core.group import GroupLike, group_by_name
from fused_tp.core.partition import SymInt, shard_sizes
from fused_tp.ops.arguments import check_rows, checked_grouped, checked_sizes, make_example_routing, normalize_dim
from fused_tp.ops.grouped_matmul_all_reduce import grouped_row_grads
from fused_tp.ops.op import AnyGroup, Op, SavedForBackward, ScheduleKey


def grouped_matmul_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    tokens: Tensor,
    offsets: Tensor,
    scale: Tensor | None = None,
    *,
    shape: Sequence[int],
    group: GroupLike,
    scatter_dim: int = 0,
) -> Tensor:
    """Return this rank's slice along `scatter_dim` of the result of `grouped_matmul_all_reduce`.

    Backward is one `all_gather_grouped_matmul` of dy_shard: dy is gathered once, for dgrad and wgrad.

    =======  ==========================================================================
    forward  y_shard [..., m, ..., N] = reduce_scatter(sum by token of scale[s] * x[s] @ weight[e(s)]^T)
    dgrad    dx [S, k]: dx[s] = scale[s] * dy[tokens[s]] @ weight[e(s)] with dy = all_gather(dy_shard)
    wgrad    dW [experts, N, k]: dW[e] = sum over rows s of e of dy[tokens[s]]^T @ (scale[s] * x[s]), dy as gathered
    dscale   [S]: (dy[tokens[s]] @ weight[e(s)]) . x[s], dy as gathered. No dbias: the op has no bias.
    =======  ==========================================================================

    Args:
        x: [S, k], rows sorted by expert, this rank's shard of the features; float16, bfloat16, float32 or float64.
        weight: [experts, N, k], this rank's columns of every expert's weight, or this rank's experts.
        tokens: int64 [S], the token of each row: an index into the flattened `shape`. May differ between ranks.
        offsets: int32 [experts], end of each expert's rows in `tokens` (`offs` in torch).
        scale: [S], factor of each row, such as routing weights; None: 1. Its gradient, like that of x, covers only this
            rank's term.
        shape: shape of the tokens of all ranks.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        scatter_dim: a dim of `shape`; may be negative. Sharded as by torch.chunk: the last ranks may get less.

    Returns:
        `[*shape, N]` with this rank's shard of `scatter_dim`; summed and rounded as in `grouped_matmul_all_reduce`.

    Raises:
        TypeError, ValueError: an argument is invalid; raised before anything is sent. The values of `tokens` and
            `offsets` are checked on CPU only.
        CollectiveTimeoutError, PeerLostError, RankMismatchError: a peer timed out, was lost, or made another call.

    Example:
        y_shard = grouped_matmul_reduce_scatter(rows, w_out, tokens, offsets, shape=x.shape[:-1], group=mesh["tp"])

    Source: see `all_gather_grouped_matmul`.
    """
    result: Tensor = GROUPED_MATMUL_REDUCE_SCATTER(x, weight, tokens, offsets, scale, shape, scatter_dim, group)
    return result


class _Args(NamedTuple):
    x: Tensor
    weight: Tensor
    routing: Routing
    scale: Tensor | None
    shape: list[SymInt]
    scatter_dim: int
    group: AnyGroup


class _BackwardArgs(NamedTuple):
    dy_shard: Tensor
    weight: Tensor
    routing: Routing
    shape: list[SymInt]
    needs_rows: bool
    needs_d_output: bool
    scatter_dim: int
    group: AnyGroup


def _prepare(a: _Args) -> _Args:
    x, weight = checked_grouped("x", a.x, a.weight, *a.routing, a.scale)
    check_rows(x, a.routing.tokens)
    shape = checked_sizes("shape", a.shape)
    dim = normalize_dim("scatter_dim", a.scatter_dim, "tokens", x.new_empty(shape, device="meta"))
    return _Args(x, weight, a.routing, a.scale, shape, dim, a.group)


def _forward(schedule: Schedule, a: _Args) -> Tensor:
    num_tokens = prod(a.shape)
    a.routing.check(num_tokens)
    product = GroupedProduct(a.x, a.weight, a.routing, num_tokens, a.scale)
    return schedule.grouped_matmul_reduce_scatter(product, a.shape, scatter_dim=a.scatter_dim)


def _fake(a: _Args) -> Tensor:
    group, shape = group_by_name(a.group), [*a.shape, a.weight.shape[1]]
    shape[a.scatter_dim] = shard_sizes(shape[a.scatter_dim], group.size)[group.rank]
    return a.x.new_empty(shape)


def _backward(s: SavedForBackward[_Args], dy_shard: Tensor) -> dict[str, Any]:
    a, needs, grads = s.args, s.needs, dict[str, Any]()
    needs_rows = needs.x or needs.scale
    if needs_rows or (s.carry is None and needs.weight):
        d_scaled, d_output = GROUPED_MATMUL_REDUCE_SCATTER_BACKWARD(
            dy_shard, a.weight, *a.routing, a.shape, needs_rows, s.all_needs.weight, a.scatter_dim, a.group
        )
        if needs_rows:
            grads |= scale_grads(d_scaled, a.x, a.scale, needs)
        s.carry = d_output
    if needs.weight:
        grads |= grouped_row_grads(s.carry, a, needs._replace(x=False, scale=False))
    return grads


# -- backward: dx is an all_gather_grouped_matmul of dy; dW uses the gathered dy --------------------------------------


def _gather_grads(schedule: Schedule, g: _BackwardArgs) -> tuple[Tensor, Tensor]:
    """Return (dy @ W for each row, gathered dy); a result that is not needed is an empty tensor."""
    size = g.shape[g.scatter_dim]

    def multiply(d_output: Tensor) -> tuple[Tensor, Tensor]:
        d_rows = grouped_linear(d_output, g.weight.transpose(1, 2), g.routing, has_row_per_token=True)
        return d_rows, d_output.clone() if g.needs_d_output else d_output.new_empty(0)

    if g.needs_rows:
        return schedule.apply_to_gathered(
            "grouped_matmul_reduce_scatter_backward", g.dy_shard, g.scatter_dim, size, multiply
        )
    d_output = schedule.all_gather(g.dy_shard, gather_dim=g.scatter_dim, gather_size=size).wait()
    return g.dy_shard.new_empty(0), g.dy_shard.clone() if d_output is g.dy_shard else d_output


def _grads_key(g: _Args | _BackwardArgs) -> ScheduleKey:
    dtype, device = g.weight.dtype, g.weight.device
    return ScheduleKey("all_gather_grouped_matmul", dtype, device, prod(g.shape), g.weight.shape[1], None)


def _grads_fake(g: _BackwardArgs) -> tuple[Tensor, Tensor]:
    num_rows, num_columns = len(g.routing.tokens), g.weight.shape[2]
    return (
        g.dy_shard.new_empty((num_rows, num_columns) if g.needs_rows else 0),
        g.dy_shard.new_empty((*g.shape, g.weight.shape[1]) if g.needs_d_output else 0),
    )


GROUPED_MATMUL_REDUCE_SCATTER_BACKWARD: Op[_BackwardArgs] = Op(
    "grouped_matmul_reduce_scatter_backward",
    _BackwardArgs,
    "(Tensor, Tensor)",
    _gather_grads,
    _grads_fake,
    key=_grads_key,
)


def _grouped_matmul_reduce_scatter_key(a: _Args) -> ScheduleKey | None:
    return ScheduleKey("grouped_matmul_reduce_scatter", a.x.dtype, a.x.device, prod(a.shape), None, a.weight.shape[1])


def _grouped_matmul_reduce_scatter_example(size: int, x: Tensor, weight: Tensor) -> _Args:
    return _Args(x, weight, make_example_routing(x, weight), None, list(x.shape[:-1]), 0, None)


GROUPED_MATMUL_REDUCE_SCATTER: Op[_Args] = Op(
    "grouped_matmul_reduce_scatter",
    _Args,
    "Tensor",
    _forward,
    _fake,
    key=_grouped_matmul_reduce_scatter_key,
    backward_key=_grads_key,
    make_example_args=_grouped_matmul_reduce_scatter_example,
    prepare=_prepare,
    saves=("x", "weight", "tokens", "offsets", "scale"),
    backward=_backward,
)
