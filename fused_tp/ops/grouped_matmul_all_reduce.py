"""Multiply rows by their experts' weights, and sum by token and over ranks: down projections of experts."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from fused_tp.backends.grouped import (
    GroupedProduct,
    Routing,
    grouped_linear,
    grouped_weight_grad,
    scale_grads,
    scale_rows,
)
from fused_tp.backends.schedule import Schedule
from fused_tp.core.group import GroupLike
from fused_tp.core.partition import SymInt
from fused_tp.ops.arguments import check_rows, checked_grouped, checked_sizes, fake_grouped_grads, make_example_routing
from fused_tp.ops.op import AnyGroup, Op, SavedForBackward, ScheduleKey


def grouped_matmul_all_reduce(
    x: Tensor,
    weight: Tensor,
    tokens: Tensor,
    offsets: Tensor,
    scale: Tensor | None = None,
    *,
    shape: Sequence[int],
    group: GroupLike,
) -> Tensor:
    """y[t] = sum over ranks and over the rows s of token t of scale[s] * x[s] @ weight[e(s)]^T, the same on all ranks.

    Backward is local: dy is the same on all ranks and counts once (Megatron's convention).

    =======  ============================================================================
    forward  y `[*shape, N]` = all_reduce(sum by token of scale[s] * x[s] @ weight[e(s)]^T)
    dgrad    dx [S, k]: dx[s] = scale[s] * dy[tokens[s]] @ weight[e(s)]; local
    wgrad    dW [experts, N, k]: dW[e] = sum over rows s of e of dy[tokens[s]]^T @ (scale[s] * x[s]); local
    dscale   [S]: (dy[tokens[s]] @ weight[e(s)]) . x[s]; local. No dbias: the op has no bias.
    =======  ============================================================================

    Args:
        x: [S, k], rows sorted by expert, this rank's shard of the features; float16, bfloat16, float32 or float64.
        weight: [experts, N, k], this rank's columns of every expert's weight, or this rank's experts.
        tokens: int64 [S], the token of each row: an index into the flattened `shape`. May differ between ranks.
        offsets: int32 [experts], end of each expert's rows in `tokens` (`offs` in torch).
        scale: [S], factor of each row, such as routing weights; None: 1. Its gradient, like that of x, covers only this
            rank's term.
        shape: shape of the tokens.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.

    Returns:
        `[*shape, N]`; zeros for a token without rows. Each rank sums its rows in float32 (float64 for float64) and
        rounds the sums. The sum over ranks is also in float32, in rank order, and rounded once.

    Raises:
        TypeError, ValueError: an argument is invalid; raised before anything is sent. The values of `tokens` and
            `offsets` are checked on CPU only.
        CollectiveTimeoutError, PeerLostError, RankMismatchError: a peer timed out, was lost, or made another call.

    Example:
        y = grouped_matmul_all_reduce(rows, w_out, tokens, offsets, shape=x.shape[:-1], group=mesh["tp"])

    Source: see `all_gather_grouped_matmul`.
    """
    result: Tensor = GROUPED_MATMUL_ALL_REDUCE(x, weight, tokens, offsets, scale, shape, group)
    return result


class _Args(NamedTuple):
    x: Tensor
    weight: Tensor
    routing: Routing
    scale: Tensor | None
    shape: list[SymInt]
    group: AnyGroup


class _BackwardArgs(NamedTuple):
    d_output: Tensor
    x: Tensor
    weight: Tensor
    routing: Routing
    scale: Tensor | None
    needs_rows: bool
    needs_weight: bool
    group: AnyGroup


def _prepare(a: _Args) -> _Args:
    x, weight = checked_grouped("x", a.x, a.weight, *a.routing, a.scale)
    check_rows(x, a.routing.tokens)
    return _Args(x, weight, a.routing, a.scale, checked_sizes("shape", a.shape), a.group)


def _forward(schedule: Schedule, a: _Args) -> Tensor:
    num_tokens = prod(a.shape)
    a.routing.check(num_tokens)
    product = GroupedProduct(a.x, a.weight, a.routing, num_tokens, a.scale)
    return schedule.grouped_matmul_all_reduce(product).view(*a.shape, a.weight.shape[1])


def _backward(s: SavedForBackward[_Args], d_output: Tensor) -> dict[str, Any]:
    """Return the gradients; no communication."""
    a, needs = s.args, s.needs
    return grouped_row_grads(d_output, a, needs)


def grouped_row_grads(d_output: Tensor, a: Any, needs: Any) -> dict[str, Any]:
    """Compute the needed gradients of x, scale and weight; `d_output` is the gradient of all tokens."""
    needs_rows = needs.x or needs.scale
    if not (needs_rows or needs.weight):
        return {}
    d_scaled, d_weight = GROUPED_MATMUL_BACKWARD(
        d_output, a.x, a.weight, *a.routing, a.scale, needs_rows, needs.weight, a.group
    )
    grads: dict[str, Any] = scale_grads(d_scaled, a.x, a.scale, needs) if needs_rows else {}
    return grads | {"weight": d_weight} if needs.weight else grads


# -- backward: a custom op, because a tracer cannot read the number of rows of each expert ----------------------------


def _compute_grads(schedule: None, g: _BackwardArgs) -> tuple[Tensor, Tensor]:
    """Return (dy @ W for each row, dW); a result that is not needed is an empty tensor."""
    d_rows, empty_tensor = g.routing.gather_rows(g.d_output), g.x.new_empty(0)
    d_scaled = grouped_linear(d_rows, g.weight.transpose(1, 2), g.routing) if g.needs_rows else empty_tensor
    if not g.needs_weight:
        return d_scaled, empty_tensor
    x = g.x if g.scale is None else scale_rows(g.x, g.scale)
    return d_scaled, grouped_weight_grad(d_rows, x, g.weight, g.routing)


def _grouped_matmul_backward_fake(g: _BackwardArgs) -> tuple[Tensor, Tensor]:
    return fake_grouped_grads(g.x, g.needs_rows, g.weight, g.needs_weight)


GROUPED_MATMUL_BACKWARD: Op[_BackwardArgs] = Op(
    "grouped_matmul_backward",
    _BackwardArgs,
    "(Tensor, Tensor)",
    _compute_grads,
    _grouped_matmul_backward_fake,
)


def _grouped_matmul_all_reduce_fake(a: _Args) -> Tensor:
    return a.x.new_empty((*a.shape, a.weight.shape[1]))


def _grouped_matmul_all_reduce_key(a: _Args) -> ScheduleKey | None:
    return ScheduleKey("grouped_matmul_all_reduce", a.x.dtype, a.x.device, prod(a.shape), None, a.weight.shape[1])


def _grouped_matmul_all_reduce_example(size: int, x: Tensor, weight: Tensor) -> _Args:
    return _Args(x, weight, make_example_routing(x, weight), None, list(x.shape[:-1]), None)


GROUPED_MATMUL_ALL_REDUCE: Op[_Args] = Op(
    "grouped_matmul_all_reduce",
    _Args,
    "Tensor",
    _forward,
    _grouped_matmul_all_reduce_fake,
    key=_grouped_matmul_all_reduce_key,
    make_example_args=_grouped_matmul_all_reduce_example,
    prepare=_prepare,
    saves=("x", "weight", "tokens", "offsets", "scale"),
    backward=_backward,
    has_local_backward=True,
)
