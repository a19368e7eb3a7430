"""The examples run as their docstrings say."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs Triton")

from tests.workers import REPOSITORY

pytestmark = pytest.mark.full


def test_fused_kernel_interpreted_on_three_ranks() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("FUSED_TP_")}
    env |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "FUSED_TP_TIMEOUT": "60"}
    env["PYTHONPATH"] = str(REPOSITORY)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    done = subprocess.run(
        [*command, "-m", "examples.fused_kernel"], env=env, cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "forward: fused_kernel over symmetric memory" in done.stdout
    errors = re.findall(r"rank (\d): relative error of (\w+) ([\d.e+-]+)", done.stdout)
    assert {(rank, name) for rank, name, _ in errors} == {(rank, name) for rank in "012" for name in ("y", "dx")}
    assert all(float(error) < 1e-6 for _, _, error in errors), errors
