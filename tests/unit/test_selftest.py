"""`fused-tp selftest`: a step that hangs, crashes or does not fit into the time affects no other step."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from fused_tp.cli import selftest
from fused_tp.cli.main import main
from fused_tp.selftest import steps as step_module
from fused_tp.selftest.steps import (
    RESULT_PLACEHOLDER,
    STATE_INTERRUPTED,
    STATE_LATE,
    STATE_LEFT_OUT,
    STATE_RIGHT,
    STATE_WRONG,
    UNABLE_EXIT_CODE,
    Outcome,
    SelftestStep,
    choose_affordable,
    run_steps,
)

YES, NO = ("true",), ("false",)


def step(
    name: str, code: str, *, least: float = 0.1, limit: float = 20.0, rank: int = 0, gpu: bool = True
) -> SelftestStep:
    return SelftestStep(name, [sys.executable, "-c", code, RESULT_PLACEHOLDER], least, limit, rank, needs_gpu=gpu)


# The step starts a child process, which must not outlive it.
HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("child", child.pid, flush=True)
time.sleep(60)
"""
FINDS = "import json, sys; open(sys.argv[1], 'w').write(json.dumps({'note': '3 are right'}))"


def run(steps: list[SelftestStep], out: Path, seconds: float = 60.0, **how: object) -> tuple[list[Outcome], list[str]]:
    lines: list[str] = []
    return list(run_steps(steps, out, seconds, lines.append, probe=how.pop("alive", YES), **how)), lines  # type: ignore[arg-type]


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
    assert [one.state for one in outcomes] == [STATE_RIGHT, STATE_LATE, STATE_WRONG, STATE_WRONG, STATE_RIGHT]
    assert outcomes[0].note == "3 are right" and outcomes[0].findings == {"note": "3 are right"}
    assert "SIGSEGV" in outcomes[2].note and outcomes[3].note == "exit code 1: 5 of 7"
    (child,) = [int(line.split()[-1]) for line in lines if "child" in line]
    stat = Path(f"/proc/{child}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
    written = [json.loads(line) for line in (tmp_path / "outcomes.jsonl").read_text().splitlines()]
    assert [one["name"] for one in written] == [one.name for one in steps]
    assert (tmp_path / "is-wrong.log").read_text() == "5 of 7\n"


def gone(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def wait_for(true: Any, seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.02)


WRITES_AND_HANGS = """
import json, os, sys, time
open(sys.argv[1], "w").write(json.dumps({"note": "2 of 2 cases are right", "pid": os.getpid()}))
time.sleep(60)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_interruption_keeps_what_was_found(
    number: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest, "_find_gpus", lambda: selftest.Gpus("", 90, 1, "H100"))
    chosen = [step("first", FINDS), step("hangs", WRITES_AND_HANGS), step("never", "")]
    monkeypatch.setattr(selftest, "make_steps", lambda *_: chosen)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # SIGINT is ignored in background jobs

    def interrupt() -> None:
        wait_for(lambda: (tmp_path / "hangs.json").exists() and (tmp_path / "hangs.json").read_text().endswith("}"))
        report = json.loads((tmp_path / "selftest.json").read_text())  # the report if a SIGKILL arrived now
        assert [one["name"] for one in report["steps"]] == ["first"] and report["versions"]["torch"]
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        found = main(["selftest", "--out", str(tmp_path)])
    except SystemExit as error:
        found = int(str(error.code))
    thread.join()
    assert found == status
    report = json.loads((tmp_path / "selftest.json").read_text())
    assert [(one["name"], one["state"]) for one in report["steps"]] == [
        ("first", STATE_RIGHT),
        ("hangs", STATE_INTERRUPTED),
    ]
    assert report["steps"][1]["note"] == "2 of 2 cases are right" and gone(report["steps"][1]["found"]["pid"])


def test_steps_die_with_a_selftest_that_is_killed(tmp_path: Path) -> None:
    script = """
import importlib.util, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("steps", sys.argv[1])
steps = sys.modules["steps"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(steps)
command = [sys.executable, "-c", sys.argv[3], steps.RESULT_PLACEHOLDER]
hangs = steps.SelftestStep("hangs", command, 1, 60, 0, needs_gpu=False)
list(steps.run_steps([hangs], Path(sys.argv[2]), 60, print))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script, step_module.__file__, str(tmp_path), WRITES_AND_HANGS], stdout=subprocess.DEVNULL
    )
    result = tmp_path / "hangs.json"
    wait_for(lambda: result.exists() and result.read_text().endswith("}"))
    process.kill()
    process.wait()
    wait_for(lambda: gone(json.loads(result.read_text())["pid"]))


def test_a_gpu_is_asked_for_no_longer_than_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline holds even if the probe leaves a child process that keeps its output open."""
    monkeypatch.setattr(step_module, "PROBE_SECONDS", 0.5)
    begun = time.monotonic()
    outcomes, _ = run([step("hangs", HANGS, limit=0.5)], tmp_path, alive=("sh", "-c", "sleep 50 & sleep 50"))
    assert outcomes[0].note.endswith("the GPU does not answer") and time.monotonic() - begun < 12


def test_notes_of_steps(tmp_path: Path) -> None:
    note = '{"note": "5 of 7 | right"}'
    writes = f"import sys; open(sys.argv[1], 'w').write('{note}'); print('right  the last'); "
    steps = [
        step("wrong", writes + "sys.exit(1)"),
        step("crashes", writes + "sys.exit(9)"),
        step("cannot", writes + f"sys.exit({UNABLE_EXIT_CODE})"),
        SelftestStep(
            "late", ["sh", "-c", f"echo '{note}' > \"$0\"; echo right; sleep 60", RESULT_PLACEHOLDER], 0.1, 1.5, 0
        ),
        SelftestStep("no program", [str(tmp_path / "none")], 0.1, 5, 0),
        step("says much", "print('x' * 1000000); print('end')"),
    ]
    outcomes, _ = run(steps, tmp_path)
    assert [one.state for one in outcomes] == [
        STATE_WRONG,
        STATE_WRONG,
        STATE_LEFT_OUT,
        STATE_LATE,
        STATE_WRONG,
        STATE_RIGHT,
    ]
    notes = [one.note for one in outcomes]
    assert notes[:2] == ["exit code 1: 5 of 7 | right", "exit code 9: right  the last"]
    assert notes[2:4] == ["5 of 7 | right", "ended after 2 s: 5 of 7 | right"] and "the step did not run" in notes[4]
    seconds = f"{outcomes[0].seconds:.0f}"
    assert f"| wrong | wrong | {seconds} | exit code 1: 5 of 7 \\| right |" in step_module.format_table(outcomes)


def test_the_report_of_an_earlier_run_is_gone_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that torch sees but cannot use is reported, too, as an obstacle without a traceback."""
    import torch

    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: unknown error\nmore")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", broken)
    monkeypatch.setattr(torch.cuda.nccl, "version", broken)
    (tmp_path / "selftest.json").write_text('{"steps": [1]}')
    reads = f"print(open({str(tmp_path / 'selftest.json')!r}).read())"
    monkeypatch.setattr(selftest, "make_steps", lambda *_: [step("reads", reads, gpu=False), step("on the GPU", "")])
    assert main(["selftest", "--out", str(tmp_path)]) == 2
    report = json.loads((tmp_path / "selftest.json").read_text())
    assert '"steps": []' in (tmp_path / "reads.log").read_text()
    assert report["steps"][1]["note"] == "torch finds a GPU but cannot use it (CUDA error: unknown error)"


