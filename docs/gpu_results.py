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
    """Reports of runs on a GPU, the oldest first.

    Raises:
        ValueError: a file is no report of the selftest; names it.
    """
    reports = []
    for file in sorted(folder.glob("*.json")):
        try:
            report = json.loads(file.read_text())
            if not ({"gpu", "date", "steps"} <= set(report)):
                raise ValueError("it lacks gpu, date or steps")
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file} is no report of fused-tp selftest ({error}).") from error
        remarks = file.with_suffix(".md")  # written by hand: what the failures were
        reports.append({**report, "remarks": remarks.read_text().strip()} if remarks.exists() else report)
    with_gpu = (report for report in reports if report["gpu"])
    return sorted(with_gpu, key=lambda report: (str(report["date"]), str(report.get("time", ""))))


def table(reports: Sequence[Mapping[str, Any]]) -> str:
    """Markdown tables with a row per step of each report, and a row per figure of the newest report of each card."""
    if not reports:
        return "No result of a GPU is here yet: `fused-tp selftest` makes one."
    steps = [
        f"| {name_of(report)} | {step['name']} | {step['state']} | {step['seconds']:.0f} | {in_cell(step['note'])} |"
        for report in reports
        for step in report["steps"]
    ]
    remarks = [report["remarks"] for report in reports if report.get("remarks")]
    lines = ["| GPU | step | outcome | seconds | note |", "|---|---|---|--:|---|", *steps]
    lines += [line for text in remarks for line in ("", text)]
    for report in {report["gpu"]: report for report in reports}.values():
        if rows := speeds(report):
            versions = report.get("versions") or {}
            version_text = ", ".join(
                f"{name} {versions[name]}" for name in ("driver", "torch", "cuda", "triton") if name in versions
            )
            lines += ["", f"Times on {name_of(report)}{': ' * bool(version_text)}{version_text}.", ""]
            lines += ["| case | what | ms | rate, tiles | fused_tp against it |", "|---|---|--:|---|---|", *rows]
    return "\n".join(lines)


def name_of(report: Mapping[str, Any]) -> str:
    """Card and date."""
    return f"{report['gpu']}, {report['date']}"


def speeds(report: Mapping[str, Any]) -> list[str]:
    """Rows of all times in a report: the ceilings of the card, then each contestant of each case."""
    rows = []
    for step in report["steps"]:
        findings = step.get("found") or {}
        ceilings = (findings.get("found") or {}) if step["name"] == "smoke" else {}
        rows += [f"| {name} | | {value:.3g} | | |" for name, value in ceilings.items() if isinstance(value, float)]
        for record in findings.get("records") or ():
            comparison = f"{record['measure']} {record['value']:.3g}" if "measure" in record else ""
            comparison += f" (bar {record['bar']:g})" if record.get("bar") is not None else ""
            note = in_cell(record["note"])
            rows.append(f"| {record['case']} | {record['contestant']} | {record['ms']:.4g} | {note} | {comparison} |")
    return rows


def in_cell(text: str) -> str:
    """`text` as a cell of a table in markdown."""
    return " ".join(text.split()).replace("|", "\\|")


def status(row: str, reports: Sequence[Mapping[str, Any]]) -> str | None:
    """Status of a row of README's table by the newest report that ran its steps; None if no report did."""
    names = next((steps for name, steps in PROVED_BY.items() if name in row), ())
    for report in reversed(reports):
        states = {step["name"]: step["state"] for step in report["steps"]}
        if names and all(states.get(name) in ("right", "wrong", "late") for name in names):
            is_right = all(states[name] == "right" for name in names)
            threads_note = "; its ranks were threads" if report.get("gpus") == 1 else ""
            result = "right" if is_right else _count_right(report, names)
            return f"{result} on {report['gpu']} ({report['date']}{threads_note})"
    return None


def _count_right(report: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return how many cases of the steps `names` are right, or "wrong" if a step has no cases."""
    step_findings = [step.get("found") or {} for step in report["steps"] if step["name"] in names]
    if not all(findings.get("cases") for findings in step_findings):
        return "wrong"
    problems = [problem for findings in step_findings for problem in findings["cases"].values()]
    return f"{sum(not problem for problem in problems)} of {len(problems)} cases right"


def readme(text: str, reports: Sequence[Mapping[str, Any]]) -> str:
    """Text of README with the status column of its table updated from the reports."""

    def replaced(match: re.Match[str]) -> str:
        cells = match[0].rstrip("|").rsplit("|", 1)
        new_status = status(match[0], reports)
        return match[0] if new_status is None else f"{cells[0]}| {new_status} |"

    return re.sub(rf"^\|.*\| (?:[^|]*{NEVER}|(?:[^|]*right|wrong) on [^|]*) \|$", replaced, text, flags=re.M)


if __name__ == "__main__":
    page = REPOSITORY / "README.md"
    page.write_text(readme(page.read_text(), results()))
