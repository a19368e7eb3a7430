"""Generate the GPU results in pages: the table of docs/benchmarks.md and the status column of README.

    python docs/gpu_results.py          # writes README's column anew

Results are files of `fused-tp selftest` (selftest.json), named by card and date.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results" / "gpu"
# Name in a row of README's table -> steps of the selftest that prove the row on a GPU.
PROVED_BY = {
    "`all_gather_matmul`": ("sums, 2 ranks", "gathers, 2 ranks"),
    "`ring_attention`": ("rings, 2 ranks",),
    "`all_reduce_rms_norm`": ("schedules, processes",),
}
NEVER = "never run on a GPU"


def results(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Reports of runs on a GPU, the oldest first."""
    found = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    return sorted((one for one in found if one["gpu"]), key=lambda one: str(one["date"]))


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Markdown table with a row for each step of each report."""
    if not found:
        return "No result of a GPU is here yet: `fused-tp selftest` makes one."
    rows = [
        f"| {one['gpu']}, {one['date']} | {step['name']} | {step['state']} | {step['seconds']:.0f} | {step['note']} |"
        for one in found
        for step in one["steps"]
    ]
    return "\n".join(["| GPU | step | outcome | seconds | note |", "|---|---|---|--:|---|", *rows])


def status(row: str, found: Sequence[Mapping[str, Any]]) -> str | None:
    """Status of a row of README's table by the newest report that ran its steps; None if no report did."""
    names = next((steps for name, steps in PROVED_BY.items() if name in row), ())
    for one in reversed(found):
        states = {step["name"]: step["state"] for step in one["steps"]}
        if names and all(states.get(name, "left out") != "left out" for name in names):
            right = all(states[name] == "right" for name in names)
            return f"{'right' if right else 'wrong'} on {one['gpu']} ({one['date']})"
    return None


def readme(text: str, found: Sequence[Mapping[str, Any]]) -> str:
    """Text of README with the status column of its table updated from the reports."""

    def replaced(match: re.Match[str]) -> str:
        cells = match[0].rstrip("|").rsplit("|", 1)
        known = status(match[0], found)
        return match[0] if known is None else f"{cells[0]}| {known} |"

    return re.sub(rf"^\|.*\| (?:[^|]*{NEVER}|(?:right|wrong) on [^|]*) \|$", replaced, text, flags=re.M)


if __name__ == "__main__":
    page = REPOSITORY / "README.md"
    page.write_text(readme(page.read_text(), results()))
