"""Differentiable collectives for layers: communication around the parallel part of a model.

Gradients follow Megatron's convention: a replicated output gets the same gradient on all ranks, counted once. There are
therefore two gathers: the result of `all_gather` is the input of computation that differs by rank, and the result of
`gather` is replicated. In the table, M is the length of `dim` over all ranks, and m its length on this rank.

================  ===============================================  ===================================
op                forward                                          backward
================  ===============================================  ===================================
`all_gather`      x [M, K] = all_gather(x_shard [m, K])            dx_shard [m, K] = reduce_scatter(dx)
`reduce_scatter`  y_shard [m, K] = reduce_scatter(x [M, K])        dx [M, K] = all_gather(dy_shard)
`all_reduce`      y = all_reduce(x)                                dx = dy; local
`copy_to_group`   y = x; local                                     dx = all_reduce(dy)
`scatter`         y_shard [m, K] = slice of x [M, K]; local        dx [M, K] = all_gather(dy_shard)
`gather`          x [M, K] = all_gather(x_shard [m, K])            dx_shard [m, K] = slice of dx; local
================  ===============================================  ===================================
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import Function

from fused_tp.backends.schedule import Schedule
from fused_tp.core.group import GroupLike, group_by_name, group_identity
from fused_tp.core.partition import SymInt, shard_range, shard_sizes
from fused_tp.ops.arguments import check_tensor, normalize_dim, resized_shape, total_size
from fused_tp.ops.op import AnyGroup, Op, SavedForBackward, ScheduleKey


def all_gather(x_shard: Tensor, dim: int, *, group: GroupLike, gather_size: int | None = None) -> Tensor:
    """Gather the shards of all ranks along `dim`, for computation that differs by rank; backward is `reduce_scatter`.

    Args:
        x_shard: this rank's shard, split along `dim` as by torch.chunk; float16, bfloat16, float32 or float64.
        dim: any dim; may be negative.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        gather_size: length of `dim` over all ranks; required if the shards are not equally long.

    Returns:
        The shards in rank order, `gather_size` along `dim`.

    Raises:
        TypeError, ValueError: an argument is invalid; raised before anything is sent.

    Example:
        x = all_gather(x_shard_m, 0, group=mesh["tp"])
    """
    result: Tensor = ALL_GATHER(x_shard, dim, gather_size, group)
    return result


def reduce_scatter(x: Tensor, dim: int, *, group: GroupLike) -> Tensor:
    """Sum `x` over ranks and return this rank's slice along `dim`; backward is `all_gather`.

    Args:
        x: this rank's term of the sum, of one shape on all ranks; float16, bfloat16, float32 or float64.
        dim: any dim; may be negative. Sharded as by torch.chunk.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.

    Returns:
        A tensor like `x`, with this rank's shard of `dim`.

    Raises:
        TypeError, ValueError: an argument is invalid; raised before anything is sent.

    Example:
        y_shard_m = reduce_scatter(partial, 0, group=mesh["tp"])
    """
    result: Tensor = REDUCE_SCATTER(x, dim, group)
    return result


def all_reduce(x: Tensor, *, group: GroupLike) -> Tensor:
    """Sum `x` over ranks, bitwise equal on all ranks; backward is the identity.

    Args:
        x: this rank's term of the sum, of one shape on all ranks; float16, bfloat16, float32 or float64.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.

    Returns:
        A tensor like `x`.

    Raises:
        TypeError, ValueError: an argument is invalid; raised before anything is sent.

    Example:
        y = all_reduce(partial, group=mesh["tp"])
    """
    result: Tensor = ALL_REDUCE(x, group)
    return result


def copy_to_group(x: Tensor, *, group: GroupLike) -> Tensor:
    """Return a view of the replicated `x` for rank-local computation; backward all-reduces its gradient."""
    check_tensor("x", x, min_dims=0)
    result: Tensor = _CopyToGroup.apply(x, group_identity(group)[0])
    return result


def scatter(x: Tensor, dim: int, *, group: GroupLike) -> Tensor:
    """Return a copy of this rank's slice (like torch.chunk) of the replicated `x` along `dim`; backward is `gather`."""
    check_tensor("x", x)
    name, size, rank = group_identity(group)
    result: Tensor = _ScatterToGroup.apply(x, normalize_dim("dim", dim, "x", x), name, size, rank)
    return result


