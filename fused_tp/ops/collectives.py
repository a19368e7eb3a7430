"""Differentiable collectives for layers: the plain movements around a model's parallel part.

Gradients follow Megatron's convention: a replicated output gets the same gradient on all ranks, counted once. So there
are two gathers and two scatters, which differ in backward: `all_gather` feeds rank-local work (its gradient is summed),
`gather` makes a replicated result (its gradient is cut).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor
from torch.autograd import Function

from fused_tp.ops.arguments import any_dim, check_tensor, total_size
from fused_tp.ops.custom_op import CustomOp
from fused_tp.runtime.group import GroupLike, group_by_name, group_identity
from fused_tp.runtime.partition import shard_range, shard_sizes
from fused_tp.schedules.base import Schedule
from fused_tp.schedules.registry import select_schedule


def all_gather(x_shard: Tensor, dim: int, *, group: GroupLike, gather_size: int | None = None) -> Tensor:
    """Everyone's `x_shard` along `dim`, for work that differs by rank; backward is `reduce_scatter`.

    Args:
        x_shard: this rank's part, cut along `dim` as torch.chunk does; float16, bfloat16, float32 or float64.
        dim: any dim; may be negative.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        gather_size: length of `dim` over all ranks, where the parts are not equally long.

    Returns:
        The parts in the order of the ranks, `gather_size` along `dim`.

    Raises:
        TypeError, ValueError: an argument does not fit; raised before anything is sent.

    Example:
        x = all_gather(x_shard_m, 0, group=mesh["tp"])
    """
    check_tensor("x_shard", x_shard)
    dim = any_dim("dim", dim, "x_shard", x_shard)
    name, size, rank = group_identity(group)
    total = total_size("gather_size", gather_size, x_shard.shape[dim], size, rank, f"x_shard along dim {dim}")
    result: Tensor = ALL_GATHER(x_shard, dim, total, name)
    return result


def reduce_scatter(x: Tensor, dim: int, *, group: GroupLike) -> Tensor:
    """This rank's slice along `dim` of the sum of `x` over ranks; backward is `all_gather`.

    Args:
        x: this rank's term of the sum, of one shape on all ranks; float16, bfloat16, float32 or float64.
        dim: any dim; may be negative. Cut as torch.chunk does.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.

    Returns:
        Like `x`, with this rank's part of `dim`.

    Raises:
        TypeError, ValueError: an argument does not fit; raised before anything is sent.

    Example:
        y_shard_m = reduce_scatter(partial, 0, group=mesh["tp"])
    """
    check_tensor("x", x)
    result: Tensor = REDUCE_SCATTER(x, any_dim("dim", dim, "x", x), group_identity(group)[0])
    return result


def all_reduce(x: Tensor, *, group: GroupLike) -> Tensor:
    """The sum of `x` over ranks, the same bits on every rank; backward is the identity.

    Args:
        x: this rank's term of the sum, of one shape on all ranks; float16, bfloat16, float32 or float64.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.

    Returns:
        Like `x`.

    Raises:
        TypeError, ValueError: an argument does not fit; raised before anything is sent.

    Example:
        y = all_reduce(partial, group=mesh["tp"])
    """
    check_tensor("x", x, least_dims=0)
    result: Tensor = ALL_REDUCE(x, group_identity(group)[0])
    return result


def copy_to_group(x: Tensor, *, group: GroupLike) -> Tensor:
    """`x`, which all ranks hold, as input of work that differs by rank; backward is `all_reduce`.

    Args:
        x: any shape; float16, bfloat16, float32 or float64. Nothing is sent in forward.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.

    Returns:
        A view of `x`.

    Raises:
        TypeError, ValueError: an argument does not fit.

    Example:
        y = my_own_part(copy_to_group(x, group=mesh["tp"]))
    """
    check_tensor("x", x, least_dims=0)
    result: Tensor = _CopyToGroup.apply(x, group_identity(group)[0])
    return result


def scatter(x: Tensor, dim: int, *, group: GroupLike) -> Tensor:
    """This rank's slice along `dim` of `x`, which all ranks hold; backward is `gather`.

    Args:
        x: float16, bfloat16, float32 or float64. Nothing is sent in forward.
        dim: any dim; may be negative. Cut as torch.chunk does.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.

    Returns:
        A copy of this rank's part of `x`.

    Raises:
        TypeError, ValueError: an argument does not fit.

    Example:
        x_shard_m = scatter(x, 0, group=mesh["tp"])
    """
    check_tensor("x", x)
    name, size, rank = group_identity(group)
    result: Tensor = _Scatter.apply(x, any_dim("dim", dim, "x", x), name, size, rank)
    return result


def gather(x_shard: Tensor, dim: int, *, group: GroupLike, gather_size: int | None = None) -> Tensor:
    """Everyone's `x_shard` along `dim`, as a result that all ranks use alike; backward takes the own slice.

    Arguments, result and errors as for `all_gather`.

    Example:
        logits = gather(logits_shard_n, -1, group=mesh["tp"])
    """
    check_tensor("x_shard", x_shard)
    dim = any_dim("dim", dim, "x_shard", x_shard)
    name, size, rank = group_identity(group)
    total = total_size("gather_size", gather_size, x_shard.shape[dim], size, rank, f"x_shard along dim {dim}")
    result: Tensor = _Gather.apply(x_shard, dim, total, name, size, rank)
    return result


# -- custom ops: what moves -------------------------------------------------------------------------------------------


def _schedule(op: str, x: Tensor, shape: Sequence[int], group: str) -> Schedule:
    """By the `shape` of the tensor that is the same on all ranks: by that of a shard the ranks might choose apart."""
    rows, columns = (prod(shape[:-1]), shape[-1]) if shape else (1, 1)
    return select_schedule(op, group_by_name(group), x.dtype, x.device, rows, None, columns)


def _all_gather_schedule(x_shard: Tensor, dim: int, gather_size: int, group: str) -> Schedule:
    return _schedule("all_gather", x_shard, _gathered_shape(x_shard, dim, gather_size), group)


def _all_gather(x_shard: Tensor, dim: int, gather_size: int, group: str) -> Tensor:
    schedule = _all_gather_schedule(x_shard, dim, gather_size, group)
    x = schedule.all_gather(x_shard, gather_dim=dim, gather_size=gather_size).wait()
    return x_shard.clone() if x is x_shard else x


def _all_gather_fake(x_shard: Tensor, dim: int, gather_size: int, group: str) -> Tensor:
    return x_shard.new_empty(_gathered_shape(x_shard, dim, gather_size))


def _gathered_shape(x_shard: Tensor, dim: int, gather_size: int) -> list[int]:
    shape = list(x_shard.shape)
    shape[dim] = gather_size
    return shape


def _all_gather_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, ctx.dim, _, ctx.group = inputs


def _all_gather_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return REDUCE_SCATTER(grad, ctx.dim, ctx.group), None, None, None


def _reduce_scatter_schedule(x: Tensor, dim: int, group: str) -> Schedule:
    return _schedule("reduce_scatter", x, x.shape, group)


def _reduce_scatter(x: Tensor, dim: int, group: str) -> Tensor:
    return _reduce_scatter_schedule(x, dim, group).reduce_scatter(x, scatter_dim=dim)


def _reduce_scatter_fake(x: Tensor, dim: int, group: str) -> Tensor:
    known = group_by_name(group)
    shape = list(x.shape)
    shape[dim] = shard_sizes(shape[dim], known.size)[known.rank]
    return x.new_empty(shape)


def _reduce_scatter_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, ctx.dim, ctx.group = inputs
    ctx.size = x.shape[ctx.dim]


def _reduce_scatter_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return ALL_GATHER(grad, ctx.dim, ctx.size, ctx.group), None, None


def _all_reduce_schedule(x: Tensor, group: str) -> Schedule:
    return _schedule("all_reduce", x, x.shape, group)


def _all_reduce(x: Tensor, group: str) -> Tensor:
    return _all_reduce_schedule(x, group).all_reduce(x)


def _all_reduce_fake(x: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape)


def _all_reduce_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    pass


def _all_reduce_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return grad, None


ALL_GATHER = CustomOp(
    "all_gather(Tensor x_shard, int dim, SymInt gather_size, str group) -> Tensor",
    _all_gather,
    _all_gather_fake,
    _all_gather_setup,
    _all_gather_backward,
    _all_gather_schedule,
)

REDUCE_SCATTER = CustomOp(
    "reduce_scatter(Tensor x, int dim, str group) -> Tensor",
    _reduce_scatter,
    _reduce_scatter_fake,
    _reduce_scatter_setup,
    _reduce_scatter_backward,
    _reduce_scatter_schedule,
)

ALL_REDUCE = CustomOp(
    "all_reduce(Tensor x, str group) -> Tensor",
    _all_reduce,
    _all_reduce_fake,
    _all_reduce_setup,
    _all_reduce_backward,
    _all_reduce_schedule,
)


# -- functions whose forward moves nothing, or whose backward does not: views are allowed here, not in custom ops -----


class _CopyToGroup(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ALL_REDUCE(grad, ctx.group), None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: str, size: int, rank: int) -> Tensor:
        ctx.dim, ctx.group, ctx.total = dim, group, x.shape[dim]
        start, stop = shard_range(x.shape[dim], size, rank)
        # A copy, so that the whole x need not stay in memory for its slice.
        return x.narrow(dim, start, stop - start).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ALL_GATHER(grad, ctx.dim, ctx.total, ctx.group), None, None, None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x_shard: Tensor, dim: int, total: int, group: str, size: int, rank: int) -> Any:
        ctx.dim, ctx.own = dim, shard_range(total, size, rank)
        return ALL_GATHER(x_shard, dim, total, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        start, stop = ctx.own
        return grad.narrow(ctx.dim, start, stop - start), None, None, None, None, None
