"""What kernels need besides Triton's language, and what its interpreter (`TRITON_INTERPRET=1`) gets wrong."""

import re

import triton
import triton.language as tl

from .cache_keys import fix_cache_keys


def interpreter_obstacle() -> str | None:
    """Why kernels cannot be interpreted with the numpy that is installed, or None. Compiled ones need nothing of it."""
    import numpy

    def version(text: str) -> tuple[int, ...]:
        return tuple(int(number) for number in re.findall(r"\d+", text)[:2])

    if version(triton.__version__) < (3, 7) and version(numpy.__version__) >= (2, 4):
        return (
            f"Triton {triton.__version__} interprets kernels with numpy before 2.4 only, and numpy is "
            f"{numpy.__version__}: pip install 'numpy<2.4', or Triton 3.7"
        )
    return None


# Decided when @triton.jit is, at import. (knobs.runtime.interpret is TRITON_INTERPRET=1.)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
if INTERPRETED.value and (_why := interpreter_obstacle()):
    raise ImportError(f"{_why}.")


@triton.jit
def zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """fp32 [ROWS, COLUMNS] of zeros. (A field of a constexpr is a constexpr as an argument, not inside of a tuple.)"""
    return tl.zeros((ROWS, COLUMNS), dtype=tl.float32)


@triton.jit
def rounded(values, DTYPE: tl.constexpr):
    """fp32 `values` in DTYPE, to the nearest even.

    `.to` does that on the GPU. The interpreter's (Triton 3.6, 3.7) truncates bf16, so there the bits are rounded here;
    NaN keeps its sign and top bits, of which one must stay set.
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
    """total + x @ w in fp32, in the precision that the constants of a kernel name (C.PRECISION).

    It takes all of C, not the string in it: Triton 3.6 passes no string from one function to another.

    The interpreter keeps bf16 as the integers of its bits and its dot multiplies those (Triton 3.6, 3.7), so there the
    operands go to fp32 first: exact, and products of 8 and 11 bit mantissas are exact in fp32 on the GPU too.
    """
    if INTERPRETED:
        x = x.to(tl.float32)
        w = w.to(tl.float32)
    return tl.dot(x, w, total, input_precision=C.PRECISION)


@triton.jit
def halves(values):
    """The left and the right columns of a tile: storing them in turn takes the shared memory and registers of one."""
    pairs = tl.reshape(values, (values.shape[0], 2, values.shape[1] // 2))
    return tl.split(tl.permute(pairs, (0, 2, 1)))


@triton.jit
def or_nan(values, good):
    """`values`, or NaN where something they are made of did not arrive: no result is silently wrong."""
    return tl.where(good, values, float("nan"))


fix_cache_keys(__name__)
