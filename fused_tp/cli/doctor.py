"""`fused-tp doctor`: what this installation has, what it lacks, how to get that, and what the ops would run on.

Example:
    $ fused-tp doctor          # sentences; exit code 0, or 1 when something should be fixed
    $ fused-tp doctor --json   # the same as JSON
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from types import ModuleType
from typing import Any

import torch

from fused_tp.cli.doctor_machine import NOTE, OK, PROBLEM, Finding, examine_machine, native_core, shared_memory_allowed
from fused_tp.ops.explain import Keys, dispatch_keys, explain_for
from fused_tp.runtime import dispatch, settings
from fused_tp.schedules.registry import SCHEDULES

_MARKS = {OK: "ok ", NOTE: " - ", PROBLEM: "!! "}

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
        "FUSED_TP_TABLE": lambda: dispatch.load_table(settings.table_path()),
        "FUSED_TP_SCHEDULE": _forced_schedule,
        "FUSED_TP_ATTENTION": _forced_provider,
    }
    for setting in settings.SETTINGS:
        value = os.environ.get(setting.name)
        meaning = f"{'when installing, ' if setting.installing else ''}{setting.meaning} (default: {setting.default})"
        if value is None:
            yield Finding(section, setting.name, f"not set; {meaning}")
            continue
        try:
            checks.get(setting.name, setting.check)()
        except (ValueError, OSError) as error:
            yield Finding(section, setting.name, f"{value!r}; {meaning}", PROBLEM, str(error))
        else:
            yield Finding(section, setting.name, f"{value!r}; {meaning}")
    known = {setting.name for setting in settings.SETTINGS}
    for name in sorted(os.environ):
        if name.startswith("FUSED_TP_") and name not in known:
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
    from fused_tp.attention.kernels.select import forced_kernel

    return forced_kernel()


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
                    keys = dispatch_keys(op, shapes, torch.bfloat16, None, _RANKS)
                    chosen.append(_forced_for(keys, device) or by_table)
            except (ValueError, OSError) as error:
                yield Finding(section, f"{op}, {device}", "no choice", PROBLEM, str(error))
            else:
                value = ", ".join(f"{schedule} ({tokens})" for tokens, schedule in zip(_TOKENS, chosen, strict=True))
                yield Finding(section, f"{op}, {device}", value)


def _forced_for(asked: Keys, device: str) -> str | None:
    """The schedule that FUSED_TP_SCHEDULE forces on a call, if it is one that has something for it."""
    name = settings.forced_schedule()
    key = asked[0] or asked[1]
    if name not in SCHEDULES or key is None:
        return None
    spec = SCHEDULES[name]
    return name if spec.supports(key.op, key.dtype) and device in (spec.devices or (device,)) else None
