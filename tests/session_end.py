"""End all processes of a test session when it ends, however it ends: a guardian process outlives it and kills them.

A mark in their inherited environment identifies them. A session that a test starts appends its own mark.
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
SECONDS = 10  # until killed processes must be gone


def start_guardian() -> None:
    """Mark all processes that this one starts from here on, so that they end with it. Linux only."""
    if sys.platform != "linux" or "PYTEST_XDIST_WORKER" in os.environ:
        return
    mark = f"{os.getpid()}-{time.time_ns()}"
    subprocess.Popen([sys.executable, "-ISB", __file__, str(os.getpid()), mark], start_new_session=True)
    os.environ[MARKS] = ":".join(filter(None, [os.environ.get(MARKS), mark]))


def processes(mark: str) -> list[int]:
    """Processes whose environment holds this mark, other than this one."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
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
        time.sleep(0.05)  # a killed process may just have started another


if __name__ == "__main__":
    _guard(int(sys.argv[1]), sys.argv[2])
