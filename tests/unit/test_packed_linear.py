"""Linear layers over packed weights, RMSNorm in one pass, and the threads that run both."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_tp.ops.packed_linear import pack_weight, packed_linear, reason_not_packable
from fused_tp.ops.rms_norm import add_rms_norm, rms_norm, supports_rms_norm
from tests.reference import assert_within_dtype_error, matmul64, rms_norm64, seeded

core = pytest.importorskip("fused_tp._core")
if not core.packed_isa(0):
    pytest.skip("the native core has no kernels for packed weights on this CPU", allow_module_level=True)

# Whole and partial tiles of rows (6 rows) and of panels (4 of 16 columns); turns of 192 rows; blocks of 512 elements.
SIZES = [(1, 16, 2), (3, 64, 34), (7, 112, 130), (6, 48, 2), (13, 320, 2050), (70, 48, 64), (200, 144, 600)]


@pytest.mark.parametrize("isa", ["avx2", "avx512", "avx512_bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_instruction_set(dtype: torch.dtype, isa: str) -> None:
    code = {torch.float32: 0, torch.bfloat16: 1}[dtype]
    if core.packed_isa(code, isa) not in (isa, "avx512" if dtype is torch.float32 else isa):
        pytest.skip(f"this CPU lacks {isa}")
    for rows, columns, depth in SIZES:
        x = seeded(rows, depth + 1, dtype=dtype)[:, :depth]
        w, bias = seeded(columns, depth, dtype=dtype, seed=1), seeded(columns, dtype=dtype, seed=2)
        packed = pack_weight(w)
        for b in (None, bias):
            found = []
            for threads, split in ((1, [rows]), (3, [rows]), (1, [1] * rows)):
                y = torch.full((rows, columns), float("nan"), dtype=dtype)
                for part, y_part in zip(x.split(split), y.split(split), strict=True):
                    at = (part.data_ptr(), depth + 1, packed.data_ptr(), 0 if b is None else b.data_ptr())
                    core.multiply_packed(code, *at, y_part.data_ptr(), len(part), columns, depth, threads, isa)
                found.append(y)
            assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
            assert_within_dtype_error(found[0], matmul64(x, w, b), dtype, reduced_over=depth)


NEGATIVE = torch.complex(seeded(16, 8), -seeded(16, 8, seed=1)).conj().imag  # negated lazily
ZERO = torch._efficientzerotensor((16, 8))  # without memory
WEIGHTS = {
    "dense": seeded(16, 8),
    "transposed": seeded(8, 16).t(),
    "strided": seeded(16, 16)[:, ::2],
    "negative": NEGATIVE,
    "zero": ZERO,
}
INPUTS = {
    "dense": seeded(2, 3, 8),
    "one row": seeded(8),
    "no row": seeded(0, 8),
    "transposed": seeded(8, 6).t(),
    "expanded": seeded(1, 1).expand(6, 8),
    "every other row": seeded(10, 8)[::2],
    "negative": NEGATIVE,
    "zero": ZERO,
}


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS)
def test_strides(x: Tensor, weight: Tensor) -> None:
    y = packed_linear(x, pack_weight(weight), NEGATIVE[:, 0])
    assert y.shape == (*x.shape[:-1], 16)
    assert_within_dtype_error(y, matmul64(x + 0, weight + 0, NEGATIVE[:, 0] + 0), torch.float32, reduced_over=8)


class Scaled(Tensor):
    """A class whose functions do more than Tensor's, as if its memory held other values."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert len(types) >= 1
        return super().__torch_function__(func, types, args, kwargs or {})


