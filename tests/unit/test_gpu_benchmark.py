"""The GPU benchmarks without a GPU: budget, records and table, and the cases, interpreted, on one rank."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import gpu, gpu_attention, gpu_collectives, gpu_timing
from benchmarks.case import FUSED_TP, MICROSECONDS, BenchCase, Makers, Rival
from benchmarks.gpu_timing import GpuContext, TimeBudget, assert_near, checked_rows
from benchmarks.local_ranks import run_local
from benchmarks.results import MeasuredMachine, Record, make_records
from benchmarks.runner import CaseTimes, run_case
from benchmarks.table import markdown
from fused_tp.core.availability import unavailable
from fused_tp.triton_kernels.comm import streams
from tests.kernels.ranks import interpreted_ranks
from tests.native.doubles.libraries import build_doubles, doubles

pytestmark = pytest.mark.full

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
MACHINE = MeasuredMachine("a processor", "AVX2", 8, "a GPU, sm_90, 132 SMs")


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_budget() -> None:
    clock = Clock()
    budget = TimeBudget(60, clock)
    assert budget.fits(60) and not budget.fits(61)
    clock.seconds += 20
    assert (budget.spent_seconds(), budget.remaining_seconds()) == (20, 40)
    budget.record(planned_seconds=10, taken_seconds=20)
    assert budget.fits(20) and not budget.fits(21)  # everything takes twice the planned time
    budget.record(planned_seconds=40, taken_seconds=5)
    assert budget.fits(40)  # faster than planned is luck


def case(name: str, seconds: float = 10.0) -> BenchCase:
    return BenchCase(name, lambda *_, **__: {}, {"world_size": 2}, {"copy": Rival(MICROSECONDS, 12.0)}, seconds)


def test_cases_that_fail_or_do_not_fit_do_not_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", broken)
    clock = Clock()
    said: list[str] = []
    ran: list[str] = []

    def measure(one: BenchCase) -> dict[str, str]:
        ran.append(one.name)
        clock.seconds += 10
        if one.name == "bad":
            raise AssertionError("bad: fused_tp computes a wrong result\nsecond line")
        return {"torch.mm": "failed. RuntimeError: no"} if one.name == "one" else {}

    cases = [case("one"), case("bad"), case("long", 100.0), case("two"), case("three")]
    measured, skipped = gpu.run_all(cases, TimeBudget(35, clock), measure, said.append)
    assert ran == ["one", "bad", "two"] and measured == 2
    assert skipped == [
        "one: torch.mm failed. RuntimeError: no",
        "bad failed. AssertionError: bad: fused_tp computes a wrong result",
        "long: no time left (15 s).",
        "three: no time left (5 s).",
    ]
    assert len(said) == 3 and "second line" in said[1]


def test_checked_rows_are_in_all_parts() -> None:
    for rows in (1, 2, 511, 513, 1500, 100_003):
        chosen = torch.arange(rows)[checked_rows(rows)]
        assert chosen[-1] == rows - 1 and len(chosen) <= 2 * gpu_timing.CHECKED_ROWS
        assert chosen[0] < 1 + rows // 100 and (len(chosen) == 1 or int(chosen.diff().max()) <= 1 + rows // 500)


def test_wrong_answers_are_noticed() -> None:
    expected = torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert_near(expected.bfloat16(), expected)
    assert_near(torch.zeros(4, 4), torch.zeros(4, 4, dtype=torch.float64))
    for actual in (expected.bfloat16() * 1.02, torch.full((64, 64), torch.nan), expected.float().roll(1, 0)):
        with pytest.raises(AssertionError, match="is off by"):
            assert_near(actual, expected)
    with pytest.raises(AssertionError, match="rank 1 is"):
        assert_near(expected[:3].float(), expected, "the result of rank 1")


def test_records_and_table_of_a_gpu() -> None:
    seconds = {FUSED_TP: [1.0e-5, 1.1e-5, 1.3e-5], "copy": [2e-6] * 3}
    times = CaseTimes(seconds, dict.fromkeys(seconds, 20), {FUSED_TP: "a config", "copy": ""}, {})
    notes = {}
    for what in ({}, {"flops": 1e7}, {"nbytes": 1e6}):
        found = {"torch": "2", "driver": "580.0", "SM clock": "900 MHz"}
        ours, copy = make_records(replace(case("one"), **what), [times], 2, MACHINE, found)
        assert Record.from_json(ours.to_json()).machine == MACHINE and ours.world_size == 2
        notes[ours.note] = copy.note
    assert notes == {
        "11.00 us; a config": "2.00 us",
        "1 TFLOP/s; a config": "5 TFLOP/s",
        "91 GB/s; a config": "500 GB/s",
    }
    text = markdown([ours, replace(copy, versions={**found, "SM clock": "1890 MHz"})])
    assert "a GPU, sm_90, 132 SMs; launched by a processor, AVX2, 8 cores." in text
    assert "torch 2; driver 580.0.\nSM clock: 900 MHz to 1890 MHz.\n" in text  # read after each case
    assert "microseconds 11.000 [10.500, 12.000] | <= 12 | yes" in " ".join(text.split())


def test_summary_for_a_report() -> None:
    seconds = {FUSED_TP: [1.0e-5] * 3, "copy": [2e-6] * 3}
    times = CaseTimes(seconds, dict.fromkeys(seconds, 20), dict.fromkeys(seconds, ""), {})
    records = make_records(case("one"), [times], 2, MACHINE, {"driver": "580.0"})
    found = gpu.summary(records, ["two failed. AssertionError: two: fused_tp computes a wrong result"])
    assert found["note"].startswith("1 cases timed, 1 of 1 bars met; 1 failed: two failed. AssertionError")
    assert found["versions"] == {"driver": "580.0"} and found["machine"]["gpu"] == MACHINE.gpu
    ours, copy = found["records"]
    assert ours["ms"] == pytest.approx(0.01) and "measure" not in ours
    assert (copy["measure"], copy["value"], copy["bar"]) == ("microseconds", pytest.approx(10.0), 12.0)
    assert gpu.summary([], [])["records"] == []


def test_cases_have_names_of_their_own_and_fit_the_minutes() -> None:
    cases = gpu.cases(is_quick=False)
    names = [one.name for one in cases]
    assert len(set(names)) == len(names) and {one.name for one in gpu.cases(is_quick=True)} <= set(names)
    assert sum(one.seconds for one in cases) < 60 * gpu.DEFAULT_MINUTES
    matmuls = [one.parameters for one in cases if "k" in one.parameters]
    assert matmuls and all(p["n"] % 128 == p["k"] % 128 == 0 for p in matmuls)


@NO_GPU
def test_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu.from_command_line(["--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "benchmarks.gpu needs an NVIDIA GPU, and torch finds none on this machine.\n"
    assert not (tmp_path / "out").exists()
    assert gpu.from_command_line(["--list", "--quick", "--only", "^alone"]) == 0
    assert capsys.readouterr().out.split() == [
        "alone/bf16/4096x4096x4096",
        "alone/bf16/8192x8192x8192",
    ]


# -- the cases themselves, on one rank, interpreted, with streams and events that do nothing ---------------------------


class Stream:
    """Fake stream, and fake event, that does nothing."""

    device = torch.device("cpu")

    def __init__(self, *args: object, **keywords: object) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or Stream()

    def wait_event(self, event: object) -> None: ...

    def record(self) -> None: ...

    def query(self) -> bool:
        return False

    def elapsed_time(self, other: object) -> float:
        return 1.0


@contextlib.contextmanager
def pretended_gpu() -> Iterator[GpuContext]:
    patch = pytest.MonkeyPatch()
    properties = SimpleNamespace(multi_processor_count=4, L2_cache_size=1 << 12, name="none", major=9, minor=0)
    for name, value in {
        "Stream": Stream,
        "Event": Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda *args: None,
        "_sleep": lambda cycles: None,
        "get_device_properties": lambda device: properties,
        "get_device_capability": lambda device=None: (9, 0),
    }.items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(
        streams, "own_streams", lambda owner, device, count, has_high_priority=False: [Stream() for _ in range(count)]
    )
    try:
        yield GpuContext(torch.device("cpu"))
    finally:
        patch.undo()


FUSED, ALONE, MOVED = FUSED_TP, "its matmul alone", "matmul, then movement"
TINY = {"dtype": "bf16", "m": 40, "n": 48, "k": 32}
SHORT = {"seq": 24, "head_dim": 16}
# (module, maker, parameters, contestants). One rank: attention cannot be interpreted on several threads at once.
INTERPRETED: list[tuple[str, str, dict[str, Any], list[str]]] = [
    *(
        ("gpu_matmul", "rank_contestants", {**TINY, "op": op, "world_size": 1}, [FUSED_TP, ALONE, MOVED])
        for op in ("two-shot", "two-shot+norm", "one-shot", "reduce-scatter", "gather", "gather-direct")
    ),
    *(  # also with a peer: it never runs, and no rank waits for it
        ("gpu_matmul", "flag_contestants", {**TINY, "op": op, "num_peers": num_peers}, [FUSED_TP, "torch.mm", ALONE])
        for op, num_peers in (
            ("two-shot", 0),
            ("two-shot", 1),
            ("reduce-scatter", 1),
            ("gather", 0),
            ("gather-direct", 1),
        )
    ),
    *(
        ("gpu_matmul", "matmul_only_contestants", {**TINY, "dtype": dtype}, [FUSED_TP, "torch.mm", "config 32x32x32"])
        for dtype in ("bf16", "fp16")
    ),
    *(
        ("gpu_attention", maker, {**SHORT, "is_backward": is_backward, **more}, names)
        for is_backward in (False, True)
        for maker, more, names in (
            ("one_rank_contestants", {"is_causal": is_backward}, [FUSED_TP, "torch's FlashAttention"]),
            ("ring_contestants", {"num_ranks": 3}, [FUSED_TP, "the whole at once"]),
        )
    ),
    (
        "gpu_attention",
        "rank_contestants",
        {**SHORT, "world_size": 1},
        [FUSED_TP, "a launch for each step", "the whole at once"],
    ),
]


def interpreted_cases(_group: dist.ProcessGroup) -> tuple[list[tuple[list[str], list[int]]], str]:
    """Return (contestants and rounds of each case, message for a wrong result)."""
    results = []
    with pytest.MonkeyPatch.context() as patch, pretended_gpu() as context, doubles("copy_engine"):
        patch.setattr(gpu_attention, "WIDTH", 32)
        patch.setattr(gpu_attention, "TOKENS", 24)
        for module, maker, parameters, _ in INTERPRETED:
            make = getattr(importlib.import_module(f"benchmarks.{module}"), maker)
            times = run_case(context, BenchCase("tiny", make, parameters), 2)
            results.append((list(times.seconds), [len(seconds) for seconds in times.seconds.values()]))
        from benchmarks import gpu_matmul

        patch.setattr(
            gpu_matmul.FusedRanks, "expected_result", lambda self, rank: (slice(None), torch.ones(40, 48).double())
        )
        tiny = BenchCase("tiny", gpu_matmul.rank_contestants, {**TINY, "op": "reduce-scatter", "world_size": 1})
        with pytest.raises(AssertionError) as raised:
            run_case(context, tiny, 2)
    return results, str(raised.value)


def test_cases_of_kernels() -> None:
    build_doubles("copy_engine")
    ((results, wrong),) = interpreted_ranks(1, interpreted_cases, timeout=300)
    for (module, maker, parameters, expected), (names, rounds) in zip(INTERPRETED, results, strict=True):
        assert len(names) == len(expected), (module, maker, parameters, names)
        assert all(name.startswith(start) for name, start in zip(names, expected, strict=True))
        assert set(rounds) == {2}
    assert wrong.startswith(f"tiny: {FUSED_TP} computes a wrong result: the result of rank 0 is off by")


# -- the kernels of csrc/cuda, in their CPU build, on one rank ---------------------------------------------------------


class Graph:
    """Fake graph: captured calls run at once, and replays are counted."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuContext]:
    from tests.native_build import cpu_device_library, use_library

    use_library(cpu_device_library())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **how: contextlib.nullcontext())
    try:
        with pretended_gpu() as context:
            yield context
    finally:
        use_library(None)


