"""README's status column and the page of benchmarks are generated from GPU results."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.workers import REPOSITORY


def gpu_results() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_results", REPOSITORY / "docs" / "gpu_results.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def report(date: str, **states: str) -> dict[str, Any]:
    steps = [
        {"name": name.replace("_", ", ") + " ranks", "state": state, "seconds": 9.6, "note": "6 of 6"}
        for name, state in states.items()
    ]
    return {"gpu": "NVIDIA H100", "date": date, "steps": steps}


def whole_report() -> dict[str, Any]:
    """Report like that of `fused-tp selftest`, with a failed step, a late one, and one without a result."""
    smoke = {"bf16 matmul 8192^3 by cuBLAS, TFLOP/s": 798.1, "driver": {"version": [13, 0]}, "one kernel: ring": "ring"}
    ours = {"case": "alone/bf16/4096", "contestant": "fused_tp", "ms": 0.2, "rounds": 7, "note": "687 TFLOP/s; a | b"}
    theirs = {**ours, "contestant": "torch.mm", "ms": 0.19, "note": "723 TFLOP/s"}
    theirs |= {"measure": "speedup", "value": 0.9512, "bar": 0.9}
    steps = [
        {"name": "environment", "state": "right", "seconds": 5.1, "note": "", "found": {"versions": {}}},
        {"name": "smoke", "state": "wrong", "seconds": 9, "note": "exit code 1: a\n| b", "found": {"found": smoke}},
        {"name": "sums, 2 ranks", "state": "late", "seconds": 90.0, "note": "ended after 90 s", "found": None},
        {"name": "gathers, 2 ranks", "state": "right", "seconds": 9.0, "note": ""},
        {"name": "speed", "state": "wrong", "seconds": 60.0, "note": "", "found": {"records": [ours, theirs]}},
        {"name": "counters", "state": "left out", "seconds": 0.0, "note": "", "found": None},
    ]
    versions = {"driver": "580.1", "torch": "2.11", "cuda": "13.0", "triton": "3.6.0"}
    top = {"date": "2026-12-03", "time": "10:00:00 UTC", "gpu": "NVIDIA H100", "gpus": 1, "arch": 90}
    return {**top, "versions": versions, "steps": steps}


def test_times_of_a_report_are_in_the_table(tmp_path: Path) -> None:
    pages = gpu_results()
    for name, one in (("b.json", whole_report()), ("a.json", {**whole_report(), "gpu": ""})):
        (tmp_path / name).write_text(json.dumps(one))
    found = pages.results(tmp_path)
    assert len(found) == 1  # a report without a GPU is ignored
    table = pages.table(found)
    for row in (
        "| NVIDIA H100, 2026-12-03 | smoke | wrong | 9 | exit code 1: a \\| b |",
        "Times on NVIDIA H100, 2026-12-03: driver 580.1, torch 2.11, cuda 13.0, triton 3.6.0.",
        "| bf16 matmul 8192^3 by cuBLAS, TFLOP/s | | 798 | | |",
        "| alone/bf16/4096 | fused_tp | 0.2 | 687 TFLOP/s; a \\| b |  |",
        "| alone/bf16/4096 | torch.mm | 0.19 | 723 TFLOP/s | speedup 0.951 (bar 0.9) |",
    ):
        assert row in table.splitlines(), table
    text = (REPOSITORY / "README.md").read_text()
    assert "| wrong on NVIDIA H100 (2026-12-03; its ranks were threads) |" in pages.readme(text, found)
    counted = whole_report()
    counted["steps"] += [
        {"name": name, "state": "wrong", "seconds": 1, "note": "", "found": {"cases": {"one": "", "other": problem}}}
        for name, problem in (("sums, 2 ranks", "off by 2"), ("gathers, 2 ranks", ""))
    ]
    counted["steps"] = [*{step["name"]: step for step in counted["steps"]}.values()]
    (tmp_path / "b.json").write_text(json.dumps(counted))
    (tmp_path / "b.md").write_text("The sums were off by 2.\n")
    found = pages.results(tmp_path)
    assert "The sums were off by 2." in pages.table(found).splitlines()
    counts = "| 3 of 4 cases right on NVIDIA H100 (2026-12-03; its ranks were threads) |"
    assert counts in pages.readme(text, found) == pages.readme(pages.readme(text, found), found)
    (tmp_path / "c.json").write_text('{"gpu": 1')
    with pytest.raises(ValueError, match=r"c\.json is no report"):
        pages.results(tmp_path)


def test_the_readme_is_as_the_results_have_it() -> None:
    pages, text = gpu_results(), (REPOSITORY / "README.md").read_text()
    assert pages.readme(text, pages.results()) == text, "run `python docs/gpu_results.py`"


def test_the_status_goes_by_itself_when_there_is_a_result() -> None:
    pages = gpu_results()
    text = (REPOSITORY / "README.md").read_text()
    bare = pages.readme(text, [])
    found = [report("2026-12-01", sums_2="right", gathers_2="right", rings_2="wrong")]
    changed = pages.readme(bare, found)
    assert changed.count("| right on NVIDIA H100 (2026-12-01) |") == 1
    assert changed.count("| wrong on NVIDIA H100 (2026-12-01) |") == 1
    assert changed.count("\n") == text.count("\n") and pages.readme(changed, found) == changed
    # A newer report overrides the steps that it ran; steps that it left out stay unchanged.
    found.append(report("2026-12-02", sums_2="left out", gathers_2="right", rings_2="right"))
    newer = pages.readme(changed, found)
    assert "right on NVIDIA H100 (2026-12-01)" in newer and "right on NVIDIA H100 (2026-12-02)" in newer
    assert "wrong on" not in newer
    assert "| NVIDIA H100, 2026-12-02 | rings, 2 ranks | right | 10 | 6 of 6 |" in pages.table(found)
    assert "No result" in pages.table([])
