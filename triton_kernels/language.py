"""Helpers for all kernels, and workarounds for bugs of Triton's interpreter (`TRITON_INTERPRET=1`)."""

import re

import triton
import triton.language as tl

from .cache_keys import fix_cache_keys


def interpreter_obstacle() -> str | None:
    """Reason why the installed numpy cannot interpret kernels, or None. Compiled kernels do not use numpy."""
    import numpy

    def version(text: str) -> tuple[int, ...]:
        return tuple(int(number) for number in re.findall(r"\d+", text)[:2])

    if version(triton.__version__) < (3, 7) and version(numpy.__version__) >= (2, 4):
        return (
            f"Triton {triton.__version__} interprets kernels with numpy before 2.4 only, and numpy is "
            f"{numpy.__version__}: pip install 'numpy<2.4', or Triton 3.7"
        )
    return None


# Read at import, when @triton.jit reads it too. (knobs.runtime.interpret is TRITON_INTERPRET=1.)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
if INTERPRETED.value and (_why := interpreter_obstacle()):
    raise ImportError(f"{_why}.")


@triton.jit
def zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """fp32 zeros [ROWS, COLUMNS]. (A field of a constexpr stays constexpr as an argument, but not inside a tuple.)"""
    return tl.zeros((ROWS, COLUMNS), dtype=tl.float32)


@triton.jit
def rounded(values, DTYPE: tl.constexpr):
    """fp32 `values` rounded to DTYPE, to the nearest even.

    On the GPU `.to` rounds. In the interpreter (Triton 3.6, 3.7) it truncates bf16, so the bits are rounded here. A NaN
    keeps its sign and top bits; one bit of its mantissa is set, so that it stays NaN.
    """
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(values == values, nearest, bits | 0x400000)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return values.to(DTYPE)


@triton.jit
def dot(x, w, total, C: tl.constexpr):
    """total + x @ w in fp32, multiplied in the precision C.PRECISION of the kernel's constants.

    The argument is C, not the string: Triton 3.6 cannot pass a string from one function to another.

    The interpreter (Triton 3.6, 3.7) stores bf16 as integers, and its dot multiplies these, so the operands are
    converted to fp32 first. That is exact; products of 8 and 11 bit mantissas are exact in fp32 on the GPU too.
    """
    if INTERPRETED:
        x = x.to(tl.float32)
        w = w.to(tl.float32)
    return tl.dot(x, w, total, input_precision=C.PRECISION)


@triton.jit
def halves(values):
    """(left, right) columns of a tile. Storing them in turn needs the shared memory and registers of one half."""
    pairs = tl.reshape(values, (values.shape[0], 2, values.shape[1] // 2))
    return tl.split(tl.permute(pairs, (0, 2, 1)))


@triton.jit
def or_nan(values, good):
    """`values` if `good`, else NaN: a result whose input did not arrive is never silently wrong."""
    return tl.where(good, values, float("nan"))


fix_cache_keys(__name__)
