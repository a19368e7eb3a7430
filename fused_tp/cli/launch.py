"""`fused-tp launch`: run a script on the ranks of this machine, of hosts that ssh reaches, or of a SLURM allocation.

Example:
    $ fused-tp launch --per-node 4 train.py --lr 1e-4
    $ fused-tp launch --hostfile hosts --nodes 2 -m package.train
    $ fused-tp launch --nodes 2 --per-node 8 --sbatch job.sh train.py && sbatch job.sh

Each host runs fused_tp.cli.launch_node, which runs torchrun. This module builds the arguments of launch_node, starts it
on every host, and stops it on every host when one fails.

Rejected: --rdzv-backend static, which numbers hosts in the order of the file. It cannot restart all ranks together, or
with another number of hosts. c10d can; it numbers hosts by their names.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.numa.binding import AffinityMode

from fused_tp.cli import at_least, launch_node, positive_number
from fused_tp.cli.launch_hosts import ANSWER, Host, read_hostfile, run

LAUNCH_NODE = [sys.executable, "-m", "fused_tp.cli.launch_node"]
CORES = "cores"
PORT = 29400  # torchrun's default
CONNECT_SECONDS = 30.0
SSH = "ssh -o BatchMode=yes -o ConnectTimeout={timeout}"
# Variables to export, since ssh does not pass them on. FUSED_TP_HOST differs between hosts.
EXPORTED = ("FUSED_TP_", "TORCH_", "NCCL_", "GLOO_", "OMP_", "PYTHONPATH")
NOT_EXPORTED = "FUSED_TP_HOST"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `fused-tp launch`."""
    where = parser.add_argument_group("where (default: on this machine, or in the SLURM allocation around it)")
    where.add_argument("--hostfile", type=Path, metavar="FILE", help="lines such as `node1 slots=8`; ssh reaches them")
    where.add_argument("--nodes", type=_nodes, metavar="N", help="how many hosts, or MIN:MAX (default: all)")
    where.add_argument(
        "--per-node", type=at_least(1), metavar="P", help="ranks of a host (default: its slots, or GPUs)"
    )
    where.add_argument("--sbatch", type=Path, metavar="FILE", help="write a file for sbatch, and run nothing")
    ranks = parser.add_argument_group("ranks")
    ranks.add_argument("--max-restarts", type=at_least(0), default=3, metavar="R", help="of all ranks (default 3)")
    ranks.add_argument(
        "--bind",
        choices=[CORES, *(mode.value for mode in AffinityMode)],
        help="cores: a share of the host's processors for each rank; others: torchrun's --numa-binding, by its GPU",
    )
    ranks.add_argument("--grace", type=at_least(0), metavar="S", help="seconds from a signal to SIGKILL (default 30)")
    ranks.add_argument("--log-dir", type=Path, metavar="DIR", help="for a file of each rank (default: temporary)")
    ranks.add_argument(
        "--local-ranks-filter", type=_local_ranks, metavar="0,1", help="whose logs are printed (default: all)"
    )
    ranks.add_argument(
        "--env", action="append", default=[], type=_variable, metavar="NAME[=VALUE]", help="variables to set"
    )
    hosts = parser.add_argument_group("hosts")
    hosts.add_argument("--port", type=int, help=f"of the first host, where hosts meet (default {PORT})")
    hosts.add_argument(
        "--ssh", metavar="COMMAND", help=f"before a host and what it runs, or with {{host}} (default {SSH})"
    )
    hosts.add_argument(
        "--connect-timeout", type=positive_number, metavar="S", help="seconds for a host to answer (default 30)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands, one for each host")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module, as for python -m")
    parser.add_argument("script", help="script that each rank runs; all following arguments are passed to it")
    parser.add_argument("script_arguments", nargs=argparse.REMAINDER, metavar="...")


