"""Up projections of experts without sequence parallelism: forward is local, backward sums over ranks."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from fused_tp.backends.grouped import GroupedProduct, Routing, grouped_linear, grouped_weight_grad
from fused_tp.backends.schedule import Schedule
from fused_tp.core.group import GroupLike, group_identity
from fused_tp.ops.arguments import checked_grouped, fake_grouped_grads, make_example_routing
from fused_tp.ops.op import AnyGroup, Op, SavedForBackward, ScheduleKey


def column_parallel_grouped_matmul(
    x: Tensor, weight: Tensor, tokens: Tensor, offsets: Tensor, *, group: GroupLike
) -> Tensor:
    """y[s] = x[tokens[s]] @ weight[e(s)]^T, one row per token and expert, for x replicated over ranks.

    =======  ==========================================================================
    forward  y [S, N]: y[s] = x[tokens[s]] @ weight[e(s)]^T; local
    dgrad    dx [..., K] = all_reduce(sum by token of dy[s] @ weight[e(s)]): a `grouped_matmul_all_reduce`
    wgrad    dW [experts, N, K]: dW[e] = sum over rows s of e of dy[s]^T @ x[tokens[s]], overlapped with dgrad
    dbias    none: the op has no bias
    =======  ==========================================================================

    Args:
        x: [..., K], the same on all ranks; float16, bfloat16, float32 or float64.
        weight: [experts, N, K], this rank's rows of every expert's weight, or this rank's experts.
        tokens: int64 [S], token of each row of y, sorted by expert: an index into all dims of x but the last,
            flattened. May differ between ranks.
        offsets: int32 [experts], end of each expert's rows in `tokens` (`offs` in torch).
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.

    Returns:
        y [S, N].

    Raises:
        TypeError, ValueError: an argument is invalid. The values of `tokens` and `offsets` are checked on CPU only.
        CollectiveTimeoutError, PeerLostError, RankMismatchError: in backward, a peer failed or made another call.

    Example:
        rows = column_parallel_grouped_matmul(x, w_gate_up, tokens, offsets, group=mesh["tp"])

    Source: see `all_gather_grouped_matmul`.
    """
    result: Tensor = COLUMN_PARALLEL_GROUPED_MATMUL(x, weight, tokens, offsets, group)
    return result


class _Args(NamedTuple):
    x: Tensor
    weight: Tensor
    routing: Routing
    group: AnyGroup


class _BackwardArgs(NamedTuple):
    d_output: Tensor
    x: Tensor
    weight: Tensor
    routing: Routing
    needs_x: bool
    needs_weight: bool
    group: AnyGroup


def _prepare(a: _Args) -> _Args:
    group_identity(a.group)  # raises if a.group is not a group
    return _Args(*checked_grouped("x", a.x, a.weight, *a.routing), a.routing, a.group)


def _forward(schedule: Schedule | None, a: _Args) -> Tensor:
    a.routing.check(prod(a.x.shape[:-1]))
    return grouped_linear(a.x, a.weight, a.routing, has_row_per_token=True)


def _backward(s: SavedForBackward[_Args], d_output: Tensor) -> dict[str, Any]:
    a, needs = s.args, s.needs
    if not (needs.x or needs.weight):
        return {}
    d_x, d_weight = COLUMN_PARALLEL_GROUPED_MATMUL_BACKWARD(
        d_output, a.x, a.weight, *a.routing, needs.x, needs.weight, a.group
    )
    return {"x": d_x if needs.x else None, "weight": d_weight if needs.weight else None}


# -- backward: dx is a grouped_matmul_all_reduce, and dW is computed while it runs -------------------------------------


def _compute_grads(schedule: Schedule | None, g: _BackwardArgs) -> tuple[Tensor, Tensor]:
    """Return (dx, dW); a gradient that is not needed is an empty tensor."""
    d_weight = g.x.new_empty(0)

    def compute_weight_grad() -> None:
        nonlocal d_weight
        if g.needs_weight:
            d_weight = grouped_weight_grad(g.d_output, g.routing.gather_rows(g.x), g.weight, g.routing)

    if schedule is None:
        compute_weight_grad()
        return g.x.new_empty(0), d_weight
    product = GroupedProduct(g.d_output, g.weight.transpose(1, 2), g.routing, prod(g.x.shape[:-1]))
    d_x = schedule.grouped_matmul_all_reduce(product, overlapped_work=compute_weight_grad)
    return d_x.view(g.x.shape), d_weight


def _sum_key(a: _Args | _BackwardArgs) -> ScheduleKey:
    return ScheduleKey.from_shard("grouped_matmul_all_reduce", a.x, a.x.shape, None, a.x.shape[-1])


def _column_parallel_grouped_matmul_backward_fake(g: _BackwardArgs) -> tuple[Tensor, Tensor]:
    return fake_grouped_grads(g.x, g.needs_x, g.weight, g.needs_weight)


def _column_parallel_grouped_matmul_backward_key(g: _BackwardArgs) -> ScheduleKey | None:
    return _sum_key(g) if g.needs_x else None


COLUMN_PARALLEL_GROUPED_MATMUL_BACKWARD: Op[_BackwardArgs] = Op(
    "column_parallel_grouped_matmul_backward",
    _BackwardArgs,
    "(Tensor, Tensor)",
    _compute_grads,
    _column_parallel_grouped_matmul_backward_fake,
    key=_column_parallel_grouped_matmul_backward_key,
)


def _column_parallel_grouped_matmul_fake(a: _Args) -> Tensor:
    return a.x.new_empty((len(a.routing.tokens), a.weight.shape[1]))


def _column_parallel_grouped_matmul_example(size: int, x: Tensor, weight: Tensor) -> _Args:
    return _Args(x, weight, make_example_routing(x, weight), None)


COLUMN_PARALLEL_GROUPED_MATMUL: Op[_Args] = Op(
    "column_parallel_grouped_matmul",
    _Args,
    "Tensor",
    _forward,
    _column_parallel_grouped_matmul_fake,
    backward_key=_sum_key,
    make_example_args=_column_parallel_grouped_matmul_example,
    prepare=_prepare,
    saves=("x", "weight", "tokens", "offsets"),
    backward=_backward,
)