def latency_without_check(context: GpuContext, **parameters: Any) -> Makers:
    """Contestants without checks, because a replay computes nothing here."""
    makers = gpu_collectives.latency_contestants(context, **parameters)
    return {name: lambda maker=maker: replace(maker(), check=None) for name, maker in makers.items()}


def test_cases_of_collectives(native: GpuContext) -> None:
    def run(make: Any, **parameters: Any) -> CaseTimes:
        return run_case(native, BenchCase("tiny", make, {**parameters, "world_size": 1}), 2)

    for op in gpu_collectives.EXCHANGES:
        for nbytes in (1 << 10, 24 << 10):
            times = run(gpu_collectives.exchange_contestants, op=op, nbytes=nbytes)
            assert list(times.seconds) == [FUSED_TP, "device copy"] and not times.skip_reasons
            assert all(len(of_one) == 2 for of_one in times.seconds.values())
    times = run(latency_without_check, op="one-shot", nbytes=8 << 10)
    assert times.seconds[FUSED_TP] == [1e-3 / times.calls[FUSED_TP]] * 2  # the pretended events are 1 ms apart
    assert times.calls[FUSED_TP] % gpu_collectives.LATENCY_CALLS == 0
    for rows, algorithm in ((3, "one_shot"), (40, "two_shot")):
        times = run(gpu_collectives.norm_contestants, rows=rows, columns=8192)
        assert list(times.seconds) == [FUSED_TP, "steps apart"] and times.notes[FUSED_TP] == algorithm
    op_case, collective = gpu_collectives.overhead_cases()
    times = run_case(native, op_case, 2)
    assert list(times.seconds) == [FUSED_TP, "torch's linear"] and times.calls[FUSED_TP] % 100 == 0
    assert all(1e-7 < second < 1e-2 for second in times.seconds[FUSED_TP])
    times = run(collective.make, nbytes=collective.parameters["nbytes"])
    assert list(times.seconds) == [FUSED_TP, "torch.add", "in a graph"]
    assert min(times.seconds["in a graph"]) < min(times.seconds[FUSED_TP])


