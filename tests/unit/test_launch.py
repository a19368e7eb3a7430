"""`fused-tp launch`: its commands, its refusals, and the end of hosts. Nothing here starts torchrun."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from importlib.machinery import ModuleSpec
from itertools import pairwise
from pathlib import Path

import pytest

from fused_tp.cli import launch_node
from fused_tp.cli.launch import ANSWER, read_hostfile, run_hosts
from fused_tp.cli.main import main

NODE = [sys.executable, "-m", "fused_tp.cli.launch_node"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script and two hosts, outside of SLURM."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "FUSED_TP_", "TORCH_", "NCCL_", "GLOO_", "OMP_", "PYTHONPATH")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "hosts").write_text("# ours\nnode1 slots=8\n\nnode2 slots=4  # the old one\n")
    return tmp_path


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> list[list[str]]:
    """The commands that are printed, as words."""
    assert main(["launch", "--dry-run", *words]) == 0
    return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]


def options_of(command: list[str]) -> dict[str, str]:
    """The word after each option of torchrun, by option."""
    return {word: after for word, after in pairwise(command) if word.startswith("--")}


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    [command] = dry_run(capsys, "--per-node", "4", "train.py", "--per-node", "9", "--help", "--", "-m")
    assert command[:3] == NODE and "--standalone" in command
    assert command[-6:] == ["train.py", "--per-node", "9", "--help", "--", "-m"]
    options = options_of(command[:-5])
    assert options["--nproc-per-node"] == "4" and options["--max-restarts"] == "3" and options["--tee"] == "3"
    words = [
        "--max-restarts",
        "0",
        "--grace",
        "5",
        "--log-dir",
        "logs",
        "--local-ranks-filter",
        "0,2",
        "--env",
        "A=b c",
    ]
    [command] = dry_run(capsys, "--per-node", "4", "--bind", "node", *words, "-m", "json.tool", "x y")
    assert command[:5] == ["env", "A=b c", *NODE] and command[-3:] == ["-m", "json.tool", "x y"]
    options = options_of(command)
    assert options["--numa-binding"] == "node" and options["--shutdown-timeout"] == "5"
    assert options["--log-dir"] == "logs" and options["--local-ranks-filter"] == "0,2"


def test_torchrun_takes_the_arguments(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    [command] = dry_run(capsys, "--per-node", "2", "--bind", "cores", "-m", "json.tool", "--indent", "2")
    monkeypatch.setattr(os, "environ", {"PET_RDZV_ID": "of the operator"})
    arguments = launch_node._make_parser().parse_args(command[len(NODE) :])
    assert arguments.rdzv_id == "of the operator"  # Kubernetes
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(7)))
    nohup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        launch_node._adjust_arguments(arguments, "node1")
    finally:
        signal.signal(signal.SIGHUP, nohup)
    assert "SIGTERM" in arguments.signals_to_handle and "SIGHUP" not in arguments.signals_to_handle
    assert os.environ["OMP_NUM_THREADS"] == "3" and os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert os.environ["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] == "[node1:${rank}] "
    assert arguments.no_python and not arguments.module and arguments.training_script == sys.executable
    assert arguments.training_script_args[3:5] == [str(os.getpid()), "cores"]
    assert arguments.training_script_args[5:] == [sys.executable, "-u", "-m", "json.tool", "--indent", "2"]
    arguments.nproc_per_node = "8"
    with pytest.raises(ValueError, match="node1 has 7 for 8 ranks"):
        launch_node._adjust_arguments(arguments, "node1")


def test_hosts(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_hostfile(here / "hosts") == {"node1": 8, "node2": 4}
    monkeypatch.setenv("FUSED_TP_TIMEOUT", "7")
    monkeypatch.setenv("FUSED_TP_HOST", "this one")
    monkeypatch.setenv("TOKEN", "a'b")
    commands = dry_run(capsys, "--hostfile", "hosts", "--env", "TOKEN", "train.py", "it's")
    assert [command[:6] for command in commands] == [
        ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=30", host] for host in ("node1", "node2")
    ]
    jobs = set()
    for number, (command, slots) in enumerate(zip(commands, ("8", "4"), strict=True)):
        enter, answer, start = command[6].split(" && ")
        assert shlex.split(enter) == ["cd", str(here)] and shlex.split(answer) == ["echo", ANSWER]
        words = shlex.split(start)
        assert words[:7] == ["exec", "env", "FUSED_TP_TIMEOUT=7", "TOKEN=a'b", *NODE] and words[-1] == "it's"
        options = options_of(words)
        assert "--stop-with-stdin" in options and options["--nproc-per-node"] == slots
        assert options["--nnodes"] == "2" and options["--rdzv-backend"] == "c10d"
        assert options["--rdzv-endpoint"] == "node1:29400" and options["--rdzv-conf"] == f"is_host={1 - number}"
        assert options["--local-addr"] == f"node{number + 1}"
        jobs.add(options["--rdzv-id"])
    assert len(jobs) == 1


def test_fewer_hosts_and_other_ways_to_them(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--hostfile", "hosts", "--per-node", "2", "--port", "1234", "train.py"]
    commands = dry_run(capsys, "--nodes", "1:2", "--ssh", "kubectl exec -i {host} -- sh -c", *words)
    assert [command[:-1] for command in commands] == [
        ["kubectl", "exec", "-i", host, "--", "sh", "-c"] for host in ("node1", "node2")
    ]
    options = options_of(shlex.split(commands[1][-1]))
    assert options["--nnodes"] == "1:2" and options["--nproc-per-node"] == "2"
    assert options["--rdzv-endpoint"] == "node1:1234"
    [command] = dry_run(capsys, "--nodes", "1", "--ssh", "rsh", *words)
    assert command[:2] == ["rsh", "node1"] and options_of(shlex.split(command[2]))["--nnodes"] == "1"


def test_slurm(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "scontrol").write_text('#!/bin/sh\n[ "$*" = "show hostnames n[3-4]" ] && printf "n3\\nn4\\n"\n')
    (here / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{here}:{os.environ['PATH']}")
    for name, value in (("NODELIST", "n[3-4]"), ("NUM_NODES", "2"), ("ID", "77")):
        monkeypatch.setenv(f"SLURM_JOB_{name}", value)
    [command] = dry_run(capsys, "train.py", "--lr", "1")
    assert command[0] == "srun" and "--nodes=2" in command and "--ntasks-per-node=1" in command
    options = options_of(command)
    assert options["--rdzv-endpoint"] == "n3:29400" and options["--rdzv-id"] == "77" and options["--nnodes"] == "2"
    assert options["--nproc-per-node"] == "gpu" and command[-3:] == ["train.py", "--lr", "1"]
    assert main(["launch", "--nodes", "3", "train.py"]) == 2
    assert "--nodes=3 exceeds the 2 hosts of the SLURM allocation" in capsys.readouterr().err
    monkeypatch.setenv("SLURM_JOB_NODELIST", "unknown")
    assert main(["launch", "train.py"]) == 2 and "scontrol cannot name" in capsys.readouterr().err
    monkeypatch.setenv("SLURM_STEP_ID", "0")  # srun has started this process
    [command] = dry_run(capsys, "--per-node", "2", "train.py")
    assert command[:3] == NODE


def test_sbatch(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nodes", "4", "--per-node", "8", "--sbatch", "job.sh", "--env", "A=b c", "train.py", "it's"]
    assert main(["launch", *words]) == 0 and "sbatch job.sh" in capsys.readouterr().out
    text = (here / "job.sh").read_text()
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash" and "#SBATCH --nodes=4" in lines and "export A='b c'" in lines
    # Run the script in bash, with fakes of srun and scontrol.
    stand_ins = "scontrol() { printf 'n3\\nn4\\n'; }; srun() { printf '%s\\n' \"$@\"; }; SLURM_JOB_ID=77\n"
    done = subprocess.run(["bash", "-c", stand_ins + text], capture_output=True, text=True, check=True)
    options = options_of(done.stdout.splitlines())
    assert options["--rdzv-endpoint"] == "n3:29400" and options["--rdzv-id"] == "77"
    assert done.stdout.splitlines()[-2:] == ["train.py", "it's"]
    assert main(["launch", *words]) == 2 and "job.sh (File exists)" in capsys.readouterr().err
    assert main(["launch", "--dry-run", *words]) == 0 and capsys.readouterr().out == text


def test_a_package_that_a_finder_of_its_own_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Find a package outside the folders of sys.path, as in an editable installation."""

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            return ModuleSpec(name, None) if name == "installed_elsewhere" else None

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert main(["launch", "--dry-run", "--per-node", "2", "-m", "installed_elsewhere.train"]) == 0
    assert "-m installed_elsewhere.train" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--per-node 2 nowhere.py", "no script nowhere.py"),
        ("--per-node 2 -m nowhere.train", "no module or package nowhere"),
        ("--per-node 0 train.py", "must be at least 1"),
        ("--per-node 2 --nodes 2 train.py", "--nodes above 1 needs --hostfile"),
        ("--per-node 2 --ssh rsh train.py", "--ssh needs --hostfile"),
        ("--per-node 2 --connect-timeout 3 train.py", "--connect-timeout needs --hostfile"),
        ("--per-node 2 --port 3 train.py", "--port needs --hostfile or SLURM"),
        ("--per-node 2 --local-ranks-filter 0-3 train.py", "must be rank numbers such as 0,1"),
        ("--per-node 2 --bind threads train.py", "invalid choice"),
        ("--per-node 2 --env NOT_THERE train.py", "a variable that is set here"),
        ("--hostfile hosts --port 70000 train.py", "between 1 and 65535"),
        ("--hostfile hosts --nodes 3 train.py", "--nodes=3 exceeds the 2 hosts of hosts"),
        ("--hostfile hosts --nodes 2:1 train.py", "must satisfy 1 <= MIN <= MAX"),
        ("--hostfile hosts --nodes 0 train.py", "must satisfy 1 <= MIN <= MAX"),
        ("--hostfile hosts --nodes all train.py", "must be a number or MIN:MAX"),
        ("--hostfile hosts --per-node 5 train.py", "exceeds the 4 slots of node2"),
        ("--hostfile nowhere train.py", "nowhere cannot be read"),
        ("--hostfile hosts --sbatch job.sh train.py", "cannot be combined"),
        ("--sbatch job.sh train.py", "--sbatch needs --nodes"),
        ("--sbatch job.sh --nodes 1:2 train.py", "--nodes MIN:MAX is not supported under SLURM"),
        ("--sbatch no/folder --nodes 1 train.py", "cannot write"),
        ("--per-node 2", "required: script"),
    ],
)
def test_refusals(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(["launch", *words.split()])
    except SystemExit as error:
        code = error.code
    assert code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("# nobody\n\n", "names no host"),
        ("node1 slots=0", "has slots=0 for node1"),
        ("node1 slots=2\nnode2 slots=2\nnode1 slots=2", "Line 3 of .* repeats node1"),
        ("node1", "Line 1 of .* is 'node1'; write it like"),
        ("node1 slots=many", "write it like"),
        ("node1 slots=-1", "write it like"),
        ("node1 slots=2 max_slots=4", "write it like"),
        ("-oProxyCommand=evil slots=2", "write it like"),
    ],
)
def test_hostfiles_that_are_refused(here: Path, text: str, says: str) -> None:
    (here / "hosts").write_text(text)
    with pytest.raises(ValueError, match=says):
        read_hostfile(here / "hosts")


