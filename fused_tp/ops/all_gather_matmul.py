"""Overlapped all-gather and matmul: the column-parallel linear under sequence parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

from torch import Tensor

from fused_tp.backends.gemm import weight_grad
from fused_tp.backends.schedule import GatherMatmul, Schedule
from fused_tp.core.group import GroupLike, group_identity
from fused_tp.core.partition import SymInt
from fused_tp.ops.arguments import (
    bias_grads,
    check_bool,
    check_float8_recipe,
    check_int,
    checked_linears,
    fake_grads,
    normalize_token_dim,
    resized_shape,
    spread_biases,
    to_lists,
    total_size,
)
from fused_tp.ops.op import AnyGroup, Op, SavedForBackward, ScheduleKey


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
    float8: str | None = None,
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
    float8: None = None,
) -> tuple[Tensor, Tensor]: ...


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
    float8: str | None = None,
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
    float8: None = None,
) -> tuple[list[Tensor], Tensor]: ...


def all_gather_matmul(
    x_shard: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor | None] | None = None,
    *,
    group: GroupLike,
    gather_dim: int = 0,
    gather_size: int | None = None,
    return_gathered: bool = False,
    float8: str | None = None,
) -> Any:
    """y = all_gather(x_shard, gather_dim) @ weight^T + bias, with the gather and the matmul overlapped.

    Several weights that read the same input (q, k, v; gate, up) share one gather. Only the shard is saved for backward.

    =======  ==========================================================================
    forward  y [..., M, ..., N] = all_gather(x_shard [..., m, ..., K]) @ weight^T + bias
    dgrad    dx_shard [..., m, ..., K] = reduce_scatter(dy @ weight): a `matmul_reduce_scatter`
    wgrad    dW [N, K] = dy^T @ all_gather(x_shard), gathered again and overlapped with dgrad
    dbias    db [N] = sum of dy over tokens; local
    =======  ==========================================================================

    Args:
        x_shard: [..., m, ..., K], this rank's tokens along `gather_dim`; float16, bfloat16, float32 or float64.
        weight: [N, K] as in nn.Linear (this rank's rows of the full weight), or a list of such weights.
        bias: [N] or None; for a list of weights, a list with a bias or None for each weight, or None.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        gather_dim: any dim but the last; may be negative.
        gather_size: length of `gather_dim` over all ranks, if the shards (as by torch.chunk) are not all equal.
        return_gathered: also return the gathered x, which is differentiable too.
        float8: multiply in float8 by this recipe of torchao: "tensorwise", "rowwise" or "rowwise_with_gw_hp"; see
            `fused_tp.backends.float8`. x is gathered in 8 bits per element, so it cannot be
            returned: not with `return_gathered`.

    Returns:
        y [..., M, ..., N]; for a list of weights, a list with a y for each. With `return_gathered`, (y, gathered x).

    Raises:
        TypeError, ValueError: an argument is invalid; raised before anything is sent.
        CollectiveTimeoutError, PeerLostError, RankMismatchError: a peer timed out, was lost, or made another call.

    Example:
        q, k, v = all_gather_matmul(x_shard, [w_q, w_k, w_v], group=mesh["tp"], gather_dim=1)

    Source: the decomposition of Wang et al., "Overlap Communication with Dependent Computation via Decomposition in
    Large Deep Learning Models", ASPLOS 2023; sequence parallelism of Korthikanti et al., 2022.
    """
    weights, biases, has_bias = to_lists(weight, bias)
    if float8 is not None:
        from fused_tp.ops.float8_column_matmul import FLOAT8_COLUMN_MATMUL  # needed only here

        check_float8_recipe(float8)
        check_bool(return_gathered=return_gathered)
        if return_gathered:
            raise ValueError(
                f"float8={float8!r} gathers x in float8, so return_gathered cannot return x. Omit one of the two."
            )
        check_int("gather_dim", gather_dim)  # None would not gather
        outputs = FLOAT8_COLUMN_MATMUL(x_shard, weights, biases, has_bias, gather_dim, gather_size, float8, group)
        return outputs if isinstance(weight, (list, tuple)) else outputs[0]
    outputs = ALL_GATHER_MATMUL(x_shard, weights, biases, has_bias, gather_dim, gather_size, return_gathered, group)
    result = outputs[: len(weights)] if isinstance(weight, (list, tuple)) else outputs[0]
    return (result, outputs[-1]) if return_gathered else result


class _Args(NamedTuple):
    x_shard: Tensor
    weights: list[Tensor]
    biases: list[Tensor]
    has_bias: list[bool]
    gather_dim: int
    gather_size: SymInt
    return_gathered: bool
    group: AnyGroup


class _BackwardArgs(NamedTuple):
    d_outputs: list[Tensor]
    d_gathered: Tensor | None
    x_shard: Tensor
    weights: list[Tensor]
    needs_weight: list[bool]
    needs_x: bool
    gather_dim: int
    gather_size: SymInt
    group: AnyGroup


def _prepare(a: _Args) -> _Args:
    x_shard, weights, biases = checked_linears("x_shard", *a[:4], min_dims=2)
    check_bool(return_gathered=a.return_gathered)
    dim = normalize_token_dim("gather_dim", a.gather_dim, "x_shard", x_shard)
    _, size, rank = group_identity(a.group)
    total = total_size("gather_size", a.gather_size, x_shard.shape[dim], size, rank, f"x_shard along dim {dim}")
    return _Args(x_shard, weights, biases, a.has_bias, dim, total, a.return_gathered, a.group)


def _forward(schedule: Schedule, a: _Args) -> list[Tensor]:
    biases = spread_biases(a.biases, a.has_bias)
    call = GatherMatmul(a.x_shard, a.weights, biases, a.gather_dim, a.gather_size, a.return_gathered)
    outputs, gathered_x = schedule.all_gather_matmul(call)
    return outputs if gathered_x is None else [*outputs, gathered_x]


def _fake(a: _Args) -> list[Tensor]:
    shape = _gathered_shape(a)
    outputs = [a.x_shard.new_empty((*shape[:-1], w.shape[0])) for w in a.weights]
    return [*outputs, a.x_shard.new_empty(shape)] if a.return_gathered else outputs


def _backward(s: SavedForBackward[_Args], grads: list[Tensor | None]) -> dict[str, Any]:
    a, needs = s.args, s.needs
    used_indices = [i for i, d in enumerate(grads[: len(a.weights)]) if d is not None]
    d_gathered = grads[-1] if a.return_gathered else None
    needs_x = needs.x_shard and (bool(used_indices) or d_gathered is not None)
    result: dict[str, Any] = {"biases": bias_grads(grads, a.has_bias, needs.biases)}
    needs_weight = [needs.weights[i] for i in used_indices]
    if needs_x or any(needs_weight):
        d_x, *d_weights = ALL_GATHER_MATMUL_BACKWARD(
            [grads[i] for i in used_indices],
            d_gathered if needs_x else None,
            a.x_shard,
            [a.weights[i] for i in used_indices],
            needs_weight,
            needs_x,
            a.gather_dim,
            a.gather_size,
            a.group,
        )
        result["x_shard"] = d_x if needs_x else None
        remaining_d_weights = iter(d_weights)
        result["weights"] = [
            next(remaining_d_weights) if i in used_indices and needed else None
            for i, needed in enumerate(needs.weights)
        ]
    return result


# -- backward: dx_shard is a matmul_reduce_scatter; x is gathered again for dW while it runs ---------------------------


def _compute_grads(schedule: Schedule, g: _BackwardArgs) -> list[Tensor]:
    """Return [dx_shard, *dW]: dx_shard is empty if it is not needed, and dW has only the weights that need a gradient.

    dx_shard = reduce_scatter(dY @ W) + reduce_scatter(gradient of the returned gathered x); dW = dY^T @ x.
    """
    d_weights: list[Tensor] = []
    with schedule.abort_scope("all_gather_matmul_backward"):
        pending_x = None
        if any(g.needs_weight):
            pending_x = schedule.all_gather(g.x_shard, gather_dim=g.gather_dim, gather_size=g.gather_size)

        def compute_weight_grads() -> None:
            if pending_x is not None:
                x = pending_x.wait()
                pairs = zip(g.d_outputs, g.needs_weight, strict=True)
                d_weights.extend(weight_grad(d, x) for d, needs in pairs if needs)

        products = [(d, w.t()) for d, w in zip(g.d_outputs, g.weights, strict=True)]
        if not (g.needs_x and products):
            compute_weight_grads()
            d_x = None if g.needs_x else g.x_shard.new_empty(0)
        else:
            d_x = schedule.matmul_reduce_scatter(
                products, None, scatter_dim=g.gather_dim, overlapped_work=compute_weight_grads
            )
        if g.d_gathered is not None:
            d_returned_x = schedule.reduce_scatter(g.d_gathered, scatter_dim=g.gather_dim)
            d_x = d_returned_x if d_x is None else d_x.add_(d_returned_x)
    assert d_x is not None, "backward runs only if some result has a gradient"
    return [d_x, *d_weights]


def _grads_key(g: _Args | _BackwardArgs) -> ScheduleKey:
    return ScheduleKey.from_shard("matmul_reduce_scatter", g.x_shard, _gathered_shape(g), None, g.x_shard.shape[-1])


def _grads_fake(g: _BackwardArgs) -> list[Tensor]:
    return fake_grads(g.x_shard, g.needs_x, g.weights, g.needs_weight)


def _gathered_shape(a: _Args | _BackwardArgs) -> list[int]:
    return resized_shape(a.x_shard, a.gather_dim, a.gather_size)


ALL_GATHER_MATMUL_BACKWARD: Op[_BackwardArgs] = Op(
    "all_gather_matmul_backward", _BackwardArgs, "Tensor[]", _compute_grads, _grads_fake, key=_grads_key
)


def _all_gather_matmul_key(a: _Args) -> ScheduleKey | None:
    return ScheduleKey.from_shard("all_gather_matmul", a.x_shard, _gathered_shape(a), a.x_shard.shape[-1], None)


def _all_gather_matmul_example(size: int, x_shard: Tensor, weight: Tensor) -> _Args:
    return _Args(x_shard, [weight], [], [False], 0, x_shard.shape[0] * size, False, None)


ALL_GATHER_MATMUL: Op[_Args] = Op(
    "all_gather_matmul",
    _Args,
    "Tensor[]",
    _forward,
    _fake,
    key=_all_gather_matmul_key,
    backward_key=_grads_key,
    make_example_args=_all_gather_matmul_example,
    prepare=_prepare,
    saves=("x_shard", "weights"),
    backward=_backward,
    materialize_grads=False,  # no matmul with zeros for an unused output
)