@pytest.mark.parametrize("op", gpu_collectives.EXCHANGES)
def test_wrong_sums_and_lost_bytes_are_noticed(native: GpuContext, op: str) -> None:
    exchange = gpu_collectives.CollectiveInputs(native, op, 1 << 12, 2)
    first, second = exchange.inputs[0]
    if op == "all-gather":
        results = [torch.cat([first, second])] * 2
    elif op == "all-to-all":
        results = list(torch.cat([first, second], 1).chunk(2, 2))
    else:
        total = (first.double() + second.double()).bfloat16()
        results = [total] * 2 if exchange.is_all_reduce else list(total.chunk(2))
    exchange.check(results)
    other = results[1].clone().flatten()
    other.view(torch.int16)[5] ^= 1  # the last bit of one number, which no tolerance for sums would notice
    if op != "reduce-scatter":
        with pytest.raises(AssertionError, match=r"different bits|received wrong data"):
            exchange.check([results[0], other.view(results[1].shape)])
    for wrong in ([results[0] * 1.5, results[1]], [results[0], results[1] * torch.nan]):
        with pytest.raises(AssertionError):
            exchange.check(wrong)


def test_bytes_that_must_be_moved() -> None:
    """One rank reads and writes; two ranks of 4 bytes by hand; each more rank adds a share sent and one received."""
    for op in gpu_collectives.EXCHANGES:
        assert gpu_collectives.traffic_bytes(op, 1000, 1) == 2000
    # Per rank, one-shot: read 4 + 4, write 4 + 4. two-shot: 4 + 2 + 2 and 2 + 4 + 2. reduce-scatter: 4 + 2 and 2 + 2.
    by_hand = {"one-shot": 16, "two-shot": 16, "reduce-scatter": 10, "all-gather": 10, "all-to-all": 12}
    for op, nbytes in by_hand.items():
        assert gpu_collectives.traffic_bytes(op, 4, 2) == 2 * nbytes
    assert gpu_collectives.traffic_bytes("two-shot", 4096, 4) == 4 * (2 * 4096 + 4 * 3 * 1024)