def host(script: str) -> list[str]:
    return ["sh", "-c", f"echo {ANSWER}; {script}"]


ENDS_WITH_STDIN = "while read line; do echo $line; done; echo ended"


def test_all_hosts_are_done(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_hosts(["a", "b"], [host("echo from a"), host("echo from b >&2")], 2, 10, None) == 0
    assert capfd.readouterr() == ("from a\n", "from b\n")
    assert run_hosts(["a"], [["not-a-program"]], 1, 10, None) == 2
    assert "not-a-program cannot be run" in capfd.readouterr().err


def test_the_first_failure_ends_all_hosts(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_hosts(["a", "b"], [host(ENDS_WITH_STDIN), host("exit 5")], 1, 10, None) == 5
    out, err = capfd.readouterr()
    assert out == "ended\n" and err == "fused-tp launch: b was the first to fail (exit code 5); all hosts end.\n"


def test_hosts_that_are_lost(capfd: pytest.CaptureFixture[str]) -> None:
    lost, stays = host("exit 255"), host("sleep 0.5; echo done")
    assert run_hosts(["a", "b"], [stays, lost], 1, 10, None) == 0
    out, err = capfd.readouterr()
    assert out == "done\n" and "b was lost (exit code 255); going on with 1 of 2 hosts" in err
    assert run_hosts(["a", "b"], [host(ENDS_WITH_STDIN), lost], 2, 10, None) == 1  # both are needed
    assert run_hosts(["a", "b"], [lost, host(ENDS_WITH_STDIN)], 1, 10, None) == 1  # hosts meet at the first
    capfd.readouterr()
    began = time.monotonic()
    assert run_hosts(["a", "b"], [host(ENDS_WITH_STDIN), ["sleep", "60"]], 2, 0.5, None) == 1
    out, err = capfd.readouterr()
    assert out == "ended\n" and "b did not answer within 0.5 seconds; all hosts end" in err
    assert time.monotonic() - began < 10
    assert run_hosts(["a"], [["sh", "-c", "exit 2"]], 1, 10, None) == 1
    assert "a cannot be reached, or has no folder" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_hosts(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(number)
    threading.Timer(0.5, os.kill, (os.getpid(), number)).start()
    # Each host reads the name of the signal; the second ends later.
    assert run_hosts(
        ["a", "b"], [host("read line; echo a $line"), host("read line; sleep 0.2; echo b")], 2, 10, None
    ) == (128 + number)
    assert sorted(capfd.readouterr().out.splitlines()) == [f"a {number.name}", "b"]
    assert signal.getsignal(number) == before


def test_shares_of_cores(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_node, "CPU_FOLDER", here)
    for cpu in range(8):  # two sockets of two cores of two threads
        folder = here / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{cpu % 2}\n")
        (folder / "core_id").write_text(f"{cpu // 2 % 2}\n")
    cpus = launch_node.sort_by_core(set(range(8)))
    assert cpus == [0, 4, 2, 6, 1, 5, 3, 7]
    assert [launch_node.share_of(rank, 4, cpus) for rank in range(4)] == [{0, 4}, {2, 6}, {1, 5}, {3, 7}]
    shares = [launch_node.share_of(rank, 3, cpus) for rank in range(3)]
    assert sorted(map(len, shares)) == [2, 3, 3] and set.union(*shares) == set(range(8))
    assert launch_node.sort_by_core({9, 8}) == [8, 9]  # a machine without a topology of cores
