"""`fused-tp doctor`: what this installation has, what it lacks, how to get that, and what the ops would run on.

Example:
    $ fused-tp doctor          # sentences; exit code 0, or 1 when something should be fixed
    $ fused-tp doctor --json   # the same as JSON
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from types import ModuleType
from typing import Any

import torch

from fused_tp.cli.doctor_machine import NOTE, OK, PROBLEM, Finding, examine_machine, native_core, shared_memory_allowed
from fused_tp.ops.explain import explain_for
from fused_tp.ops.queries import Both, queries
from fused_tp.runtime import dispatch, settings
from fused_tp.schedules.registry import SCHEDULES

_MARKS = {OK: "ok ", NOTE: " - ", PROBLEM: "!! "}

# Every environment variable that the package reads, also at build time.
VARIABLES = {
    "FUSED_TP_TIMEOUT": "seconds until a wait for a peer raises CollectiveTimeoutError (600)",
    "FUSED_TP_CHECK": "1: ranks compare op, shapes and dtypes before every op on torch.distributed (0)",
    "FUSED_TP_SCHEDULE": "the schedule that every op must use (the dispatch table chooses)",
    "FUSED_TP_ATTENTION": "what computes attention: native-cpu, triton, torch-cpu, ... (the best there is)",
    "FUSED_TP_RING_GRADIENTS": "input: a ring's dK/dV travel in the keys' dtype (wide: in float32)",
    "FUSED_TP_TABLE": "a dispatch table to use in place of the shipped one",
    "FUSED_TP_SM_MARGIN": "multiprocessors that fused kernels leave to what runs beside them (0)",
    "FUSED_TP_SHM": "0: do not use CPU shared memory (1)",
    "FUSED_TP_SHM_RESERVE": "bytes of address space each rank reserves for shared memory (32 GiB)",
    "FUSED_TP_ISA": "plain, avx2 or avx512: the most the native core may use (the best this CPU has)",
    "FUSED_TP_HOST": "names this host, where ranks of one machine share neither memory nor GPUs (its boot id)",
    "FUSED_TP_NVTX": "1: NVTX ranges always; 0: never (while a tool listens)",
    "FUSED_TP_REQUIRE_NATIVE": "1 when installing: a native core that cannot be built is an error (0)",
    "FUSED_TP_CUDA": "when installing, 0: no device kernels; 1: an error where they cannot be built (built with nvcc)",
    "FUSED_TP_CUDA_ARCHS": "when installing: GPUs to build device kernels for (80;90a;100a+PTX)",
}

# What others than this process read: the values that they take, in lower case, and what to do about any other.
_TAKEN = {
    "FUSED_TP_ISA": ("(plain|avx2|avx512)?", "plain, avx2 or avx512"),
    "FUSED_TP_SHM_RESERVE": (r"0*[1-9]\d*", "a positive number of bytes"),
    "FUSED_TP_CUDA_ARCHS": (
        r"|[;,\s]*((sm_)?\d+\.?\d[af]?(\+ptx)?([;,\s]+|$))+",
        "architectures like 80;90a;100a+PTX, +PTX at those that later GPUs shall be able to use",
    ),
}

_SWITCHES = ("FUSED_TP_NVTX", "FUSED_TP_REQUIRE_NATIVE", "FUSED_TP_CUDA")

# Sizes whose dispatch is shown: rows per rank, in a layer of an 8B model, on two ranks.
_TOKENS = {"1 token": 1, "2048 tokens": 2048}
_HIDDEN, _RANKS = 4096, 2
# How many tensors each op's shapes are those of: x [tokens, hidden], and weight [hidden, hidden] where there are two.
_OPS = {
    "all_gather_matmul": 2,
    "matmul_reduce_scatter": 2,
    "matmul_all_reduce": 2,
    "column_parallel_matmul": 2,
    "all_reduce_rms_norm": 1,
    "matmul_all_reduce_rms_norm": 2,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fused-tp doctor`."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def main(arguments: argparse.Namespace) -> int:
    """Print the report; 0 when nothing needs fixing, else 1."""
    findings = examine()
    healthy = all(finding.status != PROBLEM for finding in findings)
    if arguments.json:
        print(json.dumps({"healthy": healthy, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print(report(findings))
    return 0 if healthy else 1


def examine() -> list[Finding]:
    """All findings, in the order of the report."""
    return [*examine_machine(), *_settings(), *_schedules(native_core())]


def report(findings: list[Finding]) -> str:
    """The findings as text."""
    lines: list[str] = []
    section = ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            lines += ["", section] if lines else [section]
        lines.append(f"  {_MARKS[finding.status]} {finding.name:<31} {finding.value}")
        if finding.advice:
            lines.append(f"      {'':<31} {finding.advice}")
    problems = sum(finding.status == PROBLEM for finding in findings)
    closing = "Nothing needs fixing." if problems == 0 else f"{problems} thing{'s' * (problems > 1)} to fix, marked !!."
    return "\n".join([*lines, "", closing])


def _settings() -> Iterator[Finding]:
    section = "Settings"
    checks: dict[str, Callable[[], Any]] = {
        "FUSED_TP_TIMEOUT": settings.timeout_seconds,
        "FUSED_TP_CHECK": settings.check_ranks,
        "FUSED_TP_SM_MARGIN": settings.sm_margin,
        "FUSED_TP_SHM": settings.shared_memory_allowed,
        "FUSED_TP_TABLE": lambda: dispatch.load_table(settings.table_path()),
        "FUSED_TP_SCHEDULE": _forced_schedule,
        "FUSED_TP_ATTENTION": _forced_provider,
        "FUSED_TP_RING_GRADIENTS": settings.narrow_gradients,
        **{name: partial(_taken, name) for name in _TAKEN},
        **{name: partial(settings.switch, name, True) for name in _SWITCHES},
    }
    for name, meaning in VARIABLES.items():
        value = os.environ.get(name)
        if value is None:
            yield Finding(section, name, f"not set; {meaning}")
            continue
        try:
            checks.get(name, lambda: None)()
        except (ValueError, OSError) as error:
            yield Finding(section, name, f"{value!r}; {meaning}", PROBLEM, str(error))
        else:
            yield Finding(section, name, f"{value!r}; {meaning}")
    for name in sorted(os.environ):
        if name.startswith("FUSED_TP_") and name not in VARIABLES:
            yield Finding(
                section, name, repr(os.environ[name]), PROBLEM, "Nothing reads this variable; is it misspelt?"
            )


def _forced_schedule() -> str | None:
    name = settings.forced_schedule()
    if name is not None and name not in SCHEDULES:
        raise ValueError(f"There is no such schedule; there are {', '.join(SCHEDULES)}.")
    return name


def _forced_provider() -> str | None:
    # It loads NumPy and the native core, which the rest of doctor does without.
    from fused_tp.attention.kernels.select import forced_provider

    return forced_provider()


def _taken(name: str) -> None:
    pattern, wanted = _TAKEN[name]
    if not re.fullmatch(pattern, os.environ[name].lower()):
        raise ValueError(f"Set it to {wanted}.")


def _schedules(core: ModuleType | None) -> Iterator[Finding]:
    """The dispatch table's choices for two ranks of this machine; `fused-tp explain` has more."""
    section = f"Schedules of {_RANKS} ranks, bf16, hidden size {_HIDDEN}"
    shared = core is not None and shared_memory_allowed()
    ways = [("cpu", "shm" if shared else "gloo", "cpu")]
    if torch.cuda.is_available():
        ways.append(("cuda", "nccl", dispatch.arch_of(torch.device("cuda", torch.cuda.current_device()))))
    for device, transport, arch in ways:
        for op, tensors in _OPS.items():
            try:
                chosen = []
                for tokens in _TOKENS.values():
                    shapes = ((tokens, _HIDDEN), (_HIDDEN, _HIDDEN))[:tensors]
                    explanation = explain_for(
                        op, *shapes, dtype=torch.bfloat16, world_size=_RANKS, transport=transport, arch=arch
                    )
                    decision = explanation.forward or explanation.backward
                    by_table = decision.schedule if decision else "local"
                    chosen.append(_forced_for(queries(op, shapes, None, _RANKS), device) or by_table)
            except (ValueError, OSError) as error:
                yield Finding(section, f"{op}, {device}", "no choice", PROBLEM, str(error))
            else:
                value = ", ".join(f"{schedule} ({tokens})" for tokens, schedule in zip(_TOKENS, chosen, strict=True))
                yield Finding(section, f"{op}, {device}", value)


def _forced_for(asked: Both, device: str) -> str | None:
    """The schedule that FUSED_TP_SCHEDULE forces on a call, if it is one that has something for it."""
    name = settings.forced_schedule()
    query = asked[0] or asked[1]
    if name not in SCHEDULES or query is None:
        return None
    spec = SCHEDULES[name]
    return name if spec.supports(query[0], torch.bfloat16) and device in (spec.devices or (device,)) else None
