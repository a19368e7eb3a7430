"""`fused-tp explain`: print the schedule that an op would use, and the reason.

Example:
    $ fused-tp explain matmul_all_reduce 1x2048 4096x2048 --dtype bfloat16 --ranks 4
    $ fused-tp explain all_gather_matmul 512x4096 3584x4096 --transport nccl --arch sm_90
    $ fused-tp explain ring_attention 1x4096x32x128 1x4096x8x128 1x4096x8x128 --ranks 8
    $ fused-tp explain all_gather 2x512x4096 --dim 1
"""

from __future__ import annotations

import argparse
import math
import sys

import torch

from fused_tp.ops.explain import explain_hypothetical, tensor_argument_names

DTYPES = ("float16", "bfloat16", "float32", "float64")


def _parse_shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(n) for n in text.lower().split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape; write it like 8x1024x4096") from None
    if math.prod(max(1, n) for n in shape) >= 2**60:
        raise argparse.ArgumentTypeError(f"{text} has more elements than a tensor can have")
    return shape


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `fused-tp explain`."""
    op_lines = "\n".join(f"  {op:28} {', '.join(names)}" for op, names in tensor_argument_names().items())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        f"ops, and the tensors whose shapes they take:\n{op_lines}\n\n"
        "x and partial are [..., features], weight is [out, in], q, k and v are [batch, tokens, heads, head_dim].\n"
        "Shapes are local shapes; all ranks are assumed to have equal ones."
    )
    parser.add_argument("op", metavar="OP", help="name of an op listed below, such as matmul_all_reduce")
    parser.add_argument(
        "shapes", nargs="+", type=_parse_shape, metavar="SHAPE", help="local shape of a tensor, such as 1x2048"
    )
    parser.add_argument("--dim", type=int, help="dim that all_gather or reduce_scatter gathers or scatters (default 0)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--ranks", type=int, default=2, help="size of the group (default 2)")
    parser.add_argument("--transport", help="shm, gloo, nccl, ... (default shm, for GPUs nccl)")
    parser.add_argument("--arch", default="cpu", help="cpu, sm_90, ... (default cpu)")


def main(arguments: argparse.Namespace) -> int:
    """Print the explanation; exit code 2 for invalid arguments."""
    try:
        if arguments.ranks < 1:
            raise ValueError(f"--ranks must be at least 1, got {arguments.ranks}.")
        if arguments.arch != "cpu" and not arguments.arch.startswith("sm_"):
            raise ValueError(f"--arch must be cpu, or sm_80, sm_90, ... for GPUs, got {arguments.arch!r}.")
        explanation = explain_hypothetical(
            arguments.op,
            *arguments.shapes,
            dtype=getattr(torch, arguments.dtype),
            world_size=arguments.ranks,
            transport=arguments.transport or ("shm" if arguments.arch == "cpu" else "nccl"),
            arch=arguments.arch,
            dim=arguments.dim,
        )
    except ValueError as error:
        print(f"fused-tp explain: {error}", file=sys.stderr)
        return 2
    print(explanation)
    return 0
