"""`python -m fused_tp.selftest RESULT STEP ...`: the body of one step, which `fused-tp selftest` runs in a process.

Findings are written to the file RESULT as they arrive; the exit code is 0 if everything is right.
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
    """Replace the file of results by the findings so far."""
    unfinished = Path(sys.argv[1] + ".part")
    unfinished.write_text(json.dumps(found, indent=1))
    unfinished.replace(sys.argv[1])


def say(line: str) -> None:
    print(line, flush=True)


CLOCKS = "name,driver_version,clocks.max.sm,clocks.sm,power.limit"


def environment() -> int:
    """Report the GPUs, their clocks, and all versions."""
    gpus = [str(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]
    clocks, found = nvidia_smi(CLOCKS), versions()
    processors = len(os.sched_getaffinity(0))
    note = ", ".join(f"{name} {found[name]}" for name in ("driver", "torch", "cuda", "triton") if name in found)
    keep({"versions": found, "gpus": gpus, CLOCKS: clocks, "processors": processors, "note": note})
    for line in (*gpus, *clocks, *(f"{name} {of}" for name, of in found.items()), f"{processors} processors"):
        say(line)
    return 0


def compile_kernels(arch: int, archive: str) -> int:
    """Unpack archived kernels into the cache and compile the others on all cores."""
    from fused_tp.selftest.kernel_cache import compile_for
    from fused_tp.triton_kernels.archive import cache_folder, install_shipped, unpack

    brought, problem = 0, ""
    try:
        brought += install_shipped() + (unpack(Path(archive), cache_folder()) if archive else 0)
    except (ValueError, OSError) as error:  # not fatal: the kernels are compiled instead
        problem = str(error)
        say(f"WRONG  {problem}")
    found = compile_for(arch, len(os.sched_getaffinity(0)))
    note = f"{found.kernels} kernels for sm_{arch}, {found.kernels - found.found} compiled, {brought} from archives"
    if archive and not problem and not found.found:
        note += f"; {archive} has none of them: it is of other sources, another Triton or another GPU"
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
    """Check the cases of `group` from number `first` on. A case that raises is the last of its process.

    An illegal access breaks everything after it in a process, and a kernel that never ends occupies its SMs: later
    cases run in a process with a new context, which ends the old one's kernels. An op that has raised an error, or
    waited in vain, is not tried again.
    """
    from fused_tp.selftest.kernels import CASES, COSTLY_SECONDS, CaseVerdict, judge

    before = json.loads(Path(sys.argv[1]).read_text()) if first else {}
    verdicts: dict[str, str] = before.get("cases", {})
    stuck: list[str] = before.get("stuck", [])

    def kept(running: str = "") -> None:
        wrong = {name: text for name, text in verdicts.items() if text}
        note = f"{len(verdicts) - len(wrong)} of {len(verdicts)} cases are right"
        note += "".join(f"; {name}: {text[:100]}" for name, text in [*wrong.items()][:1])
        note += f"; at {running}" * bool(running)
        keep({"cases": verdicts, "wrong": wrong, "stuck": stuck, "note": note})

    device = torch.device("cuda", torch.cuda.current_device())
    cases = [case for case in CASES if case.group == group]
    for number, case in enumerate(cases[first:], first):
        kept(case.name)
        if case.op in stuck:
            verdict = CaseVerdict(f"not tried: {case.op} has raised an error or waited in vain before")
        else:
            verdict = judge(case, device)
        if verdict.raised or (verdict.problem and verdict.seconds > COSTLY_SECONDS):
            stuck.append(case.op)
        verdicts[case.name] = verdict.problem
        kept()
        say(f"{'WRONG' if verdict.problem else 'right'}  {case.name}{': ' * bool(verdict.problem)}{verdict.problem}")
        if verdict.raised and number + 1 < len(cases):
            say("the cases that follow run in a new process")
            again = ["-m", "fused_tp.selftest", sys.argv[1], "kernels", group, str(number + 1)]
            os.execv(sys.executable, [sys.executable, *again])
    return int(any(verdicts.values()))


def memory_accesses(program: str) -> int:
    """Check one rank alone, whose kernels wait for no peer, with every memory access watched by `program`."""
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
