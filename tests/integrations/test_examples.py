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


def run(name: str, ranks: int, *args: str, **env: str) -> str:
    """What an example prints, run by torchrun."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return execute([*torchrun, "-m", f"examples.{name}", *args], **env)


def execute(command: list[str], **env: str) -> str:
    given = {name: value for name, value in os.environ.items() if not name.startswith("FUSED_TP_")}
    given |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "FUSED_TP_TIMEOUT": "60", **env}
    given["PYTHONPATH"] = str(REPOSITORY)
    command = [sys.executable, "-m", *command]
    done = subprocess.run(command, env=given, cwd=REPOSITORY, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(printed: str) -> list[float]:
    """Losses and gradient norms."""
    return [float(number) for pair in re.findall(r"loss ([\d.]+), gradient norm ([\d.]+)", printed) for number in pair]


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
    found = numbers(printed)[::2]
    assert len(found) == 4 and found[-1] < 0.7 * found[0], printed
    assert "21 tensors, 94528 numbers" in printed


@pytest.mark.skipif(find_spec("trl") is None, reason="needs TRL")
def test_sft_of_packed_documents() -> None:
    """One process, context x tensor parallel ranks by torchrun, and context parallel ranks by accelerate."""
    accelerate = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    accelerate += ["--mixed_precision", "no", "--dynamo_backend", "no", "-m", "examples.sft_packed", "--cp", "2"]
    one, four = run("sft_packed", 1), run("sft_packed", 4, "--cp", "2", "--tp", "2")
    two = execute(accelerate, ACCELERATE_USE_CPU="1")
    wanted = numbers(one)
    assert len(wanted) == 12
    for printed in (four, two):
        assert numbers(printed) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed; pip install lightning")
def test_lightning_trains_alike_and_resumes_at_another_size(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    runs = {2: ["--cp", "2", "--folder", folder], 4: ["--dp", "2", "--tp", "2", "--resume", folder, "--steps", "5"]}
    printed = [run("lightning_llama", ranks, *given) for ranks, given in runs.items()]
    found = [re.search(r"^losses: (.*)$", text, re.M) for text in printed]
    losses = [[float(loss) for loss in one[1].split()] for one in found if one is not None]
    assert [len(of_run) for of_run in losses] == [3, 2] and losses[1][-1] < losses[0][0], printed


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs Megatron-Core")
def test_megatron_gpt() -> None:
    one, four = ([float(x) for x in re.findall(r"loss ([\d.]+)", run("megatron_gpt", ranks))] for ranks in (1, 4))
    assert len(one) == 10 and one[-1] < 0.5 * one[0]
    assert four == pytest.approx(one, abs=1e-4)
