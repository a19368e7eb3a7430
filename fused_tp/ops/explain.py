"""`explain`: which schedule a call would run on, and why; runs nothing and sends nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from fused_tp.attention.decode import MAX_DECODE_QUERIES, kernel_serves
from fused_tp.attention.kernels.base import KernelQuery
from fused_tp.attention.kernels.select import choose_kernel
from fused_tp.attention.kernels.torch_flash import TORCH_CPU, TORCH_CUDA
from fused_tp.attention.kernels.triton import TRITON
from fused_tp.attention.ring_fused import FusedRing, fused_ring_available, fused_ring_available_in
from fused_tp.ops.all_gather_matmul import ALL_GATHER_MATMUL
from fused_tp.ops.all_reduce_rms_norm import ALL_REDUCE_RMS_NORM
from fused_tp.ops.all_to_all import SEQUENCE_TO_HEADS
from fused_tp.ops.arguments import any_dim, check_linear, check_tensor
from fused_tp.ops.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from fused_tp.ops.column_parallel_matmul import COLUMN_PARALLEL_MATMUL
from fused_tp.ops.context_parallel_decode import CONTEXT_PARALLEL_DECODE
from fused_tp.ops.matmul_all_reduce import MATMUL_ALL_REDUCE
from fused_tp.ops.matmul_all_reduce_rms_norm import MATMUL_ALL_REDUCE_RMS_NORM
from fused_tp.ops.matmul_reduce_scatter import MATMUL_REDUCE_SCATTER
from fused_tp.ops.op import DispatchKey, Op
from fused_tp.ops.ring_attention import RING_ATTENTION
from fused_tp.ops.vocab_parallel_cross_entropy import VOCAB_PARALLEL_CROSS_ENTROPY
from fused_tp.runtime import dispatch, settings
from fused_tp.runtime.availability import Availability
from fused_tp.runtime.group import GroupLike, resolve_group
from fused_tp.schedules.registry import ALONE, SCHEDULES, Decision, decide
from fused_tp.transport.torch_dist import backend_of


@dataclass(frozen=True)
class Provider:
    """What computes each step of an attention, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Explanation:
    """What would run.

    Attributes:
        op: name of the op.
        call: the op with its shapes, dtype, device and group size, in words.
        forward, backward: schedule, transport and reason of each; None where it moves nothing.
        provider: of an attention (decoding too), else None.
    """

    op: str
    call: str
    forward: Decision | None
    backward: Decision | None
    provider: Provider | None = None

    def __str__(self) -> str:
        lines = [self.call]
        for name, decision in (("forward", self.forward), ("backward", self.backward)):
            if decision is None:
                lines.append(f"  {name}: nothing moves")
            else:
                lines.append(f"  {name}: {decision.schedule} over {decision.transport}, because {decision.reason}")
        if self.provider is not None:
            lines.append(f"  each step: {self.provider.name}, because {self.provider.reason}")
        return "\n".join(lines)


