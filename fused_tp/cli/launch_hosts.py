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

ANSWER = "fused-tp launch: this host answers"  # the line that a host prints before its ranks run
SHUTDOWN_SECONDS = 30.0  # torchrun's own
LATER = 10.0  # seconds beyond the time that a host has to kill its ranks, after which its connection is closed


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
            raise ValueError(f"Line {number} of {path} gives {name} 0 slots; leave the host out, or give it some.")
        if name in hosts:
            raise ValueError(f"Line {number} of {path} names {name} a second time; add its slots up on one line.")
        hosts[name] = host
    if not hosts:
        raise ValueError(f"The hostfile {path} names no host; write lines like `node1 slots=8`.")
    return list(hosts.values())


class Node:
    """Connection to the launch_node of one host; launch_node ends when its stdin is closed."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name, self.answers = name, False
        # ssh runs in a separate session: Ctrl-C would otherwise end it, and this process could not signal the host.
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
        """Exit code of the connection once all its output has been printed; None while it runs."""
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
    """Run a command for each named host until all are done, or end all once one has failed; return the exit code.

    A host counts as lost if it does not answer, or if its connection or torchrun is ended from outside. The others
    continue if at least `minimum` are left and the lost host is not the first, which serves the rendezvous.

    Args:
        names: names of the hosts.
        commands: commands that reach each host; the program there prints ANSWER first, and ends when stdin is closed.
        minimum: number of hosts that must be left.
        connect_timeout: seconds within which a host must answer.
        grace: seconds that ranks have to end after a signal.

    Returns:
        0: done; 1: hosts are lost; 2: nothing could be started; 128 + n: signal n ended the run; else the exit code of
        the host that failed first.
    """
    signals: list[signal.Signals] = []
    with _collected(signals):
        began, end_at, code = time.monotonic(), float("inf"), 0
        try:
            nodes = [Node(name, command) for name, command in zip(names, commands, strict=True)]
        except OSError as error:  # nodes already started end when this process ends, as it holds their stdin
            print(f"fused-tp launch: {commands[0][0]} cannot be run ({error.strerror}); see --ssh.", file=sys.stderr)
            return 2
        running, left = list(nodes), len(nodes)
        while running:
            time.sleep(0.05)  # polls, as no call waits for exits of processes, signals and deadlines together
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
                if found == 0 or code != 0:  # the host is done, or ends because all end
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
def _collected(signals: list[signal.Signals]) -> Iterator[None]:
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
