"""compute-sanitizer over every fused kernel: no access out of bounds, no race in shared memory.

The tool may run one kernel at a time, so no rank can wait for another: each runs alone with its flags set beforehand,
and copies precede the kernel that waits for them (CUDA_LAUNCH_BLOCKING=1). All memory of a real call is accessed.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fused_tp.cli.selftest import cuda_tool
from tests.workers import REPOSITORY

pytestmark = pytest.mark.gpu

CASES = "runs_alone or (every_config and bf16)"  # tests of test_fused_kernels
FOUND = 9  # the tool's exit code if it finds an error


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_clean(tool: str) -> None:
    program = cuda_tool("compute-sanitizer")
    if program is None:
        pytest.skip("needs compute-sanitizer, which comes with the CUDA toolkit")
    environment = {**os.environ, "CUDA_LAUNCH_BLOCKING": "1"}
    if tool == "memcheck":
        # One driver allocation per tensor: accesses within torch's large blocks would never be out of bounds.
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20", sys.executable]
    command += ["-m", "pytest", "-q", "-m", "gpu", "-k", CASES, "tests/gpu/test_fused_kernels.py"]
    out = subprocess.STDOUT
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=out, text=True, timeout=580
    )
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support the GPU of this machine")
    assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-6000:]
