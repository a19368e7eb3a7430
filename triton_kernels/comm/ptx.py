"""What depends on the maker of the GPU: time, barriers and fences by inline PTX, or for the interpreter."""

import time

import triton
import triton.language as tl

from ..cache_keys import fix_cache_keys
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
        """One clock for all SMs of a GPU. Threads of a program may read different times: see `signals.time_at`."""
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


@triton.jit
def store_release(word, value, wanted):
    """Stores `value` in the int64 `word`, at any rank, if `wanted`: by one thread, a release for the system.

    A store, not an atomic operation: links without atomics carry it, and no answer of the peer's is waited for.
    """
    if INTERPRETED:
        if wanted:
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
            [word, tl.cast(value, tl.int64), tl.cast(wanted, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def store_release_all(table, offset, value, WORLD: tl.constexpr):
    """Stores `value` in the int64 `offset` bytes behind each of the WORLD addresses in `table`, by a release each.

    One thread for each (a program has 128 or more), at the same time: their fences are one, where stores one after the
    other have one each.
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
def all_reached(flags, value, but, WORLD: tl.constexpr):
    """Whether each of WORLD int64 in a row, the one of number `but` left out, is `value` or more; for all threads.

    An acquire for the system by one thread for each, at the same time, and one barrier, which also tells all threads
    what they found together: none of them can part from the others, and loads behind it stay behind it.
    """
    if INTERPRETED:
        ranks = tl.arange(0, triton.next_power_of_2(WORLD))
        asked = (ranks < WORLD) & (ranks != but)
        seen = tl.atomic_add(flags + ranks, tl.zeros_like(ranks).to(tl.int64), mask=asked, sem="acquire", scope="sys")
        return tl.min(tl.where(asked, seen, value)) >= value
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
            [flags, tl.cast(value, tl.int64), tl.cast(but, tl.int32), WORLD],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        return reached != 0


fix_cache_keys(__name__)
