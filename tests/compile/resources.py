"""Registers, shared memory, spills and matrix instructions of all kernels, for GPUs that need not be present.

    python -m tests.compile.resources --out benchmarks/results

writes kernel_resources.md (Triton) and cuda_resources.md (csrc/cuda, which needs nvcc). Kernels are compiled, not run:
`benchmarks.gpu` measures times.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import datetime
import functools
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tests.native_build import cache, native_build

from . import sass
from .variants import ARCHS, Variant, all_variants

# PTX instruction that multiplies matrices, by architecture.
MATRIX_INSTRUCTIONS = {"sm_80": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}
INSTALLED = "installed"  # stands in for a version of Triton
# Limit outside of hot loops, where a spill costs once per tile.
SPILLED_BYTES = 128
SHARED_KIB = {"sm_80": 163, "sm_90": 227, "sm_100": 227}


@dataclass(frozen=True)
class Resources:
    """Resources of one kernel: registers and spilled bytes are per thread, bytes of shared memory per program."""

    kernel: str  # for csrc/cuda the source
    name: str
    arch: str  # e.g. sm_90
    registers: int
    shared_bytes: int
    spilled_bytes: int
    warps: int = 0  # 0: chosen by the launch
    tensor_memory_columns: int = 0
    hot_spills: int = 0  # instructions in hot loops that spill or reload
    instruction: str = ""  # instruction that multiplies matrices; "": fused multiply-add of CUDA cores
    needs_matrix_instruction: bool = False

    @property
    def complaint(self) -> str:
        """Problems of the kernel in one sentence, or ""."""
        wrong, matrix = [], MATRIX_INSTRUCTIONS.get(self.arch, "")
        if self.hot_spills:
            wrong.append(f"spills {self.spilled_bytes} bytes a thread, by {self.hot_spills} instructions of hot loops")
        if self.spilled_bytes > SPILLED_BYTES:
            wrong.append(f"spills {self.spilled_bytes} bytes a thread")
        if self.needs_matrix_instruction and not self.instruction.startswith(matrix):
            wrong.append(f"multiplies by {self.instruction or 'fma'}, not by {matrix}")
        if self.shared_bytes > (limit := SHARED_KIB.get(self.arch.rstrip("a"), 99) * 1024):
            wrong.append(f"needs {self.shared_bytes} bytes of shared memory, of which there are {limit}")
        return f"{self.kernel} {self.name} on {self.arch} " + " and ".join(wrong) if wrong else ""


COLUMNS: dict[str, Callable[[Resources], object]] = {
    "registers": lambda one: one.registers,
    "warps": lambda one: one.warps,
    "shared memory, KiB": lambda one: one.shared_bytes and f"{one.shared_bytes / 1024:.1f}",
    "tensor memory, columns": lambda one: one.tensor_memory_columns,
    "spills, bytes": lambda one: one.spilled_bytes,
    "spilling in hot loops": lambda one: one.hot_spills,
    # Keep shapes and types; ".sync.aligned" and the like are the same for all.
    "multiplies by": lambda one: re.sub(r"\.(sync|aligned|row|col|cta_group::1)(?=\.|$)", "", one.instruction),
}


def table(title: str, compiler: str, found: Sequence[Resources]) -> str:
    """Markdown table, with a section for each kernel and architecture; columns that are empty for all are omitted."""
    lines = [
        f"# What {title} need of a GPU",
        "",
        f"Compiled, not run, by {compiler} on {datetime.datetime.now(datetime.timezone.utc).date()}: "
        "`python -m tests.compile.resources`.",
        "Registers are per thread (of 255), shared memory per program (of 163 KiB on sm_80, 227 KiB on the others).",
        f"{sum(bool(one.spilled_bytes) for one in found)} of {len(found)} spill, "
        f"{sum(bool(one.hot_spills) for one in found)} in a hot loop.",
    ]
    columns = {name: of for name, of in COLUMNS.items() if any(of(one) for one in found)}
    for (kernel, arch), group in itertools.groupby(found, key=lambda one: (one.kernel, one.arch)):
        lines += ["", f"## {kernel}, {arch}", "", _row(("variant", *columns)), "|---" + "|--:" * len(columns) + "|"]
        lines += [_row((f"`{one.name}`", *(of(one) for of in columns.values()))) for one in group]
    return "\n".join(lines) + "\n"


def _row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


# -- Triton ------------------------------------------------------------------------------------------------------------


def compiled(variant: Variant) -> Any:
    """Compile a variant with Triton; the result has the code in `asm`. Errors name the variant.

    Not possible in a process that interprets kernels.
    """
    import triton

    source, target, options = _source(variant)
    try:
        with _silence():
            return triton.compile(source, target=target, options=vars(options))
    except Exception as error:
        raise RuntimeError(f"{variant.kernel} {variant.name} does not compile for sm_{variant.arch}") from error


def _source(variant: Variant) -> tuple[Any, Any, Any]:
    """(source, target, options) as Triton derives them from a launch."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    kernel, _, arguments = variant.launch
    target = GPUTarget("cuda", variant.arch, 32)
    backend = make_backend(target)
    bound = create_function_from_signature(kernel.signature, kernel.params, backend)(**arguments)
    options, *parts = kernel._pack_args(backend, arguments, *bound)
    return ASTSource(kernel, *parts), target, options


