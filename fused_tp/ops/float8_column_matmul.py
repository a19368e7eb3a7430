"""Column-parallel linear in float8: `all_gather_matmul` and `column_parallel_matmul` with `float8=`.

x is quantized on the rank that has it, and its bytes and scales are gathered while the weights are quantized.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_tp.backends.float8 import RECIPES, Float8, multiply, multiply_transposed, pack, packed_width, unpack
from fused_tp.backends.gemm import as_rows, weight_grad
from fused_tp.backends.schedule import Schedule
from fused_tp.core.group import group_by_name, group_identity
from fused_tp.core.partition import SymInt, shard_sizes
from fused_tp.core.pending import Pending
from fused_tp.ops.arguments import (
    bias_grads,
    check_float8,
    checked_linears,
    fake_grads,
    normalize_token_dim,
    resized_shape,
    spread_biases,
    total_size,
)
from fused_tp.ops.op import AnyGroup, Op, SavedForBackward, ScheduleKey


class _Args(NamedTuple):
    x: Tensor
    weights: list[Tensor]
    biases: list[Tensor]
    has_bias: list[bool]
    gather_dim: int | None  # None: x is replicated
    gather_size: SymInt | None
    float8: str
    group: AnyGroup


class _BackwardArgs(NamedTuple):
    d_outputs: list[Tensor]
    x: Tensor
    weights: list[Tensor]
    needs_weight: list[bool]
    needs_x: bool
    gather_dim: int | None
    gather_size: SymInt | None
    float8: str
    group: AnyGroup


def _prepare(a: _Args) -> _Args:
    x_name = "x" if a.gather_dim is None else "x_shard"
    x, weights, biases = checked_linears(x_name, *a[:4], min_dims=1 if a.gather_dim is None else 2)
    check_float8(a.float8, x_name, x)
    _, size, rank = group_identity(a.group)
    if a.gather_dim is None:
        return _Args(x, weights, biases, a.has_bias, None, None, a.float8, a.group)
    dim = normalize_token_dim("gather_dim", a.gather_dim, x_name, x)
    total = total_size("gather_size", a.gather_size, x.shape[dim], size, rank, f"x_shard along dim {dim}")
    return _Args(x, weights, biases, a.has_bias, dim, total, a.float8, a.group)


def _full_shape(a: _Args | _BackwardArgs) -> Sequence[int]:
    return (
        a.x.shape if a.gather_dim is None or a.gather_size is None else resized_shape(a.x, a.gather_dim, a.gather_size)
    )


def _gather_packed(schedule: Schedule, a: _Args | _BackwardArgs) -> Pending[Tensor]:
    """Start gathering x in float8."""
    assert a.gather_dim is not None, "only a sharded x is gathered"
    quantized_x = RECIPES[a.float8].quantize_input(as_rows(a.x))
    packed = pack(quantized_x, a.x.shape[:-1], a.x.dtype)
    return schedule.all_gather(packed, gather_dim=a.gather_dim, gather_size=a.gather_size)


def _forward(schedule: Schedule | None, a: _Args) -> list[Tensor]:
    recipe = RECIPES[a.float8]
    if schedule is None:
        x = recipe.quantize_input(as_rows(a.x))
        weights = [recipe.quantize_input(w) for w in a.weights]
    else:
        with schedule.abort_scope("all_gather_matmul"):
            pending_x = _gather_packed(schedule, a)
            weights = [recipe.quantize_input(w) for w in a.weights]
            x = unpack(pending_x.wait(), a.x.shape[-1], torch.float8_e4m3fn)
    lead_shape = _full_shape(a)[:-1]
    outputs = []
    for weight, bias in zip(weights, spread_biases(a.biases, a.has_bias), strict=True):
        y = multiply(x, weight, a.x.dtype, is_forward=True).view(*lead_shape, len(weight.values))
        outputs.append(y if bias is None else y.add_(bias))
    return outputs


def _fake(a: _Args) -> list[Tensor]:
    return [a.x.new_empty((*_full_shape(a)[:-1], w.shape[0])) for w in a.weights]


def _backward(s: SavedForBackward[_Args], grads: list[Tensor | None]) -> dict[str, Any]:
    a, needs = s.args, s.needs
    used_indices = [i for i, d in enumerate(grads) if d is not None]
    needs_x, needs_weight = needs.x and bool(used_indices), [needs.weights[i] for i in used_indices]
    result: dict[str, Any] = {"biases": bias_grads(grads, a.has_bias, needs.biases)}
    if needs_x or any(needs_weight):
        d_x, *d_weights = FLOAT8_COLUMN_MATMUL_BACKWARD(
            [grads[i] for i in used_indices],
            a.x,
            [a.weights[i] for i in used_indices],
            needs_weight,
            needs_x,
            a.gather_dim,
            a.gather_size,
            a.float8,
            a.group,
        )
        remaining_d_weights = iter(d_weights)
        result["x"] = d_x if needs_x else None
        result["weights"] = [
            next(remaining_d_weights) if i in used_indices and needed else None
            for i, needed in enumerate(needs.weights)
        ]
    return result


# -- backward: partial dx leaves in x's dtype; x is gathered again for dW while dx is computed -------------------------


def _compute_grads(schedule: Schedule | None, g: _BackwardArgs) -> list[Tensor]:
    """Return [dx, *dW]: dx is empty if it is not needed, and dW has only the weights that need a gradient."""
    recipe, lead_shape = RECIPES[g.float8], _full_shape(g)[:-1]
    d_rows = [as_rows(d) for d in g.d_outputs]
    quantized_d: list[Float8] = []
    if g.needs_x or recipe.gathers_float8_for_weight_grad:
        quantized_d = [recipe.quantize_grad(d) for d in d_rows]

    def sum_partial_d_x() -> Tensor:
        # Summed in float32: the terms of several weights are rounded once, as in one matmul.
        dtype = g.x.dtype if len(g.weights) == 1 else torch.float32
        d_x = None
        for d, weight in zip(quantized_d, g.weights, strict=True):
            term = multiply(d, recipe.quantize_weight_for_grad(weight), dtype)
            d_x = term if d_x is None else d_x.add_(term)
        assert d_x is not None, "backward runs only if some output has a gradient"
        return d_x.to(g.x.dtype).view(*lead_shape, g.x.shape[-1])

    def weight_grads(pending_x: Pending[Tensor] | None) -> list[Tensor]:
        needed = [i for i, needs in enumerate(g.needs_weight) if needs]
        if not recipe.gathers_float8_for_weight_grad:
            x = as_rows(g.x if pending_x is None else pending_x.wait())
            return [float8_weight_grad(d_rows[i], x, g.float8) for i in needed]
        if pending_x is None or g.gather_dim is None:
            quantized_x = recipe.quantize_input(as_rows(g.x))
            shards = one_shard(g.x)
        else:
            quantized_x = unpack(pending_x.wait(), g.x.shape[-1], torch.float8_e4m3fn)
            sizes = shard_sizes(lead_shape[g.gather_dim], group_by_name(g.group).size)
            shards = lead_shape, g.gather_dim, sizes
        return [multiply_transposed(quantized_d[i], quantized_x, *shards, g.x.dtype) for i in needed]

    if schedule is None:
        return [g.x.new_empty(0), *weight_grads(None)]
    with schedule.abort_scope("float8_column_matmul_backward"):
        pending_x = None
        if g.gather_dim is not None and any(g.needs_weight):
            if recipe.gathers_float8_for_weight_grad:
                pending_x = _gather_packed(schedule, g)
            else:
                pending_x = schedule.all_gather(g.x, gather_dim=g.gather_dim, gather_size=g.gather_size)
        d_x = g.x.new_empty(0)
        if g.needs_x:
            partial = sum_partial_d_x()
            if g.gather_dim is None:
                d_x = schedule.all_reduce(partial)
            else:
                d_x = schedule.reduce_scatter(partial, scatter_dim=g.gather_dim)
        return [d_x, *weight_grads(pending_x)]


def one_shard(x: Tensor) -> tuple[Sequence[int], int, list[int]]:
    """Return the sharding of the rows of an `x` that is not sharded, for `multiply_transposed`."""
    num_rows = prod(x.shape[:-1])
    return [num_rows], 0, [num_rows]


def float8_weight_grad(d_output: Tensor, x: Tensor, float8: str) -> Tensor:
    """Return dW [N, K] from rows that are not quantized, by a recipe with row scales."""
    recipe = RECIPES[float8]
    if not recipe.quantizes_weight_grad:
        return weight_grad(d_output, x)
    return multiply(recipe.quantize_grad(d_output.t()), recipe.quantize_input(x.t()), x.dtype)


def _sum_key(a: _Args | _BackwardArgs) -> ScheduleKey:
    op = "all_reduce" if a.gather_dim is None else "reduce_scatter"
    return ScheduleKey.from_shard(op, a.x, _full_shape(a), None, a.x.shape[-1])


def _grads_key(g: _BackwardArgs) -> ScheduleKey | None:
    return _sum_key(g) if g.needs_x or g.gather_dim is not None else None


def _grads_fake(g: _BackwardArgs) -> list[Tensor]:
    return fake_grads(g.x, g.needs_x, g.weights, g.needs_weight)


FLOAT8_COLUMN_MATMUL_BACKWARD: Op[_BackwardArgs] = Op(
    "float8_column_matmul_backward", _BackwardArgs, "Tensor[]", _compute_grads, _grads_fake, key=_grads_key
)


def _key(a: _Args) -> ScheduleKey | None:
    """Return the key of the gather of x in float8."""
    if a.gather_dim is None:
        return None
    num_columns = packed_width(a.x.shape[-1], a.x.dtype)
    return ScheduleKey.from_shard("all_gather", a.x, _full_shape(a), None, num_columns)


def example_float8_column(gather_dim: int | None, size: int, float8: str, x: Tensor, weight: Tensor) -> _Args:
    """Return arguments for `explain`, from one rank's tensors."""
    gather_size = None if gather_dim is None else x.shape[gather_dim] * size
    return _Args(x, [weight], [], [False], gather_dim, gather_size, float8, None)


FLOAT8_COLUMN_MATMUL: Op[_Args] = Op(
    "float8_column_matmul",
    _Args,
    "Tensor[]",
    _forward,
    _fake,
    key=_key,
    backward_key=_sum_key,
    prepare=_prepare,
    saves=("x", "weights"),
    backward=_backward,
    materialize_grads=False,  # no matmul with zeros for an unused output
)
