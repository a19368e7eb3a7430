"""Schedule `symm_mem`: torch's own ops instead of fused_tp's, the choice of this schedule, and its messages.

`symm_mem_double` describes which code of torch runs here, and which parts are test doubles.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_symmetric_memory
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fused_tp
from fused_tp.backends import autotune, registry
from fused_tp.backends.schedule import GatherMatmul
from fused_tp.backends.symmetric_memory import symm_mem
from fused_tp.backends.torch_symm_mem import torch_symm_mem as transport
from fused_tp.backends.torch_symm_mem import torch_symm_mem_schedule as schedules
from fused_tp.backends.torch_symm_mem.torch_symm_mem import TorchSymmMem
from fused_tp.core.errors import RankMismatchError
from fused_tp.core.group import resolve_group
from fused_tp.ops.explain import explain_hypothetical
from fused_tp.ops.verify import verify
from tests.distributed.schedule_cases import CPU, NEEDS_CORE, own, run_variant, schedule_on
from tests.distributed.symm_mem_double import CALLED, KERNELS, PYTHON_OPS, symm_mem_on_cpu
from tests.distributed.test_tp_ops import MATMULS, all_cases, matmul_case, rms_norm_case
from tests.reference import assert_within_dtype_error, matmul64, seeded
from tests.workers import error_of, fresh_ranks, run_ranks

pytestmark = NEEDS_CORE
BF16, FP32 = torch.bfloat16, torch.float32


# -- numbers -----------------------------------------------------------------------------------------------------------


def even_sizes(group: Any, dtype_name: str) -> set[str]:
    """Test every op against fp64 at sizes that torch's ops support; return the names of torch's ops that ran."""
    dtype = getattr(torch, dtype_name)
    CALLED.clear()
    for op in MATMULS:
        for shape in ((12, 24, 16, 48), (12, 12, 32, 96)):
            matmul_case(group, op, shape, dtype, strided=shape[1] == 12)
    rms_norm_case(group, (2, 12, 16, 24), dtype)
    return set(CALLED)


@pytest.mark.parametrize(
    ("world_size", "dtype_name"),
    [(2, "float32"), (3, "float32"), (2, "bfloat16"), pytest.param(4, "float64", marks=pytest.mark.full)],
)
def test_forward_and_gradients(world_size: int, dtype_name: str) -> None:
    called = set.union(*run_variant("symm_mem", world_size, even_sizes, dtype_name))
    assert {"fused_all_gather_matmul", "fused_matmul_reduce_scatter", "_low_contention_all_gather"} <= called
    assert ("one_shot_all_reduce" in called or "multimem_one_shot_all_reduce" in called) == (dtype_name != "float64")


@pytest.mark.full
@pytest.mark.parametrize(("world_size", "dtype_name"), [(2, "bfloat16"), (3, "float32"), (4, "float16")])
def test_odd_sizes(world_size: int, dtype_name: str) -> None:
    """Odd sizes, strides, several weights, a returned gathered x: torch's ops run some, plain collectives the rest."""
    run_variant("symm_mem", world_size, all_cases, dtype_name, world_size == 2)


def chosen_ops(group: Any) -> dict[str, list[str]]:
    """torch's ops by call; empty if none supports the call."""
    found: dict[str, list[str]] = {}
    world = group.size()

    def noted(what: str, run: Any) -> Any:
        CALLED.clear()
        result = run()
        found[what] = list(CALLED)
        return result

    with schedule_on(group, "symm_mem") as schedule:
        for what, rows, dtype in (
            ("even", 8 * world, FP32),
            ("uneven", 8 * world + 1, FP32),
            ("few bytes", world, BF16),
        ):
            x, w = seeded(rows, 4, dtype=dtype), seeded(6, 4, dtype=dtype, seed=1)
            asked = GatherMatmul(own(schedule, x, 0), [w, w], [None, w[:, 0]], 0, rows, return_gathered=True)
            (y, biased), gathered = noted(f"gather, {what}", lambda asked=asked: schedule.all_gather_matmul(asked))
            assert torch.equal(gathered, x) and y.is_contiguous() and biased.is_contiguous()
            assert_within_dtype_error(biased, matmul64(x, w, w[:, 0]), dtype, reduced_over=4, roundings=2)
            noted(f"scatter, {what}", lambda x=x, w=w: schedule.matmul_reduce_scatter([(x, w)], None, scatter_dim=0))
            noted(
                f"bare gather, {what}", lambda a=asked: schedule.all_gather(a.x_shard, gather_dim=0, gather_size=a[4])
            )
            noted(f"bare scatter, {what}", lambda x=x: schedule.reduce_scatter(x, scatter_dim=0))
        for dtype in (torch.float16, torch.float64, torch.int64):
            noted(f"sum of {dtype}", lambda dtype=dtype: schedule.all_reduce(torch.ones(64, dtype=dtype)))
        noted("an odd sum", lambda: schedule.all_reduce(torch.ones(3)))
        noted("nothing", lambda: schedule.all_reduce(torch.ones(0, 4)))
    return found


