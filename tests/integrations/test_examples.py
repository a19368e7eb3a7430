"""The examples run as their docstrings say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.workers import REPOSITORY

pytestmark = pytest.mark.full


def run(name: str, ranks: int, **env: str) -> str:
    """What an example prints, run by torchrun."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("FUSED_TP_")}
    given |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "FUSED_TP_TIMEOUT": "60", **env}
    given["PYTHONPATH"] = str(REPOSITORY)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, "-m", f"examples.{name}"], env=given, cwd=REPOSITORY, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_fused_kernel_interpreted_on_three_ranks() -> None:
    printed = run("fused_kernel", 3, TRITON_INTERPRET="1")
    assert "forward: fused_kernel over symmetric memory" in printed
    errors = re.findall(r"rank (\d): relative error of (\w+) ([\d.e+-]+)", printed)
    assert {(rank, name) for rank, name, _ in errors} == {(rank, name) for rank in "012" for name in ("y", "dx")}
    assert all(float(error) < 1e-6 for _, _, error in errors), errors


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
def test_deepspeed_zero() -> None:
    printed = run("deepspeed_zero", 4, DS_ACCELERATOR="cpu")
    found = losses(printed)
    assert len(found) == 4 and found[-1] < 0.7 * found[0], printed
    assert "21 tensors, 94528 numbers" in printed
