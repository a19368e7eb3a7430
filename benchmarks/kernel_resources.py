"""Registers, shared memory, spills and matrix instruction of every kernel that ships, for GPUs that need not be there.

    python -m benchmarks.kernel_resources --out benchmarks/results/kernel_resources.md

writes that table and, beside it, the same as JSON lines (.jsonl). It compiles, it does not run: times are measured by
`benchmarks.gpu`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import datetime
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .kernel_variants import FAMILIES, Variant

# What multiplies matrices on each architecture, in PTX.
MATRIX_INSTRUCTIONS = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
HEADER = "| variant | registers | warps | shared memory, KiB | tensor memory, columns | spills, bytes | multiplies by |"


@dataclass(frozen=True)
class Resources:
    """What one variant needs; registers are per thread, bytes of shared memory per program, stack bytes per thread."""

    kernel: str
    name: str
    arch: int
    registers: int
    shared_bytes: int
    stack_bytes: int  # where spilled registers go
    tensor_memory_columns: int
    warps: int  # those of warp specialization included
    instruction: str  # that multiplies matrices: "" is the fused multiply-add of CUDA cores
    needs_matrix_instruction: bool

    @property
    def complaint(self) -> str:
        """What is wrong with it, or ""."""
        wrong = []
        if self.stack_bytes:
            wrong.append(f"spills {self.stack_bytes} bytes a thread")
        if self.needs_matrix_instruction and not self.instruction.startswith(MATRIX_INSTRUCTIONS[self.arch]):
            wrong.append(f"multiplies by {self.instruction or 'fma'}, not by {MATRIX_INSTRUCTIONS[self.arch]}")
        limit = {80: 163, 90: 227, 100: 227}[self.arch] * 1024
        if self.shared_bytes > limit:
            wrong.append(f"needs {self.shared_bytes} bytes of shared memory, of which there are {limit}")
        return f"{self.kernel} {self.name} on sm_{self.arch} " + " and ".join(wrong) if wrong else ""


def compiled(variant: Variant) -> Any:
    """Triton's compiled kernel of a variant, with its code in `asm`. Raises what Triton raises, with the variant named.

    A process that interprets kernels cannot do it.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    source = _source(variant)
    try:
        with _silence():
            return triton.compile(source, target=GPUTarget("cuda", variant.arch, 32), options=dict(variant.options))
    except Exception as error:
        raise RuntimeError(f"{variant.kernel} {variant.name} does not compile for sm_{variant.arch}") from error


def _source(variant: Variant) -> Any:
    from triton.compiler import ASTSource

    names: list[str] = variant.function.arg_names
    wrong = set(names) ^ set(variant.arguments)
    if wrong:
        raise ValueError(f"{variant.kernel} {variant.name}: arguments {sorted(wrong)} are not those of the kernel.")
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}

    def typed(path: tuple[int, ...], given: Any, constant: bool, odd: bool) -> Any:
        """The argument's part of the signature; tuples have parts of their own."""
        if not constant and isinstance(given, tuple):
            parts = [typed((*path, index), part, False, False) for index, part in enumerate(given)]
            return type(given)(*parts) if hasattr(given, "_fields") else tuple(parts)
        if constant or not isinstance(given, str):
            constants[path] = given
            return "constexpr"
        if given[0] in "*i" and not odd:
            attributes[path] = [["tt.divisibility", 16]]
        return given

    for index, parameter in enumerate(variant.function.params):
        odd = bool(parameter.do_not_specialize)
        name = parameter.name
        signature[name] = typed((index,), variant.arguments[name], parameter.is_constexpr, odd)
    return ASTSource(fn=variant.function, signature=signature, constexprs=constants, attrs=attributes)


def measure(variant: Variant, kept: Path | None = None) -> Resources:
    """Compiles a variant and looks at what came out. Raises as `compiled` does.

    Args:
        kept: folder where what came out is left, and looked for first: the same source compiles to the same code.
    """
    if kept is None:
        return _measured(variant)
    file = kept / f"{_digest(variant)}.json"
    if file.exists():
        return Resources(**json.loads(file.read_text()))
    found = _measured(variant)
    kept.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(asdict(found)))
    unfinished.replace(file)
    return found


def _digest(variant: Variant) -> str:
    """Of all that a compilation depends on."""
    import triton

    settings = {name: value for name, value in os.environ.items() if name.startswith("TRITON_")}
    settings.pop("TRITON_CACHE_DIR", None)
    whole = (triton.__version__, _source(variant).hash(), variant.kernel, variant.name, variant.arch)
    more = (sorted(variant.options.items()), variant.matrix_instruction, sorted(settings.items()))
    return hashlib.sha256(repr((whole, more)).encode()).hexdigest()


