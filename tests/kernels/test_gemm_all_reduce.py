"""matmul + all-reduce (+ residual, RMS norm) in one launch, interpreted, W processes over CPU shared memory."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton", reason="needs Triton")

from fused_tp.triton_kernels.gemm.configs import GemmConfig
from fused_tp.triton_kernels.gemm.gemm_all_reduce import gemm_all_reduce, workspace_bytes
from fused_tp.triton_kernels.gemm.gemm_reduce_scatter import gemm_reduce_scatter
from fused_tp.triton_kernels.gemm.launch import Launch, launch_for
from tests.kernels.ranks import delays, interpreted_ranks, same_everywhere, sum_of_matmuls, workspace_of
from tests.reference import assert_within_dtype_error, matmul64, rms_norm64, seeded

CONFIG = GemmConfig(16, 16, 16, num_warps=4, num_stages=1, group_m=2)
LAUNCH = Launch(2, CONFIG, strip_elements=128)
EPS = 1e-5
both_shots = pytest.mark.parametrize("two_shot", [False, True], ids=["one_shot", "two_shot"])


def run(group, workspace, launch, m, n, k, dtype, two_shot, with_tail=False, seed=0):
    """One call, with bias, residual and norm if `with_tail`; returns how to check it against fp64 and between ranks."""
    x, w, wanted, terms = sum_of_matmuls(group, m, n, k, dtype, seed)
    bias = residual = norm_weight = None
    if with_tail:
        bias, residual, norm_weight = (seeded(*shape, dtype=dtype, seed=7) for shape in ((n,), (m, n), (n,)))
        wanted = wanted + bias.double() + residual.double()
    out, normed = gemm_all_reduce(
        [(x, w)], workspace=workspace, launch=launch, two_shot=two_shot, bias=bias, residual=residual,
        norm_weight=norm_weight, eps=EPS,
    )  # fmt: skip

    def check():
        # Terms travel in dtype: one rounding each, of random sign, and one of the sum.
        assert_within_dtype_error(out, wanted, dtype, reduced_over=terms, roundings=2)
        assert same_everywhere(group, out)
        if normed is not None:
            # Of the rounded out: the norm itself adds one rounding.
            assert_within_dtype_error(normed, rms_norm64(out, norm_weight, EPS), dtype, reduced_over=n)
            assert same_everywhere(group, normed)

    return check


def one_call(group, *case):
    workspace = workspace_of(group)
    check = run(group, workspace, *case)
    assert workspace.expired() is None
    check()


@both_shots
@pytest.mark.parametrize(
    ("world_size", "m", "n", "k", "dtype", "with_tail", "programs"),
    [
        (2, 33, 41, 19, torch.bfloat16, True, 2),
        (2, 1, 16, 7, torch.float16, False, 1),
        (3, 37, 50, 33, torch.float32, True, 3),
        (3, 5, 70, 16, torch.bfloat16, False, 2),
        (4, 40, 35, 17, torch.float16, True, 2),
        (4, 16, 16, 32, torch.float32, False, 2),  # fewer tiles than ranks
    ],
)
def test_equals_the_sum_on_all_ranks(world_size, m, n, k, dtype, with_tail, programs, two_shot):
    launch = Launch(programs, CONFIG, strip_elements=128)
    interpreted_ranks(world_size, one_call, launch, m, n, k, dtype, two_shot, with_tail)


def many_calls(group, two_shot, late_rank):
    """20 calls on one workspace, of shapes that change, with this rank slow at random points if it is `late_rank`."""
    workspace = workspace_of(group)
    n = 20 if group.size() < 4 else 12  # four interpreters share the cores: one column of tiles
    checks = []
    for call in range(20):
        m, with_tail = 1 + call % 3 * 8, call % 4 == 3
        with delays(seed=call, on=group.rank() == late_rank):
            checks.append(run(group, workspace, LAUNCH, m, n, 7, torch.bfloat16, two_shot, with_tail, seed=call))
    assert workspace.expired() is None
    for check in checks:  # afterwards: comparing ranks would keep them in step
        check()
    return int(workspace.state[0])


@both_shots
@pytest.mark.parametrize(("world_size", "late_rank"), [(2, 1), (3, 0), (4, None)])
def test_20_calls_with_no_reset(world_size, late_rank, two_shot):
    assert interpreted_ranks(world_size, many_calls, two_shot, late_rank) == [20] * world_size


def ops_in_turn(group):
    """Kernels that lay flags and slots out differently follow each other on one workspace; ranks are slow in turn."""
    workspace = workspace_of(group)
    rank, world = group.rank(), group.size()
    for call in range(12):
        x, w, wanted, terms = sum_of_matmuls(group, 20, 20, 7, torch.float32, seed=call)
        with delays(seed=call, on=call % world == rank, chance=0.1):
            if call % 3 == 2:
                out = gemm_reduce_scatter([(x, w)], workspace=workspace, launch=LAUNCH)
                rows = -(-20 // world)
                wanted = wanted[rank * rows : (rank + 1) * rows]
            else:
                out, _ = gemm_all_reduce([(x, w)], workspace=workspace, launch=LAUNCH, two_shot=call % 3 == 1)
        assert_within_dtype_error(out, wanted, torch.float32, reduced_over=terms, roundings=2)
    assert workspace.expired() is None


@pytest.mark.parametrize("world_size", [2, 3])
def test_ops_share_a_workspace(world_size):
    interpreted_ranks(world_size, ops_in_turn)


def several_products(group, two_shot):
    m, n, ks = 33, 24, (7, 16)
    launch = launch_for(torch.bfloat16, m, n, group.size(), arch=0, sms=2)
    needed = workspace_bytes(m, n, torch.bfloat16, group.size(), launch, two_shot=two_shot)
    products = [
        (seeded(m, k, dtype=torch.bfloat16, seed=k + group.rank()), seeded(n, k, dtype=torch.bfloat16, seed=2 * k))
        for k in ks
    ]
    out, _ = gemm_all_reduce(products, workspace=workspace_of(group, needed), launch=launch, two_shot=two_shot)
    wanted = torch.stack([matmul64(x, w) for x, w in products]).sum(0)
    dist.all_reduce(wanted, group=group)
    assert_within_dtype_error(out, wanted, torch.bfloat16, reduced_over=group.size() * sum(ks), roundings=2)
    assert same_everywhere(group, out)


@both_shots
def test_products_add_up(two_shot):
    interpreted_ranks(2, several_products, two_shot)


def test_launches_depend_on_what_all_ranks_know():
    for arch in (80, 90, 100):
        for m, n in ((1, 4096), (512, 4096), (4096, 4096), (8192, 8192)):
            launch = launch_for(torch.bfloat16, m, n, 8, arch=arch, sms=132, sm_margin=4)
            assert 1 <= launch.programs <= 128 * launch.config.programs_per_sm
            assert launch_for(torch.bfloat16, m, n, 8, arch=arch, sms=132, sm_margin=4) == launch
    large = launch_for(torch.bfloat16, 8192, 8192, 8, arch=90, sms=132)
    assert (large.block_m, large.block_n, large.programs) == (128, 256, 132)
    assert launch_for(torch.float32, 64, 64, 2, arch=0, sms=4, programs=3).programs == 3
    for wrong, how in {
        "dtype must be": {"dtype": torch.float64},
        "precision must be": {"precision": "fp8"},
        "arch must be": {"arch": 70},
        "sm_margin must leave": {"sm_margin": 132},
        "programs must be": {"programs": 0},
    }.items():
        with pytest.raises(ValueError, match=wrong):
            launch_for(**{"dtype": torch.bfloat16, "m": 8, "n": 8, "world_size": 2, "arch": 90, "sms": 132} | how)


def missing_rank(group, two_shot, missing):
    workspace = workspace_of(group, timeout_seconds=0.5)
    x, w, _, _ = sum_of_matmuls(group, 40, 20, 17, torch.float32)
    if group.rank() == missing:
        return None
    begun = time.monotonic()
    out, _ = gemm_all_reduce([(x, w)], workspace=workspace, launch=LAUNCH, two_shot=two_shot)
    took = time.monotonic() - begun
    assert bool(out.isnan().all())  # never a sum of fewer terms
    return workspace.expired(), took


@both_shots
def test_a_missing_rank_is_named(two_shot):
    answers = interpreted_ranks(3, missing_rank, two_shot, 1)
    for rank in (0, 2):
        expired, took = answers[rank]
        assert (expired.op, expired.call, expired.rank, expired.absent) == ("matmul_all_reduce", 1, rank, (1,))
        assert took < 5


def refusals(group):
    workspace = workspace_of(group)
    x, w = torch.zeros(8, 4), torch.zeros(6, 4)

    def refused(message, x=x, w=w, products=None, two_shot=True, **how):
        with pytest.raises(ValueError, match=message):
            gemm_all_reduce(products or [(x, w)], workspace=workspace, launch=LAUNCH, two_shot=two_shot, **how)

    refused(r"x must be \[M, K\] and weight \[N, K\]; got \(8, 4\) and \(6, 3\)", w=torch.zeros(6, 3))
    refused(r"both bf16, fp16 or fp32; got torch.float64 and torch.float64", x=x.double(), w=w.double())
    refused(r"bias must be \(6,\); got \(8,\)", bias=torch.zeros(8))
    refused(r"residual must be torch.float32 on cpu as x is; got torch.float16", residual=torch.zeros(8, 6).half())
    refused(r"out must have its rows in one piece; its strides are \(1, 8\)", out=torch.zeros(6, 8).t())
    refused("multimem adds bf16 or fp16 terms; x is torch.float32", multimem=True)
    refused("multimem needs GPUs joined by an NVSwitch; x is on cpu", x=x.half(), w=w.half(), multimem=True)
    refused("multimem needs two_shot=True", multimem=True, two_shot=False)
    refused(r"products must be 1 to 4 pairs \(x, weight\); got 5", products=[(x, w)] * 5)
    refused(r"products must have one M, N and dtype; .* products\[1\] \(7, 4\) by", products=[(x, w), (x[:7], w)])
    refused(r"products\[1\]\[0\] must be \[M, K\] and products\[1\]\[1\]", products=[(x, w), (x, w[:, :3])])
    refused(r"Make it larger", x=torch.zeros(40_000, 4))
    assert int(workspace.state[0]) == 0


def test_bad_input_is_refused_before_anything_runs():
    interpreted_ranks(1, refusals)