def main(arguments: argparse.Namespace) -> int:
    """Run the script on all hosts; exit code 2: invalid arguments, others: see `launch_node.main` and `run`."""
    variables = dict(arguments.env)
    try:
        _check(arguments)
        if arguments.sbatch is not None:
            return _write_sbatch(arguments, sbatch_text(arguments, variables))
        if arguments.hostfile is not None:
            hosts, minimum = choose_hosts(arguments)
            commands = host_commands(arguments, hosts, minimum, {**_exported(os.environ), **variables})
        elif _in_allocation(os.environ):
            commands = [srun_command(arguments, os.environ)]
        else:
            commands = [local_command(arguments)]
    except ValueError as error:
        print(f"fused-tp launch: {error}", file=sys.stderr)
        return 2
    if arguments.dry_run:
        here = [f"{name}={value}" for name, value in variables.items()] if arguments.hostfile is None else []
        print("\n".join(shlex.join([*(["env"] if here else []), *here, *command]) for command in commands))
        return 0
    if arguments.hostfile is not None:
        names = [host.name for host in hosts]
        return run(names, commands, minimum, arguments.connect_timeout or CONNECT_SECONDS, arguments.grace)
    os.environ.update(variables)
    if commands[0][0] == "srun":
        os.execvp("srun", commands[0])  # exec, so that srun receives the signals sent to this process
    return launch_node.main(commands[0][len(LAUNCH_NODE) :])


def _nodes(text: str) -> tuple[int, int]:
    minimum, _, maximum = text.partition(":")
    try:
        found = int(minimum), int(maximum or minimum)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number or MIN:MAX, got {text!r}") from None
    if not 1 <= found[0] <= found[1]:
        raise argparse.ArgumentTypeError(f"must satisfy 1 <= MIN <= MAX, got {text!r}")
    return found


def _local_ranks(text: str) -> str:
    if not all(rank.isdecimal() for rank in text.split(",")):
        raise argparse.ArgumentTypeError(f"must be rank numbers such as 0,1, got {text!r}")
    return text


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not (equals or name in os.environ):
        raise argparse.ArgumentTypeError(
            f"must be NAME=VALUE, or the NAME of a variable that is set here, got {text!r}"
        )
    return name, value if equals else os.environ[name]


def _check(arguments: argparse.Namespace) -> None:
    """Reject contradicting options and a missing script.

    Raises:
        ValueError: options contradict each other, or the script does not exist.
    """
    script = arguments.script
    if arguments.module:
        package = script.partition(".")[0]
        if find_spec(package) is None and PathFinder.find_spec(package, [os.getcwd()]) is None:
            raise ValueError(
                f"-m {script}: no module or package {package} is found; install it, or change the working directory."
            )
    elif not Path(script).is_file():
        raise ValueError(f"There is no script {script} in {Path.cwd()}; use -m to run a module.")
    if arguments.hostfile is not None and arguments.sbatch is not None:
        raise ValueError(
            "--hostfile and --sbatch cannot be combined: with --sbatch, SLURM chooses the hosts. Omit one."
        )
    for option in ("ssh", "connect_timeout"):
        if arguments.hostfile is None and getattr(arguments, option) is not None:
            name = option.replace("_", "-")
            raise ValueError(f"--{name} needs --hostfile. Pass --hostfile, or omit --{name}.")
    if not 0 < (arguments.port or PORT) < 2**16:
        raise ValueError(f"--port must be between 1 and 65535, got {arguments.port}.")


# -- arguments of torchrun --------------------------------------------------------------------------------------------


