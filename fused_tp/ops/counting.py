"""Support for torch's counting modes: CommDebugMode (collectives) and FlopCounterMode (matmuls, also of backward).

Both modes see a torch.library op as one opaque call. While such a mode is active, and only then, the op additionally
issues calls of torch's own ops that compute nothing, one for each collective or matmul inside the op.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from fused_tp.core.group import GroupName, group_by_name

# Maps the op of a dispatch key to torch's name of its collective. A ring op runs that collective W - 1 times.
_COLLECTIVE_BY_KEY_OP = {
    "all_gather": "all_gather_into_tensor",
    "all_gather_matmul": "all_gather_into_tensor",
    "vocab_parallel_cross_entropy": "all_gather_into_tensor",
    "all_gather_grouped_matmul": "all_gather_into_tensor",
    "grouped_matmul_reduce_scatter": "reduce_scatter_tensor",
    "grouped_matmul_all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter_tensor",
    "matmul_reduce_scatter": "reduce_scatter_tensor",
    "all_reduce": "all_reduce",
    "matmul_all_reduce": "all_reduce",
    "all_reduce_rms_norm": "all_reduce",
    "matmul_all_reduce_rms_norm": "all_reduce",
    "all_to_all": "all_to_all_single",
    "ring_attention": "all_to_all_single",
}
_GROUPED_GRAD_FLAGS = (
    "needs_x",
    "needs_rows",
    "needs_weight",
)  # arguments of grouped matmuls' backward, one per gradient
_DEBUG_MODULE = "torch.distributed.tensor.debug"
_counted_ops: set[str] = set()  # ops whose collectives CommDebugMode counts


def enable_flop_counting(op: Any) -> None:
    """Make FlopCounterMode count the matmuls inside `op`, an `Op`."""

    def decompose(*values: Any) -> Any:
        # FlopCounterMode calls this for an op without a flop formula. After NotImplemented it runs the op as usual.
        if type(torch.utils._python_dispatch._get_current_dispatch_mode()).__name__ == "_FlopCounterMode":
            for batch, m, k, n in _matmul_sizes(op.name, op.pack((*values[:-1], GroupName(values[-1])))):
                a, b = (torch.empty((batch, *s), dtype=torch.float32, device="meta") for s in ((m, k), (k, n)))
                torch.ops.aten.bmm.default(a, b)
        return NotImplemented

    # Rejected: a CompositeImplicitAutograd kernel, because Inductor would decompose the op; and register_flop_formula,
    # because its module imports Triton, which takes 0.2 s.
    op.overload.decompose = decompose


def enable_collective_counting(ops: dict[str, Any]) -> None:
    """Make CommDebugMode, if it has been imported, count the collectives of `ops`."""
    if (debug_module := sys.modules.get(_DEBUG_MODULE)) is None:  # importing it here would take seconds
        return
    for op in ops.values():
        if op.name not in _counted_ops:
            _counted_ops.add(op.name)
            torch.library.register_torch_dispatch(op.qualified_name, debug_module.CommDebugMode, _counting_rule(op))


def _counting_rule(op: Any) -> Callable[..., Any]:
    def dispatch_and_count(mode: Any, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        out = mode.__torch_dispatch__(func, types, args, kwargs)
        if out is not NotImplemented:
            keyword_values = [kwargs[argument.name] for argument in func._schema.arguments[len(args) :]]
            for name in _collective_names(op, [*args, *keyword_values]):
                mode.__torch_dispatch__(_FakeCollective(name), ())
        return out

    return dispatch_and_count


class _FakeCollective:
    """Fake torch collective that does nothing, for CommDebugMode to count."""

    def __init__(self, name: str) -> None:
        self._overloadpacket = getattr(torch.ops.c10d_functional, name)

    def __call__(self) -> None:
        pass

    def __str__(self) -> str:
        return str(self._overloadpacket)


def _collective_names(op: Any, values: Sequence[Any]) -> list[str]:
    a = op.pack((*values[:-1], GroupName(values[-1])))
    size = group_by_name(a[-1]).size
    key = None if op.key is None else op.key(a)
    if key is None or size == 1:
        return []
    if op.name == "all_gather_grouped_matmul_backward":
        return ["reduce_scatter_tensor"] * a.needs_x + ["all_gather_into_tensor"] * a.needs_weight
    if op.name == "float8_column_matmul_backward":
        num_gathers = int(a.gather_dim is not None and any(a.needs_weight))
        return [_COLLECTIVE_BY_KEY_OP[key.op]] * a.needs_x + ["all_gather_into_tensor"] * num_gathers
    if op.name == "float8_row_matmul_backward":
        return ["all_gather_into_tensor"] * (a.needs_x or a.needs_d_output) + ["all_reduce"] * a.needs_bias
    if op.name == "all_gather_matmul_backward":
        num_reduce_scatters = a.needs_x * (bool(a.d_outputs) + (a.d_gathered is not None))
        return ["reduce_scatter_tensor"] * num_reduce_scatters + ["all_gather_into_tensor"] * any(a.needs_weight)
    num_collectives = {"ring_attention": size - 1, "ring_attention_backward": 2 * (size - 1)}.get(op.name, 1)
    return [_COLLECTIVE_BY_KEY_OP[key.op]] * num_collectives


def _matmul_sizes(name: str, a: Any) -> Iterator[tuple[int, int, int, int]]:
    """Yield (batch, m, k, n) of each matmul that this rank computes; masked parts of attention are also counted."""
    if name in ("ring_attention", "ring_attention_backward"):
        (b, q, h, d), keys, dv = a.q.shape, a.attention.seq_len_kv, a.v.shape[3]
        yield from ((b * h, q, d, keys), (b * h, q, keys, dv))
        # Backward computes the scores again (above), and the gradients of the probabilities, v, q and k.
        if name == "ring_attention_backward":
            yield from ((b * h, keys, q, dv), (b * h, q, keys, d), (b * h, keys, q, d))
    elif name == "context_parallel_decode":
        (_, q, h, d), group = a.q.shape, group_by_name(a.group)
        for length in a.cache_seqlens.tolist():
            from fused_tp.attention.layout import BlockCyclicLayout

            num_local_keys = BlockCyclicLayout(group.size, group.rank, a.block).count_before(length)
            yield from ((h, q, d, num_local_keys), (h, q, num_local_keys, a.v.shape[3]))
    elif "grouped" in name:  # forward is one matmul; backward is one for each gradient that is needed
        num_rows, num_matmuls = (
            len(a.routing.tokens),
            sum(getattr(a, flag, False) for flag in _GROUPED_GRAD_FLAGS) or "backward" not in name,
        )
        yield from [(1, num_rows, *a.weight.shape[1:])] * num_matmuls
    elif name == "float8_weight_grad":
        yield 1, a.num_columns, _num_rows(a.x), a.x.shape[-1]
    elif name in ("matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_reduce_rms_norm", "float8_row_matmul"):
        yield 1, _num_rows(a.x), *reversed(a.weight.shape)
    elif name in ("matmul_reduce_scatter_backward", "float8_row_matmul_backward"):
        if a.needs_x:
            yield 1, _num_rows(a.x), *a.weight.shape
    elif name in ("linear_cross_entropy", "linear_cross_entropy_backward"):
        num_matmuls = 1 if name == "linear_cross_entropy" else 1 + sum(a.needs[:2])
        yield from [(1, _num_rows(a.hidden), *reversed(a.weight.shape))] * num_matmuls
    elif name in ("all_gather_matmul", "column_parallel_matmul", "float8_column_matmul"):
        num_rows = _num_gathered_rows(a)
        yield from ((1, num_rows, *reversed(w.shape)) for w in a.weights)
    elif name in (
        "all_gather_matmul_backward",
        "column_parallel_matmul_backward",
        "float8_column_matmul_backward",
    ):
        num_rows = _num_gathered_rows(a)
        for w, needed in zip(a.weights, a.needs_weight, strict=True):
            if a.needs_x:
                yield 1, num_rows, *w.shape
            if needed:
                yield 1, w.shape[0], num_rows, w.shape[1]


def _num_rows(x: Tensor) -> int:
    return prod(x.shape[:-1])


def _num_gathered_rows(a: Any) -> int:
    shape = [*(a.x if hasattr(a, "x") else a.x_shard).shape[:-1]]
    if getattr(a, "gather_dim", None) is not None:
        shape[a.gather_dim] = a.gather_size
    return prod(shape)
