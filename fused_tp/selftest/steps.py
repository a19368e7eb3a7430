"""Steps of the selftest: each is a process with a separate deadline, the most informative first.

| event | action |
|---|---|
| a step exits | its line and its findings are written at once |
| a step exits with a code other than 0 | the step has failed; the next one runs |
| a step exceeds its deadline | its process group is killed, and the GPU is probed |
| the GPU does not respond to the probe | no further step that needs the GPU runs |
| the time left is below a step's `min_seconds` | the step is skipped |
| a step exits with UNABLE_EXIT_CODE | it counts as skipped: a program that it needs does not work on this machine |
| Ctrl-C or SIGTERM | the step is killed, and its findings so far are written |
| SIGKILL | the step is killed with this process; all earlier findings are in the files |
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STATE_RIGHT, STATE_WRONG, STATE_LATE, STATE_LEFT_OUT, STATE_INTERRUPTED = (
    "right",
    "wrong",
    "late",
    "left out",
    "interrupted",
)
UNABLE_EXIT_CODE = 77
RESULT_PLACEHOLDER = "{result}"
PROBE_CODE = "import torch; assert float(torch.ones(8, device='cuda').sum()) == 8"
PROBE_SECONDS = 30.0
_WAIT_AFTER_KILL_SECONDS = 10.0
_LOG_BYTES = 1 << 16  # bytes to read from the end of a log, which may be very long
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True)
class SelftestStep:
    """One step of the selftest, which runs in a process.

    Attributes:
        name: name of the step, which `--only` matches.
        command: command of its process; RESULT_PLACEHOLDER in it is replaced by the JSON file for its findings.
        min_seconds: minimum remaining seconds for the step to start.
        max_seconds: seconds after which the step is killed.
        priority: 0 is the highest; `--minutes` skips steps with a high number first.
        needs_gpu: the step cannot run without a GPU.
        environment: additional variables of its process.
    """

    name: str
    command: Sequence[str]
    min_seconds: float
    max_seconds: float
    priority: int
    needs_gpu: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """Outcome of a step: its state, duration, note and findings."""

    name: str
    state: str
    seconds: float = 0.0
    note: str = ""
    findings: Any = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values; the key of `findings` is "found"."""
        fields = dict(vars(self))
        fields["found"] = fields.pop("findings")
        return fields


def choose_affordable(steps: Sequence[SelftestStep], seconds: float) -> set[str]:
    """Return the names of the steps whose `min_seconds` fit into `seconds`, in ascending order of `priority`.

    >>> steps = [SelftestStep(name, [], seconds, 60, 1) for name, seconds in (("a", 10), ("b", 50), ("c", 15))]
    >>> choose_affordable(steps, 30) == {"a", "c"}
    True
    """
    affordable_names: set[str] = set()
    for step in sorted(steps, key=lambda step: step.priority):
        if step.min_seconds <= seconds:
            affordable_names.add(step.name)
            seconds -= step.min_seconds
    return affordable_names


def run_steps(
    steps: Sequence[SelftestStep],
    out: Path,
    seconds: float,
    print_line: Callable[[str], None],
    unsupported_reason: str = "",
    probe: Sequence[str] = (sys.executable, "-c", PROBE_CODE),
) -> Iterator[Outcome]:
    """Run the steps one after the other and yield their outcomes; each is written to `out` at once.

    Args:
        seconds: time for all steps.
        unsupported_reason: message with the reason why steps that need a GPU cannot run; empty if they can.
        probe: command that exits with 0 if the GPU responds.
    """
    start_seconds = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    (out / "outcomes.jsonl").unlink(missing_ok=True)  # from an earlier run; other files there are not touched
    affordable_names = choose_affordable(
        [step for step in steps if not (unsupported_reason and step.needs_gpu)], seconds
    )
    interruption: BaseException | None = None
    for step in steps:
        remaining_seconds = seconds - (time.monotonic() - start_seconds)
        if unsupported_reason and step.needs_gpu:
            outcome = Outcome(step.name, STATE_LEFT_OUT, note=unsupported_reason)
        elif step.name not in affordable_names or remaining_seconds < step.min_seconds:
            outcome = Outcome(
                step.name,
                STATE_LEFT_OUT,
                note=f"needs at least {step.min_seconds:.0f} s, but {remaining_seconds:.0f} s are left",
            )
        else:
            print_line(f"=== {step.name} (at most {min(remaining_seconds, step.max_seconds):.0f} s)")
            step_start_seconds = time.monotonic()
            try:
                outcome = _run_step(step, out, min(remaining_seconds, step.max_seconds), print_line)
            except (KeyboardInterrupt, SystemExit) as error:
                step_seconds, findings = (
                    time.monotonic() - step_start_seconds,
                    _read_findings(_step_files(step, out)[1]),
                )
                interruption, outcome = (
                    error,
                    Outcome(step.name, STATE_INTERRUPTED, step_seconds, _note_of_findings(findings), findings),
                )
            except OSError as error:  # for example, a full disk or a missing program
                outcome = Outcome(
                    step.name, STATE_WRONG, time.monotonic() - step_start_seconds, f"the step did not run: {error}"
                )
            if outcome.state == STATE_LATE and step.needs_gpu and not _gpu_responds(probe):
                unsupported_reason = f"the GPU did not answer after {step.name}"
                outcome.note += "; the GPU does not answer"
        with (out / "outcomes.jsonl").open("a") as file:
            file.write(json.dumps(outcome.to_json()) + "\n")
        yield outcome
        if interruption is not None:
            raise interruption


