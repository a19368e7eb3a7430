"""Steps that run under tools of the CUDA toolkit: performance counters by ncu, memory checks by compute-sanitizer."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

# If the output of a tool contains one of these messages, the tool does not work here, whether or not kernels are right.
UNUSABLE_MESSAGES = (
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
COUNTED_KERNELS = "regex:^(all_gather_gemm|forward|queries|keys)_kernel"
COUNTED_CASES = "^(alone/bf16/4096|attention/)"  # cases of benchmarks.gpu
MAX_LAUNCHES = 16
REPORTED_METRICS = (
    "Duration",
    "Compute (SM) Throughput",
    "DRAM Throughput",
    "Memory Throughput",
    "Registers Per Thread",
)


def run_tool(command: Sequence[str], environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run a tool and print its output; return its exit code, and the line that says why it does not work, or ""."""
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
        if not reason and any(text in line for text in UNUSABLE_MESSAGES):
            reason = line.strip("= \n")
    return process.wait(), reason


def measure_counters(ncu: str) -> tuple[list[dict[str, str]], str]:
    """Read performance counters of the matmul and attention kernels at the timed sizes with ncu.

    Return (counters by launch, reason if there are none).
    """
    with tempfile.TemporaryDirectory(prefix="fused_tp_ncu_") as folder:
        csv_path = Path(folder, "ncu.csv")
        benchmark_command = [
            sys.executable,
            "-m",
            "fused_tp.benchmarks.gpu",
            "--check",
            "--quick",
            "--only",
            COUNTED_CASES,
        ]
        for metrics in ((*SECTIONS, *METRICS), SECTIONS):
            ncu_command = [ncu, "--clock-control", "none", "--csv", "--log-file", str(csv_path), *metrics]
            _, reason = run_tool([*ncu_command, "-k", COUNTED_KERNELS, "-c", str(MAX_LAUNCHES), *benchmark_command])
            lines = csv_path.read_text(errors="replace").splitlines() if csv_path.exists() else []
            messages = [line for line in lines if line.startswith("==")]
            print(*messages, sep="\n", flush=True)
            reason = reason or next((line for line in messages if any(text in line for text in UNUSABLE_MESSAGES)), "")
            if (launches := parse_launches(lines)) or reason:
                return launches, reason
    return [], ""


def parse_launches(lines: Iterable[str]) -> list[dict[str, str]]:
    """Parse ncu's CSV, which has one line per counter and launch; return the counters by launch."""
    launches: dict[str, dict[str, str]] = {}
    for row in csv.DictReader(line for line in lines if line.startswith('"')):
        name = row.get("Metric Name") or ""
        if "__" in name or name in REPORTED_METRICS:
            launch = launches.setdefault(row["ID"], {"kernel": row["Kernel Name"].partition("(")[0]})
            launch[name] = f"{row['Metric Value']} {row['Metric Unit']}".strip()
    return list(launches.values())