def test_what_torch_does_not_serve_goes_by_plain_collectives() -> None:
    for found in run_ranks(3, chosen_ops):
        served = {what for what, ops in found.items() if ops}
        assert served == {"gather, even", "scatter, even", "bare gather, even", "bare scatter, even"}
        assert found["bare scatter, even"] == ["_low_contention_reduce_scatter"]
        assert len(found) == 17


def sums(group: Any, switch: bool) -> dict[str, str]:
    """Op for each size and dtype, after a comparison of its sum with the rounding of torch's kernels."""
    found, world = {}, group.size()
    with symm_mem_on_cpu(switch=switch):
        described = resolve_group(group)
        assert registry.SCHEDULES["symm_mem"].available(described, CPU)
        schedule = registry.SCHEDULES["symm_mem"].make(described, CPU, None)
        large = schedules.ONE_SHOT_BYTES // 2 + 8
        for dtype in (FP32, BF16):
            for what, count in (("small", 64), ("large", large)):
                terms = [seeded(count, dtype=dtype, seed=r) for r in range(world)]
                CALLED.clear()
                total = schedule.all_reduce(terms[group.rank()])
                (name,) = CALLED
                in_order = terms[0].clone()
                for term in terms[1:]:
                    in_order = in_order + term
                once = torch.stack(terms[::-1]).float().sum(0).to(dtype)
                assert torch.equal(total, once if name.startswith("multimem") else in_order)
                every = torch.empty(world, count, dtype=dtype)
                dist.all_gather(list(every.unbind()), total, group=group)
                assert all(torch.equal(theirs, total) for theirs in every)
                found[f"{what} {dtype}"] = name
                total.add_(1.0)  # the result has its own memory, which the next sum does not change
    return found


@pytest.mark.parametrize(
    ("world_size", "switch", "small", "large"),
    [
        (2, False, {"one_shot_all_reduce"}, {"two_shot_all_reduce_"}),
        pytest.param(2, True, {"multimem_one_shot_all_reduce"}, {"multimem_all_reduce_"}, marks=pytest.mark.full),
        # With three terms, only a single reduction by the switch has equal bits on all ranks.
        (3, True, {"one_shot_all_reduce", "multimem_all_reduce_"}, {"multimem_all_reduce_"}),
    ],
)
def test_all_reduces(world_size: int, switch: bool, small: set[str], large: set[str]) -> None:
    for outcome in fresh_ranks(world_size, sums, switch):
        found = outcome.unwrap()
        assert {name for what, name in found.items() if what.startswith("small")} == small
        assert {name for what, name in found.items() if what.startswith("large")} == large


# -- torch's ops -------------------------------------------------------------------------------------------------------


def test_torch_has_the_ops_with_these_arguments() -> None:
    """The ops exist in the installed torch; this test fails if another version changes them."""
    assert {*PYTHON_OPS, *KERNELS} == {*transport.REQUIRED_OPS, *transport.OPTIONAL_OPS}
    with symm_mem_on_cpu():
        for name in (*PYTHON_OPS, *KERNELS):
            assert not isinstance(transport.find_torch_op(name, "cpu"), registry.Availability), name


