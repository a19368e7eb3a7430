"""Hosts of `fused-tp launch`: read the hostfile, and run commands on all hosts until one fails."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ANSWER = "fused-tp launch: this host answers"  # line that a host prints before it starts its ranks
SHUTDOWN_SECONDS = 30.0  # torchrun's default
LATER = 10.0  # seconds to wait for a host beyond its shutdown time, before its connection is killed


@dataclass(frozen=True)
class Host:
    """A line of a hostfile: name of a host, and the number of ranks that fit on it."""

    name: str
    slots: int


def read_hostfile(path: Path) -> list[Host]:
    """Read the hosts of a file with lines `name slots=N`; `#` begins a comment.

    Raises:
        ValueError: a line has another form, a host appears twice, or there is none.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"The hostfile {path} cannot be read ({error}).") from None
    hosts: dict[str, Host] = {}
    for number, line in enumerate(lines, 1):
        match line.partition("#")[0].split():
            case []:
                continue
            case [name, slots] if slots.startswith("slots=") and slots[6:].isdecimal() and not name.startswith("-"):
                host = Host(name, int(slots[6:]))
            case _:
                raise ValueError(f"Line {number} of {path} is {line.strip()!r}; write it like `node1 slots=8`.")
        if host.slots == 0:
            raise ValueError(f"Line {number} of {path} has slots=0 for {name}; remove the line, or set slots >= 1.")
        if name in hosts:
            raise ValueError(f"Line {number} of {path} repeats {name}; put all its slots on one line.")
        hosts[name] = host
    if not hosts:
        raise ValueError(f"The hostfile {path} names no host; write lines like `node1 slots=8`.")
    return list(hosts.values())


class Node:
    """Connection to the launch_node process of one host, which exits when its stdin is closed."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name, self.answers = name, False
        # A separate session: Ctrl-C would otherwise kill ssh, and this process could no longer signal the host.
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, errors="replace", start_new_session=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if self.answers or line.strip() != ANSWER:
                sys.stdout.write(line)
                sys.stdout.flush()
            else:
                self.answers = True

    def exit_code(self) -> int | None:
        """Return the exit code of the connection after printing all its output; None while it runs."""
        code = self.process.poll()
        if code is not None:
            self._reader.join(1)  # bounded, as a process left behind by the host may keep the pipe open
        return code

    def send(self, number: signal.Signals) -> None:
        """Raise a signal in the host's launch_node."""
        with contextlib.suppress(OSError, ValueError):  # the connection has ended, or `end` has closed stdin
            assert self.process.stdin is not None
            self.process.stdin.write(f"{number.name}\n")
            self.process.stdin.flush()

    def end(self) -> None:
        """Close stdin, so that the host's launch_node ends its ranks."""
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()


def run(
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
    with _signals_collected(signals):
        began, end_at, code = time.monotonic(), float("inf"), 0
        try:
            nodes = [Node(name, command) for name, command in zip(names, commands, strict=True)]
        except OSError as error:  # hosts already started exit with this process, which closes their stdin
            print(f"fused-tp launch: {commands[0][0]} cannot be run ({error.strerror}); see --ssh.", file=sys.stderr)
            return 2
        running, left = list(nodes), len(nodes)
        while running:
            time.sleep(0.05)  # poll: no system call waits for process exits, signals and deadlines together
            while signals:
                number = signals.pop(0)
                code = code or 128 + number
                end_at = min(end_at, _deadline(grace))
                for node in running:
                    node.send(number)
            for node in list(running):
                silent = not node.answers and time.monotonic() > began + connect_timeout
                if silent or time.monotonic() > end_at:
                    node.process.kill()
                    node.process.wait()
                found = node.exit_code()
                if found is None:
                    continue
                running.remove(node)
                if found == 0 or code != 0:  # the host is done, or was stopped with all others
                    continue
                left -= 1
                lost = not node.answers or found >= 128 or found < 0
                if silent:
                    why = f"{node.name} did not answer within {connect_timeout:g} seconds"
                elif not node.answers:
                    why = f"{node.name} cannot be reached, or has no folder {os.getcwd()} (exit code {found})"
                else:
                    why = f"{node.name} was {'lost' if lost else 'the first to fail'} (exit code {found})"
                if lost and left >= minimum and node is not nodes[0]:
                    print(f"fused-tp launch: {why}; going on with {left} of {len(nodes)} hosts.", file=sys.stderr)
                    continue
                print(f"fused-tp launch: {why}; all hosts end.", file=sys.stderr)
                code, end_at = 1 if lost else found, min(end_at, _deadline(grace))
                for other in running:
                    other.end()
        return code


def _deadline(grace: float | None) -> float:
    return time.monotonic() + (SHUTDOWN_SECONDS if grace is None else grace) + LATER


@contextlib.contextmanager
def _signals_collected(signals: list[signal.Signals]) -> Iterator[None]:
    """Append each SIGINT and SIGTERM that arrives to `signals`, instead of handling it."""
    before = {
        number: signal.signal(number, lambda number, _: signals.append(signal.Signals(number)))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
