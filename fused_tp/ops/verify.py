"""Verify the schedules of a group on the current machine: every op is compared with float64, in several situations.

    values    results and gradients of two sets of inputs equal the float64 reference, up to rounding
    again     bitwise equal to the first results in many calls with alternating inputs: no stale data is read
    late      the same, while each rank in turn is late
    during    the same, while torch.distributed runs another collective
    graph     the same, captured in a CUDA graph and replayed with other inputs (GPUs only)

Bitwise differences between calls are allowed if the plain schedule also has them. For ops whose result is equal on all
ranks, the bits are also compared between ranks.

Each rank generates the inputs of all ranks, and computes the float64 reference from them. So the reference does not
depend on any schedule.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fused_tp.backends.autotune import (
    REPLICATED_OPS,
    describe_difference,
    known_problem,
    record_problems,
    record_verified,
    tensor_checksum,
    usable_schedules,
)
from fused_tp.core import settings
from fused_tp.core.errors import FusedTPError
from fused_tp.core.group import GroupLike, resolve_group
from fused_tp.core.store import exchange
from fused_tp.ops import collectives
from fused_tp.ops.all_gather_matmul import all_gather_matmul
from fused_tp.ops.matmul_all_reduce import matmul_all_reduce
from fused_tp.ops.matmul_all_reduce_rms_norm import matmul_all_reduce_rms_norm
from fused_tp.ops.matmul_reduce_scatter import matmul_reduce_scatter
from fused_tp.ops.ring_attention import ring_attention

LATE_SECONDS = 0.02
LATE_CYCLES = 20_000_000  # GPU cycles
CONCURRENT_ELEMENTS = 1 << 18
EPS = 1e-6
HEAD_DIM = 64
_STARTED_PROBLEM = "a check of this op was started and never finished; delete this line to check it again"

TensorsByRank = list[list[Tensor]]


class Example(NamedTuple):
    """An op to verify, with its sizes.

    Attributes:
        op: name of the op.
        run: maps (*inputs, group=group) to the results of this rank.
        compute_reference: maps the inputs of all ranks to the results of all ranks; differentiable.
        shapes: shapes of the inputs of each rank.
        replicated_indices: indices of the inputs that are equal on all ranks.
        has_one_result: True if the result and its gradient are equal on all ranks.
    """

    op: str
    run: Callable[..., Any]
    compute_reference: Callable[[TensorsByRank], TensorsByRank]
    shapes: Sequence[Sequence[tuple[int, ...]]]
    replicated_indices: frozenset[int] = frozenset()
    has_one_result: bool = False


class OpVerdict(NamedTuple):
    """Result of verifying an op on a schedule; `problem` is empty if the op is correct."""

    schedule: str
    op: str
    dtype: torch.dtype
    problem: str


def verify(
    group: GroupLike,
    device: torch.device,
    dtype: torch.dtype,
    sizes: Sequence[tuple[int, int, int]],
    *,
    num_calls: int = 100,
) -> Iterator[OpVerdict]:
    """Verify each op on each schedule that the group supports, the plain ones first. A collective call.

    Failures are saved in the file of `FUSED_TP_AUTOTUNE`, which must be set. The autotuner does not choose a failed
    schedule, and `verify` does not check it again until its line is deleted. Successes are saved, too: between GPUs
    with NVLink, the autotuner then measures these schedules even if the variable is not set. A check during which the
    process exits counts as failed.

    Args:
        sizes: (m, k, n) of matmuls: rows over all ranks, features of x per rank, columns of y per rank.
        num_calls: minimum number of calls for each op, size and schedule.

    Raises:
        ValueError: the group has one rank.

    Example:
        for verdict in verify(dist.group.WORLD, torch.device("cuda"), torch.bfloat16, [(4096, 4096, 1024)]):
            print(verdict)
    """
    group_info = resolve_group(group)
    ranks = list(group_info.ranks)
    if len(ranks) == 1:
        raise ValueError("The group has one rank, so there is no communication to verify. Pass at least two ranks.")
    # A failed check may leave its group unusable, so checks use new groups: one for the ops, and one for the concurrent
    # collectives.
    op_group, concurrent_group = dist.new_group(ranks), dist.new_group(ranks)
    examples: dict[str, list[Example]] = {}
    for example in (example for size in sizes for example in make_examples(len(ranks), *size)):
        examples.setdefault(example.op, []).append(example)
    for op, op_examples in examples.items():
        bits_may_differ = False
        input_sets = [
            [_make_inputs(example, group_info.rank, group_info.size, device, dtype, seed) for seed in (1, 2)]
            for example in op_examples
        ]
        for schedule in usable_schedules(op, dtype, device, resolve_group(op_group)):
            check_key, problem = (schedule, op, dtype), ""
            if known_failure := known_problem(group_info, device, *check_key):
                yield OpVerdict(schedule, op, dtype, known_failure)
                continue
            record_problems(group_info, device, {check_key: _STARTED_PROBLEM})
            for example, inputs in zip(op_examples, input_sets, strict=True):
                try:
                    report = _check_example(schedule, example, inputs, op_group, concurrent_group, device, num_calls)
                except KeyboardInterrupt:  # interrupted by the user: not a failure of the schedule
                    record_problems(group_info, device, {check_key: ""})
                    raise
                # Ranks that wait for a failed rank arrive here later than that rank, by up to the timeout.
                longer_timeout = {"FUSED_TP_TIMEOUT": str(3 * settings.timeout_seconds())}
                with settings.override_environment(longer_timeout):
                    reports = exchange(group_info, f"check of {op} on {schedule}", report)
                bits_may_differ |= schedule == "plain" and any(report["other_bits"] for report in reports)
                problem = problem or _find_problem(reports, op in REPLICATED_OPS, bits_may_differ)
                if any(report["unusable"] for report in reports):
                    op_group, concurrent_group = dist.new_group(ranks), dist.new_group(ranks)
                    break
            backward = {(schedule, f"{op}_backward", dtype): problem} if problem else {}
            record_problems(group_info, device, {check_key: problem, **backward})
            if not problem:
                record_verified(group_info, device, [check_key, (schedule, f"{op}_backward", dtype)])
            yield OpVerdict(schedule, op, dtype, problem)


def _find_problem(reports: Sequence[dict[str, Any]], is_replicated: bool, bits_may_differ: bool) -> str:
    for kind in ("unusable", "wrong", *([] if bits_may_differ else ["other_bits"])):
        for rank, report in enumerate(reports):
            if report[kind]:
                return f"on rank {rank} {report[kind]}"
    if is_replicated and not bits_may_differ and len({tuple(report["bits"]) for report in reports}) > 1:
        return "ranks hold different bits"
    return ""


class _InputSet(NamedTuple):
    inputs: list[Tensor]
    grads: list[Tensor]
    expected: list[Tensor]  # results and gradients


def _check_example(
    schedule: str,
    example: Example,
    input_sets: Sequence[_InputSet],
    group: dist.ProcessGroup,
    concurrent_group: dist.ProcessGroup,
    device: torch.device,
    num_calls: int,
) -> dict[str, Any]:
    """Check one example on this rank, and return its report.

    A wrong result does not end the check, because peers continue with their calls.
    """
    report: dict[str, Any] = {"unusable": "", "wrong": "", "other_bits": "", "bits": []}
    try:
        with settings.override_environment({"FUSED_TP_SCHEDULE": schedule}):
            first_results = [_run_with_gradients(example, input_set, group) for input_set in input_sets]
            for results_and_grads, input_set in zip(first_results, input_sets, strict=True):
                report["wrong"] = report["wrong"] or describe_difference(results_and_grads, input_set.expected)
            num_results = len(input_sets[0].grads)
            report["bits"] = [
                tensor_checksum(t) for results_and_grads in first_results for t in results_and_grads[:num_results]
            ]
            for situation, repeated_results in _situations(
                example, input_sets, group, concurrent_group, device, num_calls
            ):
                for set_index, results_and_grads in repeated_results:
                    if not all(map(torch.equal, results_and_grads, first_results[set_index])):
                        difference = describe_difference(results_and_grads, first_results[set_index])
                        kind = "wrong" if difference else "other_bits"
                        report[kind] = report[kind] or f"{difference or 'different bits'} {situation}"
    except Exception as error:
        report["unusable"] = f"{type(error).__name__}: {error}"
        if not isinstance(error, FusedTPError):
            report["unusable"] = report["unusable"].splitlines()[0]
    return report


RepeatedResults = Iterator[tuple[int, list[Tensor]]]


def _situations(
    example: Example,
    input_sets: Sequence[_InputSet],
    group: dist.ProcessGroup,
    concurrent_group: dist.ProcessGroup,
    device: torch.device,
    num_calls: int,
) -> Iterator[tuple[str, RepeatedResults]]:
    """Yield (situation, iterator over calls in this situation), for each situation of the module's docstring.

    The iterator yields (index of the input set, results and gradients) of each call.
    """

    def call_repeatedly() -> RepeatedResults:
        for call_index in range(num_calls):
            yield call_index % 2, _run_with_gradients(example, input_sets[call_index % 2], group)

    def call_with_late_rank() -> RepeatedResults:
        for call_index, rank in enumerate(range(group.size())):
            if rank == group.rank():
                time.sleep(LATE_SECONDS)  # first the host is late, then the device
                if device.type == "cuda":
                    torch.cuda._sleep(LATE_CYCLES)
            yield call_index % 2, _run_with_gradients(example, input_sets[call_index % 2], group)

    def call_during_collective() -> RepeatedResults:
        operand = torch.ones(CONCURRENT_ELEMENTS, dtype=torch.float32, device=device)
        for call_index in range(4):
            work = dist.all_reduce(operand, group=concurrent_group, async_op=True)
            results_and_grads = _run_with_gradients(example, input_sets[call_index % 2], group)
            assert work is not None
            work.wait()
            yield call_index % 2, results_and_grads

    def replay_graph() -> RepeatedResults:
        static_set = _InputSet([x.clone() for x in input_sets[0].inputs], input_sets[0].grads, [])
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            results = _to_list(example.run(*static_set.inputs, group=group))
        for call_index in range(6):
            for static_input, new_input in zip(static_set.inputs, input_sets[call_index % 2].inputs, strict=True):
                static_input.copy_(new_input)
            graph.replay()
            # The graph computes no gradients. A call outside of the graph does, and also tests calls between replays.
            gradients = _run_with_gradients(example, input_sets[call_index % 2], group)[len(results) :]
            yield call_index % 2, [*(t.clone() for t in results), *gradients]

    yield "in a later call", call_repeatedly()
    yield "with a late rank", call_with_late_rank()
    yield "during another collective of torch.distributed", call_during_collective()
    if device.type == "cuda":
        yield "in a CUDA graph", replay_graph()


def _run_with_gradients(example: Example, input_set: _InputSet, group: dist.ProcessGroup) -> list[Tensor]:
    """Run the example; return its results and gradients."""
    leaves = [x.detach().requires_grad_() for x in input_set.inputs]
    results = _to_list(example.run(*leaves, group=group))
    return [*(t.detach() for t in results), *torch.autograd.grad(results, leaves, input_set.grads)]


def _to_list(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def _make_inputs(
    example: Example, rank: int, world_size: int, device: torch.device, dtype: torch.dtype, seed: int
) -> _InputSet:
    """Generate the inputs and output gradients of `rank`, and compute their float64 reference."""

    def draw(shape: Sequence[int], *stream: int) -> Tensor:
        stream_seed = 0
        for part in (seed, *stream):
            stream_seed = 1009 * stream_seed + part
        rng = torch.Generator().manual_seed(stream_seed)
        return torch.randn(shape, generator=rng, dtype=torch.float32, device="cpu").to(device, dtype)

    inputs = [
        [draw(shape, 1, 0 if i in example.replicated_indices else peer, i) for i, shape in enumerate(shapes)]
        for peer, shapes in enumerate(example.shapes)
    ]
    fp64_inputs: TensorsByRank = []
    for peer_tensors in inputs:
        replicated_inputs = {i: fp64_inputs[0][i] for i in example.replicated_indices} if fp64_inputs else {}
        fp64_inputs.append(
            [
                replicated_inputs[i] if i in replicated_inputs else x.double().requires_grad_()
                for i, x in enumerate(peer_tensors)
            ]
        )
    results = example.compute_reference(fp64_inputs)
    grads = [
        [draw(t.shape, 2, 0 if example.has_one_result else peer, i) for i, t in enumerate(peer_tensors)]
        for peer, peer_tensors in enumerate(results)
    ]
    counted_ranks = range(1) if example.has_one_result else range(world_size)  # a replicated result counts once
    terms = [(t * g.double()).sum() for peer in counted_ranks for t, g in zip(results[peer], grads[peer], strict=True)]
    expected = [*(t.detach() for t in results[rank]), *torch.autograd.grad(torch.stack(terms).sum(), fp64_inputs[rank])]
    return _InputSet(inputs[rank], grads[rank], [t.to(dtype) for t in expected])


def make_examples(world_size: int, m: int, k: int, n: int) -> list[Example]:
    """Return the examples of all verified ops for one size; `m`, `k`, `n` are as in `verify`."""
    max_rows_per_rank = -(-m // world_size)
    row_counts = [min(max_rows_per_rank, max(0, m - rank * max_rows_per_rank)) for rank in range(world_size)]

    def reference_gather(ranks: TensorsByRank) -> TensorsByRank:
        x = torch.cat([x for x, *_ in ranks])
        return [[x @ weights[0].t() if weights else x] for _, *weights in ranks]

    def reference_sum(ranks: TensorsByRank) -> Tensor:
        return torch.stack([x @ weights[0].t() if weights else x for x, *weights in ranks]).sum(0)

    def reference_scatter(ranks: TensorsByRank) -> TensorsByRank:
        return [[shard] for shard in reference_sum(ranks).split(row_counts)]

    def reference_reduce(ranks: TensorsByRank) -> TensorsByRank:
        return [[reference_sum(ranks)]] * world_size

    def reference_norm(ranks: TensorsByRank) -> TensorsByRank:
        residual = reference_sum(ranks) + ranks[0][2]
        scale = (residual.square().mean(-1, keepdim=True) + EPS).rsqrt()
        return [[residual * scale * ranks[0][3], residual]] * world_size

    def reference_attention(ranks: TensorsByRank) -> TensorsByRank:
        q, keys, values = (torch.cat(shards, 1).transpose(1, 2) for shards in zip(*ranks, strict=True))
        out = torch.nn.functional.scaled_dot_product_attention(q, keys, values, is_causal=True).transpose(1, 2)
        return [[shard] for shard in out.split(max_rows_per_rank, 1)]

    gather = partial(all_gather_matmul, gather_size=m)
    norm = partial(matmul_all_reduce_rms_norm, eps=EPS)
    attend = partial(ring_attention, causal=True, layout="contiguous")
    shard_shapes, column_shapes = [[(num_rows, k), (n, k)] for num_rows in row_counts], [[(m, k), (n, k)]] * world_size
    normed_shapes = [[(m, k), (n, k), (m, n), (n,)]] * world_size
    qkv_shapes = [
        [(1, max_rows_per_rank, max(1, n // HEAD_DIM), HEAD_DIM)] * 3
    ] * world_size  # equal shards: uneven ones need the layout
    gather_rows = partial(collectives.all_gather, dim=0, gather_size=m)
    scatter_rows = partial(collectives.reduce_scatter, dim=0)
    return [
        Example("all_gather_matmul", gather, reference_gather, shard_shapes),
        Example("matmul_reduce_scatter", matmul_reduce_scatter, reference_scatter, column_shapes),
        Example("matmul_all_reduce", matmul_all_reduce, reference_reduce, column_shapes, has_one_result=True),
        Example(
            "matmul_all_reduce_rms_norm", norm, reference_norm, normed_shapes, frozenset({2, 3}), has_one_result=True
        ),
        Example("all_gather", gather_rows, reference_gather, [[(num_rows, k)] for num_rows in row_counts]),
        Example("reduce_scatter", scatter_rows, reference_scatter, [[(m, n)]] * world_size),
        Example("all_reduce", collectives.all_reduce, reference_reduce, [[(m, n)]] * world_size, has_one_result=True),
        Example("ring_attention", attend, reference_attention, qkv_shapes),
    ]
