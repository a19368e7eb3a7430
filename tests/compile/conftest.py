"""Compiling every kernel takes minutes of CPU time, and many other tests wait: so it starts with the session.

It runs at the lowest priority, takes what the others leave, and its tests come last. What came out is kept: the next
session compiles what has changed. Some of sm_90 in `make test`, all in `make test-all`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.native_build import cache
from tests.workers import REPOSITORY

_MEASURE = """
import pickle, sys
from pathlib import Path
from tests.compile.resources import measure_all
if __name__ == "__main__":
    results = measure_all(tuple(map(int, sys.argv[3:])), Path(sys.argv[2]))
    with open(sys.argv[1], "wb") as file:
        pickle.dump(results, file)
"""
_WAIT_SECONDS = 550  # below faulthandler_timeout, which bounds the test
_running: list[tuple[subprocess.Popen[bytes], Path]] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts this folder's tests last; pytest calls it for all items, wherever this file is."""
    here = Path(__file__).parent
    items.sort(key=lambda item: here in item.path.parents)


def pytest_collection_finish(session: pytest.Session) -> None:
    items = [item for item in session.items if isinstance(item, pytest.Function)]
    wanted = {item.callspec.params["arch"] for item in items if "kernel_resources" in item.fixturenames}
    if wanted and not session.config.option.collectonly:
        path = Path(tempfile.mkdtemp(prefix="fused_tp_tests_"), "resources")
        command = ["nice", "-n", "19", sys.executable, "-c", _MEASURE, str(path), str(cache() / "kernel_resources")]
        command += map(str, sorted(wanted))
        _running.append((subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True), path))


def pytest_sessionfinish() -> None:
    for process, path in _running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its own processes too
        process.wait()
        shutil.rmtree(path.parent, ignore_errors=True)


@pytest.fixture(scope="session")
def kernel_resources() -> Iterator[list[Any]]:
    """`measure_all()` for the architectures of the selected tests, by a process that runs since the session began."""
    process, path = _running[0]
    process.wait(_WAIT_SECONDS)
    assert process.returncode == 0, "see above for what it has written to stderr"
    with path.open("rb") as file:
        yield pickle.load(file)