def explain(
    op: str,
    *shapes: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    group: GroupLike = None,
    dim: int | None = None,
) -> Explanation:
    """Which schedule `op` would run on for tensors of `shapes` on every rank, and why. Printable.

    Args:
        op: name of an op that moves anything, as in `fused_tp.<op>`.
        shapes: of its first tensors as this rank would pass them: x and weight; q, k and v; one tensor for the others.
            All ranks are taken to hold equally much.
        dtype: of the tensors.
        device: they would be on.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world. All of its ranks must ask: where they share memory
            for the first time, or need to know what the others' devices can run, they find out now.
        dim: that `all_gather` and `reduce_scatter` gather or scatter, 0 where None.

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

    def ask(key: DispatchKey) -> Decision:
        return decide(key.op, resolved, key.dtype, where, key.m, key.k, key.n)

    def messages() -> str:
        return backend_of(resolved, where.type)

    def fused_ring(query: KernelQuery) -> Availability:
        return fused_ring_available_in(resolved, query)

    return _explain(op, shapes, dim, dtype, where.type, str(where), resolved.size, ask, messages, fused_ring)


def explain_for(
    op: str,
    *shapes: Sequence[int],
    dtype: torch.dtype,
    world_size: int,
    transport: str,
    arch: str,
    dim: int | None = None,
) -> Explanation:
    """What the dispatch table says for a group that need not exist: `world_size` ranks on `transport`.

    Args:
        op, shapes, dtype, dim: as for `explain`.
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

    device_type = "cuda" if arch.startswith("sm_") else arch

    def messages() -> str:
        # A table may prefer messages where there is shared memory.
        return "torch.distributed" if transport == "shm" else transport

    def ask(key: DispatchKey) -> Decision:
        if world_size == 1:
            return ALONE
        arguments = (key.op, key.dtype, key.m, key.k, key.n, world_size, transport, arch)
        # What the ranks' links allow nobody knows here; they are taken for good ones.
        lacking = tuple(
            other
            for other, spec in SCHEDULES.items()
            if not spec.supports(key.op, key.dtype)
            or (spec.devices and device_type not in spec.devices)
            or world_size > (spec.max_ranks or world_size)
        )
        choice = dispatch.choose(*arguments, without=lacking)
        moves = SCHEDULES[choice.schedule].transport or messages()
        table = settings.table_path() or "as shipped"
        return Decision(choice.schedule, moves, f"dispatch table {table}, rule {choice.rule}")

    return _explain(op, shapes, dim, dtype, device_type, arch, world_size, ask, messages, fused_ring_available)


def _explain(
    op: str,
    shapes: Sequence[Sequence[int]],
    dim: int | None,
    dtype: torch.dtype,
    device_type: str,
    where: str,
    size: int,
    ask: Callable[[DispatchKey], Decision],
    messages: Callable[[], str],
    fused_ring: Callable[[KernelQuery], Availability],
) -> Explanation:
    attends = op in ("ring_attention", "ulysses_attention")
    forward, backward = (None if key is None else ask(key) for key in dispatch_keys(op, shapes, dtype, dim, size))
    decisions = forward, backward
    provider = None
    if attends:
        q, _, v = shapes
        single = size == 1 or op == "ulysses_attention"  # whose attention is that of one rank
        wanted = KernelQuery(torch.device(device_type), dtype, q[-1], v[-1], single=single)
        if op == "ring_attention" and decisions[0] is not None and decisions[0].schedule == FusedRing.name:
            decisions = _of_fused_ring(decisions[0], fused_ring(wanted), messages())
        if decisions[0] is not None and decisions[0].schedule == FusedRing.name:
            provider = Provider(TRITON.name, "the steps of a forward are one launch of its kernel")
        else:
            provider = _of_steps(wanted)
    if op == "context_parallel_decode":
        provider = _of_decoding(torch.device(device_type), dtype, shapes[0], shapes[2][-1])
    tensors = ", ".join(f"{name} {list(shape)}" for name, shape in zip(ARGUMENTS[op], shapes, strict=True))
    along = "" if dim is None else f", dim={dim}"
    ranks = f"{size} rank{'s' if size != 1 else ''}"
    return Explanation(
        op=op,
        call=f"{op}({tensors}{along}), {str(dtype).removeprefix('torch.')} on {where}, {ranks}",
        forward=decisions[0],
        backward=decisions[1],
        provider=provider,
    )


def _of_fused_ring(decision: Decision, available: Availability, messages: str) -> tuple[Decision, Decision]:
    """Forward and backward of a ring that goes by `decision`; `available` says whether its forward can."""
    note = available.reason or "its backward goes step by step"
    by_messages = Decision("pipelined", messages, f"{decision.reason}, but {note}")
    return (decision if available else by_messages), by_messages


def _of_steps(query: KernelQuery) -> Provider:
    """By `query`, and whether that may be another for what `explain` is not told: scores and masks."""
    chosen, reason = choose_kernel(query)
    if chosen in (TORCH_CPU, TORCH_CUDA):
        pieces = " in one piece" if query.single else ""
        reason += f"; this holds for plain scores{pieces}"
    return Provider(chosen.name, reason)


