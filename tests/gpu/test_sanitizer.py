"""compute-sanitizer over every kernel: no access out of bounds, no race in shared memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton")

from tests.workers import REPOSITORY

pytestmark = pytest.mark.gpu

CASE = Path(__file__).with_name("sanitizer_case.py")
FOUND = 9  # what the tool exits with where it has found something


def sanitizer() -> str | None:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes if home)]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_clean(tool: str) -> None:
    program = sanitizer()
    if program is None:
        pytest.skip("needs compute-sanitizer, which comes with the CUDA toolkit")
    # One allocation of the driver for each tensor: within torch's large blocks nothing would be out of bounds.
    memory = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else {}
    command = [
        program,
        "--tool",
        tool,
        "--error-exitcode",
        str(FOUND),
        "--print-limit",
        "20",
        sys.executable,
        str(CASE),
    ]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, **memory},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=580,
        check=False,
    )
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support the GPU of this machine")
    assert done.returncode == 0 and "all kernels ran" in done.stdout, done.stdout[-6000:]
