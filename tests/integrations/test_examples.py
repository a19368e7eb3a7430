"""The examples run as their docstrings say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.workers import REPOSITORY

pytestmark = pytest.mark.full


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
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


@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed; pip install lightning")
def test_lightning_trains_alike_at_all_sizes_and_resumes(tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    runs = [[sys.executable], [*launch], [*launch]]
    sizes = ["--folder one", "--cp 2 --tp 2 --folder four", "--dp 2 --tp 2 --resume four --steps 5"]
    losses = []
    for command, given in zip(runs, sizes, strict=True):
        arguments = re.sub(r"(one|four)\b", lambda name: str(tmp_path / name[0]), given).split()
        done = subprocess.run(
            [*command, "-m", "examples.lightning_llama", *arguments],
            env=env,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        found = re.search(r"^losses: (.*)$", done.stdout, re.M)
        assert found is not None, done.stdout
        losses.append([float(loss) for loss in found[1].split()])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and len(losses[0]) == 3
    assert len(losses[2]) == 2
