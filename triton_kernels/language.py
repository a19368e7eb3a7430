"""Device functions that Triton's language lacks: rounding, products, time, and the memory order of signals.

Each has a GPU implementation, as inline PTX where Triton has no builtin, and one for Triton's interpreter
(`TRITON_INTERPRET=1`), which also works around the interpreter's bugs.
"""

import re
import time

import triton
import triton.language as tl

from .cache_keys import fix_cache_keys


def interpreter_obstacle() -> str | None:
    """Return why the installed numpy cannot interpret kernels, or None. Compiled kernels do not use numpy."""
    import numpy

    def parse_version(text: str) -> tuple[int, ...]:
        return tuple(int(number) for number in re.findall(r"\d+", text)[:2])

    if parse_version(triton.__version__) < (3, 7) and parse_version(numpy.__version__) >= (2, 4):
        return (
            f"Triton {triton.__version__} interprets kernels with numpy before 2.4 only, and numpy is "
            f"{numpy.__version__}: pip install 'numpy<2.4', or Triton 3.7"
        )
    return None


# Read at import, when @triton.jit reads it too. (knobs.runtime.interpret is TRITON_INTERPRET=1.)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
if INTERPRETED.value and (_obstacle := interpreter_obstacle()):
    raise ImportError(f"{_obstacle}.")


@triton.jit
def zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return fp32 zeros [ROWS, COLUMNS]. (A field of a constexpr is one as an argument, but not inside a tuple.)"""
    return tl.zeros((ROWS, COLUMNS), dtype=tl.float32)


@triton.jit
def rounded(values, DTYPE: tl.constexpr):
    """Return fp32 `values` rounded to DTYPE, to the nearest even.

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
def dot(x, w, acc, C: tl.constexpr):
    """Return acc + x @ w in fp32, multiplied in the precision C.PRECISION of the kernel's constants.

    The argument is C, not the string: Triton 3.6 cannot pass a string from one function to another.

    The interpreter (Triton 3.6, 3.7) stores bf16 as integers, and its dot multiplies these, so the operands are
    converted to fp32 first. That is exact; products of 8 and 11 bit mantissas are exact in fp32 on the GPU too.
    """
    if INTERPRETED:
        x = x.to(tl.float32)
        w = w.to(tl.float32)
    return tl.dot(x, w, acc, input_precision=C.PRECISION)


@triton.jit
def split_columns(values):
    """Return the (left, right) columns of a tile. Storing them in turn takes shared memory and registers of a half."""
    pairs = tl.reshape(values, (values.shape[0], 2, values.shape[1] // 2))
    return tl.split(tl.permute(pairs, (0, 2, 1)))


@triton.jit
def or_nan(values, is_valid):
    """Return `values` if `is_valid`, else NaN: a result whose input did not arrive is never silently wrong."""
    return tl.where(is_valid, values, float("nan"))


# -- time, barriers and memory order -----------------------------------------------------------------------------------

if INTERPRETED.value:

    def now_ns() -> int:
        return time.monotonic_ns()

    def pause() -> None:
        # Ranks are processes that share CPU cores: a waiting rank must let the others run.
        time.sleep(200e-6)

else:
    from triton.language.extra.cuda import globaltimer

    @triton.jit
    def now_ns():
        """Return the time in ns, one clock for all SMs of a GPU. Threads may read different times: see `signals`."""
        return globaltimer()

    @triton.jit
    def pause():
        """Do nothing: a poll is a round trip to L2, and flags usually arrive within a few polls."""
        return


@triton.jit
def thread_barrier():
    """`tl.debug_barrier`, hidden from Triton, which does not pipeline a loop with a barrier.

    Triton keeps loads behind a barrier that it knows. This one orders stores before a flag, but no loads.
    """
    if INTERPRETED:
        tl.debug_barrier()
    else:
        tl.inline_asm_elementwise("bar.sync 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def async_fence():
    """Order TMA loads, which use the async proxy, after the waits of this thread. sm_90 and later."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )  # fmt: skip


@triton.jit
def store_release(word, value, is_enabled):
    """Store `value` in the int64 `word`, on any rank, if `is_enabled`: one thread, with release at system scope.

    A store, not an atomic: it works over links without atomics, and does not wait for a reply of the peer.
    """
    if INTERPRETED:
        if is_enabled:
            tl.atomic_xchg(word, value, sem="release", scope="sys")
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred one, wanted;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.ne.b32 wanted, $3, 0;
            setp.eq.and.b32 one, thread, 0, wanted;
            @one st.release.sys.global.b64 [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,l,r",
            [word, tl.cast(value, tl.int64), tl.cast(is_enabled, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def store_release_all(table, offset, value, WORLD: tl.constexpr):
    """Store `value` in the int64 `offset` bytes past each of the WORLD addresses in `table`, with a release each.

    Each address has its own thread (a program has 128 or more). The fences of these threads wait at the same time;
    those of successive stores would wait one after the other.
    """
    if INTERPRETED:
        ranks = tl.arange(0, triton.next_power_of_2(WORLD))
        words = (tl.load(table + ranks, mask=ranks < WORLD, other=0) + offset).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(words, value, mask=ranks < WORLD, sem="release", scope="sys")
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred mine;
            .reg .b32 thread;
            .reg .b64 word;
            mov.u32 thread, %tid.x;
            setp.lt.u32 mine, thread, $4;
            mad.wide.u32 word, thread, 8, $1;
            @mine ld.global.b64 word, [word];
            add.s64 word, word, $2;
            @mine st.release.sys.global.b64 [word], $3;
            mov.u32 $0, 0;
            }""",
            "=r,l,l,l,n",
            [table, tl.cast(offset, tl.int64), tl.cast(value, tl.int64), WORLD],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def all_reached(flags, value, excluded, WORLD: tl.constexpr):
    """True, for all threads, if each of WORLD consecutive int64, except the one at `excluded`, is `value` or more.

    Each word has its own thread, which loads it with acquire at system scope. One barrier combines the results for all
    threads, so that they cannot diverge, and later loads stay behind the barrier.
    """
    if INTERPRETED:
        ranks = tl.arange(0, triton.next_power_of_2(WORLD))
        is_checked = (ranks < WORLD) & (ranks != excluded)
        values = tl.atomic_add(
            flags + ranks, tl.zeros_like(ranks).to(tl.int64), mask=is_checked, sem="acquire", scope="sys"
        )
        return tl.min(tl.where(is_checked, values, value)) >= value
    else:
        reached = tl.inline_asm_elementwise(
            """{
            .reg .pred asked, reached;
            .reg .b32 thread;
            .reg .b64 word, seen;
            mov.u32 thread, %tid.x;
            setp.lt.u32 asked, thread, $4;
            setp.ne.and.s32 asked, thread, $3, asked;
            mad.wide.u32 word, thread, 8, $1;
            mov.b64 seen, $2;
            @asked ld.acquire.sys.global.b64 seen, [word];
            setp.ge.s64 reached, seen, $2;
            bar.red.and.pred reached, 0, reached;
            selp.u32 $0, 1, 0, reached;
            }""",
            "=r,l,l,r,n",
            [flags, tl.cast(value, tl.int64), tl.cast(excluded, tl.int32), WORLD],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        return reached != 0


fix_cache_keys(__name__)
