"""What a sequence costs in memory on each rank: `python -m benchmarks.attention_memory [--tokens N ...] [--ranks W]`.

Forward and backward of causal zigzag attention in bf16; W ranks as processes of one thread. The peak is that of the
process (VmHWM, which Linux counts), above what it had before it made its inputs. Ranks that read their peers' keys in
place count the pages they read, too, so the one-sided ring shows more than it allocates. Writes attention_memory.json
and attention_memory.png.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .machine import this_machine, versions
from .ranks import RankContext, Ranks

HEADS, HEAD_DIM, DTYPE = 2, 64, torch.bfloat16
TOKENS, RANKS = (4096, 8192, 16384, 32768), (1, 2, 4)
TORCH = "torch, whole"
WAYS = {"fused_tp, messages": "0", "fused_tp, shared memory": "1"}  # FUSED_TP_SHM
SECONDS = 1200.0


@dataclass(frozen=True)
class Peak:
    """MiB of the rank that needs most, of `tokens` in all on `ranks` ranks."""

    way: str
    tokens: int
    ranks: int
    mib: float


def chunk_mib(tokens: int) -> float:
    """K and V of so many tokens."""
    return 2 * tokens * HEADS * HEAD_DIM * DTYPE.itemsize / 2**20


def measure(context: RankContext, way: str, tokens: int) -> float:
    """MiB of this rank."""
    if way != TORCH:
        os.environ["FUSED_TP_SHM"] = WAYS[way]
    run = _by_torch if way == TORCH else _by_ring
    run(context, 64 * context.world_size)  # whatever is made once
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    run(context, tokens)
    return (_status("VmHWM") - before) / 1024


def _status(name: str) -> int:
    """KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise RuntimeError(f"This system does not tell {name} in /proc/self/status.")


def _inputs(tokens: int) -> list[Tensor]:
    """q, k, v, as leaves, and the gradient of the output."""
    return [torch.full((1, tokens, HEADS, HEAD_DIM), 0.01 * i, dtype=DTYPE, requires_grad=i < 3) for i in range(4)]


def _by_ring(context: RankContext, tokens: int) -> None:
    from fused_tp import ring_attention

    q, k, v, grad = _inputs(tokens // context.world_size)
    torch.autograd.grad(ring_attention(q, k, v, group=None, causal=True), (q, k, v), grad)


def _by_torch(context: RankContext, tokens: int) -> None:
    q, k, v, grad = _inputs(tokens)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
    torch.autograd.grad(out.transpose(1, 2), (q, k, v), grad)


def peaks(tokens: Sequence[int], ranks: Sequence[int]) -> list[Peak]:
    """Of all ways, `tokens` on each rank: W ranks have a sequence W times as long."""
    found = []
    for world_size in ranks:
        with Ranks(world_size) as processes:
            for length in tokens:
                for way in [TORCH, *WAYS] if world_size == 1 else [*WAYS]:
                    all_tokens = length * world_size
                    mib = max(processes.call(measure, way, all_tokens, seconds=SECONDS))
                    found.append(Peak(way, all_tokens, world_size, mib))
                    print(f"{way}, {all_tokens} tokens on {world_size}: {mib:.0f} MiB a rank", flush=True)
    return found


def picture(found: Sequence[Peak], path: Path) -> None:
    """Sequence against memory, a line for each way and number of ranks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axis = figure.subplots()
    for way, ranks in dict.fromkeys((peak.way, peak.ranks) for peak in found):
        line = [peak for peak in found if (peak.way, peak.ranks) == (way, ranks)]
        style = "--" if way == TORCH else "-" if way.endswith("messages") else ":"
        label = way if way == TORCH else f"{way}, W = {ranks}"
        axis.plot([p.tokens for p in line], [p.mib for p in line], style, marker="o", markersize=3, label=label)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xlabel("tokens of the whole sequence")
    axis.set_ylabel("MiB on each rank, peak")
    axis.set_title(f"Causal attention, forward and backward: {HEADS} heads of {HEAD_DIM}, bf16", fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(prog="benchmarks.attention_memory", description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, metavar="N", help="on each rank")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, metavar="W")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), metavar="DIR")
    options = parser.parse_args(arguments)
    if sys.platform != "linux":
        print("benchmarks.attention_memory reads /proc, which only Linux has.", file=sys.stderr)
        return 2
    found = peaks(options.tokens, options.ranks)
    options.out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": asdict(this_machine()),
        "versions": versions(),
        "peaks": [asdict(peak) for peak in found],
    }
    path = options.out / "attention_memory.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    picture(found, path.with_suffix(".png"))
    print(f"Results: {path} and {path.with_suffix('.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
