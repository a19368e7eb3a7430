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

from fused_tp.selftest.machine import nvidia_smi, versions
from fused_tp.selftest.steps import UNABLE


def keep(found: dict[str, Any]) -> None:
    """Replace the results file by the findings so far, in one rename."""
    unfinished = Path(sys.argv[1] + ".part")
    unfinished.write_text(json.dumps(found, indent=1))
    unfinished.replace(sys.argv[1])


def say(line: str) -> None:
    print(line, flush=True)


CLOCKS = "name,driver_version,clocks.max.sm,clocks.sm,power.limit"


def environment() -> int:
    """Record the GPUs, their clocks, and all versions."""
    gpus = [str(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]
    clocks, found = nvidia_smi(CLOCKS), versions()
    processors = len(os.sched_getaffinity(0))
    note = ", ".join(f"{name} {found[name]}" for name in ("driver", "torch", "cuda", "triton") if name in found)
    keep({"versions": found, "gpus": gpus, CLOCKS: clocks, "processors": processors, "note": note})
    for line in (*gpus, *clocks, *(f"{name} {of}" for name, of in found.items()), f"{processors} processors"):
        say(line)
    return 0


def compile_kernels(arch: int, archive: str) -> int:
    """Unpack archived kernels into the cache, and compile the missing ones on all cores."""
    from fused_tp.selftest.kernel_cache import compile_for
    from fused_tp.triton_kernels.archive import cache_folder, install_shipped, unpack

    brought, problem = 0, ""
    try:
        brought += install_shipped() + (unpack(Path(archive), cache_folder()) if archive else 0)
    except (ValueError, OSError) as error:  # not fatal: the kernels are compiled below
        problem = str(error)
        say(f"WRONG  {problem}")
    found = compile_for(arch, len(os.sched_getaffinity(0)))
    note = f"{found.kernels} kernels for sm_{arch}, {found.kernels - found.found} compiled, {brought} from archives"
    if archive and not problem and not found.found:
        note += f"; {archive} has none of them: it was built from other sources, or for another Triton or GPU"
    keep({**found._asdict(), "arch": arch, "from archives": brought, "archive": problem, "note": note})
    for text in found.failed:
        say(f"WRONG  {text}")
    say(f"{note}, {found.seconds:.0f} s")
    return int(bool(found.failed) or bool(problem))


def smoke() -> int:
    from fused_tp.selftest.smoke import smoke as look

    def kept(found: dict[str, Any], failed: list[str]) -> None:
        keep({"found": found, "failed": failed, "note": f"{len(found)} right, {len(failed)} wrong"})

    _, failed = look(torch.device("cuda", torch.cuda.current_device()), say, kept)
    return int(bool(failed))


def kernels(group: str, first: int = 0) -> int:
    """Check the cases of `group` from number `first` on. After a case that raises, the rest runs in a new process.

    After an illegal memory access, every later CUDA call of a process fails, and a kernel that hangs occupies its SMs.
    A new process has a new CUDA context, and the exit of the old one stops its kernels. An op that has raised an error
    or timed out is not tried again.
    """
    from fused_tp.selftest.kernels import CASES, COSTLY_SECONDS, CaseResult, run_case

    before = json.loads(Path(sys.argv[1]).read_text()) if first else {}
    problems: dict[str, str] = before.get("cases", {})
    stuck: list[str] = before.get("stuck", [])

    def kept(running: str = "") -> None:
        wrong = {name: text for name, text in problems.items() if text}
        note = f"{len(problems) - len(wrong)} of {len(problems)} cases are right"
        note += "".join(f"; {name}: {text[:100]}" for name, text in [*wrong.items()][:1])
        note += f"; at {running}" * bool(running)
        keep({"cases": problems, "wrong": wrong, "stuck": stuck, "note": note})

    device = torch.device("cuda", torch.cuda.current_device())
    cases = [case for case in CASES if case.group == group]
    for number, case in enumerate(cases[first:], first):
        kept(case.name)
        if case.op in stuck:
            result = CaseResult(f"not tried: {case.op} raised an error or timed out in an earlier case")
        else:
            result = run_case(case, device)
        if result.raised or (result.problem and result.seconds > COSTLY_SECONDS):
            stuck.append(case.op)
        problems[case.name] = result.problem
        kept()
        say(f"{'WRONG' if result.problem else 'right'}  {case.name}{': ' * bool(result.problem)}{result.problem}")
        if result.raised and number + 1 < len(cases):
            say("the remaining cases run in a new process")
            again = ["-m", "fused_tp.selftest", sys.argv[1], "kernels", group, str(number + 1)]
            os.execv(sys.executable, [sys.executable, *again])
    return int(any(problems.values()))


def memory_accesses(program: str) -> int:
    """Check the kernels of a single rank, which wait for no peer, under compute-sanitizer at path `program`."""
    from fused_tp.selftest.kernels import ALONE
    from fused_tp.selftest.tools import run_watched

    body = [sys.executable, "-m", "fused_tp.selftest", sys.argv[1], "kernels", ALONE]
    code, reason = run_watched([program, "--tool", "memcheck", "--error-exitcode", "9", *body])
    if code and reason:
        keep({"note": f"compute-sanitizer does not work here ({reason})"})
        return UNABLE
    return code


def counters(program: str) -> int:
    from fused_tp.selftest import tools

    found, reason = tools.counters(program)
    if not found and reason:
        keep({"note": f"ncu does not work here ({reason})"})
        return UNABLE
    keep({"launches": found, "note": f"{len(found)} launches counted"})
    for launch in found:
        say(", ".join(f"{name} {value}" for name, value in launch.items()))
    return int(not found)


def main(arguments: list[str]) -> int:
    _, name, *rest = arguments
    if name == "compile":
        return compile_kernels(int(rest[0]), rest[1] if len(rest) > 1 else "")
    if name == "kernels":
        return kernels(rest[0], *map(int, rest[1:]))
    if name in (tools := {"memory": memory_accesses, "counters": counters}):
        return tools[name](rest[0])
    return {"environment": environment, "smoke": smoke}[name]()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
