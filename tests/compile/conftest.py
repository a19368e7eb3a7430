"""Compiling every kernel takes minutes of CPU time, and many other tests wait: so it starts with the session.

It runs at the lowest priority, takes what the others leave, and its tests come last. What came out is kept: the next
session compiles what has changed. Some of sm_90 in `make test`, all in `make test-all`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compile.resources import kept
from tests.workers import REPOSITORY

_STALLED_SECONDS = 300  # in which not one kernel came out
_running: list[subprocess.Popen[bytes]] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts this folder's tests last; pytest calls it for all items, wherever this file is."""
    here = Path(__file__).parent
    items.sort(key=lambda item: here in item.path.parents)


def pytest_collection_finish(session: pytest.Session) -> None:
    items = [item for item in session.items if isinstance(item, pytest.Function)]
    wanted = {item.callspec.params["arch"] for item in items if "kernels_are_compiled" in item.fixturenames}
    if wanted and not session.config.option.collectonly:
        command = ["nice", "-n", "19", sys.executable, "-m", "tests.compile.resources", "--keep"]
        command += map(str, sorted(wanted))
        _running.append(subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True))


def pytest_sessionfinish() -> None:
    for process in _running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its own processes too
        process.wait()


@pytest.fixture(scope="session")
def kernels_are_compiled() -> None:
    """Returns once what the selected tests compile is kept, by a process that runs since the session began."""
    # On a busy machine that takes longer than a test may; what bounds it is that kernels go on to come out.
    faulthandler.cancel_dump_traceback_later()
    (process,) = _running
    while process.poll() is None:
        before = _last_kept()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STALLED_SECONDS)
        assert process.poll() is not None or _last_kept() > before, f"nothing compiled in {_STALLED_SECONDS} s"
    assert process.returncode == 0, "see above for what it has written to stderr"


def _last_kept() -> int:
    return kept().stat().st_mtime_ns if kept().exists() else 0
