"""The GPU suite where there is no GPU: budget, rounds, records and table, and its cases, interpreted, on one rank."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import gpu, gpu_attention, gpu_collectives, gpu_overhead, gpu_report, gpu_ring, gpu_timing
from benchmarks.case import OURS, Case, Contestant, Rival, Unavailable
from benchmarks.gpu_timing import Budget, GpuContext, assert_near, checked_rows, race
from benchmarks.race import Times
from benchmarks.ratios import MICROSECONDS, SPEEDUP, TIME_RATIO
from benchmarks.records import Machine, Record, read
from fused_tp.triton_kernels.comm import streams
from tests.kernels.ranks import interpreted_ranks

pytestmark = pytest.mark.full

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
MACHINE = Machine("a processor", "AVX2", 8, "a GPU, sm_90, 132 SMs")


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_what_does_not_fit_the_minutes_is_left_out() -> None:
    clock = Clock()
    budget = Budget(60, clock)
    assert budget.fits(60) and not budget.fits(61)
    clock.seconds += 20
    assert (budget.spent(), budget.left()) == (20, 40)
    budget.learn(planned=10, taken=20)
    assert budget.fits(20) and not budget.fits(21)  # all takes twice what was planned
    budget.learn(planned=40, taken=5)
    assert budget.fits(40)  # faster than planned is luck


def case(name: str, seconds: float = 10.0) -> Case:
    return Case(name, lambda *_, **__: {}, {"m": 1000, "n": 1000, "k": 500, "world_size": 2}, seconds=seconds)


def test_cases_that_fail_or_do_not_fit_are_told_of_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", broken)
    clock = Clock()
    said: list[str] = []
    ran: list[str] = []

    def measure(one: Case) -> dict[str, str]:
        ran.append(one.name)
        clock.seconds += 10
        if one.name == "bad":
            raise AssertionError("bad: fused_tp computes something else\nsecond line")
        return {"torch.mm": "failed. RuntimeError: no"} if one.name == "one" else {}

    cases = [case("one"), case("bad"), case("long", 100.0), case("two"), case("three")]
    measured, skipped = gpu.run_all(cases, Budget(35, clock), measure, said.append)
    assert ran == ["one", "bad", "two"] and measured == 2
    assert skipped == [
        "one: torch.mm failed. RuntimeError: no",
        "bad failed. AssertionError: bad: fused_tp computes something else",
        "long: no time left (15 s).",
        "three: no time left (5 s).",
    ]
    assert len(said) == 3 and "second line" in said[1]


def test_who_starts_changes_from_round_to_round() -> None:
    order: list[str] = []

    def timed(name: str) -> Any:
        return lambda: order.append(name) or float(len(order))

    seconds = race({name: timed(name) for name in "abc"}, 3)
    assert "".join(order) == "abcbcacab"
    assert seconds == {"a": [1.0, 6.0, 8.0], "b": [2.0, 4.0, 9.0], "c": [3.0, 5.0, 7.0]}
    assert len(race({"a": timed("a")}, 25, lambda: False)["a"]) == gpu_timing.MIN_ROUNDS


@pytest.mark.parametrize("rows", [1, 2, 511, 512, 513, 1024, 1500, 8192, 100_003])
def test_checked_rows_are_in_all_parts(rows: int) -> None:
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


def made_up() -> list[Record]:
    one = case("ranks/bf16/two-shot/W=2/1000x1000x500")
    rivals = {"alone": Rival(TIME_RATIO, 1.10, 1.03), "in turn": Rival(SPEEDUP, 1.0), "other": Rival(SPEEDUP)}
    one = Case(one.name, one.make, one.parameters, rivals)
    seconds = {
        OURS: [1e-3, 1.2e-3, 2e-3],
        "alone": [1e-3, 1e-3, 2e-3],
        "in turn": [9e-4, 9e-4, 9e-4],
        "other": [1e-3] * 3,
    }
    times = Times(seconds, dict.fromkeys(seconds, 2), {name: "a config" * (name == OURS) for name in seconds}, {})
    return gpu_report.gpu_records(one, times, MACHINE, {"torch": "2.11.0", "driver": "580.0"})


def test_records_say_where_and_how_fast() -> None:
    ours, alone, in_turn, other = made_up()
    # 2 ranks of 1e9 operations in 1.2 ms.
    assert ours.note == "2 TFLOP/s; a config" and ours.comparison is None and ours.world_size == 2
    assert alone.comparison is not None and alone.comparison.value.median == 1.0
    assert in_turn.comparison is not None and in_turn.comparison.value.median == pytest.approx(0.75)
    assert other.comparison is not None and other.comparison.bar is None
    assert (ours.machine, ours.versions["driver"]) == (MACHINE, "580.0")
    assert Record.from_json(ours.to_json()) == ours


def test_the_table_says_what_was_met_and_what_was_left_out() -> None:
    text = gpu_report.markdown(made_up(), ["alone/fp8: no time left (3 s)."], 7.5)
    assert "a GPU, sm_90, 132 SMs; launched by a processor, 8 cores." in text and "driver 580.0" in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len({row.count("|") for row in rows}) == 1
    assert "| time ratio 1.000 [1.000, 1.100] | <= 1.1, aim <= 1.03 | yes |" in text
    assert "| speedup 0.750 [0.600, 0.825] | >= 1 | **no** |" in text
    assert "| 1.2 | 2 TFLOP/s |" in text and "in 7.5 minutes" in text
    assert text.endswith("Not measured:\n\n- alone/fp8: no time left (3 s).\n")


def test_clocks_are_told_as_a_range() -> None:
    clocks = ("900 MHz", "1890 MHz")
    pairs = zip(made_up(), clocks, strict=False)
    records = [replace(record, versions={"torch": "2", "SM clock": clock}) for record, clock in pairs]
    text = gpu_report.markdown(records)
    assert "torch 2.\nSM clock: 900 MHz to 1890 MHz.\n" in text


def test_older_results_without_a_gpu_can_be_read() -> None:
    results = Path(gpu.__file__).parent / "results" / "cpu.jsonl"
    assert {record.machine.gpu for record in read(results)} == {""}


def test_cases_have_names_of_their_own_and_the_sizes_that_have_bars() -> None:
    cases = gpu.cases(quick=False)
    names = [one.name for one in cases]
    assert len(set(names)) == len(names)
    assert {one.name for one in gpu.cases(quick=True)} <= set(names)
    bars = {one.name: {rival.bar for rival in one.rivals.values()} - {None} for one in cases}
    for size in (4096, 8192):
        assert bars[f"alone/bf16/{size}x{size}x{size}"] == {0.90}
    assert all(bars[name] == {1.10, 1.0} for name in names if name.startswith("ranks/bf16/two-shot/"))
    matmuls = [one.parameters for one in cases if "k" in one.parameters]
    assert matmuls and all(p["n"] % 128 == p["k"] % 128 == 0 for p in matmuls)
    assert bars["latency/one-shot/W=2/8KB"] == {12.0} and bars["latency/one-shot/W=4/8KB"] == set()
    for op in ("two-shot", "reduce-scatter", "all-gather", "all-to-all"):
        for what, bar in (("64MB", {0.8}), ("256MB", {0.8}), ("4MB", set()), ("1KB", set())):
            assert bars[f"exchange/{op}/W=2/{what}"] == bars[f"exchange/{op}/W=4/{what}"] == bar
    assert all(bars[name] == {0.6} for name in names if name.startswith("norm/"))


def test_all_cases_fit_the_minutes() -> None:
    assert sum(one.seconds for one in gpu.cases(quick=False)) < 60 * gpu.MINUTES
    first = [one.name.split("/")[0] for one in gpu.cases(quick=False)]
    assert first[0] == "latency" and first.index("exchange") < first.index("alone") < first.index("flags")


@NO_GPU
def test_without_a_gpu_it_refuses_in_a_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu.from_command_line(["--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "benchmarks.gpu needs an NVIDIA GPU, and torch finds none on this machine.\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--only", "("], "is not a regular expression"), (["--only", "nothing like it"], "matches none of the cases")],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.from_command_line(arguments) == 2
    assert message in capsys.readouterr().err


def test_cases_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.from_command_line(["--list", "--quick", "--only", "^alone"]) == 0
    assert capsys.readouterr().out.split() == ["alone/bf16/4096x4096x4096", "alone/bf16/8192x8192x8192"]


# -- the cases themselves, on one rank, interpreted, with streams and events that do nothing ---------------------------


class Stream:
    """One that has run whatever it was given."""

    device = torch.device("cpu")

    def __init__(self, *args: object, **keywords: object) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def wait_event(self, event: object) -> None: ...


class Event:
    def __init__(self, *args: object, **keywords: object) -> None: ...

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
        "Event": Event,
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda *args: None,
        "_sleep": lambda cycles: None,
        "get_device_properties": lambda device: properties,
        "get_device_capability": lambda device=None: (9, 0),
    }.items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(streams, "own_streams", lambda owner, device, count: [Stream() for _ in range(count)])
    try:
        yield GpuContext(torch.device("cpu"), Budget(1000), rounds=2)
    finally:
        patch.undo()


def fused_case(_group: dist.ProcessGroup, op: str, maker: str, ranks: dict[str, int], names: list[str]) -> None:
    from benchmarks import gpu_fused

    parameters = {"op": op, "dtype": "bf16", "m": 40, "n": 48, "k": 32, **ranks}
    with pretended_gpu() as context:
        times = gpu_timing.run_case(context, Case("tiny", getattr(gpu_fused, maker), parameters))
    assert list(times.seconds) == names and not times.skipped
    assert all(len(of_one) == 2 for of_one in times.seconds.values())


@pytest.mark.parametrize("op", ["two-shot", "two-shot+norm", "one-shot", "reduce-scatter", "gather", "gather-direct"])
def test_rank_cases(op: str) -> None:
    names = [OURS, "its matmul alone", "matmul, then movement"]
    interpreted_ranks(1, fused_case, op, "rank_contestants", {"world_size": 1}, names)


@pytest.mark.parametrize(("op", "peers"), [("two-shot", 0), ("two-shot", 1), ("reduce-scatter", 1), ("gather", 1)])
def test_flag_cases(op: str, peers: int) -> None:
    """With a peer too: it never runs, and nobody waits for it."""
    names = [OURS, "torch.mm", "its matmul alone"]
    interpreted_ranks(1, fused_case, op, "flag_contestants", {"peers": peers}, names)


def wrong_answer(_group: dist.ProcessGroup) -> str:
    from benchmarks import gpu_fused

    parameters = {"op": "reduce-scatter", "dtype": "bf16", "m": 40, "n": 48, "k": 32, "world_size": 1}
    patch = pytest.MonkeyPatch()
    patch.setattr(gpu_fused.Fused, "expected", lambda self, rank: (slice(None), torch.ones(40, 48).double()))
    with pretended_gpu() as context, pytest.raises(AssertionError) as raised:
        gpu_timing.run_case(context, Case("tiny", gpu_fused.rank_contestants, parameters))
    patch.undo()
    return str(raised.value)


def test_a_wrong_answer_is_not_timed() -> None:
    (text,) = interpreted_ranks(1, wrong_answer)
    assert text.startswith(f"tiny: {OURS} computes something else: the result of rank 0 is off by")


def test_rivals_that_fail_are_left_out_and_told_of() -> None:
    def fail() -> Contestant:
        raise RuntimeError("no config fits\nsecond line")

    def refuse() -> Contestant:
        raise Unavailable("it needs another GPU.")

    def wrong() -> None:
        raise AssertionError("off by 3")

    def make(context: GpuContext) -> dict[str, Any]:
        right = Contestant(lambda: None, lambda: None)
        return {"early": fail, OURS: lambda: right, "old": refuse, "bad": lambda: Contestant(lambda: None, wrong)}

    with pretended_gpu() as context:
        times = gpu_timing.run_case(context, Case("tiny", make, {}))
    assert list(times.seconds) == list(times.calls) == list(times.notes) == [OURS]
    assert times.skipped == {
        "early": "failed. RuntimeError: no config fits",
        "old": "is left out: it needs another GPU.",
        "bad": "failed. AssertionError: tiny: bad computes something else: off by 3",
    }


def matmul_case(_group: dist.ProcessGroup, dtype: str) -> list[str]:
    from benchmarks import gpu_gemm

    with pretended_gpu() as context:
        parameters = {"dtype": dtype, "m": 40, "n": 48, "k": 32}
        return list(gpu_timing.run_case(context, Case("tiny", gpu_gemm.contestants, parameters)).seconds)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_matmul_cases(dtype: str) -> None:
    (names,) = interpreted_ranks(1, matmul_case, dtype)
    assert names[:2] == [OURS, "torch.mm"] and len(names) == 3 and names[2].startswith("config 32x32x32")


def attention_case(_group: dist.ProcessGroup, maker: str, parameters: dict[str, Any]) -> tuple[list[str], list[str]]:
    patch = pytest.MonkeyPatch()
    patch.setattr(gpu_attention, "WIDTH", 32)
    patch.setattr(gpu_attention, "TOKENS", 24)
    make = getattr(gpu_ring if maker == "contestants" else gpu_attention, maker)
    with pretended_gpu() as context:
        times = gpu_timing.run_case(context, Case("tiny", make, parameters))
    patch.undo()
    return list(times.seconds), list(times.skipped)


@pytest.mark.parametrize("backward", [False, True])
def test_attention_cases(backward: bool) -> None:
    shape = {"seq": 24, "head_dim": 16, "backward": backward}
    ((ran, left_out),) = interpreted_ranks(1, attention_case, "alone", {**shape, "causal": backward})
    assert ran == [OURS, "torch's FlashAttention"] and left_out == ["cuDNN"]
    assert interpreted_ranks(1, attention_case, "ring", {**shape, "ranks": 3}) == [([OURS, "the whole at once"], [])]


def test_ring_of_ranks() -> None:
    """With one rank: ranks that are threads cannot interpret kernels at the same time."""
    shape = {"seq": 24, "head_dim": 16, "world_size": 1}
    ((ran, left_out),) = interpreted_ranks(1, attention_case, "contestants", shape)
    assert ran == [OURS, "a launch for each step", "the whole at once"] and not left_out


def test_what_a_ring_computes_is_counted_once_for_all_ranks() -> None:
    rates = {gpu_report._rate(case.parameters, 2, 1.0) for case in gpu_ring.cases(quick=False) if "16384" in case.name}
    assert rates == {f"{2 * 2 * 16384**2 / 2 * 2048 / 1e9:.0f} TFLOP/s"}


# -- the kernels of csrc/cuda, in their CPU build, on one rank ---------------------------------------------------------


class Graph:
    """Runs what is captured as it comes, and notes replays."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuContext]:
    from fused_tp.transport import native_kernels
    from tests.native_build import cpu_device_library

    native_kernels.use_library(cpu_device_library())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **how: contextlib.nullcontext())
    try:
        with pretended_gpu() as context:
            yield context
    finally:
        native_kernels.use_library(None)


