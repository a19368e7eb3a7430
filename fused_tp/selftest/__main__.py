"""`python -m fused_tp.selftest RESULT STEP ...`: the body of one step, which `fused-tp selftest` runs in a process.

What it finds goes to the file RESULT as it comes; the exit code is 0 if all is right.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def keep(found: dict[str, Any]) -> None:
    """Write what was found so far."""
    unfinished = Path(sys.argv[1] + ".part")
    unfinished.write_text(json.dumps(found, indent=1))
    unfinished.replace(sys.argv[1])


def say(line: str) -> None:
    print(line, flush=True)


def _nvidia_smi(fields: str) -> list[str]:
    """Lines of CSV; none where the program is not there or fails."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def environment() -> int:
    """What `fused-tp doctor` finds, and the GPU."""
    gpus = [str(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]
    clocks = _nvidia_smi("name,driver_version,clocks.max.sm,clocks.sm,power.limit")
    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for name in ("triton", "numpy"):
        try:
            versions[name] = __import__(name).__version__
        except ImportError:
            versions[name] = "not installed"
    processors = len(os.sched_getaffinity(0))
    keep({"versions": versions, "gpus": gpus, "nvidia-smi": clocks, "processors": processors})
    for line in (*gpus, *clocks, *(f"{name} {of}" for name, of in versions.items()), f"{processors} processors"):
        say(line)
    return 0


def compile_kernels(arch: int, archive: str) -> int:
    """Put what an archive has into the cache, and compile the rest by all cores."""
    from fused_tp.selftest.kernel_cache import compile_for
    from fused_tp.triton_kernels.archive import cache_folder, install_shipped, unpack

    brought = install_shipped() + (unpack(Path(archive), cache_folder()) if archive else 0)
    found = compile_for(arch, len(os.sched_getaffinity(0)))
    note = f"{found.kernels} kernels for sm_{arch}, {found.kernels - found.found} compiled, {brought} from archives"
    keep({**found._asdict(), "arch": arch, "from archives": brought, "note": note})
    for text in found.failed:
        say(f"WRONG  {text}")
    say(f"{note}, {found.seconds:.0f} s")
    return int(bool(found.failed))


def smoke() -> int:
    from fused_tp.selftest.smoke import smoke as look

    found, failed = look(torch.device("cuda", torch.cuda.current_device()), say)
    keep({"found": found, "failed": failed, "note": f"{len(found)} right, {len(failed)} wrong"})
    return int(bool(failed))


def kernels(group: str) -> int:
    from fused_tp.selftest.kernels import check_all

    cases: dict[str, str] = {}

    def kept(line: str) -> None:
        say(line)
        cases[line[7:]] = line[:5]
        keep({"cases": cases})

    found = check_all([group], torch.device("cuda", torch.cuda.current_device()), kept)
    wrong = {name: problem for name, problem in found if problem}
    keep({"cases": dict(found), "wrong": wrong, "note": f"{len(found) - len(wrong)} of {len(found)} cases are right"})
    return int(bool(wrong))


def main(arguments: list[str]) -> int:
    _, name, *rest = arguments
    if name == "compile":
        return compile_kernels(int(rest[0]), rest[1] if len(rest) > 1 else "")
    if name == "kernels":
        return kernels(rest[0])
    return {"environment": environment, "smoke": smoke}[name]()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
