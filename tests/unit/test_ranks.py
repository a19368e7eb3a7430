"""Commands that start ranks on this machine, and the end of all ranks when one ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time

import psutil
import pytest

from fused_tp.cli.ranks import choose_start_method

SLEEP = """
import time
from fused_tp.cli.ranks import Job, launch, preload
preload(["torch.distributed"])
launch(Job(time.sleep, 1000, ranks=2), "forkserver")
"""


def test_start_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long path of the temporary folder would make the name of a fork server's socket too long."""
    for folder, device, method in [(9, "cpu", "forkserver"), (80, "cpu", "spawn"), (9, "cuda", "spawn")]:
        monkeypatch.setattr(tempfile, "gettempdir", lambda folder=folder: "/" + "x" * folder)
        assert choose_start_method(device) == method


def test_a_command_that_is_ended_leaves_no_folder() -> None:
    waits = "import time; from fused_tp.cli.ranks import preload; preload(['json']); print(flush=True); time.sleep(60)"
    with tempfile.TemporaryDirectory() as folder:
        command = subprocess.Popen(
            [sys.executable, "-c", waits],
            env={**os.environ, "TMPDIR": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert command.stdout is not None and command.stdout.readline() and os.listdir(folder)
        command.terminate()
        _, said = command.communicate(timeout=20)
        assert command.returncode == 128 + signal.SIGTERM and not os.listdir(folder)
        assert said == "fused-tp: stopped by SIGTERM.\n"


@pytest.mark.full
@pytest.mark.parametrize(("whom", "code"), [("command", -signal.SIGKILL), ("rank", 1)])
def test_all_end_when_one_is_killed(whom: str, code: int) -> None:
    command = subprocess.Popen(
        [sys.executable, "-c", SLEEP], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while len(ranks := [rank for server in psutil.Process(command.pid).children() for rank in server.children()]) < 2:
        assert time.monotonic() < deadline and command.poll() is None
        time.sleep(0.1)
    started = psutil.Process(command.pid).children(recursive=True)
    (psutil.Process(command.pid) if whom == "command" else ranks[1]).kill()
    _, said = command.communicate(timeout=20)
    assert command.returncode == code, said
    assert not psutil.wait_procs(started, timeout=10)[1]
    assert whom == "command" or "rank 1 was killed by SIGKILL" in said.splitlines()[-1]
