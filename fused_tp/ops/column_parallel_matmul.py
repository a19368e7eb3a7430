"""The column-parallel linear without sequence parallelism: nothing moves forward, a sum over ranks backward."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, overload

import torch
from torch import Tensor

from fused_tp.ops.arguments import as_lists, check_linear, check_tensor
from fused_tp.ops.context import autocast_dtype, cast, deliver, main_grads
from fused_tp.ops.custom_op import CustomOp
from fused_tp.ops.gradients import bias_grad, weight_grad
from fused_tp.runtime.group import GroupLike, group_by_name, group_identity
from fused_tp.schedules.base import Schedule
from fused_tp.schedules.registry import select_schedule


@overload
def column_parallel_matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group: GroupLike) -> Tensor: ...


@overload
def column_parallel_matmul(
    x: Tensor, weight: Sequence[Tensor], bias: Sequence[Tensor | None] | None = None, *, group: GroupLike
) -> list[Tensor]: ...


def column_parallel_matmul(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor | None] | None = None,
    *,
    group: GroupLike,
) -> Tensor | list[Tensor]:
    """y = x @ weight^T + bias for x that all ranks hold; backward sums dx over ranks and computes dW meanwhile.

    Several weights that read the same input (q, k, v; gate, up) share one sum in backward.

    Args:
        x: [..., K], the same on all ranks; float16, bfloat16, float32 or float64.
        weight: [N, K] as in nn.Linear (this rank's rows of the whole weight), or a list of such.
        bias: [N] or None; for a list of weights a list of these, or None.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world.

    Returns:
        y [..., N], or a list of them for a list of weights.

    Raises:
        TypeError, ValueError: an argument does not fit; raised before anything is sent.
        CollectiveTimeoutError, PeerLostError, RankMismatchError: the peers did not come along (in backward).

    Example:
        gate, up = column_parallel_matmul(x, [w_gate, w_up], group=mesh["tp"])

    Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models", 2019.
    """
    weights, biases = as_lists(weight, bias)
    dtype = autocast_dtype(x)
    if dtype is not None:
        x, *cast_all = cast(dtype, x, *weights, *biases)
        weights, biases = cast_all[: len(weights)], cast_all[len(weights) :]
    check_tensor("x", x)
    for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
        check_linear("x", x, w, b, f"[{i}]" if len(weights) > 1 else "")
    given = [b for b in biases if b is not None]
    has_bias = [b is not None for b in biases]
    outputs: list[Tensor] = COLUMN_PARALLEL_MATMUL(x, weights, given, has_bias, group_identity(group)[0])
    return outputs if isinstance(weight, (list, tuple)) else outputs[0]


def _forward(x: Tensor, weights: list[Tensor], biases: list[Tensor], has_bias: list[bool], group: str) -> list[Tensor]:
    given = iter(biases)
    return [
        torch.nn.functional.linear(x, w, next(given) if has else None) for w, has in zip(weights, has_bias, strict=True)
    ]


def _fake(x: Tensor, weights: list[Tensor], biases: list[Tensor], has_bias: list[bool], group: str) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-1], w.shape[0])) for w in weights]


def _setup_context(ctx: Any, inputs: Any, output: list[Tensor]) -> None:
    x, weights, biases, has_bias, group = inputs
    ctx.set_materialize_grads(False)  # an output nobody used costs nothing
    ctx.save_for_backward(x, *weights)
    ctx.needs_x = x.requires_grad
    ctx.needs_weight = [w.requires_grad for w in weights]
    ctx.needs_bias = [b.requires_grad for b in biases]
    ctx.has_bias = has_bias
    ctx.group = group
    ctx.main_grads = main_grads(weights)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    used = [i for i, d in enumerate(grads) if d is not None]
    needs_x = ctx.needs_x and bool(used)
    which = [i for i in used if ctx.needs_weight[i]]
    d_x, *d_weights = COLUMN_PARALLEL_MATMUL_BACKWARD(
        [grads[i] for i in used],
        x,
        [weights[i] for i in used],
        [ctx.needs_weight[i] for i in used],
        needs_x,
        ctx.group,
    )
    weight_grads: list[Tensor | None] = [None] * len(weights)
    for i, d in zip(which, d_weights, strict=True):
        weight_grads[i] = deliver(d, ctx.main_grads[i])
    bias_owners = [i for i, has in enumerate(ctx.has_bias) if has]
    bias_grads = [
        bias_grad(d) if needs and (d := grads[i]) is not None else None
        for i, needs in zip(bias_owners, ctx.needs_bias, strict=True)
    ]
    return d_x if needs_x else None, weight_grads, bias_grads, None, None


def _grads_schedule(
    d_outputs: list[Tensor], x: Tensor, weights: list[Tensor], needs_weight: list[bool], needs_x: bool, group: str
) -> Schedule | None:
    if not needs_x:
        return None
    rows = prod(x.shape[:-1])
    return select_schedule("matmul_all_reduce", group_by_name(group), x.dtype, x.device, rows, None, x.shape[-1])


def _compute_grads(
    d_outputs: list[Tensor], x: Tensor, weights: list[Tensor], needs_weight: list[bool], needs_x: bool, group: str
) -> list[Tensor]:
    """[dx (empty where not needed), *dW of the weights that need one]."""
    d_weights: list[Tensor] = []

    def compute_weight_grads() -> None:
        d_weights.extend(weight_grad(d, x) for d, needs in zip(d_outputs, needs_weight, strict=True) if needs)

    schedule = _grads_schedule(d_outputs, x, weights, needs_weight, needs_x, group)
    if schedule is None:
        compute_weight_grads()
        return [x.new_empty(0), *d_weights]
    products = [(d, w.t()) for d, w in zip(d_outputs, weights, strict=True)]
    d_x = schedule.matmul_all_reduce(products, None, meanwhile=compute_weight_grads)
    return [d_x, *d_weights]


def _grads_fake(
    d_outputs: list[Tensor], x: Tensor, weights: list[Tensor], needs_weight: list[bool], needs_x: bool, group: str
) -> list[Tensor]:
    d_x = x.new_empty(x.shape if needs_x else 0)
    return [d_x, *(w.new_empty(w.shape) for w, needs in zip(weights, needs_weight, strict=True) if needs)]


COLUMN_PARALLEL_MATMUL_BACKWARD = CustomOp(
    "column_parallel_matmul_backward(Tensor[] d_outputs, Tensor x, Tensor[] weights, bool[] needs_weight, "
    "bool needs_x, str group) -> Tensor[]",
    _compute_grads,
    _grads_fake,
    schedule=_grads_schedule,
)

COLUMN_PARALLEL_MATMUL = CustomOp(
    "column_parallel_matmul(Tensor x, Tensor[] weights, Tensor[] biases, bool[] has_bias, str group) -> Tensor[]",
    _forward,
    _fake,
    _setup_context,
    _backward,
)