def _measured(variant: Variant) -> Resources:
    kernel = compiled(variant)
    registers, stack = _registers_and_stack(kernel.asm["cubin"])
    found = re.search(r"(?:wgmma\.mma_async|tcgen05\.mma|mma\.sync)[\w.:]*", kernel.asm["ptx"])
    return Resources(
        variant.kernel,
        variant.name,
        variant.arch,
        registers,
        kernel.metadata.shared,
        stack,
        getattr(kernel.metadata, "tmem_size", None) or 0,
        kernel.metadata.num_warps,
        found.group(0) if found else "",
        variant.matrix_instruction,
    )


def measure_all(
    families: Sequence[str] = tuple(FAMILIES),
    archs: Sequence[int] = (80, 90, 100),
    processes: int | None = None,
    kept: Path | None = None,
) -> list[Resources | str]:
    """Resources of all variants, in order; the error's text where one did not compile. `kept`: as for `measure`.

    In new processes, as many as there are cores: a process that interprets kernels cannot compile them, and ptxas
    takes one core. Compiled code goes to a temporary folder, since it is large and nobody runs it.
    """
    processes = processes or len(os.sched_getaffinity(0))
    share = 4  # parts per process and family, so that all end at about the same time
    work = [(family, arch, part, share, kept) for family in families for arch in archs for part in range(share)]
    with tempfile.TemporaryDirectory(prefix="fused_tp_kernels_") as folder, _environment(folder):
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
            parts = list(pool.map(_measure_part, *zip(*work, strict=True)))
    interleaved: list[Resources | str] = []
    for start in range(0, len(parts), share):
        group = parts[start : start + share]
        total = sum(len(part) for part in group)
        interleaved += [group[index % share][index // share] for index in range(total)]
    return interleaved


def _measure_part(family: str, arch: int, part: int, parts: int, kept: Path | None) -> list[Resources | str]:
    results: list[Resources | str] = []
    for variant in list(FAMILIES[family](arch))[part::parts]:
        try:
            results.append(measure(variant, kept))
        except RuntimeError as error:
            results.append(f"{error}: {str(error.__cause__)[:500]}")
    return results


def _registers_and_stack(cubin: bytes) -> tuple[int, int]:
    import triton

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        tool = triton.knobs.nvidia.cuobjdump.path
        command = [tool, "--dump-resource-usage", str(file)]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing about registers: {usage[:200]}")
    registers, stack, local = (int(number) for number in found.groups())
    return registers, stack + local


@contextlib.contextmanager
def _environment(folder: str) -> Iterator[None]:
    """What the compiling processes inherit: a cache of their own, and no interpreter."""
    before = {name: os.environ.get(name) for name in ("TRITON_CACHE_DIR", "TRITON_INTERPRET")}
    os.environ["TRITON_CACHE_DIR"] = folder
    os.environ.pop("TRITON_INTERPRET", None)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """A pass that fails prints all of its code to stderr, from C++; what it raises says enough."""
    with open(os.devnull, "wb") as nothing, contextlib.redirect_stdout(io.StringIO()):
        stderr = os.dup(2)
        os.dup2(nothing.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exits with 1 where something did not compile or is not as it should be, and says what."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernel_resources", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/kernel_resources.md"))
    path = parser.parse_args(arguments).out
    results = measure_all()
    found = [result for result in results if isinstance(result, Resources)]
    complaints = [result if isinstance(result, str) else result.complaint for result in results]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table(found))
    path.with_suffix(".jsonl").write_text("".join(json.dumps(asdict(one)) + "\n" for one in found))
    for complaint in filter(None, complaints):
        print(complaint, file=sys.stderr)
    print(f"{len(found)} of {len(results)} variants compiled; {path}")
    return int(any(complaints))


def table(found: Sequence[Any]) -> str:
    """Markdown, a section for each kernel and architecture."""
    import triton

    today = datetime.datetime.now(datetime.timezone.utc).date()
    lines = [
        "# What the kernels need of a GPU",
        "",
        f"Compiled, not run, by Triton {triton.__version__} on {today}: `python -m benchmarks.kernel_resources`.",
        "Registers are per thread (of 255), shared memory per program (of 163 KiB on sm_80, 227 KiB on the others).",
        "Layouts as BLAS names them: `nt` x [M, K] and weight [N, K] as they lie, `nn` weight transposed (dX), `tn`",
        "both (dW). `fma`: CUDA cores, which is what full fp32 precision takes.",
    ]
    for (kernel, arch), group in itertools.groupby(found, key=lambda one: (one.kernel, one.arch)):
        lines += ["", f"## {kernel}, sm_{arch}", "", HEADER, "|---" + "|--:" * 5 + "|---|"]
        lines += [_row(one) for one in group]
    return "\n".join(lines) + "\n"


def _row(one: Any) -> str:
    # Shapes and types; ".sync.aligned" and the like are the same for all.
    instruction = re.sub(r"\.(sync|aligned|row|col|cta_group::1)(?=\.|$)", "", one.instruction) or "fma"
    cells = [one.name, one.registers, one.warps, f"{one.shared_bytes / 1024:.1f}", one.tensor_memory_columns]
    cells += [one.stack_bytes, f"`{instruction}`"]
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    raise SystemExit(main())
