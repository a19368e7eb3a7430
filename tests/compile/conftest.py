"""Compiling every kernel takes minutes of CPU time, and many other tests wait: so it starts with the session.

It runs at the lowest priority, takes what the others leave, and its tests come last. What came out is kept: the next
session compiles what has changed. Other versions of Triton than the installed one lie in folders of their own
(`make test` and `make test-all` fill them), and compile in processes that find these first.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from tests.compile.resources import INSTALLED, kept
from tests.workers import REPOSITORY

_STALLED_SECONDS = 300  # in which not one kernel came out
TRITONS = REPOSITORY / "build" / "triton"  # folders of `pip install --target`, by version


@dataclass
class Compiling:
    """A process that compiles with one version of Triton; it writes JSON to `output`."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]


_running: dict[str, Compiling] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts this folder's tests last; pytest calls it for all items, wherever this file is."""
    here = Path(__file__).parent
    items.sort(key=lambda item: here in item.path.parents)


def pytest_collection_finish(session: pytest.Session) -> None:
    items = [item for item in session.items if isinstance(item, pytest.Function)]
    wanted: dict[str, set[int]] = {}
    for item in items:
        if "complaints" in item.fixturenames:
            wanted.setdefault(item.callspec.params["triton"], set()).add(item.callspec.params["arch"])
    for version, archs in {} if session.config.option.collectonly else wanted.items():
        folder = TRITONS / version
        if version != INSTALLED and not folder.is_dir():
            continue
        command = ["nice", "-n", "19", sys.executable, "-m", "tests.compile.resources", "--keep"]
        output = tempfile.TemporaryFile()  # noqa: SIM115  # until its tests have read it
        process = subprocess.Popen(
            [*command, *map(str, sorted(archs))],
            cwd=REPOSITORY,
            start_new_session=True,
            stdout=output,
            env=dict(os.environ, PYTHONPATH=str(folder)) if version != INSTALLED else None,
        )
        _running[version] = Compiling(process, output)


def pytest_sessionfinish() -> None:
    for one in _running.values():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.process.pid, signal.SIGKILL)  # its own processes too
        one.process.wait()


@pytest.fixture
def complaints(triton: str, arch: int) -> list[str]:
    """What is wrong with the variants for `arch`, compiled by a process that runs since the session began."""
    if triton not in _running:
        pytest.skip(f"needs Triton {triton} in {TRITONS.name}/{triton} of the build folder, as `make test-all` has it")
    # On a busy machine that takes longer than a test may; what bounds it is that kernels go on to come out.
    faulthandler.cancel_dump_traceback_later()
    process, output = _running[triton].process, _running[triton].output
    while process.poll() is None:
        before = _last_kept()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STALLED_SECONDS)
        assert process.poll() is not None or _last_kept() > before, f"nothing compiled in {_STALLED_SECONDS} s"
    assert process.returncode == 0, "see above for what it has written to stderr"
    output.seek(0)
    count, found = json.loads(output.read())[str(arch)]
    assert count > 0
    return list(found)


def _last_kept() -> int:
    return kept().stat().st_mtime_ns if kept().exists() else 0
