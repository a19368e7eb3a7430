"""`fused-tp launch` with torchrun: ranks of two hosts, lost ranks and hosts, failures, and shutdown."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from fused_tp.cli import launch_node
from tests.integrations.test_checkpoints import saved_state
from tests.workers import REPOSITORY

LAUNCH = [sys.executable, "-m", "fused_tp.cli.main", "launch"]


def environment() -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("FUSED_TP_", "SLURM_", "TORCH"))}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "FUSED_TP_TIMEOUT": "60", "PYTHONPATH": str(REPOSITORY)}
    return env


def over_hosts(folder: Path) -> list[str]:
    """Options for two hosts that are both this machine."""
    (folder / "hosts").write_text("127.0.0.1 slots=2\nlocalhost slots=2\n")
    (folder / "ssh").write_text('exec sh -c "$2"\n')  # as ssh runs a command
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return ["--hostfile", f"{folder}/hosts", "--ssh", f"sh {folder}/ssh", "--port", str(port)]


def launch(folder: Path, options: list[str], steps: int = 8, killed: str = "") -> subprocess.CompletedProcess[str]:
    """Run examples.train_resilient; `killed` names the ranks that die, in the format of killed.py."""
    script = ["-m", *(["tests.integrations.killed", killed] if killed else ["examples.train_resilient"])]
    command = [*LAUNCH, *options, *script, "--folder", str(folder), "--steps", str(steps), "--save-every", "2"]
    done = subprocess.run(
        command, env=environment(), cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done


def losses(done: subprocess.CompletedProcess[str]) -> list[tuple[str, str]]:
    return re.findall(r"step (\d+): loss ([\d.]+)", done.stdout)


@pytest.mark.long
def test_two_hosts_of_which_a_rank_dies_and_then_one(tmp_path: Path) -> None:
    whole = losses(launch(tmp_path / "whole", ["--per-node", "4"]))
    assert [int(step) for step, _ in whole] == list(range(1, 9))

    hosts = over_hosts(tmp_path)
    folder = tmp_path / "killed"
    done = launch(folder, hosts, killed="1:step:4")
    assert dict(losses(done)) == dict(whole)
    assert losses(done).count(whole[2]) == 2  # the newest checkpoint was that of step 2
    assert "[127.0.0.1:0] step 1:" in done.stdout
    assert re.search(r"^\[localhost:[23]\].*PeerLostError", done.stderr, re.M)
    wanted, found = (saved_state(path / "step-00000008", tmp_path / "scratch") for path in (tmp_path / "whole", folder))
    assert list(found) == list(wanted) and len(wanted) > 60
    for name, value in wanted.items():
        assert torch.equal(found[name], value) if isinstance(value, Tensor) else found[name] == value, name

    done = launch(folder, [*hosts, "--nodes", "1"], steps=10)
    assert [int(step) for step, _ in losses(done)] == [9, 10] and "[localhost:" not in done.stdout


# A script without torch that only SIGKILL ends.
STUBBORN = """
import os, signal, sys, time
def say(text):
    with open(f"rank{os.environ['RANK']}", "a") as file:
        file.write(text + "\\n")
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: say(signal.Signals(number).name))
say(str(os.getpid()))
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""
BROKEN = """
import os, time
if os.environ["RANK"] == "1":
    print("about to fail", flush=True)
    raise ValueError("broken " + os.environ["RANK"])
time.sleep(60)
"""


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left(number: signal.Signals, tmp_path: Path) -> None:
    """Ranks of all hosts receive the launcher's signal, or SIGTERM if the launcher is gone, and SIGKILL later."""
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    command = [*LAUNCH, *over_hosts(tmp_path), "--per-node", "1", "--grace", "1", "stubborn.py"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        lines = sorted(launcher.stdout.readline() for _ in range(2))
        assert lines == ["[127.0.0.1:0] ready\n", "[localhost:1] ready\n"]
        launcher.send_signal(number)
        code = launcher.wait(60)
    assert code == (130 if number == signal.SIGINT else -number)
    for rank in range(2):
        said = tmp_path / f"rank{rank}"
        deadline = time.monotonic() + 30
        while not gone(int(said.read_text().split()[0])):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert said.read_text().split()[1] == ("SIGINT" if number == signal.SIGINT else "SIGTERM")


@pytest.mark.full
def test_ranks_of_this_machine_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    command = [*LAUNCH, "--per-node", "2", "stubborn.py"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert all(launcher.stdout.readline().endswith("ready\n") for _ in range(2))
        started = psutil.Process(launcher.pid).children(recursive=True)
        launcher.kill()
    assert len(started) >= 2 and not psutil.wait_procs(started, timeout=30)[1]


@pytest.mark.full
def test_the_first_failure_is_shown_with_the_end_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    command = [*LAUNCH, "--per-node", "2", "--bind", "cores", "--max-restarts", "0", "--local-ranks-filter", "0"]
    done = subprocess.run(
        [*command, "broken.py"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "on localhost rank 1 failed first, exit code 1." in done.stderr
    assert done.stderr.rstrip().endswith("    ValueError: broken 1") and "[localhost:1]" not in done.stderr


def test_a_port_that_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"localhost:{taken.getsockname()[1]}"
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", where, "--rdzv-conf", "is_host=1", "--tee", "3"]
        assert launch_node.main([*meeting, "--local-addr", "localhost", "script.py"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"fused-tp launch: hosts cannot meet at {where} (") and not [*tmp_path.iterdir()]
