"""The hosts of `fused-tp launch`: the file that lists them, and commands that run on all until one fails."""

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
LATER = 10.0  # seconds after which a connection is cut, whose host has had its time to kill ranks


@dataclass(frozen=True)
class Host:
    """One line of a hostfile: its name, and how many ranks fit on it."""

    name: str
    slots: int


def read_hostfile(path: Path) -> list[Host]:
    """The hosts of a file with lines `name slots=N`; `#` begins a comment.

    Raises:
        ValueError: a line says something else, a host comes twice, or there is none.
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
    """One host's launch_node, at the other end of a connection; it ends when its stdin does."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name, self.answers = name, False
        # A session of its own: Ctrl-C would end ssh, and with it the way to tell the host.
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
        """None while it runs; once it does not, all it said has been printed."""
        code = self.process.poll()
        if code is not None:
            self._reader.join(1)  # a process that the host has left behind may hold the pipe
        return code

    def send(self, number: signal.Signals) -> None:
        """Raise a signal there."""
        with contextlib.suppress(OSError, ValueError):  # it has ended, or been told to
            assert self.process.stdin is not None
            self.process.stdin.write(f"{number.name}\n")
            self.process.stdin.flush()

    def end(self) -> None:
        """Have it end its ranks."""
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

    A host that does not answer, or whose connection or torchrun is ended from outside, is lost. Others go on where
    `minimum` are left; not without the first, where they meet.

    Args:
        names: of the hosts.
        commands: for each host the command that reaches it; what runs there prints ANSWER first, and ends with stdin.
        minimum: how many hosts must be left.
        connect_timeout: seconds until a host must have answered.
        grace: seconds that ranks have to end after a signal.

    Returns:
        0: done; 1: hosts are lost; 2: nothing could be started; 128 + n: signal n ended it; else the exit code of the
        host that failed first.
    """
    signals: list[signal.Signals] = []
    with _collected(signals):
        began, end_at, code = time.monotonic(), float("inf"), 0
        try:
            nodes = [Node(name, command) for name, command in zip(names, commands, strict=True)]
        except OSError as error:  # those that have started end with this process, which holds their stdin
            print(f"fused-tp launch: {commands[0][0]} cannot be run ({error.strerror}); see --ssh.", file=sys.stderr)
            return 2
        running, left = list(nodes), len(nodes)
        while running:
            time.sleep(0.05)  # nothing waits for ends of processes, signals and deadlines at once
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
                if found == 0 or code != 0:  # done; or it ends because all do
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
    """Appends SIGINT and SIGTERM to `signals`."""
    before = {
        number: signal.signal(number, lambda number, _: signals.append(signal.Signals(number)))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