def as_torchs_fakes(group: Any) -> None:
    """Results have the shapes of torch's own fake implementations."""
    rows, world, name = 8 * group.size(), group.size(), group.group_name
    ops = torch.ops.symm_mem
    x, w = seeded(rows, 4), seeded(6, 4, seed=1)
    with schedule_on(group, "symm_mem") as schedule:
        (y,), gathered = schedule.all_gather_matmul(
            GatherMatmul(own(schedule, x, 0), [w], [None], 0, rows, return_gathered=True)
        )
        scattered = schedule.matmul_reduce_scatter([(x, w)], None, scatter_dim=0)
        moved = schedule.all_gather(own(schedule, x, 0), gather_dim=0, gather_size=rows).wait()
        summed = schedule.reduce_scatter(x, scatter_dim=0), schedule.all_reduce(x)
    with FakeTensorMode():
        meta = torch.empty(rows // world, 4), torch.empty(6, 4), torch.empty(rows, 4)
        of_gather, (of_y,) = ops.fused_all_gather_matmul(meta[0], [meta[1].t()], 0, name, return_A=True)
        of_scatter = ops.fused_matmul_reduce_scatter(meta[2], meta[1].t(), "sum", 0, name)
        of_moved = ops._low_contention_all_gather(meta[0], name)
        of_summed = (
            ops._low_contention_reduce_scatter(meta[2], "sum", name),
            ops.one_shot_all_reduce(meta[2], "sum", name),
        )
    fakes = of_y, of_gather, of_scatter, of_moved, *of_summed
    for real, fake in zip((y, gathered, scattered, moved, *summed), fakes, strict=True):
        assert (real.shape, real.dtype) == (fake.shape, fake.dtype)


def test_results_have_the_shapes_of_torchs_fakes() -> None:
    run_ranks(2, as_torchs_fakes)


def test_an_op_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "torch's symm_mem ops run on cuda, not on cpu" in transport.torch_ops_availability(CPU).reason
    with symm_mem_on_cpu(without=("two_shot_all_reduce_",)):
        assert transport.torch_ops_availability(CPU).reason == (
            f"torch {torch.__version__} has no symm_mem.two_shot_all_reduce_ for cpu"
        )
    monkeypatch.setitem(transport.REQUIRED_OPS, "unheard_of", ("Tensor",))
    with symm_mem_on_cpu():
        assert "has no symm_mem.unheard_of for cpu" in transport.torch_ops_availability(CPU).reason
    monkeypatch.delitem(transport.REQUIRED_OPS, "unheard_of")
    monkeypatch.setitem(transport.REQUIRED_OPS, "one_shot_all_reduce", ("Tensor", "int"))
    with symm_mem_on_cpu():
        assert re.search(
            r"symm_mem.one_shot_all_reduce of torch .* has arguments \(Tensor, str, str\), .* passes \(Tensor, int\)",
            transport.torch_ops_availability(CPU).reason,
        )


def without_some(group: Any) -> Any:
    """Rank 0 lacks optional ops of the schedule, rank 1 required ones."""
    described, spec = resolve_group(group), registry.SCHEDULES["symm_mem"]
    missing = ("_low_contention_all_gather", "_low_contention_reduce_scatter") if group.rank() == 0 else ()
    with symm_mem_on_cpu(without=missing):
        assert spec.available(described, CPU)
        schedule = spec.make(described, CPU, None)
        x = seeded(16, 4)
        assert torch.equal(schedule.all_gather(own(schedule, x, 0), gather_dim=0, gather_size=16).wait(), x)
        assert torch.equal(schedule.reduce_scatter(x, scatter_dim=0), own(schedule, 2 * x, 0))
        assert CALLED == []
    again = dist.new_group([0, 1])
    with symm_mem_on_cpu(without=("fused_all_gather_matmul",) if group.rank() else ()):
        refused = spec.available(resolve_group(again), CPU)
        with mock.patch.dict(os.environ, FUSED_TP_SCHEDULE="symm_mem"):
            error = error_of(fused_tp.all_reduce, x, group=again)
    return refused.reason, str(error)


@pytest.mark.full
def test_ranks_take_the_ops_that_all_of_them_have() -> None:
    for outcome in fresh_ranks(2, without_some):
        reason, error = outcome.unwrap()
        assert "has no symm_mem.fused_all_gather_matmul for cpu" in reason
        assert "Schedule 'symm_mem' does not support this group: " in error and reason in error


# -- memory ------------------------------------------------------------------------------------------------------------


def capturing(group: Any) -> list[str]:
    """Errors of calls that would grow memory during the capture of a CUDA graph."""
    said = []
    with schedule_on(group, "symm_mem") as schedule:
        few, many = seeded(64, 4), seeded(1 << 17, 4)
        schedule.matmul_reduce_scatter([(few, torch.eye(4))], None, scatter_dim=0)
        schedule.all_reduce(few)
        with mock.patch.object(symm_mem, "is_capturing", lambda device: True):
            for x in (few, many):
                said.append(str(error_of(schedule.matmul_reduce_scatter, [(x, torch.eye(4))], None, scatter_dim=0)))
                said.append(str(error_of(schedule.all_reduce, x)))
        y = schedule.all_reduce(many)  # nothing was sent
        torch.testing.assert_close(y, 2 * many)
    return said


def test_memory_does_not_grow_while_a_graph_is_captured() -> None:
    for first, second, *refused in run_ranks(2, capturing):
        assert first == second == "None"
        for op, error in zip(("matmul_reduce_scatter", "all_reduce"), refused, strict=True):
            assert f"{op} needs 2097152 bytes of symmetric memory for torch's op" in error
            assert "cannot be created during CUDA graph capture. Run the same ops once before" in error


def short_of_memory(group: Any) -> None:
    """One rank has no memory for the workspaces of torch's ops: all ranks fall back to plain collectives."""
    x, few, w = seeded(1 << 17, 4), seeded(64, 4), torch.eye(4)

    def refuse(*_: Any) -> Any:
        raise symm_mem.NoSymmetricMemory("rank 1: out of memory")

    with schedule_on(group, "symm_mem") as schedule:
        schedule.all_reduce(few)
        schedule.matmul_reduce_scatter([(few, w)], None, scatter_dim=0)
        CALLED.clear()
        with (
            mock.patch.object(transport, "make_torch_workspace", refuse),
            mock.patch.object(symm_mem.GroupMemory, "allocate", refuse),
        ):
            torch.testing.assert_close(schedule.all_reduce(x), 2 * x)
            y = schedule.matmul_reduce_scatter([(x, w)], None, scatter_dim=0)
        torch.testing.assert_close(y, own(schedule, 2 * x, 0))
        torch.testing.assert_close(schedule.all_reduce(x), 2 * x)  # the allocation is not tried again
        assert CALLED == []
        schedule.all_reduce(few)
        assert CALLED == ["one_shot_all_reduce"]


def test_a_rank_without_memory_for_it() -> None:
    run_ranks(2, short_of_memory)


def refused_on_one(group: Any) -> str:
    """Allocate on GPUs, one of which has no memory left; torch's functions are replaced by mocks."""
    empty = mock.Mock(side_effect=RuntimeError("CUDA out of memory\nmore") if group.rank() else None)
    with (
        mock.patch.object(torch_symmetric_memory._SymmetricMemory, "empty_strided_p2p", empty),
        mock.patch.object(torch_symmetric_memory, "rendezvous") as rendezvous,
        mock.patch.object(torch.cuda, "device", lambda device: nullcontext()),
    ):
        described, before = resolve_group(group), symm_mem._rendezvous_count
        error = error_of(symm_mem._allocate_cuda, described, torch.device("cuda", 0), 1024)
        assert not rendezvous.called and symm_mem._rendezvous_count == before
        empty.side_effect = None
        symm_mem._allocate_cuda(described, torch.device("cuda", 0), 1024)
        assert rendezvous.called and symm_mem._rendezvous_count == before + 1
    return f"{type(error).__name__}: {error}"


@pytest.mark.full
def test_no_rank_waits_for_one_that_cannot_allocate() -> None:
    for outcome in fresh_ranks(2, refused_on_one):
        said = outcome.unwrap()
        assert said == (
            "NoSymmetricMemory: 1024 bytes of symmetric memory could not be allocated; rank 1: CUDA out of memory"
        )


def in_turn(group: Any) -> None:
    """Ops run one at a time, as all of them use one workspace from its start."""
    open_turns: list[int] = []
    asked: list[int] = []
    real = TorchSymmMem.in_turn

    @contextmanager
    def watched(memory: TorchSymmMem) -> Iterator[None]:
        assert not open_turns
        open_turns.append(len(CALLED))
        with real(memory):
            yield
        assert len(CALLED) == open_turns.pop() + 1
        asked.append(len(CALLED))

    with schedule_on(group, "symm_mem") as schedule, mock.patch.object(TorchSymmMem, "in_turn", watched):
        x, w = seeded(16, 4), torch.eye(4)
        schedule.all_gather_matmul(GatherMatmul(x, [w], [None], 0))
        schedule.all_gather(x, gather_dim=0, gather_size=None).wait()
        schedule.matmul_reduce_scatter([(x, w), (x, w)], None, scatter_dim=0)
        schedule.reduce_scatter(x, scatter_dim=0)
        schedule.all_reduce(x)
        schedule.matmul_all_reduce([(x, w)], None)
        assert asked == [1, 2, 3, 4, 5, 6]


@pytest.mark.full
def test_ops_take_turns() -> None:
    run_ranks(2, in_turn)


def forgotten(group: Any) -> None:
    other = dist.new_group([0, 1])
    name, known = other.group_name, torch_symmetric_memory._group_name_to_workspace_tensor
    with schedule_on(other, "symm_mem") as schedule:
        schedule.matmul_reduce_scatter([(seeded(16, 4), torch.eye(4))], None, scatter_dim=0)
        known[name] = torch.ones(1)  # as torch does
    dist.destroy_process_group(other)
    assert name not in known


@pytest.mark.full
def test_the_workspace_of_a_destroyed_group_is_forgotten() -> None:
    for outcome in fresh_ranks(2, forgotten):
        outcome.unwrap()


# -- which schedule ----------------------------------------------------------------------------------------------------


@contextmanager
def with_nvlink(**environment: str) -> Iterator[None]:
    """Treat CPU ranks as GPUs with NVLink: they use that part of the dispatch table, and torch's ops."""
    unset = {name: os.environ.pop(name, None) for name in ("FUSED_TP_AUTOTUNE", "FUSED_TP_SCHEDULE", "FUSED_TP_TABLE")}
    with ExitStack() as patches:
        patches.enter_context(symm_mem_on_cpu())
        for module in (registry, autotune):
            patches.enter_context(mock.patch.object(module, "transport_key", lambda group, device: "nvlink"))
        patches.enter_context(mock.patch.dict(os.environ, environment))
        patches.enter_context(mock.patch.object(registry, "group_arch", lambda group, device: "sm_90"))
        yield
    os.environ.update({name: value for name, value in unset.items() if value is not None})


def kept_in(folder: str) -> dict[str, Any]:
    (file,) = Path(folder, "fused_tp").iterdir()
    return dict(json.loads(file.read_text()))


def online(group: Any, folder: str) -> list[Any]:
    """Calls of ranks with NVLink while no variable is set."""
    measured = mock.Mock(wraps=autotune._measure_candidates)
    x, w = seeded(32, 64), seeded(64, 64, seed=1)
    ask: dict[str, Any] = {"dtype": FP32, "group": group}
    with with_nvlink(XDG_CACHE_HOME=folder), mock.patch.object(autotune, "_measure_candidates", measured):
        before = str(fused_tp.explain("matmul_all_reduce", (32, 64), (64, 64), **ask))
        for _ in range(2):
            y = fused_tp.matmul_all_reduce(x, w, group=group)
        torch.testing.assert_close(y, 2 * (x @ w.t()))
        after = str(fused_tp.explain("matmul_all_reduce", (32, 64), (64, 64), **ask))
        once = measured.call_count
        # torch has no op for this dtype, so that there is nothing to choose.
        fused_tp.all_reduce(x.double(), group=group)
        assert measured.call_count == once
    dist.barrier(group)
    kept = kept_in(folder)
    (words,) = [one for one in kept["choices"] if one.startswith("matmul_all_reduce")]
    return [before, after, once, words, sorted(kept["choices"][words]["seconds"]) + kept["choices"][words]["slower"]]


def test_ranks_with_nvlink_choose_by_time(tmp_path: Path) -> None:
    for outcome in fresh_ranks(2, online, str(tmp_path)):
        before, after, measured, words, tried = outcome.unwrap()
        assert (
            "plain over gloo, because dispatch table as shipped, rule sm_90/nvlink/default: every size (by default)"
            in (before)
        )
        assert "until the autotuner (FUSED_TP_AUTOTUNE) measures the first such call" in before
        assert "because measured here: " in after and measured == 1
        assert words.endswith(", where FUSED_TP_AUTOTUNE is not set") and set(tried) == {"plain", "symm_mem"}
    # The next program reads the choice from the file.
    for outcome in fresh_ranks(2, online, str(tmp_path)):
        assert outcome.unwrap()[2] == 0


def off(group: Any) -> None:
    with (
        with_nvlink(FUSED_TP_AUTOTUNE="0"),
        mock.patch.object(autotune, "_measure_candidates", side_effect=AssertionError),
    ):
        fused_tp.matmul_all_reduce(seeded(32, 64), seeded(64, 64, seed=1), group=group)
        said = str(fused_tp.explain("matmul_all_reduce", (32, 64), (64, 64), dtype=FP32, group=group))
        assert "plain over gloo" in said and "measures" not in said


def test_the_choice_can_be_turned_off() -> None:
    for outcome in fresh_ranks(2, off):
        outcome.unwrap()


def nearly_full(group: Any) -> None:
    """No rank measures if one is short of memory; the table decides."""
    free = 0.0 if group.rank() else float("inf")
    with with_nvlink(), mock.patch.object(autotune, "_free_bytes", lambda device: free):
        for _ in range(2):
            fused_tp.matmul_all_reduce(seeded(32, 64), seeded(64, 64, seed=1), group=group)
        assert CALLED == [] and autotune._SAVED_CHOICES[resolve_group(group)]["choices"] == {}


@pytest.mark.full
def test_nothing_is_measured_where_memory_is_short(tmp_path: Path) -> None:
    for outcome in fresh_ranks(2, nearly_full, env={"XDG_CACHE_HOME": str(tmp_path)}):
        outcome.unwrap()


def captured_first(group: Any) -> None:
    """Calls neither measure nor exchange measurements while a graph is captured."""
    with (
        with_nvlink(),
        mock.patch.object(autotune, "is_capturing", lambda device: True),
        mock.patch.object(autotune, "_measure_candidates", side_effect=AssertionError),
    ):
        fused_tp.matmul_all_reduce(seeded(32, 64), seeded(64, 64, seed=1), group=group)


@pytest.mark.full
def test_nothing_is_measured_in_a_capture(tmp_path: Path) -> None:
    for outcome in fresh_ranks(2, captured_first, env={"XDG_CACHE_HOME": str(tmp_path)}):
        outcome.unwrap()


def joined(group: Any, folder: str) -> list[Any]:
    """fused_tp's own schedules are measured, too, after a check has found them right, and no longer if found wrong."""
    found: list[Any] = []
    x, described = seeded(64, 64), resolve_group(group)

    def tried(rows: int) -> set[str]:
        with with_nvlink(XDG_CACHE_HOME=folder):
            fused_tp.matmul_all_reduce(x[:rows], x, group=group)
        choice = [
            one for words, one in autotune._SAVED_CHOICES[described]["choices"].items() if f"up to m={rows}" in words
        ][-1]
        return {*choice["seconds"], *choice["slower"]}

    found.append(tried(8))
    with symm_mem_on_cpu(), mock.patch.dict(os.environ, FUSED_TP_AUTOTUNE=str(Path(folder, "fused_tp"))):
        verdicts = list(verify(group, CPU, FP32, [(16, 32, 16)], num_calls=2))
    found.append({verdict.problem for verdict in verdicts})
    found.append({verdict.schedule for verdict in verdicts})
    found.append(tried(16))
    autotune.record_problems(described, CPU, {("one_sided", "matmul_all_reduce", FP32): "in a later call"})
    found.append(tried(32))
    return found


@pytest.mark.full
def test_our_own_schedules_join_once_they_are_found_right(tmp_path: Path) -> None:
    for outcome in fresh_ranks(2, joined, str(tmp_path), timeout=200):
        first, problems, verified, second, third = outcome.unwrap()
        assert first == {"plain", "symm_mem"} and problems == {""}
        assert {"plain", "pipelined", "one_sided", "symm_mem"} <= verified
        assert {"plain", "symm_mem", "one_sided", "pipelined"} <= second
        assert third == second - {"one_sided"}


def differing(group: Any) -> str:
    values = {"FUSED_TP_AUTOTUNE": "0"} if group.rank() == 0 else {}
    with with_nvlink(**values), pytest.raises(RankMismatchError) as refused:
        fused_tp.all_reduce(torch.ones(64), group=group)
    return str(refused.value)


@pytest.mark.full
def test_ranks_that_differ_are_told() -> None:
    for outcome in fresh_ranks(2, differing):
        said = outcome.unwrap()
        assert "FUSED_TP_AUTOTUNE is None on rank 0 and not set on rank 1" in said


def by_table(group: Any, table: str) -> str:
    with with_nvlink(FUSED_TP_TABLE=table, FUSED_TP_CHECK="1"):
        CALLED.clear()
        y = fused_tp.matmul_all_reduce(seeded(32, 64), seeded(64, 64, seed=1), group=group)
        assert y.shape == (32, 64) and CALLED == ["one_shot_all_reduce"]
        return str(fused_tp.explain("matmul_all_reduce", (32, 64), (64, 64), dtype=FP32, group=group))


@pytest.mark.full
def test_a_table_may_name_it(tmp_path: Path) -> None:
    rules = [{"schedule": "symm_mem", "source": "published: somewhere"}]
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"arch": {"default": {"default": {"default": rules}}}}))
    for outcome in fresh_ranks(2, by_table, str(table)):
        said = outcome.unwrap()
        assert "symm_mem over symmetric memory (by messages where rows do not divide" in said
        assert "rule default/default/default: every size (published: somewhere); note that torch's kernels" in said


