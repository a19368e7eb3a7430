"""Check every family of GPU kernels against fp64, with ranks as threads of one GPU.

Calls of a case follow each other without a barrier, with ranks that are late at random; the same call again must give
the same bits, and all ranks the same where they hold the same thing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fused_tp.benchmarks.local_ranks import LocalRank, run_local
from fused_tp.selftest.kernel_calls import (
    ATTENTION,
    COPIED,
    DIRECT,
    FEW_SHAPES,
    NATIVE,
    RINGS,
    SHAPES,
    SUMS,
    Call,
    Shape,
    error_of,
    make_call,
    prepared,
)

CYCLES_PER_MS = 2_000_000  # of `torch.cuda._sleep`, about
CASE_SECONDS = 60.0
ALONE = "one rank"


@dataclass(frozen=True)
class Case:
    """Calls of one op by `world` ranks.

    Attributes:
        group: of cases that one step of the selftest checks.
        shapes: of the calls, in turn.
        repeats: how often all of them are made.
        late: ranks that are late at random.
    """

    group: str
    op: str
    world: int
    dtype: torch.dtype
    shapes: tuple[Shape, ...]
    repeats: int = 1
    late: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.op}, {self.world} rank{'s'[: self.world > 1]}, {dtype}{', late' * bool(self.late)}"

    @property
    def compiled_ahead(self) -> bool:
        """True if Triton's kernels of it can be named without a GPU; copy engines need their driver to begin a call."""
        return self.op not in COPIED + NATIVE


def _cases() -> tuple[Case, ...]:
    bf16, every, few = torch.bfloat16, tuple(SHAPES), tuple(FEW_SHAPES)
    groups = {"sums": SUMS, "gathers": (*DIRECT, *COPIED), "rings": RINGS, "collectives": NATIVE}
    found = [Case("attention", op, 1, dtype, few) for op in ATTENTION for dtype in (bf16, torch.float32)]
    # Nobody waits for another there, so that a tool may run one kernel after the other.
    found += [Case(ALONE, op, 1, bf16, few) for op in (*ATTENTION, *SUMS, *DIRECT, *RINGS, *NATIVE)]
    for group, ops in groups.items():
        found += [Case(f"{group}, 2 ranks", op, 2, bf16, every) for op in ops]
        found += [Case(f"{group}, 2 ranks", op, 2, bf16, every, 3, late=(1,)) for op in ops]
        found += [Case(f"{group}, 4 ranks", op, 4, bf16, few, 4, late=(0, 2)) for op in ops]
        found += [Case(f"{group}, 3 ranks and other dtypes", op, 3, bf16, few) for op in ops]
        for dtype in (torch.float16, torch.float32):
            found += [Case(f"{group}, 3 ranks and other dtypes", op, 2, dtype, few) for op in ops]
    return tuple(found)


CASES = _cases()
GROUPS = tuple(dict.fromkeys(case.group for case in CASES))


def check(case: Case, device: torch.device) -> str:
    """Say what is wrong with a case on `device`; empty: nothing."""
    try:
        problems = run_local(case.world, _check, case, device=device, timeout=CASE_SECONDS)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return next((f"on rank {rank} {problem}" for rank, problem in enumerate(problems) if problem), "")


def _calls(rank: LocalRank, case: Case) -> list[Call]:
    return [make_call(rank, case.op, shape, case.dtype, seed) for seed, shape in enumerate(case.shapes)]


def _check(rank: LocalRank, case: Case) -> str:
    draw = random.Random(rank.rank)
    calls = _calls(rank, case)
    workspace = prepared(rank, case.op, calls)
    results: list[list[Tensor]] = []
    for call in calls * case.repeats:
        if rank.rank in case.late and rank.device.type == "cuda" and draw.random() < 0.6:
            torch.cuda._sleep(int(draw.random() * 2 * CYCLES_PER_MS))
        results.append(call.launch(workspace))
    rank.synchronize()
    problem = _problem(calls, results, None if workspace is None else workspace.expired())
    everyone = rank.exchange(results)
    for number, call in enumerate(calls):
        if call.everywhere and not problem and not all(map(torch.equal, results[number], everyone[0][number])):
            problem = f"call {number} gave other bits than on rank 0"
    return problem


def _problem(calls: Sequence[Call], results: Sequence[list[Tensor]], expired: object) -> str:
    if expired is not None:
        return str(expired)
    for number, (call, found) in enumerate(zip(calls, results, strict=False)):
        if problem := error_of(call, found):
            return f"call {number}: {problem}"
    for number, found in enumerate(results):
        first = results[number % len(calls)]
        if not all(map(torch.equal, first, found)):
            return f"call {number % len(calls)} gave other bits when it was repeated"
    return ""


def launch_only(case: Case) -> None:
    """Make the launches of a case on tensors of the CPU, in `kernel_cache.recorded`."""
    run_local(case.world, _launch, case, timeout=CASE_SECONDS)


def _launch(rank: LocalRank, case: Case) -> None:
    calls = _calls(rank, case)
    workspace = prepared(rank, case.op, calls)
    with rank.in_turn():
        for call in calls:
            call.launch(workspace)


def check_all(groups: Sequence[str], device: torch.device, say: Callable[[str], None]) -> list[tuple[str, str]]:
    """(name, problem or empty) of the cases of `groups`, each said as it is found."""
    found = []
    for case in CASES:
        if case.group in groups:
            problem = check(case, device)
            say(f"{'WRONG' if problem else 'right'}  {case.name}{': ' * bool(problem)}{problem}")
            found.append((case.name, problem))
    return found


def one_call(case: Case) -> Case:
    """The same with its first shape alone."""
    return replace(case, shapes=case.shapes[:1])
