"""Gather the token shards of x while multiplying them: the column-parallel linear under sequence parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Literal, overload

from torch import Tensor

from fused_tp.ops.arguments import as_lists, check_linear, check_tensor, token_dim, total_size
from fused_tp.ops.context import autocast_dtype, cast, deliver, main_grads
from fused_tp.ops.custom_op import CustomOp
from fused_tp.ops.gradients import bias_grad, weight_grad
from fused_tp.runtime.group import GroupLike, group_by_name, group_identity
from fused_tp.schedules.base import Schedule
from fused_tp.schedules.registry import select_schedule


@overload
def all_gather_matmul(
    x_shard: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: GroupLike,
    gather_dim: int = 0,
    gather_size: int | None = None,
    return_gathered: Literal[False] = False,
) -> Tensor: ...


@overload
def all_gather_matmul(
    x_shard: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: GroupLike,
    gather_dim: int = 0,
    gather_size: int | None = None,
    return_gathered: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@overload
def all_gather_matmul(
    x_shard: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: GroupLike,
    gather_dim: int = 0,
    gather_size: int | None = None,
    return_gathered: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...


@overload
def all_gather_matmul(
    x_shard: Tensor,
    weight: Sequence[Tensor],
    bias: Sequence[Tensor | None] | None = None,
    *,
    group: GroupLike,
    gather_dim: int = 0,
    gather_size: int | None = None,
    return_gathered: Literal[False] = False,
) -> list[Tensor]: ...


@overload
def all_gather_matmul(
    x_shard: Tensor,
    weight: Sequence[Tensor],
    bias: Sequence[Tensor | None] | None = None,
    *,
    group: GroupLike,
    gather_dim: int = 0,
    gather_size: int | None = None,
    return_gathered: Literal[True],
) -> tuple[list[Tensor], Tensor]: ...


@overload
def all_gather_matmul(
    x_shard: Tensor,
    weight: Sequence[Tensor],
    bias: Sequence[Tensor | None] | None = None,
    *,
    group: GroupLike,
    gather_dim: int = 0,
    gather_size: int | None = None,
    return_gathered: bool,
) -> list[Tensor] | tuple[list[Tensor], Tensor]: ...


def all_gather_matmul(
    x_shard: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor | None] | None = None,
    *,
    group: GroupLike,
    gather_dim: int = 0,
    gather_size: int | None = None,
    return_gathered: bool = False,
) -> Tensor | list[Tensor] | tuple[Tensor | list[Tensor], Tensor]:
    """y = all_gather(x_shard, gather_dim) @ weight^T + bias, with the gather and the matmul overlapped.

    Several weights that read the same input (q, k, v; gate, up) share one gather. Backward saves only the shard:
    dx_shard is a `matmul_reduce_scatter`, and dW uses x gathered again while that runs.

    Args:
        x_shard: [..., m, ..., K], this rank's tokens along `gather_dim`; float16, bfloat16, float32 or float64.
        weight: [N, K] as in nn.Linear (this rank's rows of the whole weight), or a list of such.
        bias: [N] or None; for a list of weights a list of these, or None.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        gather_dim: any dim but the last; may be negative.
        gather_size: length of `gather_dim` over all ranks, where the shards (as torch.chunk cuts) are not all equal.
        return_gathered: also return the gathered x, which is differentiable too.

    Returns:
        y [..., M, ..., N], or a list of them for a list of weights; with `return_gathered`, (that, gathered x).

    Raises:
        TypeError, ValueError: an argument does not fit; raised before anything is sent.
        CollectiveTimeoutError, PeerLostError, RankMismatchError: the peers did not come along.

    Example:
        q, k, v = all_gather_matmul(x_shard, [w_q, w_k, w_v], group=mesh["tp"], gather_dim=1)

    Source: the decomposition of Wang et al., "Overlap Communication with Dependent Computation via Decomposition in
    Large Deep Learning Models", ASPLOS 2023; sequence parallelism of Korthikanti et al., 2022.
    """
    weights, biases = as_lists(weight, bias)
    dtype = autocast_dtype(x_shard)
    if dtype is not None:
        x_shard, *cast_all = cast(dtype, x_shard, *weights, *biases)
        weights, biases = cast_all[: len(weights)], cast_all[len(weights) :]
    check_tensor("x_shard", x_shard, least_dims=2)
    for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
        check_linear("x_shard", x_shard, w, b, f"[{i}]" if len(weights) > 1 else "")
    dim = token_dim("gather_dim", gather_dim, "x_shard", x_shard)
    name, size, rank = group_identity(group)
    total = total_size("gather_size", gather_size, x_shard.shape[dim], size, rank, f"x_shard along dim {dim}")
    given = [b for b in biases if b is not None]
    has_bias = [b is not None for b in biases]
    outputs: list[Tensor] = ALL_GATHER_MATMUL(x_shard, weights, given, has_bias, name, dim, total, return_gathered)
    result = outputs[: len(weights)] if isinstance(weight, (list, tuple)) else outputs[0]
    return (result, outputs[-1]) if return_gathered else result


def _schedule(
    x_shard: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    has_bias: list[bool],
    group: str,
    gather_dim: int,
    gather_size: int,
    return_gathered: bool,
) -> Schedule:
    shape = _gathered_shape(x_shard, gather_dim, gather_size)
    rows = prod(shape[:-1])
    return select_schedule(
        "all_gather_matmul", group_by_name(group), x_shard.dtype, x_shard.device, rows, shape[-1], None
    )


def _forward(
    x_shard: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    has_bias: list[bool],
    group: str,
    gather_dim: int,
    gather_size: int,
    return_gathered: bool,
) -> list[Tensor]:
    schedule = _schedule(
        x_shard, weights, biases, has_bias, group, gather_dim, gather_size, return_gathered
    )  # fmt: skip
    given = iter(biases)
    outputs, gathered = schedule.all_gather_matmul(
        x_shard,
        weights,
        [next(given) if has else None for has in has_bias],
        gather_dim=gather_dim,
        gather_size=gather_size,
        return_gathered=return_gathered,
    )
    return outputs if gathered is None else [*outputs, gathered]


def _fake(
    x_shard: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    has_bias: list[bool],
    group: str,
    gather_dim: int,
    gather_size: int,
    return_gathered: bool,
) -> list[Tensor]:
    shape = _gathered_shape(x_shard, gather_dim, gather_size)
    outputs = [x_shard.new_empty((*shape[:-1], w.shape[0])) for w in weights]
    return [*outputs, x_shard.new_empty(shape)] if return_gathered else outputs


def _setup_context(ctx: Any, inputs: Any, output: list[Tensor]) -> None:
    x_shard, weights, biases, has_bias, group, gather_dim, gather_size, _ = inputs
    ctx.set_materialize_grads(False)  # an output nobody used costs nothing
    ctx.save_for_backward(x_shard, *weights)
    ctx.needs_x = x_shard.requires_grad
    ctx.needs_weight = [w.requires_grad for w in weights]
    ctx.needs_bias = [b.requires_grad for b in biases]
    ctx.has_bias = has_bias
    ctx.where = (group, gather_dim, gather_size)
    ctx.main_grads = main_grads(weights)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    x_shard, *weights = ctx.saved_tensors
    used = [i for i, d in enumerate(grads[: len(weights)]) if d is not None]
    d_gathered = grads[len(weights)] if len(grads) > len(weights) else None
    needs_x = ctx.needs_x and (bool(used) or d_gathered is not None)
    which = [i for i in used if ctx.needs_weight[i]]
    d_x, *d_weights = ALL_GATHER_MATMUL_BACKWARD(
        [grads[i] for i in used],
        d_gathered,
        x_shard,
        [weights[i] for i in used],
        [ctx.needs_weight[i] for i in used],
        needs_x,
        *ctx.where,
    )
    weight_grads: list[Tensor | None] = [None] * len(weights)
    for i, d in zip(which, d_weights, strict=True):
        weight_grads[i] = deliver(d, ctx.main_grads[i])
    bias_owners = [i for i, has in enumerate(ctx.has_bias) if has]
    bias_grads = [
        bias_grad(d) if needs and (d := grads[i]) is not None else None
        for i, needs in zip(bias_owners, ctx.needs_bias, strict=True)
    ]
    return d_x if needs_x else None, weight_grads, bias_grads, None, None, None, None, None


def _grads_schedule(
    d_outputs: list[Tensor],
    d_gathered: Tensor | None,
    x_shard: Tensor,
    weights: list[Tensor],
    needs_weight: list[bool],
    needs_x: bool,
    group: str,
    gather_dim: int,
    gather_size: int,
) -> Schedule:
    shape = _gathered_shape(x_shard, gather_dim, gather_size)
    rows = prod(shape[:-1])
    return select_schedule(
        "matmul_reduce_scatter", group_by_name(group), x_shard.dtype, x_shard.device, rows, None, shape[-1]
    )


def _compute_grads(
    d_outputs: list[Tensor],
    d_gathered: Tensor | None,
    x_shard: Tensor,
    weights: list[Tensor],
    needs_weight: list[bool],
    needs_x: bool,
    group: str,
    gather_dim: int,
    gather_size: int,
) -> list[Tensor]:
    """[dx_shard (empty where not needed), *dW of the weights that need one]."""
    schedule = _grads_schedule(
        d_outputs, d_gathered, x_shard, weights, needs_weight, needs_x, group, gather_dim, gather_size
    )
    d_weights: list[Tensor] = []
    with schedule.abort_scope("all_gather_matmul_backward"):
        gathering = (
            schedule.all_gather(x_shard, gather_dim=gather_dim, gather_size=gather_size) if any(needs_weight) else None
        )

        def compute_weight_grads() -> None:
            if gathering is not None:
                x = gathering.wait()
                d_weights.extend(weight_grad(d, x) for d, needs in zip(d_outputs, needs_weight, strict=True) if needs)

        d_x = x_shard.new_empty(0)
        if needs_x and d_outputs:
            products = [(d, w.t()) for d, w in zip(d_outputs, weights, strict=True)]
            d_x = schedule.matmul_reduce_scatter(products, None, scatter_dim=gather_dim, meanwhile=compute_weight_grads)
        else:
            compute_weight_grads()
        if needs_x and d_gathered is not None:
            d_direct = schedule.reduce_scatter(d_gathered, scatter_dim=gather_dim)
            d_x = d_x.add_(d_direct) if d_outputs else d_direct
    return [d_x, *d_weights]


def _grads_fake(
    d_outputs: list[Tensor],
    d_gathered: Tensor | None,
    x_shard: Tensor,
    weights: list[Tensor],
    needs_weight: list[bool],
    needs_x: bool,
    group: str,
    gather_dim: int,
    gather_size: int,
) -> list[Tensor]:
    d_x = x_shard.new_empty(x_shard.shape if needs_x else 0)
    return [d_x, *(w.new_empty(w.shape) for w, needs in zip(weights, needs_weight, strict=True) if needs)]


def _gathered_shape(x_shard: Tensor, gather_dim: int, gather_size: int) -> list[int]:
    shape = list(x_shard.shape)
    shape[gather_dim] = gather_size
    return shape


ALL_GATHER_MATMUL_BACKWARD = CustomOp(
    "all_gather_matmul_backward(Tensor[] d_outputs, Tensor? d_gathered, Tensor x_shard, Tensor[] weights, "
    "bool[] needs_weight, bool needs_x, str group, int gather_dim, SymInt gather_size) -> Tensor[]",
    _compute_grads,
    _grads_fake,
    schedule=_grads_schedule,
)

ALL_GATHER_MATMUL = CustomOp(
    "all_gather_matmul(Tensor x_shard, Tensor[] weights, Tensor[] biases, bool[] has_bias, str group, "
    "int gather_dim, SymInt gather_size, bool return_gathered) -> Tensor[]",
    _forward,
    _fake,
    _setup_context,
    _backward,
    _schedule,
)
