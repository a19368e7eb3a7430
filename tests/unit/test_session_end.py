"""A killed test session leaves no process running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import session_end
from tests.workers import REPOSITORY

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are told by /proc/PID/environ"),
]

SESSION = """
import subprocess, time
from pathlib import Path
from tests.workers import fresh_ranks

def wait(group):
    Path(__file__).with_name(f"rank{group.rank()}").touch()
    time.sleep(600)

def test_that_does_not_end():
    subprocess.Popen("sleep 600 & sleep 600", shell=True, start_new_session=True)
    fresh_ranks(2, wait, timeout=600)
"""


def test_killed_session_leaves_no_process(tmp_path: Path) -> None:
    sessions = {}
    for number in (signal.SIGTERM, signal.SIGKILL):
        folder = tmp_path / number.name
        folder.mkdir()
        (folder / "test_wait.py").write_text(SESSION)
        command = [
            "-m",
            "pytest",
            "-q",
            "-p",
            "tests.conftest",
            "-c",
            os.devnull,
            "--rootdir",
            str(folder),
            str(folder),
        ]
        env = {**os.environ, session_end.MARKS: f"{os.environ.get(session_end.MARKS)}:{folder}"}
        sessions[number] = folder, subprocess.Popen([sys.executable, *command], cwd=REPOSITORY, env=env)
    for number, (folder, session) in sessions.items():
        wait_until(lambda folder=folder: len(list(folder.glob("rank*"))) == 2, 120)
        assert len(session_end.processes(str(folder))) >= 6  # session, guardian, forking process, two ranks, two sleeps
        session.send_signal(number)
        assert session.wait(10) == -number
        # Three times the promise: the machine may be busy.
        wait_until(lambda folder=folder: not session_end.processes(str(folder)), 3 * session_end.SECONDS)


def wait_until(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