def kept() -> Path:
    """Folder of kept measurements."""
    return cache() / "kernel_resources"


def measure(variant: Variant) -> Resources:
    """Resources of a variant; compiles it unless those of the same source and settings are `kept`."""
    file = kept() / f"{_digest(variant)}.json"
    if file.exists():
        return Resources(**json.loads(file.read_text()))
    found = _measured(variant)
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(asdict(found)))
    unfinished.replace(file)
    return found


def _digest(variant: Variant) -> str:
    """Digest of everything that a compilation depends on."""
    import triton

    settings = {name: value for name, value in os.environ.items() if name.startswith("TRITON_")}
    settings.pop("TRITON_CACHE_DIR", None)
    source, _, options = _source(variant)
    what = variant.kernel, variant.name, variant.arch, variant.matrix_instruction
    # Triton's hash covers the kernel, all functions it calls and its constants: see triton_kernels/cache_keys.py.
    whole = triton.__version__, source.hash(), options.hash(), what, sorted(settings.items()), _measuring_code()
    return hashlib.sha256(repr(whole).encode()).hexdigest()


@functools.cache
def _measuring_code() -> str:
    """Digest of the measuring code."""
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in (__file__, sass.__file__))).hexdigest()


def _measured(variant: Variant) -> Resources:
    kernel = compiled(variant)
    instruction = re.search(r"(?:wgmma\.mma_async|tcgen05\.mma|mma\.sync)[\w.:]*", kernel.asm["ptx"])
    return Resources(
        variant.kernel,
        variant.name,
        f"sm_{variant.arch}",
        shared_bytes=kernel.metadata.shared,
        warps=kernel.metadata.num_warps,
        tensor_memory_columns=getattr(kernel.metadata, "tmem_size", None) or 0,
        instruction=instruction.group(0) if instruction else "",
        needs_matrix_instruction=variant.matrix_instruction,
        **(used := _registers_and_spills(kernel.asm["cubin"])),
        hot_spills=sass.spills_in_hot_loops(kernel.asm["cubin"]) if used["spilled_bytes"] else 0,
    )


def measure_all(archs: Sequence[int]) -> list[Resources | str]:
    """Resources of all variants, in order; the text of the error for those that do not compile.

    Compiles in one new process per core: a process that interprets kernels cannot compile them, and ptxas uses one
    core. Compiled code is written to a temporary folder, since it is large and never run.
    """
    os.environ.pop("TRITON_INTERPRET", None)
    count, context = len(all_variants(archs)), multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="fused_tp_kernels_") as folder,
        mock.patch.dict(os.environ, TRITON_CACHE_DIR=folder),
        concurrent.futures.ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as pool,
    ):
        return list(pool.map(_measure_number, range(count), itertools.repeat(archs), chunksize=4))


def _measure_number(index: int, archs: Sequence[int]) -> Resources | str:
    return measure_or_say(all_variants(archs)[index])


def complaints_of(results: Sequence[Resources | str]) -> list[str]:
    """Errors of variants that do not compile, and problems of the others."""
    wrong = (one if isinstance(one, str) else one.complaint for one in results)
    return [one for one in wrong if one]


def measure_or_say(variant: Variant) -> Resources | str:
    """Return the result of `measure`, or the text of its error."""
    try:
        return measure(variant)
    except RuntimeError as error:
        return f"{error}: {str(error.__cause__)[:500]}"


