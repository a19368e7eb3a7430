"""Ends all processes of a test session when it ends, however it ends: a guardian process outlives it and kills them.

A mark in the environment that they inherit tells them. A session that a test starts adds its mark to that of the test.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

MARKS = "FUSED_TP_TEST_SESSIONS"
SECONDS = 10  # for a process that is killed to be gone


def start_guardian() -> None:
    """Marks what this process starts from here on, all of which then ends with it. On Linux only."""
    if sys.platform != "linux" or "PYTEST_XDIST_WORKER" in os.environ:
        return
    mark = f"{os.getpid()}-{time.time_ns()}"
    subprocess.Popen([sys.executable, "-ISB", __file__, str(os.getpid()), mark], start_new_session=True)
    os.environ[MARKS] = ":".join(filter(None, [os.environ.get(MARKS), mark]))


def processes(mark: str) -> list[int]:
    """The processes whose environment has this mark, other than this one."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):  # it has ended, or belongs to somebody else
                if any(
                    variable.startswith(f"{MARKS}=".encode()) and mark.encode() in variable
                    for variable in (folder / "environ").read_bytes().split(b"\0")
                ):
                    found.append(int(folder.name))
    return found


def _guard(session: int, mark: str) -> None:
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(session)], [], [])
    deadline = time.monotonic() + SECONDS
    while (left := processes(mark)) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)  # one of them may have been starting another


if __name__ == "__main__":
    _guard(int(sys.argv[1]), sys.argv[2])
