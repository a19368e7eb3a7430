"""What a GPU run says: records with the GPU, its driver and all versions, and a table in markdown."""

from __future__ import annotations

import itertools
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from .case import Case
from .gpu_attention import TOKENS, WIDTH
from .machine import this_machine, versions
from .race import Times
from .ratios import MEASURES
from .records import Machine, Record
from .suite import records_of


def gpu_records(case: Case, times: Times, machine: Machine, found: Mapping[str, str]) -> list[Record]:
    """The records of a case; notes begin with the rate of what was multiplied or moved, by all ranks together."""
    world_size = int(case.parameters.get("world_size", 1))
    records = []
    for record in records_of(case, [times], world_size):
        rate = _rate(case.parameters, world_size, record.ms.median)
        note = f"{rate}; {record.note}" if record.note else rate
        records.append(replace(record, machine=machine, versions=dict(found), note=note))
    return records


def _rate(p: Mapping[str, Any], world_size: int, ms: float) -> str:
    if "head_dim" in p:
        return f"{_attention_flops(p) / ms / 1e9:.0f} TFLOP/s"
    if "traffic" in p:
        return f"{p['traffic'] / ms / 1e6:.0f} GB/s"
    if "m" in p:
        return f"{2.0 * p['m'] * p['n'] * p['k'] * world_size / ms / 1e9:.0f} TFLOP/s"
    return f"{1e3 * ms:.2f} us"


def _attention_flops(p: Mapping[str, Any]) -> float:
    """Of its matmuls: two forward, five backward, half of each where the mask is causal."""
    rows = max(TOKENS, p["seq"]) if "causal" in p else p["seq"]
    pairs = rows * p["seq"] * (0.5 if p.get("causal", True) else 1.0)
    return (5 if p.get("backward") else 2) * 2.0 * pairs * WIDTH


def gpu_machine(device: torch.device) -> Machine:
    """The GPU and the processor that launches."""
    properties = torch.cuda.get_device_properties(device)
    l2 = getattr(properties, "L2_cache_size", 0) >> 20
    memory = properties.total_memory >> 30
    gpu = (
        f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.multi_processor_count} SMs, "
        f"{l2} MiB of L2, {memory} GiB"
    )
    return replace(this_machine(), gpu=gpu)


def gpu_versions(device: torch.device) -> dict[str, str]:
    """Versions of all that takes part, the commit, and the GPU's clocks now, as far as they can be had."""
    import triton

    found = {**versions(), "triton": triton.__version__, "cuda": str(torch.version.cuda)}
    found |= _clocks(device.index or 0, int(time.monotonic() // CLOCKS_SECONDS))
    return found | ({"commit": commit} if (commit := _commit()) else {})


@lru_cache(1)
def _clocks(index: int, moment: int) -> dict[str, str]:
    """Once in a moment: short cases take less time than the program that is asked."""
    return nvidia_smi(index)


@cache
def _commit() -> str:
    """Of this checkout, and whether it has changes; '' if it is none."""
    here = ["git", "-C", str(Path(__file__).parent)]
    commit = _run([*here, "rev-parse", "--short", "HEAD"])
    changed = commit and _run([*here, "status", "--porcelain", "--untracked-files=no"])
    return commit + (" and changes" if changed else "")


def nvidia_smi(index: int) -> dict[str, str]:
    """Driver, clocks and power; nothing where the program is not there."""
    wanted = {
        "driver": "driver_version",
        "SM clock": "clocks.sm",
        "highest SM clock": "clocks.max.sm",
        "memory clock": "clocks.mem",
        "power limit": "power.limit",
    }
    line = _run(["nvidia-smi", f"--id={index}", f"--query-gpu={','.join(wanted.values())}", "--format=csv,noheader"])
    values = [value.strip() for value in line.split(",")]
    if len(values) != len(wanted):
        return {}
    return {name: value for name, value in zip(wanted, values, strict=True) if value and "N/A" not in value}


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


CLOCKS = ("SM clock", "memory clock")
CLOCKS_SECONDS = 10.0  # they are read at most so often
HEADER = ("case", "contestant", "ms", "rate", "fused_tp against it", "needs", "met", "note")


def markdown(records: Sequence[Record], skipped: Sequence[str] = (), minutes: float | None = None) -> str:
    """The table, and what it was measured on."""
    lines = ["# Times on a GPU", ""]
    for machine in dict.fromkeys(record.machine for record in records):
        lines.append(f"{machine.gpu or 'no GPU'}; launched by {machine.cpu}, {machine.cores} cores.")
    # Clocks are read after each case.
    steady = [{name: text for name, text in record.versions.items() if name not in CLOCKS} for record in records]
    for found in _distinct(steady):
        lines.append("; ".join(f"{name} {version}" for name, version in found.items()) + ".")
    for name in CLOCKS:
        values = sorted({record.versions[name] for record in records if name in record.versions}, key=_leading_number)
        if values:
            lines.append(f"{name}: {' to '.join(dict.fromkeys((values[0], values[-1])))}.")
    dates = sorted(record.date for record in records)
    if dates:
        took = "" if minutes is None else f", in {minutes:.1f} minutes"
        lines.append(f"From {dates[0]} to {dates[-1]}{took}.")
    lines += [
        "",
        "`time ratio`: time of fused_tp over that of the other; `speedup`: the other's over fused_tp's. Medians of",
        "paired ratios, quartiles in brackets. `microseconds`: fused_tp's own, beside what the other takes. Rates",
        "count the multiplications of all ranks together, or the bytes that they read and write at least.",
        "",
        f"| {' | '.join(HEADER)} |",
        "|---|---|--:|--:|---|---|---|---|",
    ]
    for _, group in itertools.groupby(records, key=lambda record: record.case):
        for number, record in enumerate(group):
            lines.append("| " + " | ".join(_cells(record, number == 0)) + " |")
    if skipped:
        lines += ["", "Not measured:", "", *(f"- {text}" for text in skipped)]
    return "\n".join(lines) + "\n"


def _cells(record: Record, first: bool) -> list[str]:
    rate, _, note = record.note.partition("; ")
    cells = [record.case if first else "", record.contestant, f"{record.ms.median:.4g}", rate]
    compared = record.comparison
    if compared is None:
        return [*cells, "", "", "", note]
    measure, value = MEASURES[compared.measure], compared.value
    sign = "<=" if measure.lower_is_better else ">="
    needs = ", aim ".join(f"{sign} {limit:g}" for limit in (compared.bar, compared.aim) if limit is not None)
    met = ""
    if compared.bar is not None:
        met = "yes" if measure.meets(value.median, compared.bar) else "**no**"
    ratio = f"{compared.measure} {value.median:.3f} [{value.q1:.3f}, {value.q3:.3f}]"
    return [*cells, ratio, needs, met, note]


def _leading_number(text: str) -> float:
    try:
        return float(text.split()[0])
    except (ValueError, IndexError):
        return 0.0


def _distinct(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for item in items:
        if item not in found:
            found.append(item)
    return found
