"""`fused-tp report` on handwritten traces: times are in microseconds, so that sums can be checked by eye."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from fused_tp.cli.main import main
from fused_tp.cli.report import late_rank_sentences
from fused_tp.training.exposure import ExposureReport, RankTime, analyze
from fused_tp.training.intervals import Intervals
from fused_tp.training.traces import read_traces

MAIN, WORKER, STREAM, NCCL = 100, 101, 7, 20
ARGS = "ncclDevKernelArgsStorage<4096ul>"
TP = {"pg_name": "1", "pg_desc": "mesh_tp", "pg_size": 2, "ranks": [0, 1]}


def event(name: str, start: float, stop: float, kind: str = "cpu_op", tid: int = MAIN, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": stop - start, "args": args}


def annotation(name: str, start: float, stop: float, tid: int = MAIN) -> dict[str, Any]:
    return event(name, start, stop, "user_annotation", tid)


def write(folder: Path, *ranks: list[dict[str, Any]], groups: Any = (TP,), world_size: int | None = None) -> Path:
    """Write one trace file per rank in Kineto's format, the first ones compressed."""
    folder.mkdir(exist_ok=True)
    for rank, events in enumerate(ranks):
        info = {"backend": "gloo", "rank": rank, "world_size": world_size or len(ranks), "pg_config": list(groups)}
        other = [{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": "python"}}]
        trace = {"schemaVersion": 1, "distributedInfo": info, "baseTimeNanoseconds": 17, "traceEvents": other + events}
        text = json.dumps(trace).encode()
        if rank == 0:
            (folder / "rank0.json.gz").write_bytes(gzip.compress(text))
        else:
            (folder / f"rank{rank}.json").write_bytes(text)
    return folder


def report_of(folder: Path) -> ExposureReport:
    return analyze(read_traces([folder]))


def microseconds(thing: Any, *names: str) -> list[float]:
    return [round(getattr(thing, name) * 1e6, 3) for name in names]


def test_intervals() -> None:
    times = Intervals([(5, 6), (0, 2), (1, 3), (3, 4), (8, 8)])
    assert list(times) == [(0, 4), (5, 6)] and times.length == 5
    assert (
        times.covered_length(1, 5.5) == 3.5
        and times.covered_length(4, 5) == times.covered_length(6, 9) == times.covered_length(-2, 0) == 0
    )
    assert list(times.without(Intervals([(1, 2), (3, 5.5)]))) == [(0, 1), (2, 3), (5.5, 6)]
    assert list(times.without(Intervals([(-1, 9)]))) == [] and list(times.without(Intervals([]))) == list(times)


def test_gloo_beside_compute(tmp_path: Path) -> None:
    events = [
        annotation("step 3", 0, 1000),
        event("aten::linear", 0, 400),
        event("aten::mm", 10, 390),
        annotation("all_reduce [256] f32 plain", 280, 595),
        annotation("gloo:all_reduce", 300, 700, WORKER),
        annotation("waiting for all_reduce", 400, 590),
        annotation("waited 0.000000 s, group 1", 591, 591),
        event("c10d::allreduce_", 290, 300),
        event("aten::mm", 600, 800),
        event("autograd::engine::evaluate_function: AddBackward0", 810, 950),  # no op inside: not counted as compute
        event("aten::mm", 1200, 1300),  # after the step
    ]
    report = report_of(write(tmp_path, events))
    (rank,), (op,) = report.ranks, report.ops
    # Compute: until 400, from 590 to 595 (the end of the op), and from 600 to 800.
    assert microseconds(rank, "step", "compute", "hidden", "exposed", "bubble", "idle") == [1000, 605, 205, 195, 0, 200]
    assert (op.op, op.group, op.calls, *microseconds(op, "exposed", "hidden")) == (
        "all_reduce (plain)",
        "tp",
        1,
        195,
        205,
    )


def test_ranges_that_only_stand_around_waits(tmp_path: Path) -> None:
    """Ranges of FSDP2, and a program's own ranges with colons in their names, are not counted as compute."""

    def rank(loading: float) -> list[dict[str, Any]]:
        return [
            annotation("step 3", 0, 1000),
            annotation("my::loading", 0, loading),
            annotation("FSDP::pre_forward (layers.0)", loading, 810),
            annotation("FSDP::all_gather (0)", loading + 1, 809),
            event("gloo:all_gather", loading + 2, 805, "user_annotation", WORKER),
            event("aten::mm", 810, 1000),
        ]

    folder = write(tmp_path / "traces", rank(100), rank(700))
    (folder / "report.json").write_text("{}")  # left by an earlier report in the same folder
    report = report_of(folder)
    assert [microseconds(one, "compute", "hidden", "exposed") for one in report.ranks] == [[190, 0, 703], [190, 0, 103]]
    assert report.ranks[1].cause == "my::loading"


def test_waits_of_ops_in_shared_memory(tmp_path: Path) -> None:
    """An op counts as compute except for its waits: those of native code, given by a mark, and those with a range."""

    def events(waited: float, begun: float) -> list[dict[str, Any]]:
        return [
            annotation("step 1", 0, 1000),
            annotation("fused_tp::matmul_all_reduce", begun, 900),
            annotation("matmul_all_reduce [4, 8]x[8, 8] f32 one_sided", begun, 900),
            annotation("chunk of rank 1", begun + 1, begun + 2),
            annotation(f"waited {waited * 1e-6:.6f} s, group 1", 899, 899),
            annotation("waiting for exchange of the first call, group 1", 900, 1000),
        ]

    report = report_of(write(tmp_path, events(300, 200), events(20, 480)))
    assert microseconds(report.ranks[0], "compute", "exposed", "idle") == [400, 400, 200]
    assert microseconds(report.ranks[1], "compute", "exposed", "idle") == [400, 120, 480]
    assert microseconds(report.ranks[0], "waited_for") == [0] and microseconds(report.ranks[1], "waited_for") == [280]
    assert [(one.op, one.group, one.calls) for one in report.ops] == [
        ("matmul_all_reduce", "tp", 1),
        ("exchange", "tp", 1),
    ]
    assert microseconds(report.ops[0], "exposed", "hidden") == [160, 0]
    assert [(one.op, one.group, one.calls) for one in report.groups] == [("all", "tp", 2)]
    assert microseconds(report.groups[0], "exposed") == [260]


def late(mlp: float, *, module: bool = True) -> list[dict[str, Any]]:
    """A step in which an MLP takes `mlp` us forward and a third of that backward; all ranks end at 1000."""
    number: dict[str, Any] = {"Sequence number": 5}
    inside = [annotation("layers.0.mlp", 100, 100 + mlp)] if module else []
    return [
        annotation("step 1", 0, 1000),
        annotation("layers.0", 0, 110 + mlp),
        event("aten::norm", 0, 100),
        *inside,
        event("aten::mm", 100, 100 + mlp * 0.1, **number),
        event("autograd::engine::evaluate_function: MmBackward0", 120 + mlp, 120 + mlp * 4 / 3, **number),
        annotation("gloo:all_reduce", 120 + mlp * 4 / 3, 1000, WORKER),
    ]


def test_late_rank_and_its_module(tmp_path: Path) -> None:
    """The module need not compute all the time: a rank that sleeps is late, too."""
    report = report_of(write(tmp_path, late(150), late(450), late(180), groups=[{**TP, "ranks": [0, 1, 2]}]))
    assert [rank.rank for rank in report.ranks if rank.cause] == [1]
    assert report.ranks[1].cause == "layers.0.mlp"
    # The collective is 400 us shorter than on rank 0 and 360 us shorter than on rank 2.
    assert microseconds(report.ranks[1], "waited_for", "more") == [380, 285]


def test_late_by_what_others_do_not_do(tmp_path: Path) -> None:
    """Two buckets of gradients are reduced concurrently: waits that overlap count once."""
    step, first, second = annotation("step 1", 0, 1000), annotation("gloo:all_reduce", 300, 800, WORKER), WORKER + 1
    early = [step, event("aten::mm", 0, 300), first, annotation("gloo:all_reduce", 310, 900, second)]
    slow = [
        step,
        event("aten::mm", 0, 300),
        annotation("save", 300, 700),
        annotation("gloo:all_reduce", 700, 800, WORKER),
    ]
    slow.append(annotation("gloo:all_reduce", 710, 900, second))
    report = report_of(write(tmp_path, early, slow))
    assert (report.ranks[1].cause, *microseconds(report.ranks[1], "waited_for", "more")) == ("save", 410, 400)


def test_module_of_backward(tmp_path: Path) -> None:
    slow = late(150)
    slow[5]["dur"], slow[6]["ts"], slow[6]["dur"] = 400, 670, 330
    report = report_of(write(tmp_path, late(150), slow))
    assert (report.ranks[1].cause, *microseconds(report.ranks[1], "more")) == ("backward of layers.0.mlp", 350)


def test_groups_that_are_not_known(tmp_path: Path) -> None:
    """Gloo's n-th collective on a 2-D mesh may belong to either group."""
    groups = [TP, {"pg_name": "2", "pg_desc": "undefined", "ranks": [0, 2]}]
    report = report_of(write(tmp_path, late(150), late(450), groups=groups))
    assert all(rank.waited_for == 0 for rank in report.ranks) and "all_reduce (ranks unknown)" in report.notes[0]


def test_pipeline_waits(tmp_path: Path) -> None:
    events = [
        annotation("ProfilerStep#1", 0, 500),
        annotation("ProfilerStep#2", 500, 1000),
        annotation("gloo:recv", 0, 400),
        event("aten::mm", 300, 700),
        annotation("gloo:send", 700, 800),
    ]
    report = report_of(write(tmp_path, events, events))
    (rank, _) = report.ranks
    assert microseconds(rank, "step", "compute", "hidden", "exposed", "bubble", "idle") == [500, 200, 50, 0, 200, 100]
    assert rank.waited_for == 0 and "Interleaved1F1B" in report.advice[1]


def kernel(name: str, start: float, stop: float, correlation: int, stream: int, **args: Any) -> dict[str, Any]:
    given = {"device": 0, "context": 1, "stream": stream, "correlation": correlation, "External id": correlation}
    return event(name, start, stop, "kernel", stream, **given, **args)


def cuda(all_reduce: float, up: float = 300.0) -> list[dict[str, Any]]:
    """A matmul of `up` us, then an all-reduce concurrent with an add, and a pipeline send at the end."""
    nccl = {
        "Collective name": "allreduce",
        "In msg nelems": 8,
        "Out msg nelems": 8,
        "Group size": 2,
        "dtype": "BFloat16",
    }
    nccl |= {"Process Group Name": "1", "Process Group Description": "mesh_tp", "Process Group Ranks": "[0, 1]"}
    launches = [
        event("cudaLaunchKernel", start, start + 5, "cuda_runtime", cbid=211, correlation=number)
        for number, start in ((1, 5), (2, 25), (3, 45), (4, 65), (5, 85))
    ]
    return [
        annotation("layers.0.mlp.up_proj", 0, 20),
        annotation("layers.0.mlp.down_proj", 40, 60),
        event("c10d::allreduce_", 20, 40),
        *launches,
        kernel("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_tn", 100, 100 + up, 1, STREAM),
        kernel(f"ncclDevKernel_AllReduce_Sum_bf16_RING_LL({ARGS})", 100 + up, 100 + up + all_reduce, 2, NCCL, **nccl),
        kernel("void at::native::vectorized_elementwise_kernel<4, at::native::add>(int)", 450, 700, 3, STREAM),
        event("Memcpy DtoD (Device -> Device)", 700, 750, "gpu_memcpy", STREAM, stream=STREAM, correlation=4),
        kernel(f"ncclDevKernel_SendRecv({ARGS})", 740, 850, 5, 24),
        event("layers.0.mlp", 100, 700, "gpu_user_annotation", STREAM),
    ]


def test_cuda(tmp_path: Path) -> None:
    """NCCL kernels overlap kernels of other streams; each kernel belongs to the module that launched it."""
    report = report_of(write(tmp_path, cuda(250), cuda(150, up=400)))
    first, second = report.ranks
    # From 100 to 850: matmul 300, add 250, copy 50; all-reduce from 400 to 650, exposed for 50; send exposed for 100.
    assert microseconds(first, "step", "compute", "hidden", "exposed", "bubble", "idle") == [750, 600, 210, 50, 100, 0]
    # The all-reduce from 500 to 650 is hidden by the add: this rank waits for no peer, and its peer waits for it.
    assert microseconds(second, "compute", "hidden", "exposed", "bubble", "idle") == [650, 160, 0, 100, 0]
    assert (second.cause, *microseconds(second, "waited_for", "more")) == ("layers.0.mlp.up_proj", 50, 100)
    assert [(one.op, one.group) for one in report.ops] == [("ncclDevKernel_SendRecv", ""), ("allreduce", "tp")]
    assert microseconds(report.ops[1], "calls", "exposed", "hidden") == [1e6, 25, 175]


def test_kernels_that_communicate(tmp_path: Path) -> None:
    names = [
        "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*)",
        "Memcpy PtoP (Device -> Device)",
        "void (anonymous namespace)::two_shot_all_reduce_kernel<c10::BFloat16>(int)",
        "void fused_tp::all_gather_kernel<4>(Plan)",
        "all_reduce_one_shot",
        "relay_kernel",
        "gemm_all_reduce_kernel",  # also computes
        "ring_kernel",
    ]
    events = [kernel(name, 10 * place, 10 * place + 10, place, STREAM) for place, name in enumerate(names)]
    (rank,) = report_of(write(tmp_path, events, groups=())).ranks
    assert microseconds(rank, "exposed", "compute") == [60, 20]


@pytest.mark.parametrize(
    ("op", "group", "says"),
    [
        ("matmul_all_reduce [4, 8]x[8, 8] f32 plain", "mesh_tp", "use a fused schedule"),
        ("matmul_all_reduce [4, 8]x[8, 8] f32 one_shot", "mesh_tp", "within a node"),
        ("", "mesh_tp", "allreduce over tp is a plain collective: fused_tp.parallelize"),
        ("", "mesh_fsdp", "allreduce over fsdp moves gradients"),
    ],
)
def test_advice(tmp_path: Path, op: str, group: str, says: str) -> None:
    events = [
        kernel("gemm", 0, 500, 1, STREAM),
        event("cudaLaunchKernel", 5, 9, "cuda_runtime", correlation=2),
        kernel(
            "ncclDevKernel_AllReduce", 500, 1000, 2, NCCL, **{"Collective name": "allreduce", "Process Group Name": "1"}
        ),
    ]
    if op:
        events.append(annotation(op, 0, 10))
    advice = report_of(write(tmp_path, events, events, groups=[{**TP, "pg_desc": group}])).advice
    assert advice[0].startswith("50% of a step is exposed") and says in advice[1]


def test_advice_on_collectives_beside_a_pipeline(tmp_path: Path) -> None:
    events = [
        kernel("gemm", 0, 400, 1, STREAM),
        kernel("ncclDevKernel_SendRecv", 400, 620, 2, NCCL, **{"Collective name": "recv", "Process Group Name": "1"}),
        kernel("ncclKernel_A", 620, 820, 3, NCCL, **{"Collective name": "allreduce", "Process Group Name": "1"}),
        kernel("ncclKernel_B", 820, 1000, 4, NCCL, **{"Collective name": "broadcast", "Process Group Name": "1"}),
    ]
    report = report_of(write(tmp_path, events, events))
    assert microseconds(report.ranks[0], "exposed", "bubble") == [380, 220]
    assert report.ops[0].op == "recv" and report.advice[1].startswith("allreduce over tp")


def test_the_rank_that_others_wait_for_longest_is_named_first() -> None:
    """A rank without a module that explains its lateness was not named, however long others waited for it."""
    times = [(0, 0.1, ""), (1, 0.3, "layers.0.mlp"), (2, 0.5, "")]
    ranks = [RankTime(rank, 1.0, 0.5, 0.0, 0.5, 0.0, 0.0, waited, cause, 0.2) for rank, waited, cause in times]
    first, second = late_rank_sentences(ExposureReport(ranks, [], [], [], []))
    assert first.startswith("Rank 2 is late: others wait 0.5000 s") and "No module explains it" in first
    assert second.startswith("Rank 1 is late") and second.endswith("in layers.0.mlp.")


def test_advice_names_a_late_rank(tmp_path: Path) -> None:
    report = report_of(write(tmp_path, late(60), late(500)))
    assert "waiting for rank 1: first find why layers.0.mlp is slower" in report.advice[1]


def test_a_trace_of_no_length(tmp_path: Path) -> None:
    report = report_of(write(tmp_path, [event("aten::mm", 5, 5)], world_size=2))
    assert [rank.cause for rank in report.ranks] == [""]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    traces = write(tmp_path / "traces", late(150), late(450), world_size=3)
    out = tmp_path / "out"
    assert main(["report", str(tmp_path), "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert (
        "Rank 1 is late: others wait 0.0004 s of a step for it." in text and "more than they do in layers.0.mlp" in text
    )
    assert "Traces of rank 2 are missing" in text and "mean" in text
    assert (out / "report.png").stat().st_size > 1000
    assert main(["report", *map(str, traces.iterdir()), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((out / "report.json").read_text())


def test_what_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def says(*paths: Path) -> str:
        assert main(["report", *map(str, paths), "--out", str(tmp_path / "out")]) == 2
        return capsys.readouterr().err

    folder = write(tmp_path / "cut", late(150))
    whole = (folder / "rank0.json.gz").read_bytes()
    (folder / "rank0.json.gz").write_bytes(whole[: len(whole) // 2])
    assert "rank0.json.gz cannot be read as a trace of torch.profiler (EOFError" in says(folder)
    for name, content in (("rank1.json", "{"), ("rank2.json", "[]"), ("rank3.json", '{"steps": 1}')):
        (tmp_path / name).write_text(content)
        assert f"{name} cannot be read as a trace of torch.profiler" in says(tmp_path / name)
    assert "nowhere.json does not exist" in says(tmp_path / "nowhere.json")
    (tmp_path / "mine.json").write_text('{"traceEvents": []}')
    assert "mine.json is unknown; rename the file to, for example, rank0.json" in says(tmp_path / "mine.json")
    (tmp_path / "rank4.json").write_text('{"traceEvents": []}')
    assert "rank4.json has no events" in says(tmp_path / "rank4.json")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "empty has no trace" in says(empty)
    twice = write(tmp_path / "twice", late(150), late(150))
    (twice / "copy.json").write_bytes((twice / "rank1.json").read_bytes())
    assert "a second trace of rank 1" in says(twice)
    assert "pass either traces, or a configuration by --live" in says()
    assert main(["report", str(folder), "--steps", "2", "--out", str(tmp_path / "out")]) == 2
    assert "--steps and --set need --live" in capsys.readouterr().err
