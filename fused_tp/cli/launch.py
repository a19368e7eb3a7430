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
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.numa.binding import AffinityMode

from fused_tp.cli import at_least, launch_node, positive_number

LAUNCH_NODE = [sys.executable, "-m", "fused_tp.cli.launch_node"]
CORES = "cores"
PORT = 29400  # torchrun's default
CONNECT_SECONDS = 30.0
SHUTDOWN_SECONDS = 30.0  # torchrun's default
EXTRA_SECONDS = 10.0  # time beyond a host's shutdown time after which its connection is killed
ANSWER = "fused-tp launch: this host answers"  # line that a host prints before it starts its ranks
SSH = "ssh -o BatchMode=yes -o ConnectTimeout={timeout}"
# Prefixes of the variables to export, since ssh does not pass them on.
EXPORTED_PREFIXES = ("FUSED_TP_", "TORCH_", "NCCL_", "GLOO_", "OMP_", "PYTHONPATH")
HOST_VARIABLE = "FUSED_TP_HOST"  # not exported: it differs between hosts
# --cpu-bind=none: SLURM may otherwise bind the task to one processor, which all ranks of the host would share.
SRUN = ["srun", "--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=1"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `fused-tp launch`."""
    placement = parser.add_argument_group("where (default: on this machine, or in the SLURM allocation around it)")
    placement.add_argument(
        "--hostfile",
        type=Path,
        metavar="FILE",
        help="file with a line such as `node1 slots=8` for each host; ssh must reach the hosts",
    )
    placement.add_argument("--nodes", type=_parse_nodes, metavar="N", help="number of hosts, or MIN:MAX (default: all)")
    placement.add_argument(
        "--per-node", type=at_least(1), metavar="P", help="ranks of a host (default: its slots, or GPUs)"
    )
    placement.add_argument("--sbatch", type=Path, metavar="FILE", help="write a file for sbatch, and run nothing")
    ranks = parser.add_argument_group("ranks")
    ranks.add_argument(
        "--max-restarts", type=at_least(0), default=3, metavar="R", help="number of restarts of all ranks (default 3)"
    )
    ranks.add_argument(
        "--bind",
        choices=[CORES, *(mode.value for mode in AffinityMode)],
        help="cores: a share of the host's processors for each rank; others: torchrun's --numa-binding, by its GPU",
    )
    ranks.add_argument("--grace", type=at_least(0), metavar="S", help="seconds from a signal to SIGKILL (default 30)")
    ranks.add_argument(
        "--log-dir", type=Path, metavar="DIR", help="folder for a log file of each rank (default: temporary)"
    )
    ranks.add_argument(
        "--local-ranks-filter",
        type=_parse_local_ranks,
        metavar="0,1",
        help="ranks whose logs are printed (default: all)",
    )
    ranks.add_argument(
        "--env", action="append", default=[], type=_parse_variable, metavar="NAME[=VALUE]", help="variables to set"
    )
    hosts = parser.add_argument_group("hosts")
    hosts.add_argument("--port", type=int, help=f"port of the first host for the rendezvous (default {PORT})")
    hosts.add_argument(
        "--ssh",
        metavar="COMMAND",
        help=f"prefix for a host and its command, or a template with {{host}} (default {SSH})",
    )
    hosts.add_argument(
        "--connect-timeout", type=positive_number, metavar="S", help="seconds for a host to answer (default 30)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands, one for each host")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module, as for python -m")
    parser.add_argument("script", help="script that each rank runs; all following arguments are passed to it")
    parser.add_argument("script_arguments", nargs=argparse.REMAINDER, metavar="...")


def main(arguments: argparse.Namespace) -> int:
    """Run the script on all hosts; exit code 2: invalid arguments, others: see `launch_node.main` and `run_hosts`."""
    variables = dict(arguments.env)
    hosts: dict[str, int] = {}
    try:
        _check_options(arguments)
        if arguments.sbatch is not None:
            return _write_sbatch(arguments, sbatch_text(arguments, variables))
        if arguments.hostfile is not None:
            hosts, minimum = choose_hosts(arguments)
            commands = host_commands(arguments, hosts, minimum, {**_exported_variables(os.environ), **variables})
        elif _is_in_allocation(os.environ):
            commands = [srun_command(arguments, os.environ)]
        else:
            commands = [local_command(arguments)]
    except ValueError as error:
        print(f"fused-tp launch: {error}", file=sys.stderr)
        return 2
    if arguments.dry_run:
        prefix = ["env", *_format_assignments(variables)] if variables and not hosts else []
        print("\n".join(shlex.join([*prefix, *command]) for command in commands))
        return 0
    if hosts:
        return run_hosts(list(hosts), commands, minimum, arguments.connect_timeout or CONNECT_SECONDS, arguments.grace)
    os.environ.update(variables)
    if commands[0][0] == "srun":
        os.execvp("srun", commands[0])  # exec, so that srun receives the signals sent to this process
    return launch_node.main(commands[0][len(LAUNCH_NODE) :])


def _format_assignments(variables: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in variables.items()]


def _parse_nodes(text: str) -> tuple[int, int]:
    minimum_text, _, maximum_text = text.partition(":")
    try:
        minimum, maximum = int(minimum_text), int(maximum_text or minimum_text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number or MIN:MAX, got {text!r}") from None
    if not 1 <= minimum <= maximum:
        raise argparse.ArgumentTypeError(f"must satisfy 1 <= MIN <= MAX, got {text!r}")
    return minimum, maximum


def _parse_local_ranks(text: str) -> str:
    if not all(rank.isdecimal() for rank in text.split(",")):
        raise argparse.ArgumentTypeError(f"must be rank numbers such as 0,1, got {text!r}")
    return text


def _parse_variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not (equals or name in os.environ):
        raise argparse.ArgumentTypeError(
            f"must be NAME=VALUE, or the NAME of a variable that is set here, got {text!r}"
        )
    return name, value if equals else os.environ[name]


def _check_options(arguments: argparse.Namespace) -> None:
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


def node_arguments(arguments: argparse.Namespace, num_ranks: int | str, rendezvous: Sequence[str]) -> list[str]:
    """Return launch_node's arguments for `num_ranks` ranks on one host, with options `rendezvous` to find others."""
    options = [
        *rendezvous,
        "--nproc-per-node",
        str(num_ranks),
        "--max-restarts",
        str(arguments.max_restarts),
        "--tee",
        "3",
    ]
    binds_cores = arguments.bind == CORES
    optional_values = {
        "--numa-binding": None if binds_cores else arguments.bind,
        "--shutdown-timeout": arguments.grace,
        "--log-dir": arguments.log_dir,
        "--local-ranks-filter": arguments.local_ranks_filter,
    }
    options += [word for name, value in optional_values.items() if value is not None for word in (name, str(value))]
    options += ["--bind-cores"] * binds_cores + ["-m"] * arguments.module
    return [*options, arguments.script, *arguments.script_arguments]


def _rendezvous_options(arguments: argparse.Namespace, nodes: str, first_host: str, job_id: str) -> list[str]:
    endpoint = f"{first_host}:{arguments.port or PORT}"
    return ["--nnodes", nodes, "--rdzv-backend", "c10d", "--rdzv-id", job_id, "--rdzv-endpoint", endpoint]


def local_command(arguments: argparse.Namespace) -> list[str]:
    """Return the command that starts ranks on this machine.

    Raises:
        ValueError: the options request other hosts, or the number of ranks is unknown.
    """
    if arguments.nodes not in (None, (1, 1)):
        raise ValueError("--nodes above 1 needs --hostfile, or a SLURM allocation. Pass --hostfile, or omit --nodes.")
    if arguments.port is not None:
        raise ValueError("--port needs --hostfile or SLURM: one machine has no rendezvous port. Omit it.")
    num_ranks = arguments.per_node or torch.cuda.device_count()
    if num_ranks == 0:
        raise ValueError("This machine has no GPUs, so the number of ranks is unknown; pass --per-node P.")
    # localhost, because the machine's name may not resolve.
    return [*LAUNCH_NODE, *node_arguments(arguments, num_ranks, ["--standalone", "--local-addr", "localhost"])]


# -- hosts that ssh reaches -------------------------------------------------------------------------------------------


def read_hostfile(path: Path) -> dict[str, int]:
    """Return the number of slots of each host, in the order of a file with lines `name slots=N`; `#` begins a comment.

    Raises:
        ValueError: a line has another form, a host appears twice, or there is none.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"The hostfile {path} cannot be read ({error}).") from None
    hosts: dict[str, int] = {}
    for line_number, line in enumerate(lines, 1):
        match line.partition("#")[0].split():
            case []:
                continue
            case [name, slots] if slots.startswith("slots=") and slots[6:].isdecimal() and not name.startswith("-"):
                if name in hosts:
                    raise ValueError(f"Line {line_number} of {path} repeats {name}; put all its slots on one line.")
                hosts[name] = int(slots[6:])
            case _:
                raise ValueError(f"Line {line_number} of {path} is {line.strip()!r}; write it like `node1 slots=8`.")
        if hosts[name] == 0:
            raise ValueError(
                f"Line {line_number} of {path} has slots=0 for {name}; remove the line, or set slots >= 1."
            )
    if not hosts:
        raise ValueError(f"The hostfile {path} names no host; write lines like `node1 slots=8`.")
    return hosts


def choose_hosts(arguments: argparse.Namespace) -> tuple[dict[str, int], int]:
    """Return the number of ranks on each of the first --nodes hosts of the file, and the minimum number of hosts.

    Raises:
        ValueError: the file lists fewer hosts, or one of them has fewer slots.
    """
    slots = read_hostfile(arguments.hostfile)
    minimum, maximum = arguments.nodes or (len(slots), len(slots))
    if maximum > len(slots):
        raise ValueError(f"--nodes={maximum} exceeds the {len(slots)} hosts of {arguments.hostfile}; lower --nodes.")
    slots_by_host = dict(list(slots.items())[:maximum])
    for name, num_slots in slots_by_host.items():
        if num_slots < (arguments.per_node or 0):
            raise ValueError(f"--per-node={arguments.per_node} exceeds the {num_slots} slots of {name}.")
    return {name: arguments.per_node or num_slots for name, num_slots in slots_by_host.items()}, minimum


def host_commands(
    arguments: argparse.Namespace, num_ranks_by_host: Mapping[str, int], minimum: int, variables: Mapping[str, str]
) -> list[list[str]]:
    """Return a command for each host, which connects to it and starts its ranks in this folder with `variables`."""
    num_hosts = len(num_ranks_by_host)
    node_range = str(num_hosts) if minimum == num_hosts else f"{minimum}:{num_hosts}"
    first_host, job_id = next(iter(num_ranks_by_host)), uuid.uuid4().hex
    ssh = arguments.ssh or SSH.format(timeout=max(1, round(arguments.connect_timeout or CONNECT_SECONDS)))
    rendezvous = ["--stop-with-stdin", *_rendezvous_options(arguments, node_range, first_host, job_id)]
    commands = []
    for host, num_ranks in num_ranks_by_host.items():
        # Set is_host explicitly: torchrun would compare the name in the hostfile with the machine's name, and they may
        # differ.
        options = [*rendezvous, "--rdzv-conf", f"is_host={int(host == first_host)}", "--local-addr", host]
        start_command = [
            "env",
            *_format_assignments(variables),
            *LAUNCH_NODE,
            *node_arguments(arguments, num_ranks, options),
        ]
        script = f"cd {shlex.quote(os.getcwd())} && echo {shlex.quote(ANSWER)} && exec {shlex.join(start_command)}"
        connect_command = [word.replace("{host}", host) for word in shlex.split(ssh)]
        commands.append([*connect_command, *([] if "{host}" in ssh else [host]), script])
    return commands


def _exported_variables(environment: Mapping[str, str]) -> dict[str, str]:
    names = (name for name in environment if name.startswith(EXPORTED_PREFIXES) and name != HOST_VARIABLE)
    return {name: environment[name] for name in sorted(names)}


class HostConnection:
    """Connection to the launch_node process of one host, which exits when its stdin is closed."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name, self.has_answered = name, False
        # A separate session: Ctrl-C would otherwise kill ssh, and this process could no longer signal the host.
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, errors="replace", start_new_session=True
        )
        self._reader = threading.Thread(target=self._print_output, daemon=True)
        self._reader.start()

    def _print_output(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if self.has_answered or line.strip() != ANSWER:
                sys.stdout.write(line)
                sys.stdout.flush()
            else:
                self.has_answered = True

    def exit_code(self) -> int | None:
        """Return the exit code of the connection after printing all its output; None while it runs."""
        code = self.process.poll()
        if code is not None:
            self._reader.join(1)  # bounded, as a process left behind by the host may keep the pipe open
        return code

    def send_signal(self, signum: signal.Signals | None) -> None:
        """Raise a signal in the host's launch_node; None: close its stdin, so that it ends its ranks."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # the connection has ended, or stdin is closed already
            if signum is None:
                self.process.stdin.close()
            else:
                self.process.stdin.write(f"{signum.name}\n")
                self.process.stdin.flush()


def run_hosts(
    names: Sequence[str],
    commands: Sequence[Sequence[str]],
    minimum: int,
    connect_timeout: float,
    grace: float | None,
) -> int:
    """Run a command for each host until all are done, or stop all after one has failed; return the exit code.

    A host counts as lost if it does not answer, or if a signal kills its connection or its torchrun. The remaining
    hosts continue if there are at least `minimum` and the lost host is not the first, which serves the rendezvous.

    Args:
        names: names of the hosts.
        commands: commands that connect to each host; the program there first prints ANSWER, and exits when its stdin is
            closed.
        minimum: minimum number of hosts that must remain.
        connect_timeout: seconds within which a host must answer.
        grace: seconds that ranks have to end after a signal.

    Returns:
        0: done; 1: a host was lost; 2: nothing could be started; 128 + n: stopped by signal n; otherwise the exit code
        of the host that failed first.
    """
    signals: list[signal.Signals] = []
    with _collect_signals(signals):
        answer_deadline, kill_deadline, final_code = time.monotonic() + connect_timeout, float("inf"), 0
        try:
            hosts = [HostConnection(name, command) for name, command in zip(names, commands, strict=True)]
        except OSError as error:  # hosts already started exit with this process, which closes their stdin
            print(f"fused-tp launch: {commands[0][0]} cannot be run ({error.strerror}); see --ssh.", file=sys.stderr)
            return 2
        running_hosts, num_remaining_hosts = list(hosts), len(hosts)
        while running_hosts:
            time.sleep(0.05)  # poll: no system call waits for process exits, signals and deadlines together
            while signals:
                signum = signals.pop(0)
                final_code, kill_deadline = final_code or 128 + signum, min(kill_deadline, _kill_deadline(grace))
                for host in running_hosts:
                    host.send_signal(signum)
            for host in list(running_hosts):
                is_silent = not host.has_answered and time.monotonic() > answer_deadline
                if is_silent or time.monotonic() > kill_deadline:
                    host.process.kill()
                    host.process.wait()
                exit_code = host.exit_code()
                if exit_code is None:
                    continue
                running_hosts.remove(host)
                if exit_code == 0 or final_code != 0:  # the host is done, or was stopped with all others
                    continue
                num_remaining_hosts -= 1
                is_lost = not host.has_answered or exit_code >= 128 or exit_code < 0
                if is_silent:
                    reason = f"{host.name} did not answer within {connect_timeout:g} seconds"
                elif not host.has_answered:
                    reason = f"{host.name} cannot be reached, or has no folder {os.getcwd()} (exit code {exit_code})"
                else:
                    reason = f"{host.name} was {'lost' if is_lost else 'the first to fail'} (exit code {exit_code})"
                if is_lost and num_remaining_hosts >= minimum and host is not hosts[0]:
                    outcome = f"going on with {num_remaining_hosts} of {len(hosts)} hosts"
                else:
                    outcome, final_code = "all hosts end", 1 if is_lost else exit_code
                    kill_deadline = min(kill_deadline, _kill_deadline(grace))
                    for other_host in running_hosts:
                        other_host.send_signal(None)
                print(f"fused-tp launch: {reason}; {outcome}.", file=sys.stderr)
        return final_code


def _kill_deadline(grace: float | None) -> float:
    return time.monotonic() + (SHUTDOWN_SECONDS if grace is None else grace) + EXTRA_SECONDS


@contextlib.contextmanager
def _collect_signals(signals: list[signal.Signals]) -> Iterator[None]:
    """Append each SIGINT and SIGTERM that arrives to `signals`, instead of handling it."""
    previous_handlers = {
        signum: signal.signal(signum, lambda signum, _: signals.append(signal.Signals(signum)))
        for signum in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for signum, handler in previous_handlers.items():
            signal.signal(signum, handler)


# -- SLURM ------------------------------------------------------------------------------------------------------------


def _build_srun_command(arguments: argparse.Namespace, num_nodes: int, first_host: str, job_id: str) -> list[str]:
    rendezvous = _rendezvous_options(arguments, str(num_nodes), first_host, job_id)
    ranks_per_node = arguments.per_node or "gpu"
    return [*SRUN, f"--nodes={num_nodes}", *LAUNCH_NODE, *node_arguments(arguments, ranks_per_node, rendezvous)]


def _require_fixed_count(nodes: tuple[int, int]) -> int:
    if nodes[0] != nodes[1]:
        raise ValueError(
            "--nodes MIN:MAX is not supported under SLURM, which ends a job that loses a host. Pass --nodes N, and use "
            "sbatch --requeue to restart the job."
        )
    return nodes[1]


def _is_in_allocation(environment: Mapping[str, str]) -> bool:
    # Within a job step (SLURM_STEP_ID is set), srun has already started this process on every host.
    return "SLURM_JOB_NODELIST" in environment and "SLURM_STEP_ID" not in environment


def srun_command(arguments: argparse.Namespace, environment: Mapping[str, str]) -> list[str]:
    """Return the command that starts ranks in the SLURM allocation that `environment` describes.

    Raises:
        ValueError: the allocation has fewer hosts than requested, or scontrol cannot name them.
    """
    num_hosts = int(environment["SLURM_JOB_NUM_NODES"])
    num_nodes = _require_fixed_count(arguments.nodes or (num_hosts, num_hosts))
    if num_nodes > num_hosts:
        raise ValueError(
            f"--nodes={num_nodes} exceeds the {num_hosts} hosts of the SLURM allocation. Lower --nodes or "
            "allocate more hosts."
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
    return _build_srun_command(arguments, num_nodes, names[0], environment["SLURM_JOB_ID"])


def sbatch_text(arguments: argparse.Namespace, variables: Mapping[str, str]) -> str:
    """Return the content of an sbatch file whose job runs the script on --nodes hosts.

    Raises:
        ValueError: --nodes is missing, or is a range.
    """
    if arguments.nodes is None:
        raise ValueError("--sbatch needs --nodes N, the number of hosts.")
    num_nodes = _require_fixed_count(arguments.nodes)
    first_host, job_id = "${head}", "${SLURM_JOB_ID}"
    command = shlex.join(_build_srun_command(arguments, num_nodes, first_host, job_id))
    for word in (f"{first_host}:{arguments.port or PORT}", job_id):
        command = command.replace(shlex.quote(word), f'"{word}"')  # the job's shell expands it
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={Path(arguments.script).stem}",
        f"#SBATCH --nodes={num_nodes}",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --exclusive",
        "#SBATCH --requeue",
        f"#SBATCH --chdir={shlex.quote(os.getcwd())}",
        "# Add the options that your cluster requires, such as --partition, --time and --gpus-per-node.",
        "",
        *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
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
