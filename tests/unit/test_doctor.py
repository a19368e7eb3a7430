"""`fused-tp doctor` and the command line around it."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest

from fused_tp.cli import doctor
from fused_tp.cli.main import COMMANDS, main


def finding(name: str) -> doctor.Finding:
    return next(one for one in doctor.examine() if one.name == name)


def test_report_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor"])
    text = capsys.readouterr().out
    for word in ("python", "torch", "native core", "FUSED_TP_TIMEOUT", "matmul_all_reduce"):
        assert word in text
    assert text.rstrip().endswith("Nothing needs fixing." if code == 0 else "marked !!.")


def test_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["healthy"] is (code == 0)
    assert {"section", "name", "value", "status", "advice"} == set(answer["findings"][0])
    assert answer["healthy"] == all(one["status"] != doctor.PROBLEM for one in answer["findings"])


def test_two_processes_share_memory() -> None:
    core = doctor._core()
    if core is None:
        pytest.skip("the native core is not built")
    assert doctor._try_shared_memory(core) is None


def test_a_peer_that_fails_is_a_problem_not_a_hang() -> None:
    broken = ModuleType("broken")
    broken.__file__ = "/nowhere/_core.so"
    core = doctor._core()
    if core is None:
        pytest.skip("the native core is not built")
    broken.__dict__["Group"] = core.Group
    assert "_core.so" in str(doctor._try_shared_memory(broken))


def test_a_missing_core_comes_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fused_tp._core", None)  # import raises ImportError
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    found = finding("native core")
    assert found.status == doctor.PROBLEM
    assert "apt-get install g++" in found.advice and "pip install" in found.advice
    assert "pipelined" in finding("matmul_all_reduce, cpu").value or "plain" in finding("matmul_all_reduce, cpu").value


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("FUSED_TP_TIMEOUT", "soon", "positive number"),
        ("FUSED_TP_SHM", "maybe", "1 or 0"),
        ("FUSED_TP_TABLE", "/nowhere.json", "nowhere.json"),
        ("FUSED_TP_TIMOUT", "5", "misspelt"),
    ],
)
def test_settings_that_cannot_be_are_problems(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, advice: str
) -> None:
    monkeypatch.setenv(name, value)
    found = finding(name)
    assert found.status == doctor.PROBLEM and advice in found.advice


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert all(command in text for command in COMMANDS)


def test_no_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "doctor" in capsys.readouterr().out


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert f"fused-tp {command}" in capsys.readouterr().out


def test_a_missing_library_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def needs_rich(arguments: object) -> int:
        raise ModuleNotFoundError("No module named 'rich'", name="rich")

    monkeypatch.setattr(doctor, "main", needs_rich)
    assert main(["doctor"]) == 2
    assert "pip install 'fused-tp[demo]'" in capsys.readouterr().err
