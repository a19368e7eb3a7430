"""Check every family of GPU kernels against fp64, with ranks as threads of one GPU.

Calls of a case follow each other without a barrier, with ranks that are late at random; the same call again must give
the same bits, and all ranks the same where they hold the same thing.
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
CASE_SECONDS = 45.0
WAIT_SECONDS = 8.0  # of a kernel, for a peer
COSTLY_SECONDS = 6.0  # a case that is wrong after more than this has waited
ALONE = "one rank"
OTHER_NUMBERS = 10  # added to a seed it gives other numbers under the same mask (`kernel_calls`)


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
        """True if it has kernels of Triton's."""
        return self.op not in NATIVE


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


class Verdict(NamedTuple):
    """What came of a case.

    Attributes:
        problem: what is wrong; empty: nothing.
        raised: an error, behind which nothing that this process does on the GPU proves anything.
        seconds: that it took.
    """

    problem: str
    raised: bool = False
    seconds: float = 0.0


def check(case: Case, device: torch.device) -> str:
    """Say what is wrong with a case on `device`; empty: nothing."""
    return judge(case, device).problem


def judge(case: Case, device: torch.device) -> Verdict:
    """Check a case on `device`."""
    begun = time.monotonic()
    # Who is alone waits for nobody, and may be watched by a tool that makes all of it slower.
    seconds = 4 * CASE_SECONDS if case.group == ALONE else CASE_SECONDS
    try:
        problems = run_local(case.world, _check, case, device=device, timeout=seconds)
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return Verdict(text, True, time.monotonic() - begun)
    problem = next((f"on rank {rank} {problem}" for rank, problem in enumerate(problems) if problem), "")
    return Verdict(problem, False, time.monotonic() - begun)


def _calls(rank: LocalRank, case: Case) -> list[Call]:
    """Calls of each shape, and the same with other numbers where they are repeated: what a call has left in a workspace
    must not be right for the next of its shape."""
    turns = range(min(2, case.repeats))
    return [
        make_call(rank, case.op, shape, case.dtype, OTHER_NUMBERS * turn + seed)
        for turn in turns
        for seed, shape in enumerate(case.shapes)
    ]


def _check(rank: LocalRank, case: Case) -> str:
    draw = random.Random(rank.rank)
    calls = _calls(rank, case)
    # The calls that are made; those with the same numbers follow each other as far apart as can be.
    made = [number % len(calls) for number in range(len(case.shapes) * case.repeats)]
    wanted = [call.reference() for call in calls]
    workspace = prepared(rank, case.op, calls[: len(case.shapes)], WAIT_SECONDS)
    poison([calls[number] for number in made], [wanted[number] for number in made], case.dtype)
    rank.barrier()
    results: list[list[Tensor]] = []
    for number in made:
        if rank.rank in case.late and rank.device.type == "cuda" and draw.random() < 0.6:
            torch.cuda._sleep(int(draw.random() * 2 * CYCLES_PER_MS))
        results.append(calls[number].launch(workspace))
    rank.synchronize()
    problem = _problem(calls, wanted, made, results, None if workspace is None else workspace.expired())
    everyone = rank.exchange(results)
    for number, call in enumerate(calls):
        if call.everywhere and not problem and not all(map(torch.equal, results[number], everyone[0][number])):
            problem = f"call {number} gave other bits than on rank 0"
    return problem


def _problem(
    calls: Sequence[Call],
    wanted: Sequence[Sequence[Tensor]],
    made: Sequence[int],
    results: Sequence[list[Tensor]],
    expired: object,
) -> str:
    if expired is not None:
        return str(expired)
    for number, (call, found) in enumerate(zip(calls, results, strict=False)):
        if problem := error_of(call, found, wanted[number]):
            return f"call {number}: {problem}"
    for number, found in zip(made, results, strict=True):
        if not all(map(torch.equal, results[number], found)):
            return f"call {number} gave other bits when it was repeated"
    return ""


def poison(calls: Sequence[Call], wanted: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> None:
    """Fill with NaN the memory that the results of `calls` will take: it is there then, and nothing is right by chance.

    It holds what calls of a rehearsal have left. And taking memory from the device may wait for a kernel of this rank,
    which waits for a peer.
    """
    nan = float("nan")
    taken = [
        torch.full_like(result, nan, dtype=torch.float32 if call.lse and number == 1 else dtype)
        for call, results in zip(calls, wanted, strict=True)
        for number, result in enumerate(results)
    ]
    del taken


def launch_only(case: Case) -> None:
    """Make the launches of a case on tensors of the CPU, in `kernel_cache.recorded`."""
    run_local(case.world, _launch, replace(case, repeats=1), timeout=CASE_SECONDS)


def _launch(rank: LocalRank, case: Case) -> None:
    calls = _calls(rank, case)
    workspace = prepared(rank, case.op, calls)
    with rank.in_turn():
        for call in calls:
            call.launch(workspace)


def one_call(case: Case) -> Case:
    """The same with its first shape alone."""
    return replace(case, shapes=case.shapes[:1])
