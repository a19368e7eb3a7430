"""Check every family of GPU kernels against fp64, with ranks as threads on one GPU.

Calls of a case follow each other without a barrier, and ranks are late at random. A repeated call must return the same
bits, and replicated results must be bitwise equal on all ranks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fused_tp.benchmarks.local_ranks import LocalRank, run_local
from fused_tp.selftest.kernel_calls import (
    ATTENTION_OPS,
    COPY_OPS,
    DIRECT_GATHER_OPS,
    FEW_SHAPES,
    LOSS_OPS,
    NATIVE_OPS,
    RING_OPS,
    SHAPES,
    SUM_OPS,
    RankCall,
    Shape,
    error_of,
    make_call,
    make_workspace,
)

CYCLES_PER_MS = 2_000_000  # approximate cycles of `torch.cuda._sleep`
CASE_SECONDS = 45.0
WAIT_SECONDS = 8.0  # deadline of a kernel that waits for a peer
COSTLY_SECONDS = 6.0  # a wrong case that took longer has probably timed out in a wait
ONE_RANK_GROUP = "one rank"
SEED_OFFSET = 10  # added to a seed: other random numbers, but the same mask, which depends on the seed modulo 5 or 2


@dataclass(frozen=True)
class KernelCase:
    """Calls of one op by `world` ranks.

    Attributes:
        group: name of the selftest step that checks the case.
        shapes: shapes of the calls, in order.
        repeats: number of passes over all shapes.
        late_ranks: ranks that sleep at random before a call.
    """

    group: str
    op: str
    world: int
    dtype: torch.dtype
    shapes: tuple[Shape, ...]
    repeats: int = 1
    late_ranks: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.op}, {self.world} rank{'s'[: self.world > 1]}, {dtype}{', late' * bool(self.late_ranks)}"

    @property
    def is_compiled_ahead(self) -> bool:
        """True if the op has Triton kernels, which can be compiled before the selftest runs."""
        return self.op not in NATIVE_OPS


def _make_cases() -> tuple[KernelCase, ...]:
    bf16, all_shapes, few_shapes = torch.bfloat16, tuple(SHAPES), tuple(FEW_SHAPES)
    groups = {"sums": SUM_OPS, "gathers": (*DIRECT_GATHER_OPS, *COPY_OPS), "rings": RING_OPS, "collectives": NATIVE_OPS}
    cases = [
        KernelCase(group, op, 1, dtype, few_shapes)
        for group, ops in (("attention", ATTENTION_OPS), ("loss", LOSS_OPS))
        for op in ops
        for dtype in (bf16, torch.float32)
    ]
    # A single rank waits for no peer, so these cases also run under tools that serialize kernels.
    cases += [
        KernelCase(ONE_RANK_GROUP, op, 1, bf16, few_shapes)
        for op in (*ATTENTION_OPS, *LOSS_OPS, *SUM_OPS, *DIRECT_GATHER_OPS, *RING_OPS, *NATIVE_OPS)
    ]
    for group, ops in groups.items():
        cases += [KernelCase(f"{group}, 2 ranks", op, 2, bf16, all_shapes) for op in ops]
        cases += [KernelCase(f"{group}, 2 ranks", op, 2, bf16, all_shapes, 3, late_ranks=(1,)) for op in ops]
        cases += [KernelCase(f"{group}, 4 ranks", op, 4, bf16, few_shapes, 4, late_ranks=(0, 2)) for op in ops]
        cases += [KernelCase(f"{group}, 3 ranks and other dtypes", op, 3, bf16, few_shapes) for op in ops]
        for dtype in (torch.float16, torch.float32):
            cases += [KernelCase(f"{group}, 3 ranks and other dtypes", op, 2, dtype, few_shapes) for op in ops]
    return tuple(cases)


CASES = _make_cases()
GROUPS = tuple(dict.fromkeys(case.group for case in CASES))


class CaseResult(NamedTuple):
    """Result of checking a case.

    Attributes:
        problem: description of the problem; "" if there is none.
        has_raised: True if an error was raised; later GPU results of this process are then unreliable.
        seconds: duration of the case.
    """

    problem: str
    has_raised: bool = False
    seconds: float = 0.0


def check(case: KernelCase, device: torch.device) -> str:
    """Check a case on `device`; return a description of the problem, or ""."""
    return run_case(case, device).problem


def run_case(case: KernelCase, device: torch.device) -> CaseResult:
    """Check a case on `device` and return its result."""
    start_seconds = time.monotonic()
    # A single rank may run under a tool such as compute-sanitizer, which slows it down.
    timeout_seconds = 4 * CASE_SECONDS if case.group == ONE_RANK_GROUP else CASE_SECONDS
    try:
        problems = run_local(case.world, _check_on_rank, case, device=device, timeout=timeout_seconds)
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return CaseResult(text, True, time.monotonic() - start_seconds)
    problem = next((f"on rank {rank} {problem}" for rank, problem in enumerate(problems) if problem), "")
    return CaseResult(problem, False, time.monotonic() - start_seconds)


def _make_calls(rank: LocalRank, case: KernelCase) -> list[RankCall]:
    """Build one call per shape and, if the case repeats, a second one with other random numbers.

    Stale data of a call in the workspace then cannot produce a correct result of the next call with the same shape.
    """
    repetitions = range(min(2, case.repeats))
    return [
        make_call(rank, case.op, shape, case.dtype, SEED_OFFSET * repetition + seed)
        for repetition in repetitions
        for seed, shape in enumerate(case.shapes)
    ]


def _check_on_rank(rank: LocalRank, case: KernelCase) -> str:
    random_generator = random.Random(rank.rank)
    calls = _make_calls(rank, case)
    # Order of the calls: repetitions of a call are as far apart as possible.
    call_order = [call_index % len(calls) for call_index in range(len(case.shapes) * case.repeats)]
    references = [call.reference() for call in calls]
    workspace = make_workspace(rank, case.op, calls[: len(case.shapes)], WAIT_SECONDS)
    poison(
        [calls[call_index] for call_index in call_order],
        [references[call_index] for call_index in call_order],
        case.dtype,
    )
    rank.barrier()
    results: list[list[Tensor]] = []
    for call_index in call_order:
        if rank.rank in case.late_ranks and rank.device.type == "cuda" and random_generator.random() < 0.6:
            torch.cuda._sleep(int(random_generator.random() * 2 * CYCLES_PER_MS))
        results.append(calls[call_index].launch(workspace))
    rank.synchronize()
    problem = _find_problem(
        calls, references, call_order, results, None if workspace is None else workspace.expired_wait()
    )
    results_of_ranks = rank.exchange(results)
    for call_index, call in enumerate(calls):
        if (
            call.is_replicated
            and not problem
            and not all(map(torch.equal, results[call_index], results_of_ranks[0][call_index]))
        ):
            problem = f"call {call_index} returned different bits than on rank 0"
    return problem


def _find_problem(
    calls: Sequence[RankCall],
    references: Sequence[Sequence[Tensor]],
    call_order: Sequence[int],
    results: Sequence[list[Tensor]],
    timeout_message: object,
) -> str:
    if timeout_message is not None:
        return str(timeout_message)
    for call_index, (call, result) in enumerate(zip(calls, results, strict=False)):
        if problem := error_of(call, result, references[call_index]):
            return f"call {call_index}: {problem}"
    for call_index, result in zip(call_order, results, strict=True):
        if not all(map(torch.equal, results[call_index], result)):
            return f"call {call_index} returned different bits when repeated"
    return ""


def poison(calls: Sequence[RankCall], references: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> None:
    """Fill the memory that torch's allocator will reuse for the results of `calls` with NaN.

    Otherwise this memory may hold correct results of the warm-up. Allocating it here also avoids allocations during the
    calls, which could deadlock: they may wait for a kernel of this rank, which waits for a peer.
    """
    nan = float("nan")
    nan_tensors = [
        torch.full_like(result, nan, dtype=torch.float32 if call.has_lse and result_index == 1 else dtype)
        for call, results in zip(calls, references, strict=True)
        for result_index, result in enumerate(results)
    ]
    del nan_tensors


def launch_only(case: KernelCase) -> None:
    """Launch the kernels of a case on CPU tensors; call this inside `kernel_cache.record_launches`."""
    run_local(case.world, _launch_on_rank, replace(case, repeats=1), timeout=CASE_SECONDS)


def _launch_on_rank(rank: LocalRank, case: KernelCase) -> None:
    calls = _make_calls(rank, case)
    workspace = make_workspace(rank, case.op, calls)
    with rank.in_turn():
        for call in calls:
            call.launch(workspace)


def keep_first_shape(case: KernelCase) -> KernelCase:
    """Return the case with its first shape only."""
    return replace(case, shapes=case.shapes[:1])
