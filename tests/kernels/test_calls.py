"""Consecutive calls of all fused kernels, also with an absent rank, interpreted, W processes over CPU shared memory.

The calls are those of the GPU tests (tests/gpu/test_fused_kernels.py), with small tiles and a K that differs between
ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton", reason="needs Triton")

from fused_tp.backends.symmetric_memory.symm_mem import allocate_cpu
from fused_tp.core.group import resolve_group
from fused_tp.selftest.kernel_calls import (
    DIRECT_GATHER_OPS,
    RING_OPS,
    SUM_OPS,
    RankCall,
    gather_call,
    ring_call,
    sum_call,
    workspace_class_of,
)
from fused_tp.triton_kernels.comm.signals import Workspace
from fused_tp.triton_kernels.gemm.tiles import GemmConfig, Launch
from tests.gpu.test_fused_kernels import check, right_or_nan
from tests.kernels.ranks import delays, interpreted_ranks, same_everywhere
from tests.kernels.test_ring_processes import small_chunks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OPS = (*SUM_OPS, *DIRECT_GATHER_OPS, *RING_OPS)
ONE_OF_EACH = ("two_shot_norm", "reduce_scatter", "direct", "ring")
CONFIG = GemmConfig(16, 16, 16, num_warps=4, num_stages=1, group_m=2)
SPLIT = GemmConfig(16, 32, 16, num_warps=4, num_stages=1, group_m=2, split_store=True)
NAMES = dict.fromkeys(("reduce_scatter", "products"), "matmul_reduce_scatter")
NAMES |= dict.fromkeys(DIRECT_GATHER_OPS, "all_gather_matmul")
NAMES |= dict.fromkeys(RING_OPS, "ring_attention")

Asked = tuple[str, tuple[int, int, int], torch.dtype, int]  # op, shape, dtype, programs


def made(group: Any, asked: Asked, seed: int) -> RankCall:
    op, shape, dtype, programs = asked
    rank = SimpleNamespace(rank=group.rank(), world_size=group.size(), device=torch.device("cpu"), sms=5)
    if op in RING_OPS:
        return ring_call(rank, op, (shape[0], 2, 8), FP32, seed)
    launch = Launch(programs, CONFIG, strip_elements=128)
    if programs > 2:
        launch = Launch(programs, SPLIT, strip_elements=128, tma_config=SPLIT)
    if op in DIRECT_GATHER_OPS:
        return gather_call(rank, op, shape, dtype, seed, launch)
    return sum_call(rank, op, shape, dtype, seed, launch, uneven=1)


def workspaces(group: Any, asked: list[Asked], calls: list[RankCall]) -> list[Any]:
    """Workspace of each call; calls of the same kind share one."""
    kinds = [workspace_class_of(op) for op, *_ in asked]
    found = {}
    for kind in dict.fromkeys(kinds):
        nbytes = max(call.workspace_nbytes for call, own in zip(calls, kinds, strict=True) if own is kind)
        sizes: list[Any] = [None] * group.size()
        dist.all_gather_object(sizes, nbytes, group=group)
        found[kind] = kind(*allocate_cpu(resolve_group(group), max(sizes)), timeout_seconds=30.0)
    return [found[kind] for kind in kinds]


def in_a_row(group: Any, asked: list[Asked], late_rank: int, first_call: int = 0) -> None:
    """Make consecutive calls, with `late_rank` slow at random points. Results are checked only after the last call,
    because checks would synchronize the ranks."""
    with small_chunks():
        calls = [made(group, one, seed) for seed, one in enumerate(asked)]
        used = workspaces(group, asked, calls)
        # Only sums start at `first_call`: gathers read the numbers of earlier calls.
        first = {workspace: first_call * (type(workspace) is Workspace) for workspace in used}
        for workspace, number in first.items():
            workspace.state[0] = number
        results = []
        for seed, (call, workspace) in enumerate(zip(calls, used, strict=True)):
            with delays(seed, on=group.rank() == late_rank):
                results.append(call.launch(workspace))
    for workspace in first:
        assert workspace.expired_wait() is None and not workspace.state[16:].any()
        assert int(workspace.state[0]) == first[workspace] + sum(other is workspace for other in used)
    for one, call, tensors in zip(asked, calls, results, strict=True):
        check(call, tensors, str(one))
        assert not call.is_replicated or all(same_everywhere(group, tensor) for tensor in tensors), one


SHAPES: list[tuple[tuple[int, int, int], torch.dtype, int]] = [
    ((67, 41, 19), BF16, 2),
    ((1, 16, 7), FP16, 1),  # only one rank has rows
    ((37, 50, 24), FP32, 3),
    ((5, 33, 32), BF16, 3),  # fewer tiles than ranks
]
# Alternating ops with different layouts of flags and slots, then several of each kind.
TURNS = [
    (op, (1 + number % 3 * 8, 12, 7), BF16, 2)
    for number, op in enumerate([*OPS * 2, *SUM_OPS * 2, *DIRECT_GATHER_OPS * 3])
]


@pytest.mark.parametrize(
    ("world_size", "late_rank"),
    [
        pytest.param(2, 1, marks=pytest.mark.full),
        pytest.param(3, 0, marks=pytest.mark.full),
        pytest.param(4, 2, marks=pytest.mark.long),
    ],
)
def test_every_op_at_every_size(world_size: int, late_rank: int) -> None:
    asked = [(op, *one) for one in (SHAPES if world_size < 4 else SHAPES[1:3]) for op in OPS]
    interpreted_ranks(world_size, in_a_row, asked, -1, timeout=200)
    # Call numbers exceed 32 bits.
    interpreted_ranks(world_size, in_a_row, TURNS, late_rank, 2**32 - 5, timeout=200)


def without(group: Any, missing: int, ops: Sequence[str]) -> list[Any]:
    """Error of each op's workspace if rank `missing` does not make the second call; its missing data is NaN."""
    said = []
    for op in ops:
        asked: list[Asked] = [(op, (40, 20, 17), BF16, 2)] * 2
        calls = [made(group, one, 2) for one in asked]  # with mask 2 a ring reads all ranks' keys
        workspace, _ = workspaces(group, asked, calls)
        check(calls[0], calls[0].launch(workspace), op)
        assert workspace.expired_wait() is None
        dist.barrier(group)  # or, on a busy machine, ranks begin the second call further apart than the deadline
        workspace.timeout_ns = int(1e9)
        if group.rank() != missing:
            begun = time.monotonic()
            right_or_nan(calls[1], calls[1].launch(workspace), op)
            took = time.monotonic() - begun
            calls[1].launch(workspace)  # does not wait again, and writes nothing that peers may still read
            assert 0.9 < took < 30 and time.monotonic() - begun < 30  # the deadline, plus time for interpretation
            said.append(workspace.expired_wait())
        dist.barrier(group)  # keep memory that peers may still write to until they are done
    return said


