"""The results format: JSON lines, one for each contestant of each case, complete enough to stand alone."""

from __future__ import annotations

import contextlib
import json
import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fused_tp.cli import cpu_name

from .case import OURS, Case, Quartiles, slowest
from .ranks import cores
from .runner import Times

SCHEMA = 1
_PACKAGES = ("fused-tp", "torch", "deepspeed", "megatron-core")


@dataclass(frozen=True)
class Machine:
    """Where a figure was measured."""

    cpu: str
    isa: str
    cores: int
    gpu: str = ""  # empty where none took part


def this_machine() -> Machine:
    """The processor, torch's vector ISA, usable cores."""
    return Machine(cpu=cpu_name(), isa=torch.backends.cpu.get_cpu_capability(), cores=len(cores()))


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that take part, as far as installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def now() -> str:
    """ISO 8601, UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Comparison:
    """How fused_tp compares with this contestant. `bar` is what it must reach, `aim` what it wants to."""

    measure: str  # a key of case.MEASURES
    value: Quartiles
    bar: float | None
    aim: float | None


@dataclass(frozen=True)
class Record:
    """One contestant of one case. `ms` is the time of one call in milliseconds, of the slowest rank."""

    case: str
    contestant: str
    ms: Quartiles
    rounds: int
    calls: int  # of one round, timed together where one is too short for the clock
    comparison: Comparison | None  # None for fused_tp itself
    world_size: int
    note: str
    machine: Machine
    versions: dict[str, str]
    date: str

    def to_json(self) -> str:
        """One line."""
        return json.dumps({"schema": SCHEMA, **_rounded(asdict(self))})

    @classmethod
    def from_json(cls, line: str) -> Record:
        """The record of a line.

        Raises:
            ValueError: it is not one, or of another schema; says what is wrong.
        """
        try:
            fields = json.loads(line)
            schema = fields.pop("schema")
            if schema != SCHEMA:
                raise ValueError(f"schema {schema} is not {SCHEMA}, which this version reads")
            compared = fields.pop("comparison")
            comparison = compared and Comparison(**{**compared, "value": Quartiles(**compared["value"])})
            ms, machine = Quartiles(**fields.pop("ms")), Machine(**fields.pop("machine"))
            return cls(ms=ms, machine=machine, comparison=comparison, **fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"This line is not a benchmark record ({error}): {line[:120]}") from error


def _rounded(value: Any) -> Any:
    """Six significant digits: no clock gives more, and files are read by people."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value


def records_of(
    case: Case, times: Sequence[Times], world_size: int, machine: Machine, found: Mapping[str, str]
) -> list[Record]:
    """The records of a case, from what each rank measured; each is compared with fused_tp if that has run."""
    seconds = {name: slowest([t.seconds[name] for t in times]) for name in times[0].seconds}

    def record(name: str, taken: Sequence[float]) -> Record:
        rival = case.rivals.get(name)
        comparison = None
        if rival is not None and OURS in seconds:
            value = rival.measure.of(seconds[OURS], taken, world_size)
            comparison = Comparison(rival.measure.name, value, rival.bar, rival.aim)
        ms, note = Quartiles.of([1e3 * second for second in taken]), times[0].notes[name]
        if machine.gpu:
            note = "; ".join(filter(None, (case.rate(ms.median), note)))
        return Record(
            case=case.name,
            contestant=name,
            ms=ms,
            rounds=len(taken),
            calls=times[0].calls[name],
            comparison=comparison,
            world_size=world_size,
            note=note,
            machine=machine,
            versions=dict(found),
            date=now(),
        )

    return [record(name, taken) for name, taken in seconds.items()]


def read(path: Path) -> list[Record]:
    """The records of a file, in order.

    Raises:
        ValueError: a line is not a record; names file and line.
    """
    records = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.strip():
            try:
                records.append(Record.from_json(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    return records


def merge(path: Path, new: Sequence[Record]) -> list[Record]:
    """All records of the file, with `new` in place of older ones of the same cases on the same machine."""
    measured = {(record.case, record.machine) for record in new}
    old = read(path) if path.exists() else []
    records = [record for record in old if (record.case, record.machine) not in measured] + list(new)
    write_whole(path, "".join(f"{record.to_json()}\n" for record in records))
    return records


def write_whole(path: Path, text: str) -> None:
    """Write a file as a whole or not at all, so that an interrupted run leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A folder of this writer's own; a file that tempfile makes could be read by its owner only.
    with tempfile.TemporaryDirectory(dir=path.parent) as own:
        part = Path(own, path.name)
        part.write_text(text)
        part.replace(path)