def _step_files(step: SelftestStep, out: Path) -> tuple[Path, Path]:
    """Return (log file of the step, file of its findings)."""
    base = out / step.name.replace(" ", "-").replace(",", "")
    return base.with_suffix(".log"), base.with_suffix(".json")


def _run_step(step: SelftestStep, out: Path, timeout_seconds: float, print_line: Callable[[str], None]) -> Outcome:
    log_path, result_file = _step_files(step, out)
    result_file.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **step.environment}
    command = [str(result_file) if word == RESULT_PLACEHOLDER else word for word in step.command]
    start_seconds = time.monotonic()
    with log_path.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        try:
            exit_code: int | None = process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            _kill_process_group(process)
    seconds = time.monotonic() - start_seconds
    findings = _read_findings(result_file)
    lines = _read_tail(log_path).splitlines()
    note = _note_of_findings(findings)
    for line in lines[-40:]:
        print_line(f"    {line[:240]}")
    if exit_code is None:
        return Outcome(
            step.name, STATE_LATE, seconds, f"ended after {timeout_seconds:.0f} s{f': {note}' * bool(note)}", findings
        )
    if exit_code == UNABLE_EXIT_CODE:
        return Outcome(step.name, STATE_LEFT_OUT, seconds, note, findings)
    if exit_code:
        ending = f"ended by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"
        last_line = next((line for line in reversed(lines) if line.strip()), "no output")
        # If the step crashed, its note was written before the crash, so use the log's last line.
        description = note if exit_code == 1 and note else last_line.strip()[:200]
        return Outcome(step.name, STATE_WRONG, seconds, f"{ending}: {description}", findings)
    return Outcome(step.name, STATE_RIGHT, seconds, note, findings)


def _die_with_parent() -> None:
    """Make the kernel kill this process when its parent exits for any reason."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _read_tail(log_path: Path) -> str:
    with log_path.open("rb") as file:
        file.seek(max(0, log_path.stat().st_size - _LOG_BYTES))
        return file.read().decode(errors="replace")


def _kill_process_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the step with its child processes, and wait at most _WAIT_AFTER_KILL_SECONDS."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(_WAIT_AFTER_KILL_SECONDS)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        return  # the process has exited, or is blocked in the driver until the GPU responds


def _note_of_findings(findings: Any) -> str:
    return str(findings.get("note", "")) if isinstance(findings, dict) else ""


def _read_findings(result_file: Path) -> Any:
    try:
        return json.loads(result_file.read_text())
    except (OSError, ValueError):
        return None


def _gpu_responds(command: Sequence[str]) -> bool:
    devnull = subprocess.DEVNULL
    process = subprocess.Popen(
        command, stdin=devnull, stdout=devnull, stderr=devnull, start_new_session=True, preexec_fn=_die_with_parent
    )
    try:
        return process.wait(PROBE_SECONDS) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        _kill_process_group(process)  # subprocess.run would wait forever for a process that is blocked in the driver


def format_table(outcomes: Sequence[Outcome]) -> str:
    """Format a Markdown table with one row per step."""
    rows = [
        f"| {outcome.name} | {outcome.state} | {outcome.seconds:.0f} | {escape_cell(outcome.note)} |"
        for outcome in outcomes
    ]
    return "\n".join(["| step | outcome | seconds | note |", "|---|---|--:|---|", *rows])


def escape_cell(text: str) -> str:
    """Escape `text` for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")
