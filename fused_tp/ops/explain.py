"""`explain`: which schedule a call would run on, and why; runs nothing and sends nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from fused_tp.runtime import dispatch
from fused_tp.runtime.group import GroupLike, resolve_group
from fused_tp.schedules.select import ALONE, Decision, decide
from fused_tp.transport.base import accumulate_dtype


@dataclass(frozen=True)
class Explanation:
    """What would run.

    Attributes:
        op: name of the op.
        call: the op with its shapes, dtype, device and group size, in words.
        forward, backward: schedule, transport and reason of each; backward is None where it moves nothing.
    """

    op: str
    call: str
    forward: Decision | None
    backward: Decision | None

    def __str__(self) -> str:
        lines = [self.call]
        for name, decision in (("forward", self.forward), ("backward", self.backward)):
            if decision is None:
                lines.append(f"  {name}: nothing moves")
            else:
                lines.append(f"  {name}: {decision.schedule} over {decision.transport}, because {decision.reason}")
        return "\n".join(lines)


# (op, rows, k, n) as dispatch wants them: None for a dim that is cut over the ranks.
_Query = tuple[str, int, "int | None", "int | None"]


@dataclass(frozen=True)
class _Op:
    arguments: tuple[str, ...]
    forward: Callable[..., _Query | None]
    backward: Callable[..., _Query | None]


def _rows(shape: Sequence[int]) -> int:
    return prod(shape[:-1])


_X_WEIGHT = ("x", "weight")
_OPS = {
    "all_gather_matmul": _Op(
        ("x_shard", "weight"),
        lambda x, w, size: ("all_gather_matmul", _rows(x) * size, x[-1], None),
        lambda x, w, size: ("matmul_reduce_scatter", _rows(x) * size, None, x[-1]),
    ),
    "matmul_reduce_scatter": _Op(
        _X_WEIGHT,
        lambda x, w, size: ("matmul_reduce_scatter", _rows(x), None, w[0]),
        lambda x, w, size: ("all_gather_matmul", _rows(x), w[0], None),
    ),
    "matmul_all_reduce": _Op(
        _X_WEIGHT, lambda x, w, size: ("matmul_all_reduce", _rows(x), None, w[0]), lambda x, w, size: None
    ),
    "column_parallel_matmul": _Op(
        _X_WEIGHT, lambda x, w, size: None, lambda x, w, size: ("matmul_all_reduce", _rows(x), None, x[-1])
    ),
    "all_reduce_rms_norm": _Op(
        ("partial",), lambda x, size: ("all_reduce_rms_norm", _rows(x), None, x[-1]), lambda x, size: None
    ),
    "matmul_all_reduce_rms_norm": _Op(
        _X_WEIGHT, lambda x, w, size: ("matmul_all_reduce_rms_norm", _rows(x), None, w[0]), lambda x, w, size: None
    ),
    "vocab_parallel_cross_entropy": _Op(
        ("logits_shard",), lambda x, size: ("vocab_parallel_cross_entropy", _rows(x), None, 4), lambda x, size: None
    ),
}


def explain(
    op: str,
    *shapes: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    group: GroupLike = None,
) -> Explanation:
    """Which schedule `op` would run on for tensors of `shapes` on every rank, and why. Printable.

    Args:
        op: name of a tensor-parallel op, as in `fused_tp.<op>`.
        shapes: of its first tensors as this rank would pass them (x and weight; one tensor for the others).
        dtype: of the tensors.
        device: they would be on.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world. Where the ranks share memory for the first time
            they set that up now, so all of them must ask.

    Raises:
        ValueError: no such op, or shapes that do not fit it.
        TypeError: a shape is not a sequence of ints.

    Example:
        >>> print(explain("matmul_all_reduce", (1, 2048), (4096, 2048), dtype=torch.float32))
        matmul_all_reduce(x [1, 2048], weight [4096, 2048]), float32 on cpu, 1 rank
          forward: local over none, because the group has one rank, so nothing moves
          backward: nothing moves
    """
    resolved, where = resolve_group(group), torch.device(device)

    def ask(name: str, dtype: torch.dtype, m: int, k: int | None, n: int | None) -> Decision:
        return decide(name, resolved, dtype, where, m, k, n)

    return _explain(op, shapes, dtype, str(where), resolved.size, ask)


def explain_for(
    op: str, *shapes: Sequence[int], dtype: torch.dtype, world_size: int, transport: str, arch: str
) -> Explanation:
    """What the dispatch table says for a group that need not exist: `world_size` ranks on `transport`.

    Args:
        op, shapes, dtype: as for `explain`.
        world_size: ranks in the group.
        transport: "shm" or the name of a torch.distributed backend.
        arch: "cpu", or "sm_90" and the like.

    Raises:
        ValueError, TypeError: as `explain`.

    Example:
        >>> explain_for("matmul_all_reduce", (1, 8), (8, 8), dtype=torch.float32, world_size=2, transport="gloo",
        ...             arch="cpu").forward.schedule
        'plain'
    """

    def ask(name: str, dtype: torch.dtype, m: int, k: int | None, n: int | None) -> Decision:
        if world_size == 1:
            return ALONE
        choice = dispatch.choose(name, dtype, m, k, n, world_size, transport, arch)
        return Decision(choice.schedule, transport, f"dispatch table, rule {choice.rule}")

    return _explain(op, shapes, dtype, arch, world_size, ask)


def _explain(
    op: str, shapes: Sequence[Sequence[int]], dtype: torch.dtype, where: str, size: int, ask: Callable[..., Decision]
) -> Explanation:
    if op not in _OPS:
        raise ValueError(f"op is {op!r}; explain knows {', '.join(sorted(_OPS))}.")
    spec = _OPS[op]
    if len(shapes) != len(spec.arguments):
        raise ValueError(f"{op} needs {len(spec.arguments)} shapes ({', '.join(spec.arguments)}), got {len(shapes)}.")
    for name, shape in zip(spec.arguments, shapes, strict=True):
        _check_shape(name, shape)
    if len(shapes) == 2 and (len(shapes[1]) != 2 or shapes[1][1] != shapes[0][-1]):
        raise ValueError(f"weight has shape {tuple(shapes[1])}; it must be [out, {shapes[0][-1]}].")
    # The loss moves statistics of the logits, which have the dtype of its arithmetic.
    moved = accumulate_dtype(dtype) if op == "vocab_parallel_cross_entropy" else dtype

    def answer(query: _Query | None) -> Decision | None:
        return None if query is None else ask(query[0], moved, *query[1:])

    tensors = ", ".join(f"{name} {list(shape)}" for name, shape in zip(spec.arguments, shapes, strict=True))
    ranks = f"{size} rank{'s' if size != 1 else ''}"
    return Explanation(
        op=op,
        call=f"{op}({tensors}), {str(dtype).removeprefix('torch.')} on {where}, {ranks}",
        forward=answer(spec.forward(*shapes, size)),
        backward=answer(spec.backward(*shapes, size)),
    )


def _check_shape(name: str, shape: Any) -> None:
    if not isinstance(shape, (list, tuple)) or any(isinstance(n, bool) or not isinstance(n, int) for n in shape):
        raise TypeError(f"The shape of {name} must be a sequence of ints, not {shape!r}.")
    if not shape or any(n < 0 for n in shape):
        raise ValueError(f"The shape of {name} is {tuple(shape)}; it needs at least one dim and no negative length.")
