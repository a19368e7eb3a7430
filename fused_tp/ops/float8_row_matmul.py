"""Row-parallel linear in float8: `matmul_reduce_scatter` and `matmul_all_reduce` with `float8=`.

Terms of the sum over ranks leave in x's dtype. In backward, dy is gathered in float8, unless wgrad needs all its bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fused_tp.backends.float8 import RECIPES, multiply, multiply_transposed, pack, packed_width, unpack
from fused_tp.backends.gemm import as_rows, bias_grad
from fused_tp.backends.schedule import Schedule
from fused_tp.core.group import group_by_name
from fused_tp.core.partition import SymInt, shard_sizes
from fused_tp.ops.arguments import check_float8, checked_linear, normalize_token_dim
from fused_tp.ops.float8_column_matmul import float8_weight_grad, one_shard
from fused_tp.ops.op import AnyGroup, Op, SavedForBackward, ScheduleKey


class _Args(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    scatter_dim: int | None  # None: every rank gets the sum
    float8: str
    group: AnyGroup


class _BackwardArgs(NamedTuple):
    d_shard: Tensor
    x: Tensor
    weight: Tensor
    needs_x: bool
    needs_d_output: bool
    needs_bias: bool
    scatter_dim: int | None
    float8: str
    group: AnyGroup


class _WeightGradArgs(NamedTuple):
    d_output: Tensor
    is_packed: bool
    x: Tensor
    num_columns: SymInt
    scatter_dim: int | None
    float8: str
    group: AnyGroup


def _prepare(a: _Args) -> _Args:
    x, weight, bias = checked_linear("x", *a[:3], min_dims=1 if a.scatter_dim is None else 2)
    check_float8(a.float8, "x", x)
    dim = None if a.scatter_dim is None else normalize_token_dim("scatter_dim", a.scatter_dim, "x", x)
    return _Args(x, weight, bias, dim, a.float8, a.group)


def _forward(schedule: Schedule, a: _Args) -> Tensor:
    recipe = RECIPES[a.float8]
    x, weight = recipe.quantize_input(as_rows(a.x)), recipe.quantize_input(a.weight)
    partial = multiply(x, weight, a.x.dtype, is_forward=True).view(*a.x.shape[:-1], len(weight.values))
    if a.scatter_dim is None:
        y = schedule.all_reduce(partial)
    else:
        y = schedule.reduce_scatter(partial, scatter_dim=a.scatter_dim)
    return y if a.bias is None else y.add_(a.bias)


def _fake(a: _Args) -> Tensor:
    shape = [*a.x.shape[:-1], a.weight.shape[0]]
    if a.scatter_dim is not None:
        group = group_by_name(a.group)
        shape[a.scatter_dim] = shard_sizes(shape[a.scatter_dim], group.size)[group.rank]
    return a.x.new_empty(shape)


def _backward(s: SavedForBackward[_Args], d_shard: Tensor) -> dict[str, Any]:
    a, needs, grads = s.args, s.needs, dict[str, Any]()
    keeps_d_output = a.scatter_dim is not None and s.all_needs.weight
    sums_bias = a.scatter_dim is not None and s.all_needs.bias
    if needs.x or (s.carry is None and (keeps_d_output or sums_bias)):
        results = iter(
            FLOAT8_ROW_MATMUL_BACKWARD(
                d_shard, a.x, a.weight, needs.x, keeps_d_output, sums_bias, a.scatter_dim, a.float8, a.group
            )
        )
        grads["x"] = next(results) if needs.x else None
        s.carry = list(results)  # [dy, gathered and perhaps packed, if needed; db if needed]
    if needs.weight:
        d_output = s.carry[0] if keeps_d_output else d_shard
        is_packed = keeps_d_output and _gathers_float8(a.float8, keeps_d_output)
        grads["weight"] = FLOAT8_WEIGHT_GRAD(
            d_output, is_packed, a.x, d_shard.shape[-1], a.scatter_dim, a.float8, a.group
        )
    if needs.bias:
        grads["bias"] = s.carry[-1] if sums_bias else bias_grad(d_shard)
    return grads


def _gathers_float8(float8: str, needs_d_output: bool) -> bool:
    """True if dy is gathered in float8: unless wgrad needs dy itself, from which dgrad then quantizes its input."""
    return not needs_d_output or RECIPES[float8].gathers_float8_for_weight_grad


# -- backward: dx is a local matmul of the gathered dy -----------------------------------------------------------------


def _gather_grads(schedule: Schedule | None, g: _BackwardArgs) -> list[Tensor]:
    """Return [dx, gathered dy, db], omitting those not needed."""
    recipe, results = RECIPES[g.float8], list[Tensor]()
    if schedule is None or g.scatter_dim is None:
        d_rows = recipe.quantize_grad(as_rows(g.d_shard))
        return [multiply(d_rows, recipe.quantize_weight_for_grad(g.weight), g.x.dtype).view(g.x.shape)]
    size, num_columns = g.x.shape[g.scatter_dim], g.d_shard.shape[-1]
    with schedule.abort_scope("float8_row_matmul_backward"):
        d_bias = None
        if g.needs_bias:
            # Summed over the ranks' shards before they are quantized.
            d_bias = schedule.all_reduce(bias_grad(g.d_shard))
        if g.needs_x or g.needs_d_output:
            sent = g.d_shard
            if is_packed := _gathers_float8(g.float8, g.needs_d_output):
                sent = pack(recipe.quantize_grad(as_rows(g.d_shard)), g.d_shard.shape[:-1], g.d_shard.dtype)
            pending = schedule.all_gather(sent, gather_dim=g.scatter_dim, gather_size=size)
            weight = recipe.quantize_weight_for_grad(g.weight) if g.needs_x else None
            gathered = pending.wait()
            if weight is not None:
                if is_packed:
                    d_output = unpack(gathered, num_columns, recipe.grad_dtype)
                else:
                    d_output = recipe.quantize_grad(as_rows(gathered))
                results.append(multiply(d_output, weight, g.x.dtype).view(g.x.shape))
            if g.needs_d_output:
                results.append(g.d_shard.clone() if gathered is g.d_shard else gathered)
        return results if d_bias is None else [*results, d_bias]


def _grads_key(g: _Args | _BackwardArgs) -> ScheduleKey | None:
    if g.scatter_dim is None:
        return None
    num_columns = g.weight.shape[0]
    needs_d_output = not isinstance(g, _BackwardArgs) or g.needs_d_output  # forward does not know: if weights train
    if _gathers_float8(g.float8, needs_d_output):
        num_columns = packed_width(num_columns, g.x.dtype)
    return ScheduleKey.from_shard("all_gather", g.x, g.x.shape, None, num_columns)


def _grads_fake(g: _BackwardArgs) -> list[Tensor]:
    num_columns = g.d_shard.shape[-1]
    results = [g.x.new_empty(g.x.shape)] if g.needs_x else []
    if g.needs_d_output:
        is_packed = _gathers_float8(g.float8, g.needs_d_output)
        width = packed_width(num_columns, g.d_shard.dtype) if is_packed else num_columns
        results.append(g.x.new_empty((*g.x.shape[:-1], width)))
    return [*results, g.x.new_empty(num_columns)] if g.needs_bias else results


FLOAT8_ROW_MATMUL_BACKWARD: Op[_BackwardArgs] = Op(
    "float8_row_matmul_backward", _BackwardArgs, "Tensor[]", _gather_grads, _grads_fake, key=_grads_key
)


def _weight_grad_forward(_: None, g: _WeightGradArgs) -> Tensor:
    recipe = RECIPES[g.float8]
    if not recipe.gathers_float8_for_weight_grad:
        return float8_weight_grad(as_rows(g.d_output), as_rows(g.x), g.float8)
    x = recipe.quantize_input(as_rows(g.x))
    if not g.is_packed or g.scatter_dim is None:
        return multiply_transposed(recipe.quantize_grad(as_rows(g.d_output)), x, *one_shard(g.x), g.x.dtype)
    d_output, lead_shape = unpack(g.d_output, g.num_columns, recipe.grad_dtype), g.x.shape[:-1]
    sizes = shard_sizes(lead_shape[g.scatter_dim], group_by_name(g.group).size)
    return multiply_transposed(d_output, x, lead_shape, g.scatter_dim, sizes, g.x.dtype)


def _weight_grad_fake(g: _WeightGradArgs) -> Tensor:
    return g.x.new_empty((g.num_columns, g.x.shape[-1]))


FLOAT8_WEIGHT_GRAD: Op[_WeightGradArgs] = Op(
    "float8_weight_grad", _WeightGradArgs, "Tensor", _weight_grad_forward, _weight_grad_fake
)


def _key(a: _Args) -> ScheduleKey | None:
    op = "all_reduce" if a.scatter_dim is None else "reduce_scatter"
    return ScheduleKey.from_shard(op, a.x, a.x.shape, None, a.weight.shape[0])


def example_float8_row(scatter_dim: int | None, size: int, float8: str, x: Tensor, weight: Tensor) -> _Args:
    """Return arguments for `explain`, from one rank's tensors."""
    return _Args(x, weight, None, scatter_dim, float8, None)


FLOAT8_ROW_MATMUL: Op[_Args] = Op(
    "float8_row_matmul",
    _Args,
    "Tensor",
    _forward,
    _fake,
    key=_key,
    backward_key=_grads_key,
    prepare=_prepare,
    saves=("x", "weight"),
    backward=_backward,
)