@pytest.mark.parametrize(
    ("op", "rows", "ranks", "dtype", "schedule", "reason"),
    [
        ("all_gather_matmul", 512, 8, BF16, "symm_mem", "published: 1.11x of NCCL from 512 rows on, kraken#2, 8 H100"),
        ("all_gather_matmul", 256, 8, BF16, "plain", "published: NCCL is the fastest up to 256 rows, kraken#2, 8 H100"),
        ("all_gather_matmul", 512, 4, BF16, "plain", "every size (by default)"),
        ("all_gather_matmul", 512, 8, FP32, "plain", "every size (by default)"),
        ("matmul_reduce_scatter", 512, 8, BF16, "plain", "published: symm_mem has 0.22x of NCCL at 512 rows and 0.56x"),
        ("matmul_reduce_scatter", 4096, 8, BF16, "plain", "every size (by default)"),
        ("matmul_all_reduce", 512, 8, BF16, "plain", "every size (by default)"),
    ],
)
def test_the_shipped_table_follows_what_was_published(
    monkeypatch: pytest.MonkeyPatch, op: str, rows: int, ranks: int, dtype: torch.dtype, schedule: str, reason: str
) -> None:
    for name in ("FUSED_TP_TABLE", "FUSED_TP_SCHEDULE"):
        monkeypatch.delenv(name, raising=False)
    own_rows = rows // ranks if op == "all_gather_matmul" else rows
    place: dict[str, Any] = {"world_size": ranks, "transport": "nvlink", "arch": "sm_90"}
    found = explain_hypothetical(op, (own_rows, 4096), (4096, 4096), dtype=dtype, **place).forward
    assert found is not None and found.schedule == schedule and reason in found.reason
    # Without symmetric memory, NCCL's choices stay as before.
    found = explain_hypothetical(
        op, (own_rows, 4096), (4096, 4096), dtype=dtype, **{**place, "transport": "nccl"}
    ).forward
    assert found is not None and found.schedule in ("plain", "pipelined") and "sm_90/default" in found.reason