@pytest.mark.parametrize(
    "ops", [ONE_OF_EACH, pytest.param([op for op in OPS if op not in ONE_OF_EACH], marks=pytest.mark.full)]
)
def test_a_missing_rank_is_named_within_the_deadline(ops: Sequence[str]) -> None:
    answers = interpreted_ranks(3, without, 1, ops)
    assert answers[1] == []
    for rank in (0, 2):
        for op, expired in zip(ops, answers[rank], strict=True):
            name = NAMES.get(op, "matmul_all_reduce")
            assert (expired.op, expired.call, expired.rank, expired.absent_ranks) == (name, 2, rank, (1,)), str(expired)
            assert str(expired).startswith(f"{name}, call 2: rank {rank} waited for ")


def alone(_group: Any) -> list[str]:
    """Problems of the selftest's cases on one rank; their bound must accept right results, but not zeros."""
    from fused_tp.selftest import kernels
    from fused_tp.selftest.kernel_calls import attention_call, error_of

    cpu = torch.device("cpu")
    cases = [
        kernels.KernelCase(kernels.ONE_RANK_GROUP, op, 1, BF16, ((48, 8, 8),))
        for op in ("attention", "ring", "cross_entropy")
    ]
    rank = SimpleNamespace(rank=0, world_size=1, device=cpu, sms=5)
    call = attention_call(rank, (48, 8, 128), BF16, 0)
    right = [x.bfloat16() if number != 1 else x.float() for number, x in enumerate(call.reference())]
    for number in range(len(right)):
        assert not error_of(call, right)
        wrong = [torch.zeros_like(x) if at == number else x for at, x in enumerate(right)]
        assert f"of result {number} differ from fp64" in error_of(call, wrong)
    return [kernels.check(case, cpu) for case in cases]


@pytest.mark.full
def test_attention_in_bf16_is_as_exact_as_its_terms_are() -> None:
    """Terms of dq that cancel leave rounding errors, which exceed dq itself in rows with few keys."""
    assert interpreted_ranks(1, alone) == [["", "", ""]]
