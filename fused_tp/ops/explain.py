"""`explain`: report the schedule that a call would use, and the reason, without running the call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fused_tp.attention.decode import MAX_DECODE_QUERIES, uses_decode_kernel
from fused_tp.attention.kernels.base import KernelRequest
from fused_tp.attention.kernels.select import choose_kernel
from fused_tp.attention.kernels.torch_flash import TORCH_CPU_KERNEL, TORCH_CUDA_KERNEL
from fused_tp.attention.kernels.triton import TRITON_KERNEL
from fused_tp.attention.ring_fused import FusedRing, fused_ring_available, fused_ring_available_on_all_ranks
from fused_tp.backends.autotune import describe_choice, is_measured, saved_choice
from fused_tp.backends.gemm import explain_few_rows
from fused_tp.backends.messages.torch_dist import backend_for_device
from fused_tp.backends.registry import (
    SCHEDULES,
    SINGLE_RANK_DECISION,
    ScheduleDecision,
    ScheduleSpec,
    choose_by_table,
    describe_caveat,
    describe_selection,
    forced_schedule,
)
from fused_tp.backends.shared_memory.shm import shm_supports_size
from fused_tp.core import settings
from fused_tp.core.availability import AVAILABLE, Availability, unavailable
from fused_tp.core.group import GroupLike, resolve_group
from fused_tp.core.pending import accumulate_dtype
from fused_tp.ops.all_to_all import SEQUENCE_TO_HEADS
from fused_tp.ops.arguments import (
    check_float8,
    check_linear,
    check_tensor,
    checked_grouped,
    make_example_routing,
    normalize_dim,
)
from fused_tp.ops.float8_column_matmul import FLOAT8_COLUMN_MATMUL, example_float8_column
from fused_tp.ops.float8_row_matmul import FLOAT8_ROW_MATMUL, example_float8_row
from fused_tp.ops.op import Op, ScheduleKey, all_ops


@dataclass(frozen=True)
class Provider:
    """Kernel that computes an attention step or a matmul, and the reason for the choice."""

    name: str
    reason: str


@dataclass(frozen=True)
class Explanation:
    """Schedules and kernels that a call would use.

    Attributes:
        op: name of the op.
        call: description of the op with its shapes, dtype, device and group size.
        forward, backward: schedule, transport and reason; None for a direction without communication.
        provider: kernel of attention or decoding, or of a matmul if tensors were passed; otherwise None.
    """

    op: str
    call: str
    forward: ScheduleDecision | None
    backward: ScheduleDecision | None
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
    *shapes: Sequence[int] | Tensor,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    group: GroupLike = None,
    dim: int | None = None,
    float8: str | None = None,
) -> Explanation:
    """Explain which schedule `op` would use for tensors of `shapes` on every rank, and why; print the returned object.

    Args:
        op: name of an op that communicates, as in `fused_tp.<op>`.
        shapes: shapes of the op's first tensors on this rank: x and weight; q, k and v; one tensor for other ops. All
            ranks are assumed to hold equal shards. Tensors may be passed instead of shapes; for x and weight the
            result then also reports if the kernels for few rows multiply them, or why not.
        dtype: dtype of the tensors. None: the dtype of a tensor passed in `shapes`, otherwise bfloat16.
        device: device of the tensors. None: the device of a tensor passed in `shapes`, otherwise the CPU.
        group: ProcessGroup, 1-D DeviceMesh, or None for the world. All of its ranks must call `explain`: if needed,
            they set up shared memory or exchange the capabilities of their devices now.
        dim: dim that `all_gather` and `reduce_scatter` gather or scatter; None is 0.
        float8: the recipe of a matmul in float8.

    Raises:
        ValueError: `op` is not the name of an op that communicates, or the shapes or `float8` do not fit the op.
        TypeError: a shape is not a sequence of ints.

    Example:
        >>> print(explain("matmul_all_reduce", (1, 2048), (4096, 2048), dtype=torch.float32))
        matmul_all_reduce(x [1, 2048], weight [4096, 2048]), float32 on cpu, 1 rank
          forward: local over none, because the group has one rank, so nothing moves
          backward: nothing moves
    """
    tensors = [shape for shape in shapes if isinstance(shape, Tensor)]
    dtype = dtype or (tensors[0].dtype if tensors else torch.bfloat16)
    resolved_group = resolve_group(group)
    resolved_device = (
        torch.device(device) if device is not None else tensors[0].device if tensors else torch.device("cpu")
    )

    def decide_schedule(name: str, key: ScheduleKey) -> ScheduleDecision:
        key = key._replace(device=resolved_device)
        decision = describe_selection(key, resolved_group)
        if not is_measured(name, key, resolved_group):
            return decision
        if (choice := saved_choice(name, key, resolved_group)) is None:
            autotune_clause = (
                "FUSED_TP_AUTOTUNE measures" if settings.autotune() else "the autotuner (FUSED_TP_AUTOTUNE) measures"
            )
            return replace(decision, reason=f"{decision.reason}, until {autotune_clause} the first such call")
        schedule_name = choice["schedule"]
        transport = SCHEDULES[schedule_name].transport or backend_for_device(resolved_group, resolved_device.type)
        return ScheduleDecision(
            schedule_name, transport, f"measured here: {describe_choice(choice)}{describe_caveat(schedule_name)}"
        )

    environment = _Environment(
        resolved_group.size,
        resolved_device.type,
        str(resolved_device),
        decide_schedule,
        partial(backend_for_device, resolved_group, resolved_device.type),
        partial(fused_ring_available_on_all_ranks, resolved_group),
    )
    explanation = _explain_in(
        op, [shape.shape if isinstance(shape, Tensor) else shape for shape in shapes], dim, dtype, environment, float8
    )
    if (
        explanation.provider is None
        and float8 is None
        and len(tensors) == 2
        and tensor_argument_names()[op][-1] == "weight"
        and tensors[1].ndim == 2
    ):
        uses_few_rows, few_rows_explanation = explain_few_rows(*tensors)
        explanation = replace(
            explanation,
            provider=Provider("the kernels for few rows" if uses_few_rows else "torch or oneDNN", few_rows_explanation),
        )
    return explanation


def explain_hypothetical(
    op: str,
    *shapes: Sequence[int],
    dtype: torch.dtype,
    world_size: int,
    transport: str,
    arch: str,
    dim: int | None = None,
) -> Explanation:
    """Run `explain` for a hypothetical group of `world_size` ranks.

    Args:
        transport: "shm", "nvlink" (NCCL between GPUs that write into each other's memory), or the name of a
            torch.distributed backend.
        arch: "cpu", or the architecture of the GPUs, such as "sm_90".

    Raises:
        ValueError: `explain` would raise; or `transport` does not support tensors of this device type; or
            `FUSED_TP_SCHEDULE` or the dispatch table specifies a schedule that is not available (the op itself would
            also raise).
    """
    device_type = "cuda" if arch.startswith("sm_") else arch
    device_types_by_transport = {"shm": ["cpu"], "nvlink": ["cuda"], **dist.Backend.backend_capability}
    if device_type not in device_types_by_transport.get(transport, ()):
        supported_transports = ", ".join(
            name for name, types in device_types_by_transport.items() if device_type in types
        )
        raise ValueError(
            f"transport is {transport!r}; it must be one that supports tensors on {device_type}: "
            f"{supported_transports}."
        )
    shm_availability_here = (
        shm_supports_size(world_size) if transport == "shm" else unavailable(f"its transport is {transport}")
    )
    # Backend for messages, which a dispatch table may prefer to shared memory or NVLink.
    message_backend = {"shm": "torch.distributed", "nvlink": "nccl"}.get(transport, transport)

    def group_availability(spec: ScheduleSpec) -> Availability:
        # The links between hypothetical ranks are unknown. Assume that they support the schedule.
        if spec.transport == "shm":
            return shm_availability_here
        if spec.device_types and device_type not in spec.device_types:
            return unavailable(f"it is for {', '.join(spec.device_types)}, not {device_type}")
        if world_size > (spec.max_ranks or world_size):
            return unavailable(f"it supports at most {spec.max_ranks} ranks, and the group has {world_size}")
        return AVAILABLE

    def decide_schedule(name: str, key: ScheduleKey) -> ScheduleDecision:
        if world_size == 1:
            return SINGLE_RANK_DECISION
        reason = ""
        if (forced_name := forced_schedule()) is not None:
            spec = SCHEDULES[forced_name]
            if op_availability := spec.supports(key.op, key.dtype):
                if not (availability := group_availability(spec)):
                    raise ValueError(f"Schedule {forced_name!r} does not support this group: {availability.reason}.")
                forced_reason = f"FUSED_TP_SCHEDULE={forced_name} forces it{describe_caveat(forced_name)}"
                return ScheduleDecision(forced_name, spec.transport or message_backend, forced_reason)
            reason = f"FUSED_TP_SCHEDULE={forced_name}, but {op_availability.reason}; "

        def schedule_availability(spec: ScheduleSpec) -> Availability:
            return spec.supports(key.op, key.dtype) and group_availability(spec)

        transport_key = "shm" if shm_availability_here else transport if transport == "nvlink" else message_backend
        choice = choose_by_table(key, world_size, transport_key, arch, schedule_availability)
        reason += f"dispatch table {settings.table_path() or 'as shipped'}, rule {choice.rule}"
        if transport == "shm" and not shm_availability_here and "no one_sided" not in choice.rule:
            reason += f"; no shared memory: {shm_availability_here.reason}"
        spec = SCHEDULES[choice.schedule]
        return ScheduleDecision(spec.name, spec.transport or message_backend, reason + describe_caveat(spec.name))

    environment = _Environment(
        world_size, device_type, arch, decide_schedule, lambda: message_backend, fused_ring_available
    )
    return _explain_in(op, shapes, dim, dtype, environment)


class _Environment(NamedTuple):
    """The group and devices, real or hypothetical, on which a call would run.

    Attributes:
        size: number of ranks.
        device_type: type of the device.
        device_name: description of the device, for the report.
        decide: maps (op, dispatch key) to the schedule and the reason.
        message_backend: returns the name of the torch.distributed backend that sends messages.
        fused_ring_availability: maps a kernel request to the availability of ring attention in one launch.
    """

    size: int
    device_type: str
    device_name: str
    decide: Callable[[str, ScheduleKey], ScheduleDecision]
    message_backend: Callable[[], str]
    fused_ring_availability: Callable[[KernelRequest], Availability]


def _explain_in(
    op: str,
    shapes: Sequence[Sequence[int]],
    dim: int | None,
    dtype: torch.dtype,
    environment: _Environment,
    float8: str | None = None,
) -> Explanation:
    keys = dispatch_keys(op, shapes, dtype, dim, environment.size, float8)
    name = (explained_ops()[op][0] if float8 is None else FLOAT8_OPS[op][0]).name
    forward, backward = (
        None if key is None else environment.decide(op_name, key)
        for op_name, key in zip((name, f"{name}_backward"), keys, strict=True)
    )
    device, provider = torch.device(environment.device_type), None
    if op in ("ring_attention", "ulysses_attention"):
        q, _, v = shapes
        # Ulysses attention computes full sequences, in a single step.
        allows_tile_rounding = environment.size == 1 or accumulate_dtype(dtype) == dtype or op == "ulysses_attention"
        request = KernelRequest(device, dtype, q[-1], v[-1], allows_tile_rounding=allows_tile_rounding)
        if op == "ring_attention" and forward is not None and forward.schedule == FusedRing.name:
            forward, backward = _fused_ring_decisions(
                forward, environment.fused_ring_availability(request), environment.message_backend()
            )
        if forward is not None and forward.schedule == FusedRing.name:
            provider = Provider(TRITON_KERNEL.name, "one launch of its kernel computes all steps of a forward")
        else:
            provider = _step_provider(request)
    if op == "context_parallel_decode":
        provider = _decoding_provider(device, dtype, shapes[0], shapes[2][-1])
    tensors = ", ".join(
        f"{name} {list(shape)}" for name, shape in zip(tensor_argument_names()[op], shapes, strict=True)
    )
    dim_text = ("" if dim is None else f", dim={dim}") + ("" if float8 is None else f", float8={float8!r}")
    ranks_text = f"{environment.size} rank{'s' if environment.size != 1 else ''}"
    call = f"{op}({tensors}{dim_text}), {str(dtype).removeprefix('torch.')} on {environment.device_name}, {ranks_text}"
    return Explanation(op, call, forward, backward, provider)


def _fused_ring_decisions(
    decision: ScheduleDecision, availability: Availability, message_backend: str
) -> tuple[ScheduleDecision, ScheduleDecision]:
    """Return the decisions for forward and backward of a fused ring. Without `availability`, forward uses messages."""
    note = availability.reason or "its backward runs step by step"
    message_decision = ScheduleDecision("pipelined", message_backend, f"{decision.reason}, but {note}")
    return (decision if availability else message_decision), message_decision


def _step_provider(request: KernelRequest) -> Provider:
    """Return the kernel for `request`, and the reason for the choice.

    `explain` does not know scores and masks, so the reason names the conditions that they must meet.
    """
    kernel, reason = choose_kernel(request)
    if kernel in (TORCH_CPU_KERNEL, TORCH_CUDA_KERNEL):
        condition = " and a mask of one tile" if request.allows_tile_rounding else ""
        reason += f"; this holds for plain scores{condition}"
    backward_kernel, backward_reason = choose_kernel(replace(request, is_backward=True))
    if backward_kernel is not kernel:
        reason += f"; its backward uses {backward_kernel.name}: {backward_reason}"
    return Provider(kernel.name, reason)


def _decoding_provider(device: torch.device, dtype: torch.dtype, q_shape: Sequence[int], v_head_dim: int) -> Provider:
    num_queries, head_dim = q_shape[1], q_shape[3]
    request = KernelRequest(device, dtype, head_dim, v_head_dim)
    if uses_decode_kernel(request, num_queries):
        return Provider("triton", "its split-KV kernel computes the queries of all sequences in one launch")
    if num_queries <= MAX_DECODE_QUERIES:
        return Provider("torch", f"for up to {MAX_DECODE_QUERIES} queries matmuls read the cache once")
    return _step_provider(request)


# -- keys for dispatch ------------------------------------------------------------------------------------------------


@cache
def explained_ops() -> dict[str, tuple[Op[Any], tuple[str, ...]]]:
    """Map the name of each public function to its op and the names of the parameters of its `make_example_args`.

    The parameters, without the group size, are the tensors whose shapes `explain` accepts, and `dim`. The map is built
    at first use: at import, some ops are not defined yet.
    """
    ops = {}
    for op in all_ops().values():
        if op.make_example_args is not None:
            # Ulysses attention is dispatched by the key of its first all-to-all.
            name = "ulysses_attention" if op is SEQUENCE_TO_HEADS else op.name
            ops[name] = op, tuple(inspect.signature(op.make_example_args).parameters)[1:]
    return dict(sorted(ops.items()))


# Op by name of the function that calls it with float8=, and a function that builds its arguments, like
# `make_example_args` with the recipe.
FLOAT8_OPS: dict[str, tuple[Op[Any], Callable[[int, str, Tensor, Tensor], Any]]] = {
    "all_gather_matmul": (FLOAT8_COLUMN_MATMUL, partial(example_float8_column, 0)),
    "column_parallel_matmul": (FLOAT8_COLUMN_MATMUL, partial(example_float8_column, None)),
    "matmul_reduce_scatter": (FLOAT8_ROW_MATMUL, partial(example_float8_row, 0)),
    "matmul_all_reduce": (FLOAT8_ROW_MATMUL, partial(example_float8_row, None)),
}


def tensor_argument_names() -> dict[str, tuple[str, ...]]:
    """Names of the tensors whose shapes `explain` accepts, by op."""
    return {name: tuple(name for name in names if name != "dim") for name, (_, names) in explained_ops().items()}


def dispatch_keys(
    op: str, shapes: Sequence[Any], dtype: torch.dtype, dim: Any, size: int, float8: str | None = None
) -> tuple[ScheduleKey | None, ...]:
    """Return the dispatch keys of forward and backward of `op` for tensors of `shapes` on each rank.

    Raises the same errors as `explain`.
    """
    if op == "context_parallel_attention":
        raise ValueError(
            "context_parallel_attention runs ulysses_attention over one dim of its mesh and ring_attention over the "
            "other. Call explain for each of the two, with the group of its dim."
        )
    if op not in explained_ops():
        raise ValueError(f"op is {op!r}; it must be one of {', '.join(explained_ops())}.")
    requested_op, names = explained_ops()[op][0], tensor_argument_names()[op]
    if len(shapes) != len(names):
        raise ValueError(f"{op} needs {len(names)} shapes ({', '.join(names)}), got {len(shapes)}.")
    for name, shape in zip(names, shapes, strict=True):
        if not isinstance(shape, (list, tuple)) or any(isinstance(n, bool) or not isinstance(n, int) for n in shape):
            raise TypeError(f"The shape of {name} must be a sequence of ints, not {shape!r}.")
        if not shape or any(n < 0 for n in shape):
            raise ValueError(
                f"The shape of {name} is {tuple(shape)}; it needs at least one dim and no negative length."
            )
    tensors: list[Any] = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
    if dim is not None:
        ops_with_dim = [name for name, (_, parameters) in explained_ops().items() if "dim" in parameters]
        if op not in ops_with_dim:
            raise ValueError(f"dim={dim!r} is supported for {', '.join(ops_with_dim)}, not for {op}; omit dim.")
        tensors.append(normalize_dim("dim", dim, names[0], tensors[0]))
    check_tensor(names[0], tensors[0], min_dims=2 if "scatter" in op or op.startswith("all_gather_") else 1)
    if "grouped" in op:
        x, weight = tensors
        checked_grouped(names[0], x, weight, *make_example_routing(x, weight))
    elif names[-1] == "weight":
        check_linear(names[0], tensors[0], tensors[1], None)
    if float8 is not None:
        if op not in FLOAT8_OPS:
            raise ValueError(f"float8={float8!r} is supported for {', '.join(FLOAT8_OPS)}, not for {op}; omit float8.")
        check_float8(float8, names[0], tensors[0])
        requested_op, make_args = FLOAT8_OPS[op]
        args = make_args(size, float8, *tensors)
    else:
        assert requested_op.make_example_args is not None
        args = requested_op.make_example_args(size, *tensors)
    return requested_op.key and requested_op.key(args), requested_op.backward_key and requested_op.backward_key(args)
