"""Run one case under a profiler, on the ranks that torchrun starts; `benchmarks/profile.sh` calls it.

    torchrun --nproc-per-node 2 -m benchmarks.profile_case CASE [--trace DIR] [--steps 5] [--warmup 3] ...
    python -m benchmarks.profile_case --merge OUT FILE [FILE ...]      # one Chrome trace of those of several ranks

With --trace every rank writes a Chrome trace of its steps. Otherwise cudaProfilerStart and -Stop enclose the steps, for
`nsys --capture-range=cudaProfilerApi`, and on rank 0 also the NVTX range "profiled", for `ncu`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import fused_tp

from .case import DTYPES

Step = Callable[[], object]
MakeLeaf = Callable[..., Tensor]  # make_leaf(*shape): random numbers that require grad, different on each rank


def matmul_step(name: str, make_leaf: MakeLeaf, tokens: int, hidden: int, size: int) -> Step:
    """Forward and backward of one op, between the features of a model and those of its MLP."""
    inner = 4 * hidden // size
    shapes = ((tokens, inner), (hidden, inner))
    if name == "all_gather_matmul":
        shapes = ((tokens // size, hidden), (inner, hidden))
    x, w = (make_leaf(*shape) for shape in shapes)
    op = getattr(fused_tp, name)
    return lambda: op(x, w, group=None).sum().backward()


def ring_attention_step(make_leaf: MakeLeaf, tokens: int, hidden: int, size: int) -> Step:
    q, k, v = (make_leaf(1, tokens // size, max(1, hidden // 64), 64) for _ in range(3))
    return lambda: fused_tp.ring_attention(q, k, v, group=None, causal=True).sum().backward()


def mlp_step(make_leaf: MakeLeaf, tokens: int, hidden: int, size: int) -> Step:
    """Forward and backward of a gated MLP under sequence parallelism."""
    inner = 4 * hidden // size
    x_shard, gate, up = make_leaf(tokens // size, hidden), make_leaf(inner, hidden), make_leaf(inner, hidden)
    down = make_leaf(hidden, inner)

    def step() -> None:
        gated, wide = fused_tp.all_gather_matmul(x_shard, [gate, up], group=None)
        fused_tp.matmul_reduce_scatter(F.silu(gated) * wide, down, group=None).sum().backward()

    return step


def decode_step(make_leaf: MakeLeaf, tokens: int, hidden: int, size: int) -> Step:
    """Row-parallel matmul and norm for one token of each of 16 sequences."""
    x, w = make_leaf(16, 4 * hidden // size), make_leaf(hidden, 4 * hidden // size)
    residual, norm_weight = make_leaf(16, hidden), make_leaf(hidden)

    @torch.no_grad()
    def step() -> object:
        return fused_tp.matmul_all_reduce_rms_norm(x, w, residual, norm_weight, 1e-6, group=None)

    return step


CASES: dict[str, Callable[[MakeLeaf, int, int, int], Step]] = {
    name: partial(matmul_step, name) for name in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
}
CASES |= {"ring_attention": ring_attention_step, "mlp": mlp_step, "decode": decode_step}


def run(options: argparse.Namespace) -> None:
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = _select_device(int(os.environ.get("LOCAL_RANK", 0)))
    if world_size > 1:
        # Ranks that share a GPU use gloo, since NCCL rejects them.
        is_gpu_shared = device.type == "cuda" and world_size > torch.cuda.device_count()
        backend = "nccl" if device.type == "cuda" and not is_gpu_shared else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=options.seconds))
    random = torch.Generator(device).manual_seed(rank)

    def make_leaf(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=random, device=device, dtype=torch.float32)
        return (x / 8).to(DTYPES[options.dtype]).requires_grad_()

    step = CASES[options.case](make_leaf, options.tokens, options.hidden, world_size)
    for _ in range(options.warmup):
        step()
    _synchronize_ranks()
    with _profile_steps(options.trace, options.case, rank):
        for step_index in range(options.steps):
            with fused_tp.core.tracing.span("step", step_index):
                step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    _synchronize_ranks()
    if world_size > 1:
        dist.destroy_process_group()


def _select_device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _synchronize_ranks() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


@contextlib.contextmanager
def _profile_steps(folder: Path | None, case: str, rank: int) -> Iterator[None]:
    """Profile the steps in the block."""
    has_gpu = torch.cuda.is_available()
    if folder is not None:
        activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * has_gpu
        with torch.profiler.profile(activities=activities) as profile:
            yield
        folder.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(folder / f"{case}.rank{rank}.json"))
    elif has_gpu:
        nvtx_range = torch.cuda.nvtx.range("profiled") if rank == 0 else contextlib.nullcontext()
        with torch.cuda.profiler.profile(), nvtx_range:
            yield
    else:
        yield


def merge_traces(out: Path, files: Sequence[Path]) -> None:
    """Merge the Chrome traces of ranks of one host into one, on one clock, with processes named after their rank."""
    events: list[dict[str, Any]] = []
    first_trace: dict[str, Any] = {}
    processes: dict[tuple[int, object], int] = {}  # new process numbers, as all ranks number GPUs alike
    for rank, file in enumerate(files):
        trace = json.loads(file.read_text())
        first_trace = first_trace or trace
        # Times are in microseconds since a base that each trace states in nanoseconds.
        shift_us = (trace.get("baseTimeNanoseconds", 0) - first_trace.get("baseTimeNanoseconds", 0)) / 1e3
        for event in trace["traceEvents"]:
            if "pid" in event:
                event["pid"] = processes.setdefault((rank, event["pid"]), len(processes) + 1)
            if "ts" in event:
                event["ts"] += shift_us
            if "id" in event:
                event["id"] = f"{rank}.{event['id']}"  # arrows from launches to kernels
            if event.get("name") == "process_name":
                event["args"]["name"] = f"rank {rank}: {event['args']['name']}"
            if event.get("name") == "process_sort_index":
                event["args"]["sort_index"] = event["pid"]
            events.append(event)
    out.write_text(json.dumps({**first_trace, "traceEvents": events}))


def from_command_line(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.profile_case", description=__doc__)
    parser.add_argument("case", nargs="?", choices=sorted(CASES), help="case to run")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="for the traces of torch.profiler")
    parser.add_argument("--steps", type=int, default=5, help="profiled steps (5)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them (3)")
    has_gpu = torch.cuda.is_available()
    tokens, hidden = (4096, 4096) if has_gpu else (256, 512)
    parser.add_argument("--tokens", type=int, default=tokens, help=f"of all ranks ({tokens})")
    parser.add_argument("--hidden", type=int, default=hidden, help=f"features of the model ({hidden})")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--seconds", type=float, default=300.0, help="longest wait of a rank for another (300)")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="OUT and the traces of the ranks")
    options = parser.parse_args(arguments)
    if options.merge:
        if len(options.merge) < 2:
            parser.error("--merge needs the file to write and at least one trace.")
        merge_traces(options.merge[0], options.merge[1:])
    elif options.case is None:
        parser.error(f"name a case: {', '.join(sorted(CASES))}.")
    else:
        run(options)
    return 0


if __name__ == "__main__":
    sys.exit(from_command_line())