def test_no_step_runs_before_one_that_is_worth_more() -> None:
    for gpus in (1, 8):
        steps = selftest.make_steps(90, None, gpus, Path("out"))
        ranks = [one.priority for one in steps]
        assert ranks == sorted(ranks)
        # All mandatory steps fit into the default time.
        assert sum(one.min_seconds for one in steps if one.priority < 8) < 60 * selftest.DEFAULT_MINUTES - 60 * (
            gpus > 1
        )


def body(monkeypatch: pytest.MonkeyPatch, result: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run the body of a step in this process; return its exit code and result."""
    from fused_tp.selftest import __main__ as bodies

    monkeypatch.setattr(sys, "argv", ["selftest", str(result), *arguments])
    code = bodies.main(sys.argv[1:])
    return code, json.loads(result.read_text())


def test_cases_behind_one_that_raises_run_in_a_new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from fused_tp.selftest import kernels

    class Replaced(Exception):
        pass

    def execv(program: str, arguments: list[str]) -> None:
        raise Replaced(arguments[2:])

    tried: list[str] = []

    def run_case(case: kernels.KernelCase, device: object) -> kernels.CaseResult:
        tried.append(case.name)
        bad = case.op == "one_shot"
        return kernels.CaseResult("AcceleratorError: CUDA error" * bad, bad, 30.0 if bad else 1.0)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(kernels, "run_case", run_case)
    monkeypatch.setattr(os, "execv", execv)
    result = tmp_path / "found.json"
    words = ("kernels", "sums, 2 ranks")
    with pytest.raises(Replaced) as raised:
        body(monkeypatch, result, *words)
    again = raised.value.args[0]
    assert again == ["fused_tp.selftest", str(result), *words, "1"] and len(tried) == 1
    code, found = body(monkeypatch, result, *words, "1")
    assert code == 1 and len(set(tried)) == len(tried) == len(found["cases"]) - 1  # an op that hung is not tried again
    assert found["cases"]["one_shot, 2 ranks, bfloat16, late"].startswith("not tried")
    assert list(found["wrong"]) == ["one_shot, 2 ranks, bfloat16", "one_shot, 2 ranks, bfloat16, late"]
    assert found["note"].startswith("10 of 12 cases are right; one_shot, 2 ranks, bfloat16: AcceleratorError")


def test_an_archive_that_is_broken_or_of_another_triton_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fused_tp.selftest import kernel_cache
    from fused_tp.triton_kernels import archive

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_cache, "compile_for", lambda *_: kernel_cache.CompileResult(5, 0, [], 1.0))
    good, content = tmp_path / "good.tar.xz", os.urandom(9999)
    with tarfile.open(good, "w:xz") as tar:
        for name, text in (("KEY/__grp__k.json", b'["k.cubin"]'), ("KEY/k.cubin", content)):
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text))
    whole = good.read_bytes()
    flipped = tmp_path / "flipped.tar.xz"
    flipped.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    with pytest.raises(ValueError, match="is not an archive of kernels"):
        archive.unpack(flipped, tmp_path / "other")
    code, found = body(monkeypatch, tmp_path / "found.json", "compile", "90", str(flipped))
    assert code == 1 and found["kernels"] == 5 and "is not an archive" in found["archive"]
    code, found = body(monkeypatch, tmp_path / "found.json", "compile", "90", str(good))
    assert code == 0 and found["note"].endswith(
        "has none of them: it was built from other sources, or for another Triton or GPU"
    )


NCU = """#!/bin/sh
case "$*" in *--metrics*) echo "==ERROR== Failed to find metric" > "$5"; exit 1;; esac
cat > "$5" <<'END'
==PROF== Connected to process 7
"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","7","forward_kernel(int)","GPU Speed Of Light Throughput","Duration","us","12.5"
"0","7","forward_kernel(int)","Launch Statistics","Registers Per Thread","register/thread","168"
"0","7","forward_kernel(int)","Launch Statistics","Grid Size","","132"
END
"""


def test_programs_of_the_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program"
    program.write_text(NCU)
    program.chmod(0o755)
    code, found = body(monkeypatch, tmp_path / "found.json", "counters", str(program))
    counted = {"kernel": "forward_kernel", "Duration": "12.5 us", "Registers Per Thread": "168 register/thread"}
    assert code == 0 and found["launches"] == [counted]
    for name, says in (("counters", "==ERROR== ERR_NVGPUCTRPERM"), ("memory", "========= Error: Device not supported")):
        program.write_text(f"#!/bin/sh\necho '{says}'\nexit 1\n")
        code, found = body(monkeypatch, tmp_path / "found.json", name, str(program))
        assert code == UNABLE_EXIT_CODE and "does not work here" in found["note"]


def test_a_gpu_that_does_not_answer_is_left_alone(tmp_path: Path) -> None:
    steps = [step("hangs", HANGS, limit=1.0), step("on the GPU", ""), step("elsewhere", "", gpu=False)]
    outcomes, _ = run(steps, tmp_path, alive=NO)
    assert [one.state for one in outcomes] == [STATE_LATE, STATE_LEFT_OUT, STATE_RIGHT]
    assert outcomes[1].note == "the GPU did not answer after hangs"


def test_the_most_valuable_steps_fit_first(tmp_path: Path) -> None:
    steps = [step("c", "", least=15, rank=3), step("a", "", least=10, rank=1), step("b", "", least=50, rank=2)]
    assert choose_affordable(steps, 30) == {"a", "c"}
    outcomes, _ = run(steps, tmp_path, 30)
    assert {one.name: one.state for one in outcomes} == {"a": STATE_RIGHT, "b": STATE_LEFT_OUT, "c": STATE_RIGHT}
    # A step that takes all the time leaves none for the next.
    steps = [step("long", "import time; time.sleep(30)", limit=100), step("next", "", least=0.5, rank=1)]
    begun = time.monotonic()
    outcomes, _ = run(steps, tmp_path, 2.0)
    assert [one.state for one in outcomes] == [STATE_LATE, STATE_LEFT_OUT] and time.monotonic() - begun < 10


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
    monkeypatch.setattr(selftest, "_find_gpus", lambda: selftest.Gpus(obstacle, 90, 1, "H100"))
    monkeypatch.setattr(selftest, "make_steps", lambda *_: [step("only", code, gpu=gpu is not False)])
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


@pytest.mark.full
def test_environment_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "fused_tp", "selftest", "--only", "^environment|^smoke", "--minutes", "1", "--out"]
    done = subprocess.run([*command, str(out)], capture_output=True, text=True, timeout=120)
    report = json.loads((out / "selftest.json").read_text())
    found = report["steps"][0]["found"]
    assert found["versions"]["torch"] and found["processors"] > 0, done.stdout
    import torch

    if not torch.cuda.is_available():
        assert done.returncode == 2 and report["steps"][1]["state"] == STATE_LEFT_OUT


def test_tune_checks_with_threads_where_there_is_one_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tests the choice of cases and the report of results; the checks themselves need a GPU."""
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
    assert "got --ranks 4 --dtypes fp16" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("wrong", [False, True])