def test_what_is_refused_by_the_size_of_a_group_and_by_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_TP_SCHEDULE", "symm_mem")
    place: dict[str, Any] = {"transport": "nvlink", "arch": "sm_90"}
    with pytest.raises(ValueError, match="it supports at most 16 ranks, and the group has 17"):
        explain_hypothetical("all_reduce", (4, 8), dtype=BF16, world_size=17, **place)
    found = explain_hypothetical("all_reduce", (4, 8), dtype=torch.float16, world_size=8, **place).forward
    assert found is not None and "torch's symm_mem ops sum bfloat16 and float32, not float16" in found.reason
    found = explain_hypothetical("all_gather", (4, 8), dtype=torch.float16, world_size=8, **place).forward
    assert found is not None and "without a deadline (FUSED_TP_TIMEOUT bounds their set-up only)" in found.reason
    assert "round after every addition" in found.reason


def compiled(group: Any) -> None:
    """The schedule runs inside fused_tp's custom ops, so that compiled code and fake tensors do not see it."""
    x, w = seeded(32, 64), seeded(64, 64, seed=1)

    def step(x: Tensor, w: Tensor) -> Tensor:
        return fused_tp.matmul_reduce_scatter(x.relu(), w, group=group).sin()

    with schedule_on(group, "symm_mem"):
        CALLED.clear()
        found = torch.compile(step, fullgraph=True, backend="aot_eager")(x, w)
        assert CALLED == ["fused_matmul_reduce_scatter"]
        torch.testing.assert_close(found, step(x, w))


def test_compiled_code() -> None:
    run_ranks(2, compiled)
