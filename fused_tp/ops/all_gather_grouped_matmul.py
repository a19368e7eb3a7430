"""All-gather x and multiply each token by its experts' weights: up projections under sequence parallelism."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from fused_tp.backends.grouped import GroupedProduct, Routing, grouped_linear, grouped_weight_grad
from fused_tp.backends.schedule import Schedule
from fused_tp.core.group import GroupLike, group_identity
from fused_tp.core.partition import SymInt
from fused_tp.ops.arguments import (
    checked_grouped,
    fake_grouped_grads,
    make_example_routing,
    normalize_token_dim,
    resized_shape,
    total_size,
)
from fused_tp.ops.op import AnyGroup, Op, SavedForBackward, ScheduleKey


def all_gather_grouped_matmul(
    x_shard: Tensor,
    weight: Tensor,
    tokens: Tensor,
    offsets: Tensor,
    *,
    group: GroupLike,
    gather_dim: int = 0,
    gather_size: int | None = None,
) -> Tensor:
    """y[s] = x[tokens[s]] @ weight[e(s)]^T for x = all_gather(x_shard, gather_dim), one row per token and expert.

    Only the shard is saved for backward.

    =======  ==========================================================================
    forward  y [S, N]: y[s] = all_gather(x_shard)[tokens[s]] @ weight[e(s)]^T
    dgrad    dx_shard [..., m, ..., K] = reduce_scatter(sum by token of dy[s] @ weight[e(s)])
    wgrad    dW [experts, N, K]: dW[e] = sum over rows s of e of dy[s]^T @ x[tokens[s]], x gathered again during dgrad
    dbias    none: the op has no bias
    =======  ==========================================================================

    Args:
        x_shard: [..., m, ..., K], this rank's tokens along `gather_dim`; float16, bfloat16, float32 or float64.
        weight: [experts, N, K], this rank's rows of every expert's weight, or this rank's experts; any strides.
        tokens: int64 [S], token of each row of y, sorted by expert: an index into all dims of the gathered x but the
            last, flattened. May differ between ranks.
        offsets: int32 [experts], end of each expert's rows in `tokens` (`offs` in torch).
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        gather_dim: any dim but the last; may be negative.
        gather_size: length of `gather_dim` over all ranks, if the shards (as by torch.chunk) are not all equal.

    Returns:
        y [S, N].

    Raises:
        TypeError, ValueError: an argument is invalid; raised before anything is sent. The values of `tokens` and
            `offsets` are checked on CPU only.
        CollectiveTimeoutError, PeerLostError, RankMismatchError: a peer timed out, was lost, or made another call.

    Example:
        chosen, order = experts.view(-1).sort(stable=True)  # experts [tokens, 2]: two per token
        offsets = torch.bincount(chosen, minlength=8).cumsum(0).int()
        rows = all_gather_grouped_matmul(x_shard, w_gate_up, order // 2, offsets, group=mesh["tp"])

    Source: the gather side of Zhang et al., "Comet: Fine-grained Computation-communication Overlapping for
    Mixture-of-Experts", MLSys 2025; grouped matmuls of Gale et al., "MegaBlocks", MLSys 2023.
    """
    result: Tensor = ALL_GATHER_GROUPED_MATMUL(x_shard, weight, tokens, offsets, gather_dim, gather_size, group)
    return result


class _Args(NamedTuple):
    x_shard: Tensor
    weight: Tensor
    routing: Routing
    gather_dim: int
    gather_size: SymInt
    group: AnyGroup


class _BackwardArgs(NamedTuple):
    d_output: Tensor
    x_shard: Tensor
    weight: Tensor
    routing: Routing
    needs_x: bool
    needs_weight: bool
    gather_dim: int
    gather_size: SymInt
    group: AnyGroup


def _prepare(a: _Args) -> _Args:
    x_shard, weight = checked_grouped("x_shard", a.x_shard, a.weight, *a.routing, min_dims=2)
    dim = normalize_token_dim("gather_dim", a.gather_dim, "x_shard", x_shard)
    _, size, rank = group_identity(a.group)
    total = total_size("gather_size", a.gather_size, x_shard.shape[dim], size, rank, f"x_shard along dim {dim}")
    return _Args(x_shard, weight, a.routing, dim, total, a.group)


def _gathered_shape(a: _Args | _BackwardArgs) -> list[int]:
    """Shape of the gathered x."""
    return resized_shape(a.x_shard, a.gather_dim, a.gather_size)


def _forward(schedule: Schedule, a: _Args) -> Tensor:
    a.routing.check(prod(_gathered_shape(a)[:-1]))

    def multiply(x: Tensor) -> Tensor:
        return grouped_linear(x, a.weight, a.routing, has_row_per_token=True)

    return schedule.apply_to_gathered("all_gather_grouped_matmul", a.x_shard, a.gather_dim, a.gather_size, multiply)


def _backward(s: SavedForBackward[_Args], d_output: Tensor) -> dict[str, Any]:
    a, needs = s.args, s.needs
    if not (needs.x_shard or needs.weight):
        return {}
    d_x, d_weight = ALL_GATHER_GROUPED_MATMUL_BACKWARD(
        d_output, a.x_shard, a.weight, *a.routing, needs.x_shard, needs.weight, a.gather_dim, a.gather_size, a.group
    )
    return {"x_shard": d_x if needs.x_shard else None, "weight": d_weight if needs.weight else None}


# -- backward: dx_shard is a grouped_matmul_reduce_scatter; x is gathered again for dW while it runs -------------------


def _compute_grads(schedule: Schedule, g: _BackwardArgs) -> tuple[Tensor, Tensor]:
    """Return (dx_shard, dW); a gradient that is not needed is an empty tensor."""
    d_x, d_weight = g.x_shard.new_empty(0), g.x_shard.new_empty(0)
    with schedule.abort_scope("all_gather_grouped_matmul_backward"):
        pending_x = None
        if g.needs_weight:
            pending_x = schedule.all_gather(g.x_shard, gather_dim=g.gather_dim, gather_size=g.gather_size)

        def compute_weight_grad() -> None:
            nonlocal d_weight
            if pending_x is not None:
                rows = g.routing.gather_rows(pending_x.wait())
                d_weight = grouped_weight_grad(g.d_output, rows, g.weight, g.routing)

        if not g.needs_x:
            compute_weight_grad()
        else:
            shape = _gathered_shape(g)[:-1]
            product = GroupedProduct(g.d_output, g.weight.transpose(1, 2), g.routing, prod(shape))
            d_x = schedule.grouped_matmul_reduce_scatter(
                product, shape, scatter_dim=g.gather_dim, overlapped_work=compute_weight_grad
            )
    return d_x, d_weight


def _grads_key(g: _Args | _BackwardArgs) -> ScheduleKey:
    return ScheduleKey.from_shard(
        "grouped_matmul_reduce_scatter", g.x_shard, _gathered_shape(g), None, g.x_shard.shape[-1]
    )


def _all_gather_grouped_matmul_backward_fake(g: _BackwardArgs) -> tuple[Tensor, Tensor]:
    return fake_grouped_grads(g.x_shard, g.needs_x, g.weight, g.needs_weight)


ALL_GATHER_GROUPED_MATMUL_BACKWARD: Op[_BackwardArgs] = Op(
    "all_gather_grouped_matmul_backward",
    _BackwardArgs,
    "(Tensor, Tensor)",
    _compute_grads,
    _all_gather_grouped_matmul_backward_fake,
    key=_grads_key,
)


def _all_gather_grouped_matmul_fake(a: _Args) -> Tensor:
    return a.x_shard.new_empty((len(a.routing.tokens), a.weight.shape[1]))


def _all_gather_grouped_matmul_key(a: _Args) -> ScheduleKey | None:
    return ScheduleKey.from_shard("all_gather_grouped_matmul", a.x_shard, _gathered_shape(a), a.x_shard.shape[-1], None)


def _all_gather_grouped_matmul_example(size: int, x_shard: Tensor, weight: Tensor) -> _Args:
    return _Args(x_shard, weight, make_example_routing(x_shard, weight), 0, x_shard.shape[0] * size, None)


ALL_GATHER_GROUPED_MATMUL: Op[_Args] = Op(
    "all_gather_grouped_matmul",
    _Args,
    "Tensor",
    _forward,
    _all_gather_grouped_matmul_fake,
    key=_all_gather_grouped_matmul_key,
    backward_key=_grads_key,
    make_example_args=_all_gather_grouped_matmul_example,
    prepare=_prepare,
    saves=("x_shard", "weight", "tokens", "offsets"),
    backward=_backward,
)
