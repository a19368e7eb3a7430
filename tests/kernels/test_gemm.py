"""The matmul kernel, interpreted, against fp64: dtypes, layouts, odd sizes, orders of tiles, bad input.

Tiles are 32x32x32 under the interpreter, so sizes beyond 32 have several, and 33 or 97 have one that is nearly empty.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

from fused_tp.triton_kernels.gemm.gemm import gemm, plan_gemm
from tests.kernels.ranks import interpreted_ranks
from tests.reference import assert_within_dtype_error, matmul64, seeded

pytestmark = pytest.mark.full  # no op of the library calls it: benchmarks do

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((64, 48, 80), (37, 53, 29), (1, 1, 1), (97, 8, 1), (2, 3, 131))


def operand(rows: int, columns: int, dtype: torch.dtype, seed: int, *, swapped: bool = False) -> Tensor:
    """[rows, columns], of which the columns are in one piece where `swapped`."""
    if swapped:
        return operand(columns, rows, dtype, seed).t()
    return seeded(rows, columns, seed=seed).to(dtype)


def layouts(_group: dist.ProcessGroup) -> None:
    for dtype, (m, n, k) in itertools.product(DTYPES, SHAPES):
        for x_swapped in (False, True):
            for w_swapped in (False, True):
                x = operand(m, k, dtype, 1, swapped=x_swapped)
                w = operand(n, k, dtype, 2, swapped=w_swapped)
                bias = seeded(n, dtype=dtype, seed=4) if x_swapped else None
                name = f"{m}x{n}x{k} swapped {x_swapped} {w_swapped}"
                assert_within_dtype_error(gemm(x, w, bias), matmul64(x, w, bias), dtype, reduced_over=k, name=name)


def special_cases(_group: dist.ProcessGroup) -> None:
    """Who takes the tiles changes no bit, memory around `out` is not touched, inf and NaN stay in their rows, bf16
    rounds to the nearest even, and operands may be empty."""
    for m, n, k in ((97, 101, 40), (96, 104, 40)):
        x, w = operand(m, k, torch.bfloat16, 1), operand(n, k, torch.bfloat16, 2)
        y = gemm(x, w)
        for num_sms in (1, 3):
            assert torch.equal(gemm(x, w, num_sms=num_sms), y)
        for border in (1, 8):
            wide = torch.full((m + 2, n + 2 * border), 7.0, dtype=torch.bfloat16)
            inside = wide[1:-1, border:-border]
            assert gemm(x, w, out=inside) is inside and torch.equal(inside, y)
            inside.fill_(7.0)
            assert bool((wide == 7.0).all())
    x, w = operand(40, 33, torch.bfloat16, 1), operand(35, 33, torch.bfloat16, 2)
    x[3, 5], x[7, 2] = torch.inf, torch.nan
    y = gemm(x, w)
    assert bool(torch.isnan(y[7]).all()) and bool(torch.isinf(y[3]).all())
    assert bool(torch.isfinite(y[[row for row in range(40) if row not in (3, 7)]]).all())
    halfway = torch.tensor([[1.0, 2.0**-8]], dtype=torch.bfloat16)
    ones = torch.tensor([[1.0, 1.0], [1.0, 3.0]], dtype=torch.bfloat16)
    assert gemm(halfway, ones).tolist() == [[1.0, 1.015625]]
    assert gemm(x[:0], w).shape == (0, 35) and gemm(x, w[:0]).shape == (40, 0)
    bias = seeded(35, seed=3, dtype=torch.bfloat16)
    assert torch.equal(gemm(x[:, :0], w[:, :0], bias), bias.expand(40, 35))


def plans(_group: dist.ProcessGroup) -> list[tuple[bool, str]]:
    def plan(*tensors: Tensor, **keywords: Any) -> tuple[bool, str]:
        chosen = plan_gemm(*tensors, **keywords)
        return chosen.tma, chosen.reason

    bf16 = torch.bfloat16
    x, w = operand(64, 64, bf16, 1), operand(32, 64, bf16, 2)
    return [
        plan(x, w),
        plan(x.t(), w.t().contiguous().t()),
        plan(operand(64, 65, bf16, 3)[:, :64], w),
        plan(operand(64, 72, bf16, 3)[:, 1:65], w),
        plan(x.float(), w.float()),
        plan(x.float(), w.float(), precision="tf32"),
        plan(x.float().t(), w.float(), precision="tf32"),
        plan(x[:1].expand(64, 64), w),
        plan(x, w, out=torch.empty(64, 33, dtype=bf16)[:, :32]),
    ]


def test_plan_says_how_operands_are_loaded_and_why() -> None:
    (found,) = interpreted_ranks(1, plans)
    assert [tma for tma, _ in found] == [True, True, False, False, False, True, False, False, False]
    reasons = [reason for _, reason in found]
    for index, words in {2: "an operand has rows", 4: "CUDA cores", 6: "transposed", 8: "rows of out"}.items():
        assert words in reasons[index]


def bad_input(_group: dist.ProcessGroup) -> None:
    x, w = operand(4, 8, torch.bfloat16, 1), operand(6, 8, torch.bfloat16, 2)
    six = torch.ones(12, dtype=torch.bfloat16)
    calls: list[tuple[str, tuple[Tensor, ...], dict[str, Any]]] = [
        ("x", (x[0], w), {}),
        ("x", (x, w[:, :7]), {}),
        ("x and weight", (x, w.half()), {}),
        ("x and weight", (x.double(), w.double()), {}),
        ("weight", (x, w.to("meta")), {}),
        ("precision", (x, w), {"precision": "fp64"}),
        ("bias", (x, w, six[:4]), {}),
        ("bias", (x, w, six[::2]), {}),
        ("bias", (x, w, six[:6].int()), {}),
        ("out", (x, w), {"out": torch.empty(4, 5, dtype=torch.bfloat16)}),
        ("out", (x, w), {"out": torch.empty(6, 4, dtype=torch.bfloat16).t()}),
        ("num_sms", (x, w), {"num_sms": 0}),
    ]
    for named, arguments, keywords in calls:
        with pytest.raises(ValueError, match=f"^{named} must"):
            gemm(*arguments, **keywords)


@pytest.mark.parametrize("of", [layouts, special_cases, bad_input])
def test_interpreted(of: Callable[[dist.ProcessGroup], None]) -> None:
    interpreted_ranks(1, of)


def test_cpu_tensors_need_the_interpreter() -> None:
    with pytest.raises(ValueError, match="x must be on a GPU"):
        gemm(torch.ones(2, 2), torch.ones(2, 2))