def gather(x_shard: Tensor, dim: int, *, group: GroupLike, gather_size: int | None = None) -> Tensor:
    """Gather the shards of all ranks into a replicated result; backward returns this rank's slice of the gradient."""
    requested_size: Any = gather_size  # `_prepare_all_gather` replaces None
    _, dim, total, _ = _prepare_all_gather(_AllGatherArgs(x_shard, dim, requested_size, group))
    result: Tensor = _Gather.apply(x_shard, dim, total, *group_identity(group))
    return result


# -- custom ops, for collectives that communicate in forward ----------------------------------------------------------


class _AllGatherArgs(NamedTuple):
    x_shard: Tensor
    dim: int
    gather_size: SymInt
    group: AnyGroup


class _ReduceScatterArgs(NamedTuple):
    x: Tensor
    dim: int
    group: AnyGroup


class _AllReduceArgs(NamedTuple):
    x: Tensor
    group: AnyGroup


def _key(op: str, x: Tensor, shape: Sequence[int]) -> ScheduleKey:
    """Key for dispatch by the `shape` of the full tensor. It is equal on all ranks, so all select the same schedule."""
    num_rows, num_columns = (prod(shape[:-1]), shape[-1]) if shape else (1, 1)
    return ScheduleKey(op, x.dtype, x.device, num_rows, None, num_columns)


def _prepare_all_gather(a: _AllGatherArgs) -> _AllGatherArgs:
    check_tensor("x_shard", a.x_shard)
    dim = normalize_dim("dim", a.dim, "x_shard", a.x_shard)
    _, size, rank = group_identity(a.group)
    total = total_size("gather_size", a.gather_size, a.x_shard.shape[dim], size, rank, f"x_shard along dim {dim}")
    return _AllGatherArgs(a.x_shard, dim, total, a.group)


def _all_gather_forward(schedule: Schedule, a: _AllGatherArgs) -> Tensor:
    x = schedule.all_gather(a.x_shard, gather_dim=a.dim, gather_size=a.gather_size).wait()
    return a.x_shard.clone() if x is a.x_shard else x


def _gathered_shape(a: _AllGatherArgs) -> list[int]:
    return resized_shape(a.x_shard, a.dim, a.gather_size)


def _prepare_reduce_scatter(a: _ReduceScatterArgs) -> _ReduceScatterArgs:
    check_tensor("x", a.x)
    return _ReduceScatterArgs(a.x, normalize_dim("dim", a.dim, "x", a.x), a.group)


def _reduce_scatter_fake(a: _ReduceScatterArgs) -> Tensor:
    group = group_by_name(a.group)
    return a.x.new_empty(resized_shape(a.x, a.dim, shard_sizes(a.x.shape[a.dim], group.size)[group.rank]))


def _prepare_all_reduce(a: _AllReduceArgs) -> _AllReduceArgs:
    check_tensor("x", a.x, min_dims=0)
    return a


def _reduce_scatter_backward(s: SavedForBackward[_ReduceScatterArgs], grad: Tensor) -> dict[str, Any]:
    size: Any = s.shapes.x
    return {"x": ALL_GATHER(grad, s.args.dim, size[s.args.dim], s.args.group) if s.needs.x else None}


def _all_gather_fake(a: _AllGatherArgs) -> Tensor:
    return a.x_shard.new_empty(_gathered_shape(a))


def _all_gather_key(a: _AllGatherArgs) -> ScheduleKey | None:
    return _key("all_gather", a.x_shard, _gathered_shape(a))


def _all_gather_backward_key(a: _AllGatherArgs) -> ScheduleKey:
    return _key("reduce_scatter", a.x_shard, _gathered_shape(a))