@pytest.mark.parametrize("op", gpu_collectives.EXCHANGES)
@pytest.mark.parametrize("nbytes", [1 << 10, 24 << 10])
def test_exchange_cases(native: GpuContext, op: str, nbytes: int) -> None:
    moved = gpu_collectives.traffic(op, nbytes, 1)
    parameters = {"op": op, "nbytes": nbytes, "world_size": 1, "traffic": moved}
    times = gpu_timing.run_case(native, Case("tiny", gpu_collectives.exchange_contestants, parameters))
    assert list(times.seconds) == [OURS, "device copy"] and not times.skipped
    assert all(len(of_one) == 2 for of_one in times.seconds.values())


def test_latency_cases(native: GpuContext) -> None:
    parameters = {"op": "one-shot", "nbytes": 8 << 10, "world_size": 1}
    times = gpu_timing.run_case(native, Case("tiny", latency_without_check, parameters))
    # The pretended events are 1 ms apart.
    assert times.seconds[OURS] == [1e-3 / (times.calls[OURS] or 1)] * 2
    assert times.calls[OURS] % gpu_collectives.LATENCY_CALLS == 0


def latency_without_check(context: GpuContext, **parameters: Any) -> dict[str, Any]:
    """A replay computes nothing here."""
    makers = gpu_collectives.latency_contestants(context, **parameters)
    return {name: lambda maker=maker: replace(maker(), check=None) for name, maker in makers.items()}


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("rows", [3, 40])
def test_norm_cases(native: GpuContext, rows: int, fp8: bool) -> None:
    parameters = {"rows": rows, "columns": 8192, "fp8": fp8, "world_size": 1}
    times = gpu_timing.run_case(native, Case("tiny", gpu_collectives.norm_contestants, parameters))
    assert list(times.seconds) == [OURS, "steps apart"]
    assert times.notes[OURS] == ("one_shot" if rows == 3 else "two_shot")


