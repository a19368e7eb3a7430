"""Column-parallel linear without sequence parallelism: forward is local, backward sums over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, overload

from torch import Tensor

from fused_tp.backends.gemm import linear, weight_grad
from fused_tp.backends.schedule import Schedule
from fused_tp.core.group import GroupLike, group_identity
from fused_tp.ops.arguments import bias_grads, checked_linears, fake_grads, spread_biases, to_lists
from fused_tp.ops.op import AnyGroup, Op, SavedForBackward, ScheduleKey


@overload
def column_parallel_matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group: GroupLike, float8: str | None = None
) -> Tensor: ...


@overload
def column_parallel_matmul(
    x: Tensor,
    weight: Sequence[Tensor],
    bias: Sequence[Tensor | None] | None = None,
    *,
    group: GroupLike,
    float8: str | None = None,
) -> list[Tensor]: ...


def column_parallel_matmul(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor | None] | None = None,
    *,
    group: GroupLike,
    float8: str | None = None,
) -> Tensor | list[Tensor]:
    """y = x @ weight^T + bias for x replicated over ranks; backward overlaps the all-reduce of dx with dW.

    Several weights that read the same input (q, k, v; gate, up) share one all-reduce in backward.

    =======  ==========================================================================
    forward  y [..., N] = x [..., K] @ weight^T + bias; local
    dgrad    dx [..., K] = all_reduce(dy @ weight): a `matmul_all_reduce`
    wgrad    dW [N, K] = dy^T @ x; local, overlapped with dgrad
    dbias    db [N] = sum of dy over tokens; local
    =======  ==========================================================================

    Args:
        x: [..., K], the same on all ranks; float16, bfloat16, float32 or float64.
        weight: [N, K] as in nn.Linear (this rank's rows of the full weight), or a list of such weights.
        bias: [N] or None; for a list of weights, a list with a bias or None for each weight, or None.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        float8: multiply in float8 by this recipe of torchao: "tensorwise", "rowwise" or "rowwise_with_gw_hp"; see
            `fused_tp.backends.float8`. The terms of dx leave in x's dtype.

    Returns:
        y [..., N]; for a list of weights, a list with a y for each.

    Raises:
        TypeError, ValueError: an argument is invalid; raised before anything is sent.
        CollectiveTimeoutError, PeerLostError, RankMismatchError: in backward, a peer failed or made another call.

    Example:
        gate, up = column_parallel_matmul(x, [w_gate, w_up], group=mesh["tp"])

    Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models", 2019.
    """
    weights, biases, has_bias = to_lists(weight, bias)
    outputs: list[Tensor]
    if float8 is not None:
        from fused_tp.ops.float8_column_matmul import FLOAT8_COLUMN_MATMUL  # needed only here

        outputs = FLOAT8_COLUMN_MATMUL(x, weights, biases, has_bias, None, None, float8, group)
    else:
        outputs = COLUMN_PARALLEL_MATMUL(x, weights, biases, has_bias, group)
    return outputs if isinstance(weight, (list, tuple)) else outputs[0]


class _Args(NamedTuple):
    x: Tensor
    weights: list[Tensor]
    biases: list[Tensor]
    has_bias: list[bool]
    group: AnyGroup


class _BackwardArgs(NamedTuple):
    d_outputs: list[Tensor]
    x: Tensor
    weights: list[Tensor]
    needs_weight: list[bool]
    needs_x: bool
    group: AnyGroup


def _prepare(a: _Args) -> _Args:
    x, weights, biases = checked_linears("x", *a[:4])
    group_identity(a.group)  # raises if a.group is not a group
    return _Args(x, weights, biases, a.has_bias, a.group)


def _backward(s: SavedForBackward[_Args], grads: list[Tensor | None]) -> dict[str, Any]:
    a, needs = s.args, s.needs
    used_indices = [i for i, d in enumerate(grads) if d is not None]
    needs_x = needs.x and bool(used_indices)
    d_x, *d_weights = COLUMN_PARALLEL_MATMUL_BACKWARD(
        [grads[i] for i in used_indices],
        a.x,
        [a.weights[i] for i in used_indices],
        [needs.weights[i] for i in used_indices],
        needs_x,
        a.group,
    )
    remaining_d_weights = iter(d_weights)
    return {
        "x": d_x if needs_x else None,
        "weights": [
            next(remaining_d_weights) if i in used_indices and needed else None
            for i, needed in enumerate(needs.weights)
        ],
        "biases": bias_grads(grads, a.has_bias, needs.biases),
    }


# -- backward: dx is a matmul_all_reduce, and dW is computed while it runs --------------------------------------------


def _compute_grads(schedule: Schedule | None, g: _BackwardArgs) -> list[Tensor]:
    """Return [dx, *dW]: dx = all_reduce(dY @ W), empty if not needed; dW = dY^T @ x for the weights that need it."""
    d_weights: list[Tensor] = []

    def compute_weight_grads() -> None:
        d_weights.extend(weight_grad(d, g.x) for d, needs in zip(g.d_outputs, g.needs_weight, strict=True) if needs)

    if schedule is None:
        compute_weight_grads()
        return [g.x.new_empty(0), *d_weights]
    products = [(d, w.t()) for d, w in zip(g.d_outputs, g.weights, strict=True)]
    return [schedule.matmul_all_reduce(products, None, overlapped_work=compute_weight_grads), *d_weights]


def _sum_key(a: _Args | _BackwardArgs) -> ScheduleKey:
    return ScheduleKey.from_shard("matmul_all_reduce", a.x, a.x.shape, None, a.x.shape[-1])


def _grads_fake(g: _BackwardArgs) -> list[Tensor]:
    return fake_grads(g.x, g.needs_x, g.weights, g.needs_weight)


def _column_parallel_matmul_backward_key(g: _BackwardArgs) -> ScheduleKey | None:
    return _sum_key(g) if g.needs_x else None


COLUMN_PARALLEL_MATMUL_BACKWARD: Op[_BackwardArgs] = Op(
    "column_parallel_matmul_backward",
    _BackwardArgs,
    "Tensor[]",
    _compute_grads,
    _grads_fake,
    key=_column_parallel_matmul_backward_key,
)


def _column_parallel_matmul_forward(_: None, a: _Args) -> list[Tensor]:
    return [linear(a.x, w, b) for w, b in zip(a.weights, spread_biases(a.biases, a.has_bias), strict=True)]


def _column_parallel_matmul_fake(a: _Args) -> list[Tensor]:
    return [a.x.new_empty((*a.x.shape[:-1], w.shape[0])) for w in a.weights]


def _column_parallel_matmul_example(size: int, x: Tensor, weight: Tensor) -> _Args:
    return _Args(x, [weight], [], [False], None)


COLUMN_PARALLEL_MATMUL: Op[_Args] = Op(
    "column_parallel_matmul",
    _Args,
    "Tensor[]",
    _column_parallel_matmul_forward,
    _column_parallel_matmul_fake,
    backward_key=_sum_key,
    make_example_args=_column_parallel_matmul_example,
    prepare=_prepare,
    saves=("x", "weights"),
    backward=_backward,
    materialize_grads=False,  # no matmul with zeros for an unused output
)