def _registers_and_spills(cubin: bytes) -> dict[str, int]:
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing about registers: {usage[:200]}")
    registers, stack, local = map(int, found.groups())
    return {"registers": registers, "spilled_bytes": stack + local}


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Suppress stdout and stderr: a failing compiler pass prints all of its code from C++; its error says enough."""
    with open(os.devnull, "wb") as nothing, contextlib.redirect_stdout(io.StringIO()):
        stderr = os.dup(2)
        os.dup2(nothing.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


# -- csrc/cuda ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CudaMeasured:
    """Resources of all functions, and the compilers' warnings."""

    toolkit: str
    library: Path
    resources: list[Resources]
    warnings: list[str]


def measure_cuda(library: Path) -> CudaMeasured:
    """Compile csrc/cuda into `library`, as setup.py does and with the same objects; reuse those that are up to date.

    Raises:
        NotBuiltError: there is no nvcc, or something does not compile.
    """
    builder = native_build()
    build = builder.CudaBuild()
    build.run(library, builder.cuda_folder(), threads=1)
    resources, warnings = [], []
    for log in build.logs(builder.cuda_folder()):
        text = log.read_text()
        resources += parse(log.name.removesuffix(".o.log"), text)
        warnings += [line for line in text.splitlines() if re.search(r"\bwarning\b", line, re.I)]
    return CudaMeasured(build.version, library, resources, warnings)


def parse(source: str, log: str) -> list[Resources]:
    """Parse the output of `ptxas -v`, which has separate lines for the architecture, frame and registers of a function.
    A stack frame counts as spilled."""
    found = []
    arch, name, spilled = "", "", 0
    if shutil.which("c++filt"):
        log = subprocess.run(["c++filt"], input=log, capture_output=True, text=True, check=True).stdout
    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function '.*' for '(\w+)'", line):
            arch = entry[1]
        elif properties := re.search(r"Function properties for '?([^']+)", line):
            name = short(properties[1])
        elif frame := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spilled = max(int(frame[1]), int(frame[2]) + int(frame[3]))
        elif used := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            found.append(Resources(source, name, arch, int(used[1]), int(shared[1]) if shared else 0, spilled))
    return sorted(found, key=lambda one: (len(one.arch), one.arch, one.name))


def short(name: str) -> str:
    """Shorten `void ns::kernel<ns::F32, (ns::Way)1>(ns::Args)` to `kernel<F32, 1>`."""
    name = re.sub(r"^void |\b\w+::|\((?:\w+::)*\w+\)(?=\d)|\(anonymous namespace\)::", "", name)
    depth = 0
    for index, letter in enumerate(name):
        if letter == "(" and depth == 0:
            return name[:index]
        depth += (letter == "<") - (letter == ">")
    return name


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the tables; return 1 and print the problems if a kernel spills, does not compile or fails a requirement."""
    import triton

    parser = argparse.ArgumentParser(prog="python -m tests.compile.resources", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), metavar="DIR")
    parser.add_argument("--keep", nargs="+", type=int, metavar="ARCH", help="compile for these, and say what is wrong")
    options = parser.parse_args(arguments)
    if options.keep:
        results = {arch: measure_all((arch,)) for arch in options.keep}
        print(json.dumps({arch: [len(of), complaints_of(of)] for arch, of in results.items()}))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    results = measure_all(ARCHS)
    found = [one for one in results if isinstance(one, Resources)]
    text = table("the Triton kernels", f"Triton {triton.__version__}", found)
    (options.out / "kernel_resources.md").write_text(text)
    complaints = complaints_of(results)
    try:
        with tempfile.TemporaryDirectory() as folder:
            measured = measure_cuda(Path(folder, "_cuda.so"))
    except native_build().NotBuiltError as error:
        complaints.append(str(error))
    else:
        complaints += [*measured.warnings, *complaints_of(measured.resources)]
        text = table("the device kernels of csrc/cuda", f"nvcc {measured.toolkit}", measured.resources)
        (options.out / "cuda_resources.md").write_text(text)
    print(*complaints, sep="\n", file=sys.stderr)
    print(f"{len(found)} of {len(results)} variants compiled, {len(complaints)} complaints; {options.out}")
    return int(any(complaints))


if __name__ == "__main__":
    raise SystemExit(main())
