"""Matmuls by libraries that torch would not pick, and by the native core: correct for all strides."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import fused_tp
from fused_tp.backends import gemm
from fused_tp.core.native import DTYPE_NUMBERS
from tests.reference import assert_within_dtype_error, matmul64, seeded


@pytest.fixture(autouse=True)
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use oneDNN for every shape, on CPUs of every vendor."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch is built without oneDNN")
    monkeypatch.setattr(gemm, "_onednn_beats_mkl", lambda: True)
    monkeypatch.setattr(gemm, "_MIN_ONEDNN_MULTIPLY_ADDS", 0)
    monkeypatch.setattr(gemm, "_max_native_rows", lambda dtype: 0)


def native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the native core's kernels for every number of rows that they support."""
    core = pytest.importorskip("fused_tp._core")
    if not core.few_rows_isa(0):
        pytest.skip("the native core has no kernels for few rows on this CPU")
    monkeypatch.setattr(gemm, "_max_native_rows", lambda dtype: core.FEW_ROWS)
    monkeypatch.setattr(gemm, "_MIN_NATIVE_ELEMENTS", 0)


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
    "expanded": seeded(1, seed=1).expand(5, 8),
}


def test_no_strides_are_slow() -> None:
    """oneDNN alone is a thousand times slower for an expanded weight, such as the gradient of a sum."""
    x = seeded(128, 512)

    def seconds(weight: Tensor) -> float:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            gemm.linear(x, weight)
            times.append(time.perf_counter() - start)
        return min(times)

    dense = seconds(seeded(512, 512))
    for weight in (torch.ones(()).expand(512, 512), seeded(512, 1024)[:, ::2], seeded(512, 512).t()):
        assert seconds(weight) < 50 * dense, weight.stride()


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS.keys())
@pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS.keys())
def test_strides(x: Tensor, weight: Tensor) -> None:
    strided = seeded(2 * len(weight), seed=2)[::2]
    for bias in (None, strided.clone(), strided):
        out = gemm.linear(x, weight, bias)
        assert out.is_contiguous()
        assert_within_dtype_error(out, matmul64(x, weight, bias), torch.float32, reduced_over=8)


def test_second_derivative() -> None:
    """The backward of matmul_all_reduce is a matmul on this rank; its derivative must not be lost."""
    x, weight = seeded(4, 3).requires_grad_(), seeded(5, 3, seed=1)
    (first,) = torch.autograd.grad(fused_tp.matmul_all_reduce(x, weight, group=None).pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    x64, w64 = x.detach().double().requires_grad_(), weight.double()
    (first64,) = torch.autograd.grad((x64 @ w64.t()).pow(3).sum(), x64, create_graph=True)
    (second64,) = torch.autograd.grad(first64.sum(), x64)
    assert_within_dtype_error(second, second64, torch.float32, reduced_over=15, roundings=3)


# -- few rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ["avx2", "avx512", "avx512_bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_rows_on_every_instruction_set(dtype: torch.dtype, isa: str) -> None:
    """Cover whole and partial tiles, steps, and blocks of steps.

    Neither the number of threads nor the other rows change the bits of a row.
    """
    core, code = pytest.importorskip("fused_tp._core"), DTYPE_NUMBERS[dtype]
    if core.few_rows_isa(code, isa) not in (isa, "avx512" if dtype is torch.float32 else isa):
        pytest.skip(f"this CPU lacks {isa}")
    for rows, columns, depth in (
        (1, 6, 32),
        (3, 7, 1),
        (2, 1, 33),
        (4, 13, 31),
        (7, 12, 64),
        (16, 100, 4128),
        (5, 200, 1024),
        (13, 103, 300),
        (core.FEW_ROWS, 24, 130),
    ):
        x, w, bias = (seeded(*shape, dtype=dtype) for shape in ((rows, depth), (columns, depth + 3), (columns,)))
        for b in (None, bias):
            found = []
            for threads, split in ((1, [rows]), (3, [rows]), (1, [1] * rows)):
                y = torch.full((rows, columns), math.nan, dtype=dtype)
                for part, y_part in zip(x.split(split), y.split(split), strict=True):
                    at = (part.data_ptr(), depth, w.data_ptr(), depth + 3, 0 if b is None else b.data_ptr())
                    core.few_rows(code, *at, y_part.data_ptr(), len(part), columns, depth, threads, isa)
                found.append(y)
            assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
            assert_within_dtype_error(found[0], matmul64(x, w[:, :depth], b), dtype, reduced_over=depth)


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS.keys())
@pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS.keys())
def test_few_rows_of_strides(monkeypatch: pytest.MonkeyPatch, x: Tensor, weight: Tensor) -> None:
    native(monkeypatch)
    test_strides(x, weight)


def test_few_rows_are_read_only_where_memory_is_what_a_tensor_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    native(monkeypatch)
    x, w = seeded(2, 8), seeded(5, 8, seed=1)
    negative = torch.complex(seeded(5, 8), -w).conj().imag
    zero = torch._efficientzerotensor((5, 8))
    assert gemm._few_rows_matmul(x, w, None) is not None
    for given, meant in ((negative, w), (zero, torch.zeros(5, 8)), (w.clone().requires_grad_(), w)):
        assert gemm._few_rows_matmul(x, given, None) is None
        assert_within_dtype_error(gemm.linear(x, given), matmul64(x, meant), torch.float32, reduced_over=8)
        assert_within_dtype_error(gemm.linear(given, x), matmul64(meant, x), torch.float32, reduced_over=8)
    assert torch.equal(gemm.linear(x, w, negative[:, 0]), gemm.linear(x, w, w[:, 0].clone()))
    with FlopCounterMode(display=False) as counted:
        gemm.linear(x, w)
    assert counted.get_total_flops() == 2 * 2 * 8 * 5
    special: Any = torch.tensor([[math.nan] + [1.0] * 7, [math.inf] + [1.0] * 7])
    assert gemm.linear(special, w.abs())[0].isnan().all() and gemm.linear(special, w.abs())[1].isposinf().all()
