"""Steps that run under tools of the CUDA toolkit: performance counters by ncu, memory checks by compute-sanitizer."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

# If the output of a tool contains one of these, the tool does not work on this machine. The kernels may be right.
CANNOT = (
    "Device not supported",
    "ERR_NVGPUCTRPERM",
    "Failed to initialize the profiler",
    "LibraryNotLoaded",
    "No supported GPUs",
)
# Every GPU supports these sections. ncu fails for a metric that a GPU lacks; it then runs again with sections only.
SECTIONS = ("--section", "SpeedOfLight", "--section", "LaunchStats")
METRICS = (
    "--metrics",
    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active,sm__inst_executed_pipe_tensor_op_gmma.sum,"
    "dram__bytes.sum",
)
KERNELS = "regex:^(all_gather_gemm|forward|queries|keys)_kernel"
COUNTED = "^(alone/bf16/4096|attention/)"  # cases of benchmarks.gpu
LAUNCHES = 16
KEPT = ("Duration", "Compute (SM) Throughput", "DRAM Throughput", "Memory Throughput", "Registers Per Thread")


def run_watched(command: Sequence[str], environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run a program and forward its output; return (exit code, line that says why it does not work here, or "")."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=None if environment is None else {**os.environ, **environment},
    )
    assert process.stdout is not None
    reason = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        if not reason and any(text in line for text in CANNOT):
            reason = line.strip("= \n")
    return process.wait(), reason


def counters(ncu: str) -> tuple[list[dict[str, str]], str]:
    """Count the kernels of matmul and attention at the timed sizes with ncu.

    Return (counters by launch, reason if there are none).
    """
    with tempfile.TemporaryDirectory(prefix="fused_tp_ncu_") as folder:
        log = Path(folder, "ncu.csv")
        checks = [sys.executable, "-m", "fused_tp.benchmarks.gpu", "--check", "--quick", "--only", COUNTED]
        for asked in ((*SECTIONS, *METRICS), SECTIONS):
            counted = [ncu, "--clock-control", "none", "--csv", "--log-file", str(log), *asked]
            _, reason = run_watched([*counted, "-k", KERNELS, "-c", str(LAUNCHES), *checks])
            lines = log.read_text(errors="replace").splitlines() if log.exists() else []
            said = [line for line in lines if line.startswith("==")]
            print(*said, sep="\n", flush=True)
            reason = reason or next((line for line in said if any(text in line for text in CANNOT)), "")
            if (found := launches_of(lines)) or reason:
                return found, reason
    return [], ""


def launches_of(lines: Iterable[str]) -> list[dict[str, str]]:
    """Parse ncu's CSV, which has one line per counter and launch; return the counters by launch."""
    launches: dict[str, dict[str, str]] = {}
    for row in csv.DictReader(line for line in lines if line.startswith('"')):
        name = row.get("Metric Name") or ""
        if "__" in name or name in KEPT:
            launch = launches.setdefault(row["ID"], {"kernel": row["Kernel Name"].partition("(")[0]})
            launch[name] = f"{row['Metric Value']} {row['Metric Unit']}".strip()
    return list(launches.values())