def _all_gather_example(size: int, x_shard: Tensor, dim: int = 0) -> _AllGatherArgs:
    return _AllGatherArgs(x_shard, dim, x_shard.shape[dim] * size, None)


def _all_gather_backward(s: SavedForBackward[_AllGatherArgs], grad: Tensor) -> dict[str, Any]:
    return {"x_shard": REDUCE_SCATTER(grad, s.args.dim, s.args.group) if s.needs.x_shard else None}


ALL_GATHER: Op[_AllGatherArgs] = Op(
    "all_gather",
    _AllGatherArgs,
    "Tensor",
    _all_gather_forward,
    _all_gather_fake,
    key=_all_gather_key,
    backward_key=_all_gather_backward_key,
    make_example_args=_all_gather_example,
    prepare=_prepare_all_gather,
    backward=_all_gather_backward,
)


def _reduce_scatter_forward(schedule: Schedule, a: _ReduceScatterArgs) -> Tensor:
    return schedule.reduce_scatter(a.x, scatter_dim=a.dim)


def _reduce_scatter_key(a: _ReduceScatterArgs) -> ScheduleKey | None:
    return _key("reduce_scatter", a.x, a.x.shape)


def _reduce_scatter_backward_key(a: _ReduceScatterArgs) -> ScheduleKey:
    return _key("all_gather", a.x, a.x.shape)


def _reduce_scatter_example(size: int, x: Tensor, dim: int = 0) -> _ReduceScatterArgs:
    return _ReduceScatterArgs(x, dim, None)


REDUCE_SCATTER: Op[_ReduceScatterArgs] = Op(
    "reduce_scatter",
    _ReduceScatterArgs,
    "Tensor",
    _reduce_scatter_forward,
    _reduce_scatter_fake,
    key=_reduce_scatter_key,
    backward_key=_reduce_scatter_backward_key,
    make_example_args=_reduce_scatter_example,
    prepare=_prepare_reduce_scatter,
    backward=_reduce_scatter_backward,
)


def _all_reduce_forward(schedule: Schedule, a: _AllReduceArgs) -> Tensor:
    return schedule.all_reduce(a.x)


def _all_reduce_fake(a: _AllReduceArgs) -> Tensor:
    return a.x.new_empty(a.x.shape)


def _all_reduce_key(a: _AllReduceArgs) -> ScheduleKey | None:
    return _key("all_reduce", a.x, a.x.shape)


def _all_reduce_example(size: int, x: Tensor) -> _AllReduceArgs:
    return _AllReduceArgs(x, None)


def _all_reduce_backward(s: SavedForBackward[_AllReduceArgs], grad: Tensor) -> dict[str, Any]:
    return {"x": grad if s.needs.x else None}


ALL_REDUCE: Op[_AllReduceArgs] = Op(
    "all_reduce",
    _AllReduceArgs,
    "Tensor",
    _all_reduce_forward,
    _all_reduce_fake,
    key=_all_reduce_key,
    make_example_args=_all_reduce_example,
    prepare=_prepare_all_reduce,
    backward=_all_reduce_backward,
)


# -- autograd functions with a local forward or backward. They may return views; custom ops may not -------------------


class _CopyToGroup(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ALL_REDUCE.call_prepared(grad, ctx.group), None


class _ScatterToGroup(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: str, size: int, rank: int) -> Tensor:
        ctx.dim, ctx.group, ctx.full_length = dim, group, x.shape[dim]
        start, stop = shard_range(x.shape[dim], size, rank)
        # A view would keep all of x in memory.
        return x.narrow(dim, start, stop - start).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ALL_GATHER.call_prepared(grad, ctx.dim, ctx.full_length, ctx.group), None, None, None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x_shard: Tensor, dim: int, total: int, group: str, size: int, rank: int) -> Any:
        ctx.dim, ctx.own_range = dim, shard_range(total, size, rank)
        return ALL_GATHER.call_prepared(x_shard, dim, total, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        start, stop = ctx.own_range
        return grad.narrow(ctx.dim, start, stop - start), None, None, None, None, None