def test_collectives_of_csrc(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases of the device kernels, which run in their CPU build here; wrong sums are detected."""
    import torch

    from fused_tp.selftest import kernel_calls, kernels
    from tests.native_build import cpu_device_library, use_library

    use_library(cpu_device_library())
    try:
        if wrong:
            reduce = kernel_calls._CheckedCollectives.all_reduce
            monkeypatch.setattr(
                kernel_calls._CheckedCollectives,
                "all_reduce",
                lambda device, *how: reduce(device, *how) + 0.25 * device.rank,
            )
        cases = [case for case in kernels.CASES if case.op in kernel_calls.NATIVE_OPS and case.dtype.itemsize < 4]
        assert {case.world for case in cases} == {1, 2, 3, 4}
        for case in cases:
            problem = kernels.check(case, torch.device("cpu"))
            assert bool(problem) == (wrong and case.world > 1 and case.op == "collectives"), f"{case.name}: {problem}"
    finally:
        use_library(None)


@pytest.mark.full
def test_a_result_of_an_earlier_call_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that does not wait reads the data of an earlier call of the same shape, so repeated calls use other
    inputs, which exposes it."""
    import torch

    from fused_tp.selftest import kernel_calls, kernels
    from tests.native_build import cpu_device_library, use_library

    gather = kernel_calls._CheckedCollectives.all_gather
    earlier: dict[Any, Any] = {}

    def stale(device: Any, shard: torch.Tensor) -> torch.Tensor:
        found = gather(device, shard)
        return earlier.setdefault((device.rank, shard.shape), found) if device.world_size > 1 else found

    use_library(cpu_device_library())
    try:
        case = kernels.KernelCase("", "collectives", 2, torch.bfloat16, ((8, 16, 0), (3, 16, 0)), 3)
        assert not kernels.check(case, torch.device("cpu"))
        monkeypatch.setattr(kernel_calls._CheckedCollectives, "all_gather", stale)
        assert "call 2: " in kernels.check(case, torch.device("cpu"))
    finally:
        use_library(None)


def test_kernels_that_are_timed_or_wait_for_copies_are_compiled_ahead() -> None:
    """Otherwise compilation would take up the time of the first measurement."""
    import torch

    from fused_tp.selftest import kernel_cache, kernels

    copied = next(case for case in kernels.CASES if case.op == "copied")
    assert copied.is_compiled_ahead
    with kernel_cache.record_launches(90) as launches:
        kernels.launch_only(kernels.keep_first_shape(copied))
        assert [key for key in launches.keys if "all_gather_gemm_kernel" in key]
        before = len(launches.keys)
        runs = {run.args[0].name: run for run in kernel_cache.timed_calls(90)}  # type: ignore[attr-defined]
        assert {name.split("/")[0] for name in runs} == {"alone", "flags", "ranks", "attention", "attention-ranks"}
        runs["alone/bf16/4096x4096x4096"]()
        runs["ranks/bf16/gather/W=2/2048x7168x4096"]()
        assert len(launches.keys) > before + 2 and not torch.cuda.is_initialized()


@pytest.mark.full
def test_kernels_are_found_on_another_machine(tmp_path: Path) -> None:
    """Kernels are compiled and packed in one process; in another, with another home, nothing compiles.

    Kernels of an archive that this installation ships are not packed again.
    """
    script = """
import sys
from pathlib import Path
from fused_tp.selftest import kernel_cache, kernels
from fused_tp.triton_kernels import archive
from unittest import mock

archive.SHIPPED_FOLDER = Path(sys.argv[1]).parent / "shipped"
few = [case for case in kernels.CASES if case.op in ("attention", "direct") and case.world < 3 and not case.late_ranks]
few = [kernels.keep_first_shape(case) for case in few if case.dtype.itemsize == 2]
if sys.argv[2] == "unpack":
    few.reverse()
    assert archive.unpack(Path(sys.argv[1]), archive.cache_folder()) > 3
    assert archive.unpack(Path(sys.argv[1]), archive.cache_folder()) == 0
compiled = []
with kernel_cache.record_launches(90, 0, 1) as launches:
    for case in few:
        kernels.launch_only(case)
        launches.compile()
assert not launches.failures, launches.failures
print(len(launches.keys), launches.num_hits)
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

    (tmp_path / "shipped").mkdir()
    with tarfile.open(tmp_path / "shipped" / "sm_80.tar.xz", "w:xz") as tar:
        for name, content in {"__grp__k.json": b'["k.cubin"]', "k.cubin": b"of another architecture"}.items():
            info = tarfile.TarInfo(f"SHIPPED/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    kernels, hits = run_there("pack")
    assert kernels > 3 and hits == 0
    assert run_there("unpack") == (kernels, kernels)
    with pytest.raises(ValueError, match="is not an archive of kernels"):
        (tmp_path / "text").write_text("no archive")
        from fused_tp.triton_kernels.archive import unpack

        unpack(tmp_path / "text", tmp_path)
    with pytest.raises(ValueError, match="is not an archive of kernels"):
        group = b'["../outside.cubin"]'
        with tarfile.open(tmp_path / "leaves.tar.xz", "w:xz") as tar:
            info = tarfile.TarInfo("KEY/__grp__k.json")
            info.size = len(group)
            tar.addfile(info, io.BytesIO(group))
        unpack(tmp_path / "leaves.tar.xz", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
