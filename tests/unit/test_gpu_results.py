"""README's status column and the page of benchmarks follow from the results of GPUs."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any

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
    # A newer report counts for what it ran; what was left out stays as it was.
    found.append(report("2026-12-02", sums_2="left out", gathers_2="right", rings_2="right"))
    newer = pages.readme(changed, found)
    assert "right on NVIDIA H100 (2026-12-01)" in newer and "right on NVIDIA H100 (2026-12-02)" in newer
    assert "wrong on" not in newer
    assert "| NVIDIA H100, 2026-12-02 | rings, 2 ranks | right | 10 | 6 of 6 |" in pages.table(found)
    assert "No result" in pages.table([])