def _of_decoding(device: torch.device, dtype: torch.dtype, q_shape: Sequence[int], v_head_dim: int) -> Provider:
    new, head_dim = q_shape[1], q_shape[3]
    query = KernelQuery(device, dtype, head_dim, v_head_dim)
    if kernel_serves(query, new):
        return Provider("triton", "its split-KV kernel takes a few queries of all sequences at once")
    if new <= MAX_DECODE_QUERIES:
        return Provider("torch", f"for up to {MAX_DECODE_QUERIES} queries matmuls read the cache once")
    return _of_steps(query)


# -- what each op asks of dispatch ------------------------------------------------------------------------------------

Keys: TypeAlias = "tuple[DispatchKey | None, DispatchKey | None]"
"""Of forward and of backward; None where nothing moves."""

# By the name of the public function: attention by heads is dispatched by its first exchange.
_OPS: dict[str, Op[Any]] = {"ulysses_attention": SEQUENCE_TO_HEADS} | {
    op.name: op
    for op in (
        ALL_GATHER,
        ALL_GATHER_MATMUL,
        ALL_REDUCE,
        ALL_REDUCE_RMS_NORM,
        COLUMN_PARALLEL_MATMUL,
        CONTEXT_PARALLEL_DECODE,
        MATMUL_ALL_REDUCE,
        MATMUL_ALL_REDUCE_RMS_NORM,
        MATMUL_REDUCE_SCATTER,
        REDUCE_SCATTER,
        RING_ATTENTION,
        VOCAB_PARALLEL_CROSS_ENTROPY,
    )
}
_EXAMPLES: dict[str, Any] = {name: op.example for name, op in sorted(_OPS.items())}
_PARAMETERS = {name: list(inspect.signature(example).parameters)[1:] for name, example in _EXAMPLES.items()}
ARGUMENTS = {name: tuple(one for one in names if one != "dim") for name, names in _PARAMETERS.items()}
"""The tensors whose shapes `explain` takes, by op."""


def dispatch_keys(op: str, shapes: Sequence[Any], dtype: torch.dtype, dim: Any, size: int) -> Keys:
    """What `op` asks of dispatch when each of `size` ranks passes tensors of `shapes`.

    Raises:
        TypeError, ValueError: as `explain`.
    """
    if op == "context_parallel_attention":
        raise ValueError(
            "context_parallel_attention runs ulysses_attention over one dim of its mesh and ring_attention over the "
            "other; ask for these, each with the group of its dim."
        )
    if op not in ARGUMENTS:
        raise ValueError(f"op is {op!r}; explain knows {', '.join(ARGUMENTS)}.")
    names = ARGUMENTS[op]
    if len(shapes) != len(names):
        raise ValueError(f"{op} needs {len(names)} shapes ({', '.join(names)}), got {len(shapes)}.")
    for name, shape in zip(names, shapes, strict=True):
        _check_shape(name, shape)
    tensors: list[Any] = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
    if dim is not None:
        if "dim" not in _PARAMETERS[op]:
            with_dim = (name for name, parameters in _PARAMETERS.items() if "dim" in parameters)
            raise ValueError(f"dim={dim!r} is for {', '.join(with_dim)}; {op} has none.")
        tensors.append(any_dim("dim", dim, names[0], tensors[0]))
    check_tensor(names[0], tensors[0], least_dims=2 if "scatter" in op or op == "all_gather_matmul" else 1)
    if names[-1] == "weight":
        check_linear(names[0], tensors[0], tensors[1], None)
    args, one = _EXAMPLES[op](size, *tensors), _OPS[op]
    return one.key and one.key(args), one.backward_key and one.backward_key(args)


def _check_shape(name: str, shape: Any) -> None:
    if not isinstance(shape, (list, tuple)) or any(isinstance(n, bool) or not isinstance(n, int) for n in shape):
        raise TypeError(f"The shape of {name} must be a sequence of ints, not {shape!r}.")
    if not shape or any(n < 0 for n in shape):
        raise ValueError(f"The shape of {name} is {tuple(shape)}; it needs at least one dim and no negative length.")