def node_arguments(arguments: argparse.Namespace, ranks: int | str, meeting: Sequence[str]) -> list[str]:
    """Return the arguments of launch_node for `ranks` ranks on one host; `meeting`: options of the rendezvous."""
    options = [*meeting, "--nproc-per-node", str(ranks), "--max-restarts", str(arguments.max_restarts), "--tee", "3"]
    if arguments.bind is not None:
        options += ["--bind-cores"] if arguments.bind == CORES else ["--numa-binding", arguments.bind]
    if arguments.grace is not None:
        options += ["--shutdown-timeout", str(arguments.grace)]
    if arguments.log_dir is not None:
        options += ["--log-dir", str(arguments.log_dir)]
    if arguments.local_ranks_filter is not None:
        options += ["--local-ranks-filter", arguments.local_ranks_filter]
    return [*options, *(["-m"] if arguments.module else []), arguments.script, *arguments.script_arguments]


def local_command(arguments: argparse.Namespace) -> list[str]:
    """Return the command that starts ranks on this machine.

    Raises:
        ValueError: the options request other hosts, or the number of ranks is unknown.
    """
    if arguments.nodes not in (None, (1, 1)):
        raise ValueError("--nodes above 1 needs --hostfile, or a SLURM allocation.")
    if arguments.port is not None:
        raise ValueError("--port needs --hostfile or SLURM: one machine has no rendezvous port. Omit it.")
    ranks = arguments.per_node or torch.cuda.device_count()
    if ranks == 0:
        raise ValueError("This machine has no GPUs, so the number of ranks is unknown; pass --per-node P.")
    # localhost, because the machine's name may not resolve.
    return [*LAUNCH_NODE, *node_arguments(arguments, ranks, ["--standalone", "--local-addr", "localhost"])]


# -- hosts that ssh reaches -------------------------------------------------------------------------------------------


def choose_hosts(arguments: argparse.Namespace) -> tuple[list[Host], int]:
    """Return the first --nodes hosts of the file, with one slot per rank, and the minimum number of hosts.

    Raises:
        ValueError: the file lists fewer hosts, or one of them has fewer slots.
    """
    hosts = read_hostfile(arguments.hostfile)
    minimum, maximum = arguments.nodes or (len(hosts), len(hosts))
    if maximum > len(hosts):
        raise ValueError(f"--nodes={maximum} exceeds the {len(hosts)} hosts of {arguments.hostfile}; lower --nodes.")
    hosts = hosts[:maximum]
    if arguments.per_node is None:
        return hosts, minimum
    for host in hosts:
        if host.slots < arguments.per_node:
            raise ValueError(f"--per-node={arguments.per_node} exceeds the {host.slots} slots of {host.name}.")
    return [Host(host.name, arguments.per_node) for host in hosts], minimum


def host_commands(
    arguments: argparse.Namespace, hosts: Sequence[Host], minimum: int, variables: Mapping[str, str]
) -> list[list[str]]:
    """Return one command per host, which connects to it and starts its ranks in this folder with `variables`."""
    count = str(len(hosts)) if minimum == len(hosts) else f"{minimum}:{len(hosts)}"
    first, job = hosts[0].name, uuid.uuid4().hex
    ssh = arguments.ssh or SSH.format(timeout=max(1, round(arguments.connect_timeout or CONNECT_SECONDS)))
    commands = []
    together = ["--stop-with-stdin", "--nnodes", count, "--rdzv-backend", "c10d", "--rdzv-id", job]
    together += ["--rdzv-endpoint", f"{first}:{arguments.port or PORT}"]
    exports = [f"{name}={value}" for name, value in variables.items()]
    for host in hosts:
        # Set is_host explicitly: torchrun would compare the name in the hostfile with the machine's name, and they may
        # differ.
        is_host = f"is_host={int(host == hosts[0])}"
        meeting = [*together, "--rdzv-conf", is_host, "--local-addr", host.name]
        runs = ["env", *exports, *LAUNCH_NODE, *node_arguments(arguments, host.slots, meeting)]
        there = f"cd {shlex.quote(os.getcwd())} && echo {shlex.quote(ANSWER)} && exec {shlex.join(runs)}"
        reach = [word.replace("{host}", host.name) for word in shlex.split(ssh)]
        commands.append([*reach, *([] if "{host}" in ssh else [host.name]), there])
    return commands


