"""Where data and flags of device kernels lie in a workspace, by csrc/cuda/plan.h: for many sizes, nothing overlaps."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from fused_tp.schedules.device import DeviceSchedule
from fused_tp.triton_kernels.comm import protocol
from fused_tp.triton_kernels.comm.workspace import aligned, flag_bytes, needed_bytes
from tests.native_build import GPU_ON_CPU, REPOSITORY, build_program, output_of

pytestmark = pytest.mark.full

ALL_REDUCE, EXCHANGE, RMS_NORM = range(3)
ONE_SHOT, TWO_SHOT, MULTIMEM = range(3)


class Case(NamedTuple):
    """One op; `size` is rows and `chunk` columns for RMS_NORM."""

    op: int
    algorithm: int
    size: int
    chunk: int
    element_bytes: int
    world: int
    blocks: int


class Planned(NamedTuple):
    half_bytes: int
    flag_bytes: int
    flags: int
    data: int
    slots: list[tuple[int, int]]  # offset behind the flags, bytes
    flag_indices: list[int]


@pytest.fixture(scope="module")
def planner() -> Path:
    return build_program("plan_table", [GPU_ON_CPU / "plan_table.cpp"], [f"-I{REPOSITORY / 'csrc'}", "-O0"])


def plans(planner: Path, cases: list[Case]) -> list[Planned]:
    asked = "".join(" ".join(map(str, case)) + "\n" for case in cases)
    told = output_of(planner, said=asked)
    planned = []
    for line in told.splitlines():
        sizes, slots, flags = ([int(number) for number in part.split()] for part in line.split(";"))
        half_bytes, data_begins, count, data = sizes
        pairs = list(zip(slots[::2], slots[1::2], strict=True))
        planned.append(Planned(half_bytes, data_begins, count, data, pairs, flags))
    return planned


def cases() -> list[Case]:
    draw = random.Random(0)
    found = []
    for _ in range(400):
        op = draw.randrange(3)
        count = draw.choice((0, 1, 5, 127, 4096, draw.randrange(1 << 20), draw.randrange(1 << 33)))
        if op == RMS_NORM:
            count %= 5000
        world = draw.choice((1, 2, 3, 4, 7, 8, protocol.MAX_WORLD_SIZE))
        chunk = -(-count // world) if op == EXCHANGE else draw.choice((1, 8, 100, 8192))
        algorithm = draw.randrange(2 if op == RMS_NORM else 3)
        blocks = draw.choice((1, 2, 5, 33, 132))
        found.append(Case(op, algorithm, count, chunk, draw.choice((1, 2, 4)), world, blocks))
    return [case._replace(element_bytes=max(case.element_bytes, 1 + (case.op != EXCHANGE))) for case in found]


def wanted_slots(case: Case) -> list[int]:
    """The least bytes of each slot."""
    count, size, world = case.size, case.element_bytes, case.world
    if world == 1 and not (case.op == ALL_REDUCE and case.algorithm == MULTIMEM):
        return []
    if case.op == EXCHANGE:
        return [case.chunk * size] * world
    if case.op == ALL_REDUCE:
        if case.algorithm == MULTIMEM:
            return [count * size]
        parts = world if case.algorithm == TWO_SHOT else 1
        return [-(-count // parts) * size] * (world * (2 if parts > 1 else 1))
    if case.algorithm == ONE_SHOT:
        return [count * case.chunk * size] * world
    rows = -(-count // world)
    result = 2 * rows * case.chunk * size
    return [rows * case.chunk * size] * world + [result] * world


def test_nothing_overlaps_and_all_fits(planner: Path) -> None:
    asked = cases()
    for case, plan in zip(asked, plans(planner, asked), strict=True):
        assert plan.flag_bytes == flag_bytes(plan.half_bytes), case
        wanted = wanted_slots(case)
        assert len(plan.slots) == len(wanted), case
        end = 0
        for (offset, nbytes), least in zip(plan.slots, wanted, strict=True):
            assert offset == end and nbytes >= least and offset % protocol.DATA_ALIGNMENT == 0, case
            assert nbytes <= least * 2 + 1024 * case.size + 1024, case
            end = offset + nbytes
        assert end == plan.data and plan.flag_bytes + end <= plan.half_bytes, case
        # One flag for each (phase, block, source), behind the begun words, and none where data may be.
        assert len(set(plan.flag_indices)) == len(plan.flag_indices) == plan.flags, case
        assert all(index >= case.world for index in plan.flag_indices), case
        assert all(8 * (index + 1) <= plan.flag_bytes for index in plan.flag_indices), case


def test_workspaces_are_as_large_as_python_says(planner: Path) -> None:
    asked = cases()
    for case, plan in zip(asked, plans(planner, asked), strict=True):
        # `needed_bytes` has a flag for each slot. As many slots as there are flags, and the data in one of them:
        slots = [(plan.flags, 0)]
        flags = needed_bytes(case.world, slots)
        data = needed_bytes(0, [(1, plan.data)])
        assert 2 * plan.half_bytes == max(flags, data), case
        assert 2 * plan.half_bytes % protocol.DATA_ALIGNMENT == 0 and aligned(plan.data) == plan.data, case


def test_the_words_of_the_protocol_are_the_same_in_both_languages() -> None:
    header = (REPOSITORY / "csrc" / "cuda" / "protocol.h").read_text()
    numbers = {name: int(value) for name, value in re.findall(r"constexpr int(?:64_t)? k(\w+) = (\d+);", header)}
    for name, value in numbers.items():
        python = re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper()
        assert getattr(protocol, python) == value, name
    assert set(numbers) >= {"Epoch", "Ended", "Expired", "Stop", "ErrorSet", "ErrorGaveUp", "FlagShare"}
    ops = re.search(r"enum class Op : int32_t \{(.*?)\}", header, re.DOTALL)
    assert ops is not None
    for name, value in re.findall(r"k(\w+) = (\d+)", ops[1]):
        assert protocol.OPS[int(value)] == re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def test_blocks_do_not_depend_on_what_a_rank_has_to_do_meanwhile() -> None:
    """One rank's weight may be frozen. Blocks wait for those of the same number, so there must be equally many."""
    asked: list[tuple[str, bool]] = []

    class Device:
        rank, world_size = 0, 2

        def all_reduce(self, x: torch.Tensor, *_: object, overlapped: bool = False, **__: object) -> torch.Tensor:
            asked.append(("all_reduce", overlapped))
            return x

        def reduce_scatter(
            self, x: torch.Tensor, counts: list[int], *_: object, overlapped: bool = False
        ) -> torch.Tensor:
            asked.append(("reduce_scatter", overlapped))
            return x[: counts[0]]

    schedule = DeviceSchedule("two_shot", Device(), None)  # only what is asked of it here
    products = [(torch.ones(4, 3), torch.ones(2, 3))]
    for meanwhile in (None, lambda: None):
        schedule.matmul_all_reduce(products, None, meanwhile=meanwhile)
        schedule.matmul_reduce_scatter(products, None, scatter_dim=0, meanwhile=meanwhile)
    assert asked[:2] == asked[2:]
