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
ENVIRONMENT = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "FUSED_TP_TIMEOUT": "100"}


def all_ops(group: dist.ProcessGroup, shape: tuple[int, int, int]) -> str:
    """'' or why it cannot run; every fused kernel, several calls in a row, against fp64 and between ranks."""
    from benchmarks.gpu_ranks import normal
    from fused_tp.runtime.partition import shard_range
    from fused_tp.transport.symm_mem import symmetric_empty
    from fused_tp.triton_kernels.comm.gather import GatherWorkspace
    from fused_tp.triton_kernels.comm.workspace import Workspace
    from fused_tp.triton_kernels.device import arch_of, sms_of
    from fused_tp.triton_kernels.gemm.all_gather_gemm import all_gather_gemm
    from fused_tp.triton_kernels.gemm.all_gather_gemm import workspace_bytes as gather_bytes
    from fused_tp.triton_kernels.gemm.gemm_all_reduce import gemm_all_reduce
    from fused_tp.triton_kernels.gemm.gemm_all_reduce import workspace_bytes as sum_bytes
    from fused_tp.triton_kernels.gemm.gemm_reduce_scatter import gemm_reduce_scatter
    from fused_tp.triton_kernels.gemm.gemm_reduce_scatter import workspace_bytes as scatter_bytes
    from fused_tp.triton_kernels.gemm.launch import launch_for
    from tests.reference import assert_within_dtype_error, matmul64

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


def public_ops(group: dist.ProcessGroup) -> str:
    """'' or why it cannot run; the ops as users call them, on the fused kernels, with their gradients."""
    import fused_tp
    from benchmarks.gpu_ranks import normal
    from fused_tp.runtime.availability import Availability
    from fused_tp.runtime.group import resolve_group
    from fused_tp.runtime.partition import shard_range
    from fused_tp.transport.symm_mem import group_memory
    from tests.reference import assert_within_dtype_error, matmul64, rms_norm64

    rank, world = group.rank(), group.size()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    memory = group_memory(resolve_group(group), device)
    if isinstance(memory, Availability):
        return memory.reason
    m, n, k, dtype = 264, 520, 136, torch.bfloat16
    start, stop = shard_range(m, world, rank)
    xs = [normal(m, k, dtype=dtype, device=device, seed=r) for r in range(world)]
    ws = [normal(n, k, dtype=dtype, device=device, seed=50 + r) for r in range(world)]
    residual, norm_weight = (normal(*s, dtype=dtype, device=device, seed=70 + len(s)) for s in ((m, n), (n,)))
    dy = normal(m, n, dtype=dtype, device=device, seed=90)
    total = torch.stack([matmul64(x, w) for x, w in zip(xs, ws, strict=True)]).sum(0)

    def near(actual: torch.Tensor | None, wanted: torch.Tensor, terms: int, name: str) -> None:
        assert actual is not None, name
        assert_within_dtype_error(actual, wanted, dtype, reduced_over=terms, roundings=3, name=name)

    x, w = (t[rank].clone().requires_grad_() for t in (xs, ws))
    y = fused_tp.matmul_reduce_scatter(x, w, group=group)
    near(y, total[start:stop], world * k, "matmul_reduce_scatter")
    y.backward(dy[start:stop])
    near(x.grad, dy.double() @ ws[rank].double(), n, "its dx")
    near(w.grad, dy.double().t() @ xs[rank].double(), m, "its dw")

    near(fused_tp.matmul_all_reduce(xs[rank], ws[rank], group=group), total, world * k, "matmul_all_reduce")
    normed, summed = fused_tp.matmul_all_reduce_rms_norm(
        xs[rank], ws[rank], residual, norm_weight, 1e-5, group=group
    )  # fmt: skip
    near(summed, total + residual.double(), world * k, "new residual")
    near(normed, rms_norm64(total + residual.double(), norm_weight, 1e-5), world * k, "its norm")

    shard = xs[0][start:stop].clone().requires_grad_()
    w = ws[rank].clone().requires_grad_()
    y = fused_tp.all_gather_matmul(shard, w, group=group)
    near(y, matmul64(xs[0], ws[rank]), k, "all_gather_matmul")
    y.backward(dy)
    d_x = torch.stack([dy.double() @ other.double() for other in ws]).sum(0)
    near(shard.grad, d_x[start:stop], world * n, "its dx")
    near(w.grad, dy.double().t() @ xs[0].double(), m, "its dw")
    torch.cuda.synchronize()
    dist.barrier(group)
    return ""


def test_public_ops_on_two_processes() -> None:
    outcomes = fresh_ranks(2, public_ops, timeout=400, env={**ENVIRONMENT, "FUSED_TP_SCHEDULE": "fused_kernel"})
    problems = [problem for outcome in outcomes if (problem := outcome.unwrap())]
    if problems:
        pytest.skip(f"torch's symmetric memory does not serve two processes on this machine: {problems[0]}")
