"""A gated MLP, sharded over all ranks, on fused kernels: prints the schedule and the errors of the result.

    torchrun --nproc-per-node 2 -m examples.fused_kernel                  # GPUs: one for each rank
    TRITON_INTERPRET=1 torchrun --nproc-per-node 2 -m examples.fused_kernel   # CPU: the same kernels, interpreted

In an installation, the module is `fused_tp.examples.fused_kernel`. Every rank also computes the whole MLP in float64,
and prints the errors of its shards of the result and of the input's gradient.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import fused_tp

TOKENS, HIDDEN, WIDE = 96, 64, 128


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def sharded_mlp(x_shard: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Apply the MLP to this rank's tokens, given its rows of gate and up and its columns of down."""
    gated, wide = fused_tp.all_gather_matmul(x_shard, [gate, up], group=None)
    return fused_tp.matmul_reduce_scatter(F.silu(gated) * wide, down, group=None)


def main() -> None:
    os.environ.setdefault("FUSED_TP_SCHEDULE", "fused_kernel")
    on_gpu = torch.cuda.is_available()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(0)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    x = torch.randn(TOKENS, HIDDEN, device=device).to(dtype)
    weights = [torch.randn(n, k, device=device).to(dtype) / k**0.5 for n, k in [(WIDE, HIDDEN)] * 2 + [(HIDDEN, WIDE)]]

    full_x = x.double().requires_grad_()
    full_y = mlp(full_x, *(w.double() for w in weights))
    full_y.square().sum().backward()

    x_shard = x.chunk(world)[rank].clone().requires_grad_()
    gate, up = (w.chunk(world)[rank] for w in weights[:2])
    y_shard = sharded_mlp(x_shard, gate, up, weights[2].chunk(world, dim=1)[rank])
    y_shard.square().sum().backward()

    assert full_x.grad is not None and x_shard.grad is not None
    explanation = fused_tp.explain("all_gather_matmul", x_shard.shape, gate.shape, dtype=dtype, device=device)
    if rank == 0:
        print(explanation)
    for name, shard, reference in (("y", y_shard, full_y), ("dx", x_shard.grad, full_x.grad)):
        expected = reference.chunk(world)[rank]
        error = (shard.double() - expected).norm() / expected.norm()
        print(f"rank {rank}: relative error of {name} {error.item():.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
