"""`explain`: which schedule a call would run on, and why; runs nothing and sends nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fused_tp.attention.decode import MAX_DECODE_QUERIES
from fused_tp.attention.kernels import triton_decode
from fused_tp.attention.kernels.base import KernelQuery
from fused_tp.attention.kernels.select import choose_kernel
from fused_tp.attention.kernels.torch_flash import TORCH_CPU, TORCH_CUDA
from fused_tp.attention.kernels.triton import TRITON
from fused_tp.attention.ring_fused import FusedRing, fused_ring_available, fused_ring_available_in
from fused_tp.ops.queries import ARGUMENTS, Query, queries
from fused_tp.runtime import dispatch, settings
from fused_tp.runtime.availability import Availability
from fused_tp.runtime.group import GroupLike, resolve_group
from fused_tp.schedules.registry import ALONE, SCHEDULES, Decision, decide
from fused_tp.transport.base import accumulate_dtype
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
        dim: that `all_gather`, `reduce_scatter`, `gather` and `scatter` gather or scatter, 0 where None.

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

    def ask(name: str, dtype: torch.dtype, m: int, k: int | None, n: int | None) -> Decision:
        if world_size == 1:
            return ALONE
        arguments = (name, dtype, m, k, n, world_size, transport, arch)
        # What the ranks' links allow nobody knows here; they are taken for good ones.
        lacking = tuple(
            other
            for other, spec in SCHEDULES.items()
            if not spec.supports(name, dtype)
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
    ask: Callable[..., Decision],
    messages: Callable[[], str],
    fused_ring: Callable[[KernelQuery], Availability],
) -> Explanation:
    attends = op in ("ring_attention", "ulysses_attention")
    forward, backward = queries(op, shapes, dim, size)
    # Statistics of logits, and outputs that are still to be merged, have the dtype of the arithmetic.
    exact = ("vocab_parallel_cross_entropy", "context_parallel_decode")
    moved = accumulate_dtype(dtype) if op in exact else dtype

    def answer(query: Query | None) -> Decision | None:
        return None if query is None else ask(query[0], moved, *query[1:])

    decisions = answer(forward), answer(backward)
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
    if triton_decode.serves(query, new):
        return Provider("triton", "its split-KV kernel takes a few queries of all sequences at once")
    if new <= MAX_DECODE_QUERIES:
        return Provider("torch", f"for up to {MAX_DECODE_QUERIES} queries matmuls read the cache once")
    return _of_steps(query)
