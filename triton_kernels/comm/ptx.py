"""What depends on the maker of the GPU: time, barriers and fences by inline PTX, or for the interpreter."""

import time

import triton
import triton.language as tl

from ..language import INTERPRETED

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
def async_fence():
    """Orders loads by TMA, which are of the async proxy, behind what this thread has waited for. sm_90 and later."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )  # fmt: skip