def _exported(environment: Mapping[str, str]) -> dict[str, str]:
    names = (name for name in environment if name.startswith(EXPORTED) and name != NOT_EXPORTED)
    return {name: environment[name] for name in sorted(names)}


# -- SLURM ------------------------------------------------------------------------------------------------------------

# --cpu-bind=none: SLURM may otherwise bind the task to one processor, which all ranks of the host would share.
SRUN = ["srun", "--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=1"]


def _slurm_arguments(arguments: argparse.Namespace, nodes: int, first: str, job: str) -> list[str]:
    meeting = ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-id", job]
    meeting += ["--rdzv-endpoint", f"{first}:{arguments.port or PORT}"]
    return [*SRUN, f"--nodes={nodes}", *LAUNCH_NODE, *node_arguments(arguments, arguments.per_node or "gpu", meeting)]


def _single_count(nodes: tuple[int, int]) -> int:
    if nodes[0] != nodes[1]:
        raise ValueError(
            "--nodes MIN:MAX is not supported under SLURM, which ends a job that loses a host. Pass --nodes N, and use "
            "sbatch --requeue to restart the job."
        )
    return nodes[1]


def _in_allocation(environment: Mapping[str, str]) -> bool:
    # Within a job step (SLURM_STEP_ID is set), srun has already started this process on every host.
    return "SLURM_JOB_NODELIST" in environment and "SLURM_STEP_ID" not in environment


def srun_command(arguments: argparse.Namespace, environment: Mapping[str, str]) -> list[str]:
    """Return the command that starts ranks in the SLURM allocation that `environment` describes.

    Raises:
        ValueError: the allocation has fewer hosts than requested, or scontrol cannot name them.
    """
    there = int(environment["SLURM_JOB_NUM_NODES"])
    nodes = _single_count(arguments.nodes or (there, there))
    if nodes > there:
        raise ValueError(
            f"--nodes={nodes} exceeds the {there} hosts of the SLURM allocation. Lower --nodes or allocate more hosts."
        )
    try:
        names = subprocess.run(
            ["scontrol", "show", "hostnames", environment["SLURM_JOB_NODELIST"]],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f"scontrol cannot name the hosts of the SLURM allocation ({error}).") from None
    return _slurm_arguments(arguments, nodes, names[0], environment["SLURM_JOB_ID"])


def sbatch_text(arguments: argparse.Namespace, variables: Mapping[str, str]) -> str:
    """Return the content of an sbatch file whose job runs the script on --nodes hosts.

    Raises:
        ValueError: --nodes is missing, or is a range.
    """
    if arguments.nodes is None:
        raise ValueError("--sbatch needs --nodes N, the number of hosts.")
    nodes = _single_count(arguments.nodes)
    first, job = "${head}", "${SLURM_JOB_ID}"
    command = shlex.join(_slurm_arguments(arguments, nodes, first, job))
    for word in (f"{first}:{arguments.port or PORT}", job):
        command = command.replace(shlex.quote(word), f'"{word}"')  # the job's shell expands it
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={Path(arguments.script).stem}",
        f"#SBATCH --nodes={nodes}",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --exclusive",
        "#SBATCH --requeue",
        f"#SBATCH --chdir={shlex.quote(os.getcwd())}",
        "# Add what your cluster asks for, such as --partition, --time and --gpus-per-node.",
        "",
        *exports,
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        command,
    ]
    return "\n".join(lines) + "\n"


def _write_sbatch(arguments: argparse.Namespace, text: str) -> int:
    if arguments.dry_run:
        print(text, end="")
        return 0
    try:
        with arguments.sbatch.open("x") as file:
            file.write(text)
    except OSError as error:
        raise ValueError(f"--sbatch: cannot write {arguments.sbatch} ({error.strerror}); use another file.") from None
    print(f"Submit it by: sbatch {shlex.quote(str(arguments.sbatch))}")
    return 0