def test_overhead_cases(native: GpuContext) -> None:
    op, collective = gpu_overhead.cases()
    times = gpu_timing.run_case(native, op)
    assert list(times.seconds) == [OURS, "torch's linear"] and times.calls[OURS] % 100 == 0
    assert all(1e-7 < second < 1e-2 for second in times.seconds[OURS])
    alone = replace(collective, parameters={**collective.parameters, "world_size": 1})
    times = gpu_timing.run_case(native, alone)
    assert list(times.seconds) == [OURS, "torch.add", "in a graph"]
    assert min(times.seconds["in a graph"]) < min(times.seconds[OURS])


@pytest.mark.parametrize("op", gpu_collectives.EXCHANGES)
def test_wrong_sums_and_lost_bytes_are_noticed(native: GpuContext, op: str) -> None:
    exchange = gpu_collectives.Exchange(native, op, 1 << 12, 2)
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
        with pytest.raises(AssertionError, match=r"different bits|did not get what"):
            exchange.check([results[0], other.view(results[1].shape)])
    for wrong in ([results[0] * 1.5, results[1]], [results[0], results[1] * torch.nan]):
        with pytest.raises(AssertionError):
            exchange.check(wrong)


def test_bytes_that_must_be_moved() -> None:
    """One rank reads and writes; two ranks of 4 bytes by hand; each more rank adds a share sent and one received."""
    for op in gpu_collectives.EXCHANGES:
        assert gpu_collectives.traffic(op, 1000, 1) == 2000
    # one-shot, of each: read 4 + 4, write 4 + 4. two-shot: 4 + 2 + 2 and 2 + 4 + 2. reduce-scatter: 4 + 2 and 2 + 2.
    by_hand = {"one-shot": 16, "two-shot": 16, "reduce-scatter": 10, "all-gather": 10, "all-to-all": 12}
    for op, nbytes in by_hand.items():
        assert gpu_collectives.traffic(op, 4, 2) == 2 * nbytes
    assert gpu_collectives.traffic("two-shot", 4096, 4) == 4 * (2 * 4096 + 4 * 3 * 1024)