def test_without_the_library_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = {"op": "two-shot", "nbytes": 1 << 10, "world_size": 1}
    monkeypatch.setattr(gpu_collectives, "native_kernels_available", lambda arch: unavailable("they were not built"))
    one = BenchCase("exchange/two-shot", gpu_collectives.exchange_contestants, parameters)
    with pretended_gpu() as context:
        _, skipped = gpu.run_all([one], TimeBudget(1000), lambda case: run_case(context, case, 2).skip_reasons)
    assert len(skipped) == 1 and "library of device kernels, and they were not built" in skipped[0]
    assert " failed" not in skipped[0] and "build_ext --inplace" in skipped[0]


def one_rank_contestants(_group: dist.ProcessGroup, op: str) -> None:
    """Run a GPU test as far as possible here, so that on a GPU it fails for the kernels' reasons."""
    from tests.gpu.test_fused_kernels import one_rank_alone

    run_local(2, one_rank_alone, op, (40, 48, 24))


@pytest.mark.parametrize("op", ["two_shot", "direct", "ring"])
def test_a_rank_whose_flags_are_set_runs_alone(op: str) -> None:
    interpreted_ranks(1, one_rank_contestants, op)


def test_nvidia_smi_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for moment, (said, expected) in enumerate((("", {}), ("580.1, 1980 MHz, [N/A], 3201 MHz, [N/A]", CLOCKS))):
        monkeypatch.setattr(gpu_timing, "read_program_output", lambda *command, said=said: said.splitlines())
        assert gpu_timing.query_nvidia_smi(0, moment) == expected


CLOCKS = {"driver": "580.1", "SM clock": "1980 MHz", "memory clock": "3201 MHz"}
