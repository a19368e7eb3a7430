"""Every kernel once, on small sizes: `compute-sanitizer --tool racecheck python tests/gpu/sanitizer_case.py`.

The tools may run one kernel at a time, so no rank can wait for another: each of the two ranks runs alone, its flags set
beforehand. That touches all the memory that a real call touches. What is computed is checked where a rank is alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.gpu_ranks import ALWAYS, normal, set_flags
from benchmarks.local_ranks import LocalRank, run_local
from fused_tp.triton_kernels.comm.gather import ARRIVED, ORDER, RUNS, GatherWorkspace
from fused_tp.triton_kernels.comm.workspace import Workspace
from fused_tp.triton_kernels.device import arch_of
from fused_tp.triton_kernels.gemm.all_gather_gemm import all_gather_gemm
from fused_tp.triton_kernels.gemm.all_gather_gemm import workspace_bytes as gather_bytes
from fused_tp.triton_kernels.gemm.gemm_all_reduce import gemm_all_reduce
from fused_tp.triton_kernels.gemm.gemm_all_reduce import workspace_bytes as sum_bytes
from fused_tp.triton_kernels.gemm.gemm_reduce_scatter import gemm_reduce_scatter
from fused_tp.triton_kernels.gemm.gemm_reduce_scatter import workspace_bytes as scatter_bytes
from fused_tp.triton_kernels.gemm.launch import launch_for

SHAPES = ((136, 264, 128), (33, 77, 45))  # by TMA, and by pointers with masks everywhere
DTYPE = torch.bfloat16


def close(actual: torch.Tensor, wanted: torch.Tensor, name: str) -> None:
    error = float((actual.double() - wanted).norm() / wanted.norm())
    assert error < 1e-2, f"{name}: {error:.3g}"


def fused(rank: LocalRank) -> None:
    world, device = rank.world_size, rank.device
    for m, n, k in SHAPES:
        launch = launch_for(DTYPE, m, n, world, arch=arch_of(rank.device), sms=rank.sms, sm_margin=2)
        x = normal(m, k, dtype=DTYPE, device=device, seed=rank.rank)
        w = normal(n, k, dtype=DTYPE, device=device, seed=10 + rank.rank)
        norm_weight = normal(n, dtype=DTYPE, device=device, seed=20)
        residual = normal(m, n, dtype=DTYPE, device=device, seed=21)
        nbytes = max(
            sum_bytes(m, n, DTYPE, world, launch, two_shot=False),
            sum_bytes(m, n, DTYPE, world, launch, two_shot=True),
            scatter_bytes(m, n, DTYPE, world, launch),
        )
        sums = made(rank, Workspace, nbytes)
        gathers = made(rank, GatherWorkspace, gather_bytes(-(-m // world), k, DTYPE, world))
        wanted = x.double() @ w.double().t()
        shard = x[: -(-m // world)] if rank.rank == 0 else x[-(-m // world) :]
        with rank.in_turn():
            for two_shot in (False, True):
                set_flags(sums)
                out, _ = gemm_all_reduce([(x, w)], workspace=sums, launch=launch, two_shot=two_shot)
                arrived(out, wanted, world, "gemm_all_reduce")
                set_flags(sums)
                gemm_all_reduce(
                    [(x, w)], workspace=sums, launch=launch, two_shot=two_shot, residual=residual,
                    norm_weight=norm_weight,
                )  # fmt: skip
            set_flags(sums)
            out = gemm_reduce_scatter([(x, w)], workspace=sums, launch=launch)
            arrived(out, wanted, world, "gemm_reduce_scatter")
            bias = normal(n, dtype=DTYPE, device=device, seed=22)
            for direct in (False, True):
                set_flags(gathers)
                waits_for_copies = world > 1 and not direct
                if waits_for_copies:
                    set_arrived(gathers)
                outs, _ = all_gather_gemm(
                    x if world == 1 else shard, [w, w.t().contiguous().t()], workspace=gathers, launch=launch,
                    rows=m, biases=[bias, None], direct=direct,
                )  # fmt: skip
                if not waits_for_copies:  # it need not have waited
                    arrived(outs[0], wanted + bias.double(), world, "all_gather_gemm with bias")
                    arrived(outs[1], wanted, world, "all_gather_gemm, weight transposed")
            rank.synchronize()
            assert sums.expired() is None and gathers.expired() is None


def set_arrived(workspace: GatherWorkspace) -> None:
    """The matmul waits for launches behind it, which would never begin if it had to end first."""
    rank, world = workspace.rank, workspace.world_size
    words = workspace.buffer[: RUNS.value * 8 * world].view(torch.int64)
    words[ARRIVED.value * world : (ARRIVED.value + 1) * world] = ALWAYS
    for position in range(world - 1):
        words[ORDER.value * world + position] = (rank + 1 + position) % world


def arrived(out: torch.Tensor, wanted: torch.Tensor, world_size: int, name: str) -> None:
    """What did not arrive would be NaN. A peer that has not run sends zeros, so the values are known for one rank."""
    assert not bool(out.isnan().any()), f"{name}: NaN"
    if world_size == 1:
        close(out, wanted, name)


def made(rank: LocalRank, kind: Any, nbytes: int) -> Any:
    buffer, handle = rank.allocate(nbytes)
    workspace = kind(buffer, handle, timeout_seconds=120)
    workspace.kept = handle
    rank.barrier()
    return workspace


def main() -> None:
    for world_size in (1, 2):
        run_local(world_size, fused, device="cuda", timeout=500)
    torch.cuda.synchronize()
    print("all kernels ran")


if __name__ == "__main__":
    main()
