"""`python -m fused_tp.selftest RESULT STEP ...`: one step of `fused-tp selftest`, which runs each step in a process.

Findings are written to the file RESULT as soon as they are known. The exit code is 0 if everything is right.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from fused_tp.selftest.machine import find_versions, query_nvidia_smi
from fused_tp.selftest.steps import UNABLE_EXIT_CODE


def save_findings(findings: dict[str, Any]) -> None:
    """Replace the results file by the findings so far, in one rename."""
    partial_file = Path(sys.argv[1] + ".part")
    partial_file.write_text(json.dumps(findings, indent=1))
    partial_file.replace(sys.argv[1])


def print_line(line: str) -> None:
    print(line, flush=True)


CLOCK_FIELDS = "name,driver_version,clocks.max.sm,clocks.sm,power.limit"


def record_environment() -> int:
    """Record the GPUs, their clocks, and all versions."""
    gpus = [str(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]
    clocks, versions = query_nvidia_smi(CLOCK_FIELDS), find_versions()
    processor_count = len(os.sched_getaffinity(0))
    note = ", ".join(f"{name} {versions[name]}" for name in ("driver", "torch", "cuda", "triton") if name in versions)
    save_findings(
        {"versions": versions, "gpus": gpus, CLOCK_FIELDS: clocks, "processors": processor_count, "note": note}
    )
    for line in (
        *gpus,
        *clocks,
        *(f"{name} {version}" for name, version in versions.items()),
        f"{processor_count} processors",
    ):
        print_line(line)
    return 0


def compile_kernels(arch: int, archive: str) -> int:
    """Unpack archived kernels into the cache, and compile the missing ones on all cores."""
    from fused_tp.selftest.kernel_cache import compile_for
    from fused_tp.triton_kernels.archive import cache_folder, install_shipped_kernels, unpack

    num_unpacked, problem = 0, ""
    try:
        num_unpacked += install_shipped_kernels() + (unpack(Path(archive), cache_folder()) if archive else 0)
    except (ValueError, OSError) as error:  # not fatal: the kernels are compiled below
        problem = str(error)
        print_line(f"WRONG  {problem}")
    result = compile_for(arch, len(os.sched_getaffinity(0)))
    num_compiled = result.num_kernels - result.num_cached
    note = f"{result.num_kernels} kernels for sm_{arch}, {num_compiled} compiled, {num_unpacked} from archives"
    if archive and not problem and not result.num_cached:
        note += f"; {archive} has none of them: it was built from other sources, or for another Triton or GPU"
    save_findings(
        {
            "kernels": result.num_kernels,
            "found": result.num_cached,
            "failed": result.failures,
            "seconds": result.seconds,
            "arch": arch,
            "from archives": num_unpacked,
            "archive": problem,
            "note": note,
        }
    )
    for text in result.failures:
        print_line(f"WRONG  {text}")
    print_line(f"{note}, {result.seconds:.0f} s")
    return int(bool(result.failures) or bool(problem))


def run_smoke_test() -> int:
    from fused_tp.selftest.smoke import run_smoke_checks

    def save(findings: dict[str, Any], failures: list[str]) -> None:
        save_findings({"found": findings, "failed": failures, "note": f"{len(findings)} right, {len(failures)} wrong"})

    _, failures = run_smoke_checks(torch.device("cuda", torch.cuda.current_device()), print_line, save)
    return int(bool(failures))


def check_kernels(group: str, first_case: int = 0) -> int:
    """Check the cases of `group` from index `first_case` on. After a case that raises, the rest runs in a new process.

    After an illegal memory access, every later CUDA call of a process fails, and a kernel that hangs occupies its SMs.
    A new process has a new CUDA context, and the exit of the old one stops its kernels. An op that has raised an error
    or timed out is not tried again.
    """
    from fused_tp.selftest.kernels import CASES, COSTLY_SECONDS, CaseResult, run_case

    earlier_findings = json.loads(Path(sys.argv[1]).read_text()) if first_case else {}
    problems: dict[str, str] = earlier_findings.get("cases", {})
    skipped_ops: list[str] = earlier_findings.get("stuck", [])

    def save(running_case: str = "") -> None:
        wrong_cases = {name: text for name, text in problems.items() if text}
        note = f"{len(problems) - len(wrong_cases)} of {len(problems)} cases are right"
        note += "".join(f"; {name}: {text[:100]}" for name, text in [*wrong_cases.items()][:1])
        note += f"; at {running_case}" * bool(running_case)
        save_findings({"cases": problems, "wrong": wrong_cases, "stuck": skipped_ops, "note": note})

    device = torch.device("cuda", torch.cuda.current_device())
    cases = [case for case in CASES if case.group == group]
    for case_index, case in enumerate(cases[first_case:], first_case):
        save(case.name)
        if case.op in skipped_ops:
            result = CaseResult(f"not tried: {case.op} raised an error or timed out in an earlier case")
        else:
            result = run_case(case, device)
        if result.has_raised or (result.problem and result.seconds > COSTLY_SECONDS):
            skipped_ops.append(case.op)
        problems[case.name] = result.problem
        save()
        print_line(
            f"{'WRONG' if result.problem else 'right'}  {case.name}{': ' * bool(result.problem)}{result.problem}"
        )
        if result.has_raised and case_index + 1 < len(cases):
            print_line("the remaining cases run in a new process")
            command = ["-m", "fused_tp.selftest", sys.argv[1], "kernels", group, str(case_index + 1)]
            os.execv(sys.executable, [sys.executable, *command])
    return int(any(problems.values()))


def check_memory_accesses(program: str) -> int:
    """Check the kernels of a single rank, which wait for no peer, under compute-sanitizer at path `program`."""
    from fused_tp.selftest.kernels import ONE_RANK_GROUP
    from fused_tp.selftest.tools import run_tool

    command = [sys.executable, "-m", "fused_tp.selftest", sys.argv[1], "kernels", ONE_RANK_GROUP]
    code, reason = run_tool([program, "--tool", "memcheck", "--error-exitcode", "9", *command])
    if code and reason:
        save_findings({"note": f"compute-sanitizer does not work here ({reason})"})
        return UNABLE_EXIT_CODE
    return code


def measure_counters(program: str) -> int:
    from fused_tp.selftest import tools

    launches, reason = tools.measure_counters(program)
    if not launches and reason:
        save_findings({"note": f"ncu does not work here ({reason})"})
        return UNABLE_EXIT_CODE
    save_findings({"launches": launches, "note": f"{len(launches)} launches counted"})
    for launch in launches:
        print_line(", ".join(f"{name} {value}" for name, value in launch.items()))
    return int(not launches)


def main(arguments: list[str]) -> int:
    _, name, *step_arguments = arguments
    if name == "compile":
        return compile_kernels(int(step_arguments[0]), step_arguments[1] if len(step_arguments) > 1 else "")
    if name == "kernels":
        return check_kernels(step_arguments[0], *map(int, step_arguments[1:]))
    if name in (tools := {"memory": check_memory_accesses, "counters": measure_counters}):
        return tools[name](step_arguments[0])
    return {"environment": record_environment, "smoke": run_smoke_test}[name]()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
