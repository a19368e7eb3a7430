"""Background compilation of all kernels, which takes minutes of CPU time: it starts with the session.

It runs at the lowest priority, on CPU time that other tests leave idle, and its tests run last. Results are kept: the
next session compiles only changed kernels. Versions of Triton other than the installed one are in separate folders
(filled by `make test` and `make test-all`) and compile in processes with that folder first in their search path.
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

_STALLED_SECONDS = 300  # without one compiled kernel
TRITONS = REPOSITORY / "build" / "triton"  # folders of `pip install --target`, by version


@dataclass
class Compiling:
    """A process that compiles with one version of Triton; it writes JSON to `output`."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]


_running: dict[str, Compiling] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move this folder's tests to the end; pytest calls this hook with all items of the session."""
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
        output = tempfile.TemporaryFile()  # noqa: SIM115  # stays open until the tests have read it
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
            os.killpg(one.process.pid, signal.SIGKILL)  # its child processes, too
        one.process.wait()


@pytest.fixture
def complaints(triton: str, arch: int) -> list[str]:
    """Problems of the variants for `arch`, compiled by a process that started with the session."""
    if triton not in _running:
        pytest.skip(f"needs Triton {triton} in {TRITONS.name}/{triton} of the build folder, as `make test-all` has it")
    # On a busy machine this takes longer than the limit of a test; the bound is the time without a compiled kernel.
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
