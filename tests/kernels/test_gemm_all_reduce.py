"""matmul + all-reduce in one launch, interpreted, W processes over CPU shared memory."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from tests.kernels.ranks import interpreted_ranks, same_everywhere, workspace_of
from tests.reference import assert_within_dtype_error, matmul64, rms_norm64, seeded
from triton_kernels.gemm_all_reduce import gemm_all_reduce
from triton_kernels.launch import Launch

SMALL = Launch(programs=2, block_m=16, block_n=16, block_k=16, group_m=2)
WORKSPACE = 1 << 20


def shards(group, m, n, k, dtype):
    """This rank's x and w, whose K may differ between ranks by one, and the fp64 sum over ranks."""
    world, rank = group.size(), group.rank()
    ks = [k + r % 2 for r in range(world)]
    xs = [seeded(m, ks[r], dtype=dtype, seed=r) for r in range(world)]
    ws = [seeded(n, ks[r], dtype=dtype, seed=100 + r) for r in range(world)]
    wanted = sum(matmul64(x, w) for x, w in zip(xs, ws, strict=True))
    return xs[rank], ws[rank], wanted, sum(ks)


def one_call(group, m, n, k, dtype, two_shot, launch, epilogue):
    x, w, wanted, terms = shards(group, m, n, k, dtype)
    bias = residual = norm_weight = None
    if epilogue:
        bias, residual, norm_weight = (seeded(*shape, dtype=dtype, seed=7) for shape in ((n,), (m, n), (n,)))
        wanted = wanted + bias.double() + residual.double()
    out, normed = gemm_all_reduce(
        x, w, workspace=(workspace := workspace_of(group, WORKSPACE)), launch=launch, two_shot=two_shot, bias=bias,
        residual=residual, norm_weight=norm_weight, eps=1e-5,
    )  # fmt: skip
    assert workspace.expired() is None
    # Terms travel in dtype: one rounding each, of random sign, and one of the sum.
    assert_within_dtype_error(out, wanted, dtype, reduced_over=terms, roundings=2)
    assert same_everywhere(group, out)
    if normed is not None:
        assert_within_dtype_error(normed, rms_norm64(out, norm_weight, 1e-5), dtype, reduced_over=n)
        assert same_everywhere(group, normed)


@pytest.mark.parametrize("two_shot", [False, True], ids=["one_shot", "two_shot"])
@pytest.mark.parametrize(
    ("world_size", "m", "n", "k", "dtype", "epilogue", "programs"),
    [
        (2, 33, 41, 19, torch.bfloat16, True, 2),
        (2, 1, 16, 7, torch.float16, False, 1),
        (3, 37, 50, 33, torch.float32, True, 3),
        (3, 5, 70, 16, torch.bfloat16, False, 2),
        (4, 40, 35, 17, torch.float16, True, 2),
        (4, 16, 16, 32, torch.float32, False, 2),  # fewer tiles than ranks
    ],
)
def test_equals_the_sum_on_all_ranks(world_size, m, n, k, dtype, epilogue, programs, two_shot):
    launch = Launch(programs=programs, block_m=16, block_n=16, block_k=16, group_m=2, strip_elements=128)
    interpreted_ranks(world_size, one_call, m, n, k, dtype, two_shot, launch, epilogue)
