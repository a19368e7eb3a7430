"""The kernels' tests, interpreted by the oldest supported Triton; `make test-all` installs it in a separate folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compile.conftest import TRITONS
from tests.compile.test_kernels_compile import OLDEST
from tests.workers import REPOSITORY

SECONDS = 570.0


@pytest.mark.full
def test_interpreted_kernels_are_right_with_the_oldest_triton() -> None:
    folder = TRITONS / OLDEST
    if not folder.is_dir():
        pytest.skip(f"needs Triton {OLDEST} in {folder.name} of build/triton, as `make test-all` has it")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent)]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [*command, "-m", "not full and not long"],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "skipped" not in done.stdout.splitlines()[-1], done.stdout[-2000:]
