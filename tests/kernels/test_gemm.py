"""The matmul kernel, interpreted, against fp64: dtypes, epilogues, layouts, odd sizes, orders of tiles, bad input.

Tiles are 32x32x32 under the interpreter, so sizes beyond 32 have several, and 33 or 97 have one that is nearly empty.
fp8 runs as it is: the interpreter converts e4m3 to fp16, which holds every one of its values.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.kernels.ranks import interpreted_ranks
from tests.reference import assert_within_dtype_error, matmul64, seeded

pytestmark = pytest.mark.full

FP8 = torch.float8_e4m3fn
DTYPES = (torch.bfloat16, torch.float16, torch.float32, FP8)
SHAPES = ((64, 48, 80), (37, 53, 29), (1, 1, 1), (1, 64, 128), (97, 8, 1), (2, 3, 131))
ACTIVATIONS = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}


def operand(rows: int, columns: int, dtype: torch.dtype, seed: int, *, swapped: bool = False) -> Tensor:
    """[rows, columns], of which the columns are in one piece where `swapped`."""
    if swapped:
        return operand(columns, rows, dtype, seed).t()
    return seeded(rows, columns, seed=seed).to(dtype)


def assert_close(y: Tensor, reference: Tensor, x: Tensor, name: str) -> None:
    assert_within_dtype_error(y, reference, y.dtype, reduced_over=x.shape[1], name=name)


def layouts(_group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    from fused_tp.triton_kernels.gemm.gemm import gemm

    for m, n, k in SHAPES:
        for x_swapped in (False, True):
            for w_swapped in (False, True):
                x = operand(m, k, dtype, 1, swapped=x_swapped)
                w = operand(n, k, dtype, 2, swapped=w_swapped)
                name = f"{m}x{n}x{k} swapped {x_swapped} {w_swapped}"
                assert_close(gemm(x, w), matmul64(x, w), x, name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts_and_odd_sizes(dtype: torch.dtype) -> None:
    interpreted_ranks(1, layouts, dtype)


def epilogues(_group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    from fused_tp.triton_kernels.gemm.gemm import gemm

    for m, n, k in ((37, 53, 29), (64, 48, 80)):
        x, w, g = operand(m, k, dtype, 1), operand(n, k, dtype, 2), operand(n, k, dtype, 3)
        bias, gate_bias = seeded(n, seed=4), seeded(n, seed=5)
        value, gate = matmul64(x, w, bias), matmul64(x, g, gate_bias)
        for name, function in ACTIVATIONS.items():
            assert_close(gemm(x, w, bias, activation=name), function(value), x, name)
            y = gemm(x, w, bias, gate_weight=g, gate_bias=gate_bias, activation=name)
            assert_close(y, function(gate) * value, x, f"gated {name}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_epilogues(dtype: torch.dtype) -> None:
    interpreted_ranks(1, epilogues, dtype)


def scaled(_group: dist.ProcessGroup, by_row: bool) -> None:
    from fused_tp.triton_kernels.gemm.gemm import gemm

    for m, n, k in ((37, 53, 29), (64, 48, 80)):
        x, w, g = operand(m, k, FP8, 1), operand(n, k, FP8, 2), operand(n, k, FP8, 3)
        sizes = ((m,), (n,), (n,)) if by_row else ((), (), ())
        x_scale, w_scale, gate_scale = (seeded(*size, seed=seed).abs() for seed, size in enumerate(sizes, 4))
        x64, w64, g64 = (
            t.double() * s.double().reshape(-1, 1) for t, s in ((x, x_scale), (w, w_scale), (g, gate_scale))
        )
        for dtype in (torch.bfloat16, torch.float16):
            y = gemm(x, w, x_scale=x_scale, weight_scale=w_scale, out_dtype=dtype)
            assert_close(y, matmul64(x64, w64), x, f"{m}x{n}x{k}")
        y = gemm(x, w, gate_weight=g, activation="silu", x_scale=x_scale, weight_scale=w_scale, gate_scale=gate_scale)
        gated = torch.nn.functional.silu(matmul64(x64, g64)) * matmul64(x64, w64)
        assert_close(y, gated, x, f"gated {m}x{n}x{k}")


@pytest.mark.parametrize("by_row", [False, True])
def test_scaled_fp8(by_row: bool) -> None:
    interpreted_ranks(1, scaled, by_row)


def orders(_group: dist.ProcessGroup) -> None:
    """The order of tiles and who takes them change no bit; memory around `out` is not touched."""
    from fused_tp.triton_kernels.gemm.gemm import gemm

    for m, n, k in ((97, 101, 40), (96, 104, 40)):
        x, w = operand(m, k, torch.bfloat16, 1), operand(n, k, torch.bfloat16, 2)
        y = gemm(x, w)
        for start in (1, 7, 1000):
            for num_sms in (1, 3):
                assert torch.equal(gemm(x, w, start=start, num_sms=num_sms), y)
        for border in (1, 8):
            wide = torch.full((m + 2, n + 2 * border), 7.0, dtype=torch.bfloat16)
            inside = wide[1:-1, border:-border]
            assert gemm(x, w, out=inside) is inside and torch.equal(inside, y)
            inside.fill_(7.0)
            assert bool((wide == 7.0).all())
        columns = torch.empty(n, m, dtype=torch.bfloat16).t()
        assert torch.equal(gemm(x, w, out=columns), y)


def test_orders_of_tiles_and_out() -> None:
    interpreted_ranks(1, orders)


def special_values(_group: dist.ProcessGroup) -> None:
    """Inf and NaN stay in their rows; bf16 rounds to the nearest even; empty operands; every tile is visited once."""
    from fused_tp.triton_kernels.gemm.gemm import gemm

    x, w = operand(40, 33, torch.bfloat16, 1), operand(35, 33, torch.bfloat16, 2)
    x[3, 5], x[7, 2] = torch.inf, torch.nan
    y = gemm(x, w, activation="relu")
    assert bool(torch.isnan(y[7]).all()) and bool((torch.isinf(y[3]) | (y[3] == 0)).all())
    assert bool(torch.isfinite(y[[row for row in range(40) if row not in (3, 7)]]).all())
    halfway = torch.tensor([[1.0, 2.0**-8]], dtype=torch.bfloat16)
    ones = torch.tensor([[1.0, 1.0], [1.0, 3.0]], dtype=torch.bfloat16)
    assert gemm(halfway, ones).tolist() == [[1.0, 1.015625]]
    assert gemm(x[:0], w).shape == (0, 35) and gemm(x, w[:0]).shape == (40, 0)
    bias = seeded(35, seed=3)
    assert torch.equal(gemm(x[:, :0], w[:, :0], bias), bias.bfloat16().expand(40, 35))


def test_special_values() -> None:
    interpreted_ranks(1, special_values)


def plans(_group: dist.ProcessGroup) -> list[tuple[bool, str]]:
    from fused_tp.triton_kernels.gemm.gemm import plan_gemm

    def plan(*tensors: Tensor, **keywords: Any) -> tuple[bool, str]:
        chosen = plan_gemm(*tensors, **keywords)
        return chosen.tma, chosen.reason

    bf16 = torch.bfloat16
    x, w = operand(64, 64, bf16, 1), operand(32, 64, bf16, 2)
    wide = operand(64, 65, bf16, 3)
    return [
        plan(x, w),
        plan(x.t(), w.t().contiguous().t()),
        plan(wide[:, :64], w),
        plan(operand(64, 72, bf16, 3)[:, 1:65], w),
        plan(x, w, w.t().contiguous().t()),
        plan(x.float(), w.float()),
        plan(x.float(), w.float(), precision="tf32"),
        plan(x.float().t(), w.float(), precision="tf32"),
        plan(x[:1].expand(64, 64), w),
        plan(x, w, out=torch.empty(64, 33, dtype=bf16)[:, :32]),
    ]


def test_plan_says_how_operands_are_loaded_and_why() -> None:
    (found,) = interpreted_ranks(1, plans)
    assert [tma for tma, _ in found] == [True, True, False, False, False, False, True, False, False, False]
    reasons = [reason for _, reason in found]
    assert reasons[2].startswith("x has rows") and reasons[3].startswith("x has rows")
    assert "do not lie alike" in reasons[4]
    assert "CUDA cores" in reasons[5]
    assert "transposed" in reasons[7]
    assert reasons[9].startswith("rows of out")


def bad_input(_group: dist.ProcessGroup) -> list[str]:
    from fused_tp.triton_kernels.gemm.gemm import gemm

    x, w = operand(4, 8, torch.bfloat16, 1), operand(6, 8, torch.bfloat16, 2)
    x8, w8 = x.to(FP8), w.to(FP8)
    one, four, six = torch.ones(()), torch.ones(4), torch.ones(6)
    calls: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = [
        ((x[0], w), {}),
        ((x, w[:, :7]), {}),
        ((x, w.half()), {}),
        ((x.double(), w.double()), {}),
        ((x, w.to("meta")), {}),
        ((x, w), {"precision": "fp64"}),
        ((x, w), {"activation": "tanh"}),
        ((x, w, four), {}),
        ((x, w, torch.ones(12)[::2]), {}),
        ((x, w, six.int()), {}),
        ((x, w), {"gate_weight": w[:5]}),
        ((x, w), {"gate_bias": six}),
        ((x, w), {"x_scale": one, "weight_scale": one}),
        ((x8, w8), {"x_scale": one}),
        ((x8, w8), {"x_scale": one, "weight_scale": six}),
        ((x8, w8), {"x_scale": one.double(), "weight_scale": one}),
        ((x8, w8), {"out_dtype": torch.float32}),
        ((x, w), {"out_dtype": torch.float32}),
        ((x, w), {"out": torch.empty(4, 5, dtype=torch.bfloat16)}),
        ((x, w), {"num_sms": 0}),
        ((x, w), {"start": -1}),
    ]
    messages = []
    for arguments, keywords in calls:
        with pytest.raises(ValueError) as raised:
            gemm(*arguments, **keywords)
        messages.append(str(raised.value))
    return messages


def test_bad_input_is_refused_by_name() -> None:
    (messages,) = interpreted_ranks(1, bad_input)
    named = ["x", "x", "weight", "x", "weight", "precision", "activation", "bias", "bias", "bias", "gate_weight"]
    named += ["gate_bias", "x_scale", "scales", "x_scale", "x_scale", "out", "out", "out", "num_sms", "start"]
    for name, message in zip(named, messages, strict=True):
        assert name in message.split(" must")[0].split(":")[0], message


def test_cpu_tensors_need_the_interpreter() -> None:
    pytest.importorskip("triton")
    from fused_tp.triton_kernels.gemm.gemm import gemm

    with pytest.raises(ValueError, match="x must be on a GPU"):
        gemm(torch.ones(2, 2), torch.ones(2, 2))
