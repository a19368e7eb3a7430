"""Run the examples as their docstrings say."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch.distributed as dist

from tests import forks
from tests.workers import REPOSITORY

pytestmark = pytest.mark.full
SECONDS = 180


def run(name: str, ranks: int, *args: str, **env: str) -> str:
    """Output of an example on ranks with the variables of torchrun, started without it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun's store; the ranks join it
    env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    env |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_RUN_ID": "test"}
    with tempfile.TemporaryFile("w+") as log:
        started = []
        for rank in range(ranks):
            own = environment(**env, RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0")
            started.append(forks.fork(__name__, "example", [name, args], own, log.fileno()))
        try:
            codes = [process.wait(SECONDS) for process in started]
        finally:
            for process in started:
                process.kill()
        log.seek(0)
        printed = log.read()
    assert codes == [0] * ranks, printed
    return printed


def example(name: str, args: Sequence[str]) -> None:
    """Run an example; `run` calls this in a process of its own."""
    sys.argv = [name, *args]
    if name == "deepspeed_zero":  # it would compile its own C++ collectives, for half a minute
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    runpy.run_module(f"examples.{name}", run_name="__main__")


def environment(**env: str) -> dict[str, str]:
    given = {name: value for name, value in os.environ.items() if not name.startswith("FUSED_TP_")}
    given |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "FUSED_TP_TIMEOUT": "60", **env}
    given["PYTHONPATH"] = str(REPOSITORY)
    return given


def execute(command: list[str], **env: str) -> str:
    """Output of a Python module, started in a new interpreter."""
    command = [sys.executable, "-m", *command]
    done = subprocess.run(
        command, env=environment(**env), cwd=REPOSITORY, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(printed: str) -> list[float]:
    """Losses and gradient norms."""
    return [float(number) for pair in re.findall(r"loss ([\d.]+), gradient norm ([\d.]+)", printed) for number in pair]


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_fused_kernel_interpreted_on_three_ranks() -> None:
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    printed = execute([*torchrun, "-m", "examples.fused_kernel"], TRITON_INTERPRET="1")
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
    """Compare one process, context x tensor parallel ranks, and context parallel ranks started by accelerate."""
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


@pytest.mark.long
@pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed; pip install torchtitan")
def test_torchtitans_trainer(tmp_path: Path) -> None:
    sizes = ("--dp", "2", "--tp", "2", "--out", str(tmp_path))
    ours, stock = (
        sorted(
            re.findall(r"step: +(\d+) +loss: +([\d.]+) +grad_norm: +([\d.]+)", run("torchtitan_llama", 4, *sizes, *how))
        )
        for how in ((), ("--stock",))
    )
    assert ours == stock and [step for step, *_ in ours] == [str(step) for step in range(1, 5) for _ in range(4)]


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs Megatron-Core")
def test_megatron_gpt() -> None:
    one, four = ([float(x) for x in re.findall(r"loss ([\d.]+)", run("megatron_gpt", ranks))] for ranks in (1, 4))
    assert len(one) == 10 and one[-1] < 0.5 * one[0]
    assert four == pytest.approx(one, abs=1e-4)
