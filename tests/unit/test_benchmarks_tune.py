"""Tuning: noise changes nothing, a clear win does, and the written table chooses the measured winner."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import cpu, tune
from benchmarks.tune import with_new_rules
from fused_tp.backends.autotune import choose_fastest
from fused_tp.cli.main import main
from fused_tp.core import dispatch
from fused_tp.ops.explain import explain_hypothetical

pytestmark = pytest.mark.full


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "_measure_kernels", lambda *_: {})


def test_who_takes_the_incumbents_place() -> None:
    noisy = {"plain": [1.0, 1.0, 1.0, 1.0], "pipelined": [0.9, 0.97, 1.1, 0.5]}
    assert choose_fastest(noisy, "plain") == "plain"
    clear = {"plain": [1.0, 1.1, 1.0], "pipelined": [0.8, 0.8, 0.9], "one_sided": [0.7, 0.6, 0.7]}
    assert choose_fastest(clear, "plain") == "one_sided"
    # An incumbent that did not run is replaced by the fastest.
    assert choose_fastest({"plain": [1.0, 1.0, 1.0], "pipelined": [0.99, 0.99, 5.0]}, "one_sided") == "pipelined"


def test_the_written_table_chooses_what_won(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    winners = [(1 << 14, "plain"), (1 << 18, "one_sided"), (1 << 22, "one_sided")]
    table = with_new_rules(dispatch.load_table(), "shm", "matmul_all_reduce", torch.float32, 2, winners)
    path = tmp_path / "dispatch.json"
    path.write_text(json.dumps({"arch": table}))
    monkeypatch.setenv("FUSED_TP_TABLE", str(path))

    def chosen(op: str, dtype: torch.dtype, rows: int, world_size: int = 2, transport: str = "shm") -> str:
        k, n = (1024, None) if op == "all_gather_matmul" else (None, 1024)
        key = dispatch.ScheduleKey(op, dtype, torch.device("cpu"), rows, k, n)
        return dispatch.choose_schedule(key, world_size, transport, "cpu").schedule

    assert chosen("matmul_all_reduce", torch.float32, 4) == "plain"  # 16 KiB
    assert chosen("matmul_all_reduce", torch.float32, 15) == "plain"  # below the geometric mean of 16 and 256 KiB
    assert chosen("matmul_all_reduce", torch.float32, 17) == "one_sided"
    assert chosen("matmul_all_reduce", torch.float32, 1 << 20) == "one_sided"
    monkeypatch.delenv("FUSED_TP_TABLE")
    before = chosen("matmul_all_reduce", torch.bfloat16, 4), chosen("matmul_all_reduce", torch.float32, 4, 4)
    gloo = chosen("matmul_all_reduce", torch.float32, 4, transport="gloo")
    monkeypatch.setenv("FUSED_TP_TABLE", str(path))
    assert (chosen("matmul_all_reduce", torch.bfloat16, 4), chosen("matmul_all_reduce", torch.float32, 4, 4)) == before
    assert chosen("matmul_all_reduce", torch.float32, 4, transport="gloo") == gloo


def made_up(seconds: dict[str, float], noise: float = 0.0) -> Callable[..., list[tune.OpTimes]]:
    """Fake measurement of every op at two sizes, by seconds per schedule; `noise` lengthens every third round."""

    def measure(world_size: int, rounds: int, say: Callable[[str], None]) -> list[tune.OpTimes]:
        times = {
            name: [t * (1 + noise * ((i + place) % 3 == 0)) for i in range(rounds)]
            for place, (name, t) in enumerate(seconds.items())
        }
        cases = itertools.product(tune.OPS, tune.DTYPES.values(), (16, 1024))
        return [tune.OpTimes(op, dtype, rows, times) for op, dtype, rows in cases]

    return measure


def test_a_tuned_table_is_written_used_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "dispatch.json"
    monkeypatch.setenv("FUSED_TP_TABLE", str(path))  # as a user sets it to have the table written there
    monkeypatch.setattr(tune, "_measure_schedules", made_up({"one_sided": 2.0, "pipelined": 1.0, "plain": 3.0}))
    said: list[str] = []
    tune.tune(path, 2, print_line=said.append)
    assert (
        "matmul_all_reduce/fp32/M=16 over shm: pipelined in place of one_sided, in 0.50 [0.50, 0.50] of its time"
        in said
    )
    assert said[-1].startswith(f"{path}: 18 choices changed; FUSED_TP_TABLE names it already.")
    assert said[-1].endswith("A process reads its table once: restart running processes.")
    monkeypatch.setenv("FUSED_TP_TABLE", str(path))
    answer = explain_hypothetical(
        "matmul_all_reduce", (16, 1024), (2048, 1024), dtype=torch.float32, world_size=2, transport="shm", arch="cpu"
    ).forward
    assert answer is not None and answer.schedule == "pipelined"
    assert (
        answer.reason == f"dispatch table {path}, rule cpu/shm/matmul_all_reduce: dtypes ['float32'], world_sizes [2]"
    )
    assert '     {"schedule": "pipelined", "dtypes": ["float32"], "world_sizes": [2]},\n' in path.read_text()
    # A later, noisy run with about equal schedules leaves every byte of the table unchanged.
    monkeypatch.setattr(
        tune, "_measure_schedules", made_up({"one_sided": 1.0, "pipelined": 1.0, "plain": 1.0}, noise=1.0)
    )
    before = path.read_bytes()
    tune.tune(path, 2, print_line=said.append)
    assert path.read_bytes() == before and "no choices changed" in said[-1]


def test_a_table_elsewhere_says_how_to_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUSED_TP_TABLE", raising=False)
    monkeypatch.setattr(tune, "_measure_schedules", made_up({"pipelined": 1.0, "plain": 1.0}))
    said: list[str] = []
    tune.tune(tmp_path / "my tables" / "one.json", 2, print_line=said.append)
    (line,) = said
    assert f"no choices changed; to use it: export FUSED_TP_TABLE='{tmp_path}/my tables/one.json'." in line
    assert dispatch.load_table(str(tmp_path / "my tables" / "one.json")) == dispatch.load_table()


def test_the_kernels_of_attention_go_into_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "dispatch.json"
    monkeypatch.setenv("FUSED_TP_TABLE", str(path))
    monkeypatch.setattr(tune, "_measure_schedules", lambda *_: [])
    native, torchs = (
        {"native-cpu": [1.0] * 9, "torch-cpu": [2.0] * 9},
        {"native-cpu": [2.0] * 9, "torch-cpu": [1.0] * 9},
    )
    measured = {("fp32", False): {64: native, 128: native}, ("fp32", True): {64: native, 128: torchs}}
    monkeypatch.setattr(tune, "_measure_kernels", lambda *_: measured)
    said: list[str] = []
    tune.tune(path, 2, print_line=said.append)
    assert (
        said[0] == "attention backward/fp32/D=128: torch-cpu in place of native-cpu, in 0.50 [0.50, 0.50] of its time"
    )
    scope = {"dtypes": ["float32"], "backward": True}
    assert json.loads(path.read_text())["attention"] == [
        {"kernel": "native-cpu", "max_head_dim": 90, **scope},
        {"kernel": "torch-cpu", **scope},
    ]
    monkeypatch.setenv("FUSED_TP_TABLE", str(path))
    chosen = {dim: dispatch.choose_attention_kernel(torch.float32, dim, is_backward=True) for dim in (64, 90, 91, 128)}
    assert chosen == {64: "native-cpu", 90: "native-cpu", 91: "torch-cpu", 128: "torch-cpu"}
    before = path.read_bytes()
    tune.tune(path, 2, print_line=said.append)
    assert path.read_bytes() == before and "no choices changed" in said[-1]


def test_too_few_rounds_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "dispatch.json"
    assert main(["bench", "--tune", "--rounds", "3", "--table", str(path)]) == 1
    assert "rounds is 3; a choice by three quarters of the rounds needs at least 9." in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize("place", [".", "file/new.json", "/proc/new.json"])
def test_a_table_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    monkeypatch.setattr(tune, "_measure_schedules", lambda *_: pytest.fail("measures"))
    (tmp_path / "file").touch()
    assert cpu.from_command_line(["--tune", "--table", str(tmp_path / place)]) == 2
    assert capsys.readouterr().err.startswith("--table: ")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_tuning_again_replaces_its_own_rules_only() -> None:
    first = with_new_rules(
        dispatch.load_table(), "gloo", "all_gather_matmul", torch.float32, 2, [(1, "plain"), (2, "pipelined")]
    )
    second = with_new_rules(first, "gloo", "all_gather_matmul", torch.float32, 2, [(1, "plain"), (2, "pipelined")])
    assert second == first
    other = with_new_rules(first, "gloo", "all_gather_matmul", torch.bfloat16, 2, [(1, "plain")])
    rules = other["cpu"]["gloo"]["all_gather_matmul"]
    assert [rule.get("dtypes") for rule in rules[:3]] == [["bfloat16"], ["float32"], ["float32"]]
    assert dispatch.load_table()["cpu"].get("gloo") is None  # the shipped table is unchanged
