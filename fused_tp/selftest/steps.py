"""Steps of the selftest: each is a process with a separate deadline, the most informative first.

| event | action |
|---|---|
| a step exits | its line and its findings are written at once |
| a step exits with a code other than 0 | the step has failed; the next one runs |
| a step exceeds its deadline | its process group is killed, and the GPU is probed |
| the GPU does not respond to the probe | no further step that needs the GPU runs |
| the time left is below a step's `least` | the step is skipped |
| a step exits with UNABLE | it counts as skipped: a program that it needs does not work on this machine |
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RIGHT, WRONG, LATE, LEFT_OUT, INTERRUPTED = "right", "wrong", "late", "left out", "interrupted"
UNABLE = 77
RESULT = "{result}"
ALIVE = "import torch; assert float(torch.ones(8, device='cuda').sum()) == 8"
ALIVE_SECONDS = 30.0
_KILL_SECONDS = 10.0
_LOG_BYTES = 1 << 16  # bytes to read from the end of a log, which may be very long
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True)
class SelftestStep:
    """One step of the selftest, which runs in a process.

    Attributes:
        name: name of the step, which `--only` matches.
        command: command of its process; RESULT in it is replaced by the JSON file for its findings.
        least: minimum remaining seconds for the step to start.
        limit: seconds after which the step is killed.
        rank: priority; 0 is the highest, and `--minutes` skips steps with a high number first.
        needs_gpu: the step cannot run without a GPU.
        environment: additional variables of its process.
    """

    name: str
    command: Sequence[str]
    least: float
    limit: float
    rank: int
    needs_gpu: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """Outcome of a step: its state, duration, note and findings."""

    name: str
    state: str
    seconds: float = 0.0
    note: str = ""
    found: Any = None


def affordable(steps: Sequence[SelftestStep], seconds: float) -> set[str]:
    """Return the names of the steps whose `least` times fit into `seconds`, preferring the most valuable steps.

    >>> affordable([Step("a", [], 10, 20, 1), Step("b", [], 50, 60, 2), Step("c", [], 15, 20, 3)], 30) == {"a", "c"}
    True
    """
    chosen: set[str] = set()
    for step in sorted(steps, key=lambda step: step.rank):
        if step.least <= seconds:
            chosen.add(step.name)
            seconds -= step.least
    return chosen


def run_steps(
    steps: Sequence[SelftestStep],
    out: Path,
    seconds: float,
    say: Callable[[str], None],
    obstacle: str = "",
    alive: Sequence[str] = (sys.executable, "-c", ALIVE),
) -> Iterator[Outcome]:
    """Run the steps one after the other and yield their outcomes; each is written to `out` at once.

    Args:
        seconds: time for all steps.
        obstacle: message that says why steps that need a GPU cannot run; empty if they can.
        alive: command that exits with 0 if the GPU responds.
    """
    begun = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    (out / "outcomes.jsonl").unlink(missing_ok=True)  # from an earlier run; other files there are not touched
    chosen = affordable([step for step in steps if not (obstacle and step.needs_gpu)], seconds)
    interruption: BaseException | None = None
    for step in steps:
        left = seconds - (time.monotonic() - begun)
        if obstacle and step.needs_gpu:
            outcome = Outcome(step.name, LEFT_OUT, note=obstacle)
        elif step.name not in chosen or left < step.least:
            outcome = Outcome(
                step.name, LEFT_OUT, note=f"it needs at least {step.least:.0f} s, and {left:.0f} s are left"
            )
        else:
            say(f"=== {step.name} (at most {min(left, step.limit):.0f} s)")
            step_begun = time.monotonic()
            try:
                outcome = _run(step, out, min(left, step.limit), say)
            except (KeyboardInterrupt, SystemExit) as error:
                took, found = time.monotonic() - step_begun, _read(_step_files(step, out)[1])
                interruption, outcome = error, Outcome(step.name, INTERRUPTED, took, _note(found), found)
            except OSError as error:  # for example, a full disk or a missing program
                outcome = Outcome(step.name, WRONG, time.monotonic() - step_begun, f"it did not run: {error}")
            if outcome.state == LATE and step.needs_gpu and not _gpu_responds(alive):
                obstacle = f"the GPU did not answer after {step.name}"
                outcome.note += "; the GPU does not answer"
        with (out / "outcomes.jsonl").open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
        yield outcome
        if interruption is not None:
            raise interruption


def _step_files(step: SelftestStep, out: Path) -> tuple[Path, Path]:
    """Return (log file of the step, file of its findings)."""
    base = out / step.name.replace(" ", "-").replace(",", "")
    return base.with_suffix(".log"), base.with_suffix(".json")


def _run(step: SelftestStep, out: Path, limit: float, say: Callable[[str], None]) -> Outcome:
    log, result = _step_files(step, out)
    result.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **step.environment}
    command = [str(result) if word == RESULT else word for word in step.command]
    begun = time.monotonic()
    with log.open("wb") as file:
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
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill(process)
    seconds = time.monotonic() - begun
    found = _read(result)
    lines = _tail(log).splitlines()
    said = _note(found)
    for line in lines[-40:]:
        say(f"    {line[:240]}")
    if code is None:
        return Outcome(step.name, LATE, seconds, f"ended after {limit:.0f} s{f': {said}' * bool(said)}", found)
    if code == UNABLE:
        return Outcome(step.name, LEFT_OUT, seconds, said, found)
    if code:
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        last = next((line for line in reversed(lines) if line.strip()), "no output")
        # If the step crashed, its note was written before the crash, so use the log's last line.
        what = said if code == 1 and said else last.strip()[:200]
        return Outcome(step.name, WRONG, seconds, f"{how}: {what}", found)
    return Outcome(step.name, RIGHT, seconds, said, found)


def _die_with_parent() -> None:
    """Make the kernel kill this process when its parent exits for any reason."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_BYTES))
        return file.read().decode(errors="replace")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the step with its child processes, and wait at most _KILL_SECONDS."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(_KILL_SECONDS)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        return  # the process has exited, or is blocked in the driver until the GPU responds


def _note(found: Any) -> str:
    return str(found.get("note", "")) if isinstance(found, dict) else ""


def _read(result: Path) -> Any:
    try:
        return json.loads(result.read_text())
    except (OSError, ValueError):
        return None


def _gpu_responds(command: Sequence[str]) -> bool:
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(
        command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True, preexec_fn=_die_with_parent
    )
    try:
        return process.wait(ALIVE_SECONDS) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        _kill(process)  # subprocess.run would wait forever for a process that is blocked in the driver


def table(outcomes: Sequence[Outcome]) -> str:
    """Format a Markdown table with one row per step."""
    rows = [f"| {one.name} | {one.state} | {one.seconds:.0f} | {in_cell(one.note)} |" for one in outcomes]
    return "\n".join(["| step | outcome | seconds | note |", "|---|---|--:|---|", *rows])


def in_cell(text: str) -> str:
    """Escape `text` for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")
