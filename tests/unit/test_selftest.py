"""`fused-tp selftest`: steps that hang, crash or do not fit cost themselves and no more."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

pytest.importorskip("triton")

from fused_tp.cli import selftest
from fused_tp.cli.main import main
from fused_tp.selftest.steps import LATE, LEFT_OUT, RESULT, RIGHT, WRONG, Outcome, Step, affordable, run_steps

YES, NO = ("true",), ("false",)


def step(name: str, code: str, *, least: float = 0.1, limit: float = 20.0, rank: int = 0, gpu: bool = True) -> Step:
    return Step(name, [sys.executable, "-c", code, RESULT], least, limit, rank, needs_gpu=gpu)


# It starts a process of its own, which must not outlive it.
HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("child", child.pid, flush=True)
time.sleep(60)
"""
FINDS = "import json, sys; open(sys.argv[1], 'w').write(json.dumps({'note': '3 are right'}))"


def run(steps: list[Step], out: Path, seconds: float = 60.0, **how: object) -> tuple[list[Outcome], list[str]]:
    lines: list[str] = []
    return list(run_steps(steps, out, seconds, lines.append, alive=how.pop("alive", YES), **how)), lines  # type: ignore[arg-type]


def test_a_step_that_hangs_or_crashes_costs_itself_alone(tmp_path: Path) -> None:
    steps = [
        step("first", FINDS),
        step("hangs", HANGS, limit=2.0),
        step("crashes", "import os, signal; print('so far', flush=True); os.kill(os.getpid(), signal.SIGSEGV)"),
        step("is wrong", "import sys; print('5 of 7'); sys.exit(1)"),
        step("last", "print('fine')"),
    ]
    begun = time.monotonic()
    outcomes, lines = run(steps, tmp_path)
    assert time.monotonic() - begun < 30
    assert [one.state for one in outcomes] == [RIGHT, LATE, WRONG, WRONG, RIGHT]
    assert outcomes[0].note == "3 are right" and outcomes[0].found == {"note": "3 are right"}
    assert "SIGSEGV" in outcomes[2].note and outcomes[3].note == "exit code 1: 5 of 7"
    (child,) = [int(line.split()[-1]) for line in lines if "child" in line]
    stat = Path(f"/proc/{child}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
    written = [json.loads(line) for line in (tmp_path / "outcomes.jsonl").read_text().splitlines()]
    assert [one["name"] for one in written] == [one.name for one in steps]
    assert (tmp_path / "is-wrong.log").read_text() == "5 of 7\n"


def test_a_gpu_that_does_not_answer_is_left_alone(tmp_path: Path) -> None:
    steps = [step("hangs", HANGS, limit=1.0), step("on the GPU", ""), step("elsewhere", "", gpu=False)]
    outcomes, _ = run(steps, tmp_path, alive=NO)
    assert [one.state for one in outcomes] == [LATE, LEFT_OUT, RIGHT]
    assert outcomes[1].note == "the GPU did not answer after hangs"


def test_the_most_valuable_steps_fit_first(tmp_path: Path) -> None:
    steps = [step("c", "", least=15, rank=3), step("a", "", least=10, rank=1), step("b", "", least=50, rank=2)]
    assert affordable(steps, 30) == {"a", "c"}
    outcomes, _ = run(steps, tmp_path, 30)
    assert {one.name: one.state for one in outcomes} == {"a": RIGHT, "b": LEFT_OUT, "c": RIGHT}
    # What takes its whole time leaves none for the next.
    steps = [step("long", "import time; time.sleep(30)", limit=100), step("next", "", least=0.5, rank=1)]
    begun = time.monotonic()
    outcomes, _ = run(steps, tmp_path, 2.0)
    assert [one.state for one in outcomes] == [LATE, LEFT_OUT] and time.monotonic() - begun < 10


@pytest.mark.parametrize(
    ("code", "gpu", "status"), [("", True, 0), ("raise SystemExit(1)", True, 1), ("", False, 0), ("", None, 2)]
)
def test_exit_status(
    code: str,
    gpu: bool | None,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    obstacle = "no GPU" if gpu is None else ""
    monkeypatch.setattr(selftest, "_gpus", lambda: selftest.Gpus(obstacle, 90, 1, "H100"))
    monkeypatch.setattr(selftest, "steps", lambda *_: [step("only", code, gpu=gpu is not False)])
    (tmp_path / "of the user").write_text("kept")
    assert main(["selftest", "--out", str(tmp_path)]) == status
    assert (tmp_path / "of the user").read_text() == "kept"
    report = json.loads((tmp_path / "selftest.json").read_text())
    assert [one["name"] for one in report["steps"]] == ["only"]
    assert "| only |" in capsys.readouterr().out


def test_the_steps_are_named_and_chosen(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["selftest", "--list"]) == 0
    names = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert names[:3] == ["environment", "kernels", "smoke"] and "sums, 4 ranks" in names
    assert main(["selftest", "--only", "nothing"]) == 2
    assert "matches no step" in capsys.readouterr().err
    assert main(["selftest", "--kernels", str(tmp_path / "none")]) == 2


def test_environment_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "fused_tp", "selftest", "--only", "^environment|^smoke", "--minutes", "1", "--out"]
    done = subprocess.run([*command, str(out)], capture_output=True, text=True, timeout=120)
    report = json.loads((out / "selftest.json").read_text())
    found = report["steps"][0]["found"]
    assert found["versions"]["torch"] and found["processors"] > 0, done.stdout
    import torch

    if not torch.cuda.is_available():
        assert done.returncode == 2 and report["steps"][1]["state"] == LEFT_OUT


def test_tune_checks_with_threads_where_there_is_one_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which cases, and what is said of them: the checks themselves need the GPU."""
    import torch

    from fused_tp.selftest import kernels

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(kernels, "check", lambda case, device: "off by 3" * (case.op == "ring"))
    file = tmp_path / "found.json"
    assert main(["tune", "--check-only", "--ranks", "4", "--json", str(file)]) == 1
    found = json.loads(file.read_text())
    assert list(found["wrong"]) == ["ring, 4 ranks, bfloat16, late"]
    assert "two_shot, 4 ranks, bfloat16, late" in found["right"]
    assert "WRONG: ring, 4 ranks, bfloat16, late: off by 3" in capsys.readouterr().out
    assert main(["tune", "--check-only", "--ranks", "4", "--dtypes", "fp16"]) == 2
    assert "--ranks is 4 and --dtypes is fp16" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [pytest.param(False, marks=pytest.mark.full), True])
def test_collectives_of_csrc(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases of the device kernels, which run in their CPU build here; one that is off is found."""
    import torch

    from fused_tp.selftest import kernel_calls, kernels
    from tests.native_build import cpu_device_library, use_library

    use_library(cpu_device_library())
    try:
        if wrong:
            reduce = kernel_calls._Natives.all_reduce
            monkeypatch.setattr(
                kernel_calls._Natives, "all_reduce", lambda device, *how: reduce(device, *how) + 0.25 * device.rank
            )
        cases = [case for case in kernels.CASES if case.op in kernel_calls.NATIVE and case.dtype.itemsize < 4]
        assert {case.world for case in cases} == {1, 2, 3, 4}
        for case in cases:
            problem = kernels.check(case, torch.device("cpu"))
            assert bool(problem) == (wrong and case.world > 1 and case.op == "collectives"), f"{case.name}: {problem}"
    finally:
        use_library(None)


@pytest.mark.full
def test_kernels_are_found_on_another_machine(tmp_path: Path) -> None:
    """Compiled here and packed; there, with another home and in another process, nothing compiles."""
    script = """
import sys
from pathlib import Path
from fused_tp.selftest import kernel_cache, kernels
from fused_tp.triton_kernels import archive
from unittest import mock

few = [case for case in kernels.CASES if case.op in ("attention", "direct") and case.world < 3 and not case.late]
few = [kernels.one_call(case) for case in few if case.dtype.itemsize == 2]
if sys.argv[2] == "unpack":
    few.reverse()
    assert archive.unpack(Path(sys.argv[1]), archive.cache_folder()) > 3
    assert archive.unpack(Path(sys.argv[1]), archive.cache_folder()) == 0
compiled = []
with kernel_cache.recorded(90, 0, 1) as launches:
    for case in few:
        kernels.launch_only(case)
        launches.compile()
assert not launches.failed, launches.failed
print(len(launches.keys), launches.hits)
if sys.argv[2] == "pack":
    assert archive.pack(archive.cache_folder(), Path(sys.argv[1])) == len(launches.keys)
"""

    def run_there(what: str) -> tuple[int, int]:
        home = tmp_path / what
        home.mkdir()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
        command = [sys.executable, "-c", script, str(tmp_path / "kernels.tar.xz"), what]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, env={**environment, "HOME": str(home)}, check=False
        )
        assert done.returncode == 0, done.stderr
        kernels, hits = map(int, done.stdout.split())
        return kernels, hits

    kernels, hits = run_there("pack")
    assert kernels > 3 and hits == 0
    assert run_there("unpack") == (kernels, kernels)
    with pytest.raises(ValueError, match="is no archive of kernels"):
        (tmp_path / "text").write_text("no archive")
        from fused_tp.triton_kernels.archive import unpack

        unpack(tmp_path / "text", tmp_path)
    with pytest.raises(ValueError, match="is no archive of kernels"):
        group = b'["../outside.cubin"]'
        with tarfile.open(tmp_path / "leaves.tar.xz", "w:xz") as tar:
            info = tarfile.TarInfo("KEY/__grp__k.json")
            info.size = len(group)
            tar.addfile(info, io.BytesIO(group))
        unpack(tmp_path / "leaves.tar.xz", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
