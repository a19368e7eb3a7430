"""`benchmarks/profile.sh` without tools and without a GPU: traces of torch.profiler, rank by rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.profile_case import CASES, from_command_line, merge_traces
from tests.workers import REPOSITORY

pytestmark = pytest.mark.full

SCRIPT = "benchmarks/profile.sh"


def profile(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", SCRIPT, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_trace_of_two_ranks(tmp_path: Path) -> None:
    small = ("--steps", "2", "--warmup", "1", "--tokens", "8", "--hidden", "32")
    done = profile("torch", "mlp", "--world", "2", "--out", str(tmp_path), "--", *small, FUSED_TP_SCHEDULE="pipelined")
    assert done.returncode == 0, done.stderr[-4000:]
    traces = {file.name: json.loads(file.read_text())["traceEvents"] for file in tmp_path.iterdir()}
    assert set(traces) == {"mlp.json", "mlp.rank0.json", "mlp.rank1.json"}
    for events in (traces["mlp.rank0.json"], traces["mlp.rank1.json"]):
        names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
        assert names.count("step 0") == names.count("step 1") == 1
        assert names.count("all_gather_matmul [4, 32]x[64, 32]x[64, 32] bf16 pipelined") == 2
        assert names.count("chunk of rank 0 [4, 32]") == 4  # twice forward, twice in the backward of the reduce-scatter
    together = [event for event in traces["mlp.json"] if event.get("name") == "step 0"]
    assert len({event["pid"] for event in together}) == 2
    first, second = sorted(together, key=lambda event: float(event["ts"]))
    assert second["ts"] < first["ts"] + first["dur"]  # ranks run a step at the same time, so their ranges overlap


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("torch",), "no case is named"),
        (("torch", "mlp", "--world", "none"), "--world is none; it must be a number of ranks"),
        (("torch", "mlp", "--out"), "--out needs a value"),
        (("torch", "mlp", "--tokens", "8"), "unknown option --tokens; put options of the case after --"),
        (("nsys", "mlp"), "nsys is not installed; install it or use the mode torch"),
        (("ncu", "mlp"), "ncu is not installed; install it or use the mode torch"),
    ],
)
def test_refusals(arguments: tuple[str, ...], message: str) -> None:
    done = profile(*arguments, PATH="/usr/bin:/bin")
    assert done.returncode == 2 and message in done.stderr


def test_help_names_all_cases() -> None:
    text = profile("--help").stdout
    assert all(case in text for case in CASES) and "nsys" in text


def test_merging_puts_ranks_on_one_clock(tmp_path: Path) -> None:
    for rank, base in ((0, 1_000_000), (1, 3_000_000)):
        events = [
            {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "GPU 0"}},
            {"ph": "X", "name": "kernel", "pid": 0, "ts": 10.0, "dur": 1.0, "id": 7},
        ]
        (tmp_path / f"{rank}.json").write_text(json.dumps({"baseTimeNanoseconds": base, "traceEvents": events}))
    merge_traces(tmp_path / "all.json", [tmp_path / "0.json", tmp_path / "1.json"])
    merged = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    assert [event["args"]["name"] for event in merged[::2]] == ["rank 0: GPU 0", "rank 1: GPU 0"]
    assert [(event["ts"], event["pid"], event["id"]) for event in merged[1::2]] == [
        (10.0, 1, "0.7"),
        (2010.0, 2, "1.7"),
    ]


def test_a_case_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        from_command_line([])
    assert "name a case" in capsys.readouterr().err