def test_without_the_library_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = {"op": "two-shot", "nbytes": 1 << 10, "world_size": 1, "traffic": 1 << 11}
    monkeypatch.setattr(gpu_collectives, "no_native_kernels", lambda arch: "they were not built")
    one = Case("exchange/two-shot", gpu_collectives.exchange_contestants, parameters)
    with pretended_gpu() as context:
        _, skipped = gpu.run_all([one], context.budget, lambda case: gpu_timing.run_case(context, case).skipped)
    assert len(skipped) == 1 and "library of device kernels, and they were not built" in skipped[0]
    assert " failed" not in skipped[0] and "build_ext --inplace" in skipped[0]


def test_rates_of_what_moves_and_of_what_is_short() -> None:
    rate = gpu_report._rate
    assert rate({"traffic": 10**9}, 2, 1.0) == "1000 GB/s"
    assert rate({"m": 1000, "n": 1000, "k": 500}, 2, 1.0) == "2 TFLOP/s"
    assert rate({"nbytes": 8192}, 2, 0.0115) == "11.50 us"


def test_microseconds_are_those_of_fused_tp() -> None:
    rivals = {"copy": Rival(MICROSECONDS, 12.0)}
    one = Case("latency/one-shot", lambda *_, **__: {}, {"world_size": 2}, rivals)
    seconds = {OURS: [1.0e-5, 1.1e-5, 1.3e-5], "copy": [2e-6] * 3}
    times = Times(seconds, dict.fromkeys(seconds, 20), dict.fromkeys(seconds, ""), {})
    records = gpu_report.gpu_records(one, times, MACHINE, {"torch": "2"})
    assert "| microseconds 11.000 [10.500, 12.000] | <= 12 | yes |" in gpu_report.markdown(records)


