"""What each op asks of dispatch in forward and backward, from the shapes that one rank passes: for `explain`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from fused_tp.attention.decode import exchanged_numbers
from fused_tp.ops.all_to_all import check_shared, moved_columns
from fused_tp.ops.arguments import any_dim
from fused_tp.ops.attention_arguments import check_heads
from fused_tp.ops.ring_attention import kv_moved
from fused_tp.schedules.registry import ALL_TO_ALL

Shape = Sequence[int]
# (op, m, k, n) as runtime.dispatch.choose takes them: None for a dim that is cut over the ranks.
Query = tuple[str, int, "int | None", "int | None"]
Both = tuple["Query | None", "Query | None"]  # forward and backward; None where nothing moves

_X_WEIGHT = ("x", "weight")
ARGUMENTS = {
    "all_gather": ("x_shard",),
    "all_gather_matmul": ("x_shard", "weight"),
    "all_reduce": ("x",),
    "all_reduce_rms_norm": ("partial",),
    "column_parallel_matmul": _X_WEIGHT,
    "context_parallel_decode": ("q", "k_cache_shard", "v_cache_shard"),
    "copy_to_group": ("x",),
    "gather": ("x_shard",),
    "matmul_all_reduce": _X_WEIGHT,
    "matmul_all_reduce_rms_norm": _X_WEIGHT,
    "matmul_reduce_scatter": _X_WEIGHT,
    "reduce_scatter": ("x",),
    "ring_attention": ("q", "k", "v"),
    "scatter": ("x",),
    "ulysses_attention": ("q", "k", "v"),
    "vocab_parallel_cross_entropy": ("logits_shard",),
}

# What each collective runs in forward and in backward.
_COLLECTIVES: dict[str, tuple[str | None, str | None]] = {
    "all_gather": ("all_gather", "reduce_scatter"),
    "all_reduce": ("all_reduce", None),
    "copy_to_group": (None, "all_reduce"),
    "gather": ("all_gather", None),
    "reduce_scatter": ("reduce_scatter", "all_gather"),
    "scatter": (None, "all_gather"),
}
_GATHERS = ("all_gather", "gather")
_WITH_DIM = (*_GATHERS, "reduce_scatter", "scatter")


def queries(op: str, shapes: Sequence[Any], dim: Any, size: int) -> Both:
    """What `op` asks of dispatch when each of `size` ranks passes `shapes`.

    Args:
        op: a key of ARGUMENTS.
        shapes: of its first tensors.
        dim: of the collectives that gather or scatter, which is 0 where None; None for all others.
        size: of the group, whose ranks all hold equally much.

    Raises:
        TypeError, ValueError: shapes or dim do not fit the op.
    """
    if op == "context_parallel_attention":
        raise ValueError(
            "context_parallel_attention runs ulysses_attention over one dim of its mesh and ring_attention over the "
            "other; ask for these, each with the group of its dim."
        )
    if op not in ARGUMENTS:
        raise ValueError(f"op is {op!r}; explain knows {', '.join(sorted(ARGUMENTS))}.")
    names = ARGUMENTS[op]
    if len(shapes) != len(names):
        raise ValueError(f"{op} needs {len(names)} shapes ({', '.join(names)}), got {len(shapes)}.")
    for name, shape in zip(names, shapes, strict=True):
        _check_shape(name, shape)
    if dim is not None and op not in _WITH_DIM:
        raise ValueError(f"dim={dim!r} is for {', '.join(sorted(_WITH_DIM))}; {op} has none.")
    if op in _COLLECTIVES:
        return _of_collective(op, shapes[0], 0 if dim is None else dim, size)
    if op == "ring_attention":
        return _of_ring(shapes, size)
    if op == "ulysses_attention":
        return _of_ulysses(shapes, size)
    if op == "context_parallel_decode":
        return _of_decode(shapes, size)
    if names[-1] == "weight":
        return _of_matmul(op, shapes, size)
    # The loss gathers statistics, 4 numbers for each token, and not logits.
    columns = 4 if op == "vocab_parallel_cross_entropy" else shapes[0][-1]
    return (op, _rows(shapes[0]), None, columns), None


def _of_matmul(op: str, shapes: Sequence[Shape], size: int) -> Both:
    x, weight = shapes
    if len(weight) != 2 or weight[1] != x[-1]:
        raise ValueError(f"weight has shape {tuple(weight)}; it must be [out, {x[-1]}].")
    rows = _rows(x)
    if op == "all_gather_matmul":
        return (op, rows * size, x[-1], None), ("matmul_reduce_scatter", rows * size, None, x[-1])
    if op == "matmul_reduce_scatter":
        return (op, rows, None, weight[0]), ("all_gather_matmul", rows, weight[0], None)
    if op == "column_parallel_matmul":
        return None, ("matmul_all_reduce", rows, None, x[-1])
    return (op, rows, None, weight[0]), None


def _of_collective(op: str, x: Shape, dim: Any, size: int) -> Both:
    """All by the shape of the tensor that is the same on all ranks."""
    whole = list(x)
    if op in _WITH_DIM:
        dim = any_dim("dim", dim, *_meta(ARGUMENTS[op], [x]).popitem())
        whole[dim] *= size if op in _GATHERS else 1

    def query(runs: str | None) -> Query | None:
        return None if runs is None else (runs, _rows(whole), None, whole[-1])

    forward, backward = _COLLECTIVES[op]
    return query(forward), query(backward)


def _of_ring(shapes: Sequence[Shape], size: int) -> Both:
    check_heads(*_meta(ARGUMENTS["ring_attention"], shapes).values())
    q, k, v = shapes
    query = ("ring_attention", *kv_moved(k, v, q[1] * size))
    return query, query


def _of_ulysses(shapes: Sequence[Shape], size: int) -> Both:
    """All exchanges of a call are dispatched by what the first of them moves: q, k and v."""
    check_heads(*_meta(ARGUMENTS["ulysses_attention"], shapes).values())
    q, k, v = shapes
    check_shared(q[2], size)
    query = (ALL_TO_ALL, q[0] * q[1] * size, None, moved_columns(q, k, v))
    return query, query


def _of_decode(shapes: Sequence[Shape], size: int) -> Both:
    q, k, v = shapes
    if not len(q) == len(k) == len(v) == 4 or k[:3] != v[:3] or k[3] != q[3] or k[2] == 0 or q[2] % k[2]:
        raise ValueError(
            f"q, k_cache_shard and v_cache_shard are {tuple(q)}, {tuple(k)} and {tuple(v)}; they must be [batch, new, "
            "heads, head_dim] and, with heads that divide those of q, [batch, capacity, kv_heads, head_dim]."
        )
    return ("all_gather", size, None, exchanged_numbers(q, v[3])), None


def _meta(names: Sequence[str], shapes: Sequence[Shape]) -> dict[str, torch.Tensor]:
    """Tensors of these shapes without memory: what the ops check, they check of tensors."""
    return {name: torch.empty(shape, device="meta") for name, shape in zip(names, shapes, strict=True)}


def _rows(shape: Shape) -> int:
    return prod(shape[:-1])


def _check_shape(name: str, shape: Any) -> None:
    if not isinstance(shape, (list, tuple)) or any(isinstance(n, bool) or not isinstance(n, int) for n in shape):
        raise TypeError(f"The shape of {name} must be a sequence of ints, not {shape!r}.")
    if not shape or any(n < 0 for n in shape):
        raise ValueError(f"The shape of {name} is {tuple(shape)}; it needs at least one dim and no negative length.")