def test_arguments() -> None:
    packed, x = pack_weight(seeded(32, 8)), seeded(2, 8)
    with pytest.raises(TypeError, match="one dtype"):
        packed_linear(x.bfloat16(), packed)
    with pytest.raises(TypeError, match="one dtype"):
        packed_linear(x, packed, seeded(32).bfloat16())
    with pytest.raises(TypeError, match="not a plain tensor"):
        packed_linear(x.as_subclass(Scaled), packed)
    with pytest.raises(ValueError, match=r"does not fit the packed weight \[32, 8\]"):
        packed_linear(seeded(2, 9), packed)
    with pytest.raises(ValueError, match=r"does not fit the packed weight \[32, 8\]"):
        packed_linear(seeded(2, 7, dtype=torch.bfloat16), packed.new_empty(2, 4, 16, 2, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="one element per column"):
        packed_linear(x, packed, seeded(31))
    with pytest.raises(ValueError, match="no derivative"):
        packed_linear(x.clone().requires_grad_(), packed)
    w = seeded(16, 2)
    for weight, reason in (
        (seeded(16), "a multiple of 16 rows$"),
        (seeded(15, 2), "a multiple of 16 rows$"),
        (seeded(16, 3, dtype=torch.bfloat16), "of an even length"),
        (w.half(), "float16"),
        (w.to("meta"), "on meta"),
        (w.as_subclass(Scaled), "not a plain tensor"),
    ):
        assert re.search(reason, reason_not_packable(weight))
        with pytest.raises(ValueError, match="pack_weight: "):
            pack_weight(weight)


def test_compiled() -> None:
    packed, x, bias = pack_weight(seeded(32, 8)), seeded(2, 8), seeded(32)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(x: Tensor) -> Tensor:
        return packed_linear(x * 2, packed, bias) + 1

    with torch.no_grad():
        assert torch.equal(layer(x), packed_linear(x * 2, packed, bias) + 1)
    with pytest.raises(Exception, match="no derivative"):  # the compiler's error, with ours in it
        layer(x.clone().requires_grad_()).sum().backward()
    torch.library.opcheck(torch.ops.fused_tp.packed_linear.default, (x, packed, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(dtype: torch.dtype, offset: float) -> None:
    for shape in ((1, 8), (3, 5, 33), (300, 160)):
        x, residual, weight = (seeded(*s, dtype=dtype, seed=i) for i, s in enumerate((shape, shape, shape[-1:])))
        total = (x.double() + residual.double()).to(dtype)
        assert supports_rms_norm(x, weight, residual)
        kept = x.clone()
        y = rms_norm(x, weight, 1e-6, weight_offset=offset)
        assert torch.equal(x, kept)
        assert_within_dtype_error(y, rms_norm64(x, weight.double() + offset, 1e-6), dtype, reduced_over=shape[-1])
        kept_residual = residual.clone()
        normed, summed = add_rms_norm(x, residual, weight, 1e-6, weight_offset=offset)
        assert torch.equal(x, kept) and torch.equal(residual, kept_residual)
        assert_within_dtype_error(summed, total.double(), dtype, reduced_over=2)
        reference = rms_norm64(total, weight.double() + offset, 1e-6)
        assert_within_dtype_error(normed, reference, dtype, reduced_over=shape[-1], roundings=2)
    assert not supports_rms_norm(x.t(), weight)
    assert not supports_rms_norm(x, weight.float() if dtype is not torch.float32 else weight.double())
    assert not supports_rms_norm(x, weight, residual.t())
    with torch.enable_grad():
        assert not supports_rms_norm(x, weight.clone().requires_grad_())


OPENMP = """
import os, torch
from fused_tp import _core
from fused_tp.ops.packed_linear import pack_weight, packed_linear
torch.set_num_threads(3)
torch.randn(1 << 20).sin()  # starts OpenMP's threads
x, weight = torch.randn(4, 512), torch.randn(2048, 512)
num_threads = lambda: len(os.listdir("/proc/self/task"))
before = num_threads()
assert _core.use_openmp_threads(True)
by_openmp = packed_linear(x, pack_weight(weight))
assert num_threads() == before
assert not _core.use_openmp_threads(False)
assert torch.equal(packed_linear(x, pack_weight(weight)), by_openmp)
assert num_threads() > before
"""


def test_openmp_threads() -> None:
    """An engine pins OpenMP's threads to its cores: no others may be created, as they would share one core."""
    subprocess.run([sys.executable, "-c", OPENMP], check=True, env=dict(os.environ, OMP_NUM_THREADS="3"), timeout=120)
