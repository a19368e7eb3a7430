"""`fused-tp selftest`: check and measure the kernels on this machine's GPUs, in minutes.

Example:
    $ fused-tp selftest                        # eight minutes; writes the table and all logs to out/selftest
    $ fused-tp selftest --minutes 3
    $ fused-tp selftest --only '^sums|^smoke'
    $ fused-tp selftest --list

In a checkout without `pip install`, run `python3 -m fused_tp selftest` in its root.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fused_tp.cli import make_parent_folder, positive_number
from fused_tp.selftest.machine import find_versions
from fused_tp.selftest.steps import (
    RESULT_PLACEHOLDER,
    STATE_LEFT_OUT,
    STATE_RIGHT,
    Outcome,
    SelftestStep,
    format_table,
    run_steps,
)

DEFAULT_MINUTES = 8.0
# Ranks are threads and need a hardware queue per stream. Waits time out within seconds. Kernels run on the GPU, even if
# the caller's environment selects Triton's interpreter.
ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "FUSED_TP_TIMEOUT": "15",
    "TRITON_INTERPRET": "0",
    "PYTHONFAULTHANDLER": "1",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `fused-tp selftest`."""
    parser.epilog = (
        "Exit status: 0: all steps that ran are right; 1: a step failed; 2: no step can run here; 130 or 143: "
        "interrupted, with all results so far in the report. No other program should use the GPUs meanwhile."
    )
    parser.add_argument("--out", type=Path, default=Path("out/selftest"), metavar="DIR", help="(out/selftest)")
    parser.add_argument(
        "--minutes",
        type=positive_number,
        default=DEFAULT_MINUTES,
        metavar="X",
        help=f"time limit; skip steps beyond it ({DEFAULT_MINUTES:g})",
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="only steps whose name contains a match")
    parser.add_argument("--kernels", type=Path, metavar="FILE", help="archive of compiled kernels (make gpu-kernels)")
    parser.add_argument("--arch", type=int, choices=(80, 90, 100), help="compile for it (this machine's GPU, else 90)")
    parser.add_argument("--list", action="store_true", help="name the steps and stop")


def main(arguments: argparse.Namespace) -> int:
    """Run the steps, print their table, and write selftest.json; `--help` lists the exit codes."""
    start = time.time()
    gpus = _find_gpus()
    arch = arguments.arch or gpus.arch or 90
    try:
        selected_steps = [
            step
            for step in make_steps(arch, arguments.kernels, gpus.num_devices, arguments.out)
            if re.search(arguments.only, step.name)
        ]
        if not selected_steps:
            raise ValueError(f"--only {arguments.only!r} matches no step; --list names them.")
        if arguments.kernels is not None and not arguments.kernels.is_file():
            raise ValueError(f"--kernels must be an existing file, got {arguments.kernels}.")
        make_parent_folder("--out", arguments.out / "selftest.json")
    except (ValueError, re.error) as error:
        print(f"fused-tp selftest: {error}", file=sys.stderr)
        return 2
    if arguments.list:
        print(
            "\n".join(f"{step.name:40} {step.min_seconds:4.0f} to {step.max_seconds:4.0f} s" for step in selected_steps)
        )
        return 0
    outcomes: list[Outcome] = []
    report = {
        "date": time.strftime("%Y-%m-%d", time.gmtime(start)),
        "time": time.strftime("%H:%M:%S UTC", time.gmtime(start)),
        "arch": arch,
        "gpu": gpus.name,
        "gpus": gpus.num_devices,
        "versions": find_versions(),
    }
    is_main_thread = threading.current_thread() is threading.main_thread()  # no other thread may set signal handlers
    signals = (signal.SIGTERM, signal.SIGHUP) if is_main_thread else ()
    handlers = {signum: signal.signal(signum, _exit_on_signal) for signum in signals}
    write_report(arguments.out, report, [])  # replaces the report of an earlier run
    try:
        for outcome in run_steps(
            selected_steps, arguments.out, 60 * arguments.minutes, _print_now, gpus.unsupported_reason
        ):
            outcomes.append(outcome)
            write_report(arguments.out, {**report, "seconds": time.time() - start}, outcomes)
            _print_now(f"{outcome.name}: {outcome.state}{': ' * bool(outcome.note)}{outcome.note}")
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    print(f"\n{format_table(outcomes)}\n\nAll of it: {arguments.out}/selftest.json, and a log of each step beside it.")
    ran_outcomes = [result for result in outcomes if result.state != STATE_LEFT_OUT]
    if any(result.state != STATE_RIGHT for result in ran_outcomes):
        return 1
    gpu_steps = {step.name for step in selected_steps if step.needs_gpu}
    return 0 if any(result.name in gpu_steps for result in ran_outcomes) or not gpu_steps else 2


