"""Repeated calls that use a cached plan: equal bits, and every change of state is noticed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import fused_tp
from fused_tp.backends.shared_memory.shm import shm_transport
from fused_tp.core.errors import FusedTPError
from fused_tp.core.group import _group_slots, resolve_group
from fused_tp.core.settings import override_environment
from fused_tp.ops.matmul_all_reduce import MATMUL_ALL_REDUCE
from tests.distributed.shm_tools import new_tag, own_group, own_transport, ranks_of
from tests.late import interrupted_after
from tests.reference import seeded
from tests.workers import device_mesh, on_ranks, run_fresh, run_ranks

SHAPES = [((1, 24), 40), ((2, 3, 8), 5), ((8,), 16), ((0, 8), 16), ((300, 8), 1024), ((1, 6), 1)]


def operands(shape: tuple[int, ...], n: int, dtype: torch.dtype, group: Any) -> tuple[Tensor, Tensor]:
    rank = dist.get_rank(group)
    return seeded(*shape, dtype=dtype, seed=rank), seeded(n, shape[-1], dtype=dtype, seed=50 + rank)


def planned(x: Tensor, weight: Tensor, group: Any) -> bool:
    """True if a call uses a plan, and so does not reach `_call_without_plan`."""
    with mock.patch.object(MATMUL_ALL_REDUCE, "_call_without_plan", side_effect=LookupError):
        try:
            fused_tp.matmul_all_reduce(x, weight, group=group)
        except LookupError:
            return False
    return True


@on_ranks(1, 2, 3)
def test_the_short_way_gives_the_same_bits(group: Any) -> None:
    for given in (group, device_mesh(group)):
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            for shape, n in SHAPES:
                x, weight = operands(shape, n, dtype, group)
                long = MATMUL_ALL_REDUCE.overload(x, weight, None, group.group_name)
                for _ in range(3):
                    assert torch.equal(fused_tp.matmul_all_reduce(x, weight, group=given), long)
                assert planned(x, weight, given)
                kept = [torch.empty_like(long) for _ in range(dist.get_world_size(group))]
                dist.all_gather(kept, long, group=group)
                assert all(torch.equal(one, long) for one in kept)


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@on_ranks(2)
def test_whatever_records_traces_or_casts_takes_the_long_way(group: Any) -> None:
    x, weight = operands((2, 8), 6, torch.float32, group)

    def run(*args: Tensor) -> Tensor:
        return fused_tp.matmul_all_reduce(*args, group=group)

    for _ in range(2):  # the first call of a group resolves it
        expected = run(x, weight)
    assert planned(x, weight, group)
    # gradients
    leaf = x.clone().requires_grad_()
    run(leaf, weight).sum().backward()
    torch.testing.assert_close(leaf.grad, weight.sum(0).expand_as(x))
    with torch.no_grad():
        assert planned(leaf, weight, group) and not run(leaf, weight).requires_grad
    # a bias
    bias = torch.arange(6.0)
    torch.testing.assert_close(run(x, weight, bias), expected + bias)
    # autocast
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run(x, weight).dtype == torch.bfloat16
    assert run(x, weight).dtype == torch.float32
    # a profiler
    with torch.profiler.profile() as profile:
        run(x, weight)
    assert any(event.name == "fused_tp::matmul_all_reduce" for event in profile.events())
    # a compiler and a mode
    assert torch.equal(torch.compile(run, fullgraph=True)(x, weight), expected)
    with Recorder() as recorder:
        run(x, weight)
    assert torch.ops.fused_tp.matmul_all_reduce.default in recorder.seen
    # other shapes and dtypes, and invalid arguments at a known shape
    assert run(x[:1], weight).shape == (1, 6)
    with pytest.raises(ValueError, match="weight has shape"):
        run(x, weight[:, :7])
    with pytest.raises(TypeError, match="weight has dtype"):
        run(x, weight.double())
    with pytest.raises(TypeError, match="x has dtype"):
        run(x.long(), weight.long())
    with pytest.raises(TypeError, match="weight must be a Tensor"):
        run(x, None)
    q = torch.ones(1, 4, 2, 8)
    for kind in (list, tuple):
        for _ in range(2):
            fused_tp.ring_attention(q, q, q, group=group, window=kind([1, 0]))
        with pytest.raises(TypeError, match="each side must be an int"):  # True equals 1, but is no int for the checks
            fused_tp.ring_attention(q, q, q, group=group, window=kind([True, 0]))
    # settings
    os.environ["FUSED_TP_SCHEDULE"] = "plain"
    try:
        torch.testing.assert_close(run(x, weight), expected)
    finally:
        del os.environ["FUSED_TP_SCHEDULE"]
    assert planned(x, weight, group)


@on_ranks(2, run=run_fresh)
def test_a_group_that_was_destroyed_is_not_used_again(group: Any) -> None:
    ranks = ranks_of(group)
    x, weight = operands((2, 8), 6, torch.float32, group)
    expected = None
    for _ in range(2):
        with own_group(ranks) as own:
            for _ in range(3):
                got = fused_tp.matmul_all_reduce(x, weight, group=own)
            expected = got if expected is None else expected
            assert torch.equal(got, expected)
        with pytest.raises(RuntimeError, match="destroyed"):
            fused_tp.matmul_all_reduce(x, weight, group=own)


@on_ranks(2, run=run_fresh)
def test_a_group_whose_first_call_was_refused_is_dropped(group: Any) -> None:
    with own_group(ranks_of(group)) as own:
        with override_environment({"FUSED_TP_TIMEOUT": "soon"}), pytest.raises(ValueError, match="FUSED_TP_TIMEOUT"):
            fused_tp.all_reduce(torch.ones(2), group=own)
        known = resolve_group(own)
    assert not any(known in slot for slot in _group_slots)


def results_are_the_callers(group: Any, tag: str) -> None:
    """The caller may write to a result at once, although peers have just read it."""
    transport = own_transport(group, tag)
    size, rank = transport.world_size, transport.rank
    for i in range(60):
        shape = (1 + i % 3, 70_001 + 5000 * (i % 4))
        y = transport.write_and_all_reduce("sum", shape, torch.float32, lambda y, i=i: y.fill_(10 * rank + i))
        assert y.eq(sum(10 * r + i for r in range(size))).all()
        y.fill_(-1e9)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_may_be_overwritten_at_once(world_size: int) -> None:
    run_ranks(world_size, results_are_the_callers, new_tag())


def interrupted(group: Any, tag: str) -> None:
    """Rank 0 is interrupted before rank 1, run step by step, has copied its part of the sum; rank 0 then continues."""
    transport = own_transport(group, tag)
    shape = (2, 30_000)
    with pytest.raises(
        MemoryError if transport.rank == 0 else FusedTPError
    ):  # before any data was there: the memory is held for a while
        transport.write_and_all_reduce("sum", shape, torch.float32, _no_memory if transport.rank == 0 else Tensor.zero_)
    assert len(transport._retained_memory) == 1
    for _ in range(20):
        transport.write_and_all_reduce("sum", shape, torch.float32, lambda y: y.fill_(1.0))
    assert not transport._retained_memory
    half = 30_000  # where rank 1's block starts; a multiple of a cache line
    if transport.rank == 0:
        with pytest.raises(KeyboardInterrupt), interrupted_after(0.5):
            transport.write_and_all_reduce("sum", shape, torch.float32, lambda y: y.fill_(1.0))
        others = [transport.empty(shape, torch.float32).fill_(-777.0) for _ in range(2)]
        with pytest.raises(
            FusedTPError, match="interrupted after peers had joined it"
        ):  # else rank 1 would take it for its next sum
            transport.write_and_all_reduce("sum", shape, torch.float32, lambda y: y.fill_(1.0))
        assert len(transport._retained_memory) == 1 and len(others) == 2
        return
    with transport.begin("sum", shape, torch.float32, 8 * half) as workspace:
        mine = workspace.buffer(1, (2 * half,), torch.float32).fill_(2.0)
        workspace.signal(1)
        workspace.wait_all(1)
        theirs = workspace.buffer(0, (2 * half,), torch.float32)
        chunk = 128 * 1024 // 4  # elements per rank: csrc/shm/collectives.cpp
        assert half < chunk
        mine[half:] += theirs[half:]
        workspace.signal(2)
        workspace.wait(0, 2)
        time.sleep(1.5)  # rank 0 is interrupted while it waits, 0.5 s after its call began
        mine[:half].copy_(theirs[:half])
        workspace.signal(3)
        workspace.wait_all(3)
        assert mine.eq(3.0).all()
    with pytest.raises(FusedTPError, match="rank 0 has left the group"):
        transport.write_and_all_reduce("sum", shape, torch.float32, lambda y: y.fill_(5.0))


def _no_memory(*_: Any) -> None:
    raise MemoryError


def test_memory_of_a_call_that_was_interrupted_is_kept_while_peers_may_read_it() -> None:
    run_fresh(2, interrupted, new_tag())


@on_ranks(2)
def test_forward_mode_is_refused(group: Any) -> None:
    x, weight = operands((2, 8), 6, torch.float32, group)
    fused_tp.matmul_all_reduce(x, weight, group=group)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="does not support forward-mode AD"):
        fused_tp.matmul_all_reduce(forward_ad.make_dual(x, x), weight, group=group)


@on_ranks(2, run=run_fresh, env={"FUSED_TP_SHM_RESERVE": str(64 << 20)})
def test_with_the_pool_full_of_results_new_ones_come_from_elsewhere(group: Any) -> None:
    transport = shm_transport(resolve_group(group))
    assert transport is not None
    x, weight = operands((256, 8), 4096, torch.float32, group)
    expected = fused_tp.matmul_all_reduce(x, weight, group=group)
    kept = []
    # Rank 1 keeps results until the pool is full, and then equally many again.
    for _ in range(16):
        y = fused_tp.matmul_all_reduce(x, weight, group=group)
        assert torch.equal(y, expected)
        if transport.rank == 1:
            kept.append(y)
    if transport.rank == 1:
        assert transport._allocate_pooled(expected.nbytes) is None
        kept.clear()
        assert transport._allocate_pooled(expected.nbytes) is not None
    dist.barrier(group)


def frames_of(call: Callable[[], object]) -> int:
    """Python frames of ours in a repeated call, without those of settings, which a long wait reads again and again."""
    counts = []
    for _ in range(8):
        count = 0

        def note(frame: Any, event: str, _: Any) -> None:
            nonlocal count
            file = Path(frame.f_code.co_filename)
            count += event == "call" and "fused_tp" in file.parts and file.name != "settings.py"

        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
        counts.append(count)
    return min(counts)


@torch.no_grad()
def frames(group: Any) -> dict[str, int]:
    q, x, w = torch.randn(1, 4, 16, 16), torch.randn(8, 64), torch.randn(64, 64)
    wide, square = torch.randn(512, 1024), torch.randn(1024, 1024)
    one, weight = torch.randn(1, 512).bfloat16(), torch.randn(512, 512).bfloat16()
    return {
        "ring_attention": frames_of(lambda: fused_tp.ring_attention(q, q, q, group=group, causal=True)),
        "all_gather_matmul": frames_of(lambda: fused_tp.all_gather_matmul(x, w, group=group)),
        "matmul_reduce_scatter": frames_of(lambda: fused_tp.matmul_reduce_scatter(x, w, group=group)),
        "matmul_all_reduce of 2 MiB": frames_of(lambda: fused_tp.matmul_all_reduce(wide, square, group=group)),
        "matmul_all_reduce of a token": frames_of(lambda: fused_tp.matmul_all_reduce(one, weight, group=group)),
    }


MOST_FRAMES = {
    "ring_attention": 75,
    "all_gather_matmul": 18,
    "matmul_reduce_scatter": 28,
    "matmul_all_reduce of 2 MiB": 16,
    "matmul_all_reduce of a token": 8,
}


def test_a_repeated_call_runs_few_frames() -> None:
    for found in run_ranks(2, frames):
        assert all(found[name] <= most for name, most in MOST_FRAMES.items()), found


def documents_in_turn(group: Any) -> None:
    """Calls of equal shapes whose documents or kernels differ, against calls that know no earlier one."""
    rank, calls = dist.get_rank(group), import_module("fused_tp.ops.ring_attention")._call_cache
    q, k, v = (seeded(1, 16, 2, 8, seed=10 * rank + i) for i in range(3))
    ways: list[tuple[dict[str, Any], dict[str, str]]] = [
        *(({"cu_seqlens": torch.tensor([0, at, 32])}, {}) for at in (8, 20)),
        ({"causal": True}, {}),
        ({"causal": True}, {"FUSED_TP_ATTENTION": "torch-blocks"}),
        ({"causal": True, "scale": 0.5}, {}),
    ]

    def run(how: dict[str, Any], env: dict[str, str]) -> Tensor:
        with override_environment(env):
            return fused_tp.ring_attention(q, k, v, group=group, **how)

    fresh = []
    for way in ways:
        calls.clear()
        fresh.append(run(*way))
    assert not torch.equal(fresh[0], fresh[1]) and not torch.equal(fresh[2], fresh[4])
    for _ in range(2):
        assert all(torch.equal(run(*way), right) for way, right in zip(ways, fresh, strict=True))
    assert len(calls) == len(ways)
    for at in range(1, 32):
        run({"cu_seqlens": torch.tensor([0, at, 32])}, {})
        assert len(calls) <= import_module("fused_tp.ops.ring_attention")._MAX_CACHED_CALLS


@pytest.mark.parametrize("env", [{}, {"FUSED_TP_SHM": "0"}])
def test_a_ring_of_known_shapes_has_its_own_mask(env: dict[str, str]) -> None:
    run_ranks(2, documents_in_turn, env=env)
