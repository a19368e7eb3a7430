"""The matmul that CPUs of some makers do by oneDNN: the same as torch's, whatever the strides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fused_tp
from fused_tp.schedules import gemm
from tests.reference import assert_within_dtype_error, matmul64, seeded


@pytest.fixture(autouse=True)
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN for every shape and every maker's CPU."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch is built without oneDNN")
    monkeypatch.setattr(gemm, "_onednn_beats_mkl", lambda: True)
    monkeypatch.setattr(gemm, "_SMALLEST_FOR_ONEDNN", 0)


INPUTS = {
    "dense": seeded(2, 3, 8),
    "one row": seeded(8),
    "no row": seeded(0, 8),
    "transposed": seeded(8, 6).t(),
    "strided": seeded(6, 16)[:, ::2],
    "expanded": seeded(1, 1).expand(6, 8),
}
WEIGHTS = {
    "dense": seeded(5, 8, seed=1),
    "transposed": seeded(8, 5, seed=1).t(),
    "strided": seeded(5, 16, seed=1)[:, ::2],
    "every other row": seeded(10, 8, seed=1)[::2],
    "no row": seeded(0, 8, seed=1),
}


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS.keys())
@pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS.keys())
def test_strides(x: Tensor, weight: Tensor) -> None:
    strided = seeded(2 * len(weight), seed=2)[::2]
    for bias in (None, strided.clone(), strided):
        out = gemm.linear(x, weight, bias)
        assert out.is_contiguous()
        assert_within_dtype_error(out, matmul64(x, weight, bias), torch.float32, reduced_over=8)


def test_second_derivative() -> None:
    """The backward of matmul_all_reduce is a matmul on this rank; differentiated again, it must not lose its part."""
    x, weight = seeded(4, 3).requires_grad_(), seeded(5, 3, seed=1)
    (first,) = torch.autograd.grad(fused_tp.matmul_all_reduce(x, weight, group=None).pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    x64, w64 = x.detach().double().requires_grad_(), weight.double()
    (first64,) = torch.autograd.grad((x64 @ w64.t()).pow(3).sum(), x64, create_graph=True)
    (second64,) = torch.autograd.grad(first64.sum(), x64)
    assert_within_dtype_error(second, second64, torch.float32, reduced_over=15, roundings=3)