def gpu_test_case(_group: dist.ProcessGroup, file: str, function: str, world_size: int, *args: Any) -> None:
    """What the tests of the GPU do, as far as it can be done here: so that there they fail for the kernels' reasons."""
    import importlib.util
    import sys

    from fused_tp.transport.local import run_local

    spec = importlib.util.spec_from_file_location("gpu_tests", file)
    assert spec is not None and spec.loader is not None
    tests = sys.modules.setdefault("gpu_tests", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(tests)
    run_local(world_size, getattr(tests, function), *args)


GPU_TESTS = str(Path(__file__).parents[1] / "gpu" / "test_fused_kernels.py")


@pytest.mark.parametrize("op", ["one_shot", "two_shot_norm", "reduce_scatter", "copy_engine", "direct"])
def test_the_gpu_tests_of_fused_kernels_on_one_rank(op: str) -> None:
    shapes = [(40, 40, 24), (1, 16, 16)]
    interpreted_ranks(1, gpu_test_case, GPU_TESTS, "one_after_the_other", 1, op, torch.bfloat16, shapes)


@pytest.mark.parametrize("op", ["two_shot", "direct"])
def test_a_rank_whose_flags_are_set_runs_alone(op: str) -> None:
    interpreted_ranks(1, gpu_test_case, GPU_TESTS, "one_rank_alone", 2, op, (40, 48, 24))


def test_nvidia_smi_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_report, "_run", lambda command: "")
    assert gpu_report.nvidia_smi(0) == {}
    monkeypatch.setattr(gpu_report, "_run", lambda command: "580.1, 1980 MHz, 1980 MHz, 3201 MHz, [N/A]")
    assert gpu_report.nvidia_smi(0) == {
        "driver": "580.1",
        "SM clock": "1980 MHz",
        "highest SM clock": "1980 MHz",
        "memory clock": "3201 MHz",
    }
    assert json.dumps(gpu_report.nvidia_smi(0))
