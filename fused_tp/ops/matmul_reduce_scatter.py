"""Multiply and sum over ranks, each keeping its tokens: the row-parallel linear under sequence parallelism."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor

from fused_tp.ops.arguments import check_linear, check_tensor, token_dim
from fused_tp.ops.context import autocast_dtype, cast, deliver, main_grads
from fused_tp.ops.custom_op import CustomOp
from fused_tp.ops.gradients import bias_grad, weight_grad
from fused_tp.runtime.group import Group, GroupLike, group_by_name, group_identity
from fused_tp.runtime.partition import shard_sizes
from fused_tp.schedules.base import Schedule
from fused_tp.schedules.registry import select_schedule


def matmul_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: GroupLike,
    scatter_dim: int = 0,
) -> Tensor:
    """This rank's slice along `scatter_dim` of sum over ranks(x @ weight^T) + bias, matmul and sum overlapped.

    Backward is one `all_gather_matmul` of dy: it gives dx, and the dy it gathers gives dW and db.

    Args:
        x: [..., M, ..., k], all tokens, this rank's part of the features; float16, bfloat16, float32 or float64.
        weight: [N, k], this rank's columns of the whole weight.
        bias: [N] or None, the same on all ranks, added once after the sum. Its gradient is the complete one.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        scatter_dim: any dim but the last; may be negative. Cut as torch.chunk does: the last ranks may get less.

    Returns:
        [..., m, ..., N]; summed over ranks in float32 (float64 for float64) in rank order and rounded once.

    Raises:
        TypeError, ValueError: an argument does not fit; raised before anything is sent.
        CollectiveTimeoutError, PeerLostError, RankMismatchError: the peers did not come along.

    Example:
        y_shard = matmul_reduce_scatter(hidden, w_down, group=mesh["tp"], scatter_dim=1)

    Source: as `all_gather_matmul`.
    """
    dtype = autocast_dtype(x)
    if dtype is not None:
        x, weight, bias = cast(dtype, x, weight, bias)
    check_tensor("x", x, least_dims=2)
    check_linear("x", x, weight, bias)
    dim = token_dim("scatter_dim", scatter_dim, "x", x)
    result: Tensor = MATMUL_REDUCE_SCATTER(x, weight, bias, group_identity(group)[0], dim)
    return result


def _schedule(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, scatter_dim: int) -> Schedule:
    rows = prod(x.shape[:-1])
    return select_schedule(
        "matmul_reduce_scatter", group_by_name(group), x.dtype, x.device, rows, None, weight.shape[0]
    )


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, scatter_dim: int) -> Tensor:
    schedule = _schedule(x, weight, bias, group, scatter_dim)
    return schedule.matmul_reduce_scatter([(x, weight)], bias, scatter_dim=scatter_dim)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, scatter_dim: int) -> Tensor:
    return x.new_empty(_scattered_shape(x, weight, group_by_name(group), scatter_dim))


def _setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, weight, bias, group, scatter_dim = inputs
    ctx.save_for_backward(x, weight)
    ctx.needs = [x.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad]
    ctx.where = (group, scatter_dim)
    ctx.main_grads = main_grads([weight])


def _backward(ctx: Any, d_shard: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    grads = iter(MATMUL_REDUCE_SCATTER_BACKWARD(d_shard, x, weight, ctx.needs, *ctx.where))
    d_x, d_weight, d_bias = (next(grads) if needs else None for needs in ctx.needs)
    if d_weight is not None:
        d_weight = deliver(d_weight, ctx.main_grads[0])
    return d_x, d_weight, d_bias, None, None


def _grads_schedule(
    d_shard: Tensor, x: Tensor, weight: Tensor, needs: list[bool], group: str, scatter_dim: int
) -> Schedule:
    rows = prod(x.shape[:-1])
    return select_schedule("all_gather_matmul", group_by_name(group), x.dtype, x.device, rows, weight.shape[0], None)


def _compute_grads(
    d_shard: Tensor, x: Tensor, weight: Tensor, needs: list[bool], group: str, scatter_dim: int
) -> list[Tensor]:
    """Those of dx, dW, db that are needed."""
    needs_x, needs_weight, needs_bias = needs
    gather_size = x.shape[scatter_dim]
    schedule = _grads_schedule(d_shard, x, weight, needs, group, scatter_dim)
    grads: list[Tensor] = []
    if needs_x:
        grads, d_output = schedule.all_gather_matmul(
            d_shard,
            [weight.t()],
            [None],
            gather_dim=scatter_dim,
            gather_size=gather_size,
            return_gathered=needs_weight or needs_bias,
        )
    else:
        d_output = schedule.all_gather(d_shard, gather_dim=scatter_dim, gather_size=gather_size).wait()
    if needs_weight:
        assert d_output is not None
        grads.append(weight_grad(d_output, x))
    if needs_bias:
        assert d_output is not None
        grads.append(bias_grad(d_output))
    return grads


def _grads_fake(
    d_shard: Tensor, x: Tensor, weight: Tensor, needs: list[bool], group: str, scatter_dim: int
) -> list[Tensor]:
    shapes = [x.shape, weight.shape, weight.shape[:1]]
    return [x.new_empty(shape) for shape, needed in zip(shapes, needs, strict=True) if needed]


def _scattered_shape(x: Tensor, weight: Tensor, group: Group, scatter_dim: int) -> list[int]:
    shape = [*x.shape[:-1], weight.shape[0]]
    shape[scatter_dim] = shard_sizes(shape[scatter_dim], group.size)[group.rank]
    return shape


MATMUL_REDUCE_SCATTER_BACKWARD = CustomOp(
    "matmul_reduce_scatter_backward(Tensor d_shard, Tensor x, Tensor weight, bool[] needs, str group, "
    "int scatter_dim) -> Tensor[]",
    _compute_grads,
    _grads_fake,
    schedule=_grads_schedule,
)

MATMUL_REDUCE_SCATTER = CustomOp(
    "matmul_reduce_scatter(Tensor x, Tensor weight, Tensor? bias, str group, int scatter_dim) -> Tensor",
    _forward,
    _fake,
    _setup_context,
    _backward,
    _schedule,
)
