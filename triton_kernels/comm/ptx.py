"""What depends on the maker of the GPU: time, barriers and fences, and sums and copies in an NVSwitch, by inline PTX.

A multicast address stands for the same place in the memory of all ranks. `multimem.ld_reduce` of it reads the sum of
what lies there, which the switch adds in fp32, in any order, and rounds to the terms' dtype; `multimem.st` writes to
all ranks. sm_90 and later, 16-bit dtypes here. The interpreter has no PTX: a kernel calls these behind a constexpr that
is False there.

Such a place has two addresses, this one and each rank's own: two proxies of the memory model. An `alias_fence` stands
between accesses by one and by the other, beside the flag that orders the ranks.

Source: NVIDIA, "Parallel Thread Execution ISA", multimem.ld_reduce, multimem.st, fence.proxy.alias (sm_90).
"""

import time

import triton
import triton.language as tl

from ..language import INTERPRETED, rounded

if INTERPRETED.value:

    def now_ns() -> int:
        return time.monotonic_ns()

    def pause() -> None:
        # Ranks are processes that share the cores: one that waits must let the others run.
        time.sleep(200e-6)

else:
    from triton.language.extra.cuda import globaltimer

    @triton.jit
    def now_ns():
        """One clock for all SMs of a GPU. Threads of a program may read different times: see `signals.clock`."""
        return globaltimer()

    @triton.jit
    def pause():
        """Nothing: a poll is a round trip to L2, and flags usually arrive within a few of them."""
        return


WORDS = tl.constexpr(4)  # of 32 bits, that a thread moves at once


@triton.jit
def thread_barrier():
    """`tl.debug_barrier`, hidden from Triton, which does not pipeline a loop that has one.

    Triton keeps loads behind a barrier. This one orders stores before a flag, and no load.
    """
    if INTERPRETED:
        tl.debug_barrier()
    else:
        tl.inline_asm_elementwise("bar.sync 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def alias_fence():
    """Orders this thread's accesses by multicast addresses and those by a rank's own."""
    tl.inline_asm_elementwise(
        "fence.proxy.alias; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )  # fmt: skip


@triton.jit
def async_fence():
    """Orders loads by TMA, which are of the async proxy, behind what this thread has waited for. sm_90 and later."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )  # fmt: skip


@triton.jit
def packets(address, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Addresses of the 16 bytes that each thread moves at once, of BLOCK_M x BLOCK_N elements of 16 bits."""
    COUNT: tl.constexpr = BLOCK_M * BLOCK_N // (2 * WORDS)
    return address + tl.arange(0, COUNT).to(tl.int64) * (4 * WORDS)


@triton.jit
def multimem_sum(address, ELEMENT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """fp32 [BLOCK_M, BLOCK_N]: the sum over ranks of the elements at a multicast address, rounded to ELEMENT."""
    places = packets(address, BLOCK_M, BLOCK_N)
    if ELEMENT == tl.bfloat16:
        a, b, c, d = tl.inline_asm_elementwise(
            "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {$0, $1, $2, $3}, [$4];",
            "=r,=r,=r,=r,l", [places], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2 {$0, $1, $2, $3}, [$4];",
            "=r,=r,=r,=r,l", [places], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    # [.., 2, 2]: a b, c d, in the order in which they lie.
    words = tl.join(tl.join(a, c), tl.join(b, d))
    low = words.to(tl.int16).to(ELEMENT, bitcast=True)
    high = (words >> 16).to(tl.int16).to(ELEMENT, bitcast=True)
    return tl.reshape(tl.join(low, high), (BLOCK_M, BLOCK_N)).to(tl.float32)


@triton.jit
def multimem_store(address, values, ELEMENT: tl.constexpr):
    """Writes `values`, rounded to ELEMENT, to a multicast address: to all ranks."""
    places = packets(address, values.shape[0], values.shape[1])
    bits = rounded(values, ELEMENT).to(tl.int16, bitcast=True)
    low, high = tl.split(tl.reshape(bits, (places.shape[0], 2, 2, 2)))
    words = (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    even, odd = tl.split(words)
    a, c = tl.split(even)
    b, d = tl.split(odd)
    tl.inline_asm_elementwise(
        "multimem.st.relaxed.sys.global.v4.f32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0;",
        "=r,l,r,r,r,r", [places, a, b, c, d], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
