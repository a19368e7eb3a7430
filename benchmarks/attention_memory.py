"""Memory of a sequence on each rank: `python -m benchmarks.attention_memory [--tokens N ...]`.

Forward and backward of causal zigzag attention in bf16, inputs and gradients included. The W ranks are processes of one
thread, started anew for each figure. A rank's figure is the memory that it adds to the host at its peak: private pages
(VmHWM, the peak that Linux counts) above those before, and the pages of its own shared memory. A peer's memory that a
rank reads in place counts for the peer; the rank maps and touches it beforehand, so that its share of VmHWM is known.
malloc returns freed memory at once (M_MMAP_THRESHOLD), so that the figure shows memory in use and not memory that a
heap retains. Each figure is appended as a line to attention_memory.jsonl.
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
TOKENS_PER_RANK, RANK_COUNTS = (4096, 8192, 16384, 32768, 65536), (1, 2, 4)
SHM_BY_CONFIG = {"fused_tp, messages": "0", "fused_tp, shared memory": "1"}  # values of the setting FUSED_TP_SHM
SDPA_BACKENDS = {"torch, flash": SDPBackend.FLASH_ATTENTION, "torch, math": SDPBackend.MATH}
MAX_MATH_TOKENS = 8192  # the scores of this many tokens take 2 GiB
TIMEOUT_SECONDS = 3600.0

_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES = -3, 1 << 16  # option of glibc's mallopt, and its value in bytes


@dataclass(frozen=True)
class Peak:
    """Peak memory in MiB of the rank that needs most, for `tokens` tokens in total on `ranks` ranks."""

    way: str
    tokens: int
    ranks: int
    mib: float
    date: str


@dataclass(frozen=True)
class RunSetting:
    """Sizes that all figures of a run share."""

    heads: int = HEADS
    head_dim: int = HEAD_DIM

    def kv_mib(self, tokens: int) -> float:
        """MiB of K and V of `tokens` tokens."""
        return 2 * tokens * self.heads * self.head_dim * DTYPE.itemsize / 2**20


def measure(context: RankContext, config_name: str, tokens: int, setting: RunSetting) -> float:
    """Measure the MiB of this rank for `tokens` tokens in total. The process must not have measured anything before."""
    if config_name in SHM_BY_CONFIG:
        os.environ["FUSED_TP_SHM"] = SHM_BY_CONFIG[config_name]
    return measure_peak_mib(config_name, tokens, context.world_size, setting)


def measure_peak_mib(config_name: str, tokens: int, world_size: int, setting: RunSetting) -> float:
    """Return by how many MiB attention raises this rank's peak memory; FUSED_TP_SHM must be set already."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)

    def trim() -> None:
        gc.collect()
        libc.malloc_trim(0)

    _run_attention(config_name, 64 * world_size, world_size, setting)  # for allocations that happen only once
    trim()
    private_kib = _status_kib("RssAnon") + _status_kib("RssFile")
    if config_name in SHM_BY_CONFIG:
        _touch_peers(tokens // world_size, world_size, setting)
    trim()
    shared_kib = _status_kib("RssShmem")  # only grows, so this earlier value cannot hide part of the peak
    Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM
    _run_attention(config_name, tokens, world_size, setting)
    return (_status_kib("VmHWM") - shared_kib - private_kib + _own_shared_kib()) / 1024


def _status_kib(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status lacks {name}; this benchmark needs a Linux kernel that reports it.")


def _own_shared_kib() -> int:
    """Return the KiB of the shared memory that this process has created; its peers' memory is not open here."""
    num_blocks = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            if "memfd:fused_tp" in os.readlink(descriptor):
                num_blocks += descriptor.stat().st_blocks
        except OSError:  # the descriptor of the directory itself, which is closed by now
            continue
    return num_blocks // 2


def _make_inputs(tokens: int, setting: RunSetting) -> list[Tensor]:
    """Create q, k, v as leaves, and the gradient of the output."""
    shape = 1, tokens, setting.heads, setting.head_dim
    return [torch.full(shape, 0.01 * i, dtype=DTYPE, requires_grad=i < 3) for i in range(4)]


def _run_attention(config_name: str, tokens: int, world_size: int, setting: RunSetting) -> None:
    q, k, v, grad = _make_inputs(tokens // world_size, setting)
    if config_name in SHM_BY_CONFIG:
        from fused_tp import ring_attention

        out = ring_attention(q, k, v, group=None, causal=True)
    else:
        with sdpa_kernel(SDPA_BACKENDS[config_name]):
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
            ).transpose(1, 2)
    torch.autograd.grad(out, (q, k, v), grad)


def _touch_peers(tokens: int, world_size: int, setting: RunSetting) -> None:
    """Attend from a few queries to all ranks' keys, which maps every page of peers that a ring reads."""
    from fused_tp import ring_attention

    (q, *_), (_, k, v, _) = _make_inputs(64, setting), _make_inputs(tokens, setting)
    out = ring_attention(q, k, v, group=None, seq_len_kv=tokens * world_size)
    torch.autograd.grad(out, (q, k, v), torch.ones_like(out))


def measure_peaks(
    config_names: Sequence[str], tokens: Sequence[int], ranks: Sequence[int], setting: RunSetting
) -> Iterator[Peak]:
    """Yield the peak memory of each configuration, for each number of tokens per rank and each number of ranks.

    W ranks hold a sequence W times as long. torch runs on one rank only.
    """
    for length, world_size, config_name in itertools.product(tokens, sorted(ranks), config_names):
        if config_name in SDPA_BACKENDS and (
            world_size > 1 or (config_name == "torch, math" and length > MAX_MATH_TOKENS)
        ):
            continue
        with Ranks(world_size) as processes:
            mib = max(processes.call(measure, config_name, length * world_size, setting, seconds=TIMEOUT_SECONDS))
        yield Peak(config_name, length * world_size, world_size, mib, now())


def ring_limit_mib(peaks: Sequence[Peak], peak: Peak, setting: RunSetting) -> float | None:
    """Return the MiB expected on each rank of `peak`: those of one rank with as many tokens, plus two chunks of K/V."""
    length = peak.tokens // peak.ranks
    one_rank_mib = [p.mib for p in peaks if (p.way, p.tokens, p.ranks) == (peak.way, length, 1)]
    return one_rank_mib[0] + 2 * setting.kv_mib(length) if one_rank_mib and peak.ranks > 1 else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the peaks, print them and store them."""
    parser = argparse.ArgumentParser(prog="benchmarks.attention_memory", description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS_PER_RANK, metavar="N", help="on each rank")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANK_COUNTS, metavar="W")
    parser.add_argument(
        "--ways", nargs="+", choices=[*SHM_BY_CONFIG, *SDPA_BACKENDS], default=[*SHM_BY_CONFIG, *SDPA_BACKENDS]
    )
    parser.add_argument("--heads", type=int, default=HEADS, help=f"number of heads, each of {HEAD_DIM} features")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), metavar="DIR")
    options = parser.parse_args(arguments)
    if sys.platform != "linux":
        print("benchmarks.attention_memory reads /proc, which only Linux has.", file=sys.stderr)
        return 2
    setting = RunSetting(heads=options.heads)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "attention_memory.jsonl"
    run_fields = {"machine": asdict(this_machine()), "versions": versions(), "setting": asdict(setting)}
    peaks: list[Peak] = []
    for peak in measure_peaks(options.ways, options.tokens, options.ranks, setting):
        peaks.append(peak)
        with path.open("a") as results:
            results.write(json.dumps({**asdict(peak), **run_fields}) + "\n")
        limit_mib = ring_limit_mib(peaks, peak, setting)
        limit_text = (
            ""
            if limit_mib is None
            else f" (expected: {limit_mib:.1f} = one rank with {peak.tokens // peak.ranks} tokens + two K/V chunks)"
        )
        print(
            f"{peak.way}, {peak.tokens} tokens on {peak.ranks} ranks: {peak.mib:.1f} MiB per rank{limit_text}",
            flush=True,
        )
    print(f"Results: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
