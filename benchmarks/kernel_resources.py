"""Registers, shared memory, spills and matrix instruction of every kernel that ships, for GPUs that need not be there.

    python -m benchmarks.kernel_resources --out benchmarks/results/kernel_resources.md

writes that table and, beside it, the same as JSON lines (.jsonl). It compiles, it does not run: times are measured by
`benchmarks.gpu`.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fused_tp.triton_kernels.resources import Resources, measure_all

HEADER = "| variant | registers | warps | shared memory, KiB | tensor memory, columns | spills, bytes | multiplies by |"


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
