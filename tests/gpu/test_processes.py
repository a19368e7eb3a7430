"""Fused kernels over torch's symmetric memory: one process per rank, both on one GPU, which switches between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton", reason="needs Triton")

from tests.workers import fresh_ranks

pytestmark = pytest.mark.gpu

# torch refuses two ranks on one GPU unless told that it is meant.
ENVIRONMENT = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}


def all_ops(group: dist.ProcessGroup, shape: tuple[int, int, int]) -> str:
    """'' or why it cannot run; every fused kernel, several calls in a row, against fp64 and between ranks."""
    from benchmarks.gpu_ranks import normal
    from fused_tp.runtime.partition import shard_range
    from fused_tp.transport.symmetric_memory import symmetric_empty
    from tests.reference import assert_within_dtype_error, matmul64
    from triton_kernels.all_gather_gemm import all_gather_gemm
    from triton_kernels.all_gather_gemm import workspace_bytes as gather_bytes
    from triton_kernels.gather import GatherWorkspace
    from triton_kernels.gemm_all_reduce import gemm_all_reduce
    from triton_kernels.gemm_all_reduce import workspace_bytes as sum_bytes
    from triton_kernels.gemm_reduce_scatter import gemm_reduce_scatter
    from triton_kernels.gemm_reduce_scatter import workspace_bytes as scatter_bytes
    from triton_kernels.launch import launch_for
    from triton_kernels.operands import arch_of, sms_of
    from triton_kernels.workspace import Workspace

    rank, world = group.rank(), group.size()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    m, n, k = shape
    dtype = torch.bfloat16
    launch = launch_for(dtype, m, n, world, arch=arch_of(device), sms=sms_of(device), sm_margin=2)
    nbytes = max(
        sum_bytes(m, n, dtype, world, launch, two_shot=False),
        sum_bytes(m, n, dtype, world, launch, two_shot=True),
        scatter_bytes(m, n, dtype, world, launch),
    )

    def make(kind: Any, nbytes: int) -> Any:
        buffer, handle = symmetric_empty((nbytes,), torch.uint8, group=group, device=device)
        return kind(buffer, handle, timeout_seconds=60), buffer

    try:
        workspace, _ = make(Workspace, nbytes)
        gathers, _ = make(GatherWorkspace, gather_bytes(-(-m // world), k, dtype, world))
    except RuntimeError as error:
        return f"rank {rank}: {str(error).splitlines()[0]}"
    start, stop = shard_range(m, world, rank)
    kept = []
    for call in range(6):
        xs = [normal(m, k, dtype=dtype, device=device, seed=100 * call + r) for r in range(world)]
        ws = [normal(n, k, dtype=dtype, device=device, seed=100 * call + 50 + r) for r in range(world)]
        product = [(xs[rank], ws[rank])]
        total = torch.stack([matmul64(x, w) for x, w in zip(xs, ws, strict=True)]).sum(0)
        name = f"call {call}"
        for two_shot in (False, True):
            out, _ = gemm_all_reduce(product, workspace=workspace, launch=launch, two_shot=two_shot)
            assert_within_dtype_error(out, total, dtype, reduced_over=world * k, roundings=2, name=name)
            kept.append(out)
        out = gemm_reduce_scatter(product, workspace=workspace, launch=launch)
        assert_within_dtype_error(out, total[start:stop], dtype, reduced_over=world * k, roundings=2, name=name)
        for direct in (False, True):
            (out,), _ = all_gather_gemm(
                xs[0][start:stop], [ws[rank]], workspace=gathers, launch=launch, rows=m, direct=direct
            )
            assert_within_dtype_error(out, matmul64(xs[0], ws[rank]), dtype, reduced_over=k, name=name)
    torch.cuda.synchronize()
    assert workspace.expired() is None and gathers.expired() is None
    bits = [None] * world
    dist.all_gather_object(bits, [out.view(torch.int16).cpu() for out in kept], group=group)
    for theirs in bits:
        assert theirs is not None
        assert all(torch.equal(mine, other) for mine, other in zip(bits[rank] or [], theirs, strict=True))
    dist.barrier(group)
    return ""


@pytest.mark.parametrize("shape", [(300, 520, 200), (64, 256, 512)])
def test_two_processes(shape: tuple[int, int, int]) -> None:
    outcomes = fresh_ranks(2, all_ops, shape, timeout=400, env=ENVIRONMENT)
    problems = [problem for outcome in outcomes if (problem := outcome.unwrap())]
    if problems:
        pytest.skip(f"torch's symmetric memory does not serve two processes on this machine: {problems[0]}")