def write_report(out: Path, report: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Write all results so far, each file by an atomic rename: the next step may crash the machine."""
    full_report = {**report, "steps": [outcome.to_json() for outcome in outcomes]}
    for name, text in (("selftest.json", json.dumps(full_report, indent=1)), ("selftest.md", format_table(outcomes))):
        partial_file = out / f"{name}.part"
        partial_file.write_text(text + "\n")
        partial_file.replace(out / name)


def _exit_on_signal(signum: int, _: object) -> None:
    sys.exit(128 + signum)


def make_steps(arch: int, archive: Path | None, num_gpus: int, out: Path) -> list[SelftestStep]:
    """Return all steps in execution order, the most valuable first, so that a time limit skips the least valuable."""
    from fused_tp.selftest.kernel_cache import TIMED_CASES
    from fused_tp.selftest.kernels import GROUPS, ONE_RANK_GROUP

    def step_command(*words: str) -> list[str]:
        return [sys.executable, "-m", "fused_tp.selftest", RESULT_PLACEHOLDER, *words]

    def benchmark_command(name: str, minutes: float, case_pattern: str) -> list[str]:
        options = [
            "--quick",
            "--minutes",
            f"{minutes:g}",
            "--only",
            case_pattern,
            "--out",
            str(out / name),
            "--json",
            RESULT_PLACEHOLDER,
        ]
        return [sys.executable, "-m", "fused_tp.benchmarks.gpu", *options]

    two_rank_groups = ("sums, 2 ranks", "gathers, 2 ranks", "attention", "rings, 2 ranks", "collectives, 2 ranks")
    other_groups = [group for group in GROUPS if group not in (*two_rank_groups, ONE_RANK_GROUP)]
    other_groups.sort(key=lambda group: "other dtypes" in group)  # other dtypes last; a stable sort keeps the rest

    def check_step(group: str, priority: int) -> SelftestStep:
        return SelftestStep(group, step_command("kernels", group), 15, 90, priority, environment=ENVIRONMENT)

    steps_in_order = [
        SelftestStep("environment", step_command("environment"), 2, 60, 0, needs_gpu=False, environment=ENVIRONMENT),
        SelftestStep("kernels", step_command("compile", str(arch), str(archive or "")), 10, 240, 1, False, ENVIRONMENT),
        SelftestStep("smoke", step_command("smoke"), 15, 75, 2, environment=ENVIRONMENT),
        *(check_step(group, 3) for group in two_rank_groups),
    ]
    if num_gpus > 1:
        tune_command = [
            sys.executable,
            "-m",
            "fused_tp",
            "tune",
            "--folder",
            str(out / "tuned"),
            "--json",
            RESULT_PLACEHOLDER,
            "--calls",
        ]
        tune_environment = {"FUSED_TP_TIMEOUT": "30"}
        steps_in_order.append(
            SelftestStep(
                "schedules, processes", [*tune_command, "20", "--check-only"], 30, 180, 4, environment=tune_environment
            )
        )
    one_kernel_cases, rank_cases = TIMED_CASES
    speed_command = benchmark_command("speed-1", 1.3, one_kernel_cases)
    steps_in_order.append(
        SelftestStep("speed of matmuls and attention", speed_command, 30, 110, 5, environment=ENVIRONMENT)
    )
    if num_gpus > 1:
        # Also measures torch's fused ops, which are among the schedules.
        measuring_command = [*tune_command, "1", "--tokens", "16", "512", "4096"]
        steps_in_order.append(
            SelftestStep("speed of schedules, processes", measuring_command, 60, 240, 5, environment=tune_environment)
        )
    steps_in_order += [check_step(group, 6) for group in other_groups]
    speed_command = benchmark_command("speed-2", 1.0, rank_cases)
    steps_in_order.append(SelftestStep("speed of ranks", speed_command, 30, 90, 7, environment=ENVIRONMENT))
    if ncu := cuda_tool("ncu"):
        steps_in_order.append(
            SelftestStep("counters", step_command("counters", ncu), 20, 75, 8, environment=ENVIRONMENT)
        )
    if memcheck := cuda_tool("compute-sanitizer"):
        # One driver allocation per tensor: memcheck cannot detect out-of-bounds accesses inside torch's large blocks.
        sanitizer_environment = {**ENVIRONMENT, "CUDA_LAUNCH_BLOCKING": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        steps_in_order.append(
            SelftestStep(
                "memory accesses", step_command("memory", memcheck), 60, 180, 9, environment=sanitizer_environment
            )
        )
    return steps_in_order


def cuda_tool(name: str) -> str | None:
    """Return the path of a program of the CUDA toolkit; None if it is missing."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes if home)]
    return shutil.which(name, path=os.pathsep.join(folders))


class Gpus(NamedTuple):
    """GPUs of this machine.

    Attributes:
        unsupported_reason: message with the reason why no step can use them; empty if steps can.
        arch: architecture of their kernels, such as 90 for sm_90; 0 without one.
        num_devices: number of GPUs.
        name: name of the first one.
    """

    unsupported_reason: str
    arch: int = 0
    num_devices: int = 0
    name: str = ""


def _find_gpus() -> Gpus:
    import torch

    if not torch.cuda.is_available():
        return Gpus("torch finds no NVIDIA GPU on this machine")
    try:
        name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    except RuntimeError as error:
        return Gpus(f"torch finds a GPU but cannot use it ({str(error).splitlines()[0]})")
    num_devices = torch.cuda.device_count()
    if major < 8:
        return Gpus(f"{name} is older than sm_80", 0, num_devices, name)
    from fused_tp.triton_kernels.device import kernel_arch

    return Gpus("", kernel_arch(10 * major + minor), num_devices, name)


def _print_now(line: str) -> None:
    print(line, flush=True)
