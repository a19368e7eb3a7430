"""What a sequence costs in memory on each rank: `python -m benchmarks.attention_memory [--tokens N ...]`.

Forward and backward of causal zigzag attention in bf16, inputs and gradients included; W ranks as processes of one
thread, new ones for each figure. A rank's figure is what it adds to the host at its peak: private pages (the peak that
Linux counts, VmHWM) above those it had before, and the pages of its own shared memory. A peer's memory that it reads in
place is the peer's; it is mapped and touched beforehand, so that its share of VmHWM is known. malloc gives back at once
what is freed (M_MMAP_THRESHOLD), for a figure of what is used and not of what a heap keeps. Each figure is a line that
is added to attention_memory.jsonl.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .ranks import RankContext, Ranks
from .results import now, this_machine, versions

HEADS, HEAD_DIM, DTYPE = 2, 64, torch.bfloat16
TOKENS, RANKS = (4096, 8192, 16384, 32768, 65536), (1, 2, 4)
WAYS = {"fused_tp, messages": "0", "fused_tp, shared memory": "1"}  # FUSED_TP_SHM
TORCH = {"torch, flash": SDPBackend.FLASH_ATTENTION, "torch, math": SDPBackend.MATH}
MOST_MATH_TOKENS = 8192  # whose scores take 2 GiB
SECONDS = 3600.0

_M_MMAP_THRESHOLD, _GIVEN_BACK_FROM = -3, 1 << 16  # of glibc's mallopt


@dataclass(frozen=True)
class Peak:
    """MiB of the rank that needs most, of `tokens` in all on `ranks` ranks."""

    way: str
    tokens: int
    ranks: int
    mib: float
    date: str


@dataclass(frozen=True)
class Setting:
    """What all figures of a run have in common."""

    heads: int = HEADS
    head_dim: int = HEAD_DIM

    def chunk_mib(self, tokens: int) -> float:
        """K and V of so many tokens."""
        return 2 * tokens * self.heads * self.head_dim * DTYPE.itemsize / 2**20


def measure(context: RankContext, way: str, tokens: int, setting: Setting) -> float:
    """MiB of this rank, in a process that has measured nothing yet; `tokens` in all."""
    if way in WAYS:
        os.environ["FUSED_TP_SHM"] = WAYS[way]
    return peak_mib(way, tokens, context.world_size, setting)


def peak_mib(way: str, tokens: int, world_size: int, setting: Setting) -> float:
    """The same; the world has `world_size` ranks, and FUSED_TP_SHM is set."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _GIVEN_BACK_FROM)

    def trim() -> None:
        gc.collect()
        libc.malloc_trim(0)

    _run(way, 64 * world_size, world_size, setting)  # whatever is made once
    trim()
    before = _kib("RssAnon") + _kib("RssFile")
    if way in WAYS:
        _touch_peers(tokens // world_size, world_size, setting)
    trim()
    shared = _kib("RssShmem")  # grows, if at all: so no part of a peak is missed
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    _run(way, tokens, world_size, setting)
    return (_kib("VmHWM") - shared - before + _own_shared_kib()) / 1024


def _kib(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise RuntimeError(f"This system does not tell {name} in /proc/self/status.")


def _own_shared_kib() -> int:
    """Pages of the shared memory that this process has made; of peers' it holds no descriptors."""
    blocks = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            if "memfd:fused_tp" in os.readlink(descriptor):
                blocks += descriptor.stat().st_blocks
        except OSError:  # that of the directory itself, which is closed by now
            continue
    return blocks // 2


def _inputs(tokens: int, setting: Setting) -> list[Tensor]:
    """q, k, v, as leaves, and the gradient of the output."""
    shape = 1, tokens, setting.heads, setting.head_dim
    return [torch.full(shape, 0.01 * i, dtype=DTYPE, requires_grad=i < 3) for i in range(4)]


def _run(way: str, tokens: int, world_size: int, setting: Setting) -> None:
    q, k, v, grad = _inputs(tokens // world_size, setting)
    if way in WAYS:
        from fused_tp import ring_attention

        out = ring_attention(q, k, v, group=None, causal=True)
    else:
        with sdpa_kernel(TORCH[way]):
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
            ).transpose(1, 2)
    torch.autograd.grad(out, (q, k, v), grad)


def _touch_peers(tokens: int, world_size: int, setting: Setting) -> None:
    """Few queries that look at all ranks' keys: every page that a ring reads of its peers is then mapped here."""
    from fused_tp import ring_attention

    (q, *_), (_, k, v, _) = _inputs(64, setting), _inputs(tokens, setting)
    out = ring_attention(q, k, v, group=None, seq_len_kv=tokens * world_size)
    torch.autograd.grad(out, (q, k, v), torch.ones_like(out))


def peaks(ways: Sequence[str], tokens: Sequence[int], ranks: Sequence[int], setting: Setting) -> Iterator[Peak]:
    """`tokens` on each rank: W ranks have a sequence W times as long. torch's are on one rank alone."""
    for length, world_size, way in itertools.product(tokens, sorted(ranks), ways):
        if way in TORCH and (world_size > 1 or (way == "torch, math" and length > MOST_MATH_TOKENS)):
            continue
        with Ranks(world_size) as processes:
            mib = max(processes.call(measure, way, length * world_size, setting, seconds=SECONDS))
        yield Peak(way, length * world_size, world_size, mib, now())


def limit(found: Sequence[Peak], peak: Peak, setting: Setting) -> float | None:
    """What one rank needs for as many tokens as each of `peak` has, and two chunks, which are under way in a ring."""
    length = peak.tokens // peak.ranks
    alone = [p.mib for p in found if (p.way, p.tokens, p.ranks) == (peak.way, length, 1)]
    return alone[0] + 2 * setting.chunk_mib(length) if alone and peak.ranks > 1 else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(prog="benchmarks.attention_memory", description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, metavar="N", help="on each rank")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, metavar="W")
    parser.add_argument("--ways", nargs="+", choices=[*WAYS, *TORCH], default=[*WAYS, *TORCH])
    parser.add_argument("--heads", type=int, default=HEADS, help=f"of {HEAD_DIM}")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), metavar="DIR")
    options = parser.parse_args(arguments)
    if sys.platform != "linux":
        print("benchmarks.attention_memory reads /proc, which only Linux has.", file=sys.stderr)
        return 2
    setting = Setting(heads=options.heads)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "attention_memory.jsonl"
    source = {"machine": asdict(this_machine()), "versions": versions(), "setting": asdict(setting)}
    found: list[Peak] = []
    for peak in peaks(options.ways, options.tokens, options.ranks, setting):
        found.append(peak)
        with path.open("a") as results:
            results.write(json.dumps({**asdict(peak), **source}) + "\n")
        bar = limit(found, peak, setting)
        told = "" if bar is None else f"; one rank of {peak.tokens // peak.ranks}, and two chunks of K/V: {bar:.1f}"
        print(f"{peak.way}, {peak.tokens} tokens on {peak.ranks}: {peak.mib:.1f} MiB a rank{told}", flush=True)
    print(f"Results: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
