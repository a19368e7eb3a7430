"""Registers, shared memory and spills of every device kernel in csrc/cuda, for GPUs that need not be there.

    python -m benchmarks.cuda_resources --out benchmarks/results/cuda_resources.md

writes that table and, beside it, the same as JSON lines (.jsonl). It needs nvcc and a checkout. It compiles, it does
not run: times are measured by `benchmarks.gpu`.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

_BUILDER = Path(__file__).resolve().parents[1] / "csrc" / "native_build.py"


@dataclass(frozen=True)
class Resources:
    """What ptxas says about one function for one architecture. Registers are per thread, shared memory per block."""

    source: str
    kernel: str
    arch: str  # as sm_90a
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int  # stores and loads

    @property
    def complaint(self) -> str:
        """Empty where everything is in registers."""
        if not self.stack_bytes and not self.spill_bytes:
            return ""
        return f"{self.kernel} for {self.arch}: {self.stack_bytes} bytes of stack, {self.spill_bytes} bytes spilled"


@dataclass(frozen=True)
class Measured:
    """All functions, and what the compilers said beyond that."""

    toolkit: str
    library: Path
    resources: list[Resources]
    warnings: list[str]


def measure_all(library: Path) -> Measured:
    """Compiles csrc/cuda into `library`, as setup.py does and with the same objects, or takes what is up to date.

    Raises:
        RuntimeError: there is no nvcc, or something does not compile.
    """
    builder = native_build()
    try:
        build = builder.CudaBuild()
        build.run(library, builder.cuda_folder(), threads=1)
    except builder.NotBuiltError as error:
        raise RuntimeError(str(error)) from None
    resources, warnings = [], []
    for log in build.logs(builder.cuda_folder()):
        text = log.read_text()
        resources += parse(log.name.removesuffix(".o.log"), text)
        warnings += [line for line in text.splitlines() if re.search(r"\bwarning\b", line, re.I)]
    named = demangled([one.kernel for one in resources])
    resources = [Resources(**{**asdict(one), "kernel": name}) for one, name in zip(resources, named, strict=True)]
    return Measured(build.version, library, resources, warnings)


def native_build() -> ModuleType:
    """The module that setup.py builds with; a checkout has it, an installation does not."""
    spec = importlib.util.spec_from_file_location("native_build", _BUILDER)
    if spec is None or spec.loader is None or not _BUILDER.exists():
        raise RuntimeError("this needs the sources; run it in a checkout of fused_tp")
    module = sys.modules["native_build"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parse(source: str, log: str) -> list[Resources]:
    """What `ptxas -v` said: each function's architecture, frame, and registers, in lines of their own."""
    found = []
    arch, name, stack, spill = "", "", 0, 0
    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)' for '(\w+)'", line):
            arch = entry[2]
        elif properties := re.search(r"Function properties for '?(\w+)", line):
            name = properties[1]
        elif frame := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            stack, spill = int(frame[1]), int(frame[2]) + int(frame[3])
        elif used := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            found.append(Resources(source, name, arch, int(used[1]), int(shared[1]) if shared else 0, stack, spill))
    return found


def demangled(names: Sequence[str]) -> list[str]:
    """As one would write them, without namespace and arguments; as they are where there is no c++filt."""
    if not names or shutil.which("c++filt") is None:
        return list(names)
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return [short(line) for line in done.stdout.splitlines()]


def short(name: str) -> str:
    """`void ns::kernel<ns::F32, (ns::Way)1>(ns::Args)` as `kernel<F32, 1>`."""
    name = re.sub(r"^void |\b\w+::|\((?:\w+::)*\w+\)(?=\d)|\(anonymous namespace\)::", "", name)
    depth = 0
    for index, letter in enumerate(name):
        if letter == "(" and depth == 0:
            return name[:index]
        depth += (letter == "<") - (letter == ">")
    return name


def table(measured: Measured) -> str:
    """Markdown: a section for each source, a row for each kernel."""
    archs = sorted({one.arch for one in measured.resources}, key=lambda arch: int(re.sub(r"\D", "", arch)))
    today = datetime.datetime.now(datetime.timezone.utc).date()
    spilled = sum(bool(one.complaint) for one in measured.resources)
    lines = [
        "# What the device kernels of csrc/cuda need of a GPU",
        "",
        f"Compiled, not run, by nvcc {measured.toolkit} on {today}: `python -m benchmarks.cuda_resources`.",
        "Registers are per thread (of 255), shared memory per block, in bytes. "
        + (f"{spilled} of {len(measured.resources)} spill." if spilled else "Nothing spills, no kernel has a stack."),
    ]
    by_source = sorted(measured.resources, key=lambda one: (one.source, one.kernel))
    for source, group in itertools.groupby(by_source, key=lambda one: one.source):
        header = [f"registers, {arch}" for arch in archs] + ["shared memory"] + ["spills, bytes"] * bool(spilled)
        lines += ["", f"## {source}.cu", "", f"| kernel | {' | '.join(header)} |", "|---" + "|--:" * len(header) + "|"]
        for kernel, of_kernel in itertools.groupby(group, key=lambda one: one.kernel):
            found = {one.arch: one for one in of_kernel}
            cells = [f"`{kernel}`", *(str(found[arch].registers) if arch in found else "" for arch in archs)]
            cells.append(str(max(one.shared_bytes for one in found.values())))
            cells += [str(max(one.spill_bytes for one in found.values()))] * bool(spilled)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exits with 1 where something spills, does not compile or comes with a warning, and says what."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda_resources", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cuda_resources.md"))
    path = parser.parse_args(arguments).out
    with tempfile.TemporaryDirectory() as folder:
        try:
            measured = measure_all(Path(folder, "_cuda.so"))
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table(measured))
    path.with_suffix(".jsonl").write_text("".join(json.dumps(asdict(one)) + "\n" for one in measured.resources))
    complaints = [*measured.warnings, *(one.complaint for one in measured.resources)]
    for complaint in filter(None, complaints):
        print(complaint, file=sys.stderr)
    print(f"{len(measured.resources)} kernels compiled; {path}")
    return int(any(complaints))


if __name__ == "__main__":
    raise SystemExit(main())
